"""Fix generated models with planted faults: how many pass then, and is fp32 the same bit for bit.

    python benchmarks/fixes.py --models 300 --seconds 3600 --output reports/fixes

Each model has one or two faults of the kinds below, with random widths, names, formatting, comments, import names and classes around it. What
the tool says is checked here, without it: the patched file is Python, and the plain model gives the same bits in fp32 and passes in 16 bits.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lowprec_check.engine.fixing import fix_file
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.schema.options import FixOptions

FAULTS: dict[str, list[str]] = {
    "mask constant": [
        "y = V.masked_fill(T.arange(V.shape[-1]) > 3, -1e9).softmax(-1)",
        "m = (T.arange(V.shape[-1]) > 3).to(V.dtype)\ny = (V - m * 1e9).softmax(-1)",
        "y = V.masked_fill(\n    T.arange(V.shape[-1]) > 3,  # the padding\n    -1e10,\n).softmax(dim=-1)",
    ],
    "eps": [
        "z = V * 0\ny = V + z / (z.norm(dim=-1, keepdim=True) + 1e-8)",
        "z = V * 0\ny = V + z / z.norm(dim=-1, keepdim=True).clamp(min=1e-8)",
        "z = V * 0\ny = V + z * T.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-10)",
    ],
    "default eps": ["z = V * 0\ny = V + F.normalize(z, dim=-1)"],
    "overflow": [
        "z = V * 400\ny = z / z.pow(2).mean(-1, keepdim=True).sqrt()",
        "z = V * 400\ny = z * T.rsqrt((z * z).mean(dim=-1, keepdim=True))",
        "z = V * 9\ny = T.exp(z + 6) / T.exp(z + 6).sum(-1, keepdim=True)",
        "z = (V * 3000).square().sum(dim=-1, keepdim=True)\ny = V * 3000 / z.sqrt()",
    ],
    "product": [
        "z = V * 300\ny = (z @ z.transpose(-1, -2)) / 8192",
        "z = V * 300\ny = T.matmul(z, z.transpose(-1, -2)) / 65536.0",
    ],
    "linear": ["y = self.LIN(V * 20000) / 8192"],
    "underflow": ["z = V * 1e-4\ny = z / z.pow(2).mean(-1, keepdim=True).sqrt()"],
    "kernel": [
        "z = V.T @ V + T.eye(V.shape[-1], dtype=V.dtype, device=V.device)\ny = V @ T.linalg.inv(z)",
        "y = V + T.fft.fft(V).real / 8",
        "q, r = T.linalg.qr(V)\ny = q @ r + q.sum()",
    ],
    "factory": [
        "z = T.eye(V.shape[-1])\ny = V @ z",
        "z = T.zeros(V.shape[-1], V.shape[-1])\ny = V + T.matmul(V, z)",
        "z = T.linspace(0, 1, V.shape[-1])\ny = V * 2 + (V @ z)[:, None]",
    ],
    "literal": ["z = T.tensor([[0.5] * V.shape[-1]])\ny = self.LIN(V * z)"],
    "in place": ["z = V * 300\nz *= z\ny = z.mean(-1, keepdim=True).sqrt() + V"],
}
NAMES = ("x", "hidden", "feats", "tokens_", "h1", "états", "out", "value")


def source(rng: random.Random, kinds: list[str]) -> str:
    """A file with a model that has faults of these ``kinds``."""
    alias, width = rng.choice(("torch", "T", "th")), rng.choice((6, 8, 16))
    net, lin, name = rng.choice(("Net", "Model", "_Core")), rng.choice(("fc", "proj", "linear_1")), rng.choice(NAMES)
    pad = rng.choice(("    ", "    ", "  ", "\t"))
    lines = [f"import torch as {alias}" if alias != "torch" else "import torch", "from torch import nn"]
    lines.insert(rng.randrange(3), "import torch.nn.functional as F")
    if rng.random() < 0.3:
        lines += [
            "",
            "class Other(nn.Module):",
            f"{pad}def forward(self, x): return x.masked_fill(x > 9, -1e9)  # not used",
        ]
    lines += ["", f"class {net}(nn.Module):", f'{pad}"""Planted: (a [b."""', f"{pad}def __init__(self):"]
    lines += [f"{pad * 2}super().__init__()", f"{pad * 2}self.{lin} = nn.Linear({width}, {width})", ""]
    lines += [f"{pad}def forward(self, x):", f"{pad * 2}{name} = self.{lin}(x)"]
    for number, kind in enumerate(kinds):
        body = rng.choice(FAULTS[kind]).replace("V", name).replace("LIN", lin).replace("T.", f"{alias}.")
        body = body.replace("z", f"z{number}").replace(f"rz{number}", "rz").replace(f"siz{number}e", "size")
        for word in ("zeros", "normalize"):
            body = body.replace(word.replace("z", f"z{number}"), word)
        for line in body.splitlines():
            comment = (
                "  # see the paper, eq. (3" if rng.random() < 0.2 and not line.endswith(("(", ",", "padding")) else ""
            )
            lines.append(f"{pad * 2}{line}{comment}")
        lines.append(
            f"{pad * 2}{name} = y" if rng.random() < 0.5 or number + 1 < len(kinds) else f"{pad * 2}{name} = (y)"
        )
    lines += [
        f"{pad * 2}return {name}",
        "",
        "def model():",
        f"{pad}{alias}.manual_seed(0)",
        f"{pad}return {net}().eval()",
    ]
    lines += [
        "",
        f"inputs = {alias}.randn({width}, {width}, generator={alias}.Generator().manual_seed({rng.randrange(99)}))",
    ]
    return "\n".join(lines) + "\n"


def outputs(text: str, dtype: torch.dtype | None, autocast: bool) -> torch.Tensor:
    """What the plain model gives, without the tool."""
    space: dict[str, Any] = {}
    exec(compile(text, "planted", "exec"), space)
    model, inputs = space["model"](), space["inputs"]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        found: torch.Tensor = model(inputs) if dtype is None else model.to(dtype)(inputs.to(dtype))
    return found


def tried(text: str, precision: str, folder: Path, number: int) -> dict[str, Any]:
    """One model: what the tool found, and what is true of it."""
    file = folder / f"planted_{number}.py"
    file.write_text(text, encoding="utf-8")
    *_, (result, patch) = fix_file(TargetSpec(str(file)), FixOptions(precisions=precision, seconds=60.0))
    fixing = result.fixing
    assert fixing is not None
    assert patch is not None
    found = {"failed": bool(fixing.proven), "passes": fixing.passes, "changes": len(fixing.changes), "broken": False}
    found |= {"seconds": fixing.seconds, "scan_seconds": fixing.scan_seconds, "trials": fixing.trials}
    if not fixing.due:
        return found
    new = next(iter(patch.texts(range(len(fixing.changes))).values()))
    try:
        ast.parse(new)
        before, after = outputs(text, None, False), outputs(new, None, False)
        low = outputs(new, None if precision == "autocast-fp16" else torch.half, precision == "autocast-fp16").float()
        found["fp32_equal"] = torch.equal(before, after)
        found["error"] = float((low - before).norm() / before.norm())
    except Exception as error:
        found |= {"broken": True, "why": f"{type(error).__name__}: {error}"[:200]}
    return found


def main() -> None:
    """Write a table and the figures of each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("reports/fixes"))
    given = parser.parse_args()
    started, rows = time.monotonic(), list[dict[str, Any]]()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.models):
            if time.monotonic() - started > given.seconds:
                break
            rng = random.Random(f"{given.seed}:{number}")
            kinds = [list(FAULTS)[number % len(FAULTS)]]
            kinds += [rng.choice(list(FAULTS))] if rng.random() < 0.25 else []
            text, precision = source(rng, kinds), "half" if rng.random() < 0.8 else "autocast-fp16"
            row = {"number": number, "kinds": kinds, "precision": precision}
            try:
                row |= tried(text, precision, Path(folder), number)
            except Exception as error:
                row |= {"failed": True, "passes": False, "crashed": f"{type(error).__name__}: {error}"[:200]}
            rows.append(row)
            print(json.dumps(row), flush=True)
            if row["failed"] and not (row["passes"] and row.get("fp32_equal")):
                print(text, flush=True)
            given.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            given.output.with_suffix(".md").write_text(table(rows), encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """The figures by kind of fault."""
    counted = [row for row in rows if row["failed"]]
    good = [row for row in counted if row["passes"]]
    different = sum(row.get("fp32_equal") is False for row in rows)
    lines = ["# Generated models with planted faults, fixed", "", "`python benchmarks/fixes.py`", ""]
    lines += [
        f"{len(rows)} models, of which {len(counted)} fail without a patch; {len(good)} of these are fixed and proven. "
        f"fp32 differs in {different}; {sum(row.get('broken', False) for row in rows)} files are broken.",
        "",
        "| fault | models that fail | fixed |",
        "|---|---:|---:|",
    ]
    failing, fixed = (Counter(kind for row in part for kind in row["kinds"]) for part in (counted, good))
    lines += [f"| {kind} | {failing[kind]} | {fixed[kind]} |" for kind in FAULTS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
