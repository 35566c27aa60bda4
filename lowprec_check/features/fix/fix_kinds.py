"""The kinds of fixes: functions that propose changes for an op's call in the user's source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence

from lowprec_check.features.fix.scene import ATOMS, Scene, Site, SourceFix, is_plain, torch_in, unused_name, wrapped
from lowprec_check.features.fix.source_text import Edit, SourceText
from lowprec_check.schema.findings import WRITES_INTO
from lowprec_check.schema.op_calls import PRODUCTS
from lowprec_check.schema.precisions import FP32
from lowprec_check.schema.statements import short_op


def scaled(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """A product that overflows before a division: operand and divisor times a power of two."""
    node, parent = site.node, site.source.parents.get(site.node)
    seen, largest = scene.fp32.get(site.node), site.format[0]
    if not isinstance(node, ast.expr) or not isinstance(parent, ast.BinOp) or parent.left is not node:
        return
    operands = scene.operands(node)
    divides = isinstance(parent.op, ast.Div) and scene.number(parent.right) not in (None, 0.0)
    is_sign = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.MatMult, ast.Mult))
    is_product = is_sign or bool(PRODUCTS.search(site.op))
    if not (divides and is_product and operands and seen and seen.absmax and seen.absmax > largest) or largest > 1e6:
        return
    if isinstance(node, ast.Call) and (scene.callee(node) or seen).kind == "module":
        return
    # with room for a factor of 8
    power, top = 0, seen.absmax
    while top > largest / 8:
        power, top = power + 1, top / 2
    first = operands[0]
    start, end = site.source.outer(first)
    text = f" * 2**-{power})"
    edits = [Edit(start, start, "(", start - end), Edit(end, end, text, end - start)]
    start, end = site.source.outer(parent.right)
    edits += [Edit(start, start, "(", start - end), Edit(end, end, text, end - start)]
    why = f"multiplied by 2**-{power} before, and the divisor with it, which is exact"
    yield SourceFix("scale", why, node, edits=tuple(edits))


def custom_functions(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """An op in a ``torch.autograd.Function`` under autocast: torch's own decorators."""
    del scene
    owner = site.source.around(site.node, ast.ClassDef)
    if not site.autocasts or not isinstance(owner, ast.ClassDef):
        return
    if not any("Function" in ast.unparse(base) for base in owner.bases):
        return
    torch, imports = torch_in(site.source)
    methods = {m.name: m for m in owner.body if isinstance(m, ast.FunctionDef)}
    edits = []
    decorators = {
        "forward": f'custom_fwd(device_type="{site.device}", cast_inputs={torch}.float32)',
        "backward": f'custom_bwd(device_type="{site.device}")',
    }
    for name, decorator in decorators.items():
        method = methods.get(name)
        # both are static methods, so they have a decorator already
        if method is None or not method.decorator_list:
            return
        if any("custom_" in ast.unparse(d) for d in method.decorator_list):
            return
        text = f"{site.source.indent_of(method)}@{torch}.amp.{decorator}"
        edits.append(site.source.lines_behind(method.decorator_list[-1], [text]))
    yield SourceFix("custom_fwd", "computes in fp32 under autocast", owner, edits=(*edits, *imports))


HEADROOM = 4.0  # so many times larger may the values of other inputs be


def in_fp32(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """The op or the expression around it in fp32: cast back where values fit, if anywhere."""
    source, node = site.source, site.node
    if isinstance(node, ast.AugAssign):
        yield from _augmented(site, scene)
        return
    if not isinstance(node, ast.expr):
        return
    # the expressions around it that compute with torch alone
    chain = [node]
    while isinstance(parent := source.parents.get(chain[-1]), ast.expr) and scene.is_torch_op(parent):
        if parent not in scene.fp32 and not isinstance(parent, ast.Attribute):
            break
        chain.append(parent)
    # back as soon as the values fit, else as late as possible, else not at all
    fitting = []
    for each in chain:
        seen = scene.fp32.get(each)
        is_wide = seen is not None and seen.kind == "tensor" and seen.dtypes == ("float32",)
        if seen and is_wide and (seen.absmax or 0.0) * HEADROOM <= site.format[0]:
            fitting.append(each)
    ends: list[ast.expr | None] = [*fitting[:1], *fitting[-1:], None]
    for end in dict.fromkeys(ends):
        fix = _computed_in_fp32(site, scene, end or node, back=end is not None)
        if fix is not None:
            yield fix
    if not fitting:
        yield from _unpacked(site, scene)


def _widened(site: Site, scene: Scene, top: ast.expr) -> tuple[frozenset[ast.expr], list[Edit]] | None:
    """Operands to widen, and module calls to edit, for ``top`` in fp32; ``None`` if impossible."""
    edits, found = list[Edit](), set[ast.expr]()

    def enter(node: ast.expr) -> bool:
        callee = scene.callee(node)
        # a cast module is called with its weights in fp32, if it has weights or buffers
        has_values = False
        if callee is not None and callee.kind == "module":
            has_values = site.cast if callee.name else bool(callee.parts)
        if isinstance(node, ast.Call) and callee is not None and has_values:
            if callee.training and callee.parts:  # its buffers would be copies, which a call updates in vain
                return False
            more = _functional_call(site.source, node, bool(callee.parts))
            if more is None:
                return False
            edits.extend(more)
        for operand in scene.arguments(node):
            seen = scene.low.get(operand)
            if site.node in set(ast.walk(operand)):
                if not enter(operand):
                    return False
            # widening changes it unless it is in fp32 anyway
            elif scene.is_floating(operand) and (seen is None or seen.dtypes != ("float32",)):
                found.add(operand)
        return True

    if enter(top):
        return (frozenset(found), edits)
    return None


def _functional_call(source: SourceText, call: ast.Call, buffers: bool) -> list[Edit] | None:
    """The call of a module with its weights, and ``buffers`` if it has some, in fp32."""
    starred, at = any(isinstance(each, ast.Starred) for each in call.args), call.func
    # evaluated again it must give the same: names, attributes, items at plain indices
    while isinstance(at, (ast.Attribute, ast.Subscript)):
        if isinstance(at, ast.Subscript) and not (isinstance(at.slice, ast.Constant) or is_plain(at.slice)):
            return None
        at = at.value
    if call.keywords or not call.args or starred or not isinstance(at, ast.Name):
        return None
    torch, imports = torch_in(source)
    start, end = source.outer(call.func)
    module = source.text[start:end]
    weights = f"{{name: w.float() for name, w in {module}.named_parameters()}}"
    if buffers:
        each = "w.float() if w.is_floating_point() else w"
        weights = f"{{name: {each} for name, w in {module}.state_dict(keep_vars=True).items()}}"
    last = source.outer(call.args[-1])[1]
    whole = source.span(call)[1] - start
    return [
        Edit(start, start, f"{torch}.func.functional_call(", start - end - 1),
        Edit(end, source.call_opens(call) + 1, f", {weights}, ("),
        Edit(last, last, ",)" if len(call.args) == 1 else ")", whole - 1),
        *imports,
    ]


def _computed_in_fp32(site: Site, scene: Scene, top: ast.expr, *, back: bool) -> SourceFix | None:
    source, found = site.source, _widened(site, scene, top)
    if found is None:
        return None
    widened, edits = found
    dtype, kind, why = None, "fp32", "computed in fp32"
    if back:
        dtype, why = scene.dtype_of(site.node), "computed in fp32 and cast back"
        if dtype is None:
            return None
    # autocast would compute a product in 16 bits all the same
    path = [site.node]
    while path[-1] is not top:
        path.append(source.parents[path[-1]])
    if site.autocasts and any(map(scene.is_product, path)):
        # the statement without autocast, and an operand with a product, computed before it
        statement = source.around(site.node, ast.stmt)
        simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
        tensor = next((each for each in ast.walk(site.node) if is_plain(each) and scene.is_floating(each)), None)
        if not isinstance(statement, simple) or tensor is None or not source.can_be_indented(statement):
            return None
        kind, why = "autocast", f"{why}, outside of autocast"
        torch, imports = torch_in(source)
        header = f"with {torch}.autocast({source.segment(tensor)}.device.type, enabled=False):"
        edits += [*source.indented_under([statement], header), *imports]
        hoisted = [each for each in widened if any(map(scene.is_product, ast.walk(each))) and _is_first(source, each)]
        for node in hoisted[:1]:
            name, inner = unused_name(source, "operand"), source.segment(node)
            if not isinstance(node, ATOMS):
                inner = f"({inner})"
            line = source.line_before(statement, f"{name} = {inner}.float()")
            edits += [line._replace(size=-(1 << 41)), Edit(*source.outer(node), name)]
        widened -= {*hoisted[:1]}
    if not widened and not edits:
        return None
    cast_back = (top, dtype) if dtype is not None else None
    return SourceFix(kind, why, site.node, widened, cast_back, tuple(edits), stays_wide=dtype is None)


def _is_first(source: SourceText, node: ast.expr) -> bool:
    """Whether a one-line expression is computed once, first in its statement but for names."""
    at: ast.AST = node
    while isinstance(at, ast.expr):
        parent = source.parents[at]
        if isinstance(parent, (ast.Call, ast.BinOp, ast.Subscript)):
            earlier = [each for each in ast.iter_child_nodes(parent) if isinstance(each, ast.expr)]
            if not all(map(is_plain, earlier[: earlier.index(at)] if at in earlier else [node])):
                return False
        elif isinstance(parent, ast.expr) and not isinstance(parent, (ast.Attribute, ast.UnaryOp)):
            return False
        at = parent
    return node.lineno == node.end_lineno


def _unpacked(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """``values, vectors = op(x)``: each result is cast back."""
    statement = site.source.parents.get(site.node)
    seen = scene.fp32.get(site.node)
    is_unpacked = isinstance(statement, ast.Assign) and all(isinstance(t, ast.Tuple) for t in statement.targets)
    if not is_unpacked or seen is None or seen.kind != "tuple" or not all(p == "float32" for p in seen.parts):
        return
    found, dtype = _widened(site, scene, site.node), scene.dtype_of(site.node)  # type: ignore[arg-type]
    if found is None or not any(found) or dtype is None:
        return
    start, end = site.source.outer(site.node)  # type: ignore[arg-type]
    edits = [Edit(start, start, f"(part.to({dtype}) for part in ", start - end), Edit(end, end, ")", end - start)]
    yield SourceFix("fp32", "computed in fp32 and cast back", site.node, found[0], edits=(*edits, *found[1]))


_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**"}


def _augmented(site: Site, scene: Scene) -> Iterator[SourceFix]:
    """``x *= y`` of a name that the function itself has bound: a new tensor, computed in fp32."""
    node, source = site.node, site.source
    assert isinstance(node, ast.AugAssign)
    function = source.around(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    # of an argument, the caller sees the change in place
    assigns = [each for each in ast.walk(function or source.tree) if isinstance(each, ast.Assign)]
    bound = {target.id for each in assigns for target in each.targets if isinstance(target, ast.Name)}
    sign = _OPERATORS.get(type(node.op))
    if not isinstance(node.target, ast.Name) or node.target.id not in bound or sign is None:
        return
    name, (start, end) = node.target.id, source.outer(node.value)
    behind = source.span(node.target)[1]
    widened = frozenset(filter(scene.is_floating, [node.value]))
    # an expression of several parts needs parentheses of its own
    opened = closed = ""
    if not widened and not isinstance(node.value, ATOMS) and source.span(node.value) == (start, end):
        opened, closed = "(", ")"
    for suffix, why in ((f".to({name}.dtype)", "computed in fp32 and cast back"), ("", "computed in fp32")):
        first = Edit(behind, start, f" = ({name}.float() {sign} {opened}")
        last = Edit(end, end, f"{closed}){suffix}", 1 << 29)
        yield SourceFix("fp32", why, node, widened, edits=(first, last))


# -- Buffers


def kept_buffers(source: SourceText, owner: str, names: Sequence[str]) -> SourceFix | None:
    """Buffers that a cast of the model leaves in fp32: rotary frequencies, tables, thresholds."""
    node = next((n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name == owner), None)
    if node is None:
        return None
    methods = {m.name: m for m in reversed(node.body) if isinstance(m, ast.FunctionDef)}
    first = methods.get("__init__")
    if first is None or "_apply" in methods:
        return None
    indent = source.indent_of(first)
    step = "\t" if indent.startswith("\t") else "    "
    more, deeper = indent + step, indent + 2 * step
    # one buffer needs no tuple
    kept, olds = f"self.{names[0]}", ["kept"]
    if len(names) > 1:
        kept = f"({', '.join(f'self.{name}' for name in names)})"
        olds = [f"kept[{index}]" for index in range(len(names))]
    lines = [
        "",
        f"{indent}def _apply(self, fn, recurse=True):",
        f'{more}"""Move the buffers with the model, but keep them in fp32."""',
        f"{more}kept = {kept}",
        f"{more}super()._apply(fn, recurse)",
    ]
    for old, new in zip(olds, (f"self.{name}" for name in names), strict=True):
        with_values = f"{old}.to({new}.device)"  # one on the device meta has none, as before to_empty()
        lines += [f"{more}if {old} is not None:"]
        lines += [f"{deeper}{new} = {new}.to({old}.dtype) if {old}.is_meta else {with_values}"]
    lines += [f"{more}return self"]
    why = f"the values of {', '.join(names)} stay in fp32 when the model is cast"
    return SourceFix("buffer", why, first, edits=(source.lines_behind(first, lines),))


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
