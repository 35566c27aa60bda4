"""Notes what the expressions of the user's files give while the model runs, evaluated as before."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import math
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.engine.model.patched_source import Rewrite
from lowprec_check.errors import encodable
from lowprec_check.features.fix.seen_values import SeenValue

_NAME = "__lowprec_check_saw__"

MOST_LOOKS = 64
"""Values of an expression whose magnitudes are taken."""

_seen: dict[str, dict[str, SeenValue]] = {}
_looks: dict[tuple[str, str], int] = {}


def start_probing() -> Rewrite:
    """Forget what was noted; returns what makes the code of files note it."""
    _seen.clear()
    _looks.clear()
    setattr(builtins, _NAME, _saw)
    return with_probes


def probed() -> dict[str, dict[str, SeenValue]]:
    """What was noted since, by file and by the place of the expression, ``25:17-25:55``."""
    return {file: dict(values) for file, values in _seen.items()}


def with_probes(path: str, tree: ast.Module) -> ast.Module:
    """Every expression inside functions notes what it gives."""
    changed: ast.Module = ast.fix_missing_locations(_Probes(path).visit(tree))
    return changed


class _Probes(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path, self._depth = path, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # TorchScript compiles the source of a function that it decorates
            if not any("script" in ast.unparse(decorator) for decorator in node.decorator_list):
                node.body = [self._inside(statement) for statement in node.body]
            return node
        # Outside functions, only what lambdas compute
        if not self._depth:
            if not isinstance(node, ast.Lambda):
                return self.generic_visit(node)
            node.body = self._inside(node.body)
            return node
        if isinstance(node, (ast.JoinedStr, ast.Constant, ast.AnnAssign)):
            return node
        is_target = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        function = getattr(node, "func", None)
        if not isinstance(function, ast.Name) or function.id not in ("super", "locals"):
            node = self.generic_visit(node)  # these two look at the frame
        if not isinstance(node, ast.expr) or is_target or isinstance(node, _NOT_VALUES):
            return node
        place = f"{node.lineno}:{node.col_offset}-{node.end_lineno}:{node.end_col_offset}"
        called = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(self._path), ast.Constant(place), node], [])
        return ast.copy_location(called, node)

    def _inside(self, node: ast.AST) -> Any:
        """Visit a part of a function."""
        self._depth += 1
        changed = self.visit(node)
        self._depth -= 1
        return changed


_NOT_VALUES = (ast.Starred, ast.Slice, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.GeneratorExp)


def _saw(path: str, place: str, value: Any) -> Any:
    looks = _looks.get((path, place), 0)
    if looks >= MOST_LOOKS:
        return value
    _looks[path, place] = looks + 1
    values = _seen.setdefault(path, {})
    new = SeenValue(kind="other")
    # Looking at a tensor must not be an op of the model
    no_dispatch, no_functions = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass()
    with contextlib.suppress(Exception), no_dispatch, no_functions, torch.no_grad():
        new = _described(value)
    earlier = values.get(place)
    if earlier is not None and earlier.kind == new.kind == "tensor":
        dtypes = tuple(sorted({*earlier.dtypes, *new.dtypes}))
        absmax = max((seen.absmax for seen in (earlier, new) if seen.absmax is not None), default=None)
        new = msgspec.structs.replace(new, dtypes=dtypes, absmax=absmax)
    values[place] = new
    return value


def _described(value: Any) -> SeenValue:
    if isinstance(value, Tensor):
        # The largest finite magnitude, of plain floating tensors with values
        absmax = None
        if value.is_floating_point() and value.layout == torch.strided and value.numel() and not value.is_meta:
            magnitude = value.detach().to(torch.float32).abs()
            largest = float(magnitude.nan_to_num(0.0, 0.0, 0.0).max())
            absmax = largest if math.isfinite(largest) else None
        return SeenValue(kind="tensor", dtypes=(str(value.dtype)[6:],), absmax=absmax)
    if isinstance(value, nn.Module):
        name, weight = next(((n, p) for n, p in value.named_parameters() if p.is_floating_point()), ("", None))
        dtypes, buffers = () if weight is None else (str(weight.dtype)[6:],), tuple(n for n, _ in value.named_buffers())
        native, training = type(value).__module__.startswith("torch."), value.training
        return SeenValue(kind="module", name=name, dtypes=dtypes, parts=buffers, of_torch=native, training=training)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        fits = isinstance(value, float) or abs(value) < 2**63
        return SeenValue(kind="number", number=float(value) if fits and math.isfinite(value) else None)
    if isinstance(value, (tuple, list)) and 0 < len(value) <= 16:
        parts = tuple(str(part.dtype)[6:] if isinstance(part, Tensor) else "" for part in value)
        return SeenValue(kind="tuple", parts=parts)
    if not callable(value):
        return SeenValue(kind="other")
    # Where a function is defined; of a method of a tensor, `torch.Tensor.pow`
    if isinstance(getattr(value, "__self__", None), Tensor):
        return SeenValue(kind="callable", name=encodable(f"torch.Tensor.{getattr(value, '__name__', '')}"))
    module = getattr(value, "__module__", None)
    if inspect.isfunction(value):
        module = inspect.unwrap(value).__module__
    name = getattr(value, "__name__", type(value).__name__)
    if module is None and getattr(torch, name, None) is value:
        module = "torch"
    module = (module or "").replace("torch._C._", "torch.")
    return SeenValue(kind="callable", name=encodable(f"{module}.{name}"))
