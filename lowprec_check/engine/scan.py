"""The main job: run a target in every precision on every backend, explain, diagnose, recommend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from torch import Tensor, nn

from lowprec_check.analysis.recommend import recommend
from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.engine.machine import environment, version
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.plan.planner import plan_for_scan
from lowprec_check.engine.run.isolation import Isolation, best_isolation, isolated
from lowprec_check.engine.run.job_worker import Load
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.target_runs import OnProgress, RunOptions, TargetRuns, open_runs
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.engine.trace.withheld_kernels import parse_withheld
from lowprec_check.errors import UsageError
from lowprec_check.schema.backends import BACKENDS, EAGER
from lowprec_check.schema.precisions import PRECISIONS, REFERENCE
from lowprec_check.schema.registry import Registry
from lowprec_check.schema.scan_result import Run, ScanResult

Reference = Literal["fp32", "fp64"]
Names = str | Sequence[str] | None
"""One name, several, or ``None`` for the default."""


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """What to run and how; the arguments of :func:`scan`, which describes them."""

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
        self.chosen_precisions()
        self.chosen_backends()
        parse_withheld(self.without_kernel)
        for name, allowed in (("errors", ("both", "accumulated", "none")), ("reference", ("fp32", "fp64"))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"Unknown {name} {getattr(self, name)!r}.", f"Choose from {', '.join(allowed)}.")

    def for_runs(self, device: str) -> RunOptions:
        """What each run needs of them, on the device that was found."""
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
        """What the result keeps of them."""
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
    """Registered names, each once, for names and aliases."""
    given = [names] if isinstance(names, str) else list(names or ())
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
    """Scan ``model`` on ``inputs``; model, inputs and global state stay as they were.

    Args:
        model: in fp32, in the mode (``eval`` or ``train``) in which it is to be judged.
        inputs: a tensor, a tuple of positional or a mapping of keyword arguments, or a function that makes one.
        precisions: names such as ``half``, ``bfloat16``, ``autocast-fp16``, ``autocast-bf16``; all by default.
        backends: how the model is executed; ``eager`` by default.
        device: ``cpu``, ``cuda``, ``xpu`` or ``mps``; by default an accelerator if there is one, else the CPU.
        budget: seconds for each part of a run; by default 20, or ten fp32 forwards if that is more.
        errors: what to compute for each op: local and accumulated error (``both``), or less, faster
            (``accumulated``, ``none``).
        reference: the dtype of the reference that each op is compared with.
        tolerance: the largest rel_l2 of the output that passes; by default that of the precision.
        seed: of every run.
        without_kernel: kernels to run without, as if torch lacked them: ``aten.dot:half``.
        plan: whether to search for modules to keep in fp32 for every precision that fails; by default a quick search
            if none passes.
        select, ignore: prefixes of diagnostic codes.
        loss: ``loss(output) -> tensor``, run and checked as part of the model.
        metric: ``metric(model) -> float``, reported for each run.
        isolation: ``fork`` (the default where it is possible) runs in worker processes; ``none`` runs in this process,
            without budget and crash protection (the default if this process already uses an accelerator).
        on_progress: called with the name of the run and what it is doing.

    Returns:
        everything that was found.

    Raises:
        UsageError: the model, its inputs or an option cannot be scanned; the message says what to do.
    """
    if isolation not in (None, "fork", "none"):
        raise UsageError(f"Unknown isolation {isolation!r}.", "Choose fork or none.")
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
    target = make_target(model, inputs, loss=loss, metric=metric)
    chosen = isolation or best_isolation(can_spawn=False)
    return scan_target(target, lambda: target, chosen, options, on_progress=on_progress)


def scan_target(
    target: Target,
    load: Load,
    isolation: Isolation,
    options: ScanOptions,
    *,
    spec: str | None = None,
    on_progress: OnProgress | None = None,
) -> ScanResult:
    """As :func:`scan`, for a loaded target; ``load`` gives it to a worker, ``spec`` is what the user called it."""
    options.check()
    machine = isolated(lambda: environment(options.device), isolation, dict[str, Any])
    settings = options.for_runs(machine["device"])
    with open_runs(target, load, settings, isolation, on_progress) as session:
        fp32 = session.reference()
        runs = [fp32, *_low_runs(session, options)]
        planned = plan_for_scan(
            session, runs, machine, spec or target.name, wanted=options.plan, on_progress=on_progress
        )
    runs += [planned[0]] if planned is not None else []
    model = describe_target(target, fp32)
    result = ScanResult(
        tool=f"lowprec-check {version()}",
        target=spec or target.name,
        model=model,
        environment=machine,
        options=options.saved(isolation),
        runs=runs,
        recommendation=recommend(runs, model),
        plan=planned[1] if planned is not None else None,
    )
    return msgspec.structs.replace(result, diagnostics=diagnose(result, options.select, options.ignore))


def _low_runs(session: TargetRuns, options: ScanOptions) -> list[Run]:
    """Every precision on every backend, but for the reference, which ran first."""
    keys = [(precision, backend) for backend in options.chosen_backends() for precision in options.chosen_precisions()]
    return [
        session.run(precision, backend) for precision, backend in keys if (precision, backend) != (REFERENCE, EAGER)
    ]
