"""The instrumented part of a run: explains it op by op."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.engine.core.compiled import compiled_code_in_eager
from lowprec_check.engine.core.devices import MemoryLimit, free_memory, seed_everything
from lowprec_check.engine.core.dispatch_mode import DispatchMode, observing
from lowprec_check.engine.core.output_comparison import compare_outputs, same_bits
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.source_location import ModuleStack, call_model
from lowprec_check.engine.model.plain_run import (
    ModuleOutput,
    describe_error,
    kept_output,
    output_parts,
)
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.streamed_weights import reads_forgotten, stream_of
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.trace.execution import Emulation
from lowprec_check.engine.trace.function_mode import BackwardFailures, FunctionRescue, SteppingCall
from lowprec_check.engine.trace.journal import Instrumented, Journal
from lowprec_check.engine.trace.lockstep import Lockstep
from lowprec_check.engine.trace.output_budget import Returned, error_budget, returned
from lowprec_check.engine.trace.pending_figures import PendingFigures
from lowprec_check.engine.trace.places import Places
from lowprec_check.engine.trace.recorder import Recorder
from lowprec_check.engine.trace.seeds import seed_inputs, seed_state
from lowprec_check.engine.trace.twins import storage_key
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.measures import ErrorBudget, Errors
from lowprec_check.schema.module_paths import module_around, paths_above
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.scan_result import Gap

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
    changes_parameters: bool = False
    """Whether calls write to parameters."""
    budget: bool = False
    """Whether to find out which ops the error of the output comes from; needs both errors of each
    op.
    """
    budget_limit: MemoryLimit | None = None
    """Memory that this may take, beside half of what is free."""
    fp32_outputs: list[Tensor] | None = None
    """The tensors in the output of the plain fp32 run, or of ``probe``."""
    probe: ModuleOutput | None = None
    """The output of a module that the budget is about, if that of the model holds nothing to
    compare.
    """
    autocast: bool = False
    """Whether the run is under autocast."""
    step: SteppingCall | None = None
    """The call, if it is a step of training."""
    deferred: bool | None = None
    """Whether figures are read in batches; by default on an accelerator."""


def fp32_state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by name, before a cast; no copies."""
    state = {name: parameter.data for name, parameter in model.named_parameters(remove_duplicate=False)}
    return state | dict(model.named_buffers(remove_duplicate=False))


def run_instrumented(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fp32: dict[str, Tensor],
    options: Options,
    plain_outputs: list[Tensor] | None = None,
) -> Instrumented:
    """Run with a dispatch mode; if an exception came from above dispatch, run again with a function
    mode too.

    A derivative that fails above dispatch takes one more run for each function.
    """
    run = functools.partial(_pass, ready, args, kwargs, fp32, options)
    share = _ShareOfCores(options.breadcrumb)
    snapshot = Snapshot(ready.model, (args, kwargs), parameters=options.changes_parameters)
    with reads_forgotten(ready.model), contextlib.ExitStack() as at_end:
        at_end.callback(snapshot.restore)
        found, failed_above = run(plain_outputs)
        failures = BackwardFailures()
        while failed_above:
            snapshot.rewind()
            found, failed_above = run(None, failures)
            failed_above = failed_above and failures.learn()
        if _is_to_trace(found, ready, options):
            snapshot.rewind()
            options = options._replace(deferred=False)
            found, _ = _pass(
                ready, args, kwargs, fp32, options, plain_outputs, failures if found.function_mode else None
            )
        proven = [gap for gap in found.gaps if gap.phase != "backward" or gap.op != failures.unproven]
        perturbed = None if share.varied else found.perturbed  # sums may be added in another order
        return msgspec.structs.replace(found, gaps=proven, perturbed=perturbed)


class _ShareOfCores:
    """Uses as many threads as the supervisor says in the ``breadcrumb``, as other processes run
    beside this one or end.
    """

    def __init__(self, breadcrumb: Breadcrumb | None) -> None:
        self._most, self._limit = torch.get_num_threads(), 0
        self.varied = False
        """Whether the number of threads was not always that of the process."""
        if breadcrumb is not None:
            self._use(breadcrumb.threads)
            breadcrumb.watch_threads = self._use

    def _use(self, limit: int) -> None:
        if limit != self._limit:  # the model may set another number
            self._limit, wanted = limit, min(limit or self._most, self._most)
            self.varied |= wanted != self._most
            torch.set_num_threads(wanted)


def _is_deferred(ready: Prepared, options: Options) -> bool:
    if options.deferred is None:
        return ready.device.type != "cpu"
    return options.deferred


def _is_to_trace(found: Instrumented, ready: Prepared, options: Options) -> bool:
    """Whether one more pass is to find out which Inf and NaN reach the output: while figures are
    deferred, none are followed.
    """
    calls = found.op_calls
    return found.complete and _is_deferred(ready, options) and any((*calls.introduced_inf, *calls.introduced_nan))


def _pass(
    ready: Prepared,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fp32: dict[str, Tensor],
    options: Options,
    plain_outputs: list[Tensor] | None,
    failures: BackwardFailures | None = None,
) -> tuple[Instrumented, bool]:
    """One pass, with a function mode too if ``failures`` are given; the second value is true if an
    exception came from above dispatch.
    """
    step = options.step
    if step is not None:
        step.restart()
        step.on_loss = (failures or BackwardFailures()).watch
    journal = Journal(options.on_gap, options.on_op_calls)
    figures = PendingFigures(
        deferred=_is_deferred(ready, options), everywhere=bool(options.deferred), free_memory=free_memory(ready.device)
    )
    lockstep = Lockstep(options.wide, _tape_limit(options, ready.device) if options.budget else None, figures)
    inputs, named = ready.inputs(args, kwargs)
    seed_state(lockstep, ready.model, fp32, journal.rows)
    journal.rows += seed_inputs(lockstep, (inputs, named), (args, kwargs), ready.device)
    with ModuleStack(ready.model) as stack:
        places = Places(stack, None if step is None else lambda: step.phase)
        places.own(ready.model)
        recorder = Recorder(
            ready.application.dtype,
            lockstep,
            places,
            journal,
            errors=options.errors,
            emulation=options.emulation,
            breadcrumb=options.breadcrumb,
            timed=ready.device.type == "cpu",
        )
        recorder.flow.add_inputs(tensor for _, tensor in leaves((inputs, named)) if tensor.layout == torch.strided)
        rescue = None
        if failures is not None:
            rescue = FunctionRescue(recorder.execution, places, failures)
        with kept_output(ready.model, options.probe) as probed:
            output, error = call_under(recorder, ready, inputs, named, options.seed, rescue, options.on_output)
        outputs = returned(output_parts(output), lockstep.twins)
        held = outputs
        if options.probe is not None:
            held = returned(probed, lockstep.twins)
        recorder.finish([its.tensor for its in outputs], [its.tensor for its in held], complete=error is None)
    called = [name for name, _ in ready.model.named_modules() if name and stack.calls[name]]
    found = Instrumented(
        gaps=journal.gaps,
        budget=_budget(held, error, recorder, options, called) if options.budget else None,
        op_calls=journal.op_calls(),
        magnitudes=recorder.magnitudes.result(),
        uncalled_modules=uncalled_modules(ready.model, stack, recorder.input_storages),
        called_modules=called,
        function_mode=failures is not None,
        complete=error is None,
        draws=recorder.drew or failures is not None,
        emulated=options.emulation.reasons(),
        faults=tuple(recorder.faults),
        notes=tuple(itertools.starmap(_UNKNOWN.format, lockstep.failures.items())),
    )
    if error is not None:
        above = error is not recorder.execution.raised and isinstance(error, Exception)
        if above and failures is not None and places.phase == "backward":
            failures.failed(error)
        exception = msgspec.structs.replace(describe_error(error, ready.model), phase=places.phase)
        return msgspec.structs.replace(found, exception=exception), above
    comparable = plain_outputs if not (found.gaps or found.emulated or failures) else None
    return _with_output(found, outputs, comparable, lockstep, options), False


def _tape_limit(options: Options, device: torch.device) -> MemoryLimit:
    """The memory that an error tape may hold."""
    half = MemoryLimit.half_of(free_memory(device))
    return min(half, options.budget_limit or half, key=lambda limit: limit.size)


@observing()
def _budget(
    held: list[Returned], error: BaseException | None, recorder: Recorder, options: Options, called: list[str]
) -> ErrorBudget:
    """The error budget of the tensors in the output; ``called`` are the modules that were called."""
    if error is not None:
        budget = ErrorBudget(reason="the model raised an exception before its end")
    else:
        fp32 = None if recorder.drew else options.fp32_outputs
        try:
            budget = error_budget(
                recorder.lockstep, held, fp32, modules=called, autocast=options.autocast, seed=options.seed
            )
        except Exception as failure:  # the explanation op by op must not be lost
            why = f"computing it failed: {type_name(failure)}: {first_line(message_of(failure))}"
            budget = ErrorBudget(reason=why)
    if not any(row.flips or row.to_python for row in recorder.journal.rows):
        budget = msgspec.structs.replace(budget, decisions=0.0)  # the reference differs from fp32 for another reason
    return budget


@observing()
def _with_output(
    found: Instrumented,
    outputs: list[Returned],
    plain_outputs: list[Tensor] | None,
    lockstep: Lockstep,
    options: Options,
) -> Instrumented:
    """``found`` with the output compared: with the lockstep reference, if it ran, and bit by bit
    with the plain run.

    Numbers, arrays computed outside torch, and tensors that are converted for the comparison have
    no reference. What a step of training computed is not compared with the reference: gradients and
    weights have figures of their own.
    """
    tensors = [its.compared for its in outputs]
    error = None
    known = all(its.lost is None and its.tensor is its.compared for its in outputs)
    if options.errors != "none" and not lockstep.is_partial and known and options.step is None:
        compared = compare_outputs(tensors, [lockstep.twins.reference_of(tensor) for tensor in tensors])
        error = compared.error if compared.compared else None
    perturbed = None
    if plain_outputs is not None:
        perturbed = not same_bits(tensors, plain_outputs)
    return msgspec.structs.replace(found, perturbed=perturbed, lockstep_error=error)


def call_under(
    mode: DispatchMode,
    ready: Prepared,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    seed: int,
    inner: contextlib.AbstractContextManager[Any] | None = None,
    on_output: Callable[[Any], None] = lambda _output: None,
) -> tuple[Any, BaseException | None]:
    """The output of the model under ``mode``, and in it ``inner``, in eager mode; or the exception
    that it raises. ``on_output`` is called with the output after ``mode`` has ended.
    """
    seed_everything(seed)
    try:
        with ready.context(), compiled_code_in_eager(), warnings.catch_warnings():
            # Compiled modules warn that there are global hooks, which are ours.
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
            with mode, inner or contextlib.nullcontext():
                output = call_model(ready.call, inputs, named)
    except BaseException as error:
        reraise_interrupt(error)
        return None, error
    on_output(output)
    return output, None


def uncalled_modules(model: nn.Module, stack: ModuleStack, input_storages: Iterable[int]) -> list[str]:
    """Modules with parameters that never ran and whose parameters no op read; of a whole subtree,
    only the root.
    """
    read, stream = set(input_storages), stream_of(model)
    if stream is not None:
        was_read = stream.was_read
    else:
        was_read = set()
    used = {around for name, count in stack.calls.items() if count for around in (name, *paths_above(name))}
    with_parameters: set[str] = set()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners = list(paths_above(path))
        with_parameters.update(owners)
        if not owners or owners[0] in used:  # and so are those above it
            continue
        if parameter.layout != torch.strided or storage_key(parameter) in read or path in was_read:
            used.update(owners)
    found: dict[str, None] = {}
    for name, _ in model.named_modules():
        if name in with_parameters and name not in used and module_around(name, found) is None:
            found[name] = None
    return list(found)
