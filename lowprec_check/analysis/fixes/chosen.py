"""What a search has chosen: at each place, the changes that could be made, and which of them is tried."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass

from lowprec_check.analysis.fixes.scene import Site, SourceFix


@dataclass
class Chosen:
    """What could be changed at one place, and which of it is tried."""

    site: Site
    options: list[SourceFix]
    option: int = 0
    round: int = 0
    """Of the search, in which it was added."""
    raises: bool = False
    """Whether the line raises an exception without it, given the changes of earlier rounds."""

    @property
    def fix(self) -> SourceFix:
        """The change that is tried."""
        return self.options[self.option]


State = dict[ast.AST, Chosen]


def next_option(places: Iterable[Chosen]) -> bool:
    """Take the next option of each of these places that has another one; whether any has."""
    others = [chosen for chosen in places if chosen.option + 1 < len(chosen.options)]
    for chosen in others:
        chosen.option += 1
    return bool(others)


def compute_instead(state: State) -> bool:
    """Compute in fp32 where a number was changed, which may be what fails now; whether there is such a place."""
    return next_option(chosen for chosen in state.values() if chosen.fix.kind in ("constant", "scale"))
