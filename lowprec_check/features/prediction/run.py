"""The mode of a scan for a device that is not here: its kernels are emulated on the CPU."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from lowprec_check.catalog.names import why_not_covered
from lowprec_check.core.feature_hooks import Feature
from lowprec_check.core.machine import Machine
from lowprec_check.core.messages import Reporter, Send
from lowprec_check.core.mode import Mode
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.errors import UsageError
from lowprec_check.features.prediction.stand_in_process import assumed_ops, become_stand_in, known_ops, standing_in
from lowprec_check.schema.axes import device_of
from lowprec_check.schema.measures import PredictedDevice
from lowprec_check.schema.op_calls import FALLBACK_WARNING
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import Precision
from lowprec_check.schema.verdict import ExceptionInfo
from lowprec_check.torchkit.compiled import compiled_code_in_eager
from lowprec_check.torchkit.devices import says_device_is_absent

CUSTOM_OP_WITHOUT_CPU = re.compile(r"Could not run '(?!aten::)([^']+)' with arguments from the '\w*CPU' backend")


@dataclass(frozen=True)
class StandIn(Mode):
    """The worker stands in for ``device``: its ops are right, their times mean nothing."""

    device: PredictedDevice
    name = "predicted"
    fails = "is predicted to fail"
    evidence = "predicted"
    has_times = False
    limits_calls = False
    has_backends = False

    def refuse(self, options: ScanOptions) -> None:
        """Training and times need the device."""
        if options.train:
            raise UsageError(
                f"Training is not predicted: {self.device.name} is not here.",
                "Run it on the device, or with --device cpu.",
            )
        if options.scenario is not None:
            raise UsageError("A prediction has no times, so no scenario.", "Leave out --scenario.")

    def why_skipped(self, precision: Precision, device: str) -> str | None:
        """What the catalog does not cover; torch disables the autocast of a device not here."""
        problem = why_not_covered(precision) if precision.kind in ("cast", "autocast") else None
        return problem and f"nothing can be predicted: {problem}"

    def shown_device(self, device: str) -> str:
        """The predicted one."""
        return self.device.name

    def failure_hint(self, error: ExceptionInfo, device: str, target: Target) -> str | None:
        """What fails because the device is not here, or has no kernel."""
        custom = CUSTOM_OP_WITHOUT_CPU.search(error.message)
        if says_device_is_absent(error.message):
            return "The model names the device itself, which is not here: let it use the device of its inputs."
        if custom is not None:
            return f"A prediction runs on the CPU: register a CPU kernel of {custom[1]}."
        if error.type != "NotImplementedError":
            return None
        variable, there = device_of(device).fallback_variable, ""
        if variable:
            there = f" There, {variable}=1 runs such ops on the CPU."
        return f"No kernel of the op is known on {device}.{there} Scan with --device cpu to see the rest."

    def begin(self, target: Target, send: Send) -> None:
        """Become the stand-in; the process can do nothing else afterwards."""
        become_stand_in(self.device)
        warnings.filterwarnings("ignore", message=FALLBACK_WARNING)  # the plain part has filters of its own

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Those of the device; a compiler would trace the emulation."""
        with compiled_code_in_eager(), standing_in(self.device):
            yield

    def finish(self, report: Reporter) -> None:
        """Add the ops in 16 bits that ran, in the catalog and not."""
        # Without those of the instruments; all if those of the model are not known.
        called = set(report.run.op_calls.op)
        known, assumed = ([op for op in ops if op in called or not called] for ops in (known_ops(), assumed_ops()))
        report.add(known_ops=known, assumed_ops=assumed)


class Prediction(Feature):
    """Scans for a device that is not here."""

    def mode(self, source: TargetSource, options: ScanOptions, machine: Machine) -> Mode | None:
        """If the machine is not the device."""
        if machine is None or machine.predicted is None:
            return None
        return StandIn(machine.predicted)


PREDICTION = Prediction()
