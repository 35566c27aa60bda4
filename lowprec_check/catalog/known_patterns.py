"""Faults of models that users have reported, by what a scan sees: `catalog/known_patterns.toml`."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from lowprec_check.catalog.data_files import data_folder, read_tables
from lowprec_check.catalog.known_issues import LowDtype, Way
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import StrictStruct


class OpsAround(NamedTuple):
    """What a run shows around an op. Ops are base names without namespace: `mul`."""

    op: str
    reads: frozenset[str]
    """Ops whose results it reads, directly or through a few others."""
    feeds: frozenset[str]
    """Ops that read its result, in the same way."""
    largest: float | None
    """The largest finite magnitude of its results."""
    in_fp32: bool
    """Whether all that it reads is in fp32, so that its inputs were rounded before."""
    directly: frozenset[str] = frozenset()
    """Ops whose results it reads itself."""
    from_input: bool = False
    """Whether it computes on an input of the model, directly or through a few others."""
    vanished: bool = False
    """Whether it, or an op before it, takes a constant that is zero in the dtype."""


class KnownPattern(StrictStruct, frozen=True, kw_only=True):
    """One reported fault. An empty list or a missing bound does not limit it."""

    id: str
    title: str
    link: str
    """The thread, whose maintainers found cause and repair."""
    cause: str
    repair: str
    codes: list[str]
    """Codes of the diagnostics that report it."""
    ops: list[str]
    """The op of the finding; if it has none, the one with the largest share of the error."""
    reads: list[str] = []
    """Ops before it, each `name` or `this|or that`."""
    feeds: list[str] = []
    """Ops after it, in the same form."""
    absent: list[str] = []
    """Ops that are neither before nor after it."""
    not_before: list[str] = []
    """Ops that are not before it."""
    directly: list[str] = []
    """Ops whose results it reads itself, each `name` or `this|or that`."""
    without_input: bool = False
    """Whether it depends on no input of the model, as tables of positions do."""
    vanished: bool = False
    """Whether it, or an op before it, takes a constant that is zero in the dtype."""
    dtypes: list[LowDtype] = []
    ways: list[Way] = []
    at_least: float | None = None
    """The least magnitude that its results reach."""
    in_fp32: bool = False
    """Whether it reads fp32 only."""
    example: str
    """The small form of it in tests/field."""

    def __post_init__(self) -> None:
        if not re.match(r"https://\S+$", self.link):
            raise ValueError(f"{self.link!r} is not an https link")
        for code in self.codes:
            if not re.fullmatch(r"LP\d{3}", code):
                raise ValueError(f"{code!r} is not a diagnostic code")
        if not self.codes or not self.ops:
            raise ValueError("needs codes and ops")

    @property
    def criteria(self) -> int:
        """How much it asks of what is around the op."""
        lists = (self.reads, self.feeds, self.absent, self.not_before, self.directly)
        flags = (self.at_least is not None, self.in_fp32, self.without_input, self.vanished)
        return sum(map(len, lists)) + sum(flags)

    def may_fit(self, code: str, dtype: str | None, way: Way | None) -> bool:
        """Whether it is about findings of ``code`` in such runs."""
        return code in self.codes and (not self.dtypes or dtype in self.dtypes) and (not self.ways or way in self.ways)

    def fits(self, around: OpsAround) -> bool:
        """Whether ``around`` shows all that it asks for."""
        near = around.reads | around.feeds
        return (
            around.op in self.ops
            and all(_has(around.reads, names) for names in self.reads)
            and all(_has(around.feeds, names) for names in self.feeds)
            and not any(_has(near, names) for names in self.absent)
            and not any(_has(around.reads, names) for names in self.not_before)
            and all(_has(around.directly, names) for names in self.directly)
            and (self.at_least is None or (around.largest or 0.0) >= self.at_least)
            and (not self.in_fp32 or around.in_fp32)
            and (not self.without_input or not around.from_input)
            and (not self.vanished or around.vanished)
        )


def _has(ops: frozenset[str], names: str) -> bool:
    return not ops.isdisjoint(names.split("|"))


@cache
def known_patterns() -> tuple[KnownPattern, ...]:
    """All patterns in the order of the file; errors name the file, the entry and the key."""
    path = data_folder() / "known_patterns.toml"
    patterns = read_tables(path, "pattern", KnownPattern)
    seen: set[str] = set()
    for pattern in patterns:
        if pattern.id in seen:
            raise UsageError(f"{path}: duplicate entry {pattern.id!r}.", "Remove one of them.")
        seen.add(pattern.id)
    return tuple(patterns)


def best_fit(candidates: list[KnownPattern], around: OpsAround) -> KnownPattern | None:
    """The pattern that asks for most among those that fit; the first of equals."""
    fitting = [pattern for pattern in candidates if pattern.fits(around)]
    return max(fitting, key=lambda pattern: pattern.criteria, default=None)
