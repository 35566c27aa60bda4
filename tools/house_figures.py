"""Prints the size of the code: lines, modules, longest chain of imports, modules with one importer, helpers used once.

``python tools/house_figures.py [CHECKOUT]``; imports inside functions count, those for type checkers do not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import grimp


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Each function and method, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """In lines, with its signature."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def called_once(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Private functions and methods that their file names once, beside the definition."""
    names = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    names += Counter(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return (
        function
        for function in functions(tree)
        if function.name.startswith("_") and not function.name.startswith("__") and names[function.name] == 1
    )


def longest_chain(imports: Callable[[str], set[str]], modules: list[str]) -> list[str]:
    """The longest chain of modules, each of which imports the next; a cycle is cut where it closes."""
    open_modules: set[str] = set()

    @functools.cache
    def below(module: str) -> tuple[str, ...]:
        open_modules.add(module)
        found = max((below(other) for other in sorted(imports(module) - open_modules)), key=len, default=())
        open_modules.discard(module)
        return (module, *found)

    return list(max(map(below, modules), key=len))


def main() -> None:
    """Print the figures of a checkout, by default this one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parent.parent)
    checkout = parser.parse_args().checkout.resolve()
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)
    sys.setrecursionlimit(10_000)
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((checkout / "lowprec_check").rglob("*.py"))}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    trees = [ast.parse(text) for text in texts.values()]
    graph = grimp.build_graph("lowprec_check", exclude_type_checking_imports=True, cache_dir=None)
    modules = sorted(graph.modules)
    one_importer = [name for name in modules if len(graph.find_modules_that_directly_import(name)) == 1]
    sizes = sorted((length(function), function.name) for tree in trees for function in functions(tree))
    once = [length(function) for tree in trees for function in called_once(tree)]
    longest = max(lines, key=lambda path: lines[path])
    chain = longest_chain(graph.find_modules_directly_imported_by, modules)
    print(f"{len(lines)} files in {len({path.parent for path in lines})} packages, {sum(lines.values())} lines")
    print(f"file: median {statistics.median(lines.values()):.0f} lines, longest {lines[longest]} ({longest.name})")
    print(
        f"function: {len(sizes)}, median {statistics.median(size for size, _ in sizes):.0f} lines, longest {sizes[-1]}"
    )
    print(f"modules with one importer: {len(one_importer)}")
    print(f"private functions with one call site: {len(once)}, {sum(once)} lines")
    print(f"longest import chain: {len(chain)} modules\n    " + "\n    ".join(chain))


if __name__ == "__main__":
    main()
