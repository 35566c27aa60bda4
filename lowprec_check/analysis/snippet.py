"""The code that a user pastes to run a model as recommended, in pure PyTorch.

Its results equal those of :mod:`lowprec_check.engine.model.prepared` bit for bit.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lowprec_check.catalog.versions import release_of, version_key
from lowprec_check.schema.axes import BACKENDS, Backend, calibrates, device_type, project_of
from lowprec_check.schema.measures import InputLayout
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, RunKey
from lowprec_check.schema.statements import fill

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo


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


_UNDER_AUTOCAST = """\
def keep_in_fp32(model, names):  # run these modules on fp32 inputs, without autocast
    from functools import partial

    def without_autocast(forward, *args, **kwargs):
        with torch.autocast("{device}", enabled=False):
            return forward(*args, **kwargs)

    to_fp32 = lambda t: t.float() if t.dtype == {dtype} else t
    cast_inputs = lambda module, args, kwargs: tree_map_only(torch.Tensor, to_fp32, (args, kwargs))
    for module in map(model.get_submodule, names):
        module._apply(to_fp32)  # weights that are in 16 bits as given
        module.forward = partial(without_autocast, module.forward)
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)

keep_in_fp32(model, {names})
"""

_UNDER_CAST = """\
def cast_except(model, names):  # cast the model; run these modules in fp32, with their original weights
    to_fp32 = lambda t: t.float() if t.dtype == {dtype} else t
    to_low = lambda t: t.to({dtype}) if t.dtype == torch.float32 else t
    cast_inputs = lambda module, args, kwargs: tree_map_only(torch.Tensor, to_fp32, (args, kwargs))
    cast_output = lambda module, args, output: tree_map_only(torch.Tensor, to_low, output)
    tensors = lambda module: [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
{untie}    modules = [model.get_submodule(name) for name in names]
    originals = [[t.detach().clone() for t in tensors(module)] for module in modules]
    model.{cast}
    for module, values in zip(modules, originals):
        module.float()
        for tensor, value in zip(tensors(module), values):
            tensor.detach().copy_(value)
        module.register_forward_pre_hook(cast_inputs, with_kwargs=True, prepend=True)
        module.register_forward_hook(cast_output)

cast_except(model, {names})
"""

_UNTIE = """\
    for path in {paths}:  # shared with a module in {dtype}: copy it
        owner, _, name = path.rpartition(".")
        owner = model.get_submodule(owner)
        shared = getattr(owner, name)
        setattr(owner, name, torch.nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
"""


_IN_TORCH: dict[str, tuple[str, str]] = {
    "xpu": ("2.5", "import intel_extension_for_pytorch  # provides the device xpu")
}
"""By device: the first release of torch with it, and the import that provides it before."""


def snippet(
    key: RunKey,
    model: ModelInfo,
    keep_fp32: Sequence[str] = (),
    untied: Sequence[str] = (),
    *,
    keep_fp32_inputs: Sequence[str] = (),
    torch_version: str = "",
) -> str:
    """Code that runs ``model`` on ``inputs``, both as the user's file defines them, as the run of
    ``key`` does.

    ``key.precision`` is a registered precision; the modules ``keep_fp32`` stay in fp32, and the
    inputs ``keep_fp32_inputs``, by the names that a plan has for them, are not cast; the parameters
    ``untied``, which such a module shares with a cast one, are copied. A device that torch of
    ``torch_version`` lacks is imported. For a backend that gives no code, a comment.
    """
    backend = BACKENDS.get(key.backend)
    if key.backend != EAGER and type(backend).code is Backend.code:
        project = project_of(key.backend)
        return f"# {project} gives no code to paste for the backend {key.backend}: see its documentation"
    code = prepare(key, model, keep_fp32, untied, keep_fp32_inputs=keep_fp32_inputs, torch_version=torch_version)
    # one with statement for both contexts
    context = ", ".join(filter(None, ("with torch.no_grad()", code.autocast)))
    called = [f"    {line}" for line in (*code.inside, f"output = {model.call}")]
    return code.with_lines(f"{context}:", *called)


class ModelCode(NamedTuple):
    """Code that prepares a model and its inputs."""

    place: str
    """Where the code belongs, as a comment: a line of a script; empty if it stands alone."""
    names: dict[str, str]
    """The expressions for ``model`` and ``inputs`` at that place; ``torch``, if it is imported."""
    imports: list[str]
    body: list[str]  # lines, some of them several, that set `model` and `inputs`
    autocast: str | None
    """Context of the call, ``torch.autocast("cpu", dtype=torch.bfloat16)``, if there is one."""
    inside: tuple[str, ...]  # lines inside the context of the call, before it
    conversion: Conversion  # what happens to the tensors of the inputs

    def with_lines(self, *more: str) -> str:
        """All imports that are needed, an empty line, the lines of the body, and ``more``."""
        lines = [*self.body, *more]
        imports = [*self.imports]
        if any("tree_map_only" in line for line in lines):
            imports.append("from torch.utils._pytree import tree_map_only")
        if "torch" in self.names or (self.names and not any("torch." in line for line in lines)):
            imports.remove("import torch")
        separated = [*imports, "", *lines] if imports else lines
        code = with_names(without_rebinding("\n".join(separated)), self.names)
        return "\n".join(filter(None, [self.place, code]))


def prepare(
    key: RunKey,
    model: ModelInfo,
    keep_fp32: Sequence[str] = (),
    untied: Sequence[str] = (),
    *,
    keep_fp32_inputs: Sequence[str] = (),
    torch_version: str = "",
) -> ModelCode:
    """The code before the call of :func:`snippet`, and the context of the call."""
    precision, device, backend = PRECISIONS.get(key.precision), device_type(key.device), BACKENDS.get(key.backend)
    layers = keep_fp32
    keep_fp32 = () if backend.keeps_layers else keep_fp32
    since, provider = _IN_TORCH.get(device, ("", ""))  # a newer torch provides the device itself
    is_old = bool(since and torch_version) and version_key(release_of(torch_version)) < version_key(since)
    place = model.setup[0] if model.setup and model.setup[0].startswith("# in ") else ""
    made = model.setup[bool(place) :]
    imports = [line for line in made if line.startswith(("import ", "from "))]
    body = [line for line in made if line not in imports]
    # inside the file, its function `inputs` is hidden by its result: calibration is computed before
    hides_function = not imports and any(line.startswith("inputs = inputs(") for line in body)
    if hides_function and model.calibration and calibrates(key.backend):
        body.insert(0, f"batches = list({model.calibration})  # which may call inputs()")
        model = msgspec.structs.replace(model, calibration="batches")
    imports = ["import torch", *([provider] if is_old else []), *imports]
    if device != "cpu" and model.kind != "function":
        _apply(body, "model", f'to("{key.device}")')
    autocast, conversion = None, conversion_of(key)
    if precision.kind == "autocast":
        if keep_fp32:
            names = _listed(keep_fp32)
            body.append(_UNDER_AUTOCAST.format(device=device, dtype=precision.format.dtype, names=names))
        autocast = f'torch.autocast("{device}", dtype={precision.format.dtype})'
    elif precision.kind == "cast":
        dtype = precision.format.dtype
        cast = f"to({dtype})"
        if precision.method and model.kind == "module":
            cast = f"{precision.method}()"
        if keep_fp32:
            untie = _UNTIE.format(paths=_listed(untied, indent=4), dtype=dtype) if untied else ""
            body.append(_UNDER_CAST.format(cast=cast, dtype=dtype, untie=untie, names=_listed(keep_fp32)))
        elif model.kind != "function":
            _apply(body, "model", cast)
    elif precision.snippet is not None:
        body.append(precision.snippet(device, keep_fp32))
    if key.memory_format != CONTIGUOUS:
        _apply(body, "model", f"to(memory_format=torch.{key.memory_format})")
    converted = convert_inputs(model, conversion, keep_fp32_inputs)
    if model.castable and model.layout.kind == "tensor" and converted:
        _apply(body, "inputs", converted[0].removeprefix("inputs = inputs."), in_place=False)
    else:
        body += converted
    # a backend compiles what was prepared before
    code = backend.code_keeping(key, model, layers)
    imports += code.imports
    body += code.before
    return ModelCode(place, model.names, imports, body, autocast, code.inside, conversion)


def _apply(body: list[str], name: str, method: str, *, in_place: bool = True) -> None:
    """Add a call of a method that returns what it changes: to the line that makes it, if that is
    possible.
    """
    for index, line in reversed([*enumerate(body)]):
        if re.search(rf"\b{name}\b", line):
            is_made = re.fullmatch(rf"{name} = [^#\n]*[)\]]", line)
            if is_made or (in_place and re.fullmatch(rf"{name}(\.[^#\n]*\))", line)):
                body[index] = f"{line}.{method}"
                return
            break
    body.append(f"{name}.{method}" if in_place else f"{name} = {name}.{method}")


def _listed(names: Sequence[str], *, indent: int = 0) -> str:
    """A list literal of strings, wrapped if it is long."""
    # as many names in a line as fit
    rows, row = [], ""
    for name in names:
        item = f"{json.dumps(name)}, "
        if row and len(row) + len(item) > 90:
            rows.append(row)
            row = ""
        row += item
    rows.append(row)
    if len(rows) == 1:
        return f"[{row.removesuffix(', ')}]"
    margin = " " * indent
    return "\n".join(["[", *(f"{margin}    {row.rstrip()}" for row in rows), f"{margin}]"])


# -- The inputs: cast, moved, in a memory format


class Conversion(NamedTuple):
    """What happens to the tensors of the inputs; by default nothing."""

    dtype: str | None = None  # the dtype of floating tensors, as code: `torch.float16`
    method: str | None = None  # the method of a tensor that casts to it, `half`, if there is one
    device: str | None = None
    memory_format: str = CONTIGUOUS  # the format of tensors with 4 dimensions

    def applied_to(self, tensor: str, *, floating: bool, image: bool) -> str:
        """``tensor`` converted, as code."""
        casts, formats = floating and self.dtype is not None, image and self.memory_format != CONTIGUOUS
        if casts and self.method and not self.device and not formats:
            return f"{tensor}.{self.method}()"
        arguments = [fill('"{}"', self.device)]
        if casts and self.dtype:
            arguments.append(self.dtype)
        if formats:
            arguments.append(f"memory_format=torch.{self.memory_format}")
        return f"{tensor}.to({', '.join(filter(None, arguments))})"

    def concerns(self, layout: InputLayout) -> list[str]:
        """The tensors that it changes."""
        changed = set[str]()
        if self.dtype:
            changed.update(layout.floating)
        if self.memory_format != CONTIGUOUS:
            changed.update(layout.images)
        return [key for key in layout.tensors if self.device or key in changed]

    def in_words(self) -> str:
        """``cast the floating tensors to torch.float16 and move all to cuda``."""
        steps = [fill("cast the floating tensors to {}", self.dtype), fill("move all to {}", self.device)]
        if self.memory_format != CONTIGUOUS:
            steps.append(f"put those with 4 dimensions into {self.memory_format}")
        return " and ".join(filter(None, steps))


def conversion_of(key: RunKey) -> Conversion:
    """What the run of ``key`` does to its inputs."""
    precision, device = PRECISIONS.get(key.precision), device_type(key.device)
    conversion = Conversion(memory_format=key.memory_format)
    if precision.kind == "cast":  # autocast takes inputs in fp32
        conversion = conversion._replace(dtype=precision.format.dtype, method=precision.method)
    if device != "cpu":
        conversion = conversion._replace(device=key.device)
    return conversion


_LISTED = 3  # at most so many tensors are converted by name


def convert_inputs(model: ModelInfo, conversion: Conversion, in_fp32: Sequence[str] = ()) -> list[str]:
    """Lines that convert ``inputs``, but do not cast those that are named ``in_fp32``; none if
    there is nothing to do.
    """
    code_of = {_input_code(name, model.call): name for name in in_fp32}
    places = {"tensor": "inputs", "sequence": "inputs[{}]", "mapping": 'inputs["{}"]'}
    place = places.get(model.layout.kind, "")
    floating = [key for key in model.layout.floating if place.format(key) not in code_of]
    layout = msgspec.structs.replace(model.layout, floating=floating)
    concerned = conversion.concerns(layout)
    is_nothing = conversion == Conversion(method=conversion.method)
    if is_nothing or (model.castable and layout.kind != "nested" and not concerned):
        return []
    if not model.castable:
        return [f"# inside your inputs: {conversion.in_words()}{fill(', but do not cast {}', ', '.join(in_fp32))}"]

    def converted(key: str, tensor: str) -> str:
        return conversion.applied_to(tensor, floating=key in layout.floating, image=key in layout.images)

    # a few tensors are converted by name, more or nested ones wherever they are
    if layout.kind == "tensor":
        return [f"inputs = {converted('', 'inputs')}"]
    if layout.kind == "mapping" and len(concerned) <= _LISTED:
        items = [f"{json.dumps(key)}: {converted(key, f'inputs[{json.dumps(key)}]')}" for key in concerned]
        return [f"inputs = {{**inputs, {', '.join(items)}}}"]
    if layout.kind == "sequence" and len(concerned) <= _LISTED:
        # up to the last one that changes, and the rest as it is
        count = max(map(int, concerned)) + 1
        elements = [f"inputs[{number}]" for number in range(count)]
        items = [converted(str(n), code) if str(n) in concerned else code for n, code in enumerate(elements)]
        return [f"inputs = [{', '.join(items)}, *inputs[{count}:]]"]
    return convert_nested(conversion, "inputs", list(code_of))


def _input_code(name: str, call: str) -> str:
    """Code for an input by its name in a plan: that of a keyword argument is its key."""
    if call != "model(**inputs)":
        return name
    keyword = re.split(r"[\[.]", name)[0]
    return f"inputs[{json.dumps(keyword)}]{name.removeprefix(keyword)}"


def convert_nested(conversion: Conversion, name: str, in_fp32: Sequence[str] = ()) -> list[str]:
    """Lines for tensors anywhere in ``name`` that are not known by name; ``in_fp32``, code of some
    of them, are not cast.
    """
    # first the dtype and the device, then the layout of images
    steps, before, is_cast = [], [], "t.is_floating_point()"
    if in_fp32 and conversion.dtype:
        before = [f"fp32 = [{', '.join(in_fp32)}]  # not cast"]
        is_cast = f"{is_cast} and not any(t is other for other in fp32)"
    if conversion.dtype or conversion.device:
        moved = "t" + fill('.to("{}")', conversion.device)
        if conversion.dtype:
            moved = f"{moved}.to({conversion.dtype}) if {is_cast} else {moved}"
        steps.append(moved)
    if conversion.memory_format != CONTIGUOUS:
        steps.append(f"t.to(memory_format=torch.{conversion.memory_format}) if t.ndim == 4 else t")
    return before + [f"{name} = tree_map_only(\n    torch.Tensor, lambda t: {step}, {name}\n)" for step in steps]


def convert_targets(conversion: Conversion) -> list[str]:
    """Lines that convert ``targets``, the loss's part of a batch; none if nothing is to do."""
    return convert_nested(conversion._replace(memory_format=CONTIGUOUS), "targets")
