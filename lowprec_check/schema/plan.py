"""A plan: which modules of a model stay in fp32, and how that was proven. Saved, loaded strictly. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowprec_check.errors import UsageError
from lowprec_check.schema.backends import EAGER
from lowprec_check.schema.base import Struct, decode, encode
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import MemoryFormat

SCHEMA = 1


class Blame(Struct, frozen=True, kw_only=True):
    """Why a module is kept in fp32: the op inside it that a run in low precision shows to be at fault."""

    module: str
    why: str
    op: str | None = None
    source: str | None = None


class Constant(Struct, frozen=True, kw_only=True):
    """A number in the code that does not fit the dtype, and what to write in its place."""

    module: str
    op: str
    source: str | None
    value: float | None
    use: str
    """Code: the dtype's own limit."""


class Plan(Struct, frozen=True, kw_only=True):
    """A low-precision base with modules kept in fp32 that a plain run has confirmed.

    >>> plan = Plan.load("plan.json")  # doctest: +SKIP
    >>> model = lowprec_check.apply(model, plan)  # doctest: +SKIP
    """

    schema: int = SCHEMA
    tool: str
    target: str
    base: str
    """The precision of all other modules."""
    backend: str = EAGER
    device: str
    memory_format: MemoryFormat = "contiguous"
    keep_fp32: list[str]
    """Paths of the modules that stay in fp32, in the model's order; empty if the base passes as it is."""
    untied: list[str] = []
    """Shared parameters of kept modules that get a copy of their own, since one cannot be of two dtypes."""
    minimal: bool
    """Whether giving back any one kept module was tried and failed."""
    stopped: str | None = None
    """Why the search ended early, where it did: the plan is proven, but a smaller one may exist."""
    tolerance: float | None = None
    rel_l2: float | None = None
    """Of the output against fp32, the worst of the batches."""
    metric: float | None = None
    fp32_metric: float | None = None
    max_drop: float | None = None
    batches: int = 1
    trials: int
    """Runs of the model that the search took."""
    seconds: float
    latency_ms: float | None = None
    speedup: float | None = None
    """fp32's latency over the plan's, on this machine."""
    peak_memory_bytes: int | None = None
    blame: list[Blame] = []
    environment: dict[str, Any] = {}
    modules: dict[str, str]
    """Every module of the model: its type and the shapes of its own parameters. What the plan fits."""
    code: str
    """To paste: does what :func:`lowprec_check.apply` does, in pure PyTorch."""

    def save(self, path: str | Path) -> None:
        """Write as indented JSON."""
        Path(path).write_bytes(encode(self, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file that :meth:`save` wrote; raises :class:`UsageError` naming the key that is wrong."""
        try:
            plan = decode(Path(path).read_bytes(), cls, SCHEMA)
        except OSError as error:
            raise UsageError(f"Cannot read {path}: {error.strerror}.") from None
        except ValueError as error:
            raise UsageError(f"{path} is not a plan: {error}.", "lowprec-check plan TARGET --save makes one.") from None
        if PRECISIONS.find(plan.base) is None:
            raise UsageError(
                f"{path} has the base {plan.base!r}, which this installation does not know.",
                f"It knows {', '.join(PRECISIONS.names())}: install the package that adds it.",
            )
        return plan

    def check_modules(self, modules: dict[str, str]) -> None:
        """Raise :class:`UsageError` naming the modules in which a model differs from the one planned for."""
        for name in self.keep_fp32:
            if not name or name not in self.modules:
                raise UsageError(f"The plan keeps {name!r}, which is not among its own modules.", "Make it anew.")
            if self.keep_fp32.count(name) > 1 or any(name.startswith(f"{other}.") for other in self.keep_fp32):
                raise UsageError(f"The plan keeps {name!r} twice.", "Make it anew.")
        for path in self.untied:
            if path.rpartition(".")[0] not in self.modules:
                raise UsageError(f"The plan unties {path!r}, which is in none of its modules.", "Make it anew.")
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
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise UsageError(
                f"The plan is for another model: {'; '.join(differences[:3])}{more}.",
                "Search again: lowprec-check plan TARGET --save.",
            )


class Attempt(Struct, frozen=True, kw_only=True):
    """What the search made of one base."""

    base: str
    status: str
    """Of the base as it is."""
    why: str
    rel_l2: float | None = None
    kept: int | None = None
    """Modules in fp32 of the plan found; ``None`` where none was."""
    speedup: float | None = None
    trials: int = 0
    seconds: float = 0.0
    outcome: str
    """In words: what was found, or why nothing was."""
    constants: list[Constant] = []
    """Where another constant would do without a module in fp32."""


class Planning(Struct, frozen=True, kw_only=True):
    """All that a search did: every base tried, and the best plan, if any."""

    target: str
    model: str
    device: str
    attempts: list[Attempt]
    plan: Plan | None = None

    def to_json(self) -> bytes:
        """Encode as indented JSON."""
        return encode(self, indent=1)
