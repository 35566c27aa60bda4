"""Withholds kernels: makes an op fail for a dtype in every run, as if this build of torch had no kernel for it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.core.floating_dtypes import torch_dtype
from lowprec_check.engine.trace.op_arguments import tensors_in
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import FloatFormat, formats

_FORMATS = {
    spelling: described for described in formats() for spelling in (*described.aliases, described.name, described.short)
}
_SPEC = re.compile(r"(?:aten(?:\.|::))?(?P<op>\w+)(?:\.(?P<overload>\w+))?:(?P<dtype>\w+)")


class WithheldKernel(NamedTuple):
    """One ``op[.overload]:dtype``."""

    op: str
    overload: str | None
    format: FloatFormat

    def matches(self, func: OpOverload) -> bool:
        """Whether ``func`` is the op withheld."""
        namespace, name = func._schema.name.split("::")
        return namespace == "aten" and name == self.op and self.overload in (None, func._overloadname)


def parse_withheld(specs: Iterable[str]) -> list[WithheldKernel]:
    """Parse ``aten.dot:half``; raises :class:`UsageError` for an op or dtype that does not exist."""
    return [_parse(spec) for spec in specs]


def _parse(spec: str) -> WithheldKernel:
    match = _SPEC.fullmatch(spec)
    format_ = _FORMATS.get(match["dtype"]) if match else None
    if match is None or format_ is None:
        raise UsageError(
            f"{spec!r} names no kernel to run without.",
            f"Write an op and a dtype, such as aten.dot:half; dtypes: {', '.join(_FORMATS)}.",
        )
    if not hasattr(torch.ops.aten, match["op"]):
        raise UsageError(
            f"This torch has no op aten.{match['op']}.", "Write the op as it is named in the findings of a scan."
        )
    overloads = getattr(torch.ops.aten, match["op"]).overloads()
    if match["overload"] not in (None, *overloads):
        named = f"aten.{match['op']}.{match['overload']}"
        raise UsageError(f"This torch has no op {named}.", f"aten.{match['op']} has {', '.join(overloads)}.")
    return WithheldKernel(match["op"], match["overload"], format_)


class WithholdMode(DispatchMode):
    """Raises the error that torch raises if a kernel is missing."""

    def __init__(self, withheld: list[WithheldKernel]) -> None:
        super().__init__()
        self.withheld = withheld

    def handle(self, func: OpOverload, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Raise for an op that is withheld, else run it."""
        for item in self.withheld:
            if item.matches(func) and any(
                tensor.dtype == torch_dtype(item.format) for tensor in tensors_in(args, kwargs)
            ):
                raise NotImplementedError(f"\"{item.op}\" not implemented for '{item.format.cpp_name}' (withheld)")
        return run_op(func, args, kwargs, keys)


def withholding(specs: Iterable[str]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the kernels of ``specs`` are missing; does nothing for none."""
    withheld = parse_withheld(specs)
    return WithholdMode(withheld) if withheld else contextlib.nullcontext()
