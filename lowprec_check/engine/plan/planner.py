"""The smallest mixed-precision plan that a plain run confirms, of all the bases that are allowed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import nn

from lowprec_check.analysis.blame import blame
from lowprec_check.analysis.snippet import paste
from lowprec_check.engine.machine import environment, version
from lowprec_check.engine.model.precision import PRECISIONS, Precision, seed_everything
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.plan.apply import describe_modules
from lowprec_check.engine.plan.trials import BASES, Limits, Objective, Proposal, Proposer, best
from lowprec_check.engine.run.isolation import Isolation, best_isolation, isolated
from lowprec_check.engine.run.job_worker import Load
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.target_runs import OnProgress, Session, SessionOptions, open_session
from lowprec_check.engine.trace.withheld_kernels import parse_withheld
from lowprec_check.errors import UsageError
from lowprec_check.schema.plan import Base, Plan, Planning
from lowprec_check.schema.scan_result import Run

QUICK = Limits(max_trials=60, seconds=120.0)
"""Of the search that a scan makes unasked."""

Dtype = Literal["bf16", "fp16"]
Kind = Literal["autocast", "cast"]

_LOW: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def find_plan(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Any = None,
    metric: Any = None,
    isolation: Isolation | None = None,
    **options: Any,
) -> Planning:
    """Find the fewest modules of ``model`` that must stay in fp32 for it to pass, and prove it.

    Args:
        model: in fp32, in the mode in which it is to be judged.
        inputs: as :func:`lowprec_check.scan` takes them; for several batches a function that takes the batch's number.
        loss: ``loss(output) -> tensor``, run as part of the model.
        metric: ``metric(model) -> float``, the more the better: the objective in place of the tolerance.
        isolation: ``fork`` or ``none``, as for a scan.
        options: ``dtype`` (``bf16``, ``fp16``), ``base`` (``autocast``, ``cast``), ``max_drop`` (of the metric), ``batches``,
            ``max_trials``, ``seconds``, ``on_progress``, ``device``, ``tolerance``, ``seed``, ``without_kernel``.

    Raises:
        UsageError: the model or an option cannot be used; the message says what to do.
    """
    target = make_target(model, inputs, loss=loss, metric=metric)
    chosen = isolation or best_isolation(can_spawn=False)
    return plan_target(target, lambda: target, chosen, use_metric=metric is not None, **options)


def plan_target(
    target: Target,
    load: Load,
    isolation: Isolation,
    *,
    dtype: Dtype | None = None,
    base: Kind | None = None,
    use_metric: bool = False,
    max_drop: float | None = None,
    batches: int = 1,
    max_trials: int = Limits.max_trials,
    seconds: float = Limits.seconds,
    on_progress: OnProgress | None = None,
    device: str | None = None,
    spec: str | None = None,
    **options: Any,
) -> Planning:
    """As :func:`find_plan`, for a loaded target; ``load`` gives it to a worker, ``spec`` is what the user called it."""
    if dtype not in (None, "bf16", "fp16") or base not in (None, "autocast", "cast") or batches < 1:
        raise UsageError(
            f"Nothing to search: {dtype=}, {base=}, {batches=}.", "dtype is bf16 or fp16, base autocast or cast."
        )
    if use_metric and options.get("tolerance") is not None:
        raise UsageError("Both a metric and a tolerance are given.", "The metric is judged by --max-drop.")
    if max_drop is not None and not use_metric:
        raise UsageError("--max-drop is of a metric, and none is asked for.", "Add --metric.")
    if use_metric and target.metric is None:
        raise UsageError(
            "The file defines no metric.", "Define `def metric(model): return accuracy`, higher is better."
        )
    parse_withheld(options.get("without_kernel", ()))
    found = isolated(lambda: environment(device), isolation, dict[str, Any])
    settings = SessionOptions(device=found["device"], **options)
    with contextlib.ExitStack() as stack:
        sessions = []
        for batch in range(batches):
            seed_everything(settings.seed + batch)
            load_batch = functools.partial(_load_batch, load, batch, settings.seed)
            opened = open_session(target.batch(batch), load_batch, settings, isolation, on_progress)
            sessions.append(stack.enter_context(opened))
        references = [session.reference() for session in sessions]
        if use_metric and references[0].metric is None:
            why = f": {references[0].notes[-1]}" if references[0].notes else ""
            raise UsageError(f"The metric of the fp32 model is no finite number{why}.", "Mend that first.")
        objective = Objective(references[0], metric=use_metric, max_drop=max_drop)
        proposer = Proposer(sessions, objective, Limits(max_trials=max_trials, seconds=seconds), on_progress)
        bases = [name for name in BASES if _is_allowed(PRECISIONS[name], dtype, base)]
        proposals = _search_bases(sessions, proposer, bases)
    winner = best(proposals)
    name = spec or target.name
    return Planning(
        target=name,
        model=type(target.model).__name__,
        device=found["device"],
        attempts=[proposal.attempt for proposal in proposals],
        plan=make_plan(winner, target, references[0], proposer, found, name) if winner is not None else None,
    )


def _load_batch(load: Load, batch: int, seed: int) -> Target:
    target = load()
    seed_everything(seed + batch)
    return target.batch(batch)


def _is_allowed(precision: Precision, dtype: Dtype | None, kind: Kind | None) -> bool:
    way = {"autocast": precision.autocast, "cast": precision.cast, None: precision.low}[kind]
    return way is not None and (dtype is None or way == _LOW[dtype])


def _search_bases(sessions: Sequence[Session], proposer: Proposer, bases: Sequence[str]) -> list[Proposal]:
    """As they are where one of them passes so; else each with modules kept in fp32."""
    runs = {name: [session.run(name, measured=session is sessions[0]) for session in sessions] for name in bases}
    if any(proposer.passes_as_it_is(of_base) for of_base in runs.values()):
        return [proposer.judge(of_base) for of_base in runs.values()]
    return list(proposer.propose_each(runs.values()))


def make_plan(
    proposal: Proposal, target: Target, fp32: Run, proposer: Proposer, found: dict[str, Any], name: str
) -> Plan:
    """The proposal as it is saved; ``found`` is the environment."""
    run, objective = proposal.run, proposer.objective
    assert run is not None
    assert run.base is not None
    return Plan(
        tool=f"lowprec-check {version()}",
        target=name,
        base=cast(Base, run.base),
        device=run.device,
        keep_fp32=run.keep_fp32,
        untied=run.untied,
        minimal=proposal.minimal,
        stopped=proposal.stopped,
        tolerance=run.tolerance if objective.fp32_metric is None else None,
        rel_l2=run.output_error.rel_l2 if run.output_error else None,
        metric=run.metric,
        fp32_metric=objective.fp32_metric,
        max_drop=objective.max_drop,
        batches=len(proposer.sessions),
        trials=proposal.attempt.trials,
        seconds=proposal.attempt.seconds,
        latency_ms=run.latency_ms,
        speedup=proposal.attempt.speedup,
        peak_memory_bytes=run.peak_memory_bytes,
        blame=blame(proposal.evidence, run.keep_fp32),
        environment={key: found.get(key) for key in ("torch", "python", "device", "cpu_capability")},
        modules=describe_modules(target.model),
        code=paste(run.base, run.device, describe_target(target, fp32), run.keep_fp32, run.untied),
    )


def plan_for_scan(
    session: Session,
    runs: Sequence[Run],
    found: dict[str, Any],
    name: str,
    *,
    wanted: bool | None,
    on_progress: OnProgress | None,
) -> tuple[Run, Plan] | None:
    """The best plan from the failing runs of a scan, whose first is fp32.

    Where nobody said whether it is ``wanted``, a quick one is made if no run passed: the first found will do.
    """
    failing = {run.precision: run for run in runs[1:] if run.status != "ok"}
    if wanted is False or not failing or (wanted is None and len(failing) < len(runs) - 1):
        return None
    proposer = Proposer([session], Objective(runs[0]), Limits() if wanted else QUICK, on_progress)
    proposals: list[Proposal] = []
    for proposal in proposer.propose_each([failing[base]] for base in BASES if base in failing):
        proposals.append(proposal)
        if proposal.run is not None and not wanted:
            break
    winner = best(proposals)
    if winner is None or winner.run is None:
        return None
    return winner.run, make_plan(winner, session.target, runs[0], proposer, found, name)
