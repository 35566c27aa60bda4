"""Which parts of a scan go together: each mode with every backend and every option that adds to a scan.

The answers are those of the modes and options themselves. ``tests/project/test_combinations.py`` makes a scan for each.
"""

from __future__ import annotations

from typing import Any

from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.core.mode import Mode, only_mode
from lowprec_check.errors import UsageError
from lowprec_check.features.prediction.run import StandIn
from lowprec_check.features.streaming.run import Streaming
from lowprec_check.features.training.run import Training
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.run_key import EAGER

TORCH = "2.11"
"""The release of torch that is predicted, which the catalog covers."""
DEVICE = "cuda"
"""The device that is predicted."""
RUNS, IGNORED = "✓", "no effect"
MODES: dict[str, dict[str, Any]] = {
    "inference": {},
    "training": {"train": True},
    "prediction": {"device": DEVICE, "torch_version": TORCH, "predict": True},
    "streamed weights": {"stream": True},
}
"""Options that ask for each mode; ``stream`` is one of loading a file."""
ADDED: dict[str, dict[str, Any]] = {
    **{f"`--backend {name}`": {"backends": name} for name in BACKENDS.names() if name != EAGER},
    "`--batches`": {"batches": 2},
    "`--further-inputs`": {"further_inputs": 2},
    "`--memory-format`": {"memory_formats": "channels_last"},
    "`--scenario`": {"scenario": "offline"},
    "`--plan`": {"plan": True},
    **{f"with {name}": asked for name, asked in MODES.items() if asked},
}
"""What is added to a mode."""


def answer(mode: str, added: str) -> str:
    """What a scan says to a mode with something added: :data:`RUNS`, or why not."""
    asked = MODES[mode] | ADDED[added]
    modes: list[Mode] = []
    try:
        options = ScanOptions(**{name: value for name, value in asked.items() if name != "stream"})
        if options.predict:
            modes.append(StandIn(predicted_device(DEVICE, TORCH, TORCH)))
        if "stream" in asked:
            modes.append(Streaming(many=False))
        if options.train:
            modes.append(Training(options.training_steps))
        chosen = only_mode(modes, options)
    except UsageError as refused:
        return refused.message
    reasons = [chosen.refuses_backend(name) for name in options.names_of("backends")]
    reasons += [f"{IGNORED}: {chosen.ignored[name]}" for name in ADDED[added] if name in chosen.ignored]
    return next(filter(None, reasons), RUNS)


def pairs() -> list[tuple[str, str]]:
    """Each mode with each thing that is not the mode itself."""
    return [(mode, added) for mode in MODES for added in ADDED if added != f"with {mode}"]


def table() -> str:
    """Markdown: a column for each mode, a row for what has the same answers, and what each refusal says."""
    sentences: dict[str, int] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for added in ADDED:
        cells = []
        for mode in MODES:
            said = answer(mode, added) if (mode, added) in pairs() else "–"
            if said not in (RUNS, "–"):
                said = f"({sentences.setdefault(said, len(sentences) + 1)})"
            cells.append(said)
        rows.setdefault(tuple(cells), []).append(added)
    lines = [f"| | {' | '.join(MODES)} |", f"|---{'|---' * len(MODES)}|"]
    for cells, labels in rows.items():
        label = ", ".join(labels)
        if len(labels) > 1 and all(name.startswith("`--backend") for name in labels):
            label = "any other `--backend`"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    notes = [f"{number}. {sentence}" for sentence, number in sentences.items()]
    return "\n".join([*lines, "", *notes, ""])
