"""Random numbers: the reference uses those of the low-precision run, with the parameters (mean, probability) of its own.

One seed gives other values in another dtype, so a random op cannot be compared with its rerun. But its rerun in fp32, on two
sets of parameters from one state of the generator, tells what the difference of the parameters does to the values.
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
from lowprec_check.engine.trace.dispatched_call import DispatchedCall
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
    """The state of the generator if ``call`` may draw from it: torch's ops declare it, those of other packages need not."""
    own = call.traits.packet.startswith(("aten::", "prims::"))
    return GeneratorState(call) if not own or draws(call.func, call.args, call.kwargs) else None


def has_drawn(call: DispatchedCall, state: GeneratorState | None) -> bool:
    """After the call: whether it used random numbers."""
    return state is not None and (call.traits.random or state.moved)


def followed(low: Tensor, reference: Tensor, widened: Tensor) -> Tensor:
    """What the reference gets for one output ``low`` of a random call.

    ``reference`` and ``widened`` are the output of the op in fp32, on the reference's inputs and on the call's own inputs
    widened, from one state of the generator. Indices and booleans are those of the run.
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
        return call.results(call.func(*args, **kwargs), args, kwargs)


def own_inputs_widened(call: DispatchedCall, wide: torch.dtype = torch.float32) -> tuple[Args, Kwargs]:
    """Before the op runs: copies of its arguments with widened dtypes; those that it writes to are not shared."""
    written = {id(tensor) for tensor in call.written()}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide if value.is_floating_point else value
        wider = widen(value, wide)
        return wider.clone() if wider is value and id(value) in written else wider

    return map_args(call.args, call.kwargs, copied)


class Draw(NamedTuple):
    """One random call of a run."""

    op: str
    state: GeneratorState
    low: list[Tensor]
    widened: list[Tensor]
    """Its results in fp32 on its own inputs."""


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
        arguments = own_inputs_widened(call)
        out = call.run()
        if has_drawn(call, state):
            low = [tensor.detach().clone() for tensor in call.results(out)]
            self.draws.append(Draw(call.traits.name, state, low, rerun(call, state, *arguments)))
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
        if state is not None and self._left:
            state.generator.set_state(self._left[0].state.state)
        out = call.run()
        if has_drawn(call, state):
            self._follow(call, call.results(out))
        return out

    def _follow(self, call: DispatchedCall, outputs: list[Tensor]) -> None:
        draw = self._left.pop(0) if self._left else None
        if draw is None or draw.op != call.traits.name or len(draw.low) != len(outputs):
            raise DrawsDiffer(f"{call.traits.name} draws random numbers in fp32, {draw.op if draw else 'nothing'} here")
        for out, low, widened in zip(outputs, draw.low, draw.widened, strict=True):
            if out.shape != low.shape:
                raise DrawsDiffer(f"{call.traits.name} has another shape in fp32")
            out.copy_(followed(low, out.clone(), widened))
