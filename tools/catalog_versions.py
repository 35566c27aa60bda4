"""Measure the catalog's CPU files for several versions of torch, each in a temporary virtual environment.

    python tools/catalog_versions.py 2.1.2 2.2.2 2.8.0 2.8.0+ipex
    python tools/catalog_versions.py --here /path/to/python     # an interpreter that has torch, msgspec and expecttest

The oldest versions need Python 3.10 or 3.11. Each version needs about 8 GB of disk and three minutes; CUDA wheels of
torch work too. The files are written to catalog/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.operator_sweep.__main__ import build  # noqa: E402

IPEX = "+ipex"


def requirements(version: str) -> list[str]:
    """The packages that a sweep of this version of torch needs."""
    torch = version.removesuffix(IPEX)
    found = [f"torch=={torch}", "msgspec", "expecttest", "packaging", "setuptools"]
    found.append("numpy<2" if tuple(map(int, torch.split(".")[:2])) < (2, 3) else "numpy")
    if version.endswith(IPEX):
        found += [f"intel-extension-for-pytorch=={torch}", "torchvision==0.23.0"]
    return found


def measure(python: str, out: Path, jobs: int, extension: str | None = None) -> None:
    """Sweep with the interpreter ``python``, and save the files in ``out``."""
    started = time.perf_counter()
    measured = build("cpu", python=python, jobs=jobs, extension=extension)
    for path in measured.save(out):
        print(f"{path.name}  {path.stat().st_size // 1000} kB  {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    """For each version: install, measure, remove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*")
    parser.add_argument(
        "--here", action="append", default=[], help="an interpreter in which everything is installed; repeatable"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "catalog")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    for python in options.here:
        measure(python, options.out, options.jobs)
    for version in options.versions:
        folder = Path(tempfile.mkdtemp(prefix=f"torch-{version}-"))
        try:
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            python = str(folder / "bin" / "python")
            pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *requirements(version)]
            subprocess.run(pip, check=True)
            measure(python, options.out, options.jobs, "ipex" if version.endswith(IPEX) else None)
        except Exception as error:
            print(f"{version}: {error}", file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
