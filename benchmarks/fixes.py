"""Fix generated models with planted faults: how many then pass, with the same bits in fp32, and how long it takes.

    python benchmarks/fixes.py --models 300 --seconds 3600

Each model has one or two of the faults below, in its forward, in a method, in a function, or in a module of its own.
Every seventh file is odd: several classes, comments, tabs, Windows line ends, statements over several lines or two in
one, names that are not ASCII, torch by another name. What the tool says is checked here, without it: the patched file
is Python, and the plain model gives the same bits and gradients in fp32, and passes in 16 bits. The same command
resumes after an interruption.
"""

from __future__ import annotations

import ast
import contextlib
import math
import random
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from shared import head, in_processes, made, parser_of, save, saved

from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.features.fix.fixing import fix_file
from lowprec_check.schema.options import FixOptions


class Fault(NamedTuple):
    """Code of ``$V``, a square tensor, that gives ``y``; ``$T`` is torch, ``$z`` a name, ``$LIN`` a linear layer."""

    body: str
    init: str = ""
    """Lines of ``__init__``."""
    top: str = ""
    """Lines in front of the class."""


FREQUENCIES = 'self.register_buffer("freq", 1000.0 ** -($T.arange(0, $W, 2) / $W), persistent=False)'

FAULTS: dict[str, list[Fault]] = {
    "mask constant": [
        Fault("y = $V.masked_fill($T.arange($V.shape[-1]) > 3, -1e9).softmax(-1)"),
        Fault("$z = ($T.arange($V.shape[-1]) > 3).to($V.dtype)\ny = ($V - $z * 1e9).softmax(-1)"),
        Fault("y = $V.masked_fill(\n    $T.arange($V.shape[-1]) > 3,  # the padding\n    -1e10,\n).softmax(dim=-1)"),
        Fault("$z = $T.full_like($V, -1e9)\ny = $T.where($T.arange($V.shape[-1]) > 3, $z, $V).softmax(-1)"),
        Fault("$z = $T.full($V.shape, -1e9, dtype=$V.dtype)\ny = ($V + $z.triu(1)).softmax(-1)"),
    ],
    "eps": [
        Fault("$z = $V * 0\ny = $V + $z / ($z.norm(dim=-1, keepdim=True) + 1e-8)"),
        Fault("$z = $V * 0\ny = $V + $z / $z.norm(dim=-1, keepdim=True).clamp(min=1e-8)"),
        Fault("$z = $V * 0\ny = $V + $z * $T.rsqrt($z.pow(2).mean(-1, keepdim=True) + 1e-10)"),
        Fault("$z = $V.relu() * 0\ny = $V + $T.log($z + 1e-9)"),
    ],
    "default eps": [Fault("$z = $V * 0\ny = $V + F.normalize($z, dim=-1)")],
    "overflow": [
        Fault("$z = $V * 400\ny = $z / $z.pow(2).mean(-1, keepdim=True).sqrt()"),
        Fault("$z = $V * 400\ny = $z * $T.rsqrt(($z * $z).mean(dim=-1, keepdim=True))"),
        Fault("$z = $V * 9\ny = $T.exp($z + 6) / $T.exp($z + 6).sum(-1, keepdim=True)"),
        Fault("$z = ($V * 3000).square().sum(dim=-1, keepdim=True)\ny = $V * 3000 / $z.sqrt()"),
        Fault("$z = ($V * 500) ** 2\n$z = $z.sum(-1, keepdim=True)\ny = ($V * 500) / $T.sqrt($z)"),
    ],
    "product": [
        Fault("$z = $V * 300\ny = ($z @ $z.transpose(-1, -2)) / 8192"),
        Fault("$z = $V * 300\ny = $T.matmul($z, $z.transpose(-1, -2)) / 65536.0"),
    ],
    "linear": [Fault("y = self.$LIN($V * 60000) / 8192")],
    "underflow": [
        Fault("$z = $V * 1e-4\ny = $z / $z.pow(2).mean(-1, keepdim=True).sqrt()"),
        Fault("$z = ($V * 1e-3) ** 3\ny = $z / $z.abs().amax()"),
    ],
    "cancellation": [
        Fault("$z = $V + 3000\ny = $z - $z.mean(-1, keepdim=True)"),
        Fault("$z = $V + 30\ny = $z.pow(2).mean(-1, keepdim=True) - $z.mean(-1, keepdim=True) ** 2 + $V"),
    ],
    "kernel": [
        Fault("$z = $V.T @ $V + $T.eye($V.shape[-1], dtype=$V.dtype, device=$V.device)\ny = $V @ $T.linalg.inv($z)"),
        Fault("y = $V + $T.fft.fft($V).real / 8"),
        Fault("$z, r = $T.linalg.qr($V)\ny = $z @ r + $V"),
        Fault("y = $V + $T.cdist($V, $V)"),
    ],
    "factory": [
        Fault("$z = $T.eye($V.shape[-1])\ny = $V @ $z"),
        Fault("$z = $T.zeros($V.shape[-1], $V.shape[-1])\ny = $V + $T.matmul($V, $z)"),
        Fault("$z = $T.linspace(0, 1, $V.shape[-1])\ny = $V * 2 + ($V @ $z)[:, None]"),
        Fault("$z = $T.ones($V.shape[-1], $V.shape[-1], device=$V.device).tril()\ny = $T.matmul($z, $V)"),
    ],
    "literal": [
        Fault("$z = $T.tensor([[0.5] * $V.shape[-1]])\ny = self.$LIN($V * $z)"),
        Fault("$z = $T.tensor([0.25], dtype=$T.float32)\ny = $V @ ($V.T * $z)"),
    ],
    "in place": [Fault("$z = $V * 300\n$z *= $z\ny = $z.mean(-1, keepdim=True).sqrt() + $V")],
    "buffer": [
        Fault("$z = $T.arange($V.shape[0], device=$V.device)[:, None] * 700.0 * self.freq.float()\n"
              "y = $V * $z.cos().repeat_interleave(2, -1).to($V.dtype)", FREQUENCIES),
        Fault("$z = $T.arange($V.shape[0], device=$V.device)[:, None] * 700.0\n$z = ($z * self.freq.float()).sin()\n"
              "y = $V + $T.cat(($z, $z), -1).to($V.dtype)", FREQUENCIES),
    ],
}  # fmt: skip
"""By kind; ``buffer`` is planted with a blanket cast."""

NAMES = ("x", "hidden", "feats", "tokens_", "h1", "états", "out", "value")
LIMITS = {"half": 1e-2, "autocast-fp16": 1e-2, "bfloat16": 5e-2}
"""The tolerances that a scan has by default."""
IN_BFLOAT16 = ("kernel", "factory", "literal", "buffer", "cancellation")


class Planted(NamedTuple):
    """A file with faults."""

    text: str
    precision: str
    kinds: list[str]
    odd: bool


def planted(seed: int, number: int) -> Planted:
    """The file of this number."""
    rng = random.Random(f"{seed}:{number}")
    kind, odd = list(FAULTS)[number % len(FAULTS)], number % 7 == 6
    precision = rng.choices(list(LIMITS), (6, 2, 2))[0]
    if kind == "buffer":
        precision = rng.choice(("half", "bfloat16"))
    elif precision == "bfloat16" and kind not in IN_BFLOAT16:
        precision = "half"
    kinds = [kind]
    if rng.random() < 0.25:
        kinds.append(rng.choice([other for other in FAULTS if other != "buffer"]))
    text = source(rng, kinds, odd=odd)
    return Planted(text.replace("\n", "\r\n") if odd and rng.random() < 0.3 else text, precision, kinds, odd)


def source(rng: random.Random, kinds: list[str], *, odd: bool) -> str:
    """A file with a model that has faults of these ``kinds``."""
    alias, width = rng.choice(("T", "th", "torch_")) if odd else "torch", rng.choice((6, 8, 16))
    net, lin, name = rng.choice(("Net", "Model", "_Core")), rng.choice(("fc", "proj", "linear_1")), rng.choice(NAMES)
    pad = rng.choice(("  ", "\t", "    ")) if odd else "    "
    lines = [f"import torch as {alias}" if odd else "import torch", "from torch import nn"]
    lines.insert(rng.randrange(3), "import torch.nn.functional as F")
    if odd:
        lines = ["# -*- coding: utf-8 -*-", '"""Planted: (a [b."""', *lines, "", "class Other(nn.Module):"]
        lines += [f"{pad}def forward(self, x): return x.masked_fill(x > 9, -1e9)  # not used"]
    steps, inits = list[str](), list[str]()
    for index, kind in enumerate(kinds):
        fault, z = rng.choice(FAULTS[kind]), f"z{index}"
        place = rng.choice(("here", "method", "function", "module")) if odd or rng.random() < 0.25 else "here"
        place = place if "self." not in fault.body or place == "method" else "here"
        given = name if place == "here" else "v"
        values = {"V": given, "T": alias, "z": z, "LIN": lin, "W": str(width)}
        body, init, top = (
            [line.replace("    ", pad) for line in Template(text).substitute(values).splitlines()]
            for text in (fault.body, fault.init, fault.top)
        )
        body, inits = commented(rng, body, odd=odd), inits + init
        lines += ["", *top] if top else []
        if place == "here":
            steps += body
        elif place == "method":
            steps += [f"y = self.step{index}({name})"]
            inits += [f"# {z}", "", f"<def step{index}(self, v):", *(f"<{pad}{line}" for line in [*body, "return y"])]
        elif place == "function":
            lines += ["", f"def step{index}(v):", *(f"{pad}{line}" for line in [*body, "return y"])]
            steps += [f"y = step{index}({name})"]
        else:
            lines += ["", f"class Step{index}(nn.Module):", f"{pad}def forward(self, v):"]
            lines += [f"{pad * 2}{line}" for line in [*body, "return y"]]
            inits, steps = [f"self.step{index} = Step{index}()", *inits], [*steps, f"y = self.step{index}({name})"]
        steps.append(f"{name} = (y)" if odd else f"{name} = y")
    inits.sort(key=lambda line: line.startswith(("<", "# z")) or not line)
    lines += ["", f"class {net}(nn.Module):", f"{pad}def __init__(self):", f"{pad * 2}super().__init__()"]
    lines += [f"{pad * 2}self.{lin} = nn.Linear({width}, {width})"]
    lines += [f"{pad}{line[1:]}" if line.startswith("<") else f"{pad * 2}{line}" for line in inits]
    lines += ["", f"{pad}def forward(self, x):", f"{pad * 2}{name} = self.{lin}(x)"]
    lines += [*(f"{pad * 2}{line}" for line in steps), f"{pad * 2}return {name}", "", "def model():"]
    lines += [f"{pad}{alias}.manual_seed(0)", f"{pad}return {net}().eval()", ""]
    generator = f"{alias}.Generator().manual_seed({rng.randrange(99)})"
    return "\n".join([*lines, f"inputs = {alias}.randn({width}, {width}, generator={generator})"]) + "\n"


def commented(rng: random.Random, body: list[str], *, odd: bool) -> list[str]:
    """The lines with comments; in an ``odd`` file, some over several lines, or two in one."""
    found = list[str]()
    for given in body:
        line = given
        simple = not line.endswith(("(", ",", "padding", ")")) and not line.startswith((" ", "\t")) and " = " in line
        if odd and simple and rng.random() < 0.3:
            left, _, right = line.partition(" = ")
            line = f"{left} = (  # (1)\n    {right}\n)"
        elif odd and simple and rng.random() < 0.3:
            line = f"k = 1; {line}" if rng.random() < 0.5 else line.replace(" = ", " = \\\n    ", 1)
        elif rng.random() < 0.2 and not line.endswith(("(", ",", "padding")):
            line += "  # see the paper, eq. (3"
        found += line.split("\n")
    return found


def called(text: str, precision: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What the plain model gives, and in fp32 its gradients, without the tool."""
    space: dict[str, Any] = {}
    exec(compile(text, "planted", "exec"), space)
    model, inputs = space["model"](), space["inputs"]
    if precision == "fp32":
        out = model(inputs)
        with contextlib.suppress(RuntimeError):  # what changes in place may have no gradient
            out.square().sum().backward()
        return out.detach(), [p.grad for p in model.parameters() if p.grad is not None]
    low = getattr(torch, precision) if precision in ("half", "bfloat16") else None
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=low is None):
        return (model(inputs) if low is None else model.to(low)(inputs.to(low))), []


def error_of(text: str, precision: str, reference: torch.Tensor) -> float:
    """Of the plain model; infinite if it raises, or gives NaN."""
    try:
        error = float((called(text, precision)[0].float() - reference).norm() / reference.norm())
    except Exception:
        return float("inf")
    return error if math.isfinite(error) else float("inf")


def tried(made: Planted, file: Path) -> dict[str, Any]:
    """One model: what the tool found, and what is true of it."""
    file.write_bytes(made.text.encode())
    reference, gradients = called(made.text, "fp32")
    limit, before = LIMITS[made.precision], error_of(made.text, made.precision, reference)
    *_, (result, texts) = fix_file(TargetSpec(str(file)), FixOptions(precisions=made.precision, seconds=60.0))
    fixing = result.fixing
    assert fixing is not None
    assert texts is not None
    found = {"fails": before > limit or bool(fixing.proven), "says": fixing.passes, "good": False, "broken": False}
    found |= {"changes": [change.kind for change in fixing.changes], "trials": fixing.trials}
    found |= {"seconds": fixing.seconds, "scan_seconds": fixing.scan_seconds}
    if fixing.due:
        new = next(iter(texts.values()))
        try:
            ast.parse(new)
            output, after = called(new, "fp32")
        except Exception as error:
            return found | {"broken": True, "why": f"{type(error).__name__}: {error}"[:200]}
        equal = torch.equal(output, reference) and (not gradients or len(after) == len(gradients))
        equal = equal and all(torch.equal(*each) for each in zip(after, gradients, strict=False))
        passes = error_of(new, made.precision, reference) <= limit
        found |= {"fp32_equal": equal, "good": fixing.passes and passes and equal, "diff": fixing.diff}
    return found


def fixed(made: tuple[int, int]) -> dict[str, Any] | None:
    """The row of a model, by its seed and number; ``None`` if its output in fp32 is not finite."""
    torch.set_num_threads(1)
    it, number = planted(*made), made[1]
    if not called(it.text, "fp32")[0].isfinite().all():
        return None
    with tempfile.TemporaryDirectory() as folder:
        row = {"number": number, "kinds": it.kinds, "precision": it.precision, "odd": it.odd}
        return row | tried(it, Path(folder) / f"planted_{number}.py")


def main() -> int:
    """Write a table and the figures of each model."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--jobs", type=int, default=1, help="how many models at a time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = saved(given.output, "rows")
    data = {"made": made(), "seed": given.seed, "rows": rows}
    left = [(given.seed, number) for number in sorted(set(range(given.models)) - {row["number"] for row in rows})]
    for (_, number), row, problem in in_processes(fixed, left, given.jobs, given.seconds):
        if problem:
            print(f"{number}: {problem}", file=sys.stderr, flush=True)
        if row is None:
            continue
        rows.append(row)
        rows.sort(key=lambda each: each["number"])
        if given.output:
            save(given.output, data, render)
    save(given.output, data, render)
    return int(any(row["fails"] and not row["good"] for row in rows))


def render(data: dict[str, Any]) -> str:
    """The figures by kind of fault."""
    rows = data["rows"]
    counted = [row for row in rows if row["fails"]]
    if not counted:
        return "\n".join(head("Models with planted faults, fixed", data)) + "No model fails.\n"
    good, odd = [row for row in counted if row["good"]], [row for row in counted if row["odd"]]
    different = sum(row.get("fp32_equal") is False for row in rows)
    wrong = sum(row["says"] and not row["good"] for row in counted)
    ratios = sorted(row["seconds"] / row["scan_seconds"] for row in counted)
    total = sum(row["seconds"] for row in counted) / sum(row["scan_seconds"] for row in counted)
    lines = head("Models with planted faults, fixed", data)
    lines += [
        f"**{len(good)} of {len(counted)} models that fail are fixed ({len(good) / len(counted):.1%})**: the plain "
        "patched model passes, and fp32 gives the same outputs and gradients, bit for bit. "
        f"{len(rows) - len(counted)} others pass without a patch.",
        "",
        f"- fp32 differs with {different} patches; {sum(row['broken'] for row in rows)} patched files do not run; "
        f"{wrong} models are said to pass and do not.",
        f"- {sum(row['good'] for row in odd)} of {len(odd)} odd files are fixed.",
        f"- The search takes {total:.2f} times as long as the scan before it, in the median "
        f"{statistics.median(ratios):.2f} times, for nine of ten models at most "
        f"{ratios[int(0.9 * (len(ratios) - 1))]:.2f} times; {sum(ratio > 2 for ratio in ratios)} take more than "
        f"twice as long. {statistics.mean(row['trials'] for row in counted):.1f} trials on average.",
        "",
        "| fault | models that fail | fixed |",
        "|---|---:|---:|",
    ]
    failing, fixed = (Counter(kind for row in part for kind in set(row["kinds"])) for part in (counted, good))
    lines += [f"| {kind} | {failing[kind]} | {fixed[kind]} |" for kind in FAULTS]
    bad = (row for row in counted if not row["good"])
    lines += [f"- not fixed: {row['number']} ({row['kinds']}, {row['precision']})" for row in bad]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
