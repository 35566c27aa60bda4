"""The search for a mixed-precision plan over all allowed bases; plain runs confirm it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from torch import Tensor, nn

from lowprec_check.analysis.error_shares import best_input_trial
from lowprec_check.analysis.run_summary import plan_starts
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.suspects import blame
from lowprec_check.catalog.versions import own_version
from lowprec_check.core.machine import Machine, environment, machine_and_isolation
from lowprec_check.core.target_runs import TargetRuns, open_runs
from lowprec_check.core.trace.plain_modes import parse_withheld
from lowprec_check.engine.model.model_info import describe_target
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.model.target_source import TargetSource
from lowprec_check.engine.model.target_spec import OnProgress
from lowprec_check.errors import UsageError
from lowprec_check.features.plan.apply import describe_modules
from lowprec_check.features.plan.trials import Limits, Objective, Proposal, Proposer, best
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import replaced
from lowprec_check.schema.options import PlanOptions, ScanOptions, called_with, option
from lowprec_check.schema.plan import Plan, Planning
from lowprec_check.schema.precisions import plan_bases
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.torchkit.devices import kept_generators
from lowprec_check.torchkit.isolation import check_isolation

QUICK = Limits(max_trials=60, seconds=120.0, most_alone=3)  # limits of the search that a scan does by default


@dataclass(frozen=True, kw_only=True)
class PlanArguments(PlanOptions):
    """The keyword arguments of :func:`find_plan`."""

    use_metric: bool = field(default=False, init=False)
    predict: bool = field(default=True, init=False)
    loss: Callable[[Any], Tensor] | None = option(None, "loss(output) -> tensor, run as part of the model.")
    metric: Callable[[nn.Module], float] | None = option(
        None, "metric(model) -> float, higher is better; used instead of the tolerance."
    )
    isolation: Isolation | None = option(None, "fork, spawn, shared or none, as for a scan.")
    on_progress: OnProgress | None = option(None, "Called with the name of the run and its progress.")

    def __post_init__(self) -> None:
        """A metric that is given is used."""
        object.__setattr__(self, "use_metric", self.metric is not None)
        super().__post_init__()


@called_with(PlanArguments)
def find_plan(model: nn.Module, inputs: Any, given: PlanArguments) -> Planning:
    """Find the fewest modules that must stay in fp32 for ``model`` to pass, by plain runs.

    Args:
        model: in fp32, in the mode (``eval`` or ``train``) to search in.
        inputs: as for :func:`lowprec_check.scan`; for several batches, a function of the number.

    Returns:
        Every base that was tried, and the best plan if there is one.

    Raises:
        UsageError: the model or an option cannot be used; the message explains what to do.
    """
    check_isolation(given.isolation)
    target = make_target(model, inputs, loss=given.loss, metric=given.metric)
    source = TargetSource(target)
    source.on_progress = given.on_progress or source.on_progress
    return plan_target(source, given.isolation, given)


def plan_target(source: TargetSource, isolation: Isolation | None, options: PlanOptions) -> Planning:
    """Like :func:`find_plan`, for a loaded target."""
    *_, planning = growing_planning(source, isolation, options)
    return planning


def growing_planning(source: TargetSource, isolation: Isolation | None, options: PlanOptions) -> Iterator[Planning]:
    """Yield the bases tried so far and the best plan found, after each base."""
    target = source.target
    if options.use_metric and target.metric is None:
        raise UsageError(
            "The file defines no metric.",
            "Define `def metric(model): return accuracy`, higher is better; if the file calls the model, above that "
            "call.",
        )
    parse_withheld(options.without_kernel)
    machine, isolation = machine_and_isolation(
        source, isolation, options.device_name, lambda: Machine(environment=environment(options.device_name))
    )
    settings = ScanOptions(
        tolerance=options.tolerance,
        seed=options.seed,
        without_kernel=options.without_kernel,
        judge=options.judge,
        limit=options.limit,
        budget_error="auto" if options.predict else "off",
        further_inputs=0,
        thorough=True,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_generators())
        batches = []
        for number in range(options.batches):
            batch = source.batch(number, settings.seed)
            batches.append(stack.enter_context(open_runs(batch, settings, machine, isolation)))
        references = [batch.reference() for batch in batches]
        if options.use_metric and references[0].metric is None:
            about = [note for note in references[0].notes if note.startswith(("the metric", "metric(model)"))]
            why = f": {about[-1]}" if about else ""
            raise UsageError(f"The metric of the fp32 model is not a finite number{why}.", "Fix the function `metric`.")
        objective = Objective(references[0], metric=options.use_metric, max_drop=options.max_drop)
        proposer = Proposer(batches, objective, Limits(seconds=options.seconds))
        backend = replaced([options.backend])[0][0]
        runs = [
            [batch.run(name, backend, measured=batch is batches[0], instrumented=False) for batch in batches]
            for name in options.bases()
        ]
        found = proposer.propose_each(runs)
        # All bases without changes if one of them passes; else a search for each.
        if any(map(proposer.passes_as_it_is, runs)):
            timed = batches[0].time([of_base[0] for of_base in runs]).runs[1:]
            pairs = zip(timed, runs, strict=True)
            found = (proposer.without_search([first, *of_base[1:]]) for first, of_base in pairs)
        proposals: list[Proposal] = []
        for proposal in found:
            proposals.append(proposal)
            winner = best(proposals)
            yield Planning(
                target=source.name,
                model=type(target.model).__name__,
                device=machine.runs_on,
                attempts=[tried.attempt for tried in proposals],
                plan=make_plan(winner, proposer, machine.environment, source.name) if winner is not None else None,
            )


def make_plan(proposal: Proposal, proposer: Proposer, machine: dict[str, Any], name: str) -> Plan:
    """The proposal as it is saved; ``machine`` is the environment, with the predicted torch."""
    run, objective, target = proposal.run, proposer.objective, proposer.batches[0].target
    assert run is not None
    assert run.base is not None
    key = run.key._replace(precision=run.base)
    return Plan(
        tool=f"lowprec-check {own_version()}",
        target=name,
        base=run.base,
        backend=run.backend,
        device=run.device,
        memory_format=run.memory_format,
        evidence=run.evidence,
        keep_fp32=run.keep_fp32,
        keep_fp32_inputs=run.keep_fp32_inputs,
        untied=run.untied,
        minimal=proposal.minimal,
        unconfirmed=len(proposal.untried),
        stopped=proposal.stopped,
        tolerance=run.tolerance if objective.fp32_metric is None and run.by_meaning is None else None,
        rel_l2=run.output_error.rel_l2 if run.output_error else None,
        predicted=proposal.attempt.predicted,
        metric=run.metric,
        fp32_metric=objective.fp32_metric,
        max_drop=objective.max_drop,
        batches=len(proposer.batches),
        trials=proposal.attempt.trials,
        first_pass=proposal.attempt.first_pass,
        seconds=proposal.attempt.seconds,
        latency_ms=run.latency_ms,
        speedup=proposal.attempt.speedup,
        peak_memory_bytes=run.peak_memory_bytes,
        blame=blame(proposal.evidence, run.keep_fp32, proposal.untried),
        environment={key: machine.get(key) for key in ("torch", "python", "device", "cpu_capability")},
        modules=describe_modules(target.model),
        code=snippet(
            key,
            describe_target(target, proposer.fp32),
            run.keep_fp32,
            run.untied,
            keep_fp32_inputs=run.keep_fp32_inputs,
            torch_version=str(machine.get("torch") or ""),
        ),
    )


def plan_for_scan(batches: Sequence[TargetRuns], result: ScanResult, *, wanted: bool | None) -> ScanResult:
    """``result`` with what was tried for its failing runs, and the best plan for all batches."""
    # Unless it is asked for, the search is quick, made only if no run passed, and ends at a plan. A
    # run that passes with an input in fp32 needs no search for modules.
    runs = result.runs
    starts = plan_starts(runs, wanted=wanted)
    if wanted is None:
        tried = [(run, best_input_trial(run)) for run in plan_starts(runs, wanted=True)]
        starts = [run for run, trial in tried if trial is not None and trial.status == "ok"] or starts
    failing = {(run.precision, run.backend): run for run in starts}
    backends = dict.fromkeys(backend for _, backend in failing)
    bases = [(base.name, backend) for backend in backends for base in plan_bases()]
    proposer = Proposer(batches, Objective(runs[0]), Limits() if wanted else QUICK, explains=True)
    proposals: list[Proposal] = []
    for proposal in proposer.propose_each([failing[base]] for base in bases if base in failing):
        proposals.append(proposal)
        if proposal.run is not None and not wanted and proposal.run.keep_fp32:
            break
    result = msgspec.structs.replace(result, attempts=[proposal.attempt for proposal in proposals])
    winner = best(proposals)
    if winner is None or winner.run is None:
        return result
    plan = make_plan(winner, proposer, result.environment | {"torch": result.torch}, result.target)
    return msgspec.structs.replace(result, runs=[*runs, winner.run], plan=plan)
