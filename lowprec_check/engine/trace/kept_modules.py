"""What goes of the error of an output if a module is kept in fp32: which ops that makes wide, and
which results are still rounded.

A module in fp32 computes all inside in fp32, on inputs that others have rounded. In a cast model
its results are narrowed again. Under autocast they stay wide, and so do those of the ops that read
them, up to the next that autocast runs in 16 bits. There the last wide result is rounded all the
same: the rounding of a matrix product stays, also through exact ops after it, such as relu.
"""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowprec_check.engine.trace.error_tape import Read, TapedOp, squares
from lowprec_check.schema.module_paths import paths_above
from lowprec_check.schema.op_calls import PRODUCTS

_CASTS = re.compile(r"_to_copy|convert_element_type")


class Kept(NamedTuple):
    """What goes with one module in fp32; ops by their position."""

    ops: frozenset[int]
    """Those that are wide then."""
    rounded: dict[int, float]
    """The part of the rounding of an op's results that stays, of those of which some does."""


class KeptModules:
    """The ops of one run, ``autocast`` or cast; ``modules`` are those that can be kept in fp32:
    that are called.
    """

    def __init__(self, ops: Sequence[TapedOp], modules: Collection[str], *, autocast: bool) -> None:
        self._ops, self._autocast = ops, autocast
        self._holds = [
            not op.narrow or bool(autocast and (PRODUCTS.search(op.row.op) or _CASTS.search(op.row.op))) for op in ops
        ]
        """Whether its results have the same dtype whatever it reads."""
        self._readers: dict[int, list[tuple[int, Read]]] = defaultdict(list)
        energies = [read.energy for op in ops for read in (*op.reads, *op.returned) if read.energy is not None]
        self._energies = _numbers([*energies, *(energy for op in ops for energy in op.energies or ())])
        for index, op in enumerate(ops):
            for read in op.reads:
                self._readers[read.writer].append((index, read))
        self.inside: dict[str, list[int]] = defaultdict(list)
        """The ops inside each module that can be kept."""
        for index, op in enumerate(ops):
            for path in (op.row.module, *paths_above(op.row.module)):
                if path and path in modules:
                    self.inside[path].append(index)

    def kept(self, module: str) -> Kept:
        """What goes with ``module`` in fp32."""
        wide = self._wide(module)
        rounded: dict[int, float] = {}
        through: dict[int, float] = {}
        """Of an op that hardly changes rounded values, the part of the rounding of what it reads
        that stays.
        """
        for index in sorted(wide, reverse=True):
            op = self._ops[index]
            if not op.narrow:
                continue
            edges = [
                (self._staying(reader, wide, through), self._energy(read)) for reader, read in self._readers[index]
            ]
            edges += [(0.0 if self._autocast else 1.0, self._energy(read)) for read in op.returned]
            total = math.fsum(energy for _, energy in edges)
            stays = math.fsum(part * energy for part, energy in edges)
            if not stays:
                continue
            rounded[index] = stays / total
            given = math.fsum(map(self._energy, op.reads))
            through[index] = stays * self._new_rounding(op) / max(given, total)
        return Kept(frozenset(wide), rounded)

    def _wide(self, module: str) -> set[int]:
        wide = set(self.inside[module])
        if not self._autocast:
            return wide
        waiting = sorted({reader for index in wide for reader, _ in self._reading(index)})
        known = set(waiting)
        while waiting:
            index = heapq.heappop(waiting)
            if index in wide or self._holds[index]:
                continue
            if any(
                read.widens and read.writer in wide and self._ops[read.writer].narrow for read in self._ops[index].reads
            ):
                wide.add(index)
                for reader, _ in self._reading(index):
                    if reader not in known:
                        known.add(reader)
                        heapq.heappush(waiting, reader)
        return wide

    def _reading(self, index: int) -> Sequence[tuple[int, Read]]:
        if self._ops[index].narrow:
            return self._readers[index]
        return ()

    def _staying(self, reader: int, wide: set[int], through: Mapping[int, float]) -> float:
        """The part of the rounding of what ``reader`` reads that stays: all where it is narrowed."""
        if reader in wide:
            return through.get(reader, 0.0)
        return 1.0 if not self._autocast or self._ops[reader].narrow else 0.0

    def _new_rounding(self, op: TapedOp) -> float:
        """The part of the rounding of its results that it has only if what it reads is not rounded."""
        if op.energies is None:
            return 0.0 if any(by is not None for by in op.by) else 1.0
        in_run, of_exact = (self._energies[id(energy)] for energy in op.energies)
        if of_exact:
            return max(0.0, 1.0 - in_run / of_exact)
        return 0.0

    def _energy(self, read: Read) -> float:
        return self._energies.get(id(read.energy), 0.0)


def _numbers(energies: Sequence[Tensor]) -> dict[int, float]:
    """By ``id``: along the error of the output, and in all other directions."""
    if not energies:
        return {}
    stacked = squares(torch.stack(list(energies)).cpu())
    totals: list[float] = (stacked[:, 0] + stacked[:, 1:].mean(1)).tolist()
    return {id(energy): total for energy, total in zip(energies, totals, strict=True)}
