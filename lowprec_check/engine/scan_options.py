"""The options of a scan, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lowprec_check.analysis.rules.registry import check_codes
from lowprec_check.catalog.declared import release_of
from lowprec_check.engine.model.application import application_of
from lowprec_check.engine.run.target_runs import RunOptions
from lowprec_check.engine.trace.extra_modes import parse_withheld
from lowprec_check.engine.trace.recorder import Errors
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.axes import BACKENDS, MEMORY_FORMATS, RUN_MATRICES, RunMatrix, replaced
from lowprec_check.schema.findings import Prefer
from lowprec_check.schema.measures import PredictedDevice, Scenario
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.registry import Registry, words_in
from lowprec_check.schema.run_key import CONTIGUOUS, EAGER, REFERENCE
from lowprec_check.schema.what_if import WHAT_IF_FORMATS

Reference = Literal["fp32", "fp64"]
OnOff = Literal["on", "off"]
BudgetError = Literal["auto", "on", "off"]
Names = str | Sequence[str] | None
"""One name, several, or ``None`` for the default."""


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """What to run and how. The fields are the arguments of :func:`scan`, documented there."""

    precisions: Names = None
    backends: Names = None
    memory_formats: Names = None
    matrix: str | None = None
    device: str | None = None
    torch_version: str | None = None
    predict: bool = False
    budget: float | None = None
    errors: Errors = "both"
    budget_error: BudgetError = "auto"
    reference: Reference = "fp32"
    tolerance: float | None = None
    seed: int = 0
    without_kernel: str | Sequence[str] = ()
    batches: int = 1
    plan: bool | None = None
    times: OnOff = "on"
    scenario: Scenario | None = None
    what_if: Names = None
    prefer: Prefer = "speed"
    train: bool = False
    steps: int | None = None
    select: str | Sequence[str] = ()
    ignore: str | Sequence[str] = ()

    @classmethod
    def given(cls, arguments: Mapping[str, Any]) -> ScanOptions:
        """The options among the ``arguments`` of :func:`scan`; raises :class:`UsageError` if one is given by both its names."""
        known = {name: arguments[name] for name in cls.__dataclass_fields__}
        if arguments["precision"] is not None:
            if known["precisions"] is not None:
                message = "Both precision and precisions are given."
                raise UsageError(message, "They are two names of one argument: give one.")
            known["precisions"] = arguments["precision"]
        return cls(**known | {"device": None if known["device"] is None else str(known["device"])})

    def chosen_precisions(self) -> list[str]:
        """Names of the precisions to run; raises :class:`UsageError` for an unknown one."""
        return _names(PRECISIONS, self.precisions) or self._matrix.precisions()

    def chosen_backends(self) -> list[str]:
        """Names of the backends to run on, as asked for; raises :class:`UsageError` for an unknown one."""
        return _names(BACKENDS, self.backends) or self._matrix.backends()

    def chosen_formats(self) -> list[str]:
        """Names of the memory formats to run in; raises :class:`UsageError` for an unknown one."""
        return _names(MEMORY_FORMATS, self.memory_formats) or self._matrix.memory_formats()

    def chosen_what_if(self) -> list[str]:
        """Names of the formats whose error is predicted; raises :class:`UsageError` for an unknown one."""
        return _names(WHAT_IF_FORMATS, self.what_if)

    @property
    def training_steps(self) -> int:
        """Steps of training; 0 if only the forward pass is run."""
        return (1 if self.steps is None else self.steps) if self.train else 0

    @property
    def _matrix(self) -> RunMatrix:
        return RUN_MATRICES.get(self.matrix or RUN_MATRICES.names()[0])

    def check(self) -> None:
        """Raise :class:`UsageError` for a value that is not allowed, before anything runs."""
        for name in self.chosen_precisions():
            application_of(PRECISIONS.get(name))
        chosen = (self.chosen_precisions(), self.chosen_backends(), self.chosen_formats())
        if chosen == ([REFERENCE], [EAGER], [CONTIGUOUS]):
            raise UsageError("fp32 is the reference that every scan runs.", "Add a lower precision, such as half.")
        if self.torch_version is not None:
            release_of(self.torch_version)
        self.chosen_what_if()
        parse_withheld(words_in(self.without_kernel))
        check_codes([*words_in(self.select), *words_in(self.ignore)])
        self.for_runs("cpu")
        self._check_training()
        if not isinstance(self.batches, int) or self.batches < 1:
            raise UsageError(f"batches is {self.batches!r}.", "Give the number of batches, at least 1.")
        for name, allowed in (
            ("errors", ("both", "accumulated", "none")),
            ("budget_error", get_args(BudgetError)),
            ("reference", ("fp32", "fp64")),
            ("times", get_args(OnOff)),
            ("scenario", (None, *get_args(Scenario))),
            ("prefer", get_args(Prefer)),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"Unknown {name} {getattr(self, name)!r}.", f"Choose from {', '.join(filter(None, allowed))}."
                )

    def _check_training(self) -> None:
        """Raise :class:`UsageError` for options that do not go together with training, or only with it."""
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            raise UsageError(f"steps is {self.steps!r}.", "Give the number of training steps, at least 1.")
        if self.steps is not None and not self.train:
            raise UsageError("steps is the number of training steps of a scan of training.", "Add --train.")
        if not self.train:
            return
        for name, given in (("scenario", self.scenario), ("what_if", self.what_if), ("predict", self.predict)):
            if given:
                raise UsageError(
                    f"{name} is about the forward pass, not about training.", f"Leave out --{name.replace('_', '-')}."
                )
        if self.batches > 1:
            raise UsageError("Training takes a new batch for each step by itself.", "Leave out --batches.")

    def for_runs(self, device: str, predicted: PredictedDevice | None = None) -> RunOptions:
        """The options of each run, on the resolved ``device``, which may stand for one that is not here."""
        if predicted is not None and self.train:
            raise UsageError(
                f"Training is not predicted: {predicted.name} is not here.",
                "Run it on the device, or with --device cpu.",
            )
        if predicted is not None and self.scenario is not None:
            raise UsageError("A prediction has no times, so no scenario.", "Leave out --scenario.")
        return RunOptions(
            device=device,
            predicted=predicted,
            budget=self.budget,
            errors=self.errors,
            budget_error=self.budget_error != "off",
            limits_memory=self.budget_error != "on",
            reference=self.reference,
            tolerance=self.tolerance,
            seed=self.seed,
            without_kernel=tuple(words_in(self.without_kernel)),
            scenario=self.scenario,
            steps=self.training_steps,
        )

    def saved(self, isolation: Isolation) -> dict[str, Any]:
        """The options as they are saved with the result."""
        return {
            "isolation": isolation,
            "precisions": self.chosen_precisions(),
            "backends": replaced(self.chosen_backends())[0],
            "memory_formats": self.chosen_formats(),
            "select": words_in(self.select),
            "ignore": words_in(self.ignore),
            "budget": self.budget,
            "errors": self.errors,
            "budget_error": self.budget_error,
            "reference": self.reference,
            "tolerance": self.tolerance,
            "seed": self.seed,
            "batches": self.batches,
            "times": self.times,
            "predict": self.predict,
            "torch_version": self.torch_version,
            "scenario": self.scenario,
            "what_if": self.chosen_what_if(),
            "prefer": self.prefer,
            "steps": self.training_steps,
            "without_kernel": words_in(self.without_kernel),
        }


def _names(registry: Registry[Any], names: Names) -> list[str]:
    """The registered names for names and aliases, without duplicates."""
    return [] if names is None else registry.names_in(names)
