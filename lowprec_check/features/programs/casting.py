"""Runs a program with its models in other precisions, and compares each call with fp32."""

from __future__ import annotations

import contextlib
import functools
import math
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from lowprec_check.engine.model.inputs import tensors_named
from lowprec_check.engine.model.output_measures import RELATIVE_ERROR
from lowprec_check.engine.model.output_tensors import OutputForm, OutputTensors
from lowprec_check.engine.model.plain_run import judge
from lowprec_check.engine.model.prepared import Application, application_of
from lowprec_check.engine.model.user_code import parameters_of
from lowprec_check.features.programs.program_scan import (
    NO_SUCH_CALL,
    NOTHING,
    OTHER_INTEGERS,
    Assignment,
    Assignments,
    CallError,
    OtherChoice,
)
from lowprec_check.features.programs.watching import CallWatcher
from lowprec_check.process import system
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.torchkit.devices import synchronize
from lowprec_check.torchkit.floating_dtypes import NARROW, torch_dtype
from lowprec_check.torchkit.output_comparison import same_bits
from lowprec_check.torchkit.pytree import Copies, leaves, map_tensors, refill, stored, texts_in

MOST_ELEMENTS, MOST_BYTES = 1 << 20, 1 << 30
"""Of the outputs of a call that are compared, evenly spaced; of the outputs of all calls."""

_INTEGERS = 1 << 12
"""Of an input with integers that are compared."""
_SOON = 1e-3
"""Seconds until a program is ended that makes more calls than fp32."""


class ProgramCaster(CallWatcher):
    """Casts each model where it is called first, and its inputs and outputs at every call."""

    def __init__(
        self,
        assigned: Assignments,
        methods: Iterable[tuple[str, str]],
        outputs: Path,
        *,
        calls: int,
        most: int | None,
        asked: OutputForm | None = None,
    ) -> None:
        """``methods`` count as calls; ``outputs`` has those of fp32, or will have them.

        So many ``calls`` are expected; the program is stopped after the ``most``, if it goes on.
        Outputs are judged as ``asked``.
        """
        super().__init__()
        self.on_progress: Any = None
        self.errors: list[CallError] = []
        self.problem = ""
        """The exception that ended the program."""
        self._asked = asked or OutputForm()
        self._tolerance = max((PRECISIONS.get(each.precision).tolerance for each in assigned.values()), default=0.0)
        self._is_mixed = any(each.precision != "fp32" for each in assigned.values())
        self._choices, self._methods, self._outputs = assigned, set(methods), outputs
        self._saves = not assigned
        self.at_end: Callable[[], object] = dict
        """Called when the calls end that fp32 makes too."""
        self._most, self.is_ending = most, False
        self._elements = min(MOST_ELEMENTS, max(1, MOST_BYTES // (4 * max(calls, 1))))
        self._applied: dict[str, tuple[Application, torch.dtype]] = {}
        """With the dtype that the weights had, in which the program gets the outputs."""
        self._numbers: dict[tuple[str, str], int] = {}

    def counts(self, module: nn.Module, method: str) -> bool | None:
        """Whether a method was found to count."""
        return (self.key_of(module, keep=False), method) in self._methods

    def note(self, module: nn.Module, method: str, args: Any, kwargs: Any, line: str | None) -> None:
        """Keep nothing."""

    def computed(self, module: nn.Module, method: str, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """The result of a call in the precision of the model, in the dtypes that it has in fp32."""
        key = self.key_of(module)
        with self._lock:
            is_beyond = self._most is not None and sum(self._numbers.values()) >= self._most
            if is_beyond and not self.is_ending:  # once: a call may take less time than that
                # What follows cannot be compared; the thread that runs the program ends it
                self.is_ending = True
                self.at_end()
                signal.setitimer(signal.ITIMER_REAL, _SOON)
            number = self._numbers.get((key, method), 0) + (not is_beyond)
            self._numbers[key, method] = number
        assignment, weight = self._choices.get(key), next(module.parameters())
        device = weight.device
        application, cast, dtype = None, None, torch.promote_types(weight.dtype, torch.float32)
        if assignment is not None and assignment.precision != "fp32":
            application, dtype = self._application(key, assignment, module)
            parameters = tuple(parameters_of(getattr(module, method or "forward")))
            in_fp32 = tensors_named(application.keep_fp32_inputs, args, kwargs, parameters)
            cast = functools.partial(_as_input, application, in_fp32)
        elif (
            self._is_mixed
            and weight.dtype not in NARROW
            and any(tensor.dtype in NARROW for _, tensor in leaves((args, kwargs)))
        ):
            # The program gives it the dtype of another model
            cast = functools.partial(_in_dtype, dtype=dtype)
        integers = [
            _sample(tensor, _INTEGERS) for _, tensor in leaves((args, kwargs)) if not tensor.is_floating_point()
        ]
        synchronize(device)
        start = system.monotonic()
        try:
            with application.context(device.type) if application is not None else contextlib.nullcontext():
                if cast is None:
                    output = call(module, *args, **kwargs)
                else:
                    output = _called(functools.partial(call, module), args, kwargs, cast, dtype)
        except Exception:
            with self._lock:  # the program may try again
                self._numbers[key, method] -= not is_beyond
            raise
        if is_beyond:
            return output
        synchronize(device)
        seconds = system.monotonic() - start
        named, texts = list(leaves(output)), list[str]()
        if not named:
            named, texts = list(leaves(output, numbers=True)), texts_in(output)
        most = max(self._elements // max(len(named), 1), 1)
        form = self._asked._replace(kind=type(output).__name__, paths=tuple(path for path, _ in named))
        if any(tensor.numel() > most for _, tensor in named):  # parts have no meaning
            form = form._replace(judge=RELATIVE_ERROR)
        tensors = OutputTensors((_sample(tensor, most) for _, tensor in named), form)
        error = self._compared(key, method, number, integers, tensors, texts)
        self.errors.append(msgspec.structs.replace(error, seconds=seconds))
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

    def _application(self, key: str, assignment: Assignment, module: nn.Module) -> tuple[Application, torch.dtype]:
        if key not in self._applied:
            application = application_of(PRECISIONS.get(assignment.precision))
            application.keep_fp32_inputs = tuple(assignment.keep_fp32_inputs)
            # Parts of a model that the program called before, and that stay in fp32
            in_fp32 = {key for key, other in self._choices.items() if other.precision == "fp32"}
            parts = ((path, self._keys.get(id(part), (part, ""))[1]) for path, part in module.named_modules())
            nested = (path for path, key in parts if path and key in in_fp32)
            keep_fp32 = list(dict.fromkeys([*assignment.keep_fp32, *nested]))
            dtype = next(module.parameters()).dtype
            if not dtype.is_floating_point or dtype.itemsize < 2:
                dtype = torch.float32
            with torch.no_grad():
                application.apply(module, next(module.parameters()).device.type, keep_fp32)
            self._applied[key] = application, dtype
        return self._applied[key]

    def _compared(
        self, key: str, method: str, number: int, integers: list[Tensor], output: OutputTensors, texts: list[str]
    ) -> CallError:
        """A call compared with that of fp32, by its inputs that are integers and by its output."""
        file = self._outputs / f"{key}.{method}-{number}.pt"
        if self._saves:
            torch.save((integers, [*output], texts), file)
            return CallError(key, number, 0.0, method=method)
        if not file.exists():
            return CallError(key, number, None, note=NO_SUCH_CALL, method=method)
        integers_of_fp32, output_of_fp32, texts_of_fp32 = torch.load(file)
        other = "" if same_bits(integers, integers_of_fp32) else OTHER_INTEGERS
        if texts != texts_of_fp32:
            return CallError(key, number, 1.0, False, other, method, 0.0, "another text", "another text")
        if not output and not output_of_fp32:
            if texts:
                return CallError(key, number, 0.0, False, other, method, 0.0, "the same text", "equal")
            return CallError(key, number, 0.0, note=other or NOTHING, method=method)
        _, compared = judge(output, OutputTensors(output_of_fp32, output.form), self._tolerance)
        choice = _other_choice(output, output_of_fp32)
        error, note = None, other or compared.note or ""
        if math.isfinite(compared.distance):
            error = compared.distance
        meaning = compared.error.meaning
        if meaning is None or not meaning.decides:
            return CallError(key, number, error, compared.nonfinite, note, method, choice=choice)
        told = compared.limit, meaning.text, meaning.shown
        return CallError(key, number, error, compared.nonfinite, note, method, *told, choice=choice)


def _other_choice(output: OutputTensors, output_of_fp32: Sequence[Tensor]) -> OtherChoice | None:
    """What logits choose, if that is not what fp32 chooses."""
    pairs = zip(output.form.paths, output, output_of_fp32, strict=False)
    low, fp32 = next(((low, fp32) for path, low, fp32 in pairs if path in ("logits", "")), (torch.empty(0),) * 2)
    if low.shape != fp32.shape or low.ndim not in (2, 3) or not low.numel() or not low.is_floating_point():
        return None
    if low.ndim == 3:
        low, fp32 = low[:, -1], fp32[:, -1]
    for row, (chosen, best) in enumerate(zip(low.argmax(-1).tolist(), fp32.argmax(-1).tolist(), strict=True)):
        apart = float((fp32[row, best] - fp32[row, chosen]) / fp32[row, best].abs())
        if chosen != best and math.isfinite(apart):
            return OtherChoice(chosen, best, apart, fp32.shape[-1])
    return None


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in NARROW else tensor


def _as_input(application: Application, in_fp32: Sequence[Tensor], tensor: Tensor) -> Tensor:
    """In the dtype of a precision, unless it stays in fp32."""
    if any(tensor is other for other in in_fp32):
        return tensor
    return tensor.to(application.dtype_of_input(tensor))


def _called(
    call: Callable[..., Any], args: Any, kwargs: Any, cast: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Any:
    """What ``call`` returns for inputs that are ``cast``, in the ``dtype`` of the program.

    What it writes to them, as to a cache or ``out``, is given to those of the program.
    """
    copies, cast_tensors = Copies(), dict[int, tuple[Tensor, Tensor, int]]()

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in cast_tensors:
            with contextlib.ExitStack() as stack:
                if torch.is_inference_mode_enabled():  # in which tensors are made without a version
                    stack.enter_context(torch.inference_mode(False))
                    stack.enter_context(torch.no_grad())
                copy = cast(tensor)
            cast_tensors[id(tensor)] = tensor, copy, 0 if copy is tensor else copy._version
        return cast_tensors[id(tensor)][1]

    cast_args, cast_kwargs = map_tensors((args, kwargs), copied, copies)
    output = call(*cast_args, **cast_kwargs)
    with torch.inference_mode():  # also to tensors that were made in it
        for tensor, copy, version in cast_tensors.values():
            if copy is not tensor and copy._version != version:
                tensor.copy_(copy)
    in_dtype = functools.partial(_in_dtype, dtype=dtype)
    return map_tensors(output, in_dtype, refill(copies, in_dtype))


def _sample(tensor: Tensor, most: int) -> Tensor:
    """A copy on the CPU, of evenly spaced elements if there are more than ``most``."""
    tensor = tensor.detach()
    if tensor.numel() > most:
        tensor = tensor.reshape(-1)[:: -(-tensor.numel() // most)]
    return tensor.cpu().clone()
