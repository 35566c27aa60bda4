"""What a predicted result says of itself: that nothing ran on the device, and how sure it is. Never imports torch."""

from __future__ import annotations

from lowprec_check.analysis.run_summary import some
from lowprec_check.catalog.declared import release_of
from lowprec_check.report.escape import visible
from lowprec_check.schema.predicted_device import PredictedDevice
from lowprec_check.schema.scan_result import ScanResult

_NAMED = 5


def prediction_in_brief(result: ScanResult) -> str:
    """``Predicted: nothing ran on xpu.``; empty for a measured result."""
    return f"Predicted: {_what_did_not_run(result.prediction, result)}." if result.prediction else ""


def prediction_text(result: ScanResult) -> str:
    """The same with what it rests on and how much of the model that covers; empty for a measured result."""
    device = result.prediction
    if device is None:
        return ""
    policy = f"; its autocast policy: torch {device.autocast}" if device.autocast != device.torch else ""
    return visible(f"{prediction_in_brief(result)} Its kernels: {device.kernels}{policy}; {_covered(result)}.", 1000)


def predicted_for(result: ScanResult) -> list[tuple[str, str]]:
    """The row above the environment, which is that of the machine that predicted."""
    device = result.prediction
    return [("predicted for", f"{device.name}, torch {device.torch}")] if device else []


def place_text(device: PredictedDevice, installed: str) -> str:
    """``xpu, predicted on a CPU``; ``cpu, predicted with torch 2.13``, the ``installed`` one."""
    if device.name != "cpu":
        return f"{device.name}, predicted on a CPU"
    other = release_of(installed)
    return f"cpu, predicted with torch {other}" if device.torch != other else "cpu, predicted"


def _what_did_not_run(device: PredictedDevice, result: ScanResult) -> str:
    if device.name != "cpu":
        return f"nothing ran on {device.name}"
    if device.torch != release_of(str(result.environment["torch"])):
        return f"nothing ran with torch {device.torch}"
    return "the 16-bit kernels of the CPU were emulated"


def _covered(result: ScanResult) -> str:
    """``41 of 43 ops in 16 bits are known, 2 are assumed to run: …``, over all runs."""
    assumed = sorted({op for run in result.runs for op in run.assumed_ops})
    known = {op for run in result.runs for op in run.known_ops} - {*assumed}
    total = len(known) + len(assumed)
    if not total:
        return "no op ran in 16 bits"
    verb = "is" if len(known) == 1 else "are"
    text = f"{len(known)} of {total} {'op' if total == 1 else 'ops'} in 16 bits {verb} known"
    if not assumed:
        return text
    return f"{text}, {len(assumed)} {'is' if len(assumed) == 1 else 'are'} assumed to run: {some(assumed, _NAMED)}"
