"""Names in printed code: those that it imports keep their meaning, a script's are its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

_OTHER = {"model": "net", "inputs": "x", "loss": "loss_function", "optimizer": "made_optimizer"}
"""By a name that is imported, the one for what the code makes of it."""


def without_rebinding(code: str) -> str:
    """``code`` with new names for what it assigns to names that it imports: ``net = model()``."""
    try:
        tree = ast.parse(code)
    except SyntaxError:  # code of another package's precision or backend
        return code
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    names = imported | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    replaced: dict[str, str] = {}
    changes: list[tuple[ast.Name, str]] = []
    for node in _names_in_order(tree):
        if isinstance(node.ctx, ast.Store) and node.id in imported and node.id not in replaced:
            other = _OTHER.get(node.id, f"{node.id}_")
            while other in names:
                other += "_"
            replaced[node.id] = other
        if node.id in replaced:
            changes.append((node, replaced[node.id]))
    return _changed(code, changes)


def with_names(code: str, names: Mapping[str, str]) -> str:
    """``code`` with expressions in place of names: ``self.net`` for ``model``."""
    try:
        nodes = list(_names_in_order(ast.parse(code)))
    except SyntaxError:
        return code
    return _changed(code, [(node, names[node.id]) for node in nodes if node.id in names])


def _changed(code: str, changes: list[tuple[ast.Name, str]]) -> str:
    lines = code.encode().split(b"\n")  # columns of a syntax tree count bytes
    for node, text in sorted(changes, key=lambda change: (change[0].lineno, -change[0].col_offset)):
        line = lines[node.lineno - 1]
        end = node.col_offset + len(node.id.encode())
        lines[node.lineno - 1] = line[: node.col_offset] + text.encode() + line[end:]
    return b"\n".join(lines).decode()


def _names_in_order(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[ast.Name]:
    """The names in the order in which they are computed, without those local to a function."""
    if isinstance(node, ast.Name):
        if node.id not in local:
            yield node
        return
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        arguments = [argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
        local = local.union(arguments)
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        stored = [name.id for part in node.generators for name in ast.walk(part.target) if isinstance(name, ast.Name)]
        local = local.union(stored)
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.For)):  # the value comes before the target
        value = node.value if isinstance(node, ast.Assign) else node.iter
        children = [value, *(child for child in children if child is not value)]
    for child in children:
        yield from _names_in_order(child, local)
