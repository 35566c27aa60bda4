"""The instrumented part of a run: explains it op by op."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.engine.core.compiled import compiled_code_in_eager
from lowprec_check.engine.core.devices import MemoryLimit, free_memory
from lowprec_check.engine.core.dispatch_mode import DispatchMode
from lowprec_check.engine.core.output_comparison import compare_outputs, same_bits
from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.core.source_location import ModuleStack, call_model
from lowprec_check.engine.model.memory import StorageCounter
from lowprec_check.engine.model.plain_run import (
    ModuleOutput,
    describe_error,
    kept_output,
    output_parts,
    reraise_interrupt,
)
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.trace.dispatched_call import Emulation
from lowprec_check.engine.trace.extra_modes import BackwardFailures, FunctionRescue, SteppingCall
from lowprec_check.engine.trace.journal import Journal
from lowprec_check.engine.trace.lockstep import Lockstep, seed_inputs, seed_state
from lowprec_check.engine.trace.output_budget import error_budget
from lowprec_check.engine.trace.pending_figures import PendingFigures
from lowprec_check.engine.trace.places import Places
from lowprec_check.engine.trace.recorder import Recorder
from lowprec_check.engine.trace.twins import Returned, returned, storage_key
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.process.breadcrumb import Breadcrumb
from lowprec_check.schema.base import Struct
from lowprec_check.schema.measures import ErrorBudget, Errors, ModuleMagnitudes
from lowprec_check.schema.module_paths import module_around, paths_above
from lowprec_check.schema.op_calls import OpCalls, to_columns
from lowprec_check.schema.scan_result import Gap
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo

# -- What the instrumented part of a run found. Sent from the worker as it is


class Instrumented(Struct, frozen=True, kw_only=True, tag="explained"):
    """The result of the instrumented part; a worker sends it."""

    gaps: list[Gap]
    op_calls: OpCalls
    magnitudes: list[ModuleMagnitudes] = []
    uncalled_modules: list[str]
    called_modules: list[str]
    function_mode: bool = False
    complete: bool = True
    exception: ExceptionInfo | None = None
    perturbed: bool | None = None
    budget: ErrorBudget | None = None
    """Where the error of the output comes from, if requested."""
    lockstep_error: ErrorStats | None = None
    """Error of the output against the lockstep reference, which uses the random values and decisions of the run."""
    emulated: dict[str, str] = {}
    peak_memory_bytes: int | None = None
    """Peak of the run's own tensors, if requested."""
    faults: tuple[str, ...] = ()
    """Failures of the instruments themselves."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    incomplete_because: str | None = None
    """Why it did not run, if it did not."""

    @classmethod
    def not_run(cls, why: str) -> Instrumented:
        """The result where nothing could be run."""
        nothing: list[str] = []
        return cls(
            gaps=[],
            op_calls=to_columns([]),
            uncalled_modules=nothing,
            called_modules=nothing,
            complete=False,
            incomplete_because=why,
        )


# -- The instrumented part of a run: explains it op by op


class Options(NamedTuple):
    """Options of the instrumented part."""

    errors: Errors = "both"
    wide: torch.dtype = torch.float32
    emulation: Emulation = Emulation()
    breadcrumb: Breadcrumb | None = None
    on_gap: Callable[[Gap], None] | None = None
    on_op_calls: Callable[[OpCalls], None] | None = None
    seed: int = 0
    count_memory: bool = False
    changes_parameters: bool = False
    """Whether calls write to parameters."""
    budget: bool = False
    """Whether to find out which ops the error of the output comes from; needs both errors of each op."""
    budget_limit: MemoryLimit | None = None
    """Memory that this may take, beside half of what is free."""
    fp32_outputs: list[Tensor] | None = None
    """The tensors in the output of the plain fp32 run, or of ``probe``."""
    probe: ModuleOutput | None = None
    """The output of a module that the budget is about, if that of the model holds nothing to compare."""
    autocast: bool = False
    """Whether the run is under autocast."""
    step: SteppingCall | None = None
    """The call, if it is a step of training."""
    deferred: bool = False
    """Whether figures are read in batches on a CPU too, as they are on an accelerator."""


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
    """Run with a dispatch mode; if an exception came from above dispatch, run again with a function mode too.

    A derivative that fails above dispatch takes one more run for each function.
    """
    model_call = _ModelCall(ready, args, kwargs, fp32)
    snapshot = Snapshot(ready.model, (args, kwargs), parameters=options.changes_parameters)
    try:
        found, failed_above = _pass(model_call, options, plain_outputs)
        failures = BackwardFailures()
        while failed_above:
            snapshot.rewind()
            found, failed_above = _pass(model_call, options, None, failures)
            failed_above = failed_above and failures.learn()
        proven = [gap for gap in found.gaps if gap.phase != "backward" or gap.op != failures.unproven]
        return found if len(proven) == len(found.gaps) else msgspec.structs.replace(found, gaps=proven)
    finally:
        snapshot.restore()


class _ModelCall(NamedTuple):
    """The call to instrument: the prepared model, its inputs and its state in fp32."""

    ready: Prepared
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fp32: dict[str, Tensor]


def _pass(
    model_call: _ModelCall,
    options: Options,
    plain_outputs: list[Tensor] | None,
    failures: BackwardFailures | None = None,
) -> tuple[Instrumented, bool]:
    """One pass, with a function mode too if ``failures`` are given; the second value is true if an exception came from above
    dispatch.
    """
    ready, step = model_call.ready, options.step
    if step is not None:
        step.restart()
        step.on_loss = (failures or BackwardFailures()).watch
    journal = Journal(options.on_gap, options.on_op_calls)
    figures = PendingFigures(deferred=options.deferred or ready.device.type != "cpu", everywhere=options.deferred)
    lockstep = Lockstep(options.wide, _tape_limit(ready, options) if options.budget else None, figures)
    inputs, named = ready.inputs(model_call.args, model_call.kwargs)
    journal.rows += seed_state(lockstep, ready.model, model_call.fp32)
    seed_inputs(lockstep, (inputs, named), (model_call.args, model_call.kwargs), ready.device)
    counter = StorageCounter(ready, inputs, named) if options.count_memory else None
    with ModuleStack(ready.model) as stack:
        places = Places(stack, None if step is None else lambda: step.phase)
        places.own(ready.model)
        recorder = Recorder(
            ready.application.dtype,
            lockstep,
            stack,
            journal,
            errors=options.errors,
            emulation=options.emulation,
            breadcrumb=options.breadcrumb,
            counter=counter,
            timed=ready.device.type == "cpu",
            places=places,
        )
        recorder.flow.add_inputs(tensor for _, tensor in leaves((inputs, named)) if tensor.layout == torch.strided)
        rescue = None if failures is None else FunctionRescue(recorder, failures)
        with kept_output(ready.model, options.probe) as probed:
            output, error = call_under(recorder, ready, inputs, named, options.seed, rescue)
        outputs = returned(output_parts(output), lockstep.twins)
        recorder.finish([its.tensor for its in outputs])
    held = outputs if options.probe is None else returned(probed, lockstep.twins)
    budget = _budget(held, error, lockstep, options, recorder.drew) if options.budget else None
    if budget is not None and not any(row.flips or row.to_python for row in journal.rows):
        budget = msgspec.structs.replace(budget, decisions=0.0)  # the reference differs from fp32 for another reason
    found = Instrumented(
        gaps=journal.gaps,
        budget=budget,
        op_calls=journal.op_calls(),
        magnitudes=recorder.magnitudes.result(),
        uncalled_modules=_uncalled(ready.model, stack, recorder.input_storages),
        called_modules=[name for name, _ in ready.model.named_modules() if name and stack.calls[name]],
        function_mode=failures is not None,
        complete=error is None,
        emulated=options.emulation.reasons(),
        faults=tuple(recorder.faults),
    )
    if error is not None:
        above = error is not recorder.execution.raised and isinstance(error, Exception)
        if above and failures is not None and places.phase == "backward":
            failures.failed(error)
        exception = msgspec.structs.replace(describe_error(error, ready.model), phase=places.phase)
        return msgspec.structs.replace(found, exception=exception), above
    comparable = plain_outputs if not (found.gaps or found.emulated or failures) else None
    found = _with_output(found, outputs, comparable, lockstep if options.errors != "none" else None, step)
    return msgspec.structs.replace(found, peak_memory_bytes=counter.peak if counter is not None else None), False


def _tape_limit(ready: Prepared, options: Options) -> MemoryLimit:
    """Memory for the tape of the error budget."""
    half = MemoryLimit.half_of(free_memory(ready.device))
    return min(half, options.budget_limit or half, key=lambda limit: limit.size)


def _budget(
    held: list[Returned], error: BaseException | None, lockstep: Lockstep, options: Options, drew: bool
) -> ErrorBudget:
    """The error budget of the tensors in the output."""
    if error is not None:
        return ErrorBudget(reason="the model raised an exception before its end")
    try:
        fp32 = None if drew else options.fp32_outputs
        return error_budget(lockstep, held, fp32, autocast=options.autocast, seed=options.seed)
    except Exception as failure:  # the explanation op by op must not be lost
        return ErrorBudget(reason=f"computing it failed: {type_name(failure)}: {first_line(message_of(failure))}")


def _with_output(
    found: Instrumented,
    outputs: list[Returned],
    plain_outputs: list[Tensor] | None,
    lockstep: Lockstep | None,
    step: SteppingCall | None,
) -> Instrumented:
    """``found`` with the output compared: with the lockstep reference, if it ran, and bit by bit with the plain run.

    Numbers, arrays computed outside torch, and tensors that are converted for the comparison have no reference. What a ``step``
    computed is not compared with the reference: gradients and weights have figures of their own.
    """
    tensors = [its.compared for its in outputs]
    known = all(its.lost is None and its.tensor is its.compared for its in outputs)
    found = msgspec.structs.replace(
        found, perturbed=None if plain_outputs is None else not same_bits(tensors, plain_outputs)
    )
    if lockstep is None or lockstep.is_partial or not known or step is not None:
        return found
    compared = compare_outputs(tensors, [lockstep.twins.reference_of(tensor) for tensor in tensors])
    return msgspec.structs.replace(found, lockstep_error=compared.error if compared.compared else None)


def call_under(
    mode: DispatchMode,
    ready: Prepared,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    seed: int,
    inner: contextlib.AbstractContextManager[Any] | None = None,
) -> tuple[Any, BaseException | None]:
    """The output of the model under ``mode``, and in it ``inner``, in eager mode; or the exception that it raises."""
    seed_everything(seed)
    try:
        with (
            ready.context(),
            compiled_code_in_eager(),
            _without_warning_of_hooks(),
            mode,
            inner or contextlib.nullcontext(),
        ):
            return call_model(ready.call, inputs, named), None
    except BaseException as error:
        reraise_interrupt(error)
        return None, error


@contextlib.contextmanager
def _without_warning_of_hooks() -> Iterator[None]:
    """Compiled modules warn that there are global hooks, which are ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        yield


def _uncalled(model: nn.Module, stack: ModuleStack, input_storages: Iterable[int]) -> list[str]:
    """Modules with parameters that never ran and whose parameters no op read; of a whole subtree, only the root."""
    read = set(input_storages)
    used = {around for name, count in stack.calls.items() if count for around in (name, *paths_above(name))}
    with_parameters: set[str] = set()
    for path, parameter in model.named_parameters(remove_duplicate=False):
        owners = list(paths_above(path))
        with_parameters.update(owners)
        if not owners or owners[0] in used:  # and so are those above it
            continue
        if parameter.layout != torch.strided or storage_key(parameter) in read:
            used.update(owners)
    found: dict[str, None] = {}
    for name, _ in model.named_modules():
        if name in with_parameters and name not in used and module_around(name, found) is None:
            found[name] = None
    return list(found)
