"""Time a full sweep of the catalog and an fp32 pass over the same samples: ``python benchmarks/catalog_sweep.py``.

Prints elapsed and processor time, and whether a second sweep wrote the same bytes. The limit is 60 s on 2 cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from lowprec_check.engine.sweep.calls import Caller
from lowprec_check.engine.sweep.kept_sweep import SAMPLES
from lowprec_check.engine.sweep.samples import load_operators, samples_of, seed_all

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.operator_sweep.__main__ import build

LIMIT = 60.0


@contextlib.contextmanager
def stopwatch(what: str) -> Iterator[None]:
    """Print the time that the block took, including child processes."""
    before, started = _processor_time(), time.perf_counter()
    yield
    wall, busy = time.perf_counter() - started, _processor_time() - before
    print(f"{what:<46}{wall:7.1f} s{busy:9.1f} s of processor time", flush=True)


def _processor_time() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def fp32_pass() -> int:
    """Run every operator forward in fp32, once per sample, in one process; return the number of calls that succeeded."""
    calls = 0
    for name, operator in load_operators().items():
        seed_all(name)
        with contextlib.suppress(Exception):
            for sample in samples_of(operator, "cpu", SAMPLES):
                calls += Caller(operator, "cpu").attempt(sample, torch.float32, "forward").outcome is True
    return calls


def main() -> None:
    """Time both; sweep twice to compare the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--once", action="store_true", help="skip the second sweep")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {options.jobs} jobs, {os.cpu_count()} cores, load {load:.1f} before")
    with stopwatch("fp32 forward only, one process"):
        calls = fp32_pass()
    print(f"  {calls} calls")
    written = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 if options.once else 2):
            with stopwatch("full sweep: 3 dtypes, 4 modes, fp64 reference"):
                measured = build("cpu", jobs=options.jobs)
            written.append(measured.save(Path(folder))[0].read_bytes())
    print(f"  {len(measured.records)} operators, {len(written[0]) / 1e3:.0f} kB, limit {LIMIT:.0f} s on 2 idle cores")
    if len(written) == 2:
        print(f"  the second sweep wrote {'the same bytes' if written[0] == written[1] else 'DIFFERENT BYTES'}")


if __name__ == "__main__":
    main()
