"""Scans a target: runs it in every precision on every backend, then explains, diagnoses and recommends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from torch import Tensor, nn

from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.engine.machine import environment, version
from lowprec_check.engine.model.application import application_of
from lowprec_check.engine.model.target import make_target
from lowprec_check.engine.plan.planner import plan_for_scan
from lowprec_check.engine.run.isolation import best_isolation, check_isolation, isolated
from lowprec_check.engine.run.launcher import OnProgress
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.target_runs import RunOptions, TargetRuns, open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.engine.trace.withheld_kernels import parse_withheld
from lowprec_check.errors import UsageError, encodable
from lowprec_check.process import Isolation
from lowprec_check.schema.backends import BACKENDS
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.registry import Registry
from lowprec_check.schema.run_key import EAGER, REFERENCE
from lowprec_check.schema.scan_result import Run, ScanResult

Reference = Literal["fp32", "fp64"]
Names = str | Sequence[str] | None
"""One name, several, or ``None`` for the default."""


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """What to run and how. The fields are the arguments of :func:`scan`, documented there."""

    precisions: Names = None
    backends: Names = None
    device: str | None = None
    budget: float | None = None
    errors: Errors = "both"
    reference: Reference = "fp32"
    tolerance: float | None = None
    seed: int = 0
    without_kernel: Sequence[str] = ()
    plan: bool | None = None
    select: Sequence[str] = ()
    ignore: Sequence[str] = ()

    def chosen_precisions(self) -> list[str]:
        """Names of the precisions to run; raises :class:`UsageError` for an unknown one."""
        return _names(PRECISIONS, self.precisions) or PRECISIONS.names()

    def chosen_backends(self) -> list[str]:
        """Names of the backends to run on; raises :class:`UsageError` for an unknown one."""
        return _names(BACKENDS, self.backends) or [EAGER]

    def check(self) -> None:
        """Raise :class:`UsageError` for a value that is not allowed, before anything runs."""
        for name in self.chosen_precisions():
            application_of(PRECISIONS.get(name))
        self.chosen_backends()
        parse_withheld(self.without_kernel)
        for name, allowed in (("errors", ("both", "accumulated", "none")), ("reference", ("fp32", "fp64"))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"Unknown {name} {getattr(self, name)!r}.", f"Choose from {', '.join(allowed)}.")

    def for_runs(self, device: str) -> RunOptions:
        """The options of each run, on the resolved ``device``."""
        return RunOptions(
            device=device,
            budget=self.budget,
            errors=self.errors,
            reference=self.reference,
            tolerance=self.tolerance,
            seed=self.seed,
            without_kernel=tuple(self.without_kernel),
        )

    def saved(self, isolation: Isolation) -> dict[str, Any]:
        """The options as they are saved with the result."""
        return {
            "isolation": isolation,
            "precisions": self.chosen_precisions(),
            "backends": self.chosen_backends(),
            "select": list(self.select),
            "ignore": list(self.ignore),
            "budget": self.budget,
            "errors": self.errors,
            "reference": self.reference,
            "tolerance": self.tolerance,
            "seed": self.seed,
            "without_kernel": list(self.without_kernel),
        }


def _names(registry: Registry[Any], names: Names) -> list[str]:
    """The registered names for names and aliases, without duplicates."""
    if names is None:
        return []
    given: list[Any] = [names] if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    return list(dict.fromkeys(registry.get(name).name for name in given))


def scan(
    model: nn.Module,
    inputs: Any,
    *,
    precisions: Names = None,
    backends: Names = None,
    device: str | None = None,
    budget: float | None = None,
    errors: Errors = "both",
    reference: Reference = "fp32",
    tolerance: float | None = None,
    seed: int = 0,
    without_kernel: Sequence[str] = (),
    plan: bool | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None,
    metric: Callable[[nn.Module], float] | None = None,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
) -> ScanResult:
    """Scan ``model`` on ``inputs``; the model, the inputs and global state are left unchanged.

    Args:
        model: in fp32, in the mode (``eval`` or ``train``) to scan it in.
        inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a function that returns one of these.
        precisions: names such as ``half``, ``bfloat16``, ``autocast-fp16``, ``autocast-bf16``; by default all of them.
        backends: how to execute the model; by default ``eager``.
        device: ``cpu``, ``cuda``, ``xpu`` or ``mps``; by default an accelerator if there is one, else the CPU.
        budget: seconds for each part of a run; by default 20, or ten fp32 forwards if that is more.
        errors: which errors to compute for each op: local and accumulated (``both``), or fewer to be faster
            (``accumulated``, ``none``).
        reference: dtype of the reference that each op is compared with, ``fp32`` or ``fp64``.
        tolerance: the largest rel_l2 of the output that passes; by default the tolerance of the precision.
        seed: random seed of every run.
        without_kernel: kernels to treat as missing, such as ``aten.dot:half``.
        plan: whether to search for modules to keep in fp32 for every precision that fails; by default a quick search if
            no precision passes.
        select: report only diagnostics whose code starts with one of these prefixes.
        ignore: omit diagnostics whose code starts with one of these prefixes.
        loss: ``loss(output) -> tensor``; it is run and checked as part of the model.
        metric: ``metric(model) -> float``; it is reported for each run.
        isolation: ``fork`` runs in copies of this process (the default if possible); ``spawn`` in fresh interpreters, to
            which the model is pickled; ``none`` in this process, without time limits and crash protection (the default
            if this process already uses an accelerator).
        on_progress: called with the name of the run and its current step.

    Returns:
        the result of all runs, with diagnostics and a recommendation.

    Raises:
        UsageError: the model, its inputs or an option is not valid; the message explains what to do.
    """
    check_isolation(isolation)
    options = ScanOptions(
        precisions=precisions,
        backends=backends,
        device=device,
        budget=budget,
        errors=errors,
        reference=reference,
        tolerance=tolerance,
        seed=seed,
        without_kernel=without_kernel,
        plan=plan,
        select=select,
        ignore=ignore,
    )
    options.check()
    source = TargetSource(make_target(model, inputs, loss=loss, metric=metric))
    return scan_target(source, isolation or best_isolation(can_spawn=False), options, on_progress=on_progress)


def scan_target(
    source: TargetSource,
    isolation: Isolation,
    options: ScanOptions,
    *,
    spec: str | None = None,
    on_progress: OnProgress | None = None,
) -> ScanResult:
    """Like :func:`scan`, for a loaded target; ``spec`` is the user's name for it."""
    options.check()
    machine = isolated(lambda: environment(options.device), isolation, dict[str, Any])
    settings = options.for_runs(machine["device"])
    target = source.target
    name = encodable(spec or target.name)
    with open_runs(source, settings, isolation, on_progress) as target_runs:
        fp32 = target_runs.reference()
        runs = [fp32, *_low_runs(target_runs, options)]
        planned = plan_for_scan(target_runs, runs, machine, name, wanted=options.plan, on_progress=on_progress)
    runs += [planned[0]] if planned is not None else []
    model = describe_target(target, fp32)
    result = ScanResult(
        tool=f"lowprec-check {version()}",
        target=name,
        model=model,
        environment=machine,
        options=options.saved(target_runs.isolation),
        runs=runs,
        recommendation=recommend(runs, model, machine),
        plan=planned[1] if planned is not None else None,
    )
    return msgspec.structs.replace(result, diagnostics=diagnose(result, options.select, options.ignore))


def _low_runs(target_runs: TargetRuns, options: ScanOptions) -> list[Run]:
    """Run every precision on every backend, except the reference, which has already run."""
    keys = [(precision, backend) for backend in options.chosen_backends() for precision in options.chosen_precisions()]
    return [
        target_runs.run(precision, backend) for precision, backend in keys if (precision, backend) != (REFERENCE, EAGER)
    ]
