"""Follows what a script does with autocast and ``GradScaler``, which do nothing meanwhile.

``GradScaler`` checks the order of its calls. These checks are made here too, so that a script that
it would stop is observed to its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowprec_check.engine.model.call_recorder import Node, computed_in_fp32
from lowprec_check.errors import message_of
from lowprec_check.schema.training import AmpFault, AmpUse
from lowprec_check.torchkit.autograd import nodes_of
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.source_location import own_line, source_lines

_REFUSING = ("cuda", "xpu")
"""Devices on which autocast raises an exception in ``binary_cross_entropy``."""

_NAMED = 8
"""Parameters that are named."""


@dataclasses.dataclass
class _Scaler:
    """A ``GradScaler`` that the script enables, and what it was asked for since its last update."""

    scale: float
    elsewhere: str
    """Its device, if that is not here."""
    has_scaled: bool = False
    stages: dict[int, tuple[Literal["unscaled", "stepped"], str | None]] = dataclasses.field(default_factory=dict)
    """What was done for an optimizer, by its id, and at which line."""
    has_checks: bool = False
    """Whether it has looked at gradients."""
    is_passed_over: bool = False
    """Whether an optimizer made its step without it."""


class _Autocast(NamedTuple):
    """A block of autocast that is open."""

    context: int  # its id
    device: str
    dtype: torch.dtype
    is_enabled: bool


class AmpCalls:
    """What a script does with both; ``is_inside`` models, autocast is left alone.

    With ``keeps_autocast`` it is left alone everywhere: the script may look at dtypes.
    """

    def __init__(self, is_inside: Callable[[], bool] = lambda: False, *, keeps_autocast: bool = False) -> None:
        self._is_inside, self._keeps_autocast = is_inside, keeps_autocast
        self._in_step = False  # of a `GradScaler`
        self._scalers: dict[Any, _Scaler] = {}
        self._is_own = False  # whether autocast is entered here
        self._blocks: list[_Autocast] = []
        self._losses: dict[int, tuple[Tensor, Tensor, Any]] = {}  # scaled, as it was, and by which scaler
        self._scaled: dict[int, Any] = {}  # by the id of a parameter: what has scaled its gradient
        self._models: dict[nn.Module, None] = {}
        self._uses: dict[tuple[AmpFault, str | None, str | None], AmpUse] = {}
        self.dtypes: dict[torch.dtype, None] = {}
        """Those of autocast."""

    @property
    def uses(self) -> tuple[AmpUse, ...]:
        """The faults, in the order in which they were seen."""
        return tuple(self._uses.values())

    @property
    def has_scaler(self) -> bool:
        """Whether the script has made a ``GradScaler``."""
        return bool(self._scalers)

    @property
    def has_switched_off(self) -> bool:
        """Whether autocast of the script was switched off."""
        return bool(self.dtypes) and not self._keeps_autocast

    @property
    def scale(self) -> float | None:
        """The scale that a ``GradScaler`` of a loss starts with; ``None`` without one."""
        return next((scaler.scale for scaler in self._scalers.values() if scaler.has_scaled), None)

    @property
    def functions(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """What to replace: the owner, the name, and a function that gets the original first."""
        scaler, autocast = torch.amp.GradScaler, torch.autocast
        return [
            (scaler, "__init__", self._make_scaler),
            (scaler, "get_scale", self._get_scale),
            (scaler, "scale", self._scale),
            (scaler, "unscale_", self._unscale),
            (scaler, "step", self._step),
            (scaler, "update", self._update),
            (autocast, "__enter__", self._enter),
            (autocast, "__exit__", self._exit),
            (nn.functional, "binary_cross_entropy", self._refused_loss),
        ]

    def forget(self) -> None:
        """Free what was seen."""
        for seen in (self._scalers, self._losses, self._scaled, self._models, self._blocks):
            seen.clear()

    def _note(self, fault: AmpFault, frame: FrameType, **details: Any) -> None:
        source, caller, span = source_lines(frame)
        use = AmpUse(fault=fault, source=source, caller=caller, span=span, **details)
        self._uses.setdefault((fault, source, span), use)

    # -- Autocast

    @property
    def open_blocks(self) -> dict[str, torch.dtype]:
        """The dtype of the autocast that the script has enabled here, by device."""
        innermost = {block.device: block for block in self._blocks}
        return {device: block.dtype for device, block in innermost.items() if block.is_enabled}

    def _enter(self, original: Callable[..., Any], context: Any) -> Any:
        if self._is_own or self._is_inside():
            return original(context)
        block = _Autocast(id(context), context.device, context.fast_dtype, context._enabled)
        self._blocks.append(block)
        if block.is_enabled and torch.is_grad_enabled():
            self.dtypes[block.dtype] = None
        if self._keeps_autocast:
            return original(context)
        # A decorator enters the same context again, perhaps when nothing is observed
        context._enabled = False
        try:
            return original(context)
        finally:
            context._enabled = block.is_enabled

    def _exit(self, original: Callable[..., Any], context: Any, *args: Any) -> Any:
        if not (self._is_own or self._is_inside()):
            own = [number for number, block in enumerate(self._blocks) if block.context == id(context)]
            for number in own[-1:]:
                del self._blocks[number]
        return original(context, *args)

    def computed(self, node: Node, call: Callable[..., Any]) -> Any:
        """The result of ``call(*node.args, **node.kwargs)``, by other means if that fails.

        What fails without the script's autocast is computed under it, and a function without a
        kernel in 16 bits in fp32.
        """
        try:
            return call(*node.args, **node.kwargs)
        except Exception as error:
            # Anything else than the first call's exception would be a riddle
            with contextlib.suppress(Exception):
                return self._computed_otherwise(node, call, error)
            raise

    def _computed_otherwise(self, node: Node, call: Callable[..., Any], error: Exception) -> Any:
        blocks, before = self.open_blocks, node.autocasts
        for restore in node.restore_generators:
            restore()
        if blocks and not self._keeps_autocast:
            self._is_own = True
            node.autocasts = before | blocks
            try:
                with contextlib.ExitStack() as stack:
                    for device, dtype in blocks.items():
                        stack.enter_context(torch.autocast(device, dtype))
                    return call(*node.args, **node.kwargs)
            except Exception:
                node.autocasts = before
            finally:
                self._is_own = False
        is_narrow = any(tensor.dtype in NARROW for tensor in node.reads)
        if isinstance(node.call, nn.Module) or node.changed or not is_narrow:
            raise error
        result = computed_in_fp32(call, node.args, node.kwargs)
        node.is_in_fp32 = True
        self._note("no-kernel", sys._getframe(2), op=node.name, raises=f"{type(error).__name__}: {message_of(error)}")
        return result

    def _refused_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refusing = [device for device in self.open_blocks if device in _REFUSING]
        if refusing:
            self._note("refused-loss", sys._getframe(2), op="binary_cross_entropy", names=tuple(refusing))
        return original(*args, **kwargs)

    # -- GradScaler

    def _make_scaler(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        made = inspect.signature(original).bind(scaler, *args, **kwargs)
        made.apply_defaults()
        if made.arguments["enabled"]:
            # Torch disables one for a device that is not here
            elsewhere = "" if scaler._enabled else scaler._device
            self._scalers[scaler] = _Scaler(float(made.arguments["init_scale"]), elsewhere)

    def _get_scale(self, original: Callable[..., Any], scaler: Any) -> Any:
        # The script may divide gradients by it
        self._scaled.clear()
        return original(scaler)

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        if scaler not in self._scalers:
            return original(scaler, outputs)
        self._scalers[scaler].has_scaled = True
        # Its own scale, which the script may read, is that of the gradients
        if scaler._enabled:
            if scaler._scale is None:
                scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
            scaler._scale.fill_(1.0)
        if self.dtypes and all(dtype == torch.bfloat16 for dtype in self.dtypes):
            self._note("scaler-for-bf16", sys._getframe(2), op="scale")
        if not isinstance(outputs, Tensor):
            kind = type(outputs) if isinstance(outputs, (list, tuple)) else list
            return kind(self._copy(output, scaler) for output in outputs)
        return self._copy(outputs, scaler)

    def _copy(self, loss: Tensor, scaler: Any) -> Tensor:
        # Another tensor, so that a backward pass of the loss itself is known to be one
        copy = loss.view_as(loss)
        self._losses[id(copy)] = (copy, loss, scaler)
        return copy

    def unscaled(self, loss: Tensor) -> Tensor:
        """The loss that was scaled, or ``loss`` itself."""
        return self._losses[id(loss)][1] if id(loss) in self._losses else loss

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        if scaler in self._scalers:
            self._unscaled(scaler, optimizer, "unscale_", sys._getframe(2))
        else:
            original(scaler, optimizer)

    def _unscaled(self, scaler: Any, optimizer: Any, op: str, frame: FrameType) -> None:
        state = self._scalers[scaler]
        if self._is_scaled_never(state, op, frame):
            return
        stage, line = state.stages.get(id(optimizer), (None, None))
        if stage == "unscaled":
            raises = "RuntimeError: unscale_() has already been called on this optimizer since the last update()."
            self._note_of(state, "unscaled-twice", frame, op=op, earlier=line, raises=raises)
        elif stage == "stepped":
            raises = "RuntimeError: unscale_() is being called after step()."
            self._note_of(state, "no-update", frame, op=op, earlier=line, raises=raises)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        halves = [p for p in trained if p.grad.dtype == torch.float16]
        if halves and not (op == "step" and getattr(optimizer, "_step_supports_amp_scaling", False)):
            raises = "ValueError: Attempting to unscale FP16 gradients."
            names = {id(p): name for model in self._models for name, p in model.named_parameters()}
            named = tuple(names[id(p)] for p in halves if id(p) in names)[:_NAMED]
            self._note_of(state, "unscaled-fp16", frame, op=op, names=named, raises=raises)
        state.has_checks |= bool(trained)
        state.stages[id(optimizer)] = ("unscaled", own_line(frame))
        for parameter in trained:
            self._scaled.pop(id(parameter), None)

    def _is_scaled_never(self, state: _Scaler, op: str, frame: FrameType) -> bool:
        if not state.has_scaled:
            # One that is passed over is another fault, and the first call stands for the rest
            raises = f"AssertionError: Attempted {op} but _scale is None."
            if not any(use.fault == "never-scaled" for use in self.uses):
                self._note_of(state, "never-scaled", frame, op=op, raises=raises)
        return not state.has_scaled

    def _step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._scalers.get(scaler)
        if state is None:
            return original(scaler, optimizer, *args, **kwargs)
        frame = sys._getframe(2)
        if not self._is_scaled_never(state, "step", frame):
            stage, line = state.stages.get(id(optimizer), (None, None))
            if stage == "stepped":
                raises = "RuntimeError: step() has already been called since the last update()."
                self._note_of(state, "no-update", frame, op="step", earlier=line, raises=raises)
            elif stage is None:
                self._unscaled(scaler, optimizer, "step", frame)
            state.stages[id(optimizer)] = ("stepped", own_line(frame))
        self._in_step = True
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            self._in_step = False

    def _update(self, original: Callable[..., Any], scaler: Any, new_scale: Any = None) -> None:
        state, frame = self._scalers.get(scaler), sys._getframe(2)
        if state is None:
            original(scaler, new_scale)
        elif not self._is_scaled_never(state, "update", frame):
            if new_scale is None and not (state.has_checks or state.is_passed_over):
                raises = "AssertionError: No inf checks were recorded prior to update."
                self._note_of(state, "no-inf-checks", frame, op="update", raises=raises)
            state.stages.clear()
            state.has_checks = state.is_passed_over = False

    def _note_of(self, scaler: _Scaler, fault: AmpFault, frame: FrameType, **details: Any) -> None:
        self._note(fault, frame, scale=scaler.scale, elsewhere=scaler.elsewhere, **details)

    # -- What observers see

    def calls(self, model: nn.Module) -> None:
        """A model is called."""
        self._models[model] = None

    def backward(self, loss: Tensor, frame: FrameType) -> None:
        """A backward pass of ``loss`` is about to be made."""
        if self.open_blocks:
            self._note("backward-in-autocast", frame, op="backward")
        if not self._scalers:
            return
        _, _, scaler = self._losses.get(id(loss), (None, None, None))
        # The leaves that a backward pass of ``loss`` gives a gradient.
        for parameter in [node.variable for node in nodes_of(loss) if hasattr(node, "variable")]:
            if scaler is not None:
                self._scaled[id(parameter)] = scaler
            elif parameter.grad is None:
                self._scaled.pop(id(parameter), None)

    def clears(self, parameters: Iterable[int]) -> None:
        """Gradients of parameters with these ids are cleared."""
        for key in parameters:
            self._scaled.pop(key, None)

    def clips(self, parameters: Sequence[Tensor], frame: FrameType) -> None:
        """Gradients are about to be clipped."""
        scaler = self._scaler_of(parameters)
        if scaler is not None:
            self._note_of(self._scalers[scaler], "scaled-clip", frame, op="clip_grad")

    def steps(self, optimizer: Optimizer, frame: FrameType) -> None:
        """An optimizer is about to make its step."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        scaler = self._scaler_of(parameters)
        if scaler is not None and not self._in_step:
            state = self._scalers[scaler]
            state.is_passed_over = True
            self._note_of(state, "scaled-step", frame, op="step")
        self.clears(map(id, parameters))

    def _scaler_of(self, parameters: Iterable[Tensor]) -> Any:
        """What has scaled a gradient of ``parameters``, and not unscaled it."""
        scalers = [self._scaled[id(p)] for p in parameters if id(p) in self._scaled and p.grad is not None]
        return next((scaler for scaler in scalers if scaler in self._scalers), None)
