"""What a fix is proposed from: an op's call in the user's source, and values around it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lowprec_check.features.fix.seen_values import SeenValue
from lowprec_check.features.fix.source_text import Edit, SourceText
from lowprec_check.schema.op_calls import PRODUCTS
from lowprec_check.schema.precisions import PRECISIONS

Seen = Mapping[ast.AST, SeenValue]

_LOW = {"float16", "bfloat16"}
_FLOATING = _LOW | {"float32"}


@dataclass
class Site:
    """The call of an op in the user's source that a finding is about."""

    source: SourceText
    node: ast.AST
    op: str
    precisions: set[str] = field(default_factory=set)
    codes: set[str] = field(default_factory=set)
    mismatch: bool = False  # whether mixed dtypes meet there
    numbers: set[float] = field(default_factory=set)  # those that become zero there, or do not fit
    device: str = "cpu"  # the kind of device that runs

    @property
    def format(self) -> tuple[float, float]:
        """The largest and the smallest normal number of the smallest range that fails."""
        formats = [PRECISIONS.get(name).format for name in self.precisions]
        limits = [(f.largest, f.smallest_normal) for f in formats if f is not None]
        return min(limits, default=(65504.0, 2.0**-14))

    @property
    def breaks(self) -> bool:
        """Whether an op fails there, or a value does not fit."""
        return any(code.startswith(("LP1", "LP2")) for code in self.codes)

    @property
    def autocasts(self) -> bool:
        """Whether a precision in which it fails is autocast."""
        return any(PRECISIONS.get(name).kind == "autocast" for name in self.precisions)

    @property
    def cast(self) -> bool:
        """Whether a precision in which it fails casts the weights."""
        return any(PRECISIONS.get(name).kind != "autocast" for name in self.precisions)


@dataclass(frozen=True)
class SourceFix:
    """What to change for a site."""

    kind: str
    why: str
    anchor: ast.AST
    widened: frozenset[ast.expr] = frozenset()  # expressions that become fp32
    back: tuple[ast.expr, str] | None = None  # an expression whose result is cast to a dtype
    edits: tuple[Edit, ...] = ()
    stays_wide: bool = False  # whether the result of the anchor is in fp32 then


def compose(source: SourceText, fixes: Iterable[SourceFix]) -> list[Edit]:
    """The edits of ``fixes``; a cast to 16 bits that another fix undoes is left out."""
    fixes = list(fixes)
    wide = {fix.anchor for fix in fixes if fix.stays_wide}
    widened = {node for fix in fixes for node in fix.widened if node not in wide}
    # where one casts back and another widens, neither is needed
    backs = dict(fix.back for fix in fixes if fix.back is not None)
    edits = [edit for fix in fixes for edit in fix.edits]
    for node in widened ^ backs.keys():
        edits += wrapped(source, node, ".float()" if node in widened else f".to({backs[node]})")
    return edits


ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)


def wrapped(source: SourceText, node: ast.expr, suffix: str) -> list[Edit]:
    """An expression with a method called on it."""
    inner, (start, end) = source.span(node), source.outer(node)
    if isinstance(node, ATOMS) or inner != (start, end):
        return [Edit(end, end, suffix, end - start)]
    return [Edit(start, start, "(", start - end), Edit(end, end, f"){suffix}", end - start)]


class Scene:
    """What a file's expressions gave in fp32, and in the precision that fails."""

    def __init__(self, source: SourceText, fp32: Seen, low: Seen) -> None:
        self.source, self.fp32, self.low = source, fp32, low

    def is_low(self, node: ast.AST) -> bool:
        """Whether it is a tensor in 16 bits, in some of its calls."""
        seen = self.low.get(node)
        return seen is not None and seen.kind == "tensor" and not _LOW.isdisjoint(seen.dtypes)

    def is_wide(self, node: ast.AST) -> bool:
        """Whether it is a tensor in fp32, in some of its calls."""
        seen = self.low.get(node)
        return seen is not None and seen.kind == "tensor" and "float32" in seen.dtypes

    def is_floating(self, node: ast.AST) -> bool:
        """Whether it is a tensor that fp32 has in fp32."""
        seen = self.fp32.get(node) or self.low.get(node)
        return seen is not None and seen.kind == "tensor" and not _FLOATING.isdisjoint(seen.dtypes)

    def may_be_low(self, node: ast.AST) -> bool:
        """Whether it is in 16 bits, or was not reached and is floating in fp32."""
        return self.is_low(node) or (node not in self.low and self.is_floating(node))

    def number(self, node: ast.AST) -> float | None:
        """Its value, if it is a number."""
        seen = self.fp32.get(node) or self.low.get(node)
        if seen is not None and seen.kind == "number":
            return seen.number
        if seen is not None:
            return None
        # an expression that was not observed may be a literal
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        return None

    def callee(self, node: ast.AST) -> SeenValue | None:
        """What a call calls."""
        if not isinstance(node, ast.Call):
            return None
        return self.low.get(node.func) or self.fp32.get(node.func)

    def arguments(self, node: ast.AST) -> list[ast.expr]:
        """All that an expression is computed from."""
        if isinstance(node, ast.Call):
            parts = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(value, ast.Starred):
                    parts.append(value.value)
                else:  # torch.cat([a, b])
                    parts += getattr(value, "elts", [value])
            return parts
        if isinstance(node, ast.BinOp):
            return [node.left, node.right]
        if isinstance(node, ast.AugAssign):
            return [node.target, node.value]
        if isinstance(node, ast.UnaryOp):
            return [node.operand]
        if isinstance(node, ast.Compare):
            return [node.left, *node.comparators]
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return [node.value]
        return []

    def operands(self, node: ast.AST) -> list[ast.expr]:
        """The floating tensors among them."""
        return [each for each in self.arguments(node) if self.is_floating(each)]

    def is_torch_op(self, node: ast.AST) -> bool:
        """Whether an expression computes with torch alone, not with the user's code."""
        if not isinstance(node, ast.Call):
            return isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Subscript))
        callee = self.callee(node)
        named = callee is not None and callee.kind == "callable" and callee.name.partition(".")[0] == "torch"
        return named or (callee is not None and callee.of_torch)

    def is_product(self, node: ast.AST) -> bool:
        """Whether autocast always computes it in 16 bits: a product, a layer with weights."""
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, ast.MatMult)
        callee = self.callee(node)
        if callee is None or callee.kind == "module":
            return callee is not None and bool(callee.name)
        return bool(PRODUCTS.search(f"{callee.name}.".replace("matmul", "mm").replace("einsum", "mm")))

    def dtype_of(self, node: ast.AST) -> str | None:
        """Code for the low dtype at ``node``, from a name near it; ``None`` if there is none."""
        source, here = self.source, self.source.span(node)[0]
        function = source.around(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        statement = source.around(node, ast.stmt)
        # candidates: its own operands, its statement, then what came before, the nearest first
        inside = [each for operand in self.arguments(node) for each in ast.walk(operand)]
        earlier = [n for n in ast.walk(function or source.tree) if isinstance(n, ast.expr) and source.span(n)[0] < here]
        # the variable of a comprehension is not bound outside of it
        loops = [n.target for n in ast.walk(function or source.tree) if isinstance(n, ast.comprehension)]
        bound = {name for target in loops for name in _names(target)}
        candidates: list[ast.AST] = [*self.arguments(node), *inside, *(ast.walk(statement) if statement else ())]
        candidates += sorted(earlier, key=lambda each: -source.span(each)[0])
        plain = [each for each in candidates if is_plain(each) and (each in inside or not _names(each) & bound)]
        shortest = sorted(filter(self.may_be_low, inside), key=lambda each: source.segment(each).count("."))
        for each in [*shortest, *filter(self.is_low, plain)]:
            if each in plain:
                return f"{source.segment(each)}.dtype"
        # else the weights of a module
        for each in plain:
            seen = self.low.get(each)
            if seen is not None and seen.kind == "module" and not _LOW.isdisjoint(seen.dtypes):
                return f"{source.segment(each)}.{seen.name}.dtype"
        return None


def is_plain(node: ast.AST) -> bool:
    """Whether it is a name, or an attribute of one: code that can be evaluated again."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def unused_name(source: SourceText, wanted: str) -> str:
    """A name like ``wanted`` that nothing in the file has."""
    used = _names(source.tree)
    return next(name for name in (wanted, *(f"{wanted}_{n}" for n in range(2, 1000))) if name not in used)


def torch_in(source: SourceText) -> tuple[str, tuple[Edit, ...]]:
    """The name of torch in a file, and the edit that imports it where it has none."""
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "torch" or (alias.name.startswith("torch.") and not alias.asname):
                    return alias.asname or "torch", ()
    # before the first import that may stand there, else behind the docstring
    imports = [n for n in source.tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]
    first = next((n for n in imports if getattr(n, "module", "") != "__future__"), None)
    if first is not None:
        return "torch", (source.line_before(first, "import torch"),)
    docstring = [n for n in source.tree.body[:1] if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    behind = [*docstring, *imports]
    if behind:
        return "torch", (source.lines_behind(behind[-1], ["import torch"]),)
    return "torch", (Edit(0, 0, f"import torch{source.newline}", -(1 << 40)),)
