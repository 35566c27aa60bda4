"""The model that was scanned, and where its weights come from."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.measures import InputLayout

WeightsOrigin = Literal["unknown", "random", "scaled", "loaded"]
"""``scaled``: random, then scaled since the output vanished; ``unknown``: the user's file."""

STREAMED = (
    "weights are read from their files when a module uses them (--stream): no times, memory and further inputs; "
    "shares of the output error with --budget-error on"
)
"""The note of a model whose weights stay in their files."""
IN_TRAINING_MODE = "the model is in training mode: call model.eval() in your file, or scan training with --train"
"""A note on a model whose forward pass alone is scanned."""
ZERO_OUTPUT = "the fp32 output is all zeros (a zero-initialized head?)"
"""A note on a model whose output tells nothing."""
PART_FAILED = " failed: "
"""Between what of a run failed, as the user's metric, and why, in a note."""


def is_decisive(note: str) -> bool:
    """Whether a verdict is misread without this note; others are details."""
    return note in (IN_TRAINING_MODE, ZERO_OUTPUT) or PART_FAILED in note


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The scanned model, for the head of a report."""

    name: str
    """The class of the model."""
    parameters: int
    """Number of elements of all parameters."""
    kind: Literal["module", "script", "function"] = "module"
    """A Python module, a ScriptModule, or a function, which has nothing to cast or move."""
    inputs: list[str]
    """The inputs, in words: shapes, and dtypes that are not floating."""
    modules: int
    """Number of modules, the model included."""
    training: bool
    """Whether it is in training mode."""
    weights: WeightsOrigin = "unknown"
    """Where the values of the weights come from."""
    call: str = "model(*inputs)"
    """How the model is called, as code."""
    calibration: str = ""
    """The file's calibration batches, as code; empty if the inputs calibrate."""
    setup: list[str] = []
    """Code that makes ``model`` and ``inputs`` from the file's definitions."""
    names: dict[str, str] = {}
    """By ``model`` and ``inputs``, the expressions for them in the script that calls the model; by
    ``torch``, if code that belongs there need not import it.
    """
    castable: bool = True
    """Whether ``tree_map`` reaches every tensor of the inputs."""
    layout: InputLayout = InputLayout(kind="nested")
    """The tensors in the inputs."""
    taken: str = ""
    """What of the file was scanned, and why: ``model of mymodel.py``; empty without a file."""
    source: str | None = None
    """The line that makes the model, or defines its class: ``file.py:line``."""
    caller: str | None = None
    """The user's line that makes or scans the model, if ``source`` is not theirs; or empty."""
    notes: list[str] = []
    """What to know of the model and its inputs, in words."""

    @property
    def arguments(self) -> tuple[str, str]:
        """The positional and the keyword arguments of :attr:`call`, as code."""
        if self.call == "model(**inputs)":
            return "()", "dict(inputs)"
        return "(inputs,)" if self.call == "model(inputs)" else "tuple(inputs)", "{}"
