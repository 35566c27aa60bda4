"""Whether one op call runs on the predicted device, by the catalog; else, what is raised there."""

from __future__ import annotations

import functools
import os
import re
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowprec_check.catalog.aten import AtenCatalog, AtenSupport, counterpart, only_device
from lowprec_check.catalog.known_issues import matching
from lowprec_check.catalog.names import function_name, overload_name
from lowprec_check.catalog.predictable import has_kernels
from lowprec_check.catalog.records import DTYPES as DTYPES_OF_CATALOG
from lowprec_check.catalog.records import FORMATS, SHORT, Dtype, Numbers, Registration
from lowprec_check.core.trace.dispatched_call import DispatchedCall
from lowprec_check.schema.axes import device_of
from lowprec_check.schema.measures import PredictedDevice

DTYPES: dict[torch.dtype, Dtype] = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.complex32: "float16"}
"""The dtypes of 16 bits, and what the catalog has for each."""
SOURCE = "the source of its kernels"

_ON_DEVICE = {"cuda": {"_embedding_bag": "_embedding_bag_forward_only"}}
"""By device, ops that a CPU has as well, and those that do their work there."""
_FFT = ("_fft_r2c", "_fft_c2r", "_fft_c2c")
_MATRIX_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "convolution")
_ONE_DTYPE = ("native_layer_norm", "native_group_norm")
"""Their GPU kernels read weights in the dtype of the input; those of a CPU take fp32, too."""

_VISION = "nms roi_align roi_pool ps_roi_align ps_roi_pool deform_conv2d"
_OF_TORCHVISION = frozenset(f"torchvision::{name}" for name in _VISION.split())
"""Their GPU kernels are for fp32, fp64 and half; autocast casts to fp32 before them."""


class Refusal(NamedTuple):
    """Why an op call does not run on the device."""

    kind: Literal["missing", "refused"]
    message: str
    basis: str
    """What this rests on, in words."""

    def error(self) -> Exception:
        """The exception that torch raises there; its attribute ``predicted_by`` is the basis."""
        error: Exception = (NotImplementedError if self.kind == "missing" else RuntimeError)(self.message)
        error.predicted_by = self.basis  # type: ignore[attr-defined]
        return error


class KernelSupport:
    """Support of op calls on ``device``: one look into the catalog for each op and dtype."""

    def __init__(self, device: PredictedDevice) -> None:
        self._device = device
        self.is_cpu = device.name == "cpu"
        covered = has_kernels(device.name, device.torch)
        dtypes = DTYPES_OF_CATALOG if covered else ()
        self._catalogs = {dtype: AtenCatalog(device.name, dtype, device.torch) for dtype in dtypes}
        variable = device_of(device.name).fallback_variable
        self._falls_back = variable is not None and os.environ.get(variable) == "1"
        self._find = functools.cache(self._look_up)
        self.registration = functools.cache(self._registration)
        """How an op is registered on the device; ``None`` if that is not known."""
        self.known: set[str] = set()
        """Ops in 16 bits that the catalog has, as op calls name them: ``aten.mm.default``."""
        self.assumed: set[str] = set()
        """Those that it does not have; they are taken to run."""

    def why_refused(self, call: DispatchedCall, narrow: list[Tensor], wide: list[Tensor]) -> Refusal | None:
        """Why a call with these floating inputs, in 16 bits and more, does not run, if so."""
        func, name = call.func, self.name_of(call.func)
        if self.registration(func) == "none":
            device = f"the {self._device.name.upper()} device"
            message = f"The operator 'aten::{name}' is not currently implemented for {device}."
            return Refusal("missing", message, f"{self._device.kernels}: aten::{name} is not registered")
        if not narrow:
            return None
        dtypes = {tensor.dtype for tensor in narrow}
        # What sources of kernels say of mixed dtypes, complex numbers and ops of torchvision.
        missing = None
        if not self.is_cpu and name in _ONE_DTYPE and any(tensor.ndim for tensor in wide):
            expected = FORMATS[DTYPES[narrow[0].dtype]].cpp_name
            return Refusal("refused", f"expected scalar type {expected} but found Float", SOURCE)
        if not self.is_cpu and name in _MATRIX_PRODUCTS and torch.complex32 in dtypes:
            missing = "ComplexHalf"
        if not self.is_cpu and name in _OF_TORCHVISION and not call.autocast_keys and torch.bfloat16 in dtypes:
            missing = "BFloat16"
        if missing:
            return Refusal("missing", f"\"{name}\" not implemented for '{missing}'", SOURCE)
        for dtype in dtypes:
            support = self._find(func, DTYPES[dtype], "complex" if dtype.is_complex else "floating")
            if support.state is None:
                is_own = name == overload_name(func.name())
                self.assumed.add(str(func) if is_own else f"{func.namespace}.{name}")
            else:
                self.known.add(str(func))
            fails_here = support.state == "some" and _fails_here(name, call, narrow, support.condition)
            if support.state == "none" or fails_here:
                return self._refusal(name, call, DTYPES[dtype], support)
        return None

    def name_of(self, func: OpOverload) -> str:
        """The overload that the device runs for ``func``: ``add.Tensor``, ``_cudnn_rnn``."""
        name = overload_name(func.name())
        of_device = counterpart(name, self._device.name)
        if of_device:
            return of_device.dispatches[0]
        return _ON_DEVICE.get(self._device.name, {}).get(name, name)

    def takes_in_fft(self) -> list[torch.dtype]:
        """The narrow dtypes that ``torch.fft`` takes on the device, at least for some sizes."""
        if not self._catalogs or self.is_cpu:
            return []
        # There are no complex tensors of bfloat16.
        ops = {torch.float16: ("fft_rfft", *_FFT), torch.bfloat16: ("fft_rfft", "_fft_r2c")}

        def runs(dtype: torch.dtype, name: str) -> bool:
            return self._catalogs[DTYPES[dtype]].of(name).state != "none"

        return [dtype for dtype, names in ops.items() if all(runs(dtype, name) for name in names)]

    def _registration(self, func: OpOverload) -> Registration | None:
        catalog = self._catalogs.get("float32")
        if catalog is None or func.namespace != "aten":
            return None
        name = self.name_of(func)
        # One kernel serves all overloads, if ``name`` is the name of ``func`` itself.
        if catalog.declared is None:
            base = name.partition(".")[0]
            overloads = getattr(torch.ops.aten, base, func.overloadpacket).overloads()
            names = [name, *(f"{base}.{other}".removesuffix(".default") for other in overloads)]
            kinds = {catalog.of(overload).state: catalog.of(overload).kind for overload in names}
            return "none" if "all" not in kinds and kinds.get("none") == "no-backend-kernel" else None
        row = catalog.declared.row(name)
        # The device dispatches another op there, which is not known.
        if only_device(name) not in (None, self._device.name) and (row is None or row.registration == "none"):
            return None
        if row is not None and row.registration == "none" and self._falls_back:
            return "fallback"
        return row.registration if row is not None else None

    def _look_up(self, func: OpOverload, dtype: Dtype, numbers: Numbers) -> AtenSupport:
        name, own = self.name_of(func), overload_name(func.name())
        if func.namespace != "aten":
            return AtenSupport(state=None)
        if self._catalogs:
            # That of the op itself, of the one that the device runs, or else of all its overloads.
            catalog = self._catalogs[dtype]
            if counterpart(own, self._device.name):
                of_own = catalog.of(own, numbers)
                if of_own.state is not None:
                    return of_own
            support = catalog.of(name, numbers)
            base = name.partition(".")[0]
            if support.state is not None or base == name:
                return support
            return catalog.of(base, numbers)
        # Without a catalog of the release, known issues may name it.
        device, low = self._device, SHORT[dtype]
        for issue in matching(op=name, device=device.name, dtype=low, torch=device.torch, code="LP101"):
            if function_name(name) in issue.ops:
                message = f"\"{name}\" not implemented for '{FORMATS[dtype].cpp_name}'"
                return AtenSupport(state="none", kind="missing-kernel", message=message, shown_by=[issue.link])
        return AtenSupport(state=None)

    def _refusal(self, name: str, call: DispatchedCall, dtype: Dtype, support: AtenSupport) -> Refusal:
        message = support.message or f"no kernel for {SHORT[dtype]}"
        if self._catalogs and self._catalogs[dtype].declared is not None:
            message = f"aten::{name} in {SHORT[dtype]}: {message}"
        basis = f"{self._device.kernels}: aten::{name} in {SHORT[dtype]}"
        if support.shown_by:
            basis += f", shown by {', '.join(support.shown_by[:2])}"
        kind: Literal["missing", "refused"] = "refused" if support.kind == "unsupported-dtype" else "missing"
        # The sizes of the call, instead of those of the catalog's sample.
        if name in _FFT:
            kind, message = "refused", re.sub(r"\[[\d, ]+\]$", str(_transformed(name, call)), message)
        return Refusal(kind, message, basis)


def _fails_here(name: str, call: DispatchedCall, inputs: list[Tensor], condition: str | None) -> bool:
    """Whether a call fails, of an op that fails for some samples of the catalog."""
    # cuFFT computes in half only where all sizes are powers of two.
    if name in _FFT:
        return any(size & (size - 1) for size in _transformed(name, call))
    # The condition is ``fails where training`` or ``runs only where …``, perhaps about arguments.
    verb, _, terms = (condition or "").partition(" where ")
    arguments = {
        argument.name: argument.default_value
        for argument in call.func._schema.arguments
        if argument.has_default_value()
    }
    arguments |= call.named
    held = []
    for term in terms.split(" and "):
        name, _, value = term.removeprefix("not ").partition("=")
        # Without a condition about arguments, every call fails that is not empty: the samples that
        # pass do not dispatch the op (``cdist`` by a matrix product).
        if verb not in ("fails", "runs only") or name not in arguments:
            return any(tensor.numel() for tensor in inputs)
        if value:
            held.append(repr(arguments[name]) == value)
        else:
            held.append(bool(arguments[name]) != term.startswith("not "))
    return all(held) == (verb == "fails")


def _transformed(name: str, call: DispatchedCall) -> list[int]:
    sizes = [call.args[0].shape[dim] for dim in call.args[1]]
    if name == "_fft_c2r":
        return [*sizes[:-1], call.args[3]]
    return sizes
