"""The code to paste that casts and moves ``inputs``, and puts them into a memory format."""

from __future__ import annotations

import json
from typing import NamedTuple

from lowprec_check.schema.measures import InputLayout
from lowprec_check.schema.run_key import CONTIGUOUS
from lowprec_check.schema.scan_result import ModelInfo

_LISTED = 3
"""At most so many tensors are converted by name."""


class Conversion(NamedTuple):
    """What happens to the tensors of the inputs; by default nothing."""

    dtype: str | None = None
    """The dtype of floating tensors, as code: ``torch.float16``."""
    method: str | None = None
    """The method of a tensor that casts to it, ``half``, if there is one."""
    device: str | None = None
    memory_format: str = CONTIGUOUS
    """The format of tensors with 4 dimensions."""

    def applied_to(self, tensor: str, *, floating: bool, image: bool) -> str:
        """``tensor`` converted, as code."""
        casts, formats = floating and self.dtype is not None, image and self.memory_format != CONTIGUOUS
        if casts and self.method and not self.device and not formats:
            return f"{tensor}.{self.method}()"
        arguments = [f'"{self.device}"'] if self.device else []
        arguments += [self.dtype] if casts and self.dtype else []
        arguments += [f"memory_format=torch.{self.memory_format}"] if formats else []
        return f"{tensor}.to({', '.join(arguments)})"

    def concerns(self, layout: InputLayout) -> list[str]:
        """The tensors that it changes."""
        changed = set(layout.floating) if self.dtype else set()
        changed |= set(layout.images) if self.memory_format != CONTIGUOUS else set()
        return [key for key in layout.tensors if self.device or key in changed]

    def in_words(self) -> str:
        """``cast the floating tensors to torch.float16 and move all to cuda``."""
        steps: list[str | None] = [
            self.dtype and f"cast the floating tensors to {self.dtype}",
            self.device and f"move all to {self.device}",
            f"put those with 4 dimensions into {self.memory_format}" if self.memory_format != CONTIGUOUS else None,
        ]
        return " and ".join(filter(None, steps))


def convert_inputs(model: ModelInfo, conversion: Conversion) -> list[str]:
    """Lines that convert ``inputs``; none if there is nothing to do."""
    layout = model.layout
    if conversion == Conversion(method=conversion.method):
        return []
    if not model.castable:
        return [f"# inside your inputs: {conversion.in_words()}"]
    return _convert_nested(conversion) if layout.kind == "nested" else _convert_named(layout, conversion)


def _convert_named(layout: InputLayout, conversion: Conversion) -> list[str]:
    """Lines for tensors that are known by name or position."""
    concerned = conversion.concerns(layout)

    def converted(key: str, tensor: str) -> str:
        return conversion.applied_to(tensor, floating=key in layout.floating, image=key in layout.images)

    if not concerned:
        return []
    if layout.kind == "tensor":
        return [f"inputs = {converted('', 'inputs')}"]
    if layout.kind == "mapping" and len(concerned) <= _LISTED:
        items = {key: f"inputs[{json.dumps(key)}]" for key in concerned}
        return [f"{item} = {converted(key, item)}" for key, item in items.items()]
    if layout.kind == "sequence" and len(concerned) <= _LISTED:
        return ["inputs = list(inputs)", *(f"inputs[{key}] = {converted(key, f'inputs[{key}]')}" for key in concerned)]
    return _convert_nested(conversion)


def _convert_nested(conversion: Conversion, name: str = "inputs") -> list[str]:
    """Lines for tensors anywhere in ``name`` that are not known by name."""
    steps = []
    if conversion.dtype or conversion.device:
        move = f'.to("{conversion.device}")' if conversion.device else ""
        cast = f"t{move}.to({conversion.dtype}) if t.is_floating_point() else t{move}"
        steps.append(cast if conversion.dtype else f"t{move}")
    if conversion.memory_format != CONTIGUOUS:
        steps.append(f"t.to(memory_format=torch.{conversion.memory_format}) if t.ndim == 4 else t")
    return [f"{name} = tree_map_only(\n    torch.Tensor, lambda t: {step}, {name}\n)" for step in steps]


def convert_targets(conversion: Conversion) -> list[str]:
    """Lines that convert ``targets``, what the loss gets of a batch; none if there is nothing to do."""
    return _convert_nested(conversion._replace(memory_format=CONTIGUOUS), "targets")
