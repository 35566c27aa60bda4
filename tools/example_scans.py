"""Scan the examples of inference and ResNet-50 anew, and write reports/scans.

Run ``python tools/example_scans.py [--only NAME]``. Each report is what the command prints. The JSON of the small scans
in ``WITH_JSON`` is saved too: documents and tests use it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.core.session import scan_file
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.report.registry import render
from lowprec_check.schema.options import ScanOptions

ROOT = Path(__file__).resolve().parent.parent
TRAINING = "train_"
"""Names of examples of training start with this."""
SLOW = ("cifar_resnet50",)
"""It trains its model first, for minutes."""
WITH_JSON = ("scans/whitening", "scans/masked_attention", "scans/speaker")


def scans() -> dict[str, tuple[str, dict[str, Any]]]:
    """The target and the options of each scan, by its path in reports/ without suffix."""
    targets: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted((ROOT / "examples").glob("*.py")):
        if not path.stem.startswith(TRAINING) and path.stem not in SLOW:
            targets[f"scans/{path.stem}"] = (f"examples/{path.name}", {})
    targets["scans/spade_decoder_without_dot"] = ("examples/spade_decoder.py", {"without_kernel": ("aten.dot:half",)})
    targets["scans/torchvision_resnet50"] = ("torchvision:resnet50", {})
    return targets


def main() -> None:
    """Scan all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only those whose path contains this, e.g. whitening")
    arguments = parser.parse_args()
    for name, (spec, options) in scans().items():
        if arguments.only not in name:
            continue
        *_, result = scan_file(TargetSpec(spec), ScanOptions(device="cpu", **options))
        result = conclude(result)
        report = ROOT / "reports" / f"{name}.txt"
        report.write_text(render(result, "text"), encoding="utf-8")
        if name in WITH_JSON:
            result.save(report.with_suffix(".json"))
        print(name, flush=True)


if __name__ == "__main__":
    main()
