"""Scan every example and ResNet-50, and save the results in reports/scans; examples of training in reports/training.

``python benchmarks/example_scans.py [--only NAME]``; ``python tools/committed_reports.py`` then writes their text.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.engine.run.target_spec import TargetSpec
from lowprec_check.engine.session import scan_file
from lowprec_check.schema.options import ScanOptions

ROOT = Path(__file__).parent.parent
TRAINING = "train_"
"""Names of examples of training start so."""
APART = ("cifar_resnet50",)
"""It trains its model first, for minutes."""


def scans() -> dict[str, tuple[str, dict[str, Any]]]:
    """The target and the options of each scan, by its path in reports/ without suffix."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted((ROOT / "examples").glob("*.py")):
        if path.stem in APART:
            continue
        trains = path.stem.startswith(TRAINING)
        folder = "training" if trains else "scans"
        found[f"{folder}/{path.stem}"] = (f"examples/{path.name}", {"train": True, "steps": 8} if trains else {})
    found["scans/spade_decoder_without_dot"] = ("examples/spade_decoder.py", {"without_kernel": ("aten.dot:half",)})
    found["scans/torchvision_resnet50"] = ("torchvision:resnet50", {})
    return found


def main() -> None:
    """Scan all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only those whose path contains this, e.g. training/")
    given = parser.parse_args()
    for name, (spec, options) in scans().items():
        if given.only in name:
            *_, found = scan_file(TargetSpec(spec), ScanOptions(device="cpu", **options))
            result = conclude(found)
            result.save(ROOT / "reports" / f"{name}.json")
            print(name, result.recommendation and result.recommendation.precision, flush=True)


if __name__ == "__main__":
    main()
