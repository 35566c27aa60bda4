"""Trials of a source of the user's, in a process of their own: its plain runs, its bits in fp32, and what its expressions give."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.fixes.seen_values import Places, SourceTrial
from lowprec_check.engine.machine import Machine, environment, prepared_runs, version
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.user_code import reraise_interrupt
from lowprec_check.engine.model.value_probe import probed, start_probing
from lowprec_check.engine.run.isolation import isolated
from lowprec_check.engine.run.model_info import describe_target
from lowprec_check.engine.run.preparation import on_device
from lowprec_check.engine.run.target_runs import RunOptions, open_runs
from lowprec_check.engine.run.target_source import TargetSource
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import REFERENCE
from lowprec_check.schema.scan_result import ScanResult


def growing_trial(
    source: TargetSource, isolation: Isolation | None, options: ScanOptions, *, analyzed: bool
) -> Iterator[SourceTrial]:
    """One trial: the model runs plain in each precision, also on further inputs, and is ``analyzed`` op by op if asked for."""
    machine, isolation, settings = _prepared(source, isolation, options)
    bits = _isolated(source, isolation, machine, lambda: _bits(source, machine.runs_on, options.seed))
    with open_runs(source, settings, isolation) as runs:
        found = [runs.reference(instrumented=False)]
        for name in options.names_of("precisions"):
            found.append(runs.run(name, instrumented=analyzed))
    result = ScanResult(
        tool=f"lowprec-check {version()}",
        target=source.name,
        model=describe_target(source.target, found[0], trains=False),
        environment=machine.environment,
        options=options.saved(isolation),
        runs=found,
    )
    yield SourceTrial(result=conclude(result) if analyzed else result, outputs=bits.outputs, gradients=bits.gradients)


def growing_probe(source: TargetSource, isolation: Isolation | None, options: ScanOptions) -> Iterator[SourceTrial]:
    """What the expressions of a source with probes give in fp32 and in each precision, as far as the model runs in it."""
    machine, isolation, _ = _prepared(source, isolation, options)
    names = options.names_of("precisions")
    bits = _isolated(source, isolation, machine, lambda: _bits(source, machine.runs_on, options.seed))
    found = _isolated(source, isolation, machine, lambda: _probed(source, machine.runs_on, names, options.seed))
    yield SourceTrial(outputs=bits.outputs, gradients=bits.gradients, seen=found.seen, buffers=found.buffers)


def _prepared(
    source: TargetSource, isolation: Isolation | None, options: ScanOptions
) -> tuple[Machine, Isolation, RunOptions]:
    device = options.device_name
    machine, isolation = prepared_runs(source, isolation, device, lambda: Machine(environment=environment(device)))
    settings = RunOptions(
        device=machine.runs_on,
        budget=options.budget,
        tolerance=options.tolerance,
        seed=options.seed,
        without_kernel=tuple(options.without_kernel),
        further_inputs=options.further_inputs,
        timed=False,
    )
    return machine, isolation, settings


def _isolated(source: TargetSource, isolation: Isolation, machine: Machine, function: Any) -> SourceTrial:
    how = source.isolation_of_functions(isolation, machine.runs_on)
    return isolated(function, "fork" if how == "fork" else "none", SourceTrial)


# -- What runs in a fork


def _ready(target: Target, precision: str, device: str) -> contextlib.AbstractContextManager[Any]:
    return prepared(
        target.model, PRECISIONS.get(precision), torch.device(device), call=target.call(), inputs=target.inputs
    )


def _probed(source: TargetSource, device: str, precisions: Iterable[str], seed: int) -> SourceTrial:
    target, seen = source.forked(), dict[str, Places]()
    with on_device(target, torch.device(device)):
        for name in (REFERENCE, *precisions):
            start_probing()
            with _ready(target, name, device) as ready:
                try:
                    run_once(ready, target.args, target.kwargs, seed)
                except BaseException as error:
                    reraise_interrupt(error)
            seen[name] = probed()
    return SourceTrial(seen=seen, buffers=_rounded_buffers(target.model))


def _rounded_buffers(model: nn.Module) -> dict[str, list[str]]:
    """The floating buffers that half or bfloat16 cannot hold, by the file and class of their module."""
    found: dict[str, list[str]] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32 and any(
                not torch.equal(buffer.to(low).float(), buffer) for low in (torch.half, torch.bfloat16)
            ):
                code = getattr(type(module).__init__, "__code__", None)
                key = f"{getattr(code, 'co_filename', '')}:{type(module).__name__}"
                if name not in found.setdefault(key, []):
                    found[key].append(name)
    return found


def _bits(source: TargetSource, device: str, seed: int) -> SourceTrial:
    """The digests of outputs and gradients in fp32, where two calls give the same."""
    target = source.forked()
    with on_device(target, torch.device(device)), _ready(target, REFERENCE, device) as ready:
        digest = functools.partial(_digests, ready, target, seed)
        (outputs, gradients), again = digest(), digest()
    return SourceTrial(
        outputs=outputs if outputs == again[0] else "", gradients=gradients if gradients == again[1] else ""
    )


def _digests(ready: Any, target: Target, seed: int) -> tuple[str, str]:
    for parameter in ready.model.parameters():
        parameter.grad = None
    with torch.enable_grad():
        try:
            output, _ = run_once(ready, target.args, target.kwargs, seed)
        except BaseException as error:
            reraise_interrupt(error)
            with torch.no_grad():
                output, _ = run_once(ready, target.args, target.kwargs, seed)
        tensors = output_tensors(output)
        bits, floating = _digest(tensors), [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        try:
            torch.autograd.backward(floating, [torch.randn(t.shape, generator=generator).to(t) for t in floating])
        except BaseException as error:
            reraise_interrupt(error)
            return bits, ""
    gradients = [p.grad for p in ready.model.parameters() if p.grad is not None]
    return bits, _digest(gradients) if gradients else ""


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.layout == torch.strided and tensor.numel():
            values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            found.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
    return found.hexdigest()
