"""Scan every example and ResNet-50, and save the results in reports/scans; examples of training in reports/training.

``python benchmarks/example_scans.py [--only-training] [--device cuda]``
"""

from __future__ import annotations

import argparse
from pathlib import Path

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.engine.load import TargetSpec
from lowprec_check.engine.scan_options import ScanOptions
from lowprec_check.engine.session import scan_file
from lowprec_check.report.layout.text import text
from lowprec_check.report.scan_document import scan_document

ROOT = Path(__file__).parent.parent
WITHHELD = ("aten.dot:half",)
TRAINING = "train_"
"""Names of examples of training start so."""
STEPS = 8


def save(name: str, spec: str, folder: Path, options: ScanOptions) -> None:
    """Scan, and write a JSON and a text file."""
    *_, found = scan_file(TargetSpec(spec), options)
    result = conclude(found)
    result.save(folder / f"{name}.json")
    (folder / f"{name}.txt").write_text(text(scan_document(result), width=120), encoding="utf-8")
    print(name, result.recommendation and result.recommendation.precision, flush=True)


def main() -> None:
    """Scan all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only-training", action="store_true")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    examples = sorted((ROOT / "examples").glob("*.py"))
    suffix = "" if given.device == "cpu" else f"-{given.device}"
    trained, scanned = ROOT / "reports" / f"training{suffix}", ROOT / "reports" / f"scans{suffix}"
    for path in examples:
        spec = str(path.relative_to(ROOT))
        if path.stem.startswith(TRAINING):
            trained.mkdir(parents=True, exist_ok=True)
            save(path.stem, spec, trained, ScanOptions(device=given.device, train=True, steps=STEPS))
        elif not given.only_training:
            scanned.mkdir(parents=True, exist_ok=True)
            save(path.stem, spec, scanned, ScanOptions(device=given.device))
    if not given.only_training:
        withheld = ScanOptions(device=given.device, without_kernel=WITHHELD)
        save("spade_decoder_without_dot", "examples/spade_decoder.py", scanned, withheld)
        save("torchvision_resnet50", "torchvision:resnet50", scanned, ScanOptions(device=given.device))


if __name__ == "__main__":
    main()
