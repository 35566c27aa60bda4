"""Runs a program with its models in other precisions, and compares each call with fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.inputs import tensors_named
from lowprec_check.engine.model.prepared import Application, application_of
from lowprec_check.features.programs.assignments import Assignment, Assignments
from lowprec_check.features.programs.program_scan import CallError
from lowprec_check.features.programs.watching import CallWatcher
from lowprec_check.process import system
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.torchkit.devices import synchronize
from lowprec_check.torchkit.floating_dtypes import NARROW, torch_dtype
from lowprec_check.torchkit.output_comparison import compare_outputs
from lowprec_check.torchkit.pytree import leaves, map_tensors, stored

MOST_ELEMENTS = 1 << 20
"""Of an output that are compared: of a larger one so many, evenly spaced."""


class ProgramCaster(CallWatcher):
    """Casts each model where it is called first, and its inputs and outputs at every call."""

    def __init__(self, assigned: Assignments, methods: Iterable[tuple[str, str]], outputs: Path) -> None:
        """``methods`` count as calls; ``outputs`` has those of fp32, or will have them."""
        super().__init__()
        self.on_progress: Any = None
        self.errors: list[CallError] = []
        self.problem = ""
        """The exception that ended the program."""
        self.seconds = 0.0
        """In calls of models, without their casts of weights."""
        self._choices, self._methods, self._outputs = assigned, set(methods), outputs
        self._saves = not assigned
        self._applied: dict[str, Application] = {}
        self._counts: dict[str, int] = {}

    def counts(self, module: nn.Module, method: str) -> bool | None:
        """Whether a method was found to count."""
        return (self.key_of(module, keep=False), method) in self._methods

    def note(self, module: nn.Module, method: str, args: Any, kwargs: Any, line: str | None) -> None:
        """Nothing is kept."""

    def computed(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """The result of a call in the precision of the model, in the dtypes that it has in fp32."""
        key = self.key_of(module)
        with self._lock:
            number = self._counts[key] = self._counts.get(key, 0) + 1
        assignment, device = self._choices.get(key), next(module.parameters()).device
        application = None
        if assignment is not None and assignment.precision != "fp32":
            application = self._application(key, assignment, module)
        synchronize(device)
        start = system.monotonic()
        if application is None:
            output = call(module, *args, **kwargs)
        else:
            args, kwargs = _cast(application, args, kwargs)
            with application.context(device.type):
                output = call(module, *args, **kwargs)
            output = map_tensors(output, lambda tensor: tensor.float() if tensor.dtype in NARROW else tensor)
        synchronize(device)
        self.seconds += system.monotonic() - start
        self._compare(key, number, [_sample(tensor) for _, tensor in leaves(output)])
        return output

    def weight_bytes(self) -> int:
        """The memory of the weights of all models that were called."""
        tensors = [tensor for module, _ in self._keys.values() for tensor in (*module.parameters(), *module.buffers())]
        return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in stored(tensors)}.values())

    def has_applied(self, key: str, assignment: Assignment) -> bool:
        """Whether a model has the precision that the program itself was to give it."""
        precision = PRECISIONS.get(assignment.precision)
        if precision.kind == "autocast":
            return any(error.error != 0 for error in self.errors if error.model == key)
        dtype = torch_dtype(precision.format)
        module = next((module for module, other in self._keys.values() if other == key), None)
        return precision.kind != "cast" or module is None or any(p.dtype == dtype for p in module.parameters())

    def _application(self, key: str, assignment: Assignment, module: nn.Module) -> Application:
        if key not in self._applied:
            application = application_of(PRECISIONS.get(assignment.precision))
            application.keep_fp32_inputs = tuple(assignment.keep_fp32_inputs)
            with torch.no_grad():
                application.apply(module, next(module.parameters()).device.type, assignment.keep_fp32)
            self._applied[key] = application
        return self._applied[key]

    def _compare(self, key: str, number: int, output: list[Tensor]) -> None:
        file = self._outputs / f"{key}-{number}.pt"
        if self._saves:
            torch.save(output, file)
            return
        if not file.exists():
            self.errors.append(CallError(key, number, None, note="fp32 makes no such call"))
            return
        compared = compare_outputs(output, torch.load(file))
        error = compared.distance if math.isfinite(compared.distance) else None
        self.errors.append(CallError(key, number, error, compared.nonfinite, compared.note or ""))


def _cast(application: Application, args: Any, kwargs: Any) -> Any:
    """Inputs in the dtypes of a precision, but for those that stay in fp32."""
    fp32 = {id(tensor) for tensor in tensors_named(application.keep_fp32_inputs, args, kwargs)}

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) in fp32:
            return tensor
        return tensor.to(application.dtype_of_input(tensor))

    return map_tensors((args, kwargs), cast)


def _sample(tensor: Tensor) -> Tensor:
    """A copy on the CPU, of evenly spaced elements if there are many."""
    tensor = tensor.detach()
    if tensor.numel() > MOST_ELEMENTS:
        tensor = tensor.reshape(-1)[:: -(-tensor.numel() // MOST_ELEMENTS)]
    return tensor.cpu().clone()
