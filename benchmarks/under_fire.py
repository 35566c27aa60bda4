"""Kill processes of real scans, and check that nothing is left behind, lost or wrongly blamed.

    python benchmarks/under_fire.py --kills 40 --jobs 2

Each trial starts ``lowprec-check scan`` (one in five: ``compat``) on small models, waits a random time, and sends a signal to
the command or to one of its processes. It depends on ``--seed`` and its number only: ``--only 17`` repeats trial 17; the moment
is a share of the time that a scan takes here. Exits 1 if a check fails. Linux only. 1,000 kills take about 1.5 hours with two
jobs on two idle cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from under_fire_models import DIES, MODELS, write_models

from lowprec_check.errors import UsageError
from lowprec_check.schema.matrix import MatrixRow, load
from lowprec_check.schema.scan_result import ResultError, ScanResult

ROOT = Path(__file__).parent.parent
MARK = "LOWPREC_CHECK_UNDER_FIRE"
"""The environment variable that all processes of a trial inherit, also those whose parent has ended."""
COMMAND = (sys.executable, "-c", "from lowprec_check.cli.main import main; main()")
PRECISIONS = ("half", "bfloat16")
GRACE = 2.0
"""Seconds after the end of the command in which its processes may still run."""
LIMIT = 240.0
"""Seconds after which a command has hung."""
CHECKS = ("orphans", "temporary files", "invalid JSON", "lost rows", "wrong blame", "tool failed")


class Kill(NamedTuple):
    """Which process gets which signal."""

    victim: str
    """``command``, ``child`` (any process that it started) or ``none``."""
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} to {self.victim}" if self.name else "no signal"


KILLS = (
    *(Kill("command", name) for name in ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")),
    *(Kill("child", name) for name in ("SIGKILL", "SIGSEGV")),
    Kill("none"),
)


@dataclasses.dataclass
class Trial:
    """One command and its fate; ``problems`` are pairs of a check and what it found."""

    number: int
    models: list[str]
    options: list[str]
    kill: Kill
    moment: float
    """Seconds after which the signal is sent."""
    after_import: bool
    """Whether they count from the first process that the command starts: importing torch takes most of a scan."""
    folder: Path = Path()
    mark: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @property
    def is_compat(self) -> bool:
        return len(self.models) > 1

    def __str__(self) -> str:
        what = f"{'compat' if self.is_compat else 'scan'} {' '.join(self.models)} {' '.join(self.options)}"
        origin = "of work" if self.after_import else "in all"
        when = f" after {self.moment:.1f} s {origin}" if self.kill.name else ""
        return f"trial {self.number}, {self.kill}{when}, {what.strip()}"

    def report(self, check: str, found: str) -> None:
        """Add a problem."""
        self.problems.append((check, found))


def plan_trial(seed: int, number: int, pace: float) -> Trial:
    """Draw a trial; ``pace`` is the number of seconds of one scan."""
    draw = random.Random(f"{seed} {number}")
    compat = draw.random() < 0.2
    models = draw.sample(sorted(MODELS), 3 if compat else 1)
    options = ["--no-plan"] * draw.choice((0, 1)) + ["--errors", "accumulated"] * draw.choice((0, 1))
    after_import = draw.random() < 0.8
    kill = KILLS[number % len(KILLS)]
    share = draw.random()
    if after_import and not compat:  # the runs of most models take 0.5 s
        share = share**2 * (0.2 if kill.victim == "child" else 0.4)
    return Trial(number, models, options, kill, share * pace * len(models), after_import)


# -- running


def command_of(trial: Trial, models: Path) -> list[str]:
    """The command line of a trial."""
    targets = [str(models / f"{name}.py") for name in trial.models]
    common = [word for name in PRECISIONS for word in ("-p", name)] + ["--budget", "4"]
    if trial.is_compat:
        more = ["--scan-options", " ".join(trial.options)] if trial.options else []
        return [*COMMAND, "compat", *targets, "-o", str(trial.folder / "out"), *common, *more]
    return [*COMMAND, "scan", *targets, "--json", str(trial.folder / "scan.json"), *common, *trial.options]


@contextlib.contextmanager
def started(trial: Trial, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``command`` with its own TMPDIR and mark; at the end kill all that is left of it."""
    (trial.folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {
        MARK: trial.mark,
        "TMPDIR": str(trial.folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with (trial.folder / "stdout").open("wb") as out, (trial.folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        for pid in processes_of(trial):
            send(pid, signal.SIGKILL)
        process.wait()


def processes_of(trial: Trial) -> list[int]:
    """The processes with the mark of the trial; zombies have no environment."""
    wanted = f"{MARK}={trial.mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def send(pid: int, number: int) -> None:
    """Send a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def fire(trial: Trial, process: subprocess.Popen[bytes]) -> None:
    """Send the signal at its moment; to a child, as soon as there is one. If the command has ended, none is sent."""
    while trial.after_import and process.poll() is None and len(processes_of(trial)) < 2:
        time.sleep(0.05)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(trial.moment)
    draw = random.Random(trial.number)
    while trial.kill.name and process.poll() is None:
        pids = [process.pid]
        if trial.kill.victim == "child":
            pids = sorted(set(processes_of(trial)) - set(pids))
        if pids:
            send(draw.choice(pids), signal.Signals[trial.kill.name])
            return
        time.sleep(0.05)
    trial.kill = Kill("none")


def run(trial: Trial, models: Path) -> Trial:
    """Run a trial and check it."""
    with tempfile.TemporaryDirectory(prefix="under-fire-", ignore_cleanup_errors=True) as folder:
        trial.folder = Path(folder)
        command = command_of(trial, models)
        with started(trial, command) as process:
            fire(trial, process)
            wait(trial, process)
            check_left_behind(trial)
        if trial.is_compat:
            check_matrix(trial, command)
        else:
            check_scan(trial, trial.folder / "scan.json")
    return trial


def seconds_of_scan(models: Path) -> float:
    """Seconds of one scan without a kill."""
    with tempfile.TemporaryDirectory(prefix="under-fire-") as folder:
        trial = Trial(0, ["mlp"], [], Kill("none"), 0.0, False, Path(folder))
        begin = time.monotonic()
        with started(trial, command_of(trial, models)) as process:
            process.wait(LIMIT)
        return time.monotonic() - begin


def wait(trial: Trial, process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the command, which must not hang or report a bug of the tool."""
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        trial.report("tool failed", f"still running after {LIMIT:.0f} s")
        process.kill()
        process.wait()
        return
    if code == 3:
        trial.report("tool failed", f"exit 3: {(output(trial).strip().splitlines() or ['no output'])[-1][:200]}")


def output(trial: Trial) -> str:
    """What the command wrote to standard error."""
    return (trial.folder / "stderr").read_text(encoding="utf-8", errors="replace")


# -- checking


def check_left_behind(trial: Trial) -> None:
    """Two seconds after the end no process is left, and no file in TMPDIR or half-written in the report folder."""
    end = time.monotonic() + GRACE
    while (left := processes_of(trial)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        trial.report("orphans", describe(pid))
    files = [*(trial.folder / "tmp").rglob("*"), *(trial.folder / "out").glob(".*")]
    for path in files:
        if not path.is_dir() or not any(path.iterdir()):
            trial.report("temporary files", str(path.relative_to(trial.folder)))


def describe(pid: int) -> str:
    """The command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100].strip()
    return "a process that has just ended"


def check_scan(trial: Trial, path: Path) -> None:
    """The JSON is absent, or valid and complete; no op is blamed for a kill from outside."""
    if not path.exists():
        return
    try:
        result = ScanResult.load(path)
    except ResultError as error:
        trial.report("invalid JSON", f"{path.name}, {path.stat().st_size} bytes: {error}")
        return
    missing = {"fp32", *PRECISIONS} - {run.precision for run in result.runs}
    if missing:
        trial.report("invalid JSON", f"{path.name} lacks the runs {', '.join(sorted(missing))}")
    if trial.kill.victim == "child" and Path(result.target).stem not in DIES:
        check_blame(trial, result)


def check_blame(trial: Trial, result: ScanResult) -> None:
    """No op is blamed: the model does not die by itself."""
    for run in result.runs:
        ops = [gap.op for gap in run.gaps if gap.kind == "crash"]
        if run.status == "crashed" and re.search(r", in (op \d+: )?aten\.", run.reason or ""):
            ops.append(run.reason or "")
        for op in ops:
            trial.report("wrong blame", f"{Path(result.target).stem} in {run.precision}: {op}")
    for found in result.diagnostics:
        if found.code == "LP107" and found.op:
            trial.report("wrong blame", f"LP107 {found.op} in {found.precision}")


def check_matrix(trial: Trial, command: list[str]) -> None:
    """Every row that was printed is saved, every saved scan is valid, and the same command finishes the list."""
    printed = {Path(name).stem for name in re.findall(r"^\[\d+/\d+\] (.*?\.py) ·", output(trial), re.MULTILINE)}
    saved = {Path(row.target).stem for row in rows(trial)}
    if printed - saved:
        trial.report("lost rows", f"printed but not saved: {', '.join(sorted(printed - saved))}")
    for path in (trial.folder / "out" / "scans").glob("*.json"):
        check_scan(trial, path)
    with started(trial, command) as process:
        wait(trial, process)
    missing = set(trial.models) - {Path(row.target).stem for row in rows(trial)}
    if missing:
        trial.report("lost rows", f"missing after the list was resumed: {', '.join(sorted(missing))}")


def rows(trial: Trial) -> list[MatrixRow]:
    """The rows of the matrix; none if there is no file yet."""
    try:
        return load(trial.folder / "out" / "matrix.json").rows
    except UsageError as error:
        trial.report("invalid JSON", error.message)
        return []


# -- the report


def table(trials: list[Trial]) -> str:
    """Trials and problems by kind of kill: the number of trials in which a check failed."""
    lines = [f"{'kill':<20}{'trials':>7}" + "".join(f"{check:>16}" for check in CHECKS)]
    for kill in KILLS:
        of_kind = [trial for trial in trials if trial.kill == kill]
        failed = Counter(check for trial in of_kind for check in {check for check, _ in trial.problems})
        lines.append(f"{kill!s:<20}{len(of_kind):>7}" + "".join(f"{failed[check]:>16}" for check in CHECKS))
    return "\n".join(lines)


def main() -> None:
    """Run the trials, print the table and each problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="number of trials")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no trial after this time")
    parser.add_argument("--jobs", type=int, default=2, help="trials at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the trials to run")
    options = parser.parse_args()
    numbers = options.only if options.only is not None else range(options.kills)
    end, done = time.monotonic() + options.seconds, []
    with tempfile.TemporaryDirectory(prefix="under-fire-models-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        write_models(Path(folder))
        pace = seconds_of_scan(Path(folder))

        def run_in_time(number: int) -> Trial | None:
            return run(plan_trial(options.seed, number, pace), Path(folder)) if time.monotonic() < end else None

        for trial in pool.map(run_in_time, numbers):
            if trial is not None:
                done.append(trial)
                print(f"{trial}: {', '.join(sorted({check for check, _ in trial.problems})) or 'ok'}", flush=True)
    print(f"\n{table(done)}\n")
    for trial in done:
        if trial.problems:
            print(trial, *(f"    {check}: {found}" for check, found in trial.problems), sep="\n")
    sys.exit(any(trial.problems for trial in done))


if __name__ == "__main__":
    main()
