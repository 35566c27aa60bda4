"""Where the recorder writes: columns of op calls, and gaps merged by place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowprec_check.engine.core.compare import finite_or_none
from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Gap, GapKind, Layer, OpCalls, Outcome, Place

if TYPE_CHECKING:
    from lowprec_check.engine.trace.op_call import Call


@dataclasses.dataclass(slots=True)
class Measured:
    """What was measured of one op call; ``None`` where there was nothing to measure."""

    local_error: float | None = None
    accumulated_error: float | None = None
    input_error: float | None = None
    absmax: float | None = None
    rms: float | None = None
    introduced_inf: int = 0
    introduced_nan: int = 0
    flushed: float | None = None
    input_flushed: float | None = None
    flips: int = 0
    recast: int = 0
    seconds: float | None = None
    reference_seconds: float | None = None


_SHORT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64"}


def _short(tensors: list[Tensor]) -> str:
    return _joined(tuple([tensor.dtype for tensor in tensors]))


@functools.cache
def _joined(dtypes: tuple[torch.dtype, ...]) -> str:
    floating = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return "+".join(sorted(_SHORT.get(dtype) or str(dtype)[6:] for dtype in floating))


class Journal:
    """Collects rows, gaps and faults of our own; ``on_gap`` hears of each new gap."""

    def __init__(self, on_gap: Callable[[Gap], None] | None = None) -> None:
        self.columns: dict[str, list[Any]] = {name: [] for name in Place._fields}
        self._append = [self.columns[name].append for name in Place._fields]
        self._gaps: dict[tuple[str, str, str, str | None], Gap] = {}
        self.parameters: set[int] = set()
        """Storages of the model's parameters and buffers."""
        self._on_gap = on_gap
        self.phase: Phase = "forward"
        self.faults: dict[str, None] = {}
        """Messages, in order, each once."""

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a parameter or buffer of the model."""
        return tensor.untyped_storage()._cdata in self.parameters

    def call(self, call: Call, outputs: list[Tensor], measured: Measured) -> None:
        """Append one row."""
        self._row(call.traits.name, call.module, call.source, call.inputs, outputs, call.outcome, measured)

    def weight(self, name: str, wide: Tensor, low: Tensor, measured: Measured) -> None:
        """Append a row for the cast of a parameter or buffer, which no op shows: ``cast`` of the module's weight."""
        module, _, attribute = name.rpartition(".")
        self._row(f"cast {attribute}", module, None, [wide], [low], "ok", measured)

    def _row(
        self,
        op: str,
        module: str,
        source: str | None,
        inputs: list[Tensor],
        outputs: list[Tensor],
        outcome: Outcome,
        measured: Measured,
    ) -> None:
        row = (
            op,
            module,
            source,
            f"{_short(inputs)}→{_short(outputs)}",
            "×".join(map(str, outputs[0].shape)) if outputs else "",
            outcome,
            finite_or_none(measured.local_error),
            finite_or_none(measured.accumulated_error),
            finite_or_none(measured.input_error),
            finite_or_none(measured.absmax),
            finite_or_none(measured.rms),
            measured.introduced_inf,
            measured.introduced_nan,
            measured.flushed,
            measured.input_flushed,
            measured.flips,
            measured.recast,
            _ms(measured.seconds),
            _ms(measured.reference_seconds),
        )
        for append, value in zip(self._append, row, strict=True):
            append(value)

    def gap(self, call: Call, kind: GapKind, layer: Layer, message: str, dtypes: list[str]) -> None:
        """Enter a gap of an op call."""
        self.gap_at(
            call.traits.name,
            call.module,
            call.source,
            kind=kind,
            layer=layer,
            message=message,
            dtypes=dtypes,
            constant=call.largest_number() if kind == "scalar-overflow" else None,
        )

    def gap_at(
        self,
        op: str,
        module: str,
        source: str | None,
        *,
        kind: GapKind,
        layer: Layer,
        message: str,
        dtypes: list[str],
        rescued: bool = True,
        constant: float | None = None,
    ) -> None:
        """Enter a gap; one more call where the same is known at this place."""
        key = (op, kind, module, source)
        known = self._gaps.get(key)
        self._gaps[key] = Gap(
            op=op,
            layer=layer,
            kind=kind,
            phase=self.phase,
            module=module,
            source=source,
            dtypes=known.dtypes if known else dtypes,
            message=known.message if known else first_line(message) or "it raises, without a message",
            calls=known.calls + 1 if known else 1,
            rescued=rescued,
            constant=constant,
        )
        if known is None and self._on_gap is not None:
            self._on_gap(self._gaps[key])

    def fault(self, call: Call, error: Exception) -> None:
        """The instruments themselves failed on this call."""
        self.faults[f"the instruments failed on {call.traits.name}: {first_line(str(error))}"] = None

    @property
    def gaps(self) -> list[Gap]:
        """In the order in which they were met."""
        return list(self._gaps.values())

    def op_calls(self) -> OpCalls:
        """The columns, frozen."""
        return OpCalls(**self.columns)


def first_line(message: str) -> str:
    """The first non-empty line of a message: torch adds C++ stack traces below."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else int(seconds * 1e7) / 1e4
