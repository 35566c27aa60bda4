"""Why a way to train fails, in words. Never imports torch."""

from __future__ import annotations

from lowprec_check.schema.run_key import Phase
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.training import WAYS, Divergence, TrainingWay
from lowprec_check.schema.verdict import ExceptionInfo


def first_way(run: Run) -> TrainingWay | None:
    """The way to train that the status of ``run`` is about; ``None`` if it was not trained."""
    return run.training.ways[0] if run.training is not None and run.training.ways else None


def passing_ways(run: Run) -> list[TrainingWay]:
    """The ways to train in its precision that pass; empty if it was not trained."""
    return [way for way in run.training.ways if way.status == "ok"] if run.training is not None else []


def way_text(name: str | None) -> str:
    """`` with GradScaler``, which follows the name of a run; empty for the plain way, and if nothing was trained."""
    return "" if name in (None, "plain") else f" with {WAYS.get(name or '', name)}"


def loss_text(loss: float | None) -> str:
    """``1.412``; ``Inf/NaN`` for ``None``."""
    return "Inf/NaN" if loss is None else f"{loss:.4g}"


def in_phase(phase: Phase | None) -> str:
    """`` (backward)``, which follows the name of an op; empty for the forward pass, which most ops belong to."""
    return "" if phase in (None, "forward") else f" ({phase})"


def when_raised(step: int | None, raised: ExceptionInfo | None) -> str:
    """``step 3, optimizer: ``, which leads to an exception; the first step and the forward pass are left out."""
    phase = raised.phase if raised is not None and raised.phase != "forward" else None
    parts = [*([f"step {step}"] if step and step > 1 else []), *([phase] if phase else [])]
    return f"{', '.join(parts)}: " if parts else ""


def divergence_text(found: Divergence) -> str:
    """``loss diverges from step 3 (fc.weight)``, ``weights move too little from step 1``."""
    where = f" ({found.parameter})" if found.parameter else ""
    if not found.step:
        return f"loss differs from that of fp32 before the first step{where}"
    if found.what == "progress":
        what = f"weights move too {'far' if found.value > found.limit else 'little'}"
    else:
        what = "loss diverges" if found.what == "loss" else "weights diverge"
    return f"{what} from step {found.step}{where}"


def nonfinite_text(way: TrainingWay) -> str:
    """``NaN or Inf in the loss after step 2``."""
    if None in way.losses:
        steps = way.losses.index(None)
        return f"NaN or Inf in the loss {f'after step {steps}' if steps else 'of the first step'}"
    return f"NaN or Inf in the {'gradients' if way.skipped_steps else 'weights'}"
