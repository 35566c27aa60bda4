"""A ``with`` block under the recorder: gaps are computed in fp32 and noted, and the code goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from lowprec_check.errors import UsageError
from lowprec_check.functions import FunctionRescue
from lowprec_check.instrument import compiled_code_in_eager
from lowprec_check.journal import Journal
from lowprec_check.lockstep import Lockstep
from lowprec_check.precision import Precision
from lowprec_check.recorder import Recorder
from lowprec_check.renderers.assertion import scan_text
from lowprec_check.results import Gap, ModelInfo, OpCalls, Run, ScanResult
from lowprec_check.rules import diagnose
from lowprec_check.where import ModuleStack


class Recording(contextlib.AbstractContextManager["Recording"]):
    """What the code in the block did.

    A function mode is there from the beginning, since the block cannot be run again: ``TransformerEncoderLayer`` and
    ``MultiheadAttention`` leave their inference fast path.
    """

    def __init__(self, precision: Precision, device: str, model: nn.Module | None = None) -> None:
        self._precision, self._device, self._model = precision, device, model
        self._journal: Journal | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recording:
        device_type = self._device.partition(":")[0]
        modules = ModuleStack(self._model or nn.Module(), device_type)
        low = self._precision.low or torch.float16
        self._journal = Journal()
        recorder = Recorder(low, Lockstep(), modules, self._journal, errors="none")
        for context in (compiled_code_in_eager(), modules, recorder, FunctionRescue(recorder)):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def gaps(self) -> list[Gap]:
        """Operators without a kernel, merged by place, in the order in which they were met."""
        return self._recorded().gaps

    @property
    def op_calls(self) -> OpCalls:
        """Every operator call."""
        return self._recorded().op_calls()

    def _recorded(self) -> Journal:
        if self._journal is None:
            raise UsageError("Nothing was recorded.", "with lowprec.record(dtype) as rec: …")
        return self._journal

    def assert_no_gaps(self) -> None:
        """Raise :class:`AssertionError` naming every gap."""
        __tracebackhide__ = True
        if self.gaps:
            raise AssertionError(scan_text(gaps_as_result(self.gaps, self._precision.name, self._device, "the block")))


def gaps_as_result(
    gaps: Sequence[Gap], precision: str, device: str, name: str, source: str | None = None
) -> ScanResult:
    """Gaps as a scan of ``name`` would hold them, with their diagnostics; ``source`` is where it was called."""
    model = ModelInfo(name=name, parameters=0, inputs=[], modules=0, training=False, source=source)
    environment: dict[str, Any] = {"torch": str(torch.__version__), "device": device}
    run = Run(precision=precision, device=device, status="error", gaps=list(gaps))
    result = ScanResult(tool="", target=name, model=model, environment=environment, runs=[run])
    return msgspec.structs.replace(result, diagnostics=diagnose(result, ("LP10",)))
