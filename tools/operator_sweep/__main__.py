"""Runs every operator of torch's OpInfo database in fp32, half and bfloat16, and adds the results to the catalog.

python -m tools.operator_sweep --device cuda
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from lowprec_check.catalog.versioned_file import data_folder
from lowprec_check.engine.sweep.kept_sweep import CALL_SECONDS, SAMPLES, OperatorSweep, Task
from lowprec_check.errors import UsageError
from lowprec_check.process.interpreter import module_command
from tools.catalog_files import MeasuredSweep
from tools.operator_sweep.messages import FullAnswer, FullHello, decode

ROOT = Path(__file__).resolve().parents[2]

OnOperator = Callable[[int, int, str], None]
"""Called with the number of finished operators, the number of all, and the name of the next."""


def build(
    device: str = "cpu",
    *,
    jobs: int | None = None,
    samples: int = SAMPLES,
    only: list[str] | None = None,
    extension: str | None = None,
    python: str = sys.executable,
    worker: str = "tools.operator_sweep.worker",
    call_seconds: float = CALL_SECONDS,
    on_progress: OnOperator | None = None,
) -> MeasuredSweep:
    """Measure every operator (or those named in ``only``) with the torch of the interpreter ``python``.

    ``worker`` is the module that a worker runs; it is killed if one call takes longer than ``call_seconds``. Raises
    :class:`UsageError` if this torch or the device cannot be measured, or if an operator is unknown.
    """
    command = module_command(worker, "--device", device, "--samples", str(samples), python=python)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def report(task: Task) -> None:
        if on_progress is not None:
            on_progress(len(sweep.answers), sweep.total, task.op)

    with tempfile.TemporaryDirectory(prefix="lowprec-check-") as workdir:
        sweep = OperatorSweep(
            command + (["--extension", extension] if extension else []),
            Path(workdir),
            call_seconds=call_seconds,
            environment=os.environ | {"PYTHONPATH": path},
            decode=decode,
            on_send=report,
        )
        with sweep.queue.supervisor:
            answers = sweep.measure(only, jobs or os.cpu_count() or 1)
    assert isinstance(sweep.hello, FullHello)  # nothing is measured before it
    header = msgspec.structs.replace(sweep.hello.header, ops=len(answers))
    times = [answer.times for answer in answers if isinstance(answer, FullAnswer) and answer.times.float32_us]
    return MeasuredSweep(header, [answer.record for answer in answers], times)


def show(done: int, total: int, op: str) -> None:
    """Show the progress on one line of a terminal."""
    print(f"\r{done} of {total} operators: {op[:60]:60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    """Parse the arguments, measure, write the files."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.operator_sweep", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--device", default="cpu", help="the device to measure (default: cpu)")
    parser.add_argument("--jobs", type=int, help="number of worker processes (default: one per core)")
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, help="maximum samples per operator, without the large ones"
    )
    parser.add_argument("--only", action="append", metavar="OPERATOR", help="measure only this operator; repeatable")
    parser.add_argument("--ipex", action="store_true", help="load Intel Extension for PyTorch first")
    parser.add_argument("--out", type=Path, default=data_folder(), help="folder for the results (default: catalog)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    options = parser.parse_args()
    try:
        if not options.out.is_dir():
            raise UsageError(f"The folder {options.out} does not exist.", "Create it, or give --out another folder.")
        measured = build(
            options.device,
            jobs=options.jobs,
            samples=options.samples,
            only=options.only,
            extension="ipex" if options.ipex else None,
            on_progress=show if sys.stderr.isatty() and not options.quiet else None,
        )
        for path in measured.save(options.out):
            print(path)
    except UsageError as error:
        parser.error(" ".join(filter(None, (error.message, error.hint))))


if __name__ == "__main__":
    main()
