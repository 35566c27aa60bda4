"""Runs the printed code of every run that passed, in a process of its own, and compares its error with the reported one.

    python benchmarks/pasted_code.py [--device cuda] [--backend jit,inductor] [--memory-format channels_last] [TARGET …]

The code is pasted behind the text of the file; for a model by name it is complete. The seed is that of the scan, so
files that draw their weights and inputs get the same ones; a model by name gets other random inputs than the scan.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tabulate import tabulate

from lowprec_check import ScanResult
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.core.output_comparison import compare_outputs
from lowprec_check.schema.scan_result import Run

ROOT = Path(__file__).parent.parent
EXAMPLES = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "examples").glob("*.py"))]
SAVE = """
from lowprec_check.engine.core.pytree import leaves as _leaves
torch.save([tensor.cpu() for _, tensor in _leaves(output)], {path!r})
"""
START = """
from lowprec_check.engine.core.devices import seed_everything as _seed
_seed(0)
"""


def main() -> None:
    """Scan and run everything; exit 1 if code fails, or an example's error is another one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=EXAMPLES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--memory-format", default="contiguous")
    options = parser.parse_args()
    chosen = ["--device", options.device, "--backend", options.backend, "--memory-format", options.memory_format]
    rows = [row for target in options.targets for row in check(target, chosen)]
    print(tabulate(rows, ["target", "precision", "reported", "pasted", ""], floatfmt=".2e"))
    sys.exit(1 if any(row[-1] for row in rows) else 0)


def check(target: str, chosen: list[str]) -> list[tuple[str, str, float | None, float | None, str]]:
    """One row for each run that passed."""
    command = [
        sys.executable,
        "-m",
        "lowprec_check",
        "scan",
        target,
        *chosen,
        "--json",
        "-",
        "--fail-on",
        "never",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        return [(target, "", None, None, done.stderr.decode().strip().splitlines()[-1])]
    result = ScanResult.from_json(done.stdout)
    text = (ROOT / target).read_text(encoding="utf-8") if target.endswith(".py") else ""
    reference, problem = output_of(text, snippet(result.runs[0].key, result.model))
    rows = [(target, "fp32", None, None, problem)] if problem else []
    for run in result.runs:
        if not run.is_reference and run.status == "ok" and reference is not None:
            rows.append((target, run.key.label, *compare(run, text, result, reference)))
    return rows


def compare(
    run: Run, text: str, result: ScanResult, reference: list[torch.Tensor]
) -> tuple[float | None, float | None, str]:
    """The reported error, that of the pasted code, and what is wrong."""
    key = run.key._replace(precision=run.base or run.precision)
    output, problem = output_of(text, snippet(key, result.model, run.keep_fp32, run.untied))
    reported = run.output_error.rel_l2 if run.output_error is not None else None
    if output is None:
        return reported, None, problem
    pasted = compare_outputs(output, reference).error.rel_l2
    same = None in (reported, pasted) or abs((pasted or 0) - (reported or 0)) <= 0.1 * max(reported or 0, 1e-6)
    return reported, pasted, "" if same or not text else "another error"


def output_of(text: str, code: str) -> tuple[list[torch.Tensor] | None, str]:
    """The tensors of the output of ``code`` behind ``text``, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "output.pt")
        pasted = Path(folder, "pasted.py")
        pasted.write_text(f"{text.replace('from __future__ import annotations', '')}", encoding="utf-8")
        future = "from __future__ import annotations\n" if "from __future__" in text else ""
        pasted.write_text(
            future + START + pasted.read_text(encoding="utf-8") + code + SAVE.format(path=str(path)), "utf-8"
        )
        done = subprocess.run([sys.executable, pasted], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return None, done.stderr.strip().splitlines()[-1]
        return torch.load(path, weights_only=True), ""


if __name__ == "__main__":
    main()
