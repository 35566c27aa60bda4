"""The texts that all formats share, as plain strings: title, one row per run, merged findings, verdict.

Each is one line without invisible characters (:mod:`~lowprec_check.report.escape`).
"""

from __future__ import annotations

from lowprec_check.analysis import run_summary
from lowprec_check.analysis.degenerate_output import degenerate_output
from lowprec_check.analysis.run_summary import (
    candidates,
    counted,
    explain_status,
    in_fp32,
    short_op,
)
from lowprec_check.analysis.speed import TOLD
from lowprec_check.analysis.training_status import passing_ways, way_text
from lowprec_check.report.certainty import place_text
from lowprec_check.report.escape import visible, visible_lines
from lowprec_check.schema.precisions import LOW_FORMATS, low_precisions
from lowprec_check.schema.recommendation import Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult

SCOPE = "Only the forward pass was run."
"""What a scan without ``--train`` covers."""


def no_pass(result: ScanResult) -> str:
    """The verdict if no precision passed; names those tried if not all were."""
    low = [run for run in candidates(result.runs) if run.base is None]
    tried = [run for run in low if run.status != "skipped"]
    passed = "passed here" if result.prediction is None else "is predicted to pass"
    if {precision.name for precision in low_precisions()} <= {run.precision for run in tried}:
        return f"No low precision {passed}. Stay in fp32."
    if not tried:
        return f"No precision {passed}; none could be run."
    advice = "Scan without -p to try all." if len(tried) == len(low) else "Scan again to try the others."
    return f"No precision {passed}; tried: {', '.join(map(label, tried))}. {advice}"


def title(result: ScanResult) -> str:
    """Model, size, inputs: the first line of a report."""
    model = result.model
    inputs = f"input {', '.join(model.inputs[:3])}{', …' if len(model.inputs) > 3 else ''}"
    return visible(" · ".join([model.name, f"{format_count(model.parameters)} parameters", inputs]))


def machine(result: ScanResult) -> str:
    """The torch version and the device, with the formats it accelerates or that it is predicted: the second line of a report."""
    env = result.environment
    if result.prediction is not None:
        return visible(f"torch {result.torch} · {place_text(result.prediction, str(env.get('torch')))}")
    accelerated = [(low.short, env.get(f"{low.short}_accelerated")) for low in LOW_FORMATS]
    device = ", ".join(f"{name} {'accelerated' if yes else 'not'}" for name, yes in accelerated if yes is not None)
    where = f"{env.get('device')}: {device}" if device else str(env.get("device"))
    return visible(f"torch {result.torch.partition('+')[0]} · {where}")


def scope(result: ScanResult) -> str:
    """What the scan covers: how the model was trained, or that only its forward pass was run."""
    setup = result.training
    if setup is None:
        return SCOPE
    default = {True: " (default)", False: ""}
    parts = [
        f"{counted(setup.steps, 'step')} of {setup.optimizer}{default[setup.default_optimizer]}",
        f"loss: {setup.loss}{default[setup.default_loss]}",
        *(["a new batch each step" if setup.new_batches else "the same batch each step"] if setup.steps > 1 else []),
    ]
    return visible(", ".join(parts), 600) + "."


def format_count(number: int) -> str:
    """``11.7 M`` of 11 689 512."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f} {unit}"
    return str(number)


# -- runs


def label(run: Run) -> str:
    """The name of the run in reports."""
    return visible(run_summary.label(run))


def format_ratio(ratio: float | None) -> str:
    """``1.25 ×``."""
    if ratio is None:
        return "–"
    return f"{ratio:.0f} ×" if ratio >= 10 else f"{ratio:.2f} ×" if ratio >= 0.01 else f"{ratio:.1g} ×"


# -- the verdict


def verdict(result: ScanResult) -> str:
    """The recommendation in a few words."""
    best = result.recommendation
    if best is None:
        return no_pass(result)
    keep = f" with {in_fp32(best.keep_fp32, result.model.modules)}" if best.keep_fp32 else ""
    if not passes(result):
        return visible(f"{best.label} could not be judged")
    name = f"{best.label}{way_text(best.way)}{keep}"
    if not best.stay_in_fp32:
        return visible(f"Use {name}")
    fp32 = "fp32" if any(run.is_low for run in result.runs) else "eager fp32"
    if best.worth in ("nothing", "unknown"):
        return visible(f"Stay in {fp32}: {name} {_no_gain(best)}")
    return visible(f"Stay in {fp32} for {best.prefer}; {name} {_after_name(best.gain)}")


def verdict_with_gain(result: ScanResult) -> str:
    """The verdict as one sentence, with what is gained: ``Use half: 1.4 times as fast as fp32.``."""
    best = result.recommendation
    gain = f": {best.gain}" if best is not None and best.gain and is_gain(result) else ""
    return visible(f"{verdict(result).rstrip('.')}{gain}.")


def _no_gain(best: Recommendation) -> str:
    slower = best.speedup is not None and best.speedup <= 1 / TOLD
    if best.worth == "unknown":
        return "is slower"
    return "is slower and saves no memory" if slower else "is not faster and saves no memory"


def joint(result: ScanResult) -> str:
    """What leads from the verdict to its reason: ``Use half: passes (…)``, ``Stay in fp32 …; half saves …. It passes (…)``."""
    best = result.recommendation
    return ". It " if best is not None and best.stay_in_fp32 else ": "


def _after_name(gain: str) -> str:
    """``is 1.4 times as fast as fp32``, ``saves 50 % of the memory``."""
    return gain if gain.startswith("saves") else f"is {gain}"


def is_gain(result: ScanResult) -> bool:
    """Whether the recommendation gains something over fp32; an older file does not say."""
    best = result.recommendation
    return best is not None and passes(result) and not best.stay_in_fp32 and best.worth not in ("nothing", "unknown")


def is_recommended(run: Run, result: ScanResult) -> bool:
    """Whether the recommendation is to run the model so."""
    advice = result.recommendation
    if advice is None or not (run.status in ("ok", "unjudged") or passing_ways(run)):
        return False
    recommended = (advice.precision, advice.backend, advice.memory_format, advice.keep_fp32)
    return (run.base or run.precision, run.backend, run.memory_format, run.keep_fp32) == recommended


def tag(run: Run, result: ScanResult) -> str:
    """``recommended`` beside the name of a run; ``best in low precision`` where fp32 is better in what is preferred.

    Empty if the output of the recommended run cannot be judged: then the verdict recommends nothing either.
    """
    best = result.recommendation
    if best is not None and not passes(result):
        return ""
    if best is not None and best.stay_in_fp32:
        return "recommended" if run.is_reference else "best in low precision" if is_recommended(run, result) else ""
    return "recommended" if is_recommended(run, result) else ""


def passes(result: ScanResult) -> bool:
    """Whether the recommended run passed, or a way to train in its precision; if not, no output could be compared, or tells anything."""
    best = result.recommendation
    if any(is_recommended(run, result) and degenerate_output(run, result) for run in candidates(result.runs)):
        return False
    passed = (run.status == "ok" or passing_ways(run) for run in candidates(result.runs))
    return best is not None and (bool(best.keep_fp32) or any(passed))


def reason(result: ScanResult, most: int) -> str:
    """The reason of the recommendation as a sentence of at most ``most`` characters; empty if there is none."""
    text = result.recommendation.reason if result.recommendation else ""
    return visible(text[:1].upper() + text[1:], most)


def code_lines(result: ScanResult) -> str:
    """The code to paste, each line made visible; empty if nothing is recommended."""
    advice = result.recommendation
    return "\n".join(visible_lines(advice.code, 2000)) if advice else ""


def kept(result: ScanResult) -> list[str]:
    """Why each module of the recommended plan stays in fp32; empty if no plan is recommended."""
    plan, best = result.plan, result.recommendation
    if plan is None or best is None or best.keep_fp32 != plan.keep_fp32:
        return []
    lines = []
    for blame in plan.blame:
        what = f"{short_op(blame.op)} {blame.why}" if blame.op else blame.why
        lines.append(visible(f"{blame.module}: {what}" + (f" ({blame.source})" if blame.source else "")))
    return lines


def failures(result: ScanResult) -> list[str]:
    """Why each low-precision run failed, for scans in which none passed."""
    return [visible(f"{label(run)}: {explain_status(run)}") for run in candidates(result.runs)]
