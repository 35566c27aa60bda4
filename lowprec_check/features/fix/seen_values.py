"""What a trial of a source of the user's found: its runs, and what its expressions gave."""

from __future__ import annotations

from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.training import AmpUse


class SeenValue(Struct, frozen=True, kw_only=True):
    """What an expression gave in one run."""

    kind: Literal["tensor", "module", "number", "callable", "tuple", "other"]
    dtypes: tuple[str, ...] = ()
    """Of a tensor, ``float16``, of all calls; of a module, that of its first floating parameter."""
    name: str = ""
    """A module's first floating parameter, ``weight``; a callable's full name in its package."""
    training: bool = False
    """Whether a module is in training mode."""
    of_torch: bool = False
    """Whether the class of a module is one of torch."""
    number: float | None = None
    absmax: float | None = None
    """The largest finite magnitude of a tensor, over all calls."""
    parts: tuple[str, ...] = ()
    """The dtypes of a tuple's tensors (empty: not a tensor); the names of a module's buffers."""


Places = dict[str, dict[str, SeenValue]]
"""By file, and by the place of an expression, what it gave."""


class ScriptPlace(Struct, frozen=True):
    """A call in a training script; as in :class:`~lowprec_check.schema.op_calls.OpCall`."""

    source: str | None
    caller: str | None = None
    span: str | None = None
    file: str = ""
    """The whole path of the innermost file of the user's own."""


class ForwardPass(Struct, frozen=True):
    """What a backward pass follows from, by the calls in the function that makes both."""

    backward: ScriptPlace
    forward: tuple[ScriptPlace, ...]
    """The calls of models that the loss depends on."""


class ScriptOption(Struct, frozen=True):
    """An option of the script's command line."""

    flag: str
    is_switch: bool = False
    """Whether it is ``True`` where it is given, without a value."""
    choices: tuple[str, ...] = ()
    value: str | None = None
    """What it is in the run; ``None`` if that is no string."""


class ScriptFacts(Struct, frozen=True, kw_only=True):
    """What the steps of a training script did, and how far they led from those in fp32."""

    steps: int
    """That each optimizer was asked for."""
    skipped: int = 0
    """Those that a ``GradScaler`` skipped."""
    optimizers: int = 1
    device: str = "cpu"
    """The kind of device that has the weights."""
    autocast: tuple[str, ...] = ()
    """The dtypes of autocast, ``float16``."""
    low_weights: tuple[str, ...] = ()
    """The dtypes of weights that are in 16 bits."""
    zero_eps: bool = False
    """Whether the ``eps`` of an optimizer is zero in the dtype of its weights."""
    scale: float | None = None
    """Of the ``GradScaler`` in the end; ``None`` without one."""
    runs_again: bool = False
    """Whether it was run again, as forks of its process could not be used."""
    disabled_scaler: bool = False
    """Whether it makes a ``GradScaler`` with ``enabled=False``."""
    passes: tuple[ForwardPass, ...] = ()
    """Its backward passes."""
    events: tuple[ScriptPlace, ...] = ()
    """All calls in its own files that lead to a backward pass, a step, or clipping."""
    weight_casts: tuple[ScriptPlace, ...] = ()
    """Calls that cast weights to fp16."""
    scalers: tuple[ScriptPlace, ...] = ()
    """Where it makes a ``GradScaler``."""
    options: tuple[ScriptOption, ...] = ()
    """Options of its command line that are named as those for low precision are."""
    moved: float | None = None
    """How far its weights moved, in units of how far those in fp32 did; ``None`` if not finite."""
    losses: tuple[float, ...] = ()
    """Of its backward passes, without a scale."""
    fp32_losses: tuple[float, ...] = ()
    """The same in fp32."""
    losses_apart: float | None = None
    """How far its losses are from those in fp32, in units of these; ``None`` if not finite."""
    spread: float = 0.0
    """The distance of the weights in fp32 if the first weights have noise."""
    losses_spread: float = 0.0
    """The same of the losses."""
    problem: str = ""
    """Why its steps cannot be compared with those in fp32."""
    framework: str = ""
    """What calls ``backward()``; empty if the script does."""
    backward: tuple[ScriptPlace, ...] = ()
    """Calls of ``backward()`` of a loss that is not scaled."""
    scaled_backward: tuple[ScriptPlace, ...] = ()
    made_steps: tuple[ScriptPlace, ...] = ()
    """Calls of ``step()`` of an optimizer."""
    step_callers: tuple[ScriptPlace, ...] = ()
    """The calls, in the user's own files, that the functions with these run in."""
    scaled_steps: tuple[ScriptPlace, ...] = ()
    """Calls of ``step()`` of a ``GradScaler``."""
    scales: tuple[ScriptPlace, ...] = ()
    """Calls that scale a loss."""
    updates: tuple[ScriptPlace, ...] = ()
    """Calls that update a ``GradScaler``."""
    clips: tuple[ScriptPlace, ...] = ()
    """Calls that clip gradients."""
    scaled_clips: tuple[ScriptPlace, ...] = ()
    """Those that clip gradients that are scaled."""
    around_steps: tuple[ScriptPlace, ...] = ()
    """Where autocast is entered that keeps casts of weights over more than one step."""
    amp: tuple[AmpUse, ...] = ()
    """What it does wrong with autocast and ``GradScaler``."""
    failure: str = ""
    """What it raises as it is; empty if it makes its steps."""
    distance: float | None = None
    """Distance of the final weights from fp32's, relative to their movement, if finite."""
    fp32: str = ""
    """A digest of the weights after the steps in fp32, bit for bit; empty if two runs differ."""

    @property
    def is_in_fp32(self) -> bool:
        """Whether the script enters no autocast, scales no loss and has no weights in 16 bits."""
        return not (self.autocast or self.low_weights or self.amp or self.scalers)


class SourceTrial(Struct, frozen=True, kw_only=True):
    """What a trial found."""

    runs: list[Run] = []
    """Those of each precision; analyzed op by op if that was asked for, and they fail."""
    broken: list[str] = []
    """Those of ``runs`` that passed without the changes, and fail with them."""
    outputs: str = ""
    """A digest of the outputs in fp32, bit for bit; empty if two calls differ."""
    gradients: str = ""
    """The same of the gradients; empty if there are none."""
    seen: dict[str, Places] = {}
    """What expressions gave, by precision."""
    buffers: dict[str, list[str]] = {}
    """The buffers with values that a cast rounds, by the class that has them."""
    packages: list[str] = []
    """The modules that are not the user's own, imported until the model has run."""
    script: ScriptFacts | None = None
    """The steps of a training script, if they were tried."""
