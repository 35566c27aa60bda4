"""Records what the user's code computes: calls of models, and of functions of torch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lowprec_check.torchkit.devices import generator_states
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.pytree import leaves, map_tensors
from lowprec_check.torchkit.source_location import own_line

_AUTOCASTS = ("cpu", "cuda", "xpu", "mps")
NUMBERS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
"""Methods that turn a tensor into something that no function of torch sees."""


_OF_MODULES = vars(nn.Module()).keys()
"""Attributes that every module has."""


class UnrepeatableError(Exception):
    """What the user's code computed cannot be computed again; the text says why, and where."""


@dataclasses.dataclass
class Node:
    """A call of a function of torch, or of a model that no other model called."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: str | None
    has_gradients: bool  # whether gradients were enabled
    autocasts: dict[str, torch.dtype]
    reads: list[Tensor]
    versions: list[int]
    """Of what it reads, before the call: how often each was written to in place."""
    given: Any = None  # of a model: copies of the arguments, which it may change
    restore_generators: Sequence[Callable[[], Any]] = ()
    """Of a model: what restores the random numbers that it draws."""
    modes: dict[nn.Module, bool] = dataclasses.field(default_factory=dict)
    """Of a model: whether its modules are in training mode."""
    results: list[Tensor] = dataclasses.field(default_factory=list)
    made: list[int] = dataclasses.field(default_factory=list)  # versions of the results
    method: str = ""
    """The method of the model that is called; empty for the model itself."""
    inside: Sequence[Node] = ()
    """What a method of a model called."""
    draws: bool = False
    """Whether a function of tensors without gradients draws random numbers."""
    dtype_of: Tensor | None = None
    """What it takes a dtype, or a limit of one, from: ``x.to(y.dtype)``."""
    is_in_fp32: bool = False
    """Whether a function was computed in fp32, since it has no kernel for what it reads."""

    @classmethod
    def of(cls, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """A call that is about to be made, by the line that calls the caller of this function."""
        reads = [tensor for _, tensor in leaves((args, kwargs))]
        line, versions = own_line(sys._getframe(2)), [version_of(tensor) for tensor in reads]
        return cls(call, args, kwargs, line, torch.is_grad_enabled(), autocasts_now(), reads, versions)

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.call, "__name__", "")

    def as_recorded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, computed as this one was."""
        if not self.is_in_fp32:
            return call
        return lambda *args, **kwargs: computed_in_fp32(call, args, kwargs)

    @property
    def is_pure(self) -> bool:
        """Whether it gives the same results again: nothing that it reads or makes was changed."""
        if isinstance(self.call, nn.Module) or self.draws or self.changed:
            return False
        tensors, versions = [*self.reads, *self.results], [*self.versions, *self.made]
        return all(version_of(tensor) == version for tensor, version in zip(tensors, versions, strict=True))

    @property
    def changed(self) -> list[Tensor]:
        """What it writes to in place."""
        in_place = self.name.endswith("_") and not self.name.endswith("__")
        first = in_place or self.name == "__setitem__" or self.name.startswith("__i")
        return [*self.reads[:first], *(tensor for _, tensor in leaves(self.kwargs.get("out")))]

    def takes_dtype_of(self, tensor: Tensor) -> bool:
        """Whether the dtype of ``tensor``, read before, is in its arguments."""
        if not any(is_of_dtype(value, tensor.dtype) for value in tree_leaves((self.args, self.kwargs))):
            return False
        self.dtype_of = tensor
        if not any(tensor is read for read in self.reads):
            self.reads.append(tensor)
            self.versions.append(version_of(tensor))
        return True

    def written(self) -> set[int]:
        """Ids of the tensors that it makes or changes."""
        return {id(tensor) for tensor in (*self.results, *self.changed)}

    def computes_like(self, module: nn.Module, inside: Sequence[Node], before: Sequence[Node]) -> bool:
        """Whether a call of a method gives the results of ``inside`` again, from its arguments.

        It must return something with gradients, change none of its arguments, and read no tensor
        that the module keeps for it or that was computed ``before``.
        """
        if not any(tensor.grad_fn is not None for tensor in self.results):
            return False
        if any(node.is_in_fp32 or node.autocasts != self.autocasts for node in inside):
            return False
        if [version_of(tensor) for tensor in self.reads] != self.versions:
            return False
        # What a module keeps besides its weights may differ in another call
        arguments = {id(tensor) for tensor in self.reads}
        others = {id(tensor) for node in before for tensor in node.results}
        for part in module.modules():
            state = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            others |= {id(tensor) for _, tensor in leaves(state)}
        others -= arguments | {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        return not any(id(tensor) in others for node in inside for tensor in node.reads)

    def read_instead(self, tensor: Tensor, copy: Tensor) -> None:
        """Let it read a copy of ``tensor``."""
        self.args, self.kwargs = map_tensors((self.args, self.kwargs), lambda arg: copy if arg is tensor else arg)
        self.reads = [copy if read is tensor else read for read in self.reads]


def opened(nodes: Sequence[Node], losses: Iterable[Tensor]) -> list[list[Node]]:
    """Each node, or what it called if that made a tensor which others read, or a loss."""
    parts: list[list[Node]] = []
    outside = {id(tensor) for tensor in losses} | {id(tensor) for node in nodes for tensor in node.reads}
    for node in nodes:
        # A method may keep tensors in attributes, where others read them
        made = {key for inner in node.inside for key in inner.written()}
        if made & outside <= {id(tensor) for tensor in node.results}:
            parts.append([node])
        else:
            read = [*losses, *(tensor for other in nodes for tensor in other.reads)]
            parts.append(list(itertools.chain(*opened(node.inside, read))))
        node.inside = ()
    return parts


def dtype_read(tensor: Tensor) -> torch.dtype:
    """What stands for reading a dtype among recorded calls."""
    return tensor.dtype


_LIMITS = ("min", "max", "eps", "tiny", "smallest_normal")


def limits_of(dtype: torch.dtype) -> list[float]:
    """The numbers that code makes of a floating-point dtype: ``torch.finfo(dtype).min``."""
    # Masks are often made of half the limit
    limits = [getattr(torch.finfo(dtype), name) for name in _LIMITS]
    return [*limits, limits[0] / 2, limits[1] / 2]


def is_of_dtype(value: Any, dtype: torch.dtype) -> bool:
    """Whether an argument is a floating-point ``dtype``, or a limit of it."""
    if type(value) is float:
        return dtype.is_floating_point and value in limits_of(dtype)
    return value is dtype and dtype.is_floating_point


def autocasts_now() -> dict[str, torch.dtype]:
    """The dtype of autocast, by the type of the device for which it is enabled."""
    return {kind: dtype for kind, dtype in autocast_dtypes().items() if torch.is_autocast_enabled(kind)}


def autocast_dtypes() -> dict[str, torch.dtype]:
    """The dtype of autocast, by the type of the device."""
    dtypes = {}
    for kind in _AUTOCASTS:
        with contextlib.suppress(RuntimeError):  # not known to this torch
            dtypes[kind] = torch.get_autocast_dtype(kind)
    return dtypes


def version_of(tensor: Tensor) -> int:
    """How often it was written to in place."""
    return 0 if tensor.is_inference() else tensor._version


class CallRecorder(TorchFunctionMode):
    """Records the functions of torch that the user's code calls while it is ``on``."""

    def __init__(self, computed: Callable[[Node, Callable[..., Any]], Any]) -> None:
        """``computed`` makes the call of a node."""
        super().__init__()
        self.computed = computed
        self.nodes: list[Node] = []
        self.copies: dict[tuple[int, int], Tensor] = {}
        """Of tensors that were read and changed later, by id and version."""
        self._read: set[int] = set()
        """Ids of the tensors that calls read; some may be freed."""
        self.on = False
        self.is_paused = False
        self._dtype_read: Node | None = None
        """Where a dtype was read last, if nothing was called since."""
        self.bytes = 0
        """Of the tensors that were recorded; a view counts like a copy."""
        self.on_change: Callable[[Tensor, str | None], None] = lambda _tensor, _line: None
        """Called for each tensor that is changed in place, with the line."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and torch._C._get_tracing_state() is None:
            return self.recorded(func, tuple(args), kwargs or {})
        return func(*args, **(kwargs or {}))

    def recorded(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a call; recorded if it makes tensors of tensors, or numbers of them."""
        # Reading a dtype computes nothing, but may decide what is computed next
        if getattr(call, "__self__", None) is Tensor.dtype:
            self._note_dtype()
            self._dtype_read = Node.of(dtype_read, args[:1], {})
            return call(*args, **kwargs)
        node = Node.of(call, args, kwargs)
        if self._dtype_read is not None and node.takes_dtype_of(self._dtype_read.reads[0]):
            self._dtype_read = None
        self._note_dtype()
        # `p.data = x` replaces values without a function that writes in place
        is_given_data = getattr(call, "__self__", None) is Tensor.data and node.name == "__set__"
        for tensor in [*node.changed, *args[:is_given_data]]:
            self.on_change(tensor, node.line)
        # A call that is repeated later needs the values which it read, before they are overwritten
        for tensor in node.changed:
            place = id(tensor), version_of(tensor)
            if tensor.requires_grad or place in self.copies:
                continue
            if id(tensor) in self._read or any(read.requires_grad for read in node.reads):
                self.copies[place] = tensor.detach().clone()
        # Draws matter only without gradients, where results are data and not computed again
        states = None
        if not any(tensor.requires_grad for tensor in node.reads):
            states = generator_states()
        result = self.computed(node, call)
        # `x.float()` returns `x` itself in fp32, and another tensor in other precisions
        is_leaf = isinstance(result, Tensor) and result.requires_grad and result.grad_fn is None
        if not (node.changed or is_leaf) and any(result is tensor for tensor in node.reads):
            result = result.view_as(result)
        node.draws = states is not None and states != generator_states()
        node.results = [tensor for _, tensor in leaves(result)]
        node.made = [version_of(tensor) for tensor in node.results]
        if node.reads and (node.written() or node.name in NUMBERS):
            self.add(node)
        return result

    def _note_dtype(self) -> None:
        """Keep where a dtype was read, which may decide what the user's code does."""
        if self._dtype_read is not None:
            self.nodes.append(self._dtype_read)
            self._dtype_read = None

    def add(self, node: Node) -> None:
        """Keep a call, once it is made."""
        self._note_dtype()
        self.nodes.append(node)
        self._read.update(map(id, node.reads))
        tensors = [*node.results, *(tensor for _, tensor in leaves(node.given))]
        self.bytes += sum(tensor.nbytes for tensor in tensors if tensor.layout == torch.strided)

    def forget(self) -> None:
        """Free all that was recorded."""
        self.on, self.bytes, self._dtype_read = False, 0, None
        self.nodes.clear()
        self.copies.clear()
        self._read.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded, and no function of torch comes by here."""
        before, self.on, self.is_paused = (self.on, self.is_paused), False, True
        # Modes of the user's own stay
        stack = function_modes()
        set_function_modes([mode for mode in stack if mode is not self])
        try:
            yield
        finally:
            set_function_modes(stack)
            self.on, self.is_paused = before


def computed_in_fp32(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a function of tensors in 16 bits, in their dtype, computed in fp32."""
    narrow = [tensor.dtype for _, tensor in leaves((args, kwargs)) if tensor.dtype in NARROW]
    wide = map_tensors((args, kwargs), lambda tensor: tensor.float() if tensor.dtype in NARROW else tensor)
    result = call(*wide[0], **wide[1])
    return map_tensors(result, lambda tensor: tensor.to(narrow[0]) if tensor.dtype == torch.float32 else tensor)


def function_modes() -> list[Any]:
    """The modes that see functions of torch in this thread, the innermost last."""
    return [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]


def set_function_modes(modes: Iterable[Any]) -> None:
    """Replace the modes of this thread."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
