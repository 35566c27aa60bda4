"""Which entry of a manifest applies to which test, and which to none."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

import pytest

from lowprec_check.errors import UsageError, encodable
from lowprec_check.pytest_plugin.known_failure import KnownFailure, closest
from lowprec_check.pytest_plugin.manifest import Manifest
from lowprec_check.pytest_plugin.marker import Case, is_device_available
from lowprec_check.schema.axes import accelerators, device_type


class EntryOfTest:
    """The entries of the collected tests."""

    def __init__(self, known: Manifest) -> None:
        self._known = known
        self._exact: dict[str, list[KnownFailure]] = {}
        self._patterns: list[KnownFailure] = []
        for entry in known:
            if "*" in entry.test:
                self._patterns.append(entry)
            else:
                self._exact.setdefault(entry.test, []).append(entry)
        self._found: dict[str, KnownFailure] = {}
        self.problems: dict[str, str] = {}
        """By test."""

    def of(self, nodeid: str) -> KnownFailure | None:
        """The entry of a test."""
        return self._found.get(nodeid)

    def find(self, items: Sequence[pytest.Item]) -> None:
        """Find the entry of each test; one with two entries that are equally close is a problem."""
        for item in items:
            test = encodable(item.nodeid)
            named = [*self._exact.get(test, ()), *(entry for entry in self._patterns if entry.names(test))]
            try:
                found = closest([entry for entry in named if entry.applies_here and _runs_on(item, entry.device)], test)
            except UsageError as error:
                self.problems[item.nodeid] = str(error)
                continue
            if found is not None:
                self._found[item.nodeid] = found

    def unused(self, config: pytest.Config, items: Sequence[pytest.Item]) -> list[int]:
        """Positions of the entries that name no test, although its file was collected or is missing.

        None if only parts of files were collected. An entry that does not apply here may name tests that exist elsewhere only.
        """
        if any("::" in argument for argument in config.args) or config.getoption("lf", False):
            return []
        tests = {encodable(item.nodeid) for item in items}
        files = {_file(test) for test in tests}

        def is_missing(entry: KnownFailure) -> bool:
            file = _file(entry.test)
            if "*" in file:  # it may be any, also one that was not collected
                return False
            return file in files or as_in_ids(file) in files or not (config.rootpath / file).exists()

        return [
            position
            for position, entry in enumerate(self._known)
            if entry.applies_here
            and (entry.device is None or is_device_available(entry.device))
            and is_missing(entry)
            and not any(map(entry.names, tests if "*" in entry.test else tests & {entry.test}))
        ]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def as_in_ids(file: str) -> str:
    """A path as pytest writes it in ids, on every system: ``tests/test_a.py`` for ``./tests/test_a.py`` and for one with backslashes."""
    return posixpath.normpath(file.replace("\\", "/"))


def _runs_on(item: pytest.Item, device: str | None) -> bool:
    """Whether a test with the marker runs on a type of device; else, whether this machine has it.

    A test without the marker chooses the best device, if any: ``cpu`` are machines without an accelerator.
    """
    if device is None:
        return True
    case = getattr(getattr(item, "callspec", None), "params", {}).get("lowprec")
    if isinstance(case, Case):
        return device_type(case.key.device) == device
    if device == "cpu":
        return not any(map(is_device_available, accelerators()))
    return is_device_available(device)
