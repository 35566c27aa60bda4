"""What part of an output's error goes if a module is kept in fp32: its ops, and later roundings.

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
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from lowprec_check.features.error_budget.error_tape import Read, TapedOp, squares
from lowprec_check.schema.module_paths import paths_above
from lowprec_check.schema.op_calls import PRODUCTS

_CASTS = re.compile(r"_to_copy|convert_element_type")


class Kept(NamedTuple):
    """What goes with one module in fp32; ops by their position."""

    ops: frozenset[int]  # those that are wide then
    rounded: dict[int, float]  # the part of the rounding of an op's results that stays, of those of which some does


class KeptModules:
    """The ops of one run, ``autocast`` or cast; ``modules`` are those that are called."""

    def __init__(self, ops: Sequence[TapedOp], modules: Collection[str], *, autocast: bool) -> None:
        self._ops, self._autocast = ops, autocast
        # Whether an op's results have the same dtype whatever it reads.
        self._holds = [
            not op.narrow or bool(autocast and (PRODUCTS.search(op.row.op) or _CASTS.search(op.row.op))) for op in ops
        ]
        self._readers: dict[int, list[tuple[int, Read]]] = defaultdict(list)
        energies = [read.energy for op in ops for read in (*op.reads, *op.returned) if read.energy is not None]
        energies += [energy for op in ops for energy in op.energies or ()]
        # By ``id`` of an energy: that along the error of the output, and in all other directions.
        self._energies: dict[int, float] = {}
        if energies:
            stacked = squares(torch.stack(energies).cpu())
            totals: list[float] = (stacked[:, 0] + stacked[:, 1:].mean(1)).tolist()
            self._energies = {id(energy): total for energy, total in zip(energies, totals, strict=True)}
        for index, op in enumerate(ops):
            for read in op.reads:
                self._readers[read.writer].append((index, read))
        self.inside: dict[str, list[int]] = defaultdict(list)  # the ops inside each module that can be kept
        for index, op in enumerate(ops):
            for path in (op.row.module, *paths_above(op.row.module)):
                if path and path in modules:
                    self.inside[path].append(index)

    def kept(self, module: str) -> Kept:
        """What goes with ``module`` in fp32."""
        wide = self._wide(module)
        rounded: dict[int, float] = {}
        # Of an op that hardly changes rounded values, how much of its reads' rounding stays.
        through: dict[int, float] = {}
        for index in sorted(wide, reverse=True):
            op = self._ops[index]
            if not op.narrow:
                continue
            edges = []
            for reader, read in self._readers[index]:
                # All of the rounding stays where the reader narrows it.
                part = through.get(reader, 0.0)
                if reader not in wide:
                    part = float(not self._autocast or self._ops[reader].narrow)
                edges.append((part, self._energy(read)))
            edges += [(float(not self._autocast), self._energy(read)) for read in op.returned]
            total = math.fsum(energy for _, energy in edges)
            stays = math.fsum(part * energy for part, energy in edges)
            if not stays:
                continue
            rounded[index] = stays / total
            # The part of the rounding of its results that it has only if its reads are not rounded.
            new = 0.0
            if op.energies is None:
                new = float(all(by is None for by in op.by))
            else:
                in_run, of_exact = (self._energies[id(energy)] for energy in op.energies)
                if of_exact:
                    new = max(0.0, 1.0 - in_run / of_exact)
            read_energy = math.fsum(map(self._energy, op.reads))
            through[index] = stays * new / max(read_energy, total)
        return Kept(frozenset(wide), rounded)

    def _wide(self, module: str) -> set[int]:
        wide = set(self.inside[module])
        if not self._autocast:
            return wide
        # In the order of the run: what an op reads is decided before it.
        waiting = sorted({reader for index in wide for reader, _ in self._reading(index)})
        seen = set(waiting)
        while waiting:
            index = heapq.heappop(waiting)
            if index in wide or self._holds[index]:
                continue
            reads = self._ops[index].reads
            if any(read.widens and read.writer in wide and self._ops[read.writer].narrow for read in reads):
                wide.add(index)
                for reader, _ in self._reading(index):
                    if reader not in seen:
                        seen.add(reader)
                        heapq.heappush(waiting, reader)
        return wide

    def _reading(self, index: int) -> Sequence[tuple[int, Read]]:
        return [reader for reader in self._readers[index] if self._ops[index].narrow]

    def _energy(self, read: Read) -> float:
        return self._energies.get(id(read.energy), 0.0)
