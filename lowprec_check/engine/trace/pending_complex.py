"""Complex results of a rescue: they stay complex64 until an op makes them real again.

There is no complex bf16 dtype, and few kernels support complex fp16. The result of a rescued ``torch.fft.rfft``
therefore stays complex64 (*pending*), and the first real value computed from it is cast to the low dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.op_arguments import outputs_of
from lowprec_check.engine.trace.twins import Twins


class PendingComplex:
    """Tracks which storages are pending; real results are cast to the dtype ``low``."""

    def __init__(self, twins: Twins, low: torch.dtype) -> None:
        self._twins, self._low = twins, low
        self.any = False
        """Whether any result has been pending."""

    def add(self, out: Any) -> None:
        """Mark the complex tensors in the result of a rescue as pending."""
        for tensor in outputs_of(out):
            if tensor.is_complex():
                self.any = True
                self._twins.find_or_add(tensor).pending_complex = True

    def resolve(self, call: DispatchedCall, out: Any) -> Any:
        """``out``; if an input is pending, its real tensors are cast to the low dtype and its complex ones become pending."""
        if call.traits.mutable or not any(self._is_pending(tensor) for tensor in call.inputs):
            return out
        if call.traits.view and isinstance(out, Tensor) and not out.is_complex() and out.stride()[-1:] == (1,):
            return out  # view_as_real: pairs that still represent complex values
        resolved = [self._resolve_tensor(tensor) for tensor in outputs_of(out)]
        return resolved[0] if isinstance(out, Tensor) else type(out)(resolved)

    def _is_pending(self, tensor: Tensor) -> bool:
        twin = self._twins.find(tensor)
        return twin is not None and twin.pending_complex

    def _resolve_tensor(self, tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            self._twins.find_or_add(tensor).pending_complex = True
            return tensor
        if tensor.dtype != torch.float32:
            return tensor
        narrow = tensor.to(self._low)
        if self._twins.find(tensor) is not None:
            reference = self._twins.reference_of(tensor).clone(memory_format=torch.contiguous_format)
            self._twins.set_reference(narrow, reference)
        return narrow
