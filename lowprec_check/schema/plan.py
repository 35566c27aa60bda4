"""A plan: which modules of a model stay in fp32, and how that was verified."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.base import Struct, decode, encode, write_file
from lowprec_check.schema.module_paths import paths_above
from lowprec_check.schema.precisions import plan_bases
from lowprec_check.schema.run_key import EAGER, MemoryFormat

SCHEMA = 1

STOPPED_WITHOUT_PLAN = "nothing passed before the search stopped"
"""How the outcome of an attempt starts if its search ended early."""

_SEARCH_AGAIN = "Search again: lowprec-check plan TARGET --save-plan FILE"


class Blame(Struct, frozen=True, kw_only=True):
    """Why a module stays in fp32: the op in it that fails in low precision."""

    module: str
    """Dotted path of the module."""
    why: str
    """Why, in words."""
    op: str | None = None
    """The op that fails, if it is known."""
    source: str | None = None
    """``file.py:line`` of its call."""


class Constant(Struct, frozen=True, kw_only=True):
    """A number in the code that exceeds the range of the dtype, and what to write instead."""

    module: str
    """Dotted path of the module."""
    op: str
    """The op that gets the number."""
    source: str | None
    """``file.py:line`` of its call, if it is known."""
    value: float | None
    """The number; ``None`` if it is infinite."""
    use: str
    """Code for the limit of the dtype."""


class Plan(Struct, frozen=True, kw_only=True):
    """A low-precision base with modules kept in fp32, verified by a plain run.

    >>> plan = Plan.load("plan.json")  # doctest: +SKIP
    >>> model = lowprec_check.apply(model, plan)  # doctest: +SKIP
    """

    schema: int = SCHEMA
    """The version of the format."""
    tool: str
    """What saved it."""
    target: str
    """What was planned for, as its user wrote it."""
    # What runs in low precision, and what stays in fp32.
    base: str
    """The precision of all other modules."""
    backend: str = EAGER
    """The backend that it was verified on."""
    device: str
    """The device that it was verified on."""
    memory_format: MemoryFormat = "contiguous"
    """The memory format that it was verified in."""
    evidence: Literal["measured", "predicted"] = "measured"
    """``predicted``: its runs were those of a device that is not here, emulated on a CPU."""
    keep_fp32: list[str]
    """Paths of the modules in fp32, in the model's order; empty if none is needed."""
    keep_fp32_inputs: list[str] = []
    """Names of the inputs that are not cast: ``timestep``, ``inputs[1]``, ``cond["mask"]``."""
    untied: list[str] = []
    """Shared parameters of kept modules that get a copy, since one cannot have two dtypes."""
    # How sure it is that all of them are needed.
    minimal: bool
    """Whether moving any one kept module to low precision was tried and failed."""
    unconfirmed: int = 0
    """Kept modules not tried in low precision: predicted to be needed, or tried among more."""
    stopped: str | None = None
    """Why the search ended early, if it did: the plan is verified, but a smaller one may exist."""
    # How the model does with it.
    tolerance: float | None = None
    """The largest ``rel_l2`` that passes; ``None`` if the metric decides."""
    rel_l2: float | None = None
    """Error of the output against fp32, the worst over the batches."""
    predicted: float | None = None
    """``rel_l2`` that the error budget predicted for these modules; ``None`` if it did not."""
    metric: float | None = None
    """The value of the file's ``metric(model)``; ``None`` if it did not decide."""
    fp32_metric: float | None = None
    """The metric in fp32."""
    max_drop: float | None = None
    """The largest drop of the metric that passes."""
    batches: int = 1
    """Number of batches on which it passed."""
    # What the search and the model took.
    trials: int
    """Number of trial runs in the search."""
    first_pass: int | None = None
    """The number of the first trial that passed; those after it look for fewer modules."""
    seconds: float
    """How long the search took."""
    latency_ms: float | None = None
    """The median time of a call, in milliseconds."""
    speedup: float | None = None
    """Latency of fp32 over latency of the plan, on this machine; ``None`` if it is predicted."""
    peak_memory_bytes: int | None = None
    """Peak memory of a call, in bytes."""
    blame: list[Blame] = []
    """Why each module stays in fp32."""
    # For applying it to a model.
    environment: dict[str, Any] = {}
    """The machine and the versions of packages."""
    modules: dict[str, str]
    """Every module with its type and the shapes of its parameters: models that the plan fits."""
    code: str
    """Code to paste: the same as :func:`lowprec_check.apply`, in pure PyTorch."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a predicted plan with times or memory."""
        measures = (self.latency_ms, self.speedup, self.peak_memory_bytes)
        if self.evidence == "predicted" and any(value is not None for value in measures):
            raise ValueError("a predicted plan has no times and no memory: they would be those of another device")

    @property
    def kept(self) -> list[str]:
        """The inputs and modules in fp32."""
        return [*self.keep_fp32_inputs, *self.keep_fp32]

    def save(self, path: str | Path) -> None:
        """Write as indented JSON; raises :class:`UsageError` if that fails."""
        write_file(path, encode(self, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote; raises :class:`UsageError` naming the key that is wrong."""
        try:
            plan = decode(Path(path).read_bytes(), cls, SCHEMA)
        except (OSError, ValueError) as error:
            problem = f"{path} is not a plan: {error}."
            if isinstance(error, OSError):
                problem = f"Cannot read {path}: {error.strerror}."
            raise UsageError(problem, "Save a plan with: lowprec-check plan TARGET --save-plan FILE") from None
        bases = [base.name for base in plan_bases()]
        for field, value, names in (("base", plan.base, bases), ("backend", plan.backend, BACKENDS.names())):
            if value not in names:
                raise UsageError(
                    f"{path} has the unknown {field} {value!r}; known are {', '.join(names)}.",
                    "Install the package that adds it.",
                )
        return plan

    def check_modules(self, modules: dict[str, str]) -> None:
        """Raise :class:`UsageError` naming the modules that differ from those planned for."""
        # The file may have been edited by hand: the plan itself must fit together.
        times_kept = Counter(self.keep_fp32)
        for name in self.keep_fp32:
            if not name or name not in self.modules:
                raise UsageError(f"The plan keeps {name!r} in fp32 but does not list it as a module.", _SEARCH_AGAIN)
            if times_kept[name] > 1 or any(above in times_kept for above in paths_above(name)):
                raise UsageError(f"The plan keeps {name!r} twice.", _SEARCH_AGAIN)
        for path in self.untied:
            if path.rpartition(".")[0] not in self.modules:
                raise UsageError(f"The plan unties {path!r}, which is in none of its modules.", _SEARCH_AGAIN)
        # Then the model must be the one that it was searched for.
        differences = [
            *(f"{name!r} is missing" for name in self.modules if name not in modules),
            *(f"{name!r} is new" for name in modules if name not in self.modules),
            *(
                f"{name!r} is {modules[name]}, in the plan {kind}"
                for name, kind in self.modules.items()
                if modules.get(name, kind) != kind
            ),
        ]
        if differences:
            more = ""
            if len(differences) > 3:
                more = f" and {len(differences) - 3} more"
            raise UsageError(f"The plan is for another model: {'; '.join(differences[:3])}{more}.", _SEARCH_AGAIN)


class Attempt(Struct, frozen=True, kw_only=True):
    """The search from one base."""

    base: str
    """The precision that the search starts from."""
    backend: str = EAGER
    """The backend that it runs on."""
    status: str
    """The status of the base without a plan."""
    why: str
    """Why the base does not pass, in words; empty if it does."""
    rel_l2: float | None = None
    """Error of the output without a plan; ``None`` if it is not known."""
    kept: int | None = None
    """Number of modules in fp32 in the plan, with those inside; ``None`` if none was found."""
    predicted: float | None = None
    """rel_l2 of the output that the error budget predicted for the plan before it was tried."""
    proven: float | None = None
    """rel_l2 of the output with the plan, measured."""
    speedup: float | None = None
    """How many times as fast as fp32 the plan is; ``None`` if that is not known."""
    trials: int = 0
    """The number of trial runs."""
    first_pass: int | None = None
    """The number of the first trial that passed."""
    seconds: float = 0.0
    """How long the search took."""
    outcome: str
    """In words: the plan found, or why none was."""
    constants: list[Constant] = []
    """Constants to replace instead of keeping a module in fp32."""

    @property
    def stopped_without_plan(self) -> bool:
        """Whether the search ended early and found no plan: one may exist."""
        return self.outcome.startswith(STOPPED_WITHOUT_PLAN)


class Planning(Struct, frozen=True, kw_only=True):
    """The result of a search: every base tried, and the best plan, if any."""

    target: str
    model: str
    device: str
    attempts: list[Attempt]
    plan: Plan | None = None

    def to_json(self) -> bytes:
        """Encode as indented JSON."""
        return encode(self, indent=1)
