"""Factorizations that fail on low-precision values; the error is raised later, by a check of their ``info`` output.

``torch.linalg.cholesky`` calls ``linalg_cholesky_ex`` and then ``_linalg_check_errors(info)``, which raises. Where the
reference's ``info`` reports success, the check is skipped and the run continues with the reference's factors.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from lowprec_check.engine.trace.dispatched_call import DispatchedCall
from lowprec_check.engine.trace.journal import Journal
from lowprec_check.engine.trace.twins import Twins, storage_key
from lowprec_check.errors import message_of

_CHECK = "aten::_linalg_check_errors"


class SolverFailures:
    """Stores the factorizations whose ``info`` differs from the reference's."""

    def __init__(self, twins: Twins, journal: Journal) -> None:
        self._twins, self._journal = twins, journal
        self._failed: dict[int, tuple[DispatchedCall, list[weakref.ref[Tensor]]]] = {}

    def add(self, call: DispatchedCall, outputs: list[Tensor], info: Tensor) -> None:
        """Store ``call`` if it is a factorization; ``info`` is the output that differs from the reference's."""
        if is_factorization(call):
            factors = [weakref.ref(out) for out in outputs if out.is_floating_point()]
            self._failed[storage_key(info)] = (call, factors)

    def recover(self, check: DispatchedCall, error: Exception) -> bool:
        """If ``check`` failed on the ``info`` of a stored call, replace its factors with the reference's.

        Returns whether the run can continue as if the check had passed.
        """
        if check.traits.packet != _CHECK or not check.inputs:
            return False
        failed, factors = self._failed.pop(storage_key(check.inputs[0]), (None, []))
        if failed is None:
            return False
        for factor in factors:
            out = factor()
            if out is not None:
                out.copy_(self._twins.reference_of(out))
        self._journal.add_call_gap(failed, "numeric-failure", message_of(error))
        return True


def is_factorization(call: DispatchedCall) -> bool:
    """Whether the op reports in an output whether it has failed."""
    return call.traits.packet.startswith("aten::linalg_") and call.traits.packet.endswith("_ex")
