"""The steps that a training script makes by itself, or in fp32: where it does what, and weights."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lowprec_check.engine.model.amp_calls import AmpCalls
from lowprec_check.engine.model.observed_step import SECONDS, ThreadObserver, framework_of
from lowprec_check.engine.model.user_module import run_script
from lowprec_check.engine.model.user_surroundings import replaced
from lowprec_check.engine.model.without_extension import without_extension
from lowprec_check.features.fix.seen_values import ForwardPass, ScriptFacts, ScriptOption, ScriptPlace
from lowprec_check.process import system
from lowprec_check.schema.axes import accelerators
from lowprec_check.torchkit.autograd import nodes_of
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import is_own_file, source_lines

_LAST = 8
"""Calls at one place that are kept for a later backward pass: each keeps what it has saved."""


class _Frame(NamedTuple):
    """A function of the user's own that runs, and what it calls."""

    number: int  # the id, which another function may have later
    code: CodeType
    place: ScriptPlace


class _Forward(NamedTuple):
    stack: list[_Frame]
    nodes: list[Any]  # of autograd, of its results


def place_of(frame: FrameType) -> ScriptPlace:
    """The call that runs in the innermost function of the user's own."""
    own = (at.f_code.co_filename for at, _ in traceback.walk_stack(frame) if is_own_file(at.f_code.co_filename))
    return ScriptPlace(*source_lines(frame), next(own, ""))


def own_frames(frame: FrameType) -> list[_Frame]:
    """The functions of the user's own files on the stack, the outermost first."""
    own = [at for at, _ in traceback.walk_stack(frame) if is_own_file(at.f_code.co_filename)]
    return [_Frame(id(at), at.f_code, place_of(at)) for at in reversed(own)]


class ObservedPasses:
    """The passes of a script, forward and backward."""

    def __init__(self) -> None:
        self._is_inside = False  # a call of a model
        self._forwards: dict[tuple[ScriptPlace, ...], list[_Forward]] = {}
        self._earlier: list[_Forward] = []  # before the last step
        self._passes: dict[ScriptPlace, dict[ScriptPlace, None]] = {}

    @property
    def passes(self) -> tuple[ForwardPass, ...]:
        """By the calls that lead to a backward pass."""
        return tuple(ForwardPass(backward, tuple(forward)) for backward, forward in self._passes.items())

    @contextlib.contextmanager
    def calling(self, frame: FrameType, output: list[Any]) -> Iterator[None]:
        """Around a call of a model in ``frame``, which appends its result to ``output``."""
        if self._is_inside:
            yield
            return
        stack = own_frames(frame)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        tensors = [tensor for _, tensor in leaves(output)]
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        if nodes:
            here = self._forwards.setdefault(tuple(frame.place for frame in stack), [])
            here.append(_Forward(stack, nodes))
            del here[:-_LAST]

    def backward(self, losses: Sequence[Tensor], frame: FrameType) -> None:
        """A backward pass of ``losses`` begins in ``frame``."""
        stack, reached = own_frames(frame), set(nodes_of(*losses))
        kept = [*self._earlier, *itertools.chain(*self._forwards.values())]
        for forward in [forward for forward in kept if not reached.isdisjoint(forward.nodes)]:
            # The innermost function that runs in both
            same = 0
            for ours, theirs in zip(stack, forward.stack, strict=False):
                if ours[:2] != theirs[:2]:
                    break
                same += 1
                if ours.place != theirs.place:
                    break
            if same:
                places = self._passes.setdefault(stack[same - 1].place, {})
                places[forward.stack[same - 1].place] = None

    def step(self) -> None:
        """An optimizer made its step: free what is not needed later; a generator's pass may be."""
        self._earlier = list(itertools.chain(*self._forwards.values()))
        self._forwards = {}


def add_noise(module: nn.Module, seen: set[int], generator: Any) -> None:
    """Change the weights of a module by :data:`NOISE`, relative to each; once for each weight."""
    for parameter in module.parameters():
        if parameter.is_leaf and parameter.is_floating_point() and id(parameter) not in seen:
            seen.add(id(parameter))
            with torch.no_grad():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(NOISE * noise * parameter)


Weights = list[tuple[Tensor, Tensor]]
"""Before and after the steps."""

NOISE = 0.01
"""Relative noise on each initial weight, which shows how much other weights in fp32 may differ."""

NAMES_OF_SWITCHES = re.compile(
    r"(?<![a-z])(amp|half)(?![a-z])|autocast|fp16|bf16|float16|precision|dtype", re.IGNORECASE
)
"""How a script calls what selects low precision."""


Steps = Callable[[bool, bool], "StepWatch"]
"""Makes the steps: in fp32, without autocast and ``GradScaler``, or as they are; perhaps with noise
on the initial weights.
"""


def made_steps(
    path: Path,
    arguments: tuple[str, ...],
    steps: int,
    seed: int,
    *,
    fp32: bool = False,
    noise: bool = False,
    branches: Callable[[Steps], None] | None = None,
) -> StepWatch:
    """Run a script for so many steps; with ``fp32``, without its autocast and ``GradScaler``; with
    ``noise`` on its initial weights.

    With ``branches``, the script waits at the first place where either matters; ``branches`` gets a
    function that makes the steps from there, to be called in forks.
    """
    seed_everything(seed)
    argv, folders = sys.argv, list(sys.path)
    watch, sys.argv = StepWatch(steps, fp32=fp32, noise=noise, branches=branches), [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with without_extension():
            run_script(path, observer=watch)
    finally:
        sys.argv, sys.path[:] = argv, folders
    return watch


class StepWatch(ThreadObserver):
    """Observes a script, which it changes for fp32 only; see :func:`.run_to_first_call`."""

    has_enough = False

    def __init__(
        self, steps: int, *, fp32: bool, noise: bool = False, branches: Callable[[Steps], None] | None = None
    ) -> None:
        super().__init__()
        self._branches, self._is_noisy = branches, noise
        self._noise = torch.Generator().manual_seed(1)
        self._noisy: set[int] = set()  # the ids of weights that have noise
        self._passes = ObservedPasses()
        self._losses: list[float] = []
        self._options: dict[str, ScriptOption] = {}
        self._wanted, self._fp32, self._amp = steps, fp32, AmpCalls()
        self._since: float | None = None
        self.has_branched = False
        """Whether the script has come to where in fp32 it may differ from it as it is."""
        self._in_scaler = False
        self._scaled: list[tuple[Tensor, float]] = []  # losses, and by what
        self._grads_scaled = False
        # Blocks of autocast: where they are entered, whether they keep casts of weights, and how
        # many steps there were before
        self._entered: list[tuple[ScriptPlace, bool, int]] = []
        # How many steps each optimizer was asked for, with those that a `GradScaler` skips
        self._asked: dict[Optimizer, int] = {}
        self._made = 0
        self._before: list[tuple[Tensor, Tensor]] = []
        self._places: dict[str, dict[ScriptPlace, None]] = {}
        self._dtypes: dict[str, None] = {}
        self._zero_eps = False
        self._scaler: Any = None
        self._has_disabled_scaler = False
        self._framework = ""
        self._problem = ""

    @property
    def weights(self) -> Weights:
        """Those of all optimizers, in the order of their first steps."""
        return [(before, tensor.detach().clone()) for tensor, before in self._before]

    def facts(self) -> ScriptFacts:
        """What was observed."""
        places: dict[str, Any] = {name: tuple(lines) for name, lines in self._places.items()}
        scale = None
        if self._scaler is not None:
            scale = float(self._scaler.get_scale())
        return ScriptFacts(
            steps=max(self._asked.values(), default=0),
            skipped=sum(self._asked.values()) - self._made,
            optimizers=len(self._asked),
            device=next((tensor.device.type for tensor, _ in self._before), "cpu"),
            autocast=tuple(self._dtypes),
            low_weights=tuple({str(p.dtype).removeprefix("torch.") for p, _ in self._before if p.dtype in NARROW}),
            scale=scale,
            disabled_scaler=self._has_disabled_scaler,
            amp=self._amp.uses,
            problem=self._problem,
            framework=self._framework,
            zero_eps=self._zero_eps,
            passes=self._passes.passes,
            losses=tuple(self._losses),
            options=tuple(self._options.values()),
            **places,
        )

    # -- Where the script in fp32 may differ from it as it is

    def _branch(self) -> None:
        """Before the first such place, wait: the script goes on in forks."""
        if self._branches is not None and not self.has_branched:
            self.has_branched = True
            self._wait()

    def waiting(self, go_on: Callable[[], None]) -> None:
        """Let :func:`made_steps`' caller make the steps in forks."""

        def made(fp32: bool, noise: bool) -> StepWatch:
            self._fp32, self._is_noisy = fp32, noise
            self._place = os.getpid(), threading.get_ident()
            go_on()
            return self

        assert self._branches is not None
        self._branches(made)

    def _in_fp32(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which gets the original first, in fp32; else the original."""

        def chosen(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._branch()
            if self._fp32:
                return function(original, *args, **kwargs)
            return original(*args, **kwargs)

        return chosen

    def _in_fork(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What each fork must make for itself."""
        self._branch()
        return original(*args, **kwargs)

    # -- What run_to_first_call asks for

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """The result of a call of a model; none is made when time is over."""
        self._branch()
        self._since = self._since or system.monotonic()
        if system.monotonic() - self._since > SECONDS and not self._is_over:
            made = min(self._asked.values(), default=0)
            self.give_up(f"it makes {made} of {self._wanted} steps within {SECONDS:g} s of its first call of a model")
            self._leave()
        self._amp.calls(module)
        # Two passes of a trace must give the same
        if self._is_noisy and torch._C._get_tracing_state() is None:
            add_noise(module, self._noisy, self._noise)
        results: list[Any] = []
        with self._passes.calling(sys._getframe(1), results):
            results.append(call(module, *args, **kwargs))
        return results[0]

    def method(
        self, method: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of a call of a method of a model."""
        return method(module, *args, **kwargs)

    def give_up(self, why: str) -> None:
        """Note why the steps cannot be observed."""
        self._problem = self._problem or why

    @contextlib.contextmanager
    def observing(self, leave: Callable[[], Any], wait: Callable[[], None]) -> Iterator[None]:
        """Inside, what trains is observed; ``leave`` leaves the script, ``wait`` lets it wait."""
        self._leave, self._wait = leave, wait
        scaler, autocast = torch.amp.GradScaler, torch.autocast
        observed: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch.autograd, "backward", self._backward),
            (scaler, "__init__", self._make_scaler),
            (scaler, "scale", self._scale),
            (scaler, "unscale_", self._unscale),
            (scaler, "step", self._scaled_step),
            (scaler, "update", self._update),
            (autocast, "__enter__", self._enter),
            (autocast, "__exit__", self._exit),
            (argparse.ArgumentParser, "parse_known_args", self._parse),
            *((nn.Module, name, self._cast) for name in ("to", "half")),
        ]
        if self._fp32 or self._branches is not None:
            cleared = [(owner, "zero_grad", self._zero_grad) for owner in (Optimizer, nn.Module)]
            in_fp32 = [(place, name, self._in_fp32(function)) for place, name, function in self._amp.functions]
            in_fp32 += [(place, name, self._in_fp32(function)) for place, name, function in cleared]
            observed = [*in_fp32, *observed]
            # Each fork needs workers of its own, and a device that no other process has initialized
            observed.append((_MultiProcessingDataLoaderIter, "__init__", self._in_fork))
            modules = (getattr(torch, name, None) for name in accelerators())
            observed += [(module, "_lazy_init", self._in_fork) for module in modules if hasattr(module, "_lazy_init")]
        for place in (nn.utils, nn.utils.clip_grad):
            observed += [(place, f"clip_grad_{what}_", self._clip) for what in ("norm", "value")]
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            for place, name, function in observed:
                stack.enter_context(replaced(place, name, self._unless_over(getattr(place, name), function)))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
        self._is_over = True

    def _note(self, what: str, frame: FrameType) -> ScriptPlace:
        place = place_of(frame)
        self._places.setdefault(what, {})[place] = None
        return place

    def _note_event(self, what: str, frame: FrameType) -> None:
        """Note a call, and those that lead to it."""
        self._note(what, frame)
        self._places.setdefault("events", {}).update(dict.fromkeys(own.place for own in own_frames(frame)))

    def _parse(self, original: Callable[..., Any], parser: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(parser, *args, **kwargs)
        for action in parser._actions:
            flag = next((flag for flag in action.option_strings if flag.startswith("--")), "")
            if not NAMES_OF_SWITCHES.search(flag):
                continue
            value = getattr(result[0], action.dest, None)
            self._options[flag] = ScriptOption(
                flag,
                is_switch=action.const is True and action.nargs in (0, "?"),
                choices=tuple(map(str, action.choices or ())),
                value=value if isinstance(value, str) else None,
            )
        return result

    # -- While the script runs

    def _make_scaler(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        self._note("scalers", sys._getframe(2))
        if scaler.is_enabled():
            self._scaler = scaler
        else:
            self._has_disabled_scaler = True

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(scaled, Tensor) and scaler.is_enabled():
            self._scaled.append((scaled, scaler.get_scale()))
            self._note("scales", sys._getframe(2))
        return scaled

    def _unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> None:
        original(scaler, optimizer)
        self._grads_scaled = False

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(2)
        losses = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._amp.backward(losses[0], frame)
        scales = [scale for loss in losses for scaled, scale in self._scaled if loss is scaled]
        self._grads_scaled |= bool(scales)
        self._framework = self._framework or framework_of(frame)
        self._note_event("scaled_backward" if scales else "backward", frame)
        self._passes.backward(losses, frame)
        self._losses += [float(loss.detach()) / (scales or [1.0])[0] for loss in losses if loss.numel() == 1]
        return original(tensors, *args, **kwargs)

    def _clip(self, original: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._amp.clips(listed, sys._getframe(2))
        self._note_event("scaled_clips" if self._grads_scaled else "clips", sys._getframe(2))
        return original(listed, *args, **kwargs)

    def _update(self, original: Callable[..., Any], scaler: Any, *args: Any) -> None:
        self._note("updates", sys._getframe(2))
        original(scaler, *args)

    def _cast(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        wide = [parameter for parameter in module.parameters() if parameter.dtype != torch.float16]
        result = original(module, *args, **kwargs)
        if any(parameter.dtype == torch.float16 for parameter in wide):
            self._note("weight_casts", sys._getframe(2))
        return result

    def _zero_grad(self, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(owner, nn.Module):
            parameters = list(owner.parameters())
        else:
            parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
        self._amp.clears(map(id, parameters))
        return original(owner, *args, **kwargs)

    def _enter(self, original: Callable[..., Any], context: Any) -> Any:
        if context._enabled:
            self._dtypes[str(context.fast_dtype).removeprefix("torch.")] = None
        place = place_of(sys._getframe(2))
        self._entered.append((place, context._enabled and context._cache_enabled, sum(self._asked.values())))
        return original(context)

    def _exit(self, original: Callable[..., Any], context: Any, *args: Any) -> Any:
        if self._entered:
            self._entered.pop()
        return original(context, *args)

    # -- Steps of optimizers

    def _scaled_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        # The scaler may skip the step, so its hooks cannot count it
        self._save(optimizer)
        self._note_event("scaled_steps", sys._getframe(2))
        self._in_scaler = True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._in_scaler = False
        self._ask(optimizer)
        return result

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_elsewhere:
            return
        frame = sys._getframe(1)
        self._amp.steps(optimizer, frame)
        if self._in_scaler:
            return
        self._save(optimizer)
        self._note_event("made_steps", frame)
        # The innermost line of the user's makes the step; those around it call the function
        own = [around for around, _ in traceback.walk_stack(frame) if is_own_file(around.f_code.co_filename)]
        for caller in own[1:]:
            self._note("step_callers", caller)

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_elsewhere:
            return
        self._made += 1
        if not self._in_scaler:
            self._ask(optimizer)

    def _save(self, optimizer: Optimizer) -> None:
        if optimizer in self._asked:
            return
        self._asked[optimizer] = 0
        for group in optimizer.param_groups:
            eps, tensors = group.get("eps"), group["params"]
            # An eps of 1e-8 is 0 in fp16, so that AdamW divides by 0
            if isinstance(eps, float) and any(p.dtype == torch.float16 for p in tensors):
                self._zero_eps |= not torch.tensor(eps, dtype=torch.float16).item()
        saved = {id(tensor) for tensor, _ in self._before}
        trained = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in saved]
        self._before += [(p, p.detach().clone()) for p in trained]

    def _ask(self, optimizer: Optimizer) -> None:
        """Count a step that ``optimizer`` was asked for; leave the script after the last."""
        # A step before this one in the same block used the same casts of weights
        for place, keeps, before in self._entered:
            if keeps and sum(self._asked.values()) > before:
                self._places.setdefault("around_steps", {})[place] = None
        self._asked[optimizer] += 1
        self._passes.step()
        self._grads_scaled = False
        self._scaled.clear()
        if min(self._asked.values()) >= self._wanted:
            self._leave()
