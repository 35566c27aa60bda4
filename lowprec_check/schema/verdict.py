"""How a run ended: its status, its error and its exception."""

from __future__ import annotations

from typing import Literal, NamedTuple

from lowprec_check.schema.base import Struct
from lowprec_check.schema.run_key import Phase

Status = Literal["ok", "unjudged", "inaccurate", "nonfinite", "error", "crashed", "timeout", "skipped"]
"""``unjudged``: it ran, but its output holds nothing that can be compared with fp32's."""


class StatusLook(NamedTuple):
    """How every report shows a status."""

    word: str
    sign: str
    """One character that every font has."""
    emoji: str
    tone: Literal["good", "bad", "none"]
    """Its colour."""
    rank: int
    """From good to bad."""
    meaning: str
    """What the word means, in a sentence."""


LOOKS: dict[str, StatusLook] = {
    "reference": StatusLook("reference", "", "", "none", 0, "The fp32 run that all others are compared with."),
    "ok": StatusLook("ok", "✓", "✅", "good", 0, "It runs, and its output is within the tolerance."),
    "unjudged": StatusLook(
        "cannot be judged",
        "?",
        "❔",
        "none",
        1,
        "It runs, but its output holds nothing that can be compared with fp32.",
    ),
    "inaccurate": StatusLook(
        "inaccurate", "✕", "❌", "bad", 2, "It runs, but the error of its output exceeds the tolerance."
    ),
    "nonfinite": StatusLook(
        "NaN or Inf", "✕", "❌", "bad", 3, "Its output has NaN or Inf where that of fp32 is finite."
    ),
    "error": StatusLook("fails", "✕", "❌", "bad", 4, "It raises an exception."),
    "timeout": StatusLook("timed out", "✕", "❌", "bad", 5, "It exceeded its budget of seconds."),
    "crashed": StatusLook("crashed", "✕", "❌", "bad", 5, "Its process died."),
    "skipped": StatusLook("skipped", "–", "➖", "none", 6, "It was not run."),
}
"""By status; the one place that gives a status a word, a sign, a colour and a rank."""


def look(status: str) -> StatusLook:
    """How ``status`` is shown; one that this version does not know, by its name."""
    return LOOKS.get(status) or StatusLook(status, "?", "❔", "none", 1, "")


class Meaning(Struct, frozen=True, kw_only=True):
    """What a measure says of an output, compared with that of fp32."""

    measure: str
    """Its name: ``boxes``."""
    figures: dict[str, float]
    """Its figures by name: shares from 0 to 1, differences and divergences in their own units."""
    decides: bool = False
    """Whether the status rests on it; else on rel_l2."""
    cannot_tell: str = ""
    """Why its figures mean nothing here; empty if they do."""
    why: str = ""
    """What it was chosen by: the class of the output, ``--judge``."""
    text: str = ""
    """The figures in words."""
    shown: str = ""
    """The figure that decides: ``tokens 99.2 %``, ``boxes iou 93 %``."""
    examples: list[str] = []
    """What differs, at most three."""
    loss: float = 0.0
    """1 minus the share that is equal, or the difference, of the figure that decides."""
    limit: float = 0.0
    """The largest ``loss`` that passes."""
    used: float = 0.0
    """``loss`` / ``limit``, at most 1e9."""
    tolerance: float | None = None
    """That of relative errors, which the limit replaces if the measure decides."""


class ErrorStats(Struct, frozen=True, kw_only=True):
    """How far an output is from its reference, the worst over its floating leaves."""

    rel_l2: float | None
    """‖y − r‖₂ / ‖r‖₂; 0/0 is 0; ``None`` if it is infinite or NaN."""
    max_abs: float | None
    """The largest absolute difference; ``None`` if it is infinite or NaN."""
    cosine: float | None
    """Cosine similarity with the reference; ``None`` if it is not defined."""
    sqnr_db: float | None
    """Signal-to-quantization-noise ratio, −20·log₁₀(rel_l2), in dB; ``None`` if the error is 0."""
    top1: float | None = None
    """Share of rows whose argmax agrees, for outputs shaped like a classifier's (N × classes)."""
    mismatched: float | None = None
    """Share of the integers and booleans that differ, at most over leaves; ``None`` if none."""
    meaning: Meaning | None = None
    """What the output means, compared with fp32's, if a measure fits it."""
    beside: list[Meaning] = []
    """What other measures say of its other tensors."""

    @property
    def by_meaning(self) -> Meaning | None:
        """The measure that decides, if one does."""
        return self.meaning if self.meaning is not None and self.meaning.decides else None

    @property
    def shown(self) -> str:
        """The figure of the measure that decides; empty if none does."""
        return self.by_meaning.shown if self.by_meaning is not None else ""

    @property
    def distance(self) -> float | None:
        """What the tolerance limits: the loss of meaning, ``rel_l2``, or ``mismatched``."""
        if self.by_meaning is not None:
            return self.by_meaning.loss
        return self.mismatched if self.rel_l2 is None and self.max_abs is None else self.rel_l2


class ExceptionInfo(Struct, frozen=True, kw_only=True):
    """The exception that the plain run raises, as the user would see it."""

    type: str
    """The class of the exception."""
    message: str
    """The first line of its text."""
    module: str | None = None
    """Dotted path of the innermost module on the traceback; ``None`` if there is none."""
    source: str | None = None
    """``file.py:line`` of the innermost code that is not torch's."""
    caller: str | None = None
    """The user's innermost line, if ``source`` is in an installed package; empty if none."""
    phase: Phase | None = None
    """The part of a training step that raised it; ``None`` if only the forward pass was run."""
    hint: str | None = None
    """What to do, if a way to run the model raised it that knows."""

    @property
    def text(self) -> str:
        """``KeyError: 'scale'``; ``AssertionError (no message)`` without a message."""
        if self.message.strip():
            return f"{self.type}: {self.message}"
        return f"{self.type} (no message)"
