"""Issues that people have hit and reported, curated in `catalog/known_issues.toml`. Never imports torch.

>>> [issue.id for issue in matching(op="aten.dot.default", device="xpu", dtype="half", torch="2.1.0")]  # doctest: +SKIP
['ipex-673']
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from lowprec_check.catalog.data_files import data_folder
from lowprec_check.catalog.declared import release_of
from lowprec_check.catalog.names import AnyDevice, AnyDtype, dtype_of, function_name
from lowprec_check.catalog.records import SHORT
from lowprec_check.catalog.toml_tables import read_tables, version_key
from lowprec_check.errors import UsageError
from lowprec_check.schema.base import StrictStruct
from lowprec_check.schema.devices import DEVICES, device_of

LowDtype = Literal["half", "bfloat16"]
Way = Literal["cast", "autocast"]


class KnownIssue(StrictStruct, frozen=True, kw_only=True):
    """One reported issue. A list that is empty, or a bound that is missing, says nothing: the issue is not limited by it."""

    id: str
    title: str
    link: str
    """The thread."""
    more: list[str] = []
    """Further threads and sources."""
    ops: list[str] = []
    """Base names of aten ops, without a namespace: `dot`."""
    models: list[str] = []
    devices: list[str] = []
    dtypes: list[LowDtype] = []
    ways: list[Way] = []
    """How the model came to low precision: a blanket cast, or autocast."""
    codes: list[str] = []
    """Diagnostics that it shows as."""
    message: str | None = None
    """A regular expression that finds the error in an exception's message, or the warning."""
    since: str | None = None
    """The first torch release known to have it."""
    fixed: str | None = None
    """The first torch release without it."""
    extension_fixed: str | None = None
    """The first release of Intel's extension without it."""
    symptom: str
    fix: str | None = None
    """What was done about it, where something was."""
    workaround: str | None = None
    checked: bool
    """Whether the thread was read (in stored copies of it)."""
    thread: str
    """What the thread says, in a sentence; or, where it was not found, where the entry comes from."""

    def __post_init__(self) -> None:
        for version in (self.since, self.fixed, self.extension_fixed):
            if version is not None:
                version_key(version)
        for device in self.devices:
            if device not in DEVICES.names():
                raise ValueError(f"{device!r} is not a device: choose from {', '.join(DEVICES.names())}")
        for url in (self.link, *self.more):
            if not re.match(r"https://\S+$", url):
                raise ValueError(f"{url!r} is no link")
        for code in self.codes:
            if not re.fullmatch(r"LP\d{3}", code):
                raise ValueError(f"{code!r} is no diagnostic code")
        try:
            re.compile(self.message or "")
        except re.error as error:
            raise ValueError(f"message is no regular expression: {error}") from None
        if not self.fix and not self.workaround:
            raise ValueError("gives neither fix nor workaround")

    def in_torch(self, version: str) -> bool:
        """Whether a version of torch is among those that have it."""
        key = version_key(version)[:2]
        after = self.since is None or key >= version_key(self.since)[:2]
        return after and (self.fixed is None or key < version_key(self.fixed)[:2])


@cache
def known_issues(path: Path | None = None) -> tuple[KnownIssue, ...]:
    """All of them, in the file's order; raises :class:`UsageError` naming the file, the entry and the key that is wrong."""
    path = path or data_folder() / "known_issues.toml"
    issues = read_tables(path, "issue", KnownIssue)
    seen: set[str] = set()
    for issue in issues:
        if issue.id in seen:
            raise UsageError(f"{path}: entry {issue.id!r} is there twice.")
        seen.add(issue.id)
    return tuple(issues)


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
    """The issues that nothing given contradicts, those that most of it speaks for first.

    `op` may be written as `aten.dot.default`, `aten::dot`, `dot` or `torch.fft.rfft` (variants count as their op: `dot.out`, `add_`);
    `model` is a class's name; `torch` a version, `2.13.0+cpu`; `code` a diagnostic code. A criterion that is left out is not
    looked at. With none of `op`, `model`, `code` and `message`, an issue need not name any of them. Raises :class:`UsageError`
    for a device, dtype or version that there is not.
    """
    function = None if op is None else function_name(op)
    kind = None if device is None else device_of(str(device)).name
    low = None if dtype is None else SHORT[dtype_of(dtype)]
    release = None if torch is None else release_of(torch)
    found = []
    for issue in known_issues():
        named = _is(function, [function_name(name) for name in issue.ops]), _begins(model, issue.models)
        said = None if message is None or issue.message is None else bool(re.search(issue.message, message))
        coded = _is(code, issue.codes)
        told = [
            said,
            coded,
            _is(kind, issue.devices),
            _is(low, issue.dtypes),
            _is(way, issue.ways),
            None if release is None else issue.in_torch(release),
        ]
        asked = any(criterion is not None for criterion in (op, model, code, message))
        if False not in told and (not asked or _speaks_of(named, said, coded, bool(issue.ops or issue.models))):
            found.append(([*named, *told].count(True), issue))
    return [issue for _, issue in sorted(found, key=lambda pair: -pair[0])]


def _speaks_of(named: tuple[bool | None, bool | None], said: bool | None, coded: bool | None, specific: bool) -> bool:
    """Whether an issue is about what is asked for: its op or model; where it names none, its message or code."""
    if True in named:
        return True
    if specific:  # of other ops and models, unless neither was asked for
        return named == (None, None) and bool(said)
    return bool(said or coded)


def _is(value: str | None, names: Sequence[str | None]) -> bool | None:
    """Whether `value` is among `names`; `None` where one of the two says nothing."""
    return None if value is None or not names else value in names


def _begins(value: str | None, names: Sequence[str]) -> bool | None:
    """Whether a word of `value` begins with one of `names` (T5 is in `T5Model` and not in `resnet50`)."""
    if value is None or not names:
        return None
    return any(re.search(rf"(?<![A-Za-z]){re.escape(name)}", value, re.IGNORECASE) for name in names)
