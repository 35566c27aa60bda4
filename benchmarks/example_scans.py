"""Scan every example and ResNet-50, and save the results in reports/scans: ``python benchmarks/example_scans.py``."""

from __future__ import annotations

from pathlib import Path

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.engine.load import TargetSpec
from lowprec_check.engine.scan_options import ScanOptions
from lowprec_check.engine.session import scan_file
from lowprec_check.report.text import render

ROOT = Path(__file__).parent.parent
WITHHELD = ("aten.dot:half",)


def main() -> None:
    """Write a JSON and a text file for each."""
    folder = ROOT / "reports" / "scans"
    folder.mkdir(parents=True, exist_ok=True)
    scans: list[tuple[str, str, tuple[str, ...]]] = [
        (path.stem, str(path.relative_to(ROOT)), ()) for path in sorted((ROOT / "examples").glob("*.py"))
    ]
    scans.append(("spade_decoder_without_dot", "examples/spade_decoder.py", WITHHELD))
    scans.append(("torchvision_resnet50", "torchvision:resnet50", ()))
    for name, spec, withheld in scans:
        *_, found = scan_file(TargetSpec(spec), ScanOptions(device="cpu", without_kernel=withheld))
        result = conclude(found)
        result.save(folder / f"{name}.json")
        (folder / f"{name}.txt").write_text(render(result, width=120), encoding="utf-8")
        print(name, result.recommendation and result.recommendation.precision)


if __name__ == "__main__":
    main()
