"""Backends that run the graph of ``torch.export`` in a library: graph, code, missing ops."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from lowprec_check.errors import UsageError
from lowprec_check.schema.axes import Backend, Code, Example, UnsupportedOpsError
from lowprec_check.schema.findings import Gap, GapKind
from lowprec_check.schema.precisions import Precision
from lowprec_check.schema.run_key import RunKey
from lowprec_check.torchkit.installation import missing_packages

if TYPE_CHECKING:
    from lowprec_check.schema.scan_result import ModelInfo


def exported(model, args, kwargs):
    """The graph of a model, from tensors to tensors, and how to call it as the model is called."""
    import torch
    from torch.utils._pytree import tree_flatten, tree_unflatten

    def described(leaves):
        for x in leaves:
            if not isinstance(x, (torch.Tensor, int, float, str, type(None))):
                raise TypeError(f"a graph takes and returns tensors in tuples, lists and dicts, not {type(x).__name__}")
        return [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]

    class OnTensors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *tensors):
            given = iter(tensors)
            values = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
            args, kwargs = tree_unflatten(values, structure)
            values, outputs["structure"] = tree_flatten(self.model(*args, **kwargs))
            described(values)
            once = {id(x): x for x in values if isinstance(x, torch.Tensor)}  # a graph may not return one twice
            place = {key: number for number, key in enumerate(once)}
            outputs["values"] = [(place.get(id(x)), None if id(x) in place else x) for x in values]
            return tuple(once.values())

    (leaves, structure), outputs = tree_flatten((args, kwargs)), {}
    tensors = tuple(x.clone() for x in leaves if isinstance(x, torch.Tensor))  # a graph may not take one twice
    expected = described(leaves)
    program = torch.export.export(OnTensors(), tensors, strict=False).run_decompositions({})

    def called_by(run):
        def call(*args, **kwargs):
            leaves, same = tree_flatten((args, kwargs))
            if described(leaves) != expected or same != structure:
                raise ValueError(f"the graph is for inputs {expected}, and was called with {described(leaves)}")
            arrays = run([x.numpy(force=True) for x in leaves if isinstance(x, torch.Tensor)])
            found = [torch.as_tensor(array) for array in arrays]
            values = [x if at is None else found[at] for at, x in outputs["values"]]
            return tree_unflatten(values, outputs["structure"])

        return call

    return program, called_by


class GraphBackend(Backend):
    """A backend that runs the graph of a model in a library on the CPU, for fixed shapes."""

    setup_budget = 300.0
    changes_process = True  # threads of the library stay, and take cores from those of torch
    title: ClassVar[str]
    """The library, for people."""
    packages: ClassVar[tuple[str, ...]]
    """What it needs, by the names that pip knows."""
    computes_in: ClassVar[dict[str, str]]
    """By precision: what the library calls it."""
    instead: ClassVar[str]
    """Why it has no others, and which to use."""
    functions: ClassVar[tuple[Callable[..., Any], ...]]
    """The functions that :meth:`load` calls, to paste."""
    loading: ClassVar[str]
    """The expression of what :meth:`load` returns, of ``program`` and ``{precision}``."""

    def skip_reason(self, precision: Precision, device: str, memory_format: str) -> str | None:
        """Not for the CPU, or the library is missing, or does not compute in ``precision``."""
        if device != "cpu":
            return f"{self.name} runs on the CPU here; use the backend inductor on {device}"
        if precision.name not in self.computes_in:
            return self.instead
        missing = missing_packages(*self.packages)
        if missing:
            return f"{self.name} cannot run here: it needs {missing}"
        return None

    def load(self, program: Any, precision: str) -> Any:
        """Return what runs an ``ExportedProgram`` in the library's ``precision`` on arrays."""
        raise NotImplementedError

    def missing_ops(self, error: Exception, program: Any) -> list[str]:
        """The ops that :meth:`load` failed for (``aten.cholesky.default``), if any."""
        raise NotImplementedError

    def prepare(self, model: Any, example: Example) -> Any:
        """The model in the library; raises :class:`UnsupportedOpsError` for ops that are missing
        there, and :class:`UsageError` for what a graph would do differently.
        """
        import torch

        from lowprec_check.torchkit.compiled import check_in_eval_mode, quiet
        from lowprec_check.torchkit.devices import generator_states, kept_generators

        check_in_eval_mode(model, self.name)
        with quiet(), torch.autocast("cpu", enabled=False):  # the exporters log what they do
            program, called_by = exported(model, example.args, example.kwargs)
            signature = program.graph_signature
            changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
            if changed:
                names = ", ".join(name.removeprefix("model.") for name in changed)
                problem = f"A call of the model changes {names}; in {self.title} it would not."
                raise UsageError(problem, "Use another backend.")
            # Whether it draws random numbers: called once, without a trace in the generators.
            with kept_generators():
                before = generator_states()
                with contextlib.suppress(Exception):  # torch may lack a kernel
                    program.module()(*program.example_inputs[0])
                if generator_states() != before:
                    problem = f"The model draws random numbers; {self.title} would draw others."
                    raise UsageError(problem, "Use another backend.")
            try:
                run = self.load(program, self.computes_in[example.precision.name])
            except Exception as error:
                missing = self.missing_ops(error, program)
                if not missing:
                    raise
                gaps = gaps_at(program, missing, "no-backend-kernel", f"{self.title} does not support this op")
                raise UnsupportedOpsError(self.title, gaps) from error
        called = called_by(run)
        vars(called)["gaps"] = getattr(run, "gaps", [])
        return called

    def code(self, key: RunKey, model: ModelInfo) -> Code:
        """The same functions, and their calls."""
        texts = (inspect.getsource(function) for function in (exported, *self.functions))
        loading = self.loading.format(precision=self.computes_in[key.precision])
        return Code(
            before=(
                *texts,
                f"program, called_by = exported(model, {', '.join(model.arguments)})",
                f"model = called_by({loading})",
            )
        )


def gaps_at(program: Any, ops: Iterable[str], kind: GapKind, message: str, dtype: str | None = None) -> list[Gap]:
    """A gap for each place in a graph that calls one of ``ops`` on tensors of ``dtype``."""
    from lowprec_check.torchkit.source_location import lines_of_trace

    # Ops that the graph has as they are, then those that it has only after decomposition.
    wanted, calls = set(ops), Counter[tuple[str, str, Any, tuple[str, ...]]]()
    for decomposed in (False, True):
        for node in (program.run_decompositions() if decomposed and wanted else program).graph.nodes:
            if str(node.target) in wanted:
                module = list((node.meta.get("nn_module_stack") or {"": ("",)}).values())[-1][0].partition(".")[2]
                input_dtypes = (getattr(each.meta.get("val"), "dtype", None) for each in node.all_input_nodes)
                floats = (each for each in input_dtypes if each and (each.is_floating_point or each.is_complex))
                dtypes = tuple(sorted({str(each).removeprefix("torch.") for each in floats}))
                if dtype is None or dtype in dtypes:
                    calls[str(node.target), module, lines_of_trace(node.meta.get("stack_trace")), dtypes] += 1
        wanted -= {op for op, *_ in calls}
    # An op that no node shows is reported without a place.
    gaps = []
    for op, module, lines, dtypes in (*calls, *((op, "", lines_of_trace(None), ()) for op in sorted(wanted))):
        of_complex = ""
        if kind == "no-backend-kernel" and "complex" in str(dtypes):
            of_complex = " for complex numbers"
        gap = Gap(
            op=op,
            layer="backend",
            kind=kind,
            module=module,
            source=lines.source,
            caller=lines.caller,
            dtypes=list(dtypes),
            message=f"{message}{of_complex}",
            calls=calls[op, module, lines, dtypes] or 1,
            rescued=False,
        )
        gaps.append(gap)
    return gaps
