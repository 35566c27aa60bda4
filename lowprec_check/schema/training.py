"""What ``scan --train`` saves: how the model is trained, and what each precision does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.verdict import ExceptionInfo, Status
from lowprec_check.schema.ways_to_train import WayToTrain, way_named

Values = Literal["weight", "buffer", "optimizer state", "average"]
"""What an update changes: a parameter, buffer, state of the optimizer, or average of weights."""


NOISE_ALONE = "1 % noise on the initial weights"
"""What differs between runs from other seeds where all else is fixed."""

STALLED = 0.5
"""Weights that move less than this part of fp32's way do not train as fp32 does."""

BEYOND = 2.0
"""Times another seed's largest distance to fp32 that the weights of a run may be off."""


class TrainingPhase(Struct, frozen=True, kw_only=True):
    """A part of a step with several optimizers: clear gradients, backward, optimizer steps."""

    clears: list[int] = []
    """Numbers of the optimizers whose gradients are cleared, counted from 0."""
    steps: list[int] = []
    """Numbers of the optimizers that make their step."""
    calls: list[str] = []
    """The call that makes each step, as code, if that is more than ``.step()`` of an optimizer."""
    is_inside: bool = False
    """Whether the step computes the loss itself, by a closure."""


class WeightCast(Struct, frozen=True, kw_only=True):
    """A cast of a script's weights to 16 bits, which the scan takes back."""

    line: str
    """Where the script casts them; empty if they are made so."""
    call: str
    """``to``, ``half`` or ``bfloat16``; empty without a line."""
    dtype: str
    """Their dtype: ``bfloat16``."""

    @property
    def code(self) -> str:
        """The call, as it is written."""
        return f".to(torch.{self.dtype})" if self.call == "to" else f".{self.call}()"


class TrainingSetup(Struct, frozen=True, kw_only=True):
    """How the model is trained, in every precision, and how far other seeds differ."""

    steps: int
    """Steps of each run: forward, loss, backward, optimizer."""
    loss: str
    """The loss, in words or as code."""
    optimizer: str
    """The optimizer, as code: ``AdamW(lr=0.001, weight_decay=0.01)``."""
    default_loss: bool = False
    """Whether the file defines no loss, so that a default is used."""
    default_optimizer: bool = False
    """Whether the file defines no optimizer, so that a default is used."""
    # The step as code, for reports.
    loss_setup: list[str] = []
    """Lines of code before the first step, which define what ``loss_code`` and ``optimizer_code``
    need; if they set ``targets``, a tuple with the rest of the batch, these are cast and moved like
    the inputs.
    """
    loss_code: str = ""
    """The loss as an expression of ``output``, ``inputs``, ``targets``: ``loss(output)``."""
    optimizer_code: str = ""
    """The optimizer as an expression of the list ``parameters``: ``SGD(parameters, lr=0.1)``."""
    # Of a script that trains itself.
    script: str = ""
    """The line of a script that calls the model, if the step is the script's, or empty."""
    framework: str = ""
    """What trains: ``lightning``, ``transformers`` or ``accelerate``; empty for a plain loop."""
    clip_code: list[str] = []
    """Calls that clip ``parameters``' gradients before each step of the (first) optimizer."""
    optimizers: list[str] = []
    """The lines that make the optimizers of a script with several; empty for one."""
    clips: list[list[str]] = []
    """Of several optimizers, the calls that clip the gradients of ``parameters`` of each."""
    phases: list[TrainingPhase] = []
    """The parts of a step with several optimizers, or several backward passes."""
    amp: list[AmpUse] = []
    """What the script does wrong with autocast and ``GradScaler``."""
    cast: WeightCast | None = None
    """How the script casts its weights, which start in fp32 in the scan."""
    average_code: str = ""
    """The average of the weights as an expression of ``model``; empty if the file defines none."""
    # The batches, and how repeatable the steps are.
    new_batches: bool = False
    """Whether steps get different batches; otherwise all steps use the same one."""
    batches: int = 0
    """The number of batches if there are fewer than steps, which use them in turn; else 0."""
    repeatable: bool = True
    """Whether the first step of fp32, made again, gave the same bits."""
    seeds: int = 0
    """fp32 runs from other seeds."""
    varied: list[str] = []
    """What differs between fp32 and the runs from other seeds: ``initial weights``; ``batches``,
    ``order of the batches`` or ``rows of the batch`` (drawn with replacement); ``random draws``;
    ``1 % noise on the initial weights`` if all else is fixed. Empty in a file of a version that
    added such noise to all.
    """
    # The runs in fp32, which say how far a run in low precision may be off.
    losses: list[float] = []
    """The loss of fp32 before each step, and after the last that of the first batch."""
    loss_low: list[float] = []
    """The lower end of the loss of the other seeds, after each step."""
    loss_high: list[float] = []
    """Between these lies the loss of the other seeds, less fp32's before the first step."""
    limit_low: list[float] = []
    """The lower limit of the loss of a run in low precision, after each step."""
    limit_high: list[float] = []
    """Outside these, the loss diverges if the forward pass computes fp32's loss; else later."""
    distances: list[float] = []
    """Per step, other seeds' largest ‖Δw − Δw₃₂‖ / ‖Δw₃₂‖; Δw is how far weights moved."""

    @property
    def loss_tells(self) -> bool:
        """Whether a loss that does not change in all steps is outside the limits."""
        return bool(self.limit_low and self.limit_high) and not self.limit_low[-1] <= 0.0 <= self.limit_high[-1]

    @property
    def is_varied(self) -> bool:
        """Whether more than random draws and noise differs in the runs from other seeds."""
        return any(what not in (NOISE_ALONE, "random draws") for what in self.varied)


class Divergence(Struct, frozen=True, kw_only=True):
    """Where a run leaves the range of the fp32 runs for good."""

    step: int
    """The first step after which it is outside, from 1; 0 if its loss is wrong before any."""
    what: Literal["loss", "weights", "progress"]
    """What leaves the range first."""
    value: float
    """The change of the loss, the distance of the weights to fp32, or ‖Δw‖ / ‖Δw₃₂‖."""
    limit: float
    """The limit that it crosses."""
    parameter: str | None = None
    """The parameter that adds most to the distance after this step, or that stands still."""
    stands_still: bool = False
    """Whether the progress is that of the parameter alone, which hardly moves."""


class TrainingWay(Struct, frozen=True, kw_only=True):
    """One way to train in a precision, run for all steps without instruments."""

    name: str
    """A name in :data:`WAYS`."""
    status: Status
    """How it ended."""
    exception: ExceptionInfo | None = None
    """What it raised; ``None`` if it did not."""
    failed_step: int | None = None
    """The step in which it failed or first gave a loss that is not finite, counted from 1."""
    # How far it gets from the training in fp32.
    losses: list[float | None] = []
    """The loss before each step, and after the last on the first batch; ``None``: not finite."""
    distances: list[float] = []
    """After each step, how far the weights are from those of fp32: ‖Δw − Δw₃₂‖ / ‖Δw₃₂‖."""
    progress: float | None = None
    """After the last step: Δw · Δw₃₂ / ‖Δw₃₂‖², how far the weights have moved fp32's way."""
    moved: float | None = None
    """After the last step: ‖Δw‖ / ‖Δw₃₂‖, how far the weights have moved in any direction, relative
    to fp32; that of one parameter, if it moves notably in fp32 (a tenth of the squared way) and
    stands still here (less than a tenth as far).
    """
    divergence: Divergence | None = None
    """Where it leaves the range of the fp32 runs for good; ``None`` if it does not."""
    # What rounding does to updates and gradients.
    lost_updates: float | None = None
    """Share (0 to 1) of the updates of weights that are lost to rounding, over all steps; ``None``
    if none was counted: the weights are in fp32, or NaN or Inf after the first step. Those of fp32
    are counted in its own run, if 1 % of a sample is lost.
    """
    underflow: dict[str, float] | None = None
    """With a loss scale: by parameter, the share (0 to 1) of the elements of its gradient that are
    zero and not zero in fp32, in the first step that was not skipped; without those that lose none.
    ``None`` if gradients were not compared.
    """
    # Memory, and the loss scale.
    peak_memory_bytes: int | None = None
    """Peak bytes of a step, if the first way fails and this one passes."""
    skipped_steps: int = 0
    """Steps that ``GradScaler`` skipped, because gradients overflowed."""
    scales: list[float] = []
    """The loss scale of ``GradScaler`` in each step that it did not skip; empty without one."""
    initial_scale: float | None = None
    """The loss scale of a ``GradScaler`` before the first step; ``None`` without one."""
    final_scale: float | None = None
    """Loss scales of a ``GradScaler``."""
    state_bytes: int | None = None
    """Bytes of the weights, their copies and the state of the optimizer, after the last step."""

    @property
    def declared(self) -> WayToTrain:
        """What is known of a way of this name."""
        return way_named(self.name)


class ParameterGradient(Struct, frozen=True, kw_only=True):
    """A parameter's gradient in the first step, compared with fp32's, without loss scaling."""

    parameter: str
    """The name of the parameter."""
    elements: int
    """Number of its elements."""
    error: float | None = None
    """rel_l2; ``None`` if it is not finite, or there is none."""
    error_share: float | None = None
    """Share (0 to 1) of the squared error of all gradients together."""
    absmax: float | None = None
    """The largest magnitude in fp32."""
    underflow: float = 0.0
    """Share (0 to 1) of the elements that are not zero in fp32 and zero here."""
    overflow: float = 0.0
    """Share of the elements that are finite in fp32 and not here."""
    is_rounding: bool = False
    """Whether it is zero but for rounding in fp32, as of a bias before a batch norm."""


class LostUpdates(Struct, frozen=True, kw_only=True):
    """How much of the updates of one tensor rounding loses.

    An update is lost if the value stays the same where the same update on an fp32 copy changes it.
    """

    name: str
    """The parameter, buffer, or parameter and key of the state: ``fc.weight · exp_avg_sq``."""
    values: Values
    """What is updated."""
    elements: int
    """Number of elements of the tensor."""
    lost: float
    """Share (0 to 1) of the updates that are lost, over all steps."""
    updates: int = 0
    """How many updates of single elements that is a share of; 0 in older files."""
    group: int | None = None
    """The parameter group of the optimizer, for a weight."""
    decay_lost: float | None = None
    """The same share for weight decay alone; ``None`` if it does not move the fp32 copy."""


def lost_of(tensors: Sequence[LostUpdates]) -> float | None:
    """The share of the updates of all ``tensors`` that is lost; ``None`` if there are none."""
    return _together([(tensor.lost, tensor.updates or tensor.elements) for tensor in tensors])


def decay_lost_of(tensors: Sequence[LostUpdates]) -> float | None:
    """The same for weight decay alone, once per element; ``None`` if it changes none."""
    decayed = [tensor for tensor in tensors if tensor.decay_lost is not None]
    return _together([(tensor.decay_lost, tensor.elements) for tensor in decayed])


def _together(shares: Sequence[tuple[float | None, int]]) -> float | None:
    total = sum(count for _, count in shares)
    if total:
        return sum((share or 0.0) * count for share, count in shares) / total
    return None


class LossScale(Struct, frozen=True, kw_only=True):
    """A suggested initial loss scale, which was tried."""

    scale: float
    """The scale, a power of two."""
    largest: float
    """The largest 16-bit gradient in the backward pass of the first step, without scaling."""
    largest_at: str | None = None
    """The module whose op gets it."""
    underflow_unscaled: float
    """Share of the gradient's elements (of all parameters) that underflow without scaling."""
    underflow: float | None = None
    """The same with this scale, measured."""
    skipped_steps: int | None = None
    """Steps that were skipped with this scale."""


class EpsilonCheck(Struct, frozen=True, kw_only=True):
    """What zero gradients do to weights in low precision, by optimizer implementation."""

    implementation: Literal["as given", "loop", "foreach", "fused"]
    """The implementation of the optimizer; ``as given`` is the one that the file chose."""
    nonfinite: float
    """Share of the weights that are NaN or Inf after it."""
    error: str | None = None
    """Why it could not be run."""


class TrainingRun(Struct, frozen=True, kw_only=True):
    """What training in one precision does."""

    ways: list[TrainingWay]
    """The first is what its user would write; the status of the run is that of this way."""
    gradients: list[ParameterGradient] = []
    """The gradients of the first step, by parameter."""
    gradient_error: float | None = None
    """rel_l2 of all gradients of the first step together."""
    underflow: float | None = None
    """Share of all elements of gradients that underflow in the first step, without loss scaling."""
    same_draws: bool = False
    """Whether fp32's gradients and output of the first step have this precision's draws."""
    lost_updates: list[LostUpdates] = []
    """Of the first way; empty if everything is in fp32."""
    loss_scale: LossScale | None = None
    """A loss scale to start with; ``None`` if none is suggested."""
    untried: dict[str, str] = {}
    """By the name of a way to train that was not tried in this precision: why."""
    epsilon: list[EpsilonCheck] = []
    """For weights in fp16, if the optimizer has an ``eps``."""

    def way(self, name: str) -> TrainingWay | None:
        """The way of that name, if it was run."""
        return next((way for way in self.ways if way.name == name), None)


# -- What a script does wrong with autocast and ``GradScaler``

AmpFault = Literal[
    "unscaled-twice",
    "unscaled-fp16",
    "no-update",
    "no-inf-checks",
    "never-scaled",
    "scaled-step",
    "scaled-clip",
    "no-kernel",
    "refused-loss",
    "scaler-for-bf16",
    "backward-in-autocast",
]
"""What is wrong. The last two cost something, and break nothing."""


class AmpUse(Struct, frozen=True, kw_only=True):
    """One fault, at one line."""

    fault: AmpFault
    """What is wrong."""
    source: str | None
    """The line, ``train.py:12``."""
    caller: str | None = None
    """The innermost line of the user's own, if ``source`` is in a package."""
    span: str | None = None
    """Where the expression starts and ends."""
    op: str = ""
    """The function that is called there: ``unscale_``."""
    earlier: str | None = None
    """The line of the earlier call that it does not go with."""
    names: tuple[str, ...] = ()
    """Parameters, or devices, that it is about."""
    scale: float | None = None
    """The scale that the ``GradScaler`` starts with."""
    elsewhere: str = ""
    """The device of the ``GradScaler``, if torch disables it on the machine of the scan."""
    raises: str = ""
    """What torch raises there, ``RuntimeError: …``; empty if the script goes on."""

    @property
    def line(self) -> str:
        """The user's line."""
        return self.caller or self.source or ""

    @property
    def is_harmless(self) -> bool:
        """Whether the script trains all the same."""
        return self.fault in ("scaler-for-bf16", "backward-in-autocast")

    @property
    def words(self) -> str:
        """What is wrong, in words."""
        names = ", ".join(self.names)
        scaled = f"are still scaled, {self.scale or 0:g} times as large as the true ones"
        words = {
            "unscaled-twice": "scaler.unscale_() is called twice for one update of the scaler",
            "unscaled-fp16": f"gradients of {names or 'some parameters'} are in fp16, as these parameters are",
            "no-update": f"scaler.{self.op}() is called again without scaler.update() since the step",
            "no-inf-checks": "scaler.update() is called without scaler.step() since the last update",
            "never-scaled": f"scaler.{self.op}() is called, and no loss was scaled",
            "scaled-step": f"the optimizer makes its step with gradients that {scaled}",
            "scaled-clip": f"gradients are clipped that {scaled}",
            "no-kernel": f"{self.op} has no kernel for what it gets in 16 bits",
            "refused-loss": f"autocast refuses {self.op} on {names}",
            "scaler-for-bf16": "a GradScaler scales the loss of bf16, which has the range of fp32",
            "backward-in-autocast": "backward() is called inside autocast, which is for the forward pass and the loss",
        }[self.fault]
        if self.earlier is not None and self.earlier != self.line:
            words = f"{words} at {self.earlier}" if self.fault == "no-update" else f"{words}, first at {self.earlier}"
        return words

    @property
    def told(self) -> str:
        """The same, and what torch raises."""
        where = f" (on {self.elsewhere})" if self.elsewhere else ""
        return f"{self.words}: {self.raises.rstrip('.')}{where}" if self.raises else self.words

    @property
    def repair(self) -> str:
        """What to do about it."""
        return {
            "unscaled-twice": "call scaler.unscale_(optimizer) once per update, when its gradients are complete: "
            "right before they are clipped and scaler.step(optimizer) is called",
            "unscaled-fp16": "keep these parameters in fp32: autocast casts what ops need",
            "no-update": "call scaler.update() once after the steps of all optimizers",
            "no-inf-checks": "call scaler.update() only after scaler.step(optimizer)",
            "never-scaled": "call scaler.scale(loss).backward()",
            "scaled-step": "call scaler.step(optimizer) in place of optimizer.step(), then scaler.update()",
            "scaled-clip": "call scaler.unscale_(optimizer) before",
            "no-kernel": f"give {self.op} fp32 values: x.float()",
            "refused-loss": "use binary_cross_entropy_with_logits on the logits",
            "scaler-for-bf16": "leave the GradScaler out",
            "backward-in-autocast": "end the block of autocast before it",
        }[self.fault]


def all_told(uses: Iterable[AmpUse]) -> str:
    """All that is not harmless, with repairs, or empty."""
    return " ".join(f"At {use.line}, {use.told}; {use.repair}." for use in uses if not use.is_harmless)
