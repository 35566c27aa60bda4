"""The code that a user pastes to run a model as recommended, in pure PyTorch.

Its results equal those of :mod:`lowprec_check.engine.model.keep_fp32` bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from lowprec_check.analysis.input_code import Conversion, convert_inputs
from lowprec_check.catalog.declared import release_of
from lowprec_check.catalog.toml_tables import version_key
from lowprec_check.schema.axes import BACKENDS, device_type
from lowprec_check.schema.precisions import PRECISIONS, Precision
from lowprec_check.schema.run_key import CONTIGUOUS, RunKey
from lowprec_check.schema.scan_result import ModelInfo

_UNDER_AUTOCAST = """\
def keep_in_fp32(model, names):  # run these modules on fp32 inputs, without autocast
    from functools import partial

    def without_autocast(forward, *args, **kwargs):
        with torch.autocast("{device}", enabled=False):
            return forward(*args, **kwargs)

    to_fp32 = lambda t: t.float() if t.dtype == {dtype} else t
    cast_inputs = lambda module, args, kwargs: tree_map_only(torch.Tensor, to_fp32, (args, kwargs))
    for module in map(model.get_submodule, names):
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
        setattr(owner, name, torch.nn.Parameter(getattr(owner, name).detach().clone()))
"""


_IN_TORCH: dict[str, tuple[str, str]] = {
    "xpu": ("2.5", "import intel_extension_for_pytorch  # provides the device xpu")
}
"""By device: the first release of torch that has it, and the import that provides it in older ones."""


class ModelCode(NamedTuple):
    """Code that prepares a model and its inputs."""

    imports: list[str]
    body: list[str]
    """Lines, some of them several, that set ``model`` and ``inputs``."""
    autocast: str | None
    """The context of the forward pass, ``torch.autocast("cpu", dtype=torch.bfloat16)``; ``None`` without one."""
    inside: tuple[str, ...]
    """Lines inside the context of the call, before it."""
    conversion: Conversion
    """What happens to the tensors of the inputs."""

    def with_lines(self, *more: str) -> list[str]:
        """All imports that are needed, an empty line, the lines of the body, and ``more``."""
        lines = [*self.body, *more]
        tree = (
            ["from torch.utils._pytree import tree_map_only"] if any("tree_map_only" in line for line in lines) else []
        )
        return [*self.imports, *tree, "", *lines]


def snippet(
    key: RunKey,
    model: ModelInfo,
    keep_fp32: Sequence[str] = (),
    untied: Sequence[str] = (),
    *,
    torch_version: str = "",
) -> str:
    """Code that runs ``model`` on ``inputs``, both as the user's file defines them, as the run of ``key`` does.

    ``key.precision`` is a registered precision; the modules ``keep_fp32`` stay in fp32; the parameters ``untied``, which
    such a module shares with a cast one, are copied. A device that torch of ``torch_version`` lacks is imported.
    """
    found = prepare(key, model, keep_fp32, untied, torch_version=torch_version)
    context = ", ".join(filter(None, ("with torch.no_grad()", found.autocast)))
    called = [f"    {line}" for line in (*found.inside, f"output = {model.call}")]
    return "\n".join(found.with_lines(f"{context}:", *called))


def prepare(
    key: RunKey,
    model: ModelInfo,
    keep_fp32: Sequence[str] = (),
    untied: Sequence[str] = (),
    *,
    torch_version: str = "",
) -> ModelCode:
    """The code before the call of :func:`snippet`, and the context of the call."""
    precision, device = PRECISIONS.get(key.precision), device_type(key.device)
    is_import = [line.startswith(("import ", "from ")) for line in model.setup]
    imports = [
        "import torch",
        *_providers(device, torch_version),
        *(line for line, found in zip(model.setup, is_import, strict=True) if found),
    ]
    body = [line for line, found in zip(model.setup, is_import, strict=True) if not found]
    moved = key.device if device != "cpu" else None
    if moved is not None:
        body.append(f'model = model.to("{moved}")')
    autocast, dtype = None, None
    if precision.kind == "autocast":
        if keep_fp32:
            names = _listed(keep_fp32)
            body.append(_UNDER_AUTOCAST.format(device=device, dtype=precision.format.dtype, names=names))
        autocast = f'torch.autocast("{device}", dtype={precision.format.dtype})'
    elif precision.kind == "cast":
        body.append(_cast(precision, keep_fp32, untied))
        dtype = precision.format.dtype
    elif precision.snippet is not None:
        body.append(precision.snippet(device, keep_fp32))
    if key.memory_format != CONTIGUOUS:
        body.append(f"model = model.to(memory_format=torch.{key.memory_format})")
    conversion = Conversion(dtype, precision.method if dtype else None, moved, key.memory_format)
    body += convert_inputs(model, conversion)
    backend = BACKENDS.get(key.backend).code(key, model)
    imports += backend.imports
    body += backend.before
    return ModelCode(imports, body, autocast, backend.inside, conversion)


def _providers(device: str, torch_version: str) -> list[str]:
    """The import of the package that provides the device, if a torch of that version does not."""
    if device not in _IN_TORCH or not torch_version:
        return []
    since, provider = _IN_TORCH[device]
    return [provider] if version_key(release_of(torch_version)) < version_key(since) else []


def _cast(precision: Precision, keep: Sequence[str], untied: Sequence[str]) -> str:
    dtype = precision.format.dtype
    cast = f"{precision.method}()" if precision.method else f"to({dtype})"
    if not keep:
        return f"model = model.{cast}"
    untie = _UNTIE.format(paths=_listed(untied, indent=4), dtype=dtype) if untied else ""
    return _UNDER_CAST.format(cast=cast, dtype=dtype, untie=untie, names=_listed(keep))


def _listed(names: Sequence[str], *, indent: int = 0) -> str:
    """A list literal of strings, wrapped if it is long."""
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
