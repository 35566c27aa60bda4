"""Fix training scripts with a planted fault: how many are fixed, and where do their weights end, checked here without the tool.

    python benchmarks/script_fixes.py --output reports/script-fixes

The scripts are those of training_scripts.py that have a loop of their own, written for autocast to fp16 or bf16. The faults: no ``GradScaler``, with a loss so small that its gradients
become zero in fp16; gradients that are clipped before they are unscaled; one autocast around the loop.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from report_files import head, made, save
from training_scripts import SCRIPTS, rewritten, train

from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.engine.script_fixing import fix_script
from lowprec_check.errors import UsageError
from lowprec_check.schema.options import FixOptions

STEPS = 8
SMALL = 1e-7


def faulty() -> Iterator[tuple[str, str, str, str]]:
    """The name of a script, its fault, its text, and that in fp32."""
    for name, text in SCRIPTS.items():
        if any(other in text for other in ("L.Trainer(", "Accelerator(", "TrainingArguments(")):
            continue
        scale = 1 if "Adam" in text or "RMSprop" in text else 1 / SMALL
        faster = re.sub(r"\blr=([\d.e-]+)", lambda rate, by=scale: f"lr={float(rate[1]) * by:g}", text)
        faster = re.sub(r"weight_decay=[\d.e-]+", "weight_decay=0.0", faster)
        small = re.sub(r"( *)# end\n", rf"\1loss = {SMALL} * loss\n\1# end\n", faster)
        yield name, "no GradScaler", rewritten(small, "autocast-fp16"), small
        if "# clip" in text:
            scaled = rewritten(text.replace("# clip", "# keep"), "autocast-fp16", 1024.0)
            yield name, "clipped while scaled", scaled, text
        around = re.sub(r"^( *)(for epoch in .*\n(?:\1 +.*\n|\n)*)", _around, text, count=1, flags=re.MULTILINE)
        if around != text:
            yield name, "autocast around the loop", around, text


def _around(match: re.Match[str]) -> str:
    lines = "".join(f"    {line}\n" for line in match[0].splitlines())
    return f'{match[1]}with torch.autocast("cpu", dtype=torch.bfloat16):\n{lines}'


def distance(text: str, fp32: str) -> float:
    """Of the weights after the steps from those of fp32, relative to how far these move, by plain runs."""
    (_, low), (_, wide) = (train(each, STEPS, draws=False) for each in (text, fp32))
    start, low, wide = wide[: len(wide) // 2], low[len(low) // 2 :], wide[len(wide) // 2 :]
    apart, moved = (sum(float((a - b).square().sum()) for a, b in zip(wide, its, strict=True)) for its in (low, start))
    return (apart / moved) ** 0.5


def fixed(text: str, fp32: str) -> dict[str, Any]:
    """What the tool finds, and what plain runs show."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(text)
        try:
            found, texts = fix_script(TargetSpec(str(file)), FixOptions(train=True, steps=STEPS))
        except UsageError as error:
            return {"error": str(error)}
        its = found.script
        assert its is not None
        patched = next(iter(texts.values()), text)
    return {
        "changes": [change.kind for change in found.changes],
        "left": [each.reason for each in found.left_alone],
        "passes": found.passes,
        "told": [its.before, its.after],
        "skipped": its.skipped,
        "plain": [distance(text, fp32), distance(patched, fp32)],
        "seconds": found.seconds,
    }


def render(data: dict[str, Any]) -> str:
    """The report."""
    rows = [row for row in data["scripts"] if "error" not in row]
    kinds, lines = (
        Counter(row["fault"] for row in data["scripts"]),
        head("Training scripts with a planted fault, fixed", data),
    )
    due = [row for row in rows if row["plain"][0] > row["tolerance"]]
    done = [row for row in due if row["changes"] and not row["left"] and row["plain"][1] <= row["plain"][0] / 2]
    near = [row for row in done if row["plain"][1] <= row["tolerance"]]
    wrong = [
        row
        for row in rows
        if any(a is not None and abs(a - b) > 0.02 * b + 1e-4 for a, b in zip(row["told"], row["plain"], strict=True))
        and not row["skipped"]
    ]
    lines += [
        f"**Of {len(due)} scripts that train worse with their fault, {len(done)} are fixed: the patch at least halves the distance of their weights from those of fp32. "
        f"{len(near)} of the {len(done)} then end within the tolerance after {STEPS} steps**; for the others the command exits with 1. "
        f"{len(rows) - len(due)} others are within it with the fault, and {len(data['scripts']) - len(rows)} could not be tried.",
        "",
        f"In {len(wrong)} reports a distance is not that of the plain runs here (2 %).",
        "",
        "| fault | scripts | train worse | fixed | distance before, median | after, median |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, count in kinds.items():
        mine, ok = [row for row in due if row["fault"] == kind], [row for row in done if row["fault"] == kind]
        medians = [f"{sorted(row['plain'][i] for row in ok)[len(ok) // 2]:.1e}" if ok else "–" for i in (0, 1)]
        lines.append(f"| {kind} | {count} | {len(mine)} | {len(ok)} | {' | '.join(medians)} |")
    others = [
        f"- {row['script']}, {row['fault']}: {'; '.join(row.get('left', ())) or row.get('error') or row['plain']}"
        for row in data["scripts"]
        if row not in done and (row in due or "error" in row)
    ]
    return "\n".join([*lines, *(["", "Not fixed:", "", *others] if others else [])]) + "\n"


def main() -> None:
    """Make the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="part of the name of a script or fault")
    options, rows = parser.parse_args(), []
    torch.set_num_threads(1)
    output, how = options.output and options.output.resolve(), made()
    sys.argv[1:] = []  # which the scripts parse
    os.chdir(tempfile.mkdtemp())  # the scripts write files
    for name, fault, text, fp32 in faulty():
        if options.only in f"{name} {fault}":
            tolerance = 5e-2 if "bfloat16" in text else 1e-2
            rows.append({"script": name, "fault": fault, "tolerance": tolerance} | fixed(text, fp32))
            print(rows[-1], flush=True)
    save(output, {"made": how, "scripts": rows}, render)


if __name__ == "__main__":
    main()
