"""The operators of fixtures that tests share: those of a class, module, package or session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from lowprec_check.catalog.records import Numbers, stronger

# Such a fixture is set up while the first of its tests runs and torn down while the last one does.
# Its operators belong to all of them. So each gets an id, each report names the ids of the fixtures
# that the test uses, and what was recorded for an id is sent once; the process that collects the
# results joins them.

Recorded = tuple[Numbers, str | None]
"""The strongest numbers an op was called with, and the line of the project that called it first."""
Ops = dict[str, Recorded]
"""By the name of the overload."""


def merge(into: Ops, ops: Mapping[str, Recorded]) -> None:
    """Add ``ops``, which were recorded later."""
    for op, (numbers, source) in ops.items():
        earlier = into.get(op, (numbers, source))
        into[op] = (stronger(numbers, earlier[0]), earlier[1] or source)


class SharedFixtures:
    """Separates the ops of shared fixtures from those of the test that happens to run."""

    def __init__(self, take: Callable[[], Mapping[str, Recorded]], prefix: str) -> None:
        """``take`` returns what was recorded since; ``prefix`` is unique to this process."""
        self._take, self._prefix = take, prefix
        # Ids of fixtures that are set up, and of those that each asked for while it was set up.
        self._ids: dict[Any, str] = {}
        self._uses: dict[str, set[str]] = {}
        self._setting_up: list[str] = []
        # Since the last report: fixtures set up (also if that failed) and torn down, and the ops.
        self._set_up: set[str] = set()
        self._torn_down: list[str] = []
        self._of_fixtures: dict[str, Ops] = {}
        self._own: Ops = {}

    def _assign(self, owner: str | None = None) -> None:
        """Assign what was recorded until now to a fixture (by default the one that is being set up,
        if any), or to the test.
        """
        ops, owner = self._take(), owner or next(reversed(self._setting_up), None)
        if owner is None:
            merge(self._own, ops)
        elif ops:
            merge(self._of_fixtures.setdefault(owner, {}), ops)

    def begin(self, fixture: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> set[Any]:
        """A fixture is about to be set up; returns what :meth:`end` needs."""
        self._assign()
        key = f"{self._prefix}{len(self._uses)}"
        active = _fixtures_of(request)
        # A fixture that overrides another and asks for it by the same name hides it from the test.
        hidden = (other for other in active if other.argname == fixture.argname)
        self._uses[key] = {self._ids[other] for other in hidden if other in self._ids}
        self._ids[fixture] = key
        self._setting_up.append(key)
        self._set_up.add(key)
        return set(active)

    def end(self, request: pytest.FixtureRequest, before: set[Any]) -> None:
        """The fixture is set up, or that failed."""
        key = self._setting_up.pop()
        self._assign(key)
        asked_for = (other for other in _fixtures_of(request) if other not in before)
        self._uses[key] |= {self._ids[other] for other in asked_for if other in self._ids}

    def finished(self, fixture: pytest.FixtureDef[Any]) -> None:
        """Any fixture was torn down: what was recorded since the last one was, is its."""
        if self._ids:
            key = self._ids.pop(fixture, None)
            self._assign(key)
            if key is not None:
                self._torn_down.append(key)

    def ids(self, item: pytest.Item) -> list[str]:
        """Ids of the shared fixtures that a test uses, sorted, also through others."""
        if not self._ids and not self._set_up:
            return []
        pending = {self._ids[other] for other in _fixtures_of(item) if other in self._ids} | self._set_up
        reached: set[str] = set()
        while pending:  # a fixture may use others
            reached |= pending
            pending = set().union(*(self._uses.get(key, ()) for key in pending)) - reached
        return sorted(reached)

    def take_all(self) -> tuple[Ops, dict[str, Ops], list[str]]:
        """Since the last report: the test's ops, fixtures' ops, and fixtures torn down."""
        self._assign()
        taken = self._own, self._of_fixtures, self._torn_down
        self._own, self._of_fixtures, self._torn_down = {}, {}, []
        self._set_up.clear()
        return taken


def _fixtures_of(holder: Any) -> Iterable[Any]:
    """The definitions of the fixtures that a test, or that of a request, has asked for until now.
    pytest has no public name for them; without it, fixtures count for the test that set them up.
    """
    request = getattr(holder, "_request", holder)
    return list(getattr(request, "_fixture_defs", {}).values())
