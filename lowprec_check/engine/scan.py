"""The main job: run a target in every precision, explain, diagnose, recommend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn

from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.engine.machine import environment, version
from lowprec_check.engine.model.precision import PRECISIONS
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.plan.planner import plan_for_scan
from lowprec_check.engine.run.isolation import Isolation, best_isolation, isolated
from lowprec_check.engine.run.job_worker import Load
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.target_runs import OnProgress, SessionOptions, open_session
from lowprec_check.engine.trace.withheld_kernels import parse_withheld
from lowprec_check.errors import UsageError
from lowprec_check.schema.scan_result import ScanResult

DEFAULT_PRECISIONS = tuple(PRECISIONS)


def scan(
    model: nn.Module,
    inputs: Any,
    *,
    precisions: Sequence[str] | None = None,
    loss: Any = None,
    metric: Any = None,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    device: str | None = None,
    plan: bool | None = None,
    **options: Any,
) -> ScanResult:
    """Scan ``model`` on ``inputs`` and return everything found; model, inputs and global state stay as they were.

    Args:
        model: in fp32, in the mode (``eval`` or ``train``) in which it is to be judged.
        inputs: a tensor, a tuple of positional or a mapping of keyword arguments, or a function that makes one.
        precisions: names among ``fp32``, ``bfloat16``, ``autocast-bf16``, ``half``, ``autocast-fp16``; all by default.
        loss: ``loss(output) -> tensor``, run (and checked) as part of the model.
        metric: ``metric(model) -> float``, reported for each run.
        isolation: ``fork`` (default where possible), or ``none`` to run in this process, without budget and crash
            protection (default where this process already uses an accelerator).
        on_progress: called with the name of the run and what it is doing.
        select, ignore: prefixes of diagnostic codes.
        device: ``cpu``, ``cuda``, ``xpu``, ``mps``; the accelerator at hand by default, else the CPU.
        plan: whether to search for modules to keep in fp32 from every precision that fails; by default a quick search
            where none passes.
        options: fields of :class:`~lowprec_check.engine.run.target_runs.SessionOptions`: ``budget`` (seconds), ``errors``
            (``both``, ``accumulated``, ``none``), ``reference`` (``fp32``, ``fp64``), ``tolerance`` (rel_l2), ``seed``,
            ``without_kernel``.

    Raises:
        UsageError: the model, its inputs or an option cannot be scanned; the message says what to do.
    """
    _check_options(options, isolation)
    target = make_target(model, inputs, loss=loss, metric=metric)
    chosen = isolation or best_isolation(can_spawn=False)
    return scan_target(
        target,
        lambda: target,
        chosen,
        precisions=precisions,
        on_progress=on_progress,
        select=select,
        ignore=ignore,
        device=device,
        plan=plan,
        **options,
    )


def scan_target(
    target: Target,
    load: Load,
    isolation: Isolation,
    *,
    precisions: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    device: str | None = None,
    spec: str | None = None,
    plan: bool | None = None,
    **options: Any,
) -> ScanResult:
    """As :func:`scan`, for a loaded target; ``load`` gives it to a worker, ``spec`` is what the user called it."""
    chosen = _check_precisions(precisions)
    parse_withheld(options.get("without_kernel", ()))
    found = isolated(lambda: environment(device), isolation, dict[str, Any])
    settings = SessionOptions(device=found["device"], **options)
    with open_session(target, load, settings, isolation, on_progress) as session:
        fp32 = session.reference()
        runs = [fp32, *(session.run(name) for name in chosen if name != "fp32")]
        planned = plan_for_scan(session, runs, found, spec or target.name, wanted=plan, on_progress=on_progress)
    runs += [planned[0]] if planned is not None else []
    model = describe_target(target, fp32)
    result = ScanResult(
        tool=f"lowprec-check {version()}",
        target=spec or target.name,
        model=model,
        environment=found,
        options={
            "isolation": isolation,
            "precisions": chosen,
            "select": list(select),
            "ignore": list(ignore),
            **_plain_options(settings),
        },
        runs=runs,
        recommendation=recommend(runs, model),
        plan=planned[1] if planned is not None else None,
    )
    return msgspec.structs.replace(result, diagnostics=diagnose(result, select, ignore))


_CHOICES = {"errors": ("both", "accumulated", "none"), "reference": ("fp32", "fp64")}


def _check_options(options: dict[str, Any], isolation: str | None) -> None:
    if isolation not in (None, "fork", "none"):
        raise UsageError(f"Unknown isolation {isolation!r}.", "Choose fork or none.")
    for name, choices in _CHOICES.items():
        if options.get(name, choices[0]) not in choices:
            raise UsageError(f"Unknown {name} {options[name]!r}.", f"Choose among {', '.join(choices)}.")


def _check_precisions(precisions: Sequence[str] | None) -> list[str]:
    names = list(precisions or DEFAULT_PRECISIONS)
    for name in names:
        if name not in PRECISIONS:
            raise UsageError(f"Unknown precision {name!r}.", f"Choose among {', '.join(PRECISIONS)}.")
    return list(dict.fromkeys(names))


def _plain_options(settings: SessionOptions) -> dict[str, Any]:
    return {
        "budget": settings.budget,
        "errors": settings.errors,
        "reference": settings.reference,
        "tolerance": settings.tolerance,
        "seed": settings.seed,
        "without_kernel": list(settings.without_kernel),
    }
