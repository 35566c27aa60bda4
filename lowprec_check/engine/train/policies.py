"""Measures the gradients that FSDP2 and DDP accumulate in reduced precision, on one CPU rank, against plain fp32."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.engine.core.seed import seed_everything
from lowprec_check.engine.core.source_location import call_model
from lowprec_check.engine.model.plain_run import describe_error, reraise_interrupt
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.snapshot import Snapshot
from lowprec_check.engine.model.target import Target
from lowprec_check.engine.model.training import LossInputs, loss_of
from lowprec_check.engine.train.micro_batches import MicroBatches, ways_to_make
from lowprec_check.engine.train.one_rank import CannotMeasureError, check_fsdp2, check_rank, one_rank
from lowprec_check.errors import first_line, message_of, type_name
from lowprec_check.schema.training_policies import ComputesIn, PolicyGradient, Reduced
from lowprec_check.schema.verdict import Status

Gradients = dict[str, Tensor]
"""The gradient of each parameter, by its name; dense."""
OnPolicy = Callable[[PolicyGradient], None]

_SMALLEST = 1e-3
"""Share of the norm of all gradients that the gradient of one parameter must have for its error to count: that of a bias before a
softmax or a norm is zero but for rounding, and its relative error means nothing.
"""


class Parallel(NamedTuple):
    """A model inside FSDP2 or DDP."""

    model: nn.Module
    unreduced: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """A context for the micro-batches whose gradients are only accumulated."""
    check: Callable[[], Any] = bool
    """Raises an exception if a gradient was not reduced."""


class _Policy(NamedTuple):
    name: str
    computes_in: ComputesIn
    reduced: Reduced
    parallel: Callable[[nn.Module, bool], Parallel]
    """Puts a model inside FSDP2 or DDP; the flag says whether it has parameters without a gradient."""

    def entry(self, micro_batches: int, status: Status, **more: Any) -> PolicyGradient:
        return PolicyGradient(
            policy=self.name,
            computes_in=self.computes_in,
            reduced=self.reduced,
            micro_batches=micro_batches,
            status=status,
            **more,
        )


def measure_policies(target: Target, ready: Prepared, count: int, seed: int, on_policy: OnPolicy) -> None:
    """Call ``on_policy`` with the gradient of each policy, accumulated over ``count`` micro-batches.

    ``ready`` is the model of ``target`` in fp32 on the CPU, in training mode and with gradients. It is changed in place, and
    restored after each policy, since many models cannot be copied; so is what a process group changes in this process. An exception,
    or a policy that is not possible here, is the status of its entry.
    """
    snapshot = Snapshot(ready.model, target.inputs, parameters=True)
    steps = _Steps(target, ready, seed)
    with contextlib.ExitStack() as stack:
        stack.callback(snapshot.restore)
        try:
            check_rank()
            reference, batches = _reference(steps, count, snapshot)
            stack.enter_context(one_rank())
        except CannotMeasureError as error:
            _send(unmeasured([], count, message_of(error)), on_policy)
            return
        for policy in _POLICIES:
            on_policy(_measured(policy, steps, batches, reference))
            snapshot.rewind()
            gc.collect()  # FSDP2 keeps its copy of the weights in a cycle


def unmeasured(
    found: Sequence[PolicyGradient], count: int, reason: str, status: Status = "skipped"
) -> list[PolicyGradient]:
    """Entries for all policies after those of ``found``; the first of them has ``status``, the others were not reached."""
    rest = _POLICIES[len(found) :]
    return [policy.entry(count, "skipped" if index else status, reason=reason) for index, policy in enumerate(rest)]


def _send(entries: Sequence[PolicyGradient], on_policy: OnPolicy) -> None:
    for entry in entries:
        on_policy(entry)


def _reference(steps: _Steps, count: int, snapshot: Snapshot) -> tuple[Gradients, MicroBatches]:
    """The gradients of plain fp32, and the first kind of micro-batches on which they are finite."""
    why = ""
    for batches in ways_to_make(steps.target, count, steps.seed):
        try:
            steps.accumulate(Parallel(steps.ready.model), batches)
        except BaseException as error:
            reraise_interrupt(error)
            why = f"training in fp32 fails: {type_name(error)}: {first_line(message_of(error))}"
        else:
            found = _gradients(steps.ready.model)
            if not any(bool(gradient.any()) for gradient in found.values()):
                why = "the gradient of fp32 is zero"
            elif all(bool(gradient.isfinite().all()) for gradient in found.values()):
                return found, batches
            else:
                why = "the gradient of fp32 has NaN or Inf"
        finally:
            snapshot.rewind()
    raise CannotMeasureError(why)


class _Steps(NamedTuple):
    """Forward and backward passes of one target."""

    target: Target
    ready: Prepared
    seed: int

    def accumulate(
        self, parallel: Parallel, batches: MicroBatches, *, each_time: bool = False, autocast: bool = False
    ) -> None:
        """Accumulate the gradients of all micro-batches, reduced after the last one, or ``each_time``.

        Random draws are the same for each policy. The loss is divided by the number of micro-batches.
        """
        count = len(batches.batches)
        for index, batch in enumerate(batches.batches):
            seed_everything(self.seed + index)
            args, kwargs = self.ready.inputs(*batch.inputs)
            targets, _ = self.ready.inputs(batch.targets, {})
            reduces = each_time or index == count - 1
            with contextlib.nullcontext() if reduces else parallel.unreduced():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = call_model(parallel.model, args, kwargs)
                    loss = loss_of(self.target.loss, output, LossInputs(args, kwargs, targets)) / count
                loss.backward()
        parallel.check()


def _measured(policy: _Policy, steps: _Steps, batches: MicroBatches, reference: Gradients) -> PolicyGradient:
    new = functools.partial(policy.entry, len(batches.batches), batches=batches.made)
    model = steps.ready.model
    try:
        some_unused = len(reference) < sum(parameter.requires_grad for parameter in model.parameters())
        parallel = policy.parallel(model, some_unused)
        each, autocast = policy.reduced == "each time", policy.computes_in == "autocast bf16"
        steps.accumulate(parallel, batches, each_time=each, autocast=autocast)
        found = {name.removeprefix("module."): gradient for name, gradient in _gradients(parallel.model).items()}
    except CannotMeasureError as error:
        return new("skipped", reason=message_of(error))
    except BaseException as error:
        reraise_interrupt(error)
        return new("error", exception=describe_error(error, model))
    return _compared(new("ok"), found, reference)


# -- the policies


class _Root(nn.Module):
    """The module that FSDP2 shards, which it can do only once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)


def _fsdp2(param: torch.dtype | None, reduced: torch.dtype, model: nn.Module, _some_unused: bool) -> Parallel:
    """The whole model sharded by FSDP2, with this dtype of the parameters and of the reduction."""
    check_fsdp2()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    root: Any = _Root(model)
    mixed = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduced)
    fully_shard(root, mesh=init_device_mesh("cpu", (1,)), mp_policy=mixed)

    @contextlib.contextmanager
    def unreduced() -> Iterator[None]:
        root.set_requires_gradient_sync(False)
        yield
        root.set_requires_gradient_sync(True)

    return Parallel(root, unreduced)


def _ddp(hook: str | None, model: nn.Module, some_unused: bool) -> Parallel:
    """DDP with the communication hook of this name."""
    ddp: Any = nn.parallel.DistributedDataParallel(model, find_unused_parameters=some_unused)
    if hook is not None:
        ddp.register_comm_hook(None, _renamed(hook))
    return Parallel(ddp, ddp.no_sync, getattr(ddp, "_check_reducer_finalized", bool))


def _renamed(name: str) -> Callable[..., Any]:
    """The communication hook inside another function: DDP rejects the one for bf16 by its name, unless NCCL or XCCL is there."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook: Callable[..., Any] = getattr(default_hooks, name)

    def compress(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    compress.__annotations__.clear()  # DDP checks them, and here they are text
    return compress


_FSDP2 = "FSDP2 MixedPrecisionPolicy"
_BF16, _FP32 = torch.bfloat16, torch.float32
_ALL_BF16 = functools.partial(_fsdp2, _BF16, _BF16)
_COMPRESS_BF16 = functools.partial(_ddp, "bf16_compress_hook")
_COMPRESS_FP16 = functools.partial(_ddp, "fp16_compress_hook")

_POLICIES = (
    _Policy(f"{_FSDP2}(param_dtype=bf16, reduce_dtype=fp32)", "bf16", "once", functools.partial(_fsdp2, _BF16, _FP32)),
    _Policy(f"{_FSDP2}(param_dtype=bf16, reduce_dtype=bf16)", "bf16", "once", _ALL_BF16),
    _Policy(f"{_FSDP2}(param_dtype=bf16, reduce_dtype=bf16)", "bf16", "each time", _ALL_BF16),
    _Policy(f"{_FSDP2}(reduce_dtype=bf16)", "fp32", "once", functools.partial(_fsdp2, None, _BF16)),
    _Policy("DDP without a hook", "autocast bf16", "once", functools.partial(_ddp, None)),
    _Policy("DDP bf16_compress_hook", "fp32", "once", _COMPRESS_BF16),
    _Policy("DDP bf16_compress_hook", "fp32", "each time", _COMPRESS_BF16),
    _Policy("DDP fp16_compress_hook", "fp32", "once", _COMPRESS_FP16),
    _Policy("DDP fp16_compress_hook", "fp32", "each time", _COMPRESS_FP16),
)
"""What is measured, in this order."""


# -- what they did


def _gradients(model: nn.Module) -> Gradients:
    found = {}
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if gradient is not None:
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            found[name] = local.detach().to_dense() if local.layout != torch.strided else local.detach()
    return found


def _compared(entry: PolicyGradient, found: Gradients, reference: Gradients) -> PolicyGradient:
    """``entry`` with the errors of its gradients; one that is missing counts as zeros."""
    norms: dict[str, float] = {}
    errors: dict[str, float] = {}
    elements = underflow = overflow = 0
    for name, exact in reference.items():
        gradient = found.get(name, torch.zeros_like(exact))
        norms[name] = float(exact.double().norm())
        errors[name] = float((gradient.double() - exact.double()).norm())
        elements += exact.numel()
        underflow += int(((gradient == 0) & (exact != 0)).sum())
        overflow += int((~gradient.isfinite()).sum())
    if "fp16" in entry.policy:
        entry = msgspec.structs.replace(entry, underflow=underflow / elements, overflow=overflow / elements)
    if overflow:
        return msgspec.structs.replace(entry, status="nonfinite")
    total = math.hypot(*norms.values())
    relative = {name: errors[name] / norm for name, norm in norms.items() if norm >= _SMALLEST * total}
    worst = max(relative, key=lambda name: relative[name])
    error = math.hypot(*errors.values()) / total
    return msgspec.structs.replace(entry, gradient_error=error, worst_parameter=worst, worst_error=relative[worst])
