"""Random numbers: the reference uses those of the low-precision run, with its own parameters (mean, probability).

The same seed gives different values in different dtypes, so a random op cannot be compared with a rerun of itself. To measure
what wrong parameters change, the op is rerun in fp32 twice from the same generator state: with the parameters of the
reference and with those of the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode
from lowprec_check.engine.core.floating_dtypes import is_float, widen
from lowprec_check.engine.core.seed import default_generator
from lowprec_check.engine.trace.dispatched_call import DispatchedCall, run_wide
from lowprec_check.engine.trace.op_arguments import Args, Kwargs, map_args
from lowprec_check.engine.trace.op_traits import draws


class GeneratorState:
    """The state of the generator that a call uses, before the call."""

    def __init__(self, call: DispatchedCall) -> None:
        given = call.kwargs.get("generator")
        device = next((tensor.device for tensor in call.inputs), call.kwargs.get("device"))
        self.generator: torch.Generator = given if given is not None else default_generator(device)
        self.state = self.generator.get_state()

    @property
    def moved(self) -> bool:
        """Whether random numbers were drawn since."""
        return not torch.equal(self.state, self.generator.get_state())

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Draw the same numbers again; afterwards the generator is where it was."""
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)


def state_before(call: DispatchedCall) -> GeneratorState | None:
    """The state of the generator if ``call`` may draw from it. torch's ops declare that they do; other packages' may not."""
    if not call.traits.may_draw or (call.traits.random and not draws(call.func, call.args, call.kwargs)):
        return None
    return GeneratorState(call)


def has_drawn(call: DispatchedCall, state: GeneratorState | None) -> bool:
    """After the call: whether it used random numbers."""
    return state is not None and (call.traits.random or state.moved)


def followed(low: Tensor, reference: Tensor, widened: Tensor) -> Tensor:
    """The reference of one output ``low`` of a random call.

    ``reference`` and ``widened`` are the outputs of the op in fp32 from the same generator state: on the inputs of the
    reference, and on the call's own inputs, widened. Indices and booleans are those of the run.
    """
    if not is_float(low):
        return low
    wide = low.to(reference.dtype)
    if torch.allclose(wide, widened, rtol=8 * torch.finfo(low.dtype).eps, atol=0.0, equal_nan=True):
        return reference  # fp32 draws the same numbers
    moved = wide + (reference - widened)
    return torch.where(moved.isfinite(), moved, reference)


def rerun(call: DispatchedCall, state: GeneratorState, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The results of ``call`` on other arguments, from the same state of the generator."""
    with state.rewound(), torch._C._DisableAutocast():
        return run_wide(call, args, kwargs)


class Draw(NamedTuple):
    """One random call of a run."""

    op: str
    state: GeneratorState
    inputs: list[Tensor]
    """Its floating inputs, widened."""
    outputs: list[Tensor]


class DrawsDiffer(Exception):  # noqa: N818 - not an error of the user
    """The reference draws in other places than the run."""


class RecordDraws(DispatchMode):
    """Records the random calls of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    def handle(self, func: Any, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run the op, and record it if it draws."""
        call = DispatchedCall(func, args, kwargs, keys)
        state = state_before(call)
        if state is None:
            return call.run()
        inputs = [widen(tensor).clone() for tensor in call.inputs if is_float(tensor)]
        out = call.run()
        if has_drawn(call, state):
            outputs = [tensor.detach().clone() for tensor in call.results(out)]
            self.draws.append(Draw(call.traits.name, state, inputs, outputs))
        return out


class ReplayDraws(DispatchMode):
    """Gives the random calls of an fp32 run the random numbers of a recorded run; raises :class:`DrawsDiffer`."""

    def __init__(self, recorded: Sequence[Draw]) -> None:
        super().__init__()
        self._left = list(recorded)

    def handle(self, func: Any, args: Any, kwargs: Any, keys: AutocastKeys) -> Any:
        """Run the op; if it draws, replace its results."""
        call = DispatchedCall(func, args, kwargs, keys)
        state = state_before(call)
        if state is None:
            return call.run()
        draw = self._left[0] if self._left else None
        given = self._with_inputs_of(call, draw)
        if draw is not None:
            state.generator.set_state(draw.state.state)
        out = call.run()
        if not has_drawn(call, state):
            return out
        outputs = call.results(out)
        if draw is None or given is None or [t.shape for t in outputs[:1]] != [t.shape for t in draw.outputs[:1]]:
            raise DrawsDiffer(f"{call.traits.name} there, {draw.op if draw else 'nothing'} here")
        widened = rerun(call, draw.state, *given)
        for out_, low, mine in zip(outputs, draw.outputs, widened, strict=False):
            if out_.shape == low.shape == mine.shape:
                out_.copy_(followed(low, out_.clone(), mine))
        self._left.pop(0)
        return out

    def _with_inputs_of(self, call: DispatchedCall, draw: Draw | None) -> tuple[Args, Kwargs] | None:
        """The arguments of ``call`` with the floating inputs of ``draw``; ``None`` if they do not fit."""
        mine = [tensor for tensor in call.inputs if is_float(tensor)]
        if draw is None or [t.shape for t in mine] != [t.shape for t in draw.inputs]:
            return None
        by_id = {id(tensor): other for tensor, other in zip(mine, draw.inputs, strict=True)}

        def replaced(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return by_id[id(value)].to(value.dtype, copy=True) if id(value) in by_id else value.clone()

        return map_args(call.args, call.kwargs, replaced)
