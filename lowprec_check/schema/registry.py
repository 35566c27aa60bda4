"""Named values of one axis: found by name or alias, extended by other packages.

Other packages add to an axis through the entry-point group ``lowprec_check.axes``: each entry point
names a :class:`~lowprec_check.schema.precisions.Precision`, a
:class:`~lowprec_check.schema.axes.Backend`, a :class:`~lowprec_check.schema.axes.Device`, a
:class:`~lowprec_check.report.registry.ReportFormat` or a
:class:`~lowprec_check.schema.ways_to_train.WayToTrain`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from lowprec_check.errors import UsageError, message_of, type_name

ENTRY_POINTS = "lowprec_check.axes"
FEATURES = "lowprec_check.features"
_KINDS = ("Precision", "Backend", "Device", "ReportFormat", "WayToTrain")
"""The classes of what other packages add; by name, since their modules import this one."""


class Named(Protocol):
    """One value of an axis."""

    @property
    def name(self) -> str:
        """The name in options and reports."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that users may write."""


Item = TypeVar("Item", bound=Named)
Value = TypeVar("Value")


def modules_in(package: str) -> list[ModuleType]:
    """Import and return every module of a package, by name."""
    path = importlib.import_module(package).__path__
    return [importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(path)]


@functools.cache
def modules_of_features(name: str) -> tuple[ModuleType, ...]:
    """Import and return the module called ``name`` of each feature that has one, by feature."""
    folders = pkgutil.iter_modules(importlib.import_module(FEATURES).__path__)
    paths = [f"{FEATURES}.{folder.name}.{name}" for folder in folders]
    return tuple(importlib.import_module(path) for path in paths if importlib.util.find_spec(path) is not None)


def objects_of_features(name: str, kind: type[Value]) -> list[Value]:
    """The objects of a ``kind`` that features define in their modules called ``name``."""
    values = [value for module in modules_of_features(name) for value in vars(module).values()]
    return [value for value in values if isinstance(value, kind)]


def objects_in(package: str, kind: type[Item]) -> list[Item]:
    """The objects of a ``kind`` that a package and its modules define."""
    modules = [importlib.import_module(package), *modules_in(package)]
    return [value for module in modules for value in vars(module).values() if isinstance(value, kind)]


def metadata_folders() -> Iterator[str]:
    """The folders of metadata of installed packages, in the order of the module path.

    ``importlib.metadata`` takes longer to import than most answers take.
    """
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.lower().endswith("-info"):
                    yield os.path.join(folder, name)


def _may_add() -> bool:
    """Whether a package may register something; if not, ``importlib.metadata`` is not needed."""
    finders = [finder for finder in sys.meta_path if finder is not importlib.machinery.PathFinder]
    if any(hasattr(finder, "find_distributions") for finder in finders) or any(map(os.path.isfile, sys.path)):
        return True  # there may be metadata elsewhere than in folders, as in a zip file
    for folder in metadata_folders():
        with contextlib.suppress(OSError), open(os.path.join(folder, "entry_points.txt"), "rb") as file:
            if ENTRY_POINTS.encode() in file.read():
                return True
    return False


@functools.cache
def added_by_packages() -> tuple[tuple[str, Any], ...]:
    """What packages register, with their names; raises :class:`UsageError` naming a wrong one."""
    if not _may_add():
        return ()
    import importlib.metadata

    added = []
    for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda entry: entry.name):
        package = entry.dist.name if entry.dist else entry.value
        # Whatever goes wrong is the package's fault: its name is in the message.
        try:
            item = entry.load()
        except Exception as error:
            raise UsageError(
                f"{package} registers {entry.name!r} with lowprec-check, but it failed to load: "
                f"{type_name(error)}: {message_of(error)}.",
                f"Upgrade or uninstall {package}.",
            ) from error
        kinds = {base.__name__ for base in type(item).__mro__}
        is_named = isinstance(getattr(item, "name", None), str)
        if isinstance(item, type) or not is_named or kinds.isdisjoint(_KINDS):
            what = f"a {type(item).__name__}"
            if isinstance(item, type):
                what = f"the class {item.__name__}"
            elif not is_named:
                what += " without a name"
            raise UsageError(
                f"{package} registers {entry.name!r} with lowprec-check, which is {what}.",
                "Register a Precision, a Backend, a Device, a ReportFormat or a WayToTrain: an object, not its class.",
            )
        added.append((package, item))
    return tuple(added)


class Registry(Generic[Item]):
    """The values of one axis as reports order them: built in, then those of other packages."""

    def __init__(
        self,
        noun: str,
        kind: type[Item],
        built_in: Iterable[Item] | Callable[[], Iterable[Item]],
        problem: Callable[[Item], str | None] = lambda _: None,
    ) -> None:
        """``noun`` names one value in messages; ``built_in`` are the values of this package, or
        loads them on first use; ``problem`` describes what is wrong with a value of another
        package.
        """
        self._noun, self._kind, self._built_in, self._problem = noun, kind, built_in, problem

    @functools.cached_property
    def _items(self) -> dict[str, Item]:
        items: dict[str, Item] = {}
        owners: dict[str, str] = {}
        for item in self._built_in() if callable(self._built_in) else self._built_in:
            items[item.name] = item
            owners |= dict.fromkeys(_spellings(item), "lowprec-check")
        for package, item in added_by_packages():
            if not isinstance(item, self._kind):
                continue
            # A name that is taken would replace a value that others rely on.
            taken = next((spelling for spelling in _spellings(item) if spelling in owners), None)
            problem = self._problem(item)
            if taken is not None:
                problem = f"the name {taken!r} belongs to {owners[taken]}"
            elif not re.fullmatch(r"[\w.+-]+", item.name):
                problem = "a name has letters, digits and . + - _ only"
            if problem is not None:
                raise UsageError(
                    f"{package} registers the {self._noun} {item.name!r} with lowprec-check, but {problem}.",
                    f"Upgrade or uninstall {package}.",
                )
            items[item.name] = item
            owners |= dict.fromkeys(_spellings(item), package)
        return items

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def names(self) -> list[str]:
        """The names, in order."""
        return list(self._items)

    def find(self, name: str) -> Item | None:
        """The value of that name or alias, in any case, with ``-`` or ``_``; or ``None``."""
        exact = self._items.get(str(name))
        if exact is not None:
            return exact
        wanted = _plain(str(name))
        return next((item for item in self if wanted in _spellings(item)), None)

    def get(self, name: str, offered: Sequence[str] | None = None) -> Item:
        """Like :meth:`find`, but raises :class:`UsageError` with a suggestion if there is none.

        ``offered``: the names to choose from, where the caller does not take all; by default all.
        """
        item = self.find(name)
        if item is not None:
            return item
        choice = self.names() if offered is None else list(offered)
        spellings = [spelling for item in self if item.name in choice for spelling in (item.name, *item.aliases)]
        near = nearest(str(name), spellings)
        meant = self.find(near) if near else None
        suggestion = ""
        if meant:
            suggestion = f"Did you mean {meant.name}? "
        raise UsageError(f"Unknown {self._noun} {str(name)!r}.", f"{suggestion}Choose from {', '.join(choice)}.")

    def names_in(self, given: object, offered: Sequence[str] | None = None) -> list[str]:
        """The names for one name or alias, or for several: in a sequence or separated by commas;
        each once, in the order given.

        Raises :class:`UsageError` with a suggestion, of those ``offered``, for an unknown one.
        """
        return list(dict.fromkeys(self.get(word, offered).name for word in words_in(given)))


def words_in(given: object) -> list[str]:
    """The words of a text separated by commas, of another value (``torch.half``), or of each value
    in a sequence.

    Nothing between two commas, or behind the last, is no word; an empty text is one, which nothing
    is called.
    """
    several = isinstance(given, Iterable) and not isinstance(given, str)
    values = list(given) if several else [given]  # type: ignore[call-overload]
    words = [word.strip() for value in values for word in str(value).split(",")]
    return [word for word in words if word] or words[:1]


def nearest(word: str, spellings: Iterable[str]) -> str | None:
    """The spelling that was probably meant, for "did you mean"; ``None`` if none is near."""
    plain, wanted = {_plain(spelling): spelling for spelling in spellings}, _plain(word)
    # What begins so is meant, however long the rest is; two letters begin too many.
    begun = [spelling for spelling in plain if len(wanted) > 2 and spelling.startswith(wanted)]
    near = begun or difflib.get_close_matches(wanted, plain, 1)
    if near:
        return plain[near[0]]
    return None


def _spellings(item: Named) -> list[str]:
    """The name and the aliases, as they are compared."""
    return [_plain(spelling) for spelling in (item.name, *item.aliases)]


def _plain(spelling: str) -> str:
    return spelling.strip().lower().replace("_", "-")


def choices(names: Sequence[str], last: str = "or") -> str:
    """``cpu, cuda, xpu or mps``."""
    *others, final = names
    if others:
        return f"{', '.join(others)} {last} {final}"
    return final
