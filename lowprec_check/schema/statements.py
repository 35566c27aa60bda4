"""What a result means, as typed statements: made by :mod:`lowprec_check.analysis.statements` from the saved result alone."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.wording import Figure, Sentence

Evidence = Literal["measured", "derived", "predicted", "declared"]
"""``measured``: by running it; ``derived``: computed from what was measured, such as a share of an error; ``predicted``: emulated, for a
device that is not here; ``declared``: by the user, by an option, or by the sources of torch."""

Tone = Literal["good", "warn", "bad", "none"]
"""What a statement means to its reader: the colour and the sign of a report."""

About = Literal[
    "advice",
    "margin",
    "runs",
    "error",
    "training",
    "inputs",
    "weights",
    "times",
    "analysis",
    "not run",
    "prediction",
]
"""The part of a report that it belongs to."""


class Statement(Struct, frozen=True, kw_only=True):
    """One sentence about one or more runs, or about the whole scan."""

    kind: str
    """What it says: a name in docs/json.md, ``ablation``."""
    about: About
    """The part of a report that it belongs to."""
    runs: list[str] = []
    """Labels of the runs that it is true of, each; empty for the whole scan."""
    figures: list[dict[str, Figure]] = []
    """Its figures for each of ``runs``, in their order, or once for the whole scan."""
    template: str
    """Its words, with ``{name:type}`` in place of the figures."""
    text: str
    """The sentence. Figures that differ between ``runs`` are a range."""
    tone: Tone = "none"
    """What it means to its reader."""
    evidence: Evidence = "measured"
    """What it rests on."""
    disproof: str = ""
    """What would disprove it."""

    def text_of(self, run: str) -> str:
        """The sentence with the figures of one of its ``runs`` alone, by its label."""
        return Sentence(template=self.template, figures=self.figures[self.runs.index(run)]).text
