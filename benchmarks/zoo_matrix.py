"""Scan the models of torchvision, timm and transformers with scaled random weights, and publish the matrix.

    python benchmarks/zoo_matrix.py --device cpu --jobs 8 --seconds 500 --output reports/zoo-cpu
    python benchmarks/zoo_matrix.py --device cuda --jobs 14 --seconds 500 --output reports/zoo-cuda
    python benchmarks/zoo_matrix.py --only timm --limit 5 --output /tmp/zoo
    python benchmarks/zoo_matrix.py --publish --output reports/zoo-cpu        # only write the index again

The models are listed in ``benchmarks/zoo/*.txt``. Each is one ``lowprec-check scan`` in a process of its own. After
``--seconds`` the scans that still run are stopped; what is finished is saved (``matrix.json``, ``scans/``), and the same command
continues there. The index (``index.md``, ``index.html``) is always that of all rows in ``matrix.json``, with the text of ``note.txt``
if the folder has one. It has no links to pages of single models: they are not published.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from lowprec_check.compat.folder_lock import FolderLock
from lowprec_check.compat.rows import request_of, row_of
from lowprec_check.compat.runner import scan_all
from lowprec_check.compat.saved_files import saved_scan
from lowprec_check.compat.target_list import Request, expand_requests, read_list
from lowprec_check.report import matrix
from lowprec_check.schema.files import make_folder, write_file
from lowprec_check.schema.matrix import Matrix, MatrixRow, load, save

LISTS = Path(__file__).parent / "zoo"
LIBRARIES = ("torchvision", "timm", "transformers")
SCAN_OPTIONS = ("--scale-weights", "--no-plan", "--errors", "none")
TITLES = {
    "cpu": "torchvision, timm and transformers in 16 bits on a CPU",
    "cuda": "torchvision, timm and transformers in 16 bits on an NVIDIA GPU",
}


class TimeUpError(Exception):
    """The time given with ``--seconds`` is over."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeUpError` in the main thread after ``seconds``."""

    def stop(*_: Any) -> NoReturn:
        raise TimeUpError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def requests(libraries: list[str], device: str, limit: int | None) -> list[Request]:
    """The models of the libraries, at most ``limit`` of each."""
    listed = [request for library in libraries for request in read_list(LISTS / f"{library}.txt")[:limit]]
    return expand_requests(listed, SCAN_OPTIONS, [device])


def scan(chosen: list[Request], folder: Path, options: argparse.Namespace) -> int:
    """Scan what is not finished, within the time; returns how many rows are missing."""
    started = time.monotonic()

    def on_row(done: int, of: int, row: MatrixRow, _: Any) -> None:
        text = row.reason if row.state == "failed" else ", ".join(f"{c.precision} {c.status}" for c in row.cells)
        print(
            f"{time.monotonic() - started:4.0f} s  {done}/{of}  {row.target}  {row.seconds:.0f} s  {text}", flush=True
        )

    try:
        with at_most(options.seconds):
            scan_all(
                chosen,
                folder,
                jobs=options.jobs,
                timeout=options.timeout,
                retry_failed=options.retry_failed,
                pages=(".none",),
                on_row=on_row,
            )
    except TimeUpError:
        print(f"stopped after {options.seconds:.0f} s; run the same command to continue", file=sys.stderr)
    finished = {request_of(row) for row in load(folder / "matrix.json").rows}
    return sum(request not in finished for request in chosen)


def publish(folder: Path, title: str) -> Matrix:
    """Write ``matrix.json`` with the rows of the saved scans, as this version makes them, and the index."""
    rows = []
    for row in load(folder / "matrix.json").rows:
        result = saved_scan(folder, row) if row.state == "scanned" else None
        rows.append(row if result is None else row_of(result, request_of(row), row.seconds, row.made_with))
    found = Matrix(rows=rows)
    save(found, folder / "matrix.json")
    note = (folder / "note.txt").read_text(encoding="utf-8").strip() if (folder / "note.txt").exists() else ""
    document = matrix.matrix_document(found, title, pages=None, note=note)
    for suffix in (".md", ".html"):
        write_file(folder / f"index{suffix}", matrix.matrix_page(document, suffix))
    return found


def summary(found: Matrix) -> str:
    """Rows by library, statuses by precision, and how many outputs are degenerate."""
    lines = [f"{library}: {count} rows" for library, count in _by_library(found).items()]
    failed = [row for row in found.rows if row.state == "failed"]
    lines += [f"failed: {row.target}: {row.reason}" for row in failed]
    for column in matrix.precisions(found):
        cells = [cell for row in found.rows for cell in row.cells if matrix.column_of(cell) == column]
        words = Counter("degenerate" if cell.degenerate else cell.status for cell in cells)
        lines.append(f"{column}: {', '.join(f'{count} {word}' for word, count in words.most_common())}")
    return "\n".join(lines)


def _by_library(found: Matrix) -> Counter[str]:
    return Counter(row.target.partition(":")[0] for row in found.rows)


def main() -> None:
    """Scan and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", action="append", choices=LIBRARIES, help="a library; repeatable")
    parser.add_argument("--limit", type=int, help="only the first N models of each library")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="scans at a time")
    parser.add_argument("--seconds", type=float, default=500.0, help="time for all scans of this call")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds after which one scan is stopped")
    parser.add_argument("--retry-failed", action="store_true", help="scan models that failed before again")
    parser.add_argument("--publish", action="store_true", help="write the index of what is saved, and scan nothing")
    options = parser.parse_args()
    folder: Path = options.output
    make_folder(folder)
    lock, missing = FolderLock(folder), 0
    lock.acquire()
    try:
        if not options.publish:
            chosen = requests(options.only or list(LIBRARIES), options.device, options.limit)
            missing = scan(chosen, folder, options)
        found = publish(folder, TITLES.get(options.device, f"Models in 16 bits on {options.device}"))
    finally:
        lock.release()
    print(summary(found))
    if missing:
        print(f"{missing} models are not scanned yet", file=sys.stderr)
    raise SystemExit(1 if missing else 0)


if __name__ == "__main__":
    main()
