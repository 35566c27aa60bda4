"""Which modules to keep in fp32 for each base: a search by trials, which are plain runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from torch import nn

from lowprec_check.analysis.error_shares import LEAST_SHARE, UNCHANGED, share_of_inputs, trusted_budget
from lowprec_check.analysis.predicted_error import Keep, ModuleTree
from lowprec_check.analysis.run_summary import error_of, ranges_of
from lowprec_check.analysis.speed import CLEAR, SHORT_MS, speed
from lowprec_check.analysis.statements.status import why
from lowprec_check.analysis.suspects import BY_TRIAL, Suspects, at_fault, blame, constants, suspects
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.engine.model.inputs import named_tensors
from lowprec_check.engine.model.prepared import shared_weights
from lowprec_check.features.plan.minimize import SearchResult, Trials, Verdict, search
from lowprec_check.process import system
from lowprec_check.schema.axes import keeps_layers, kept_in, lowers_precision
from lowprec_check.schema.measures import MATTERS, InputTrial
from lowprec_check.schema.module_paths import module_around, number_of, patterns
from lowprec_check.schema.plan import STOPPED_WITHOUT_PLAN, Attempt
from lowprec_check.schema.precisions import PRECISIONS, formats
from lowprec_check.schema.run_key import PLAN
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.statements import counted, say, short_op, some
from lowprec_check.torchkit.floating_dtypes import NARROW

MOST, SECONDS = 24, 30.0
"""Limits of the trials of one run."""
MOST_TOGETHER = 3
"""So many inputs are kept in fp32 together."""


def is_input_suspect(run: Run) -> bool:
    """Whether the cast of inputs may be a cause of the failure of ``run``."""
    precision = PRECISIONS.find(run.precision)
    if precision is None or precision.kind != "cast" or run.status not in ("inaccurate", "nonfinite"):
        return False
    if trusted_budget(run) is None or run.rel_l2 is None:
        # Keeping a module in fp32 leaves the inputs rounded: if that is enough, they are.
        return run.ablation is None or run.ablation.status != "ok"
    share = share_of_inputs(run)
    rest = run.rel_l2 * math.sqrt(max(0.0, 1.0 - share))
    return share >= LEAST_SHARE or (share >= MATTERS and rest <= (run.relative_tolerance or 0.0))


class _Outcome(NamedTuple):
    """What a set of inputs in fp32 gives, for sorting: the best first."""

    fails: bool
    error: float  # infinite without an output to compare, or if nothing is left in low precision


class InputTrials:
    """Tries inputs of a failing run in fp32: each, the best with each other, at last all sets."""

    def __init__(
        self, batches: Sequence[TargetRuns], run: Run, reached: Callable[[Run], bool], keep_fp32: Sequence[str] = ()
    ) -> None:
        """``reached`` says whether a run passes; all ``batches`` must. ``keep_fp32`` names the
        modules that are in fp32 in ``run``.
        """
        self._batches, self._run, self._reached, self._keep_fp32 = batches, run, reached, tuple(keep_fp32)
        self._started = system.monotonic()
        self._outcomes: dict[frozenset[str], _Outcome] = {}
        self.trials: list[InputTrial] = []
        self.best: tuple[str, ...] = ()
        """The inputs with which it passes, or comes nearest; empty if none helps."""
        self.passes = False
        target = batches[0].target
        tensors = named_tensors(target.args, target.kwargs, target.form)
        names = [name for name, value in tensors.items() if value.is_floating_point() and value.dtype not in NARROW]
        error = math.inf if self._run.rel_l2 is None else self._run.rel_l2
        while len(self.best) < MOST_TOGETHER and not self.passes:
            further = [(*self.best, name) for name in names if name not in self.best]
            choice, outcome = self._best_of(further)
            # Some help only together: they meet in one op, or all of them have a part in the error.
            for size in range(2, MOST_TOGETHER + 1):
                if self.best or not outcome.fails or outcome.error <= UNCHANGED * error:
                    break
                choice, outcome = self._best_of(itertools.combinations(names, size))
            if not choice or (outcome.fails and outcome.error > UNCHANGED * error):
                break
            self.best, self.passes, error = choice, not outcome.fails, outcome.error
        # A later input may have made an earlier one superfluous.
        for name in self.best[:-1]:
            fewer = tuple(other for other in self.best if other != name)
            if self.passes and fewer and not self._best_of([fewer])[1].fails:
                self.best = fewer

    def _best_of(self, sets: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], _Outcome]:
        """The best of ``sets`` that there is time for, and what it gives."""
        best: tuple[str, ...] = ()
        best_outcome = _Outcome(True, math.inf)
        for names in sets:
            outcome = self._outcomes.get(frozenset(names))
            if outcome is None:
                if len(self.trials) >= MOST or system.monotonic() - self._started > SECONDS:
                    break
                outcome = self._outcomes[frozenset(names)] = self._try(names)
            if outcome < best_outcome:
                best, best_outcome = names, outcome
        return best, best_outcome

    def _try(self, names: tuple[str, ...]) -> _Outcome:
        runs: list[Run] = []
        for batch in self._batches:
            precision, backend, _, memory_format = self._run.key
            how: Any = {"keep_fp32": self._keep_fp32, "measured": False, "instrumented": False}
            runs.append(batch.run(precision, backend, memory_format, keep_fp32_inputs=names, **how))
            if not self._reached(runs[-1]):
                break
        fails = not self._reached(runs[-1])
        worst = runs[-1] if fails else max(runs, key=error_of)
        error = worst.rel_l2
        self.trials.append(InputTrial(inputs=list(names), status=worst.status, rel_l2=error))
        # An output equal to that of fp32 means that nothing is left in low precision.
        if not error or worst.status not in ("ok", "inaccurate"):
            return _Outcome(True, math.inf)
        return _Outcome(fails, error)


MOST_EXPLAINED = 8  # kept modules without a reason for which another run is analyzed
SLOWER = 1.5  # times a plan already found that a base may take to be searched, unless its calls are short


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a search may take: ``max_trials`` runs for each base, ``seconds`` in total."""

    max_trials: int = 200
    """For models of many modules whose trials are quick; of others, ``seconds`` ends the search."""
    seconds: float = 600.0
    most_alone: int | None = None
    """Modules that may fail alone before the search ends, if only fp32 is known to pass."""


class Objective:
    """When a run passes: by its tolerance, or if its metric drops by at most ``max_drop``."""

    def __init__(self, fp32: Run, *, metric: bool = False, max_drop: float | None = None) -> None:
        """``max_drop`` is in units of the metric; default: 1 % of fp32's."""
        self.fp32_metric = fp32.metric if metric else None
        self.max_drop = None
        if self.fp32_metric is not None:
            self.max_drop = abs(self.fp32_metric) / 100 if max_drop is None else max_drop

    def reached(self, run: Run) -> bool:
        """Whether ``run`` passes."""
        if self.fp32_metric is None or self.max_drop is None:
            return run.status == "ok"
        if run.metric is None:
            return False
        return run.status in ("ok", "inaccurate") and self.fp32_metric - run.metric <= self.max_drop

    def why_not(self, run: Run) -> str:
        """Why ``run`` does not pass, in words; empty if it does."""
        if self.reached(run):
            return ""
        if self.fp32_metric is not None and run.status in ("ok", "inaccurate"):
            if run.metric is None:
                return "the metric is not a finite number"
            drop = "the metric is {metric:loss}, in fp32 {fp32:loss}, and may drop by {most:loss}"
            return say(drop, metric=run.metric, fp32=self.fp32_metric, most=self.max_drop).text
        return why(run).text

    def attempt(self, run: Run, **results: object) -> Attempt:
        """What is known of a base by ``run``, one of its runs, and by further ``results``."""
        of_run = {
            "base": run.precision,
            "backend": run.backend,
            "status": run.status,
            "why": self.why_not(run),
            "rel_l2": run.output_error and run.output_error.distance,
        }
        return msgspec.convert(of_run | results, Attempt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """The best plan that the search found for one base."""

    attempt: Attempt
    run: Run | None = None  # the base with modules kept, as a ``plan`` run; its error is the worst of all batches
    minimal: bool = False
    untried: Keep = ()  # modules of the plan that were not tried in low precision, each alone
    stopped: str | None = None
    evidence: tuple[Run, ...] = ()
    """The runs that were analyzed op by op, first that of the base without kept modules."""


class Proposer:
    """Searches the bases of one target; each batch is a model with its inputs."""

    def __init__(
        self, batches: Sequence[TargetRuns], objective: Objective, limits: Limits, *, explains: bool = False
    ) -> None:
        """The batches must have run fp32; ``explains``: analyze the run of a plan for a report."""
        self.batches, self.objective, self.explains = list(batches), objective, explains
        self.limits, self.started = limits, system.monotonic()

    def passes_as_it_is(self, runs: Sequence[Run]) -> bool:
        """Whether a base passes without modules in fp32; ``runs`` has one run per batch."""
        return all(self.objective.reached(run) for run in runs)

    def without_search(self, runs: Sequence[Run]) -> Proposal:
        """The proposal for a base without a search."""
        worst = max(runs, key=error_of)
        if not self.passes_as_it_is(runs):
            outcome = "not searched: another base passes without changes"
            return Proposal(attempt=self.objective.attempt(worst, outcome=outcome))
        run = msgspec.structs.replace(runs[0], precision=PLAN, base=worst.precision, output_error=worst.output_error)
        speedup = speed(run, [self.fp32]).told_ratio
        attempt = self.objective.attempt(worst, kept=0, speedup=speedup, outcome="passes without changes")
        return Proposal(attempt=attempt, run=run, minimal=True, evidence=tuple(runs))

    def propose(self, runs: Sequence[Run], *, best_so_far: Proposal | None = None) -> Proposal:
        """Search the base of ``runs``, unless it is too slow to beat ``best_so_far``."""
        failing = next((run for run in runs if not self.objective.reached(run)), runs[0])
        backend, latency_ms = runs[0].backend, runs[0].latency_ms
        problem: str | None = None
        best_ms: float | None = None
        if best_so_far is not None and best_so_far.run is not None:
            best_ms = best_so_far.run.latency_ms
        if failing.status in ("timeout", "skipped"):
            problem = failing.reason or failing.status
        elif failing.status == "unjudged":
            problem = "its output cannot be compared, so no plan can be proven"
        elif lowers_precision(backend) and not keeps_layers(backend):
            problem = f"{backend} quantizes modules that are kept in fp32, too"
        elif lowers_precision(backend) and not any(layer.local for layer in runs[0].layer_errors):
            problem = "the errors of its layers are not known"
        elif best_ms is not None and latency_ms is not None and latency_ms > max(SHORT_MS, SLOWER * best_ms):
            times = f"{latency_ms / best_ms:.1f} times"
            problem = f"its fastest call took {times} as long as the fastest with the plan found"
        if problem is not None:
            return Proposal(attempt=self.objective.attempt(failing, outcome=f"not searched: {problem}"))
        kind = _LayerSearch if keeps_layers(backend) else _Search
        found = kind(self, runs)
        try:
            return found.propose()
        finally:
            found.show(None)

    def propose_each(self, bases: Iterable[Sequence[Run]]) -> Iterator[Proposal]:
        """Search one base after another."""
        proposals: list[Proposal] = []
        for runs in bases:
            proposals.append(self.propose(runs, best_so_far=best(proposals)))
            yield proposals[-1]

    @property
    def fp32(self) -> Run:
        """The reference of the first batch."""
        fp32 = self.batches[0].fp32
        assert fp32 is not None
        return fp32

    def stop_reason(self, trials: int) -> str | None:
        """Why no other run may start, or ``None``."""
        if trials >= self.limits.max_trials:
            return f"after {counted(trials, 'trial')}"
        if system.monotonic() - self.started > self.limits.seconds:
            return f"after {self.limits.seconds:g} s"
        return None


class _Search:
    def __init__(self, proposer: Proposer, runs: Sequence[Run]) -> None:
        self.proposer, self.base, self.backend = proposer, runs[0].precision, runs[0].backend
        batch, self.failing = next(
            pair for pair in zip(proposer.batches, runs, strict=False) if not proposer.objective.reached(pair[1])
        )
        self.kept_in = kept_in(self.backend, self.base)
        self.inputs: tuple[str, ...] = ()
        """The inputs that are not cast."""
        self.failed = dict[Keep, Run]()
        self.order = list(proposer.batches)
        model = proposer.batches[0].target.model
        self.names = [name for name, _ in model.named_modules()]
        self.tree = ModuleTree(self._candidates(model, runs))
        # A scan has analyzed its runs.
        if not proposer.explains:
            self.failing = self._analyzed(batch, runs)
        self.evidence = [self.failing]
        self.trials = Trials(self.tree, self._try, proposer.stop_reason)
        self.started = system.monotonic()

    def propose(self) -> Proposal:
        # What an error must not exceed is not known of a metric, nor of a measure of the output's
        # meaning: then nothing is predicted.
        tolerance = None
        if self.proposer.objective.fp32_metric is None and self.failing.by_meaning is None:
            tolerance = self.failing.tolerance
        most_alone = self.proposer.limits.most_alone
        result = None
        if self._is_input_suspect(self.failing):
            result = self._with_inputs()
        if result is None:
            result = search(self.tree, self._suspects(), self.trials, self._explain, tolerance, most_alone)
        if result.keep is None and self._needs_inputs():
            result = search(self.tree, self._suspects(), self.trials, self._explain, tolerance, most_alone)
        if result.keep:
            # Cast all inputs if the base passes with the modules ``keep`` alone.
            needed, self.inputs = self.inputs, ()
            if needed and not self._try(result.keep).passes:
                self.inputs = needed
            # Analyze runs without the kept modules that no run has shown a reason for, each alone.
            reasons = blame(self.evidence, result.keep, result.untried)
            for module in [reason.module for reason in reasons if reason.why == BY_TRIAL][:MOST_EXPLAINED]:
                others = tuple(other for other in result.keep if other != module)
                if others and self.proposer.stop_reason(self.trials.count) is None:
                    self.show(f"op by op without {module} in fp32")
                    self.evidence.append(self._run(self.order[0], others, instrumented=True))
        run: Run | None = None
        attempt: dict[str, Any] = {}
        if result.keep is not None:
            fp32, run = self.proposer.batches[0].time([self._measure(result.keep)]).runs
            attempt = {
                "kept": number_of(result.keep, self.names),
                "predicted": self.trials.predicted.get(result.keep),
                "proven": _error(run),
                "speedup": speed(run, [fp32]).told_ratio,
            }
        outcome = self._outcome(result)
        # Trials are not compiled.
        if run is not None and not self.proposer.objective.reached(run):
            why_not = self.proposer.objective.why_not(run)
            attempt, run, outcome = {}, None, f"no plan: {outcome} if it is not compiled; compiled it fails ({why_not})"
        attempt |= {
            "first_pass": self.trials.first_pass,
            "trials": self.trials.count,
            "seconds": round(system.monotonic() - self.started, 2),
            "outcome": outcome,
            "constants": constants(self.failing),
        }
        return Proposal(
            attempt=self.proposer.objective.attempt(self.failing, **attempt),
            run=run,
            minimal=result.minimal,
            untried=result.untried,
            stopped=self.trials.stopped,
            evidence=tuple(self.evidence),
        )

    def _with_inputs(self) -> SearchResult | None:
        """Try inputs in fp32: the result if the base passes with them, and no module. Those that
        at least halve its error stay in fp32 in the search for modules.
        """
        tried = self._try_inputs(self.failing, ())
        self.inputs = tried.best
        if tried.passes and self._try(()).any_low:
            self.trials.first_pass = self.trials.count
            return SearchResult((), True)
        error = min((trial.rel_l2 or math.inf for trial in tried.trials), default=math.inf)
        if tried.passes or (self.failing.rel_l2 is not None and error > self.failing.rel_l2 / 2):
            self.inputs = ()
        if self.inputs:
            self.failing = self._run(self.order[0], (), instrumented=True)
            self.evidence.append(self.failing)
        return None

    def _needs_inputs(self) -> bool:
        """Whether the base passes with inputs in fp32 besides all modules, which then stay so."""
        everything = self.tree.normalized(self.tree.children(""))
        failed = self.failed.get(everything)
        if self.inputs or failed is None or self.trials.stopped is not None or not self._is_input_suspect(failed):
            return False
        tried = self._try_inputs(failed, everything)
        if tried.passes:
            self.inputs = tried.best
            self.failing = self._run(self.order[0], (), instrumented=True)
            self.evidence.append(self.failing)
            count, self.trials = self.trials.count, Trials(self.tree, self._try, self.proposer.stop_reason)
            self.trials.count = count
        return tried.passes

    def _try_inputs(self, failed: Run, keep: Keep) -> InputTrials:
        tried = InputTrials(self.proposer.batches, failed, self.proposer.objective.reached, keep)
        self.trials.count += len(tried.trials)
        return tried

    def _try(self, keep: Keep) -> Verdict:
        """Try ``keep`` on every batch, first on the one that failed last."""
        self._show_trial(keep, "kept")
        runs = []
        for batch in list(self.order):
            run = self._run(batch, keep, instrumented=False)
            if not self.proposer.objective.reached(run):
                self.order.remove(batch)
                self.order.insert(0, batch)
                self.failed[keep] = run
                own_fault = run.exception is None or not run.exception.module
                return Verdict(False, own_fault=own_fault, error=_error(run))
            runs.append(run)

        return Verdict(True, any_low=self._any_low(keep, runs), error=_error(max(runs, key=error_of)))

    def _any_low(self, keep: Keep, runs: Sequence[Run]) -> bool:
        """Whether anything runs in low precision with ``keep`` in fp32, as in ``runs``."""
        kept = frozenset(keep)

        def has_low_op(run: Run) -> bool:
            # An op that computes on values in the low precision of the run; casts do not count.
            marks = {low.mark for low in formats() if run.basis and low.name == run.basis.format.name}
            computing = (row for row in run.op_calls.rows() if row.op != "aten._to_copy.default")
            narrow = (row for row in computing if not marks.isdisjoint(re.split("[+→]", row.dtypes)))
            return any(module_around(row.module, kept) is None for row in narrow)

        # The dtypes of ops need not show the effect of a custom precision.
        expected = PRECISIONS.get(self.base).kind == "custom" or has_low_op(self.failing)
        # An output that equals fp32's bit for bit may be so because nothing ran in low precision.
        differs = any(run.output_is_zero or run.output_error is None or run.output_error.rel_l2 != 0.0 for run in runs)
        # If it is unclear, a run is analyzed op by op.
        return (expected and differs) or has_low_op(self._run(self.order[0], keep, instrumented=True))

    def _candidates(self, model: nn.Module, runs: Sequence[Run]) -> dict[str, str]:
        """Path to type of every module that can be kept, parents first."""
        return called_modules(model, [self.proposer.fp32, *runs])

    def _analyzed(self, batch: TargetRuns, runs: Sequence[Run]) -> Run:
        """The failing run of ``batch`` with what the search starts from."""
        return self._run(batch, (), instrumented=True)

    def _suspects(self) -> Suspects:
        return suspects(self.failing)

    def _is_input_suspect(self, run: Run) -> bool:
        return is_input_suspect(run)

    def _explain(self, keep: Keep) -> Suspects:
        self._show_trial(keep, "kept, op by op")
        run = self._run(self.order[0], keep, instrumented=True)
        self.evidence.append(run)
        return suspects(run)

    def _run(self, batch: TargetRuns, keep: Keep, *, instrumented: bool) -> Run:
        """A run with ``keep`` in fp32, up to the first call that fails unless a metric decides."""
        how: Any = {"measured": False, "status_only": self.proposer.objective.fp32_metric is None}
        kept: Any = {"keep_fp32": keep, "keep_fp32_inputs": self.inputs}
        return batch.run(self.base, self.backend, **kept, instrumented=instrumented, **how)

    def _show_trial(self, keep: Keep, how: str) -> None:
        count, limits, best = self.trials.count, self.proposer.limits, self.trials.best
        step = f"trial {count} of at most {limits.max_trials}, {len(keep)} modules {how}"
        if best is not None:
            step += f", {len(best)} modules pass"
        now = system.monotonic()
        if count > 1:
            seconds_a_trial = (now - self.started) / (count - 1)
            left = min(
                limits.seconds - (now - self.proposer.started), seconds_a_trial * (limits.max_trials - count + 1)
            )
            step += f", at most {max(0.0, left):.0f} s left"
        self.show(step)

    def show(self, step: str | None) -> None:
        for batch in self.proposer.batches:
            batch.show_step(f"plan from {self.base}", step)

    def _measure(self, keep: Keep) -> Run:
        self.show(f"measuring with {len(keep)} modules kept")
        runs: list[Run] = []
        for batch in self.proposer.batches:
            first = not runs
            analyzed = first and self.proposer.explains
            kept: Any = {"keep_fp32": keep, "keep_fp32_inputs": self.inputs}
            runs.append(batch.run(self.base, self.backend, **kept, measured=first, instrumented=analyzed))
        worst = max(runs, key=error_of)
        plan = msgspec.structs.replace(
            runs[0], precision=PLAN, base=self.base, untied=[], output_error=worst.output_error
        )
        # A cast makes copies of weights that modules in fp32 share with others.
        if PRECISIONS.get(self.base).kind == "cast" and not keeps_layers(self.backend):
            plan = msgspec.structs.replace(plan, untied=shared_weights(self.proposer.batches[0].target.model, keep))
        # Only the first batch is analyzed: places have no ranges.
        if runs[1:]:
            plan = msgspec.structs.replace(plan, batches=msgspec.structs.replace(ranges_of(runs), places=[]))
        return plan

    def _outcome(self, result: SearchResult) -> str:
        if result.keep is not None:
            early = " (search stopped early)" if self.trials.stopped is not None else ""
            kept = patterns([*self.inputs, *result.keep], self.names)
            return f"passes with {some(kept)} in {self.kept_in}{early}"
        if self.trials.stopped is not None:
            return f"{STOPPED_WITHOUT_PLAN} {self.trials.stopped}"
        if not self.tree.types:
            return f"no plan: no submodule is called, so none can be kept in {self.kept_in}"
        failed = self.failed.get(self.tree.normalized(self.tree.children("")))
        if failed is None and result.failed_alone:
            tried = f"fails with one module in low precision (tried: {some(result.failed_alone)})"
            return f"no plan: passes with every op in {self.kept_in}, {tried}"
        if failed is None:
            return f"no plan: passes only with every op in {self.kept_in}"
        reason = self.proposer.objective.why_not(failed)
        # Keeping submodules in fp32 does not change a failure in the model's own forward.
        if failed.exception is None or not failed.exception.module:
            own = next(filter(None, (at_fault(run, "") for run in reversed(self.evidence))), None)
            if own is not None:
                what = f"{short_op(own.op)} {own.why}" if own.op else own.why
                reason = f"in the model's own forward, {what}{f', {own.source}' if own.source else ''}"
        return f"no plan: fails even with every submodule in {self.kept_in} ({reason})"


class _LayerSearch(_Search):
    """Searches the layers that a backend quantizes, those with the largest errors first."""

    def _candidates(self, model: nn.Module, runs: Sequence[Run]) -> dict[str, str]:
        # Only the first batch is measured.
        self.errors = {layer.module: layer for layer in runs[0].layer_errors if layer.left is None}
        return {name: type(module).__name__ for name, module in model.named_modules() if name in self.errors}

    def _analyzed(self, batch: TargetRuns, runs: Sequence[Run]) -> Run:
        return msgspec.structs.replace(self.failing, layer_errors=runs[0].layer_errors)

    def _suspects(self) -> Suspects:
        """All layers: first those with a large error of the output if they alone are quantized."""

        def rank(name: str) -> tuple[bool, float]:
            layer = self.errors[name]
            error = layer.local if layer.alone is None else layer.alone
            # An error that is not finite is larger than any other.
            return layer.alone is None and layer.local is not None, -(math.inf if error is None else error)

        return Suspects([], sorted(self.errors, key=rank), False)

    def _is_input_suspect(self, run: Run) -> bool:
        return False

    def _any_low(self, keep: Keep, runs: Sequence[Run]) -> bool:
        return set(keep) != set(self.tree.types)

    def _explain(self, keep: Keep) -> Suspects:
        return self._suspects()


def _error(run: Run) -> float | None:
    """rel_l2 of the output, if it is finite."""
    error = run.output_error.rel_l2 if run.output_error else None
    return error if error is not None and math.isfinite(error) else None


def called_modules(model: nn.Module, runs: Sequence[Run]) -> dict[str, str]:
    """Path to type of every called submodule, which hooks can keep in fp32; parents first."""
    called = {name for run in runs for name in run.called_modules}
    # A fused layer calls its children as soon as a hook disables its fused path.
    fused = [name for name, module in model.named_modules() if isinstance(module, nn.TransformerEncoderLayer)]
    called |= {f"{layer}.{name}".lstrip(".") for layer in fused for name in _FUSED_CHILDREN}
    return {name: type(module).__name__ for name, module in model.named_modules() if name and name in called}


_FUSED_CHILDREN = ("self_attn", "linear1", "linear2", "norm1", "norm2")


def best(proposals: Sequence[Proposal]) -> Proposal | None:
    """Of those not clearly slower, the one with the fewest modules, then the most accurate."""
    passed = [proposal for proposal in proposals if proposal.run is not None]
    if not passed:
        return None

    def latency(proposal: Proposal) -> float:
        return (proposal.run and proposal.run.latency_ms) or float("inf")

    fastest = min(map(latency, passed))
    equals = [proposal for proposal in passed if latency(proposal) <= max(CLEAR * fastest, SHORT_MS)]
    return min(equals, key=lambda p: (p.attempt.kept or 0, error_of(p.run)) if p.run else (0, 0.0))
