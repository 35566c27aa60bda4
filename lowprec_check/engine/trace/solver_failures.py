"""Factorisations that fail on low-precision values: the error comes later, from a check of their ``info`` output.

``torch.linalg.cholesky`` calls ``linalg_cholesky_ex`` and then ``_linalg_check_errors(info)``, which raises. Where the
reference's ``info`` says success, the check is passed and the reference's factors are taken over.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from lowprec_check.engine.trace.journal import Journal
from lowprec_check.engine.trace.lockstep import Lockstep, storage_key
from lowprec_check.engine.trace.op_call import Call, dtypes_in

_CHECK = "aten::_linalg_check_errors"


class SolverFailures:
    """Remembers whose ``info`` differs from the reference's."""

    def __init__(self, lockstep: Lockstep, journal: Journal) -> None:
        self.lockstep, self.journal = lockstep, journal
        self._failed: dict[int, tuple[Call, list[weakref.ref[Tensor]]]] = {}

    def note(self, call: Call, outputs: list[Tensor], info: Tensor) -> None:
        """``info``, an output of ``call``, says something else than the reference's."""
        if call.traits.packet.startswith("aten::linalg_") and call.traits.packet.endswith("_ex"):
            factors = [weakref.ref(out) for out in outputs if out.is_floating_point()]
            self._failed[storage_key(info)] = (call, factors)

    def cure(self, check: Call, error: Exception) -> bool:
        """If ``check`` failed on a noted ``info``: take over the reference's factors and go on."""
        if check.traits.packet != _CHECK or not check.inputs:
            return False
        failed, factors = self._failed.pop(storage_key(check.inputs[0]), (None, []))
        if failed is None:
            return False
        for factor in factors:
            out = factor()
            if out is not None:
                out.copy_(self.lockstep.get(out))
        self.journal.gap(failed, "numeric-failure", "dispatch", str(error), dtypes_in(failed.inputs))
        return True
