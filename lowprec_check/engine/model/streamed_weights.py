"""Weights that stay in their files: modules read them on use, so a model may exceed memory.

In place of its values, the model holds an :class:`Unread` tensor of the same shape, dtype and
device. A cast such as ``model.half()`` changes that; the values are cast when they are read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import math
import mmap
import os
import sys
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from lowprec_check.engine.model.call_recorder import version_of
from lowprec_check.errors import UsageError, first_line, message_of
from lowprec_check.torchkit.devices import module_of
from lowprec_check.torchkit.source_location import is_own_file

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH = 8
"""Bytes of the number in front of the header, which is the header's length."""
_MAP_NORESERVE = 0x4000
"""A flag of Linux's mman.h: memory for writes is not set aside."""
_WINDOW = 128 << 10
"""Bytes that Linux reads ahead at most, by default."""


class Saved(NamedTuple):
    """A tensor in a file that is mapped into memory: the system reads its pages, and drops them."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    mapped: mmap.mmap
    start: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def values(self) -> Tensor:
        """The tensor, each time with its own storage, which tells when it is used no longer."""
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self.mapped, dtype=self.dtype, count=count, offset=self.start).view(self.shape)

    def read(self, begin: int, into: Tensor) -> None:
        """Fill ``into``, bytes in memory, with those from byte ``begin`` of the tensor on."""
        # Without the map, whose pages come one by one
        view = memoryview((ctypes.c_char * len(into)).from_address(into.data_ptr())).cast("B")
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start + begin)
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"{self.path} ended while it was read")
                view = view[count:]

    def prefetch(self) -> None:
        """Let the system read it meanwhile, in parts that it reads ahead at once."""
        if not self.nbytes:
            return
        first, end = self.start - self.start % mmap.PAGESIZE, self.start + self.nbytes
        for begin in range(first, end, _WINDOW):
            self.mapped.madvise(mmap.MADV_WILLNEED, begin, min(_WINDOW, end - begin))

    def forget(self, *, cached: bool) -> None:
        """Drop its pages from this process and, unless ``cached``, from the system's cache."""
        if not self.nbytes:
            return
        first = self.start - self.start % mmap.PAGESIZE
        self.mapped.madvise(mmap.MADV_DONTNEED, first, self.start + self.nbytes - first)
        if not cached and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                os.posix_fadvise(file.fileno(), self.start, self.nbytes, os.POSIX_FADV_DONTNEED)


def saved_tensors(path: Path) -> dict[str, Saved]:
    """The tensors in a file of safetensors, by name; raises :class:`UsageError` if it is none."""
    try:
        with path.open("rb") as file:
            mapped = None
            # Private, so that a model that writes to a weight neither ends nor changes the file
            if sys.platform == "linux":
                flags, rights = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
                with contextlib.suppress(OSError):  # this system sets memory aside for all writes
                    mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=rights)
            if mapped is None:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = _LENGTH + int.from_bytes(mapped[:_LENGTH], "little")
        header = json.loads(mapped[_LENGTH:begin])
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is in the format {entry['dtype']}")
            first, end = entry["data_offsets"]
            saved = Saved(_DTYPES[entry["dtype"]], tuple(entry["shape"]), path, mapped, begin + first)
            # Of a file that was not copied to its end, reading would end this process
            if end - first != saved.nbytes or begin + end > len(mapped):
                raise ValueError(f"{name} has not as many bytes as its shape needs")
            tensors[name] = saved
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "Weights are streamed from .safetensors only."
        raise UsageError(f"Cannot read weights from {path}: {first_line(message_of(error))}", hint) from None
    return tensors


_READERS, _PART_BYTES = 4, 64 << 20
"""Threads that read for an accelerator, and bytes of a weight that one reads at a time."""


def reads_ahead(device: torch.device) -> bool:
    """Whether weights can be copied to ``device`` while it computes."""
    return device.type != "cpu" and hasattr(module_of(device), "Stream")


class WeightUploads:
    """The weights that were started and not taken; own threads read them until it is closed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = module_of(device)
        self._queue = self._module.Stream(device)
        self._pool = ThreadPoolExecutor(_READERS)
        self._coming: dict[str, tuple[Tensor, list[Future[None]]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._coming

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that were started and not taken."""
        return sum(values.nbytes for values, _ in self._coming.values())

    def start(self, name: str, saved: Saved) -> None:
        """Begin to read a weight, if that has not begun."""
        if name in self._coming:
            return
        with torch.inference_mode(False), self._module.stream(self._queue):
            values = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.device)
        begins = range(0, saved.nbytes, _PART_BYTES)
        parts = [self._pool.submit(self._copy, saved, at, values[at : at + _PART_BYTES]) for at in begins]
        self._coming[name] = values, parts

    def _copy(self, saved: Saved, begin: int, part: Tensor) -> None:
        staged = torch.empty(len(part), dtype=torch.uint8, device="cpu", pin_memory=True)
        saved.read(begin, staged)
        with self._module.stream(self._queue):
            part.copy_(staged, non_blocking=True)

    def take(self, name: str, saved: Saved) -> Tensor:
        """The weight on the device; what computes with it next waits for it there."""
        values, parts = self._coming.pop(name)
        for part in parts:
            part.result()
        current = self._module.current_stream(self.device)
        current.wait_stream(self._queue)
        values.record_stream(current)
        return values.view(saved.dtype).view(saved.shape)

    def forget(self) -> None:
        """Forget what was started."""
        for _, parts in self._coming.values():
            for part in parts:
                part.cancel()
        self._coming.clear()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


HELD_BYTES = 256 << 20
"""Weights that are kept after their last use, in bytes; at least one is."""

AHEAD_BYTES = 1 << 30
"""Weights on their way to an accelerator, in bytes, before they are used; at least one is."""

_CACHED_SHARE = 0.6
"""Of the free memory that the system's cache may use for weights."""

_COPIES_BYTES = 10
"""Of each value of a weight that an op uses: in the run's precision, widened, in the reference."""

SAMPLES, SAMPLE_BYTES = 16, 8 << 20
"""Weights that are read to measure the speed of the disk, and bytes of each."""


# -- A model without its weights


NOT_READ = "a weight that was not read (--stream)"


class Unread(Tensor):
    """Stands for a weight that was not read: it has a shape, a dtype, a device, and no values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    making = False
    """Whether modules are being made: they may then do anything with their weights."""

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device | None = None) -> Unread:
        """The stand-in for ``like``, on ``device``."""
        make = Tensor._make_wrapper_subclass
        made: Unread = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Cast, move or copy it; anything else is an error, but for a module that is being made."""
        if not cls.making and func not in _CASTS:
            raise RuntimeError(f"{func} got {NOT_READ}")
        if func is _aten._local_scalar_dense.default:
            if is_own_file(sys._getframe(1).f_code.co_filename):
                raise RuntimeError(f"a number is taken from {NOT_READ}")
            return 0  # an initialization asks whether it must draw again
        kwargs = dict(kwargs or {})

        def without_values(tensor: Tensor) -> Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

        # Computed on the meta device, for the shape and the dtype
        device = kwargs.pop("device", None) or next(arg.device for arg in args if isinstance(arg, Unread))
        out = func(*tree_map_only(Tensor, without_values, args), **kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, lambda tensor: Unread(tensor, device), out)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)}, {self.dtype})"


_aten = torch.ops.aten
_CASTS = (_aten._to_copy.default, _aten.detach.default, _aten.clone.default, _aten.copy_.default)


def is_unread(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for a weight that was not read."""
    return type(tensor) is Unread


def is_in_memory(tensor: Tensor) -> bool:
    """Whether a weight or buffer is a plain block of memory: not sparse, not lazy, and read."""
    plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return plain and not is_lazy(tensor) and not is_unread(tensor)


_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 1 << 20
"""A setting of glibc's malloc.h: larger blocks, which it would keep, return to the system."""

_MADV_HUGEPAGE, _HUGE_BYTES = 14, 4 << 20
"""Advice of Linux for larger blocks: pages of 2 MiB, as small ones take longer to get than fill."""


@contextlib.contextmanager
def unread_weights() -> Iterator[None]:
    """Modules that are made inside hold no weights."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not is_lazy(parameter) and not is_unread(parameter):
            module._parameters[name] = nn.Parameter(Unread(parameter), requires_grad=False)

    with contextlib.suppress(OSError, AttributeError):  # without glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
    nn.Module.register_parameter, Unread.making = registered, True  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter, Unread.making = register, False  # type: ignore[method-assign]


# -- Reading


OnRead = Callable[[str, Tensor, Tensor], None]
"""Told the name of a weight that was read, its values for the module, and those in the file."""


def converted(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``values.to(device, dtype)``, three times as fast for a large cast on the CPU."""
    if device.type != "cpu" or dtype == values.dtype or values.nbytes < _HUGE_BYTES or sys.platform != "linux":
        return values.to(device, dtype)
    # The advice is for whole pages, of memory that nothing was written to yet
    cast = torch.empty(values.shape, dtype=dtype)
    first = cast.data_ptr() + -cast.data_ptr() % mmap.PAGESIZE
    length = cast.data_ptr() + cast.nbytes - first
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return cast.copy_(values)


class WeightStream:
    """Reads the weights of a model from ``saved``, most often in the order of ``names``."""

    def __init__(self, saved: dict[str, Saved], names: list[str]) -> None:
        self._saved = saved
        self._next = dict(itertools.pairwise(names))
        sizes = [saved[name].nbytes for name in names]
        self.nbytes = sum(sizes)
        """Bytes of all weights in their files."""
        counts = [math.prod(saved[name].shape) for name in names]
        self.most_held = min(3 * HELD_BYTES + _COPIES_BYTES * max(counts, default=0), _COPIES_BYTES * sum(counts))
        """Bytes of weights in memory at most, those that are kept and the largest for an op."""
        self._before = dict(zip(names, itertools.accumulate(sizes, initial=0), strict=False))
        self._cached = psutil.virtual_memory().available * _CACHED_SHARE
        self.on_progress: Callable[[str, float], None] | None = None
        """Told the name of a weight that is read, and the part of all weights before it, 0 to 1."""
        self._held: OrderedDict[str, nn.Parameter] = OrderedDict()
        self.on_read: OnRead | None = None
        self.was_read: set[str] = set()
        """Names of the weights that were read since this was cleared."""
        self._versions: dict[str, int] = {}
        self._written: str | None = None
        self._last: str | None = None
        self._uploads: WeightUploads | None = None

    def read(self, name: str, unread: Tensor) -> nn.Parameter:
        """The weight, in the dtype and on the device of what stands for it."""
        held = self._held.get(name)
        if held is not None and (held.dtype, held.device) == (unread.dtype, unread.device):
            self.was_read.add(name)
            return held
        if self.on_progress is not None:
            self.on_progress(name, self._before[name] / max(1, self.nbytes))
        if self._last is not None:
            self._next[self._last] = name  # the order of the last call
        self._last = name
        with _disable_current_modes():  # a mode that records the model's ops
            values = self._values(name, unread.device)
            held = nn.Parameter(converted(values, unread.device, unread.dtype), requires_grad=False)
            # Those that were read first are dropped for it
            self._drop(name)
            self._held[name], self._versions[name] = held, version_of(held)
            while len(self._held) > 1 and sum(weight.nbytes for weight in self._held.values()) > HELD_BYTES:
                self._drop(next(iter(self._held)))
            if self.on_read is not None:
                self.on_read(name, held, values)
        self.was_read.add(name)
        return held

    def _values(self, name: str, device: torch.device) -> Tensor:
        """The weight as it is in its file, maybe on ``device``; the next are read meanwhile."""
        saved = self._saved[name]
        if not reads_ahead(device):
            saved.prefetch()
            if name in self._next:
                self._saved[self._next[name]].prefetch()
            return saved.values
        if self._uploads is None:
            self._uploads = WeightUploads(device)
        uploads = self._uploads
        if name not in uploads and uploads.nbytes >= AHEAD_BYTES:
            uploads.forget()  # they come in another order
        # The weight, and those that follow and are not held
        uploads.start(name, saved)
        passed, coming = {name}, self._next.get(name, name)
        while coming not in passed:
            passed.add(coming)
            if coming not in self._held:
                if uploads.nbytes >= saved.nbytes + AHEAD_BYTES:
                    break
                uploads.start(coming, self._saved[coming])
            coming = self._next.get(coming, coming)
        return uploads.take(name, saved)

    def read_back(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The values of a weight once more, after those that follow it."""
        saved = self._saved[name]
        if self.on_progress is not None:
            self.on_progress(name, 1 - (self._before[name] + saved.nbytes) / max(1, self.nbytes))
        before = next((earlier for earlier, following in self._next.items() if following == name), name)
        self._saved[before].prefetch()
        with _disable_current_modes():
            values = converted(saved.values, device, dtype)
        self.forget(name)
        return values

    def _drop(self, name: str) -> None:
        """Forget a weight that is held, and note whether the model wrote to it."""
        weight = self._held.pop(name, None)
        if weight is not None:
            self.forget(name)
            if self._versions[name] != version_of(weight):
                self._written = name

    def forget(self, name: str) -> None:
        """Drop the pages of the file."""
        # If the cache cannot hold all, the first weights stay in it for the next call
        self._saved[name].forget(cached=self._before[name] < self._cached)

    def bytes_per_second(self) -> float:
        """How fast a sample of the weights is read."""
        started, count = time.monotonic(), 0
        for saved in itertools.islice(self._saved.values(), 0, None, max(1, len(self._saved) // SAMPLES)):
            sample = saved._replace(shape=(min(math.prod(saved.shape), SAMPLE_BYTES // saved.dtype.itemsize),))
            sample.prefetch()
            count += len(saved.mapped[saved.start : saved.start + sample.nbytes])
        return max(1, count) / max(time.monotonic() - started, 1e-6)

    def restart(self, on_read: OnRead | None) -> None:
        """Forget what was read; tell ``on_read`` from now on. Raises if a weight was written."""
        for name in list(self._held):
            self._drop(name)
        self.was_read.clear()
        self.on_read, self._last = on_read, None
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None
        written, self._written = self._written, None
        if written is not None:
            problem = f"The model writes to its weight {written}, which is read from its file again and again."
            raise UsageError(problem, "Scan it without --stream where there is memory for it.")


class ReadBack:
    """Lets a graph of autograd keep weights by their names, and read them again for derivatives."""

    def __init__(self, stream: WeightStream) -> None:
        self._stream = stream
        self._names: dict[int, tuple[str, weakref.ref[Any]]] = {}
        self._last: dict[tuple[str, torch.dtype], Tensor] = {}

    def note(self, name: str, *tensors: Tensor) -> None:
        """Note that ``tensors`` hold the weight, as long as their storages live."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            forget = functools.partial(self._names.pop, storage._cdata)  # which gets the reference as default
            self._names[storage._cdata] = name, weakref.ref(storage, forget)

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        """What a graph saves inside is kept so."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        name, _ = self._names.get(tensor.untyped_storage()._cdata, (None, None))
        if name is None:
            return tensor
        return name, tensor.device, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        name, device, dtype, *layout = packed
        if (name, dtype) not in self._last:  # each direction asks for it
            while len(self._last) > 1:  # a norm has two
                del self._last[next(iter(self._last))]
            self._last[name, dtype] = self._stream.read_back(name, device, dtype)
        return self._last[name, dtype].as_strided(*layout)


class _Parameters(dict[str, Any]):
    """The parameters of a module: indexing reads values, iterating gives what stands for them."""

    def __init__(self, stream: WeightStream, names: dict[str, str], parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.stream, self._names = stream, names

    def __getitem__(self, key: str) -> Any:
        parameter = super().__getitem__(key)
        if parameter is not None and is_unread(parameter):
            return self.stream.read(self._names[key], parameter)
        return parameter


def stream_of(model: nn.Module) -> WeightStream | None:
    """What ``model`` reads its weights through; ``None`` if it holds them."""
    for module in model.modules():
        if isinstance(module._parameters, _Parameters):
            return module._parameters.stream
    return None


@contextlib.contextmanager
def reads_forgotten(model: nn.Module) -> Iterator[None]:
    """What ``model`` reads inside is forgotten afterwards."""
    try:
        yield
    finally:
        stream = stream_of(model)
        if stream is not None:
            stream.restart(None)


def parameters_in(files: Iterable[Path]) -> int:
    """The number of values in ``files``."""
    return sum(math.prod(saved.shape) for file in files for saved in saved_tensors(file).values())


def stream_weights(model: nn.Module, files: Iterable[Path], rename: Callable[[str], str] = str) -> None:
    """Let ``model``, made under :func:`unread_weights`, read its weights from ``files``.

    Buffers are read at once. ``rename`` gives the name in the model for one in the files.
    """
    named = {rename(name): tensor for file in files for name, tensor in saved_tensors(file).items()}
    state: dict[str, Tensor] = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    # Tied weights have several names, and one of them in the files
    other = [name for name, tensor in named.items() if name in state and state[name].shape != tensor.shape]
    same: dict[int, str] = {id(tensor): name for name, tensor in state.items() if name in named}
    missing = [name for name, tensor in state.items() if is_unread(tensor) and id(tensor) not in same]
    if missing or other:
        few = ", ".join([*missing, *other][:3])
        raise UsageError(
            f"{len(missing)} weights of the model are missing in the file and {len(other)} have another shape "
            f"({few}): it cannot be streamed.",
            "Save it with the names that its weights have, or scan it without --stream where there is memory for it.",
        )
    names_read = (same[id(tensor)] for tensor in model.parameters() if is_unread(tensor))
    stream = WeightStream(named, list(dict.fromkeys(names_read)))
    for module in model.modules():
        names = {
            key: same[id(tensor)]
            for key, tensor in module._parameters.items()
            if tensor is not None and is_unread(tensor)
        }
        if isinstance(module, nn.RNNBase):  # keeps a list of its weights
            for key, name in names.items():
                values = named[name].values.to(getattr(module, key).dtype, copy=True)
                setattr(module, key, nn.Parameter(values, requires_grad=False))
        elif names:
            module._parameters = _Parameters(stream, names, module._parameters)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        path, _, key = name.rpartition(".")
        if name in named and is_unread(buffer):  # it was made from a weight
            model.get_submodule(path)._buffers[key] = named[name].values.to(buffer.dtype, copy=True)
        elif name in named:
            buffer.copy_(named[name].values)
