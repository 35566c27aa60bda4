"""Whether the compiler adds to the error, measured against fp64; and which of its passes does."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from lowprec_check.core.preparation import in_eager_mode, on_backend
from lowprec_check.core.tasks import ModelTask
from lowprec_check.engine.model.plain_run import output_tensors, run_once
from lowprec_check.engine.model.prepared import Prepared, prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.process import system
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.schema.axes import Call
from lowprec_check.schema.backend_checks import FACTOR, CompilerCheck, CompilerVerdict
from lowprec_check.schema.precisions import FP32, FP64, Precision
from lowprec_check.schema.run_key import EAGER
from lowprec_check.torchkit.compiled import compiled_code_in_eager, forget_compiled
from lowprec_check.torchkit.floating_dtypes import as_real, is_float
from lowprec_check.torchkit.pytree import map_tensors

SLACK = 0.1
"""An error of this share of the tolerance is harmless, however small eager's is."""
MORE_CALLS = 8
"""Calls on other inputs that must confirm a larger error: a small sample may be off by chance."""
SHARE_OF_BUDGET = 0.5
"""Part of a call's budget for further calls, and the same again for the search for the pass."""
BISECT_SECONDS = 60.0
"""The search for the pass ends then, at the latest."""
_EXACT = {
    "fp64": Precision(name="fp64", kind="cast", format=FP64, method="double", tolerance=0.0),
    "fp32": Precision(name="fp32-cast", kind="cast", format=FP32, method="float", tolerance=0.0),
}


class CompilerChecker:
    """Checks the run of ``task``, whose call is compiled; ``rewind`` restores the model's state."""

    def __init__(
        self, task: ModelTask, target: Target, ready: Prepared, rewind: Callable[[], None], *, by_dynamo: bool
    ) -> None:
        self.task, self.target, self.ready, self.rewind = task, target, ready, rewind
        # The passes of torch.compile can be searched.
        self._by_dynamo = by_dynamo
        self.seconds = SHARE_OF_BUDGET * task.call_budget
        self._slack = SLACK * (task.tolerance if task.tolerance is not None else ready.precision.tolerance)
        self._exact: Literal["fp64", "fp32"] = "fp64"
        self._calls: list[Corners | None] = []

    def checks(self, *, explained: bool) -> Iterator[CompilerCheck]:
        """The check, and if it is to be ``explained`` with what emulated casts change; nothing if
        outputs cannot be compared.
        """
        calls = [self.corners(self.target.inputs)]
        if calls[0] is None:
            return
        distance = self._worst(calls)
        if distance.uncertain(self._slack):
            end = system.monotonic() + self.seconds
            for number in range(1, MORE_CALLS + 1):
                if system.monotonic() < end:
                    calls.append(self.corners(inputs_like(self.target.inputs, number)))
            distance = self._worst(calls)
        self._calls = calls
        errors = [distance.error(squares) for squares in (distance.fp32, distance.eager, distance.compiled)]
        fp32, eager, compiled = (error if math.isfinite(error) else None for error in errors)
        check = CompilerCheck(
            verdict=distance.verdict(self._slack),
            tensor=distance.index,
            tensors=len(calls[0].exact),
            calls=sum(call is not None for call in calls),
            exact=self._exact,
            fp32_error=fp32,
            eager_error=eager,
            compiled_error=compiled,
            nonfinite=distance.nonfinite,
            decisions=distance.decisions,
            eager_changed=distance.eager_changed,
            compiled_changed=distance.compiled_changed,
        )
        yield check
        if explained and check.verdict == "worse" and self._by_dynamo:
            import torch._inductor.config

            # torch 2.8 cannot compile for a CPU with it
            with contextlib.suppress(Exception), torch._inductor.config.patch(emulate_precision_casts=True):
                check = msgspec.structs.replace(check, emulated=self._compiled_again(calls))
            yield check

    def _worst(self, calls: list[Corners | None]) -> Distances:
        return worst(distances([call for call in calls if call is not None]), self._slack)

    # -- the corners

    def corners(self, call: Call) -> Corners | None:
        """The four outputs on the inputs ``call``; ``None`` if one fails, or they do not match."""
        eager = in_eager_mode(self.ready, self.target)
        # The run itself has its status already; other inputs may not fit the model.
        try:
            low = self.outputs(eager, call, in_eager=True)
            exact, fp32 = self._wide(self._exact, call), self._wide("fp32", call)
            if exact is None:
                exact, self._exact = fp32, "fp32"
            if exact is None or fp32 is None:
                return None
            corners = Corners(exact, fp32, low, self.outputs(self.ready, call))
        except Exception:
            return None
        return corners if corners.match() else None

    def _wide(self, name: str, call: Call) -> list[Tensor] | None:
        """The output in a wider format, on weights and inputs rounded to the run's precision."""
        args, kwargs = self.ready.inputs(*call)
        self.rewind()
        default = torch.get_default_dtype()
        with prepared(
            self.ready.model, _EXACT[name], self.ready.device, call=self.target.call(self.target.model)
        ) as wide:
            torch.set_default_dtype(wide.application.dtype)
            try:
                with compiled_code_in_eager():
                    output, _ = run_once(wide, args, kwargs, self.task.seed)
                return output_tensors(output).copied()
            except Exception:  # a model with fp32 constants may not run in fp64
                return None
            finally:
                torch.set_default_dtype(default)

    def outputs(self, ready: Prepared, call: Call, *, in_eager: bool = False) -> list[Tensor]:
        """The tensors of the output, on the CPU; the model's state is rewound before the call."""
        # This also restores the eager mode of compiled parts.
        self.rewind()
        with compiled_code_in_eager() if in_eager else contextlib.nullcontext():
            output, _ = run_once(ready, *call, self.task.seed)
        form = self.target.output_form(self.task.judge, self.task.limits)
        return output_tensors(output).copied().as_asked(form)

    # -- the explanation

    def _compiled_again(self, calls: list[Corners | None], *, bisecting: bool = False) -> CompilerVerdict:
        """The verdict on the model compiled again, on the same inputs."""
        forget_compiled()
        compiled = on_backend(self.task, self.target, self.ready)
        # What its user compiled is compiled as before, but where a pass is searched.
        if bisecting and self.task.backend == EAGER:
            compiled = compiled.calling(self.target.call(torch.compile(self.target.model)))
        again = [
            corners._replace(compiled=self.outputs(compiled, inputs_like(self.target.inputs, number)))
            for number, corners in enumerate(calls)
            if corners is not None
        ]
        return self._worst([*again]).verdict(self._slack)

    def bisect(self) -> str | None:
        """The pass or lowering that adds the error, by torch's bisection; ``None`` if not found."""
        from torch._inductor.compiler_bisector import BACKENDS, CompilerBisector

        # What is compiled inside the model cannot be compiled by the bisection's backends.
        if not self._by_dynamo or (self.task.backend == EAGER and self.target.compiled is None):
            return None
        end = system.monotonic() + min(BISECT_SECONDS, self.seconds)

        def passes() -> bool:
            if system.monotonic() > end:
                raise TimeoutError
            return self._compiled_again(self._calls, bisecting=True) != "worse"

        silent = contextlib.redirect_stdout(io.StringIO())
        with contextlib.suppress(Exception), silent, contextlib.ExitStack() as context:
            CompilerBisector.in_process_cache = GUARDIAN.temporary_folder()
            tried = BACKENDS["inductor"]
            context.callback(BACKENDS.update, inductor=tried)
            # it is tried separately, and would end the search before the lowerings
            BACKENDS["inductor"] = [part for part in tried if "emulate_precision_casts" not in part.name]
            culprit = CompilerBisector.do_bisect(passes)
            if culprit is not None and culprit.subsystem is not None:
                parts = (culprit.backend, culprit.subsystem, culprit.debug_info)
                return " ".join(dict.fromkeys(str(part) for part in parts if part))
        return None


def inputs_like(call: Call, number: int) -> Call:
    """``call`` for 0, else with floats changed by about 1 % and integers shifted."""
    if number == 0:
        return call
    generator = torch.Generator().manual_seed(number)

    def other(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device)
            return (tensor.detach() * (1 + 2.0**-6 * noise)).to(tensor.dtype)
        if tensor.ndim and tensor.dtype != torch.bool:
            return tensor.roll(number, -1)
        return tensor

    args: Any = map_tensors(call[0], other)
    kwargs: Any = map_tensors(call[1], other)
    return args, kwargs


# -- Compares a compiled model with eager execution, both against fp64


class Corners(NamedTuple):
    """The leaves of the output of one call, of each way to run the model."""

    exact: list[Tensor]
    """fp64 eager, on the weights and inputs of the precision."""
    fp32: list[Tensor]
    eager: list[Tensor]
    compiled: list[Tensor]

    def match(self) -> bool:
        """Whether all have the same structure and shapes."""
        shapes = [[tensor.shape for tensor in tensors] for tensors in self]
        return all(shape == shapes[0] for shape in shapes)


@dataclass
class Distances:
    """How far one output tensor is from fp64 over all calls: squared 2-norms of finite values."""

    index: int
    size: float = 0.0
    fp32: float = 0.0
    eager: float = 0.0
    compiled: float = 0.0
    nonfinite: int = 0
    """Values that are NaN or Inf in the compiled output only."""
    decisions: int = 0
    """Integers and booleans."""
    eager_changed: int = 0
    compiled_changed: int = 0

    def add(self, exact: Tensor, fp32: Tensor, eager: Tensor, compiled: Tensor) -> None:
        """Add the tensors of one call, of equal shapes."""
        if not is_float(exact):
            self.decisions += exact.numel()
            self.eager_changed += int((eager != exact).sum())
            self.compiled_changed += int((compiled != exact).sum())
            return
        e64, e32, low, made = (as_real(tensor).double() for tensor in (exact, fp32, eager, compiled))
        wanted = e64.isfinite() & low.isfinite()
        self.nonfinite += int((wanted & ~made.isfinite()).sum())
        # Beyond the range of the precision, eager has other values by intention:
        # torch.finfo(x.dtype).min in a mask.
        largest = math.inf
        if is_float(eager):
            largest = torch.finfo(eager.dtype).max
        compared = wanted & made.isfinite() & e32.isfinite() & (e64.abs() <= largest)
        e64, e32, low, made = (torch.where(compared, values, 0.0) for values in (e64, e32, low, made))
        self.size += _square(e64)
        self.fp32 += _square(e32 - e64)
        self.eager += _square(low - e64)
        self.compiled += _square(made - e64)

    def error(self, squares: float) -> float:
        """rel_l2 for a sum of squares; 0/0 is 0, x/0 is infinite."""
        if self.size:
            return math.sqrt(squares / self.size)
        if squares:
            return math.inf
        return 0.0

    def verdict(self, slack: float) -> CompilerVerdict:
        """How the compiled output compares with eager's; errors up to ``slack`` are harmless."""
        # NaN or Inf that eager lacks.
        if self.nonfinite:
            return "worse"
        # Integers and booleans: more than twice as many changed, and more than by chance.
        if self.decisions:
            excess = self.compiled_changed - FACTOR * self.eager_changed
            chance = 2 * math.sqrt(self.compiled_changed + FACTOR**2 * self.eager_changed)  # two standard deviations
            if excess > max(chance, slack * self.decisions):
                return "worse"
            if excess > 0:
                return "harmless"
            return "no-worse"
        compiled, eager = self.error(self.compiled), self.error(self.eager)
        if compiled <= FACTOR * eager:
            return "no-worse"
        return "harmless" if compiled <= slack else "worse"

    def uncertain(self, slack: float) -> bool:
        """Whether other inputs must confirm the verdict, which may be due to chance."""
        verdict = self.verdict(slack)
        return not self.nonfinite and (verdict == "worse" or (verdict == "harmless" and self.decisions > 0))

    @property
    def severity(self) -> tuple[float, float, float]:
        """Sorts by how much worse the compiled output is."""
        compiled, eager = self.error(self.compiled), self.error(self.eager)
        if eager:
            ratio = compiled / eager
        elif compiled:
            ratio = math.inf
        else:
            ratio = 0.0
        return float(self.nonfinite), float(self.compiled_changed - FACTOR * self.eager_changed), ratio


def _square(values: Tensor) -> float:
    return float((values * values).sum())


def distances(calls: Sequence[Corners]) -> list[Distances]:
    """The distances of each output tensor, over all calls, which must match."""
    of_tensors = [Distances(index) for index in range(len(calls[0].exact))]
    for call in calls:
        for distance, *tensors in zip(of_tensors, *call, strict=True):
            distance.add(*tensors)
    return of_tensors


def worst(of_tensors: Sequence[Distances], slack: float) -> Distances:
    """The output tensor with the worst verdict, and of those the largest excess."""
    order: tuple[CompilerVerdict, ...] = ("no-worse", "harmless", "worse")
    return max(of_tensors, key=lambda distance: (order.index(distance.verdict(slack)), distance.severity))
