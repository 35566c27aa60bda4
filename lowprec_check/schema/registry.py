"""Named values of one axis: found by name or alias, extended by other packages. Never imports torch.

Other packages add to an axis through the entry-point group ``lowprec_check.axes``: each entry point names a
:class:`~lowprec_check.schema.precisions.Precision`, a :class:`~lowprec_check.schema.backends.Backend`, a
:class:`~lowprec_check.schema.devices.Device` or a :class:`~lowprec_check.report.registry.ReportFormat`.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from lowprec_check.errors import UsageError

ENTRY_POINTS = "lowprec_check.axes"


class Named(Protocol):
    """One value of an axis."""

    @property
    def name(self) -> str:
        """The name in options and reports."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that users may write."""


Item = TypeVar("Item", bound=Named)


@functools.cache
def added_by_packages() -> tuple[Any, ...]:
    """The objects that installed packages register; raises :class:`UsageError` naming the package that fails to load."""
    found = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        try:
            found.append(entry.load())
        except Exception as error:
            package = entry.dist.name if entry.dist else entry.value
            raise UsageError(
                f"{package} registers {entry.name!r} with lowprec-check, but it failed to load: "
                f"{type(error).__name__}: {error}.",
                f"Upgrade or uninstall {package}.",
            ) from error
        if isinstance(found[-1], type):
            raise UsageError(
                f"The entry point {entry.name!r} ({entry.value}) is a class, not an object.",
                f"Register an instance in the group {ENTRY_POINTS}.",
            )
    return tuple(found)


class Registry(Generic[Item]):
    """The values of one axis in the order in which reports show them: those built in, then those of other packages."""

    def __init__(self, noun: str, kind: type[Item], built_in: Callable[[], Iterable[Item]]) -> None:
        """``noun`` names one value in messages; ``built_in`` makes the values of this package."""
        self._noun, self._kind, self._built_in = noun, kind, built_in

    @functools.cached_property
    def _items(self) -> dict[str, Item]:
        items: dict[str, Item] = {}
        spellings: dict[str, str] = {}
        for item in (*self._built_in(), *(item for item in added_by_packages() if isinstance(item, self._kind))):
            for spelling in dict.fromkeys([item.name, *item.aliases]):
                known = spellings.setdefault(spelling.lower(), item.name)
                if known != item.name or item.name in items:
                    raise UsageError(
                        f"The {self._noun} {item.name!r} uses the name {spelling!r}, which {known!r} already has.",
                        f"Another package registers it with lowprec-check ({ENTRY_POINTS}): rename it or uninstall that package.",
                    )
            items[item.name] = item
        return items

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def names(self) -> list[str]:
        """The names, in order."""
        return list(self._items)

    def find(self, name: str) -> Item | None:
        """The value of that name or alias, in any case; ``None`` if there is none."""
        wanted = name.strip().lower()
        return next((item for item in self if wanted in (item.name.lower(), *map(str.lower, item.aliases))), None)

    def get(self, name: str) -> Item:
        """Like :meth:`find`, but raises :class:`UsageError` with a suggestion if there is none."""
        found = self.find(name)
        if found is None:
            spellings = [spelling for item in self for spelling in (item.name, *item.aliases)]
            near = difflib.get_close_matches(name.lower(), spellings, 1)
            meant = self.find(near[0]) if near else None
            suggestion = f"Did you mean {meant.name}? " if meant else ""
            raise UsageError(f"Unknown {self._noun} {name!r}.", f"{suggestion}Choose from {', '.join(self.names())}.")
        return found


def choices(names: Sequence[str], last: str = "or") -> str:
    """``cpu, cuda, xpu or mps``."""
    *others, final = names
    return f"{', '.join(others)} {last} {final}" if others else final
