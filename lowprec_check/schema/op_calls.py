"""The op calls of an instrumented run, as columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import copysign, isfinite
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec

from lowprec_check.schema.base import Struct
from lowprec_check.schema.run_key import Phase

# -- The op calls of a run: :class:`OpCall` is one row, :class:`OpCalls` all rows as columns
#
# A quantity is declared once, as a field of :class:`OpCall` with a default (older files lack it);
# the columnar :class:`OpCalls`, the JSON Schema and the documentation are derived from it. With a
# :class:`Quantity` it is also a column of the reports.

PRODUCTS = re.compile(r"mm\.|conv(?!ert)|scaled_dot_product|(?<!bi)linear|rnn|lstm|gru")
"""Ops that autocast runs in 16 bits whatever their inputs: products, convolutions, attention."""

CallOutcome = Literal["ok", "rescued", "emulated"]


class Quantity(NamedTuple):
    """How reports show a field of op calls; they leave out 0 and empty columns."""

    title: str
    """The heading of the column, for all calls of an op or a place together."""
    type: Literal["error", "share", "percent", "number", "figure", "ms", "text"]
    """A type of cells in ``report/blocks.py``; a share needs an error budget to be trusted."""
    total: Literal["sum", "max", "most common"]
    """How the values of several calls are taken together."""
    meaning: str = ""
    """What the figures are, which the page shows on the heading."""
    of_call: str | None = None
    """The heading of the column for single calls if it is another; empty: not shown for them."""
    table: Literal["operators", "ranges"] = "operators"
    """The table that shows it: operators and their worst calls, or places near range ends."""
    rank: int = 9
    """Columns with a lower rank come first."""
    plus: str = ""
    """The field that is added to it."""


FROM_INPUT = 0
"""In :attr:`OpCall.reads`: an input of the model, which no op call wrote."""


class OpCall(msgspec.Struct, gc=False):
    """One operator call. A field is ``None`` if it was not measured."""

    # Which op, where.
    op: str
    """Overload name, ``aten.mm.default``."""
    module: str = ""
    """Dotted path in the model, ``""`` for the model itself."""
    source: str | None = None
    """``file.py:line`` of the innermost code that is not torch's."""
    dtypes: Annotated[
        str,
        Quantity("dtypes", "text", "most common", "Of the inputs and the output, in most of the calls.", "", rank=4),
    ] = ""
    """Floating dtypes in, an arrow, floating dtypes out: ``bf16+f32→bf16``."""
    shape: str = ""
    """Shape of the first tensor out: ``4×64×56×56``."""
    outcome: CallOutcome = "ok"
    """``rescued``: failed, was computed another way; ``emulated``: in fp32, then rounded."""
    # Its errors against fp32.
    local_error: Annotated[
        float | None,
        Quantity(
            "worst of the op itself",
            "error",
            "max",
            "Error of the op alone: on the same inputs, against the op in fp32.",
            "of the op itself",
            rank=3,
        ),
    ] = None
    """rel_l2 of the op against itself on the same inputs widened; the worst of its outputs."""
    accumulated_error: Annotated[
        float | None,
        Quantity(
            "worst error",
            "error",
            "max",
            "Error of the result against fp32, with everything that earlier ops added.",
            "error",
            rank=2,
        ),
    ] = None
    """rel_l2 against the lockstep reference; the worst over its outputs."""
    input_error: float | None = None
    """The largest accumulated error among the inputs."""
    # The range of its results, and what does not fit the dtype.
    absmax: Annotated[
        float | None,
        Quantity("largest", "figure", "max", "The largest finite magnitude of the results.", table="ranges"),
    ] = None
    """Largest finite magnitude of the outputs; ``None`` if nothing was compared."""
    rms: float | None = None
    """Root mean square of the reference's first output: the typical magnitude."""
    introduced_inf: Annotated[int, Quantity("Inf", "number", "sum", "Values that overflow.", table="ranges")] = 0
    """Number of elements that are Inf although the inputs and the reference are finite."""
    introduced_nan: Annotated[
        int,
        Quantity(
            "Inf or NaN",
            "number",
            "sum",
            "Values that become Inf or NaN here and are finite in fp32.",
            of_call="",
            plus="introduced_inf",
        ),
    ] = 0
    """Number of elements that are NaN although the inputs and the reference are finite."""
    flushed: Annotated[
        float | None,
        Quantity("become zero", "percent", "max", "Share of fp32's non-zeros that are zero here.", table="ranges"),
    ] = None
    """Share (0 to 1) of the reference's non-zeros that are flushed to zero here (fp16 only)."""
    subnormal: Annotated[
        float | None,
        Quantity(
            "subnormal", "percent", "max", "Share of fp32's non-zeros below the smallest normal number.", table="ranges"
        ),
    ] = None
    """Share (0 to 1) of the reference's non-zeros below the smallest normal number, or flushed."""
    input_flushed: float | None = None
    """The largest such share among the inputs."""
    # What else it does with values.
    flips: int = 0
    """Number of indices or booleans that differ from the reference's."""
    recast: Annotated[
        int,
        Quantity(
            "repeated casts", "number", "sum", "Casts that repeat or undo another of the same tensor.", "", rank=8
        ),
    ] = 0
    """1 for a cast that repeats or undoes another of the same tensor."""
    to_python: int = 0
    """1 for a value read into Python (``.item()``): the reference continues with the run's."""
    # Its times.
    time_ms: float | None = None
    """Milliseconds of the op alone, of a call that seemed slow: the fastest of two calls, or of
    those of an equal one before; ``None`` for any other call, and on an accelerator.
    """
    reference_ms: float | None = None
    """The same in fp32, the fastest of three calls; ``None`` where ``time_ms`` is."""
    compared_values: int = 0
    """Elements among which ``introduced_inf`` and ``introduced_nan`` were counted, or 0."""
    compared_choices: int = 0
    """Number of indices and booleans among which ``flips`` were counted."""
    # What it does to the output of the model.
    share: Annotated[
        float | None,
        Quantity(
            "share of the error",
            "share",
            "sum",
            "Part of the squared error of the output that is caused here.",
            "share",
            rank=1,
        ),
    ] = None
    """Share of the squared output error by the rounding of its result; ``None`` without budget."""
    phase: Phase | None = None
    """The part of a training step that it belongs to; ``None`` if only the forward pass was run."""
    vanished: float | None = None
    """The number in the arguments that rounds to zero in the dtype that the op takes it in."""
    # For finding its expression in the source, and the ops that it reads from.
    caller: str | None = None
    """The user's innermost line, if ``source`` is in an installed package; empty if none."""
    reads: tuple[int, ...] = ()
    """Calls back to those that wrote its floating inputs; 1: right before; 0: a model input."""
    leaving: float | None = None
    """The part of ``share`` that stays with the module in fp32: rounding of what leaves it."""

    nth: int = 0
    """Which op of this name on its line it is, from 0: ``x * 2 * 3`` has two."""
    reaches_output: bool | None = None
    """Whether its Inf or NaN lead to one in the output; ``None`` if it has none, or if unknown."""
    span: str | None = None
    """Its expression in the source, ``25:17-25:55``, as Python's ``ast`` counts (from 3.11)."""

    @property
    def is_forward(self) -> bool:
        """Whether it ran in the forward pass, as every call of a scan without training."""
        return self.phase is None or self.phase == "forward"

    @property
    def casts_weight(self) -> bool:
        """Whether it casts what no op wrote, as autocast casts weights; files without ``reads`` do
        not know.
        """
        return not self.reads and self.op == "aten._to_copy.default"

    @property
    def gives_nonfinite(self) -> bool:
        """Whether it turns finite values into Inf or NaN."""
        return bool(self.introduced_inf or self.introduced_nan)

    @property
    def flushes(self) -> bool:
        """Whether values become zero in this op, and not in those before it."""
        return bool(self.flushed) and (self.flushed or 0.0) >= 2 * (self.input_flushed or 0.0)

    @property
    def spoils_output(self) -> bool:
        """Whether it turns finite values into Inf or NaN that reach the output, if known."""
        return self.gives_nonfinite and self.reaches_output is not False

    @property
    def place(self) -> tuple[str, str, str | None]:
        """Module, op and line."""
        return self.module, self.op, self.source

    @property
    def exact_place(self) -> tuple[str, str, str | None, int]:
        """Module, op, line, and which op of this name on the line."""
        return self.module, self.op, self.source, self.nth


_ZERO = 0.0


def _with_shared_numbers(column: list[float | None], known: dict[float, float]) -> list[float | None]:
    """``column`` with each number replaced by its equal in ``known``; -0.0 is not 0.0."""
    numbers: list[float | None] = []
    for number in column:
        if number:
            numbers.append(known.setdefault(number, number))
        elif number is not None and copysign(1.0, number) > 0:
            numbers.append(_ZERO)
        else:
            numbers.append(number)
    return numbers


_TIMES = ("time_ms", "reference_ms")
_FIELDS = msgspec.structs.fields(OpCall)
_FIRST = _FIELDS[0].name
_TYPES = get_type_hints(OpCall)
_FLOATS = [name for name, kind in _TYPES.items() if kind == float | None]


_HINTS = get_type_hints(OpCall, include_extras=True).items()
_QUANTITIES = [(name, about) for name, hint in _HINTS for about in get_args(hint) if isinstance(about, Quantity)]
QUANTITIES = dict(sorted(_QUANTITIES, key=lambda item: item[1].rank))
"""What reports show of op calls, by the name of the field, in the order of their columns."""


class _Columns(Struct, frozen=True, kw_only=True):
    """The methods of :class:`OpCalls`."""

    def __post_init__(self) -> None:
        """Fill the columns that an older file lacks; raise ``ValueError`` if columns differ in
        length.

        Equal numbers are stored once, and columns of one constant too: a scan may have 100,000
        calls in each run. Texts are shared where they are made or received.
        """
        constant: dict[int | None, list[Any]] = {}
        numbers: dict[float, float] = {}
        reads: dict[tuple[int, ...], tuple[int, ...]] = {}
        for field in _FIELDS:
            column = getattr(self, field.name)
            # A file of an older version lacks columns.
            if column is msgspec.UNSET:
                column = [field.default] * len(self)
                msgspec.structs.force_setattr(self, field.name, column)
            elif len(column) != len(self):
                raise ValueError(f"column {field.name!r} has {len(column)} entries, {_FIRST!r} has {len(self)}")
            # Each object is there once, whatever has decoded the columns.
            if field.name in _FLOATS:
                column[:] = _with_shared_numbers(column, numbers)
            elif field.name == "reads":
                column[:] = [reads.setdefault(value, value) for value in column]
            empty = 0 if _TYPES[field.name] is int else None
            if column.count(empty) == len(column):
                msgspec.structs.force_setattr(self, field.name, constant.setdefault(empty, column))

    def __len__(self) -> int:
        return len(getattr(self, _FIRST))

    @property
    def are_timed(self) -> bool:
        """Whether a call has a time."""
        return any(time is not None for name in _TIMES for time in getattr(self, name))

    def rows(self) -> Iterator[OpCall]:
        """Yield the calls in order, each as a new row."""
        return map(OpCall, *(getattr(self, field.name) for field in _FIELDS))


if TYPE_CHECKING:

    class OpCalls(_Columns, frozen=True):
        """Every op call of an instrumented run: a list per field of :class:`OpCall`."""

        def __init__(self, **columns: list[Any]) -> None: ...

        def __getattr__(self, name: str) -> list[Any]: ...

else:
    OpCalls = msgspec.defstruct(
        "OpCalls",
        [(_FIRST, list[_FIELDS[0].type], [])]
        + [(field.name, list[field.type] | msgspec.UnsetType, msgspec.UNSET) for field in _FIELDS[1:]],
        bases=(_Columns,),
        module=__name__,
        namespace={"__doc__": "Every op call of an instrumented run: a list for each field of :class:`OpCall`."},
        frozen=True,
        kw_only=True,
    )


def to_columns(rows: Sequence[OpCall]) -> OpCalls:
    """Transpose ``rows``; floats that are not finite become ``None``: JSON has no infinity."""
    columns = {field.name: list(map(attrgetter(field.name), rows)) for field in _FIELDS}
    for name in _FLOATS:
        columns[name] = [value if value is not None and isfinite(value) else None for value in columns[name]]
    return OpCalls(**columns)


def concatenate(parts: Sequence[OpCalls]) -> OpCalls:
    """The calls of all ``parts``, in order."""
    return OpCalls(
        **{field.name: [value for part in parts for value in getattr(part, field.name)] for field in _FIELDS}
    )


def without_times(calls: OpCalls) -> OpCalls:
    """The calls without their times, as those of a device that they did not run on."""
    return msgspec.structs.replace(calls, **{name: [None] * len(calls) for name in _TIMES})


# -- The warning about an op that a predicted device runs on the CPU, and what it says

FALLBACK_WARNING = r"aten::(\S+) falls back to the CPU: each call copies its inputs \((\d+) bytes\)"
"""What the warning starts with, as a regular expression: the op and the bytes of its inputs."""


def fallback_warning(op: str, size: int) -> str:
    """The warning about ``dot`` with inputs of ``size`` bytes; :func:`fallback_of` reads it."""
    return (
        f"aten::{op} falls back to the CPU: each call copies its inputs ({size} bytes) there, "
        "and its result back (predicted)"
    )


class Fallback(NamedTuple):
    """An op that runs on the CPU instead of the device."""

    op: str
    """As op calls name it, ``aten.linalg_svd.default``."""
    size: int
    """The bytes of the inputs of a call."""


def fallback_of(warning: str) -> Fallback | None:
    """What the warning of a predicted device says; ``None`` for a warning of torch itself."""
    match = re.match(FALLBACK_WARNING, warning)
    if match is None:
        return None
    name, _, overload = match[1].partition(".")
    return Fallback(f"aten.{name}.{overload or 'default'}", int(match[2]))


# -- The reason for emulating an op whose calls took too long, and the time in it

_KILLED = re.compile(r"a call took more than (\d+(?:\.\d+)?) s, twice$")


def killed_reason(seconds: float) -> str:
    """``a call took more than 3.2 s, twice``."""
    return f"a call took more than {seconds:.1f} s, twice"


def seconds_killed(reason: str) -> float | None:
    """The seconds of a :func:`killed_reason`; ``None`` for any other."""
    match = _KILLED.match(reason)
    if match:
        return float(match[1])
    return None
