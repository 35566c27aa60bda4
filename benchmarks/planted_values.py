"""Plant ops that overflow or underflow in generated models, and see which of them a scan blames.

    python benchmarks/planted_values.py --output reports/planted-values      # 1000 models, seed 0
    python benchmarks/planted_values.py --count 100 --seed 7 --verbose
    python benchmarks/planted_values.py --seconds 3600 --output reports/planted-values      # as many as an hour allows

A model is a chain of ordinary blocks, with one to four plants among them: an op of which values become Inf, NaN or zero in fp16, an
input or a weight for which its cast does that. What uses the result makes it harmful, or harmless: a clamp, a mask, a quotient.
Inputs are arguments of their own, or in a dictionary, a list or a dataclass; there are one or several outputs.

Which it is comes from plain torch, not from the kind of plant: every other plant is computed in fp32, the one in question in 16 bits.
If the output is not finite, or too far from fp32's, it is harmful; if it passes, harmless. Models that fail with every plant in
fp32, or in which two plants are harmful, are drawn again. Then the scan must have a finding of severity error (LP201, LP202, LP203,
LP207) at the harmful one, at the line of the planted op, and at most notes at the harmless ones and everywhere else.

Every scan is made in this process; with ``--isolated N`` the first N are made again in processes of their own, as a user does, and
must find the same. Writes OUTPUT.md and OUTPUT.json every few models; exits with 1 if a model is judged wrongly.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report_files import head, made, save
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_check import scan
from lowprec_check.schema.findings import Diagnostic

WIDTH, ROWS, TOLERANCE = 32, 16, 1e-2
CODES = ("LP201", "LP202", "LP203", "LP207")
Severity = str
SAVE_EVERY = 10
REST = "the rest of the model"
RANKS = {"error": 3, "warning": 2, "note": 1, "nothing": 0}


class Kind(NamedTuple):
    """A kind of plant: the op, of normalized values, and what uses its result. ``given`` makes an input or a weight instead."""

    name: str
    fault: str
    op: Callable[..., Tensor]
    use: Callable[[Tensor, Tensor], Tensor]
    given: str = ""


def some(x: Tensor) -> Tensor:
    """About a quarter of the elements, always the same."""
    return (torch.arange(x.numel(), device=x.device) % 4 == 0).view_as(x)


# fmt: off
KINDS = [
    # results that are too large, and what becomes of them
    Kind("sigmoid by hand", "overflow",
         lambda x: torch.exp(x * -9),
         lambda h, _: 1 / (1 + h)),
    Kind("square, then an inverse", "overflow",
         lambda x: (x * 300).square(),
         lambda h, x: x + 1 / (h + 1)),
    Kind("scaled up and down", "overflow",
         lambda x: x * 1e6,
         lambda h, _: h * 1e-6),
    Kind("clamped", "overflow",
         lambda x: x * 1e6,
         lambda h, _: h.clamp(-3, 3)),
    Kind("clamped too high", "overflow",
         lambda x: x.abs() * 1e5,
         lambda h, _: h.clamp(max=6e4) * 1e-5),
    Kind("a smaller one is taken", "overflow",
         lambda x: x.square() * 1e7,
         lambda h, x: torch.minimum(h, x.abs())),
    Kind("tanh", "overflow",
         lambda x: x * 1e6,
         lambda h, _: torch.tanh(h)),
    Kind("mask of -1e9", "overflow",
         lambda x: some(x).to(x.dtype) * -1e9,
         lambda h, x: (x + h).softmax(-1) * WIDTH),
    Kind("mask of -1e9, whole rows", "overflow",
         lambda x: torch.ones_like(x) * -1e9,
         lambda h, x: (x + h).softmax(-1) * WIDTH),
    Kind("not selected", "overflow",
         lambda x: x * 1e6,
         lambda h, x: torch.where(h.abs() < 5e4, h * 1e-4, x)),
    Kind("selected in part", "overflow",
         lambda x: x * 1e6,
         lambda h, x: torch.where(some(x), h * 1e-6, x)),
    Kind("not used", "overflow",
         lambda x: x.exp() * 1e6,
         lambda _, x: torch.relu(x)),
    Kind("multiplied by zero", "overflow",
         lambda x: x * 1e6,
         lambda h, x: x + 0 * h),
    Kind("norm by hand", "overflow",
         lambda x: (x * 100).square().sum(-1, keepdim=True),
         lambda h, x: x / h.sqrt() * 500),
    Kind("scores", "overflow",
         lambda x: (x * 60) @ (x * 60).mT,
         lambda h, x: (h / 3600).softmax(-1) @ x),
    Kind("log of exp", "overflow",
         lambda x: torch.exp(x * 9),
         lambda h, _: torch.log1p(h) / 9),
    Kind("difference of two", "overflow",
         lambda x: x * 1e6,
         lambda h, x: (h - x.flip(0) * 1e6) * 1e-6),
    Kind("one row", "overflow",
         lambda x: torch.cat([x[:1] * 1e6, x[1:]]),
         lambda h, _: torch.cat([h[:1] * 1e-6, h[1:]])),
    Kind("written into a buffer", "overflow",
         lambda x: torch.zeros_like(x).copy_(x).mul_(1e6),
         lambda h, _: h.clamp_(-2, 2)),
    Kind("in place, scaled back", "overflow",
         lambda x: x.clone().mul_(1e6),
         lambda h, _: h.mul_(1e-6)),
    Kind("maximum of a row", "overflow",
         lambda x: x * 1e6,
         lambda h, x: x + (h - h.amax(-1, keepdim=True)).exp()),
    Kind("one of two halves", "overflow",
         lambda x: torch.cat([x * 1e6, x], -1),
         lambda h, _: h.chunk(2, -1)[1] * 1.5),
    Kind("a gate that closes", "overflow",
         lambda x: torch.exp(x.abs() * 9),
         lambda h, x: x * torch.exp(-h)),
    # results that are too small, and what becomes of them
    Kind("scaled down and up", "underflow",
         lambda x: x * 1e-8,
         lambda h, _: h * 1e8),
    Kind("scaled down, added", "underflow",
         lambda x: x * 1e-8,
         lambda h, x: x + h),
    Kind("tails of softmax", "underflow",
         lambda x: (x * 20).softmax(-1),
         lambda h, x: x + h),
    Kind("tails of softmax, cut", "underflow",
         lambda x: (x * 20).softmax(-1),
         lambda h, x: h @ x.mT @ x / ROWS),
    Kind("sigmoid", "underflow",
         lambda x: torch.sigmoid(x * 20 - 20),
         lambda h, x: h * x + x),
    Kind("exp of large negatives", "underflow",
         lambda x: torch.exp(x.square() * -20),
         lambda h, x: h + x),
    Kind("log of softmax", "underflow",
         lambda x: (x * 20).softmax(-1),
         lambda h, _: h.log() / 20),
    Kind("divisor", "underflow",
         lambda x: (x.square() + 1) * 1e-8,
         lambda h, x: x / (h * 1e8)),
    Kind("divisor of a constant", "underflow",
         lambda x: (x.square() + 1) * 1e-9,
         lambda h, x: x / h * 1e-9),
    Kind("inverse root", "underflow",
         lambda x: (x * 1e-5).square().mean(-1, keepdim=True),
         lambda h, x: x * 1e-5 * h.rsqrt()),
    Kind("root mean square", "underflow",
         lambda x: (x * 1e-5).square(),
         lambda h, x: h.mean(-1, keepdim=True).sqrt() * 1e5 + x * 0.1),
    Kind("product of probabilities", "underflow",
         lambda x: x.softmax(-1)[:, :8].prod(-1, keepdim=True),
         lambda h, x: x * (1 + h)),
    Kind("variance of small values", "underflow",
         lambda x: (x * 1e-5).var(-1, keepdim=True),
         lambda h, x: x * 1e-5 / h.sqrt()),
    Kind("decay", "underflow",
         lambda x: x * 1e-4 * 1e-5,
         lambda h, x: x - h),
    Kind("small, compared", "underflow",
         lambda x: x * 1e-9,
         lambda h, x: torch.where(h > 0, x, -x)),
    # inputs and weights
    Kind("large input, its logarithm", "overflow",
         lambda e: e * 3e5 + 1,
         lambda h, x: x + h.log(), "input"),
    Kind("large input, clamped", "overflow",
         lambda e: e * 3e5,
         lambda h, x: x + h.clamp(max=2), "input"),
    Kind("large input, an inverse", "overflow",
         lambda e: e * 3e5 + 1e5,
         lambda h, x: x + 1 / (1 + h), "input"),
    Kind("small input, scaled up", "underflow",
         lambda e: e * 1e-8,
         lambda h, x: x + h * 1e8, "input"),
    Kind("small input, added", "underflow",
         lambda e: e * 1e-8,
         lambda h, x: x + h, "input"),
    Kind("small input, a divisor", "underflow",
         lambda e: e * 1e-9 + 1e-10,
         lambda h, x: x * 1e-9 / h, "input"),
    Kind("large weight", "overflow",
         lambda e: e * 3e5 + 1e5,
         lambda h, x: x * h * 1e-5, "weight"),
    Kind("large weight, clamped", "overflow",
         lambda e: e * 3e5 + 1e5,
         lambda h, x: x * h.clamp(max=2), "weight"),
    Kind("small weight", "underflow",
         lambda e: e * 1e-8,
         lambda h, x: x * h * 1e8, "weight"),
    Kind("small weight, added", "underflow",
         lambda e: e * 1e-8,
         lambda h, x: x + h, "weight"),
]
# fmt: on


class Plant(nn.Module):
    """Normalizes its input, and computes a kind of plant: in fp32 if ``fixed``."""

    def __init__(self, kind: Kind, generator: torch.Generator) -> None:
        super().__init__()
        self.kind, self.fixed = kind, False
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = kind.op(torch.rand(ROWS, WIDTH, generator=generator)) if kind.given else None
        """The values of its input or weight in fp32."""
        self.weight = nn.Parameter(self.wide.clone()) if kind.given == "weight" else None  # type: ignore[union-attr]

    def forward(self, x: Tensor, given: Tensor | None) -> Tensor:
        x = self.norm(x)
        op, use = self.kind.op, self.kind.use
        if self.kind.given:
            given = self.weight if self.weight is not None else given
            op = lambda _: given  # noqa: E731
        if not self.fixed:
            return use(op(x), x)
        with torch.autocast("cpu", enabled=False):
            wide = x.float()
            return use(op(wide) if self.wide is None else self.wide, wide).to(x.dtype)


class Residual(nn.Module):
    """A layer with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class Attention(nn.Module):
    """Attention over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(0).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v).squeeze(0)


BLOCKS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(WIDTH, WIDTH),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)),
    Residual,
    Attention,
]


@dataclass
class Batch:
    """Inputs of plants."""

    first: Tensor
    second: Tensor | None = None
    third: Tensor | None = None
    fourth: Tensor | None = None


class Planted(nn.Module):
    """A chain of blocks and plants; every plant for an input takes one, in order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        kinds = draw.sample(KINDS, draw.randint(1, 4))
        self.plants = [Plant(kind, generator) for kind in kinds]
        chain: list[nn.Module] = [draw.choice(BLOCKS)() for _ in range(draw.randint(1, 4))]
        for plant in self.plants:
            chain.insert(draw.randint(1, len(chain)), plant)
        self.chain = nn.ModuleList([*chain, nn.Linear(WIDTH, WIDTH)])
        takes_input = any(kind.given == "input" for kind in kinds)  # which autocast does not cast
        self.precision = "half" if takes_input else draw.choice(["half", "half", "half", "autocast-fp16"])
        self.container = draw.choice(["arguments", "dictionary", "list", "dataclass"])
        """What holds the inputs of plants."""
        self.returned = draw.choice([None, None, draw.randrange(len(self.chain))])
        """The number of the module whose result is a second output."""

    @property
    def inputs(self) -> tuple[Any, ...]:
        """In fp32."""
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(7))
        values = [plant.wide for plant in self.takers if plant.wide is not None]
        if self.container == "arguments" or not values:
            return x, *values
        if self.container == "dataclass":
            return x, Batch(*values)
        return x, {"nested": dict(zip("abcd", values, strict=False))} if self.container == "dictionary" else [values]

    @property
    def takers(self) -> list[Plant]:
        """The plants that take an input, in their order."""
        return [plant for plant in self.chain if isinstance(plant, Plant) and plant.kind.given == "input"]

    def input_path(self, plant: Plant) -> str:
        """Where the inputs have that of a plant."""
        number = self.takers.index(plant)
        fields = ("first", "second", "third", "fourth")
        paths = {
            "dictionary": f"1.nested.{'abcd'[number]}",
            "list": f"1.0.{number}",
            "dataclass": f"1.{fields[number]}",
        }
        return paths.get(self.container, str(1 + number))

    def forward(self, x: Tensor, *inputs: Any) -> Any:
        given = dict(zip(self.takers, tensors(inputs), strict=True))
        second = None
        for number, module in enumerate(self.chain):
            x = module(x, given.get(module)) if isinstance(module, Plant) else module(x)
            second = x if number == self.returned else second
        return x if second is None else {"output": x, "hidden": second}


def tensors(value: Any) -> list[Tensor]:
    """Those in inputs or outputs, in order."""
    if isinstance(value, Tensor) or value is None:
        return [] if value is None else [value]
    if isinstance(value, Batch):
        value = vars(value)
    return [tensor for each in (value.values() if isinstance(value, dict) else value) for tensor in tensors(each)]


def error(seed: int, active: Sequence[int] | None) -> float:
    """rel_l2 of the output in 16 bits, with the plants ``active``, the others in fp32; infinite if it is not finite.

    ``None``: of a model of which nothing is planted in fp32, whose inputs and weights are fp32 too: 0, or infinite if it is not finite.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Planted(seed).eval()
        inputs = model.inputs
        exact = [tensor.double() for tensor in tensors(model(*inputs))]
        if not all(bool(tensor.isfinite().all()) for tensor in exact):
            return float("nan")
        if active is None:
            return 0.0
        for index, plant in enumerate(model.plants):
            plant.fixed = index not in active
        if model.precision == "half":
            model, inputs = model.half(), tuple(tensor.half() for tensor in tensors(inputs))
        with torch.autocast("cpu", torch.float16, enabled=model.precision != "half"):
            found = [tensor.double() for tensor in tensors(model(*inputs))]
    errors = [float((out - y).norm() / y.norm()) for out, y in zip(found, exact, strict=True)]
    return max(float("inf") if math.isnan(each) else each for each in errors)


def truth(seed: int) -> list[bool] | None:
    """Which of the plants are harmful; ``None`` if that cannot be told apart."""
    model = Planted(seed)
    if error(seed, None) != 0 or not error(seed, ()) <= TOLERANCE / 2:
        return None
    errors = [error(seed, (index,)) for index in range(len(model.plants))]
    if any(TOLERANCE / 3 < each < TOLERANCE * 3 for each in errors):  # too close to call
        return None
    harmful = [each > TOLERANCE for each in errors]
    together = error(seed, range(len(errors)))
    return harmful if sum(harmful) <= 1 and (together > TOLERANCE) == any(harmful) else None


def lines_of(kind: Kind) -> range:
    """The lines of the planted op."""
    first = kind.op.__code__.co_firstlineno
    return range(first, first + 1)


def is_at(found: Diagnostic, plant: Plant, path: str, model: Planted) -> bool:
    """Whether a finding is about what is planted there, and not about what uses it."""
    if plant.kind.given == "weight":
        return found.module == path and found.op == "cast weight"
    if plant.kind.given == "input":
        return found.op == f"cast input {model.input_path(plant)}"
    line = int((found.source or ":0").rpartition(":")[2])
    return found.module == path and line in lines_of(plant.kind)


class Row(NamedTuple):
    """What a scan finds at a plant, or in the rest of the model."""

    seed: int
    kind: str
    harmful: bool
    found: Severity
    status: str
    where: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the right severity was found."""
        return self.found == "error" if self.harmful else self.found in ("note", "nothing")


def judged(seed: int, isolation: Any = "none") -> list[Row]:
    """For each plant, and for the rest of the model, the severity of what the scan finds there."""
    harmful = truth(seed)
    assert harmful is not None
    model = Planted(seed).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"precisions": [model.precision], "times": "off", "plan": False, "device": "cpu"}
        result = scan(model, model.inputs, isolation=isolation, **options)
    found = [d for d in result.diagnostics if d.code in CODES]
    paths = {module: name for name, module in model.named_modules()}
    rows: list[Row] = []
    placed: set[int] = set()
    for plant, harms in zip(model.plants, harmful, strict=True):
        path = paths[plant]
        mine = [d for d in found if is_at(d, plant, path, model)]
        # what uses a harmful value may be blamed too
        placed |= {id(d) for d in mine} | {id(d) for d in found if harms and d.module == path}
        worst = max((d.severity for d in mine), key=RANKS.__getitem__, default="nothing")
        rows.append(Row(seed, plant.kind.name, harms, worst, result.runs[-1].status))
    others = [d for d in found if id(d) not in placed]
    worst = max((d.severity for d in others), key=RANKS.__getitem__, default="nothing")
    where = "; ".join(f"{d.code} {d.op} in {d.module}" for d in others if d.severity == worst and worst != "note")
    return [*rows, Row(seed, REST, False, worst, result.runs[-1].status, where)]


def seeds(start: int) -> Iterator[int]:
    """Seeds of models whose truth is known, from 1,000,000 times ``start`` on."""
    seed = 1_000_000 * start
    while True:
        if truth(seed) is not None:
            yield seed
        seed += 1


def render(data: Mapping[str, Any]) -> str:
    """The report: the table first."""
    rows = [Row(*row) for row in data["rows"]]
    models = len({row.seed for row in rows})
    wrong = {row.seed for row in rows if not row.is_right}
    lines = head("Which planted values a scan blames", data)
    lines += [
        f"**{models - len(wrong)} of {models} models ({(models - len(wrong)) / models:.1%}) are judged right**: the harmful plant has an "
        "error, and everything else at most notes.",
        "",
        "| planted | effect in fp16 | by ablation | number | error | warning | note | nothing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    about = {kind.name: (kind.given or "op", kind.fault) for kind in KINDS} | {REST: ("rest", "")}
    for fault, effect, harmful in sorted({(*about[row.kind], row.harmful) for row in rows}):
        its = [row for row in rows if (*about[row.kind], row.harmful) == (fault, effect, harmful)]
        counts = Counter(row.found for row in its)
        cells = [fault, effect or "–", "harmful" if harmful else "harmless", str(len(its))]
        lines.append(f"| {' | '.join([*cells, *(str(counts[severity]) for severity in RANKS)])} |")
    if wrong:
        lines += ["", "Judged wrongly:", ""]
        lines += [
            f"- seed {row.seed}: {row.kind} ({'harmful' if row.harmful else 'harmless'}, run {row.status}): "
            f"{row.found}{' at ' + row.where if row.where else ''}"
            for row in rows
            if not row.is_right
        ]
    if data["isolated"]:
        lines += ["", f"{data['same']} of {data['isolated']} scans in processes of their own found the same."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Make and judge the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further model after this time")
    parser.add_argument("--isolated", type=int, default=0, help="scans to make again in processes of their own")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print what is judged wrongly at once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Row] = []
    data: dict[str, Any] = {"made": made(), "isolated": 0, "same": 0, "rows": rows}
    started = time.monotonic()
    for number, seed in zip(range(1, arguments.count + 1), seeds(arguments.seed), strict=False):
        found = judged(seed)
        rows += found
        if number <= arguments.isolated:
            data |= {"isolated": number, "same": data["same"] + (judged(seed, None) == found)}
        for row in found if arguments.verbose else ():
            if not row.is_right:
                print(row, file=sys.stderr)
        if time.monotonic() - started > arguments.seconds:
            break
        if number % SAVE_EVERY == 0 and arguments.output:
            save(arguments.output, data, render)
    save(arguments.output, data, render)
    return int(not all(row.is_right for row in rows) or data["same"] != data["isolated"])


if __name__ == "__main__":
    sys.exit(main())
