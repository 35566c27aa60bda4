"""What leads from a batch to the losses of a step, as it was recorded, and computes them again."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lowprec_check.engine.model.call_recorder import (
    NUMBERS,
    Node,
    UnrepeatableError,
    autocasts_now,
    dtype_read,
    is_of_dtype,
    limits_of,
    version_of,
)
from lowprec_check.errors import UsageError
from lowprec_check.torchkit.autograd import nodes_of
from lowprec_check.torchkit.pytree import leaves, map_tensors
from lowprec_check.torchkit.source_location import call_recorded


class Backward(NamedTuple):
    """A call of ``backward()``."""

    loss: Tensor
    value: Tensor  # of the loss, which may be changed in place later
    nodes: int  # how many were recorded before it
    keeps_graph: bool = False
    """Whether a later one may go through the same graph."""


class Phase(NamedTuple):
    """Part of a step: gradients are cleared, losses computed, optimizers make their steps."""

    clears: tuple[int, ...]  # numbers of the optimizers whose gradients are cleared
    losses: tuple[Tensor, ...]  # empty once the program is released
    nodes: int  # how many were recorded before its last `backward()`
    steps: tuple[int, ...]  # numbers of the optimizers that make a step
    is_inside: bool = False
    """Whether it is computed in the step itself, by a closure that the optimizer calls."""


@dataclasses.dataclass
class _Step:
    """A node, with a tensor without elements in place of each that it reads."""

    node: Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]  # keys
    model: str | None  # the name of the model that it calls
    phase: int
    of_dtype: tuple[int, torch.dtype] | None
    """The key of the tensor of whose dtype its arguments depend, and that dtype as recorded."""

    @property
    def reads(self) -> set[int]:
        """The keys of what it reads."""
        keys = {id(tensor) for _, tensor in leaves((self.args, self.kwargs))}
        if self.of_dtype is not None:
            keys.add(self.of_dtype[0])
        return keys

    def call_in(self, root: nn.Module) -> Callable[..., Any]:
        """What it calls: a function, a model inside ``root``, or a method of that."""
        if self.model is None:
            return self.node.call
        model = root.get_submodule(self.model)
        if self.node.method:
            return getattr(model, self.node.method)  # type: ignore[no-any-return]
        return model


class Program:
    """The calls of models and functions that lead from ``trained`` weights to losses of ``plan``.

    Raises :class:`UnrepeatableError`. ``copies`` are of tensors that were changed in place later.
    What models read besides, and what is drawn at random, is an input; what functions compute of
    labels is computed again, in each precision.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        plan: Sequence[Phase],
        trained: dict[int, nn.Parameter],
        copies: Mapping[tuple[int, int], Tensor],
    ) -> None:
        losses = [loss for phase in plan for loss in phase.losses]
        # What leads, without gradients, to a number, a random draw or a change in place is data,
        # such as that of a rollout: it stays as it is
        data: set[int] = set()
        for node in reversed(nodes):
            becomes_data = node.name in NUMBERS or node.draws or node.changed or node.written() & data
            if becomes_data and not node.has_gradients:
                data |= {id(tensor) for tensor in node.reads}
        # Which nodes depend on weights that are trained
        dependent, depends = set(trained), []
        for node in nodes:
            is_data = calls_trained = False
            if isinstance(node.call, nn.Module):
                is_data = not node.has_gradients and bool(node.written() & data)
                calls_trained = any(id(parameter) in trained for parameter in node.call.parameters())
            depends.append(not is_data and (calls_trained or any(id(tensor) in dependent for tensor in node.reads)))
            if depends[-1]:
                dependent |= node.written()
        # What the losses need, from the end. What models read is an input of theirs, as it is;
        # what functions read besides is computed again if it can be
        needed = {id(loss) for loss in losses}
        repeated: list[int] = []
        of_models: set[int] = set()
        for index in reversed(range(len(nodes))):
            node, written = nodes[index], nodes[index].written()
            can_repeat = depends[index] or (not written & of_models and node.is_pure)
            if written & needed and can_repeat and node.name not in NUMBERS:
                needed |= {id(tensor) for tensor in node.reads}
                of_models |= {id(tensor) for tensor in node.reads if isinstance(node.call, nn.Module)}
                repeated.append(index)
        self.nodes = [nodes[index] for index in reversed(repeated)]
        self.phases = [sum(index >= phase.nodes for phase in plan) for index in reversed(repeated)]
        self.autocasts = {dtype: None for node in self.nodes for dtype in node.autocasts.values()}
        """The dtypes of autocast in which it is computed."""
        self.gradient_rounding = max([1e-3, *(2 * torch.finfo(dtype).eps for dtype in self.autocasts)])
        """How far two results of its gradients may differ, as a part of their norm: sums over
        several losses are rounded differently, and several calls under autocast that share its
        copies of the weights add their gradients in 16 bits.
        """
        self.plan, self.losses, self._values = list(plan), losses, dict[int, Tensor]()
        # Numbers that are made of a loss, such as those that are printed, do not matter
        after = {id(loss) for loss in losses}
        for node in nodes:
            if any(id(tensor) in after for tensor in node.reads):
                after |= node.written()
        self.numbers = [
            node
            for index, node in enumerate(nodes[: max(repeated, default=0)])
            if index > repeated[-1]
            and (node.name in NUMBERS or node.call is dtype_read)
            and depends[index]
            and id(node.reads[0]) not in after
        ]
        """Where the user's code read numbers or dtypes of what the loss may depend on."""
        self.calls = [node for node in self.nodes if isinstance(node.call, nn.Module)]
        self.trained, self._keys = trained, dict[int, Tensor]()
        self._filled: dict[int, Tensor] = {}
        """By id, what tensors held before values with gradients were written into them."""
        self._inputs = self._find_inputs(copies)
        self._parameters: dict[int, str] = {}  # names in the root, by key
        self._steps: list[_Step] = []
        self._later: list[set[int]] = []  # by phase, the keys that those after it read

    def _find_inputs(self, copies: Mapping[tuple[int, int], Tensor]) -> dict[int, Tensor]:
        """What the nodes read, and neither make nor train."""
        made: set[int] = set()
        inputs: dict[int, Tensor] = {}
        for node in self.nodes:
            for tensor, version in zip(node.reads, node.versions, strict=True):
                if id(tensor) in made or id(tensor) in self.trained:
                    continue
                is_changed = not isinstance(node.call, nn.Module) and version_of(tensor) != version
                copy = copies.get((id(tensor), version)) if is_changed else None
                reached = () if copy is not None else nodes_of(tensor)
                is_trained = any(id(getattr(function, "variable", None)) in self.trained for function in reached)
                if tensor.grad_fn is not None and is_trained:
                    function = tensor.grad_fn.name()
                    raise UnrepeatableError(
                        f"{node.line} reads a tensor that {function} made of the weights, in code that is not Python"
                    )
                if is_changed and copy is None:
                    raise UnrepeatableError(f"a tensor that {node.line} reads is changed in place later")
                # Its values at the time of the call; a model has copies of all that it reads
                source = tensor
                if copy is not None and any(tensor is changed for changed in node.changed):
                    self._filled[id(tensor)] = copy
                elif copy is not None:
                    source = copy
                    node.read_instead(tensor, source)
                inputs[id(source)] = source
            made |= node.written()
        if any(id(loss) not in made for loss in self.losses):
            raise UnrepeatableError("the loss was computed in a way that no function of torch shows")
        return inputs

    @property
    def single(self) -> Node | None:
        """The only call of a model, if the loss follows from its output and it reads inputs."""
        if len(self.calls) != 1 or len(self.losses) > 1 or len(self.plan[0].steps) > 1 or self.plan[0].is_inside:
            return None
        (call,) = self.calls
        if call.method:
            return None
        own = {id(parameter) for parameter in call.call.parameters()}  # type: ignore[attr-defined]
        others = [tensor for node in self.nodes if node is not call for tensor in node.reads]
        is_leaf = all(id(tensor) in self._inputs for tensor in call.reads)
        shared = any(tensor.requires_grad and any(tensor is read for read in call.reads) for tensor in others)
        foreign = any(id(tensor) in self.trained and id(tensor) not in own for tensor in others)
        return call if is_leaf and not shared and not foreign else None

    def bind(self, root: nn.Module, models: dict[nn.Module, str]) -> list[Tensor]:
        """Prepare to be run with ``root``, which holds the weights and the ``models`` by name.

        Returns copies of the inputs: those of models too, unless ``root`` is the only model, which
        is then called by others.
        """
        # Which inputs the recorded calls read; those of the only model come with its call
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        single = self.single if not models else None
        copied: dict[int, Tensor] = {}
        for call in self.calls:
            copies = [tensor for _, tensor in leaves(call.given)]
            copied |= {id(tensor): copy for tensor, copy in zip(call.reads, copies, strict=True)}
        wanted = {id(t) for node in self.nodes if node is not single for t in node.reads if id(t) in self._inputs}
        read = [tensor for identity, tensor in self._inputs.items() if identity in wanted]
        self.input_keys = [self._key(tensor) for tensor in read]
        self._filled_keys = [self._key(tensor) for tensor in read if id(tensor) in self._filled]
        sources = [self._filled.get(id(tensor), tensor) for tensor in read]
        values = [copied.get(id(tensor), tensor).detach().clone() for tensor in sources]
        inputs = [value.requires_grad_(source.requires_grad) for value, source in zip(values, sources, strict=True)]
        # Placeholders stand for all tensors, so that these can be freed
        for node, phase in zip(self.nodes, self.phases, strict=True):
            if node is single:
                args, kwargs = ((), {})
            else:
                args, kwargs = map_tensors((node.args, node.kwargs), self._placeholder)
            name = None
            if isinstance(node.call, nn.Module):
                name = models.get(node.call, "")
            results, source = [self._key(tensor) for tensor in node.results], dtype_source(node)
            of_dtype = None if source is None else (self._key(source), source.dtype)
            self._steps.append(_Step(node, args, kwargs, results, name, phase, of_dtype))
            for tensor in node.reads:
                if id(tensor) in self.trained and id(tensor) in names:
                    self._parameters[self._key(tensor)] = names[id(tensor)]
        # Programs of equal form can share the code of a step, and differ in their inputs only
        self.loss_keys = [[self._key(loss) for loss in phase.losses] for phase in self.plan]
        self._later = []
        for number, part in enumerate(self.plan):
            # A closure may be called again
            later = {key for step in self._steps if step.phase > number - part.is_inside for key in step.reads}
            # A loss may be computed long before its backward pass
            self._later.append(later.union(*self.loss_keys[number + 1 :]))
        plan = [(phase.clears, len(phase.losses), phase.steps, phase.is_inside) for phase in self.plan]
        order = {id(tensor): number for number, tensor in enumerate(self._keys.values())}
        forms = []
        for step in self._steps:
            arguments = map_tensors((step.args, step.kwargs), lambda tensor: order[id(tensor)])
            called = step.model
            if called is None:
                called = getattr(step.node.call, "__qualname__", step.node.name)
            forms.append((called, step.phase, arguments))
        self.form = repr((plan, forms))
        """What two programs have in common if they differ by their tensors only."""
        return inputs

    def release(self) -> None:
        """Free the tensors that were recorded."""
        self.losses, self.nodes, self.calls, self.numbers = [], [], [], []
        self._inputs, self.trained, self._values, self.phases, self._filled = {}, {}, {}, [], {}
        self.plan = [phase._replace(losses=()) for phase in self.plan]
        for step in self._steps:
            node = step.node
            step.node = Node(
                node.call, (), {}, node.line, node.has_gradients, node.autocasts, [], [], method=node.method
            )

    def _placeholder(self, tensor: Tensor) -> Tensor:
        return self._keys.setdefault(id(tensor), torch.empty(0))

    def _key(self, tensor: Tensor) -> int:
        return id(self._placeholder(tensor))

    def run(
        self,
        root: nn.Module,
        inputs: Sequence[Tensor],
        output: Any = None,
        *,
        again: Callable[[], Any] | None = None,
        phase: int = 0,
    ) -> list[Tensor]:
        """The losses of the next phase, from inputs like those of :meth:`bind`, and the ``output``.

        ``output`` is that of the only model, which ``again`` calls, if given: all is then computed
        under autocast and from the random numbers of the recording.
        """
        # Later phases read what earlier ones computed
        values = self._values = self._values if phase else dict(zip(self.input_keys, inputs, strict=True))
        if not phase:
            values |= {key: values[key].clone() for key in self._filled_keys}
        values |= {key: root.get_parameter(name) for key, name in self._parameters.items()}

        def value_of(placeholder: Tensor) -> Tensor:
            return values.get(id(placeholder), placeholder)

        for step in [step for step in self._steps if step.phase == phase]:
            with contextlib.ExitStack() as stack:
                if not step.node.has_gradients:
                    stack.enter_context(torch.no_grad())
                if again is not None:
                    # The autocasts of the recording, and no others
                    for kind, dtype in (autocasts_now() | step.node.autocasts).items():
                        stack.enter_context(torch.autocast(kind, dtype, enabled=kind in step.node.autocasts))
                    for restore in step.node.restore_generators:
                        restore()
                if step.model == "":  # the only model
                    result = output if again is None else again()
                else:
                    call = step.call_in(root)
                    # The recording is made again as it was
                    if again is not None:
                        call = step.node.as_recorded(call)
                    args, kwargs = map_tensors((step.args, step.kwargs), value_of)
                    if step.of_dtype is not None:
                        key, dtype = step.of_dtype
                        args, kwargs = with_dtype((args, kwargs), dtype, values[key].dtype)
                    result = call_recorded(call, args, kwargs, step.node.line)
            tensors = [tensor for _, tensor in leaves(result)]
            count, expected = len(tensors), len(step.results)
            if count != expected:
                raise UsageError(f"At {step.node.line}, {expected} tensors came back in the script, and {count} here.")
            values |= dict(zip(step.results, tensors, strict=True))
        # What no later phase reads is freed, as in the script
        self._values = {key: value for key, value in values.items() if key in self._later[phase]}
        return [values[key] for key in self.loss_keys[phase]]


def dtype_source(node: Node) -> Tensor | None:
    """The tensor of whose dtype the arguments of a function are made; ``None`` if of none.

    A limit of fp32 beside a tensor in fp32 is taken for that of its dtype.
    """
    if node.dtype_of is not None or isinstance(node.call, nn.Module):
        return node.dtype_of
    floating = [tensor for tensor in node.reads if tensor.is_floating_point()]
    numbers = [value for value in tree_leaves((node.args, node.kwargs)) if type(value) is float]
    if floating and any(is_of_dtype(number, floating[0].dtype) for number in numbers):
        return floating[0]
    return None


def with_dtype(arguments: Any, recorded: torch.dtype, now: torch.dtype) -> Any:
    """The arguments with another dtype and its limits in place of those that were ``recorded``."""
    if now is recorded or not now.is_floating_point:
        return arguments

    def replaced(value: Any) -> Any:
        if not is_of_dtype(value, recorded):
            return value
        if value is recorded:
            return now
        return limits_of(now)[limits_of(recorded).index(value)]

    return tree_map(replaced, arguments)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy that requires a gradient if ``tensor`` does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
