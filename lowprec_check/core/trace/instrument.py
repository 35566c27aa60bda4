"""The instrumented part of a run: explains it op by op."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.core.trace.execution import Emulation
from lowprec_check.core.trace.function_mode import BackwardFailures, FunctionRescue, SteppingCall
from lowprec_check.core.trace.journal import Journal
from lowprec_check.core.trace.lockstep import Lockstep
from lowprec_check.core.trace.observers import DataFlow, End, MakeObserver, OpObserver, Pass, Returned, returned
from lowprec_check.core.trace.pending_figures import PendingFigures
from lowprec_check.core.trace.places import Places
from lowprec_check.core.trace.recorder import Recorder
from lowprec_check.core.trace.seeds import seed_inputs, seed_state
from lowprec_check.core.trace.twins import storage_key
from lowprec_check.engine.model.plain_run import ModuleOutput, describe_error, kept_output, output_parts
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.streamed_weights import reads_forgotten, stream_of
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.measures import Errors
from lowprec_check.schema.module_paths import module_around, paths_above
from lowprec_check.schema.op_calls import OpCalls, without_times
from lowprec_check.schema.scan_result import Gap
from lowprec_check.torchkit.compiled import compiled_code_in_eager
from lowprec_check.torchkit.devices import free_memory, seed_everything
from lowprec_check.torchkit.dispatch_mode import DispatchMode, observing
from lowprec_check.torchkit.made_tensors import noting_made_tensors
from lowprec_check.torchkit.output_comparison import compare_outputs, same_bits
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import ModuleStack, call_model

_UNKNOWN = "{} {}: its errors and those before it are not known, later ones count from its result"


class Options(NamedTuple):
    """Options of the instrumented part."""

    errors: Errors = "both"
    wide: torch.dtype = torch.float32
    emulation: Emulation = Emulation()
    breadcrumb: Breadcrumb | None = None
    on_gap: Callable[[Gap], None] | None = None
    on_op_calls: Callable[[OpCalls], None] | None = None
    on_output: Callable[[Any], None] = lambda _output: None
    """Called with what the model returns, right after each pass that reached its end."""
    seed: int = 0
    changes_parameters: bool = False  # whether calls write to parameters
    keeps_op_times: bool = True
    observers: Sequence[MakeObserver] = ()
    """What looks at each op call, in order, if errors are computed."""
    probe: ModuleOutput | None = None
    """The module's output to explain instead, if the model's holds nothing to compare."""
    step: SteppingCall | None = None  # the call, if it is a step of training
    deferred: bool | None = None
    """Whether figures are read in batches; by default on an accelerator."""


def fp32_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name, before a cast; no copies."""
    state = {name: parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}
    return state | dict(model.named_buffers(remove_duplicate=False))


def run_instrumented(
    begun: RunSoFar,
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fp32: dict[str, Tensor],
    options: Options,
    plain_outputs: list[Tensor] | None = None,
) -> RunSoFar:
    """Run with a dispatch mode; after an exception above dispatch, again with a function mode.

    Returns what this shows of the run ``begun``.
    """
    run_once = functools.partial(_pass, begun, ready, args, kwargs, fp32)
    share = _ShareOfCores(options.breadcrumb)
    snapshot = Snapshot(ready.model, (args, kwargs), parameters=options.changes_parameters)
    with reads_forgotten(ready.model), contextlib.ExitStack() as at_end:
        at_end.callback(snapshot.restore)
        explained, failed_above = run_once(options, plain_outputs)
        failures = BackwardFailures()
        # A derivative that fails above dispatch takes one more run for each function.
        while failed_above:
            snapshot.rewind()
            explained, failed_above = run_once(options, None, failures)
            failed_above = failed_above and failures.learn()
        # While figures are deferred, no Inf and NaN are followed: one more pass does that.
        calls = explained.run.op_calls
        gives_nonfinite = any((*calls.introduced_inf, *calls.introduced_nan))
        if explained.run.complete and _is_deferred(ready, options) and gives_nonfinite and options.observers:
            snapshot.rewind()
            mode_failures = failures if explained.run.function_mode else None
            explained, _ = run_once(options._replace(deferred=False), plain_outputs, mode_failures)
        proven = [gap for gap in explained.run.gaps if gap.phase != "backward" or gap.op != failures.unproven]
        # With another number of threads, sums may be added in another order.
        perturbed = None if share.varied else explained.run.perturbed
        return explained.with_fields(gaps=proven, perturbed=perturbed)


class _ShareOfCores:
    """Uses as many threads as the supervisor sets in the ``breadcrumb`` while others run."""

    def __init__(self, breadcrumb: Breadcrumb | None) -> None:
        self._most, self._limit = torch.get_num_threads(), 0
        self.varied = False
        """Whether the number of threads was not always that of the process."""
        if breadcrumb is not None:
            self._use(breadcrumb.threads)
            breadcrumb.watch_threads = self._use

    def _use(self, limit: int) -> None:
        if limit != self._limit:  # not at each call: the model may set another number
            self._limit, wanted = limit, min(limit or self._most, self._most)
            self.varied |= wanted != self._most
            torch.set_num_threads(wanted)


def _is_deferred(ready: Prepared, options: Options) -> bool:
    if options.deferred is None:
        return ready.device.type != "cpu"
    return options.deferred


def _pass(
    begun: RunSoFar,
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fp32: dict[str, Tensor],
    options: Options,
    plain_outputs: list[Tensor] | None,
    failures: BackwardFailures | None = None,
) -> tuple[RunSoFar, bool]:
    """One pass, with a function mode if ``failures``; and whether it failed above dispatch."""
    step = options.step
    if step is not None:
        step.restart()
        step.on_loss = (failures or BackwardFailures()).watch
    journal = Journal(options.on_gap, options.on_op_calls)
    deferred, free = _is_deferred(ready, options), free_memory(ready.device)
    figures = PendingFigures(deferred=deferred, everywhere=bool(options.deferred), free_memory=free)
    lockstep = Lockstep(options.wide, figures)
    inputs, named = ready.inputs(args, kwargs)
    dense = [tensor for _, tensor in leaves((inputs, named)) if tensor.layout == torch.strided]
    observed = Pass(lockstep, journal.rows, dense, options.errors)
    observers = _observers(observed, options)
    seed_state(observed, ready.model, fp32, observers)
    seed_inputs(observed, (inputs, named), (args, kwargs), ready.device, observers)
    with ModuleStack(ready.model) as stack:
        places = Places(stack, None if step is None else lambda: step.phase)
        places.own(ready.model)
        recorder = Recorder(
            ready.application.dtype,
            lockstep,
            places,
            journal,
            errors=options.errors,
            observers=observers,
            emulation=options.emulation,
            breadcrumb=options.breadcrumb,
            timed=ready.device.type == "cpu",
        )
        rescue = None if failures is None else FunctionRescue(recorder.execution, places, failures)
        with kept_output(ready.model, options.probe) as probed:
            output, error = call_under(recorder, ready, inputs, named, options.seed, rescue, options.on_output)
        outputs = returned(output_parts(output), lockstep.twins)
        judged = outputs
        if options.probe is not None:
            judged = returned(probed, lockstep.twins)
        called = [name for name, _ in ready.model.named_modules() if name and stack.calls[name]]
        fields = recorder.finish(End(outputs, judged, error is None, recorder.drew, called))
    op_calls = journal.op_calls()
    if not options.keeps_op_times:
        op_calls = without_times(op_calls)
    explained = begun.with_fields(
        gaps=journal.gaps,
        op_calls=op_calls,
        uncalled_modules=uncalled_modules(ready.model, stack, recorder.input_storages),
        called_modules=called,
        function_mode=failures is not None,
        complete=error is None,
        emulated=options.emulation.reasons(),
        notes=[_UNKNOWN.format(op, why) for op, why in lockstep.failures.items()],
        **fields,
    )
    faults, draws = list(recorder.faults), None
    if error is None and not faults:
        draws = recorder.drew or failures is not None
    explained = msgspec.structs.replace(explained, is_explained=True, draws=draws, faults=faults)
    if error is not None:
        # An error that no op raised comes from above dispatch.
        above = error is not recorder.execution.raised and isinstance(error, Exception)
        if above and failures is not None and places.phase == "backward":
            failures.failed(error)
        exception = msgspec.structs.replace(describe_error(error, ready.model), phase=places.phase)
        return explained.with_fields(stopped_by=exception), above
    comparable = None
    if not (journal.gaps or explained.run.emulated or failures):
        comparable = plain_outputs
    return _with_output(explained, outputs, comparable, lockstep, options), False


def _observers(observed: Pass, options: Options) -> list[OpObserver]:
    """What looks at each op call; errors that are not computed are not followed."""
    made: list[OpObserver | None] = []
    if observed.errors != "none":
        made = [make(observed) for make in options.observers]
    return [*(observer for observer in made if observer is not None), DataFlow(observed)]


@observing()
def _with_output(
    explained: RunSoFar,
    outputs: list[Returned],
    plain_outputs: list[Tensor] | None,
    lockstep: Lockstep,
    options: Options,
) -> RunSoFar:
    """The run with its output compared: with the lockstep reference, bit by bit with the plain run.

    Numbers, arrays computed outside torch, and tensors that are converted for the comparison have
    no reference. Gradients and weights of a step of training have figures of their own.
    """
    tensors = [out.compared for out in outputs]
    error = None
    have_references = all(out.lost is None and out.tensor is out.compared for out in outputs)
    if options.errors != "none" and not lockstep.is_partial and have_references and options.step is None:
        compared = compare_outputs(tensors, [lockstep.twins.reference_of(tensor) for tensor in tensors])
        if compared.compared:
            error = compared.error
    perturbed = None
    if plain_outputs is not None:
        perturbed = not same_bits(tensors, plain_outputs)
    return explained.with_fields(perturbed=perturbed, lockstep_error=error)


def call_under(
    mode: DispatchMode,
    ready: Prepared,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    seed: int,
    inner: contextlib.AbstractContextManager[Any] | None = None,
    on_output: Callable[[Any], None] = lambda _output: None,
) -> tuple[Any, BaseException | None]:
    """The model's output under ``mode`` and ``inner``, or its exception; then ``on_output``."""
    seed_everything(seed)
    try:
        with ready.context(), compiled_code_in_eager(), warnings.catch_warnings():
            # The plain run has shown them. As errors, they would be gaps; some are of our hooks.
            warnings.simplefilter("ignore")
            with noting_made_tensors(), mode, inner or contextlib.nullcontext():
                output = call_model(ready.call, inputs, named)
    except BaseException as error:
        reraise_interrupt(error)
        return None, error
    on_output(output)
    return output, None


def uncalled_modules(model: nn.Module, stack: ModuleStack, input_storages: Iterable[int]) -> list[str]:
    """Modules with parameters that never ran and that no op read; of a subtree, only the root."""
    read, stream = set(input_storages), stream_of(model)
    streamed = set() if stream is None else stream.was_read
    used = {around for name, count in stack.calls.items() if count for around in (name, *paths_above(name))}
    with_parameters: set[str] = set()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners = list(paths_above(path))
        with_parameters.update(owners)
        if not owners or owners[0] in used:  # if a module is used, so are those above it
            continue
        if parameter.layout != torch.strided or storage_key(parameter) in read or path in streamed:
            used.update(owners)
    roots: dict[str, None] = {}
    for name, _ in model.named_modules():
        if name in with_parameters and name not in used and module_around(name, roots) is None:
            roots[name] = None
    return list(roots)
