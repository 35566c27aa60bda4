"""The kinds of fixes: functions that propose changes for an op's call in the user's source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator

from lowprec_check.features.fix.fp32_fixes import custom_functions, in_fp32, scaled
from lowprec_check.features.fix.scene import Scene, Site, SourceFix, is_plain, torch_in, wrapped
from lowprec_check.features.fix.source_text import Edit, SourceText
from lowprec_check.schema.findings import WRITES_INTO
from lowprec_check.schema.precisions import FP32
from lowprec_check.schema.statements import short_op

_FACTORIES = (
    *("zeros", "ones", "full", "empty", "eye", "arange", "linspace", "logspace", "rand", "randn"),
    *("tensor", "as_tensor", "scalar_tensor", "hann_window", "hamming_window"),
)

_DTYPES = ("dtype", "float16", "bfloat16", ".half")
"""How expressions end that give a dtype."""


# -- Constants


def constants(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """A number that overflows or becomes zero in the dtype: the limit of the dtype instead."""
    largest, smallest = site.format
    torch, imports = torch_in(site.source)
    # -1e5 is one number, not a sign and a number
    inside = [n for n in ast.walk(site.node) if isinstance(n, ast.expr)]
    inside = [n for n in inside if not isinstance(site.source.parents.get(n), ast.UnaryOp)]
    inside.sort(key=site.source.span)
    for node in inside:
        number = scene.number(node)
        if number is None or isinstance(node, ast.Starred):
            continue
        if any(scene.number(part) is not None for part in scene.arguments(node)) and not isinstance(node, ast.UnaryOp):
            continue  # computed: the parts are looked at
        dtype = scene.dtype_of(site.node)
        if dtype is None:
            return
        span, text = site.source.span(node), site.source.segment(node)
        if largest < abs(number) < float("inf"):
            end, choose = ("min", "max") if number < 0 else ("max", "min")
            limit = f"{torch}.finfo({dtype}).{end}"
            why = f"{number:g} does not fit: use the limit of the dtype"
            new = limit
            if abs(number) < FP32.largest:  # else fp32 would compute with another number
                new = f"{choose}({text}, {limit})"
            yield SourceFix("constant", why, node, edits=(Edit(*span, new), *imports))
        elif number in site.numbers and 0 < abs(number) < smallest:
            why = f"{number:g} becomes zero: at least the smallest normal number of the dtype"
            edit = Edit(*span, f"max({text}, {torch}.finfo({dtype}).tiny)")
            yield SourceFix("constant", why, node, edits=(edit, *imports))
    yield from _default_argument(site, scene, torch, imports)


def _default_argument(site: Site, scene: Scene, torch: str, imports: tuple[Edit, ...]) -> Iterator[SourceFix]:
    """An ``eps`` that a function of torch has by default, and that becomes zero."""
    node, callee = site.node, scene.callee(site.node)
    dtype = scene.dtype_of(node)
    if not isinstance(node, ast.Call) or callee is None or dtype is None or not callee.name.startswith("torch."):
        return
    module, _, name = callee.name.rpartition(".")
    try:
        parameters = inspect.signature(getattr(sys.modules.get(module), name)).parameters.values()
    except (AttributeError, TypeError, ValueError):  # a function in C has no signature
        return
    for parameter in parameters:
        value = parameter.default
        if isinstance(value, float) and value in site.numbers and parameter.name not in {k.arg for k in node.keywords}:
            why = f"the default {parameter.name} of {value:g} becomes zero"
            limit = f"max({value!r}, {torch}.finfo({dtype}).tiny)"
            edits = (keyword(site.source, node, f"{parameter.name}={limit}"), *imports)
            yield SourceFix("constant", why, node, edits=edits)


def keyword(source: SourceText, call: ast.Call, text: str) -> Edit:
    """``text`` as the last argument of a call."""
    values = [*call.args, *(each.value for each in call.keywords)]
    end = max((source.outer(value)[1] for value in values), default=source.call_opens(call) + 1)
    return Edit(end, end, f"{', ' if values else ''}{text}", 1 << 30)


# -- Mixed dtypes


def factories(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """A tensor always made in fp32, which then meets 16 bits: the dtype of the input."""
    if not site.mismatch:
        return
    function = site.source.around(site.node, (ast.FunctionDef, ast.AsyncFunctionDef))
    here, made = site.source.span(site.node), list[ast.Call]()
    for node in ast.walk(function or site.source.tree):
        if isinstance(node, ast.Call) and site.source.span(node)[0] < here[1]:
            callee, seen = scene.callee(node), scene.low.get(node)
            if callee is None or callee.kind != "callable" or callee.name.rpartition(".")[2] not in _FACTORIES:
                continue
            # one that gets 16 bits makes them too
            if seen is not None and seen.dtypes == ("float32",) and not any(map(scene.is_low, node.args)):
                made.append(node)
    for node in made:
        dtype = scene.dtype_of(node)
        if dtype is None:
            continue
        argument = next((k.value for k in node.keywords if k.arg == "dtype"), None)
        if argument is not None:
            edit = Edit(*site.source.span(argument), dtype)
        else:
            edit = keyword(site.source, node, f"dtype={dtype}")
        yield SourceFix("dtype", "made in the dtype of the input, not always in fp32", node, edits=(edit,))


def written(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """What is written into a tensor of another dtype: ``out[mask] = value.to(out.dtype)``."""
    node = site.node
    if not site.mismatch or short_op(site.op).removeprefix("torch.Tensor.").removesuffix("_") not in WRITES_INTO:
        return
    statement = site.source.around(node, ast.Assign)
    if isinstance(node, ast.Subscript) and isinstance(statement, ast.Assign) and statement.targets == [node]:
        tensor, values = node.value, [statement.value]
    else:
        tensor, *values = scene.operands(node) or [ast.Constant(None)]
    if is_plain(tensor) and values:
        edits = wrapped(site.source, values[-1], f".to({site.source.segment(tensor)}.dtype)")
        yield SourceFix("cast", "cast to the dtype of the tensor that it is written to", node, edits=tuple(edits))


def casts(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """A tensor in fp32 that meets 16 bits: cast where they meet."""
    if not site.mismatch:
        return
    node, callee = site.node, scene.callee(site.node)
    wide = [each for each in scene.operands(node) if scene.is_wide(each)]
    low = [each for each in scene.operands(node) if scene.is_low(each) and each not in wide]
    # the dtype that it meets: that of a module's weights, or of another operand
    dtype = None
    if isinstance(node, ast.Call) and callee is not None and callee.kind == "module" and callee.name:
        dtype = f"{site.source.segment(node.func)}.{callee.name}.dtype"
        wide = wide or [each for each in scene.operands(node) if each not in scene.low]
        if callee.dtypes == ("float32",) and not wide:
            wide = low  # weights that stay in fp32 outside of autocast
    elif plain := next(filter(is_plain, low), None):
        dtype = f"{site.source.segment(plain)}.dtype"
    else:
        dtype = scene.dtype_of(node)
    if wide and dtype is not None:
        edits = [edit for each in wide for edit in wrapped(site.source, each, f".to({dtype})")]
        yield SourceFix("cast", "cast to the dtype that it meets", node, edits=tuple(edits))
    if low and wide:
        yield SourceFix("cast", "computed in fp32, as its other operand is", node, frozenset(low))


def kept_in_fp32(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """A cast to 16 bits, or a tensor that is made in them, and loses digits there: in fp32."""
    node, source = site.node, site.source
    if site.mismatch or not isinstance(node, ast.Call):
        return
    why = "kept in fp32, where its digits fit"
    if isinstance(node.func, ast.Attribute) and _casts_only(node):
        behind = source.outer(node.func.value)[1]
        edit = Edit(behind, source.span(node)[1], ".float()")
        yield SourceFix("cast", why, node, edits=(edit,))
    callee, dtype = scene.callee(node), next((k.value for k in node.keywords if k.arg == "dtype"), None)
    if callee is not None and callee.name.rpartition(".")[2] in _FACTORIES and dtype is not None:
        torch, imports = torch_in(source)
        yield SourceFix("dtype", why, node, edits=(Edit(*source.span(dtype), f"{torch}.float32"), *imports))


def _casts_only(call: ast.Call) -> bool:
    """Whether a method only casts: ``x.half()``, ``x.to(y.dtype)``, ``x.type_as(y)``."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    if name in ("half", "bfloat16"):
        return not values
    if name == "type_as":
        return len(values) == 1
    # another argument may be a device
    return name in ("to", "type") and len(values) == 1 and ast.unparse(values[0]).endswith(_DTYPES)


FIX_KINDS: tuple[Callable[[Site, Scene], Iterator[SourceFix]], ...] = (
    constants,
    written,
    factories,
    casts,
    scaled,
    custom_functions,
    kept_in_fp32,
    in_fp32,
)
"""In the order in which they are tried: what says best what was meant comes first."""


def proposals(site: Site, scene: Scene) -> list[SourceFix]:
    """All that could be changed for ``site``, in the order in which it is tried."""
    return [fix for kind in FIX_KINDS for fix in kind(site, scene)]
