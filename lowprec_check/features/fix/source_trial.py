"""Trials of a user's source in a process of their own: runs, bits in fp32, expressions' values."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import io
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.core.machine import Machine
from lowprec_check.core.preparation import on_device
from lowprec_check.core.session import Grow, Session
from lowprec_check.core.target_runs import open_runs
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.plain_run import judge, output_tensors, run_once
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.streamed_weights import is_in_memory
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.target_source import TargetSource, cuda_asked_in_a_fork, one_thread
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.model.user_module import Rewrite, separate_imports, use_sources
from lowprec_check.engine.model.user_surroundings import threads_of_progress
from lowprec_check.errors import UsageError, encodable, first_line, message_of
from lowprec_check.features.fix.fix_sites import fails
from lowprec_check.features.fix.script_fixes import faults
from lowprec_check.features.fix.script_steps import Steps, StepWatch, made_steps
from lowprec_check.features.fix.seen_values import Places, ScriptFacts, SeenValue, SourceTrial
from lowprec_check.process import Isolation
from lowprec_check.process.process_group import WHOLE_PROCESS
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import REFERENCE
from lowprec_check.schema.scan_result import Run
from lowprec_check.torchkit.floating_dtypes import torch_dtype
from lowprec_check.torchkit.isolation import (
    ForkLostError,
    accelerator_in_use,
    best_isolation,
    forked,
    isolated,
    isolation_on,
    read_from,
    read_positions,
    threads_end,
)
from lowprec_check.torchkit.output_comparison import digest_of
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import is_own_file
from lowprec_check.torchkit.tensor_comparison import ratio

_NAME = "__lowprec_check_saw__"

MOST_LOOKS = 64
"""Values of an expression whose magnitudes are taken."""

_seen: dict[str, dict[str, SeenValue]] = {}
_looks: dict[tuple[str, str], int] = {}


def start_probing() -> Rewrite:
    """Forget what was noted; returns what makes the code of files note it."""
    _seen.clear()
    _looks.clear()
    setattr(builtins, _NAME, _saw)
    return with_probes


def probed() -> dict[str, dict[str, SeenValue]]:
    """What was noted since, by file and by the place of the expression, ``25:17-25:55``."""
    return {file: dict(values) for file, values in _seen.items()}


def with_probes(path: str, tree: ast.Module) -> ast.Module:
    """Every expression inside functions notes what it gives."""
    changed: ast.Module = ast.fix_missing_locations(_Probes(path).visit(tree))
    return changed


class _Probes(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self._path, self._depth = path, 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # TorchScript compiles the source of a function that it decorates
            if not any("script" in ast.unparse(decorator) for decorator in node.decorator_list):
                node.body = [self._inside(statement) for statement in node.body]
            return node
        # Outside functions, only what lambdas compute
        if not self._depth:
            if not isinstance(node, ast.Lambda):
                return self.generic_visit(node)
            node.body = self._inside(node.body)
            return node
        if isinstance(node, (ast.JoinedStr, ast.Constant, ast.AnnAssign)):
            return node
        is_target = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        function = getattr(node, "func", None)
        if not isinstance(function, ast.Name) or function.id not in ("super", "locals"):
            node = self.generic_visit(node)  # these two look at the frame
        if not isinstance(node, ast.expr) or is_target or isinstance(node, _NOT_VALUES):
            return node
        place = f"{node.lineno}:{node.col_offset}-{node.end_lineno}:{node.end_col_offset}"
        called = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(self._path), ast.Constant(place), node], [])
        return ast.copy_location(called, node)

    def _inside(self, node: ast.AST) -> Any:
        """Visit a part of a function."""
        self._depth += 1
        changed = self.visit(node)
        self._depth -= 1
        return changed


_NOT_VALUES = (ast.Starred, ast.Slice, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.GeneratorExp)


def _saw(path: str, place: str, value: Any) -> Any:
    looks = _looks.get((path, place), 0)
    if looks >= MOST_LOOKS:
        return value
    _looks[path, place] = looks + 1
    values = _seen.setdefault(path, {})
    new = SeenValue(kind="other")
    # Looking at a tensor must not be an op of the model
    no_dispatch, no_functions = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunctionSubclass()
    with contextlib.suppress(Exception), no_dispatch, no_functions, torch.no_grad():
        new = _described(value)
    earlier = values.get(place)
    if earlier is not None and earlier.kind == new.kind == "tensor":
        dtypes = tuple(sorted({*earlier.dtypes, *new.dtypes}))
        absmax = max((seen.absmax for seen in (earlier, new) if seen.absmax is not None), default=None)
        new = msgspec.structs.replace(new, dtypes=dtypes, absmax=absmax)
    values[place] = new
    return value


def _described(value: Any) -> SeenValue:
    if isinstance(value, Tensor):
        # The largest finite magnitude, of plain floating tensors with values
        absmax = None
        if value.is_floating_point() and value.layout == torch.strided and value.numel() and not value.is_meta:
            magnitude = value.detach().to(torch.float32).abs()
            largest = float(magnitude.nan_to_num(0.0, 0.0, 0.0).max())
            absmax = largest if math.isfinite(largest) else None
        return SeenValue(kind="tensor", dtypes=(str(value.dtype)[6:],), absmax=absmax)
    if isinstance(value, nn.Module):
        name, weight = next(((n, p) for n, p in value.named_parameters() if p.is_floating_point()), ("", None))
        dtypes, buffers = () if weight is None else (str(weight.dtype)[6:],), tuple(n for n, _ in value.named_buffers())
        native, training = type(value).__module__.startswith("torch."), value.training
        return SeenValue(kind="module", name=name, dtypes=dtypes, parts=buffers, of_torch=native, training=training)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        fits = isinstance(value, float) or abs(value) < 2**63
        return SeenValue(kind="number", number=float(value) if fits and math.isfinite(value) else None)
    if isinstance(value, (tuple, list)) and 0 < len(value) <= 16:
        parts = tuple(str(part.dtype)[6:] if isinstance(part, Tensor) else "" for part in value)
        return SeenValue(kind="tuple", parts=parts)
    if not callable(value):
        return SeenValue(kind="other")
    # Where a function is defined; of a method of a tensor, `torch.Tensor.pow`
    if isinstance(getattr(value, "__self__", None), Tensor):
        return SeenValue(kind="callable", name=encodable(f"torch.Tensor.{getattr(value, '__name__', '')}"))
    module = getattr(value, "__module__", None)
    if inspect.isfunction(value):
        module = inspect.unwrap(value).__module__
    name = getattr(value, "__name__", type(value).__name__)
    if module is None and getattr(torch, name, None) is value:
        module = "torch"
    module = (module or "").replace("torch._C._", "torch.")
    return SeenValue(kind="callable", name=encodable(f"{module}.{name}"))


_FAR = 10.0
"""Runs in fp32 that are further apart, as those of an agent, say no more."""

NEAR = 0.3  # the part of the tolerance from which on the rounding of buffers may be why a run fails
Goal = Literal["glance", "step", "proof"]
Grown = Iterator[SourceTrial]


@dataclass(frozen=True, kw_only=True)
class PlainTrial:
    """A trial of a source: plain runs in fp32 and each precision, in a session."""

    fp32: Run  # the reference of the scan, without its op calls
    goal: Goal  # ``glance``: which pass. ``proof``: and further inputs, fp32's bits. ``step``: or analysis
    passing: tuple[str, ...] = ()
    apart: bool = False  # whether each run has a process of its own, which is ended if an op takes too long

    def __call__(self, source: TargetSource, isolation: Isolation | None, options: ScanOptions) -> Grown:
        """What was found."""
        device, trial, measured = self.fp32.device, SourceTrial(), self.goal != "glance"
        isolation = isolation or (isolation_on(device, source.best_on(device)) if self.apart else "none")
        source.isolated_by(isolation)
        machine = Machine(environment={"device": device})
        with open_runs(source, options, machine, isolation) as runs:
            runs.reference(None if measured else self.fp32, instrumented=False)
            plain = [runs.run(n, measured=measured, instrumented=False) for n in options.names_of("precisions")]
            # A step is a proof if all pass on the given inputs; else what fails is analyzed.
            given_pass = not any(fails(msgspec.structs.replace(run, further_inputs=None)) for run in plain)
            proves = self.goal == "proof" or (self.goal == "step" and given_pass)
            if proves:
                trial = _isolated(source, isolation, device, lambda: _bits(source, device, options.seed))
            if measured:
                others = [runs.run(name, measured=proves, instrumented=False) for name in self.passing]
                broken = [run for run in others if fails(run)]
                trial = msgspec.structs.replace(trial, broken=[run.precision for run in broken])
                plain += broken
            if self.goal == "step":
                plain = [runs.run(run.precision, measured=proves) if fails(run) else run for run in plain]
        yield msgspec.structs.replace(trial, runs=plain)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the expressions of a source with probes give in fp32 and in each precision."""

    device: str
    first: bool  # whether it is the original, whose bits in fp32 are taken twice

    def __call__(self, source: TargetSource, isolation: Isolation | None, options: ScanOptions) -> Grown:
        """What was found."""
        names, isolation = options.names_of("precisions"), isolation or "none"
        trial = _isolated(source, isolation, self.device, lambda: _probed(source, self.device, names, options))
        if self.first:
            bits = _isolated(source, isolation, self.device, lambda: _bits(source, self.device, options.seed, calls=2))
            trial = msgspec.structs.replace(trial, outputs=bits.outputs, gradients=bits.gradients)
        yield trial


Make = Callable[..., "_Made"]
"""Makes a script's steps; with ``fp32`` without autocast, with ``noise`` on the initial weights."""


@dataclass(frozen=True, kw_only=True)
class ScriptTrial:
    """The steps that a training script makes, as it is and in fp32.

    The script runs once, up to where both may differ, and goes on in forks.
    """

    path: str
    arguments: tuple[str, ...]
    steps: int
    twice: bool
    """Whether the steps in fp32 are made again, to see if they give the same, or with noise."""

    def run(self, spec: TargetSpec, options: ScanOptions, *, may_fork: bool = True) -> ScriptFacts:
        """What was found; the script runs again where forks cannot be used."""
        use_sources(dict(spec.sources))
        found, running = list[ScriptFacts](), threading.enumerate()
        with separate_imports(), contextlib.ExitStack() as before_forks:
            before_forks.enter_context(cuda_asked_in_a_fork())
            before_forks.enter_context(one_thread())

            def branches(steps: Steps) -> None:
                positions = read_positions() if may_fork else {}

                def made(*, fp32: bool, noise: bool = False) -> _Made:
                    def go_on() -> _Made:
                        before_forks.close()
                        read_from(positions)
                        return _made(steps(fp32, noise))

                    return forked(go_on, _Made)

                # Threads are not copied, and steps may wait for them, or do without
                is_alone = threads_end(known=[*running, *threads_of_progress()])
                if may_fork and is_alone and not accelerator_in_use():
                    with contextlib.suppress(ForkLostError):
                        found.append(self._facts(made, lambda: forked(self._observed, ScriptFacts), options))

            watch = self._steps(options.seed, branches=branches)
            if not found and not watch.has_branched:
                ended = _made(watch)
                found.append(self._facts(lambda **_variant: ended, self._observed, options))
            if not found:
                with WHOLE_PROCESS:
                    facts = self._facts(lambda **v: _made(self._steps(options.seed, **v)), self._observed, options)
                found.append(msgspec.structs.replace(facts, runs_again=True))
        return found[0]

    def _steps(self, seed: int, **how: Any) -> StepWatch:
        return made_steps(Path(self.path), self.arguments, self.steps, seed, **how)

    def _facts(self, made: Make, observed: Callable[[], ScriptFacts], options: ScanOptions) -> ScriptFacts:
        try:
            in_fp32 = made(fp32=True)
        except UsageError as error:
            # One that a missing kernel stops is observed to its end by other means
            failed = observed()
            if not failed.amp:
                raise
            failure = first_line(message_of(error))
            return msgspec.structs.replace(failed, failure=failure, device=options.device_name or "cpu")
        # One that trains in fp32 does the same as it is: that run is the repetition
        is_in_fp32 = in_fp32.facts.is_in_fp32
        # A script that its GradScaler stops has its faults all the same
        try:
            as_it_is = in_fp32
            if self.twice or not is_in_fp32:
                as_it_is = made(fp32=False)
        except UsageError as error:
            if is_in_fp32:
                raise fails_again(message_of(error)) from error
            if all(use.is_harmless for use in in_fp32.facts.amp):
                raise
            as_it_is = _Made(facts=msgspec.structs.replace(in_fp32.facts, failure=first_line(message_of(error))))
        again = [as_it_is] if is_in_fp32 else [made(fp32=True) for _ in range(self.twice)]
        runs = [in_fp32, as_it_is, *again]
        facts, steps = as_it_is.facts, [one_run.facts.steps for one_run in runs]
        facts = msgspec.structs.replace(facts, amp=in_fp32.facts.amp)
        problem = next((one_run.facts.problem for one_run in runs if one_run.facts.problem), "")
        if not problem and steps[0] != steps[1]:
            problem = f"it makes {steps[0]} steps in fp32, but {steps[1]} as it is"
        facts = msgspec.structs.replace(facts, steps=min(steps), problem=problem)
        distance, moved = _apart(as_it_is, in_fp32)
        facts = msgspec.structs.replace(
            facts,
            distance=distance if math.isfinite(distance) else None,
            moved=moved if math.isfinite(moved) else None,
            fp32_losses=in_fp32.facts.losses,
            losses_apart=_losses_apart(as_it_is, in_fp32),
        )
        # How far other weights lead is asked of a script without a fault
        if self.twice and not (problem or any(faults(facts, lambda *_: ""))):
            with contextlib.suppress(UsageError):  # it may check its weights
                noisy = made(fp32=True, noise=True)
                facts = msgspec.structs.replace(
                    facts,
                    spread=min(_apart(noisy, in_fp32)[0], _FAR),
                    losses_spread=min(_losses_apart(noisy, in_fp32) or 0.0, _FAR),
                )
        # Without the same again, no change can be judged.
        if in_fp32.weights and all(repeated.weights == in_fp32.weights for repeated in again):
            fp32 = [tensor.double() for tensor in torch.load(io.BytesIO(in_fp32.weights))]
            facts = msgspec.structs.replace(facts, fp32=digest_of(fp32))
        return facts

    def _observed(self) -> ScriptFacts:
        try:
            observed = load_target(self.path, arguments=self.arguments, steps=1).observed
        except UsageError:
            observed = None
        return ScriptFacts(steps=0, amp=() if observed is None else observed.amp)


def fails_again(message: str) -> UsageError:
    """The error of a script that has made its steps, and then fails with ``message``."""
    runs = "Its steps are made several times, and the files that it makes stay: let it run where they exist."
    return UsageError(f"The script fails when it runs again: {first_line(message)}", runs)


class _Made(msgspec.Struct, kw_only=True):
    facts: ScriptFacts
    start: bytes = b""
    weights: bytes = b""


def _made(watch: StepWatch) -> _Made:
    saved = []
    for tensors in zip(*watch.weights, strict=True):
        file = io.BytesIO()
        torch.save([tensor.cpu() for tensor in tensors], file)
        saved.append(file.getvalue())
    start, weights = saved or (b"", b"")
    return _Made(facts=watch.facts(), start=start, weights=weights)


def _apart(made: _Made, in_fp32: _Made) -> tuple[float, float]:
    """How far the weights are from those in fp32, and have moved, in units of how these moved."""
    if not (made.weights and in_fp32.weights):
        return math.inf, math.inf
    saved = (made.start, made.weights, in_fp32.start, in_fp32.weights)
    start, end, start_fp32, end_fp32 = ([t.double() for t in torch.load(io.BytesIO(weights))] for weights in saved)
    if [tensor.shape for tensor in end] != [tensor.shape for tensor in end_fp32]:
        return math.inf, math.inf
    moved = [end - start for end, start in zip(end, start, strict=True)]
    moved_fp32 = [end - start for end, start in zip(end_fp32, start_fp32, strict=True)]
    way = _norm(moved_fp32)
    apart = _norm(ours - theirs for ours, theirs in zip(moved, moved_fp32, strict=True))
    return ratio(apart, way), ratio(_norm(moved), way)


def _losses_apart(made: _Made, in_fp32: _Made) -> float | None:
    """How far the losses are from those in fp32, in units of these; ``None`` if not finite."""
    ours, theirs = (torch.tensor(losses.facts.losses, dtype=torch.float64) for losses in (made, in_fp32))
    if ours.shape != theirs.shape:
        return None
    apart = ratio(_norm([ours - theirs]), _norm([theirs]))
    return apart if math.isfinite(apart) else None


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def _isolated(
    source: TargetSource, isolation: Isolation, device: str, function: Callable[[], SourceTrial]
) -> SourceTrial:
    return isolated(function, source.isolation_of_functions(isolation, device), SourceTrial)


def try_source(
    spec: TargetSpec, options: ScanOptions, isolation: Isolation | None, grow: Grow[SourceTrial], seconds: float
) -> SourceTrial:
    """Load ``spec`` with changed sources; what ``grow`` finds, within ``seconds`` each."""
    *_, trial = Session(spec, options, isolation, seconds, None, seconds).grow(grow, SourceTrial)
    return trial


def try_script(
    spec: TargetSpec, options: ScanOptions, isolation: Isolation | None, trial: ScriptTrial, seconds: float
) -> ScriptFacts:
    """The steps of a script with changed sources, within ``seconds``."""
    may_fork = (isolation or best_isolation(can_spawn=True)) in ("fork", "shared")
    load = functools.partial(_loaded, trial, may_fork)
    *_, found = Session(spec, options, isolation, seconds, None, seconds, load=load).grow(_of_script, SourceTrial)
    assert found.script is not None
    return found.script


def _loaded(trial: ScriptTrial, may_fork: bool, spec: TargetSpec, options: ScanOptions) -> SimpleNamespace:
    """The script runs while it is loaded."""
    return SimpleNamespace(found=SourceTrial(script=trial.run(spec, options, may_fork=may_fork)))


def _of_script(loaded: SimpleNamespace, _isolation: Isolation | None, _options: ScanOptions) -> Grown:
    yield loaded.found


# -- What runs in a fork, or in the session


def _ready(target: Target, precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    return prepared(
        target.model, PRECISIONS.get(precision), torch.device(device), call=target.call(), inputs=target.inputs
    )


def _probed(source: TargetSource, device: str, precisions: Sequence[str], options: ScanOptions) -> SourceTrial:
    target, seen = source.forked(), dict[str, Places]()
    with on_device(target, torch.device(device)):
        for name in (REFERENCE, *precisions):
            start_probing()
            with _ready(target, name, device) as ready:
                try:
                    run_once(ready, target.args, target.kwargs, options.seed)
                except BaseException as error:
                    reraise_interrupt(error)
            seen[name] = probed()
        buffers = _rounded_buffers(target, device, precisions, options)
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    packages = [name for name, file in files.items() if isinstance(file, str) and not is_own_file(file)]
    return SourceTrial(seen=seen, buffers=buffers, packages=packages)


def _rounded_buffers(
    target: Target, device: str, precisions: Iterable[str], options: ScanOptions
) -> dict[str, list[str]]:
    """Floating buffers, by file and class, that a cast rounds so that fp32 nearly fails."""
    for precision in map(PRECISIONS.get, precisions):
        by_owner: dict[str, list[str]] = {}
        with _ready(target, REFERENCE, device) as ready:
            changed = []
            for module in ready.model.modules() if precision.kind == "cast" else ():
                code = getattr(type(module).__init__, "__code__", None)
                names = by_owner.setdefault(f"{getattr(code, 'co_filename', '')}:{type(module).__name__}", [])
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.dtype == torch.float32 and is_in_memory(buffer):
                        rounded = buffer.to(torch_dtype(precision.format)).float()
                        if not torch.equal(rounded, buffer):
                            if name not in names:
                                names.append(name)
                            changed.append((module, name, rounded))
            if changed:
                before = output_tensors(run_once(ready, target.args, target.kwargs, options.seed)[0])
                for module, name, rounded in changed:
                    module.register_buffer(name, rounded, persistent=name not in module._non_persistent_buffers_set)
                after = output_tensors(run_once(ready, target.args, target.kwargs, options.seed)[0])
                if judge(after, before, NEAR * (options.tolerance or precision.tolerance))[0] != "ok":
                    return {owner: names for owner, names in by_owner.items() if names}
    return {}


def _bits(source: TargetSource, device: str, seed: int, *, calls: int = 1) -> SourceTrial:
    """The digests of outputs and gradients in fp32, where so many calls give the same."""
    target = source.forked()
    with on_device(target, torch.device(device)), _ready(target, REFERENCE, device) as ready:
        digests = zip(*(_digests(ready, target, seed) for _ in range(calls)), strict=True)
        outputs, gradients = (of_calls[0] if len(set(of_calls)) == 1 else "" for of_calls in digests)
    return SourceTrial(outputs=outputs, gradients=gradients)


def _digests(ready: Any, target: Target, seed: int) -> tuple[str, str]:
    parameters = [parameter for parameter in ready.model.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        try:
            output, _ = run_once(ready, target.args, target.kwargs, seed)
        except BaseException as error:
            reraise_interrupt(error)
            with torch.no_grad():
                output, _ = run_once(ready, target.args, target.kwargs, seed)
        bits, generator = digest_of(output_tensors(output)), torch.Generator().manual_seed(0)
        floating = [tensor for _, tensor in leaves(output) if tensor.requires_grad]
        # Of one number: torch imports sympy for gradients that it is given, which takes a second.
        products = [(t * torch.randn(t.shape, generator=generator).to(t)).sum().real for t in floating]
        try:
            gradients = torch.autograd.grad(sum(products, torch.zeros(())), parameters, allow_unused=True)
        except BaseException as error:
            reraise_interrupt(error)
            return bits, ""
    used = [gradient for gradient in gradients if gradient is not None]
    return bits, digest_of(used) if used else ""
