"""The error budget of an output: follows the error of each op to it, and adds it up by place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from lowprec_check.core.trace.observers import Returned
from lowprec_check.core.trace.twins import Twins
from lowprec_check.features.error_budget.error_tape import ErrorTape, squares
from lowprec_check.features.error_budget.kept_modules import Kept, KeptModules
from lowprec_check.schema.measures import ErrorBudget, ModuleShare, Share
from lowprec_check.schema.module_paths import paths_above
from lowprec_check.schema.op_calls import OpCall
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.tensor_comparison import ratio

PROBES = 1  # random directions in which errors are followed, beside that of the output's own error

MOST_SHARES = 200
LEAST_SHARE = 1e-4  # smaller shares are not listed

# If the sizes of shares add up to this many times their sum, errors cancel: energy is shared then.
_CANCELLING = 3.0

# Below this share of rounding, chance does not matter: other errors are the same in every run.
_LEAST_ROUNDING = 0.1

Source = tuple[str, str, str | None, bool]
"""A place: module, op, source line, and whether it is rounding of results that leave the module."""


def error_budget(
    tape: ErrorTape,
    twins: Twins,
    outputs: Sequence[Returned],
    fp32: Sequence[Tensor] | None,
    *,
    modules: Collection[str],
    autocast: bool,
    seed: int,
) -> ErrorBudget:
    """The budget of ``outputs``, the tensors of a recorded run; sets the shares of its rows.

    ``fp32`` are the outputs of the plain fp32 run; ``None`` if they cannot be compared, because
    they draw other random numbers: then the reference's are used. ``modules`` are those that were
    called. ``autocast``: whether the run is under autocast, which casts at few ops only.
    """
    if tape.stopped is not None:
        return ErrorBudget(reason=tape.stopped)
    leaves = [
        _Leaf(low.detach(), twins.reference_of(low), twins.reference_of(low), lost)
        for low, _, lost in outputs
        if is_float(low) and low.numel()
    ]
    if fp32 is not None:
        floating = [tensor for tensor in fp32 if is_float(tensor) and tensor.numel()]
        if [tensor.shape for tensor in floating] != [leaf.low.shape for leaf in leaves]:
            return ErrorBudget(reason="the output differs in structure from that of fp32")
        leaves = [leaf._replace(fp32=out.to(leaf.low.device)) for leaf, out in zip(leaves, floating, strict=True)]
    reason = None
    if not leaves:
        reason = "the output has no floating-point values"
    elif fp32 is None and all(leaf.lost is not None for leaf in leaves):
        reason = leaves[0].lost
    elif not all(bool(leaf.low.isfinite().all()) for leaf in leaves if bool(leaf.fp32.isfinite().all())):
        reason = "the output has NaN or Inf"
    if reason is not None:
        return ErrorBudget(reason=reason)
    # By error; last those that are all zeros in fp32, whose infinite error tells little.
    errors = [ratio(norm_of(_difference(leaf.low, leaf.fp32)), norm_of(leaf.fp32)) for leaf in leaves]
    first, *others = sorted(range(len(leaves)), key=lambda i: (errors[i] != math.inf, errors[i]), reverse=True)
    leaf = leaves[first]
    if leaf.lost is not None and errors[first] > 0:
        return ErrorBudget(reason=leaf.lost, output_rms=norm_of(leaf.fp32) / math.sqrt(leaf.low.numel()))
    budget = _budget_of(leaf, tape, modules, autocast=autocast, seed=seed)
    next_error = errors[others[0]] if others else 0.0
    return msgspec.structs.replace(budget, next_error=next_error if math.isfinite(next_error) else None)


class _Leaf(NamedTuple):
    """A floating tensor of the output: of the run, of its reference, of the plain fp32 run."""

    low: Tensor
    twin: Tensor
    fp32: Tensor
    lost: str | None = None  # why errors cannot be followed to it


def _difference(some: Tensor, other: Tensor) -> Tensor:
    """The difference in fp64 as real numbers; 0 where it is not finite."""
    return (_real(some) - _real(other)).nan_to_num(0.0, 0.0, 0.0)


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double()


def norm_of(tensor: Tensor) -> float:
    """The 2-norm of the finite values, in fp64."""
    return float(_real(tensor).nan_to_num(0.0, 0.0, 0.0).norm())


def _budget_of(leaf: _Leaf, tape: ErrorTape, modules: Collection[str], *, autocast: bool, seed: int) -> ErrorBudget:
    """The budget of one tensor of the output."""
    error, size = _difference(leaf.low, leaf.fp32), norm_of(leaf.fp32)
    error_norm, rms = float(error.norm()), size / math.sqrt(error.numel())
    if not size:
        return ErrorBudget(reason="the output of fp32 is all zeros", output_rms=0.0)
    if not error_norm:
        return ErrorBudget(predicted=0.0, measured=0.0, unexplained=0.0, output_rms=rms)

    # Directions of the output: its error's, of length 1; random ones orthogonal to it.
    first = (error / error_norm).reshape(-1)
    generator = torch.Generator(first.device).manual_seed(seed)
    orthogonal = [first]
    for _ in range(PROBES):
        random = torch.randn(len(first), generator=generator, dtype=first.dtype, device=first.device)
        orthogonal.append(random - (random @ first) * first)
    directions = torch.stack(orthogonal).float().reshape(len(orthogonal), *error.shape)
    if leaf.low.is_complex():
        directions = torch.view_as_complex(directions)
    ops = tape.backward([(leaf.low, directions)])
    entries = [(index, kind, by) for index, op in enumerate(ops) for kind, by in enumerate(op.by) if by is not None]
    along = torch.zeros(0, 1 + PROBES).double()
    if entries:
        along = torch.stack([change.to(error.device) for *_, change in entries]).cpu().double()
    total = along.sum(0)
    explained = float(total[0]) / error_norm

    # The share of each change is its part along the error of the output. Where errors cancel, as in
    # an output of few numbers, that is a matter of chance: there its expected square counts.
    parts = along[:, 0] / error_norm
    if len(parts) and float(parts.abs().sum()) > _CANCELLING * abs(explained):
        energy = along[:, 0].square() + along[:, 1:].square().mean(1)
        parts = energy / energy.sum() * explained
    shares = dict(zip([entry[:2] for entry in entries], parts.tolist(), strict=True))
    places = _Places([op.row for op in ops], shares)
    kept_modules = KeptModules(ops, frozenset(modules), autocast=autocast)
    for path in kept_modules.inside:
        places.add(path, kept_modules.kept(path))
    listed, others = by_place(places.entries())

    # The square of a sum of independent errors varies as that of as many equal ones as its size,
    # squared, holds variances along itself.
    rounding = math.fsum(share for (_, kind), share in shares.items() if kind)
    energies = [op.energies[0][:1] for op in ops if op.energies is not None]
    variance = float(squares(torch.cat(energies)).sum()) if energies else 0.0
    spread = 0.0
    if variance > 0.0 and rounding >= _LEAST_ROUNDING:
        spread = min(1.0, math.sqrt(2.0 * variance / rounding) / error_norm)
    across = float(total[1:].square().mean())
    decided = float((_difference(leaf.twin, leaf.fp32) * error).sum())
    return ErrorBudget(
        predicted=math.sqrt(float(total[0]) ** 2 + across) / size,
        measured=error_norm / size,
        unexplained=1.0 - explained,
        decisions=decided / error_norm**2,
        shares=listed,
        others=others,
        modules=places.modules(),
        blocked=list(tape.blocked),
        output_rms=rms,
        spread=spread,
    )


class _Places:
    """Adds shares up by the module that has to be kept in fp32 for them to go."""

    def __init__(self, rows: Sequence[OpCall], shares: Mapping[tuple[int, int], float]) -> None:
        """``shares`` are those of ops, by position and kind: before rounding, and by rounding."""
        self._rows, self._shares = rows, shares
        self._kept: dict[str, Kept] = {}
        # By module, the share that goes if it is kept in fp32.
        self._gone: dict[str, float] = {}

    def add(self, module: str, kept: Kept) -> None:
        """Add what goes with ``module`` in fp32."""
        self._kept[module] = kept
        places = [(index, kind) for index in kept.ops for kind in (0, 1) if (index, kind) in self._shares]
        gone = math.fsum(self._shares[place] * self._part(module, *place) for place in places)
        # Outside this range it depends on the other errors: at best, what goes has no other part.
        if not 0.0 <= gone <= 1.0:
            gone *= 2.0 - gone
        self._gone[module] = gone

    def modules(self) -> list[ModuleShare]:
        """The share that goes with each module in fp32, the largest first; without tiny ones."""
        ordered = sorted(self._gone, key=lambda path: -self._gone[path])
        notable = [path for path in ordered if abs(self._gone[path]) >= LEAST_SHARE]
        return [ModuleShare(module=path, share=self._gone[path]) for path in notable[:MOST_SHARES]]

    def entries(self) -> Iterator[tuple[Source, float]]:
        """All shares by place; of several modules, the one with which most goes counts."""
        first: dict[int, str] = {}
        innermost = sorted(self._kept, key=lambda path: (-self._gone[path], -path.count(".")))
        for path in innermost:
            below = {op for other in self._kept if other.startswith(f"{path}.") for op in self._kept[other].ops}
            for op in self._kept[path].ops - below:
                first.setdefault(op, path)
        for (index, kind), share in self._shares.items():
            row = self._rows[index]
            row.share = (row.share or 0.0) + share
            own = self._part(row.module, index, kind)
            if kind and own < 1.0:
                row.leaving = (row.leaving or 0.0) + share * (1.0 - own)
            # What goes with a module does not count again around it; the rest is the model's own.
            done = 0.0
            innermost_path = first.get(index, "")
            for path in (innermost_path, *paths_above(innermost_path), ""):
                if path and path not in self._kept:
                    continue
                part = self._part(path, index, kind)
                if part != done:
                    yield (path, row.op, row.source, bool(kind) and path != innermost_path), share * (part - done)
                done = part

    def _part(self, module: str, index: int, kind: int) -> float:
        """Which part of the error of an op goes with ``module`` in fp32."""
        if not module:
            return 1.0
        kept = self._kept.get(module)
        if kept is None or index not in kept.ops:
            return 0.0
        return 1.0 - kind * kept.rounded.get(index, 0.0)


def by_place(entries: Iterable[tuple[Source, float]]) -> tuple[list[Share], float]:
    """Shares added up by place, largest first; and the sum of those that are not listed."""
    grouped: dict[Source, list[float]] = defaultdict(list)
    for place, share in entries:
        grouped[place].append(share)
    shares = [
        Share(module=module, op=op, source=source, rounding=rounding, share=math.fsum(parts), calls=len(parts))
        for (module, op, source, rounding), parts in grouped.items()
    ]
    large = sorted((share for share in shares if abs(share.share) >= LEAST_SHARE), key=lambda share: -abs(share.share))
    listed = sorted(large[:MOST_SHARES], key=lambda share: -share.share)
    return listed, math.fsum(share.share for share in shares) - math.fsum(share.share for share in listed)
