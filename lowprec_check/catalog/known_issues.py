"""Known issues of torch, and faults that users have reported, by what a scan sees.

>>> [issue.id for issue in matching(op="dot", device="xpu", torch="2.1.0")]  # doctest: +SKIP
['ipex-673']
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of, function_name
from lowprec_check.catalog.records import SHORT
from lowprec_check.catalog.versioned_file import data_folder, read_tables
from lowprec_check.catalog.versions import release_of, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import DEVICES, device_of
from lowprec_check.schema.base import StrictStruct

LowDtype = Literal["half", "bfloat16"]
Way = Literal["cast", "autocast"]


def _check(links: Sequence[str], codes: Sequence[str]) -> None:
    for link in links:
        if not re.match(r"https://\S+$", link):
            raise ValueError(f"{link!r} is not an https link")
    for code in codes:
        if not re.fullmatch(r"LP\d{3}", code):
            raise ValueError(f"{code!r} is not a diagnostic code")


class KnownIssue(StrictStruct, frozen=True, kw_only=True):
    """One reported issue. An empty list or a missing bound does not limit the issue."""

    id: str
    title: str
    link: str
    """The thread."""
    more: list[str] = []
    """Further threads and sources."""
    ops: list[str] = []
    """Base names of aten ops without namespace: `dot`."""
    models: list[str] = []
    devices: list[str] = []
    dtypes: list[LowDtype] = []
    ways: list[Way] = []
    """How the model was run in low precision: a blanket cast or autocast."""
    codes: list[str] = []
    """Codes of the diagnostics that report it."""
    message: str | None = None
    """A regular expression that is found in the message of the exception or warning."""
    since: str | None = None
    """The first torch release known to have it."""
    fixed: str | None = None
    """The first torch release without it."""
    extension_fixed: str | None = None
    """The first release of Intel's extension without it."""
    symptom: str
    fix: str | None = None
    """How it was fixed, if it was."""
    workaround: str | None = None
    checked: bool
    """Whether the thread was read (in a stored copy)."""
    thread: str
    """A summary of the thread; if the thread was not found, the origin of the entry."""

    def __post_init__(self) -> None:
        for version in (self.since, self.fixed, self.extension_fixed):
            if version is not None:
                version_key(version)
        for device in self.devices:
            if device not in DEVICES.names():
                raise ValueError(f"{device!r} is not a device: choose from {', '.join(DEVICES.names())}")
        _check([self.link, *self.more], self.codes)
        try:
            re.compile(self.message or "")
        except re.error as error:
            raise ValueError(f"message is not a regular expression: {error}") from None
        if not self.fix and not self.workaround:
            raise ValueError("needs a fix or a workaround")

    def in_torch(self, version: str) -> bool:
        """Whether a version of torch has the issue."""
        key = version_key(version)[:2]
        after = self.since is None or key >= version_key(self.since)[:2]
        return after and (self.fixed is None or key < version_key(self.fixed)[:2])


_Entry = TypeVar("_Entry", "KnownIssue", "KnownPattern")


@cache
def known_issues(path: Path | None = None, naming: str = "") -> tuple[KnownIssue, ...]:
    """All issues in the order of the file, or those whose text has ``naming``; errors name the
    file, the entry and the key.
    """
    return _read(path or data_folder() / "known_issues.toml", "issue", KnownIssue, naming)


def _read(path: Path, table: str, kind: type[_Entry], naming: str = "") -> tuple[_Entry, ...]:
    entries = read_tables(path, table, kind, naming)
    seen: set[str] = set()
    for entry in entries:
        if entry.id in seen:
            raise UsageError(f"{path}: duplicate entry {entry.id!r}.", "Remove one of them.")
        seen.add(entry.id)
    return tuple(entries)


def matching(
    *,
    op: str | None = None,
    model: str | None = None,
    device: AnyDevice | None = None,
    dtype: AnyDtype | None = None,
    way: Way | None = None,
    torch: str | None = None,
    code: str | None = None,
    message: str | None = None,
) -> list[KnownIssue]:
    """The issues that match all given criteria, those with the most matches first.

    `op` may be written as `aten.dot.default`, `aten::dot`, `dot` or `torch.fft.rfft` (`dot.out` and
    `add_` count as their op); `model` is the name of a class; `torch` a version, `2.13.0+cpu`. If
    any of `op`, `model`, `code` and `message` is given, an issue must match one of them. Raises
    :class:`UsageError` for an unknown device, dtype or version.
    """
    function = None
    if op is not None:
        function = function_name(op)
    kind = None
    if device is not None:
        kind = device_of(str(device)).name
    low = None
    if dtype is not None:
        low = SHORT[dtype_of(dtype)]
    release = None
    if torch is not None:
        release = release_of(torch)
    naming = ""
    if function is not None and (model, code, message) == (None, None, None):
        naming = function  # no other issue matches
    matching_issues = []
    for issue in known_issues(naming=naming):
        # Each criterion is true, false, or `None` if the issue or the caller does not limit it. A
        # word of the model's name starts with that of the issue: `T5Model` with T5.
        by_model = by_message = None
        if model is not None and issue.models:
            words = [rf"(?<![A-Za-z]){re.escape(name)}" for name in issue.models]
            by_model = any(re.search(word, model, re.IGNORECASE) for word in words)
        if message is not None and issue.message is not None:
            by_message = bool(re.search(issue.message, message))
        named = _is(function, [function_name(name) for name in issue.ops]), by_model
        by_code = _is(code, issue.codes)
        matches = [
            by_message,
            by_code,
            _is(kind, issue.devices),
            _is(low, issue.dtypes),
            _is(way, issue.ways),
            None if release is None else issue.in_torch(release),
        ]
        if True in named or all(criterion is None for criterion in (op, model, code, message)):
            about = True
        elif issue.ops or issue.models:  # it is about other ops or models, unless neither was given
            about = named == (None, None) and bool(by_message)
        else:
            about = bool(by_message or by_code)
        if about and False not in matches:
            matching_issues.append(([*named, *matches].count(True), issue))
    return [issue for _, issue in sorted(matching_issues, key=lambda pair: -pair[0])]


def _is(value: str | None, names: Sequence[str | None]) -> bool | None:
    """Whether `value` is one of `names`; `None` if either is not given."""
    if value is None or not names:
        return None
    return value in names


# -- Faults that users have reported


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
        _check([self.link], self.codes)
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
    return _read(data_folder() / "known_patterns.toml", "pattern", KnownPattern)


def best_fit(candidates: list[KnownPattern], around: OpsAround) -> KnownPattern | None:
    """The pattern that asks for most among those that fit; the first of equals."""
    fitting = [pattern for pattern in candidates if pattern.fits(around)]
    return max(fitting, key=lambda pattern: pattern.criteria, default=None)
