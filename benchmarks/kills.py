"""Kill commands at random moments, and list what they leave: processes, files, shared memory, locks, lost rows.

    python benchmarks/kills.py                        # 300 kills, seed 0
    python benchmarks/kills.py --kills 20 --only scan,dask --seed 7

Each kill starts a command of this program in a folder of its own, with a temporary folder of its own, waits for a
random part of the time that the command takes by itself, and sends one signal: SIGINT, SIGTERM, SIGHUP or SIGKILL to
the command, or SIGKILL to one of the processes that it has started. When the command has ended, nothing may be left
within ten seconds:

- processes that inherited its environment, whoever their parent is now;
- files in the temporary folder, files in the folder of the command that are no results, names in ``/dev/shm``;
- a lock of the folder that ``compat`` writes to.

Results that were saved must be complete: JSON that can be read, with a row for each run that was asked for; of
``compat``, with each row that it had shown. A command whose worker was killed must end by itself, with a documented
exit code.

Only on Linux. Writes OUTPUT.md and OUTPUT.json with every kill; exits with 1 if anything was left or lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from shared import head, made, parser_of, save

SETTLE_SECONDS = 10.0
"""Time for guardians to clean up."""
END_SECONDS = {"SIGINT": 20.0, "SIGTERM": 20.0, "SIGHUP": 20.0, "SIGKILL": 10.0, "worker": 300.0}
"""Time for the command to end; one whose worker was killed continues."""

MODEL = """
import torch

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

torch.manual_seed(0)
model = Small().eval()
inputs = torch.randn(8, 16)
target = torch.randn(8, 4)

def loss(output):
    return torch.nn.functional.mse_loss(output.float(), target)
"""

STARTS = """
import multiprocessing.shared_memory, os, subprocess, tempfile
import torch

def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()

class Starts(torch.nn.Module):
    "Starts processes, also daemons, and makes files and shared memory, in each run."
    def __init__(self):
        super().__init__()
        self.linear, self.done = torch.nn.Linear(4, 4), set()

    def forward(self, x):
        if os.getpid() not in self.done:
            self.done = {os.getpid()}
            daemon()
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            tempfile.mkdtemp()
            self.shared = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
        return self.linear(x)

model = Starts()
inputs = torch.ones(2, 4)
"""

SUITE = """
import torch

class Small(torch.nn.Module):
    def forward(self, x):
        return torch.quantile(x, 0.5) + x.sum()

def test_runs(lowprec):
    lowprec.check(Small(), torch.ones(4), "autocast-bf16")

def test_supported(lowprec):
    lowprec.assert_supported("mm")

def test_more():
    torch.fft.rfft(torch.ones(8))
"""


class Command(NamedTuple):
    """A command to kill."""

    arguments: str
    rows: tuple[str, ...] = ()
    """Of ``scan``: precision and backend of each run besides fp32."""


_SCAN = "scan model.py --json scan.json -q --times off --fail-on never"
COMMANDS = {
    "scan": Command(f"{_SCAN} -p half,bf16 --no-plan", ("half eager", "bfloat16 eager")),
    "scan of a model that starts processes": Command(
        f"{_SCAN.replace('model', 'starts')} -p half,bf16 --no-plan", ("half eager", "bfloat16 eager")
    ),
    "scan --backend inductor": Command(f"{_SCAN} -p bf16 --backend inductor --no-plan", ("bfloat16 inductor",)),
    "scan --train": Command(f"{_SCAN} -p half,amp-bf16 --train --no-plan", ("half eager", "autocast-bf16 eager")),
    "scan --device cuda": Command(f"{_SCAN} -p half --device cuda --no-plan", ("half eager",)),
    "plan": Command("plan model.py --base cast --search-seconds 60"),
    "compat": Command("compat model.py other.py -o reports -p half -j 2 --scan-options --no-plan"),
    "compat --engine dask": Command(
        "compat model.py other.py -o reports -p half -j 2 --scan-options --no-plan --engine dask"
    ),
    "pytest": Command(
        "-p lowprec_check.pytest_plugin.hooks -p no:cacheprovider -q "
        "--lowprec-coverage bfloat16 --lowprec-report coverage.json"
    ),
}
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "worker")
_RESULTS = re.compile(
    r"(model|other|starts|test_suite)\.py|scan\.json|coverage\.json|reports(/.*)?|temporary|output|errors|__pycache__(/.*)?"
)


def main() -> None:
    """Kill until the number or the time is reached."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=7200.0, help="end before the next kill after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="commands, by name, comma-separated")
    options = parser.parse_args()
    names = [name for name in COMMANDS if not options.only or name in options.only.split(",")]
    kills: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    end = time.monotonic() + options.seconds
    for number in range(options.kills):
        if time.monotonic() > end:
            break
        choice = random.Random(f"{options.seed} {number}")
        name = names[number % len(names)]
        if name not in seconds:
            seconds[name] = uninterrupted(name)
        kills.append(kill(name, SIGNALS[number // len(names) % len(SIGNALS)], seconds[name], choice))
        print(f"{number + 1}: {described(kills[-1])}", file=sys.stderr, flush=True)
        data = {"made": made(), "seed": options.seed, "seconds": seconds, "kills": kills}
        if options.output:
            save(options.output, data, render)
    save(options.output, {"made": made(), "seed": options.seed, "seconds": seconds, "kills": kills}, render)
    sys.exit(any(one["left"] or one["lost"] for one in kills))


# -- One command


class Running:
    """A command in a folder of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.mark = name, uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="kills-"))
        for file, text in (("model.py", MODEL), ("other.py", MODEL), ("starts.py", STARTS), ("test_suite.py", SUITE)):
            (self.folder / file).write_text(text, encoding="utf-8")
        self.temporary = self.folder / "temporary"
        self.temporary.mkdir()
        self.shared = {*os.listdir("/dev/shm")}
        environment = os.environ | {"TMPDIR": str(self.temporary), "LOWPREC_KILLS_MARK": self.mark}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the suite names the plugin
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "PYTEST_ADDOPTS"):
            environment.pop(variable, None)
        module = "pytest" if name == "pytest" else "lowprec_check"
        with open(self.folder / "output", "wb") as output, open(self.folder / "errors", "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *COMMANDS[name].arguments.split()],
                cwd=self.folder,
                env=environment,
                stdout=output,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                preexec_fn=heard,  # noqa: PLW1509
            )

    def errors(self) -> str:
        """What it wrote to standard error."""
        return (self.folder / "errors").read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Those that inherited the mark, but for zombies and the command itself."""
        return [
            process
            for process in psutil.process_iter(["cmdline", "environ", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and (process.info["environ"] or {}).get("LOWPREC_KILLS_MARK") == self.mark
            and (process.pid != self.process.pid or self.process.poll() is not None)
        ]

    def left(self) -> list[str]:
        """What is left of it for :data:`SETTLE_SECONDS`, as names in shared memory of other programs come and go."""
        end = time.monotonic() + SETTLE_SECONDS
        found = self._left()
        while found and time.monotonic() < end:
            time.sleep(0.1)
            now = self._left()
            found = [one for one in found if one in now]
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return found

    def _left(self) -> list[str]:
        processes = [f"process {' '.join((one.info['cmdline'] or [])[:4])[:120]}" for one in self.processes()]
        walk = os.walk(self.folder)  # what vanishes meanwhile is not an error
        files = [os.path.relpath(Path(at, name), self.folder) for at, below, names in walk for name in below + names]
        kept = [f"file {name}" for name in sorted(files) if not _RESULTS.fullmatch(name)]
        new = {*os.listdir("/dev/shm")} - self.shared
        shared = [f"shared memory {name}" for name in new - (names_in_use() if new else set())]
        return processes + kept + shared + self._lock()

    def _lock(self) -> list[str]:
        folder = self.folder / "reports"
        if not folder.exists():
            return []
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ["lock of the folder of compat"]
        finally:
            os.close(descriptor)
        return []

    def lost(self) -> list[str]:
        """What its saved results lack."""
        code, lost = self.process.returncode, []
        if code in (0, 1) and self.name.startswith("scan") and not (self.folder / "scan.json").exists():
            lost.append("no scan.json")
        for path in self.folder.rglob("*.json"):
            try:
                lost += self._missing(path, json.loads(path.read_text(encoding="utf-8")))
            except ValueError as error:
                lost.append(f"{path.name}: {error}")
        if "Traceback" in self.errors() and self.name != "pytest":
            lost.append(f"traceback: {self.errors().strip().splitlines()[-1][:200]}")
        return lost

    def _missing(self, path: Path, saved: Mapping[str, Any]) -> list[str]:
        if path.name == "scan.json":
            rows = {f"{run['precision']} {run['backend']}" for run in saved["runs"]}
            return [f"row {row}" for row in COMMANDS[self.name].rows if row not in rows]
        if path.name == "matrix.json":
            shown = re.findall(r"^\[\d+/\d+\] (\S+)", self.errors(), re.MULTILINE)
            return [f"row {target}" for target in shown if target not in {row["target"] for row in saved["rows"]}]
        return []


def heard() -> None:
    """In a new process: the default dispositions, also if those of this one are others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def names_in_use() -> set[str]:
    """The names in /dev/shm that a process has mapped: other programs use it too."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= set(re.findall(r"/dev/shm/(\S+)", maps.read_text(errors="replace")))
    return found


def uninterrupted(name: str) -> float:
    """The seconds of a command that nothing ends."""
    running, started = Running(name), time.monotonic()
    code = running.process.wait(600)
    seconds = time.monotonic() - started
    left, lost = running.left(), running.lost()
    print(
        f"{name}: {seconds:.1f} s, exit code {code}, left {left or 'nothing'}, lost {lost or 'nothing'}",
        file=sys.stderr,
    )
    if code not in (0, 1):
        sys.exit(f"{name} fails by itself:\n{running.errors()}")
    shutil.rmtree(running.folder)
    return seconds


def kill(name: str, way: str, seconds: float, choice: random.Random) -> dict[str, Any]:
    """Start the command, send the signal, and return what was left."""
    running, moment = Running(name), choice.uniform(0.02, 0.98) * seconds
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(moment)
    victim = running.process.pid
    if way == "worker":
        workers = sorted(process.pid for process in running.processes())
        victim = choice.choice(workers) if workers else victim
    sent = running.process.poll() is None
    if sent:
        try:
            os.kill(victim, signal.SIGKILL if way == "worker" else signal.Signals[way])
        except ProcessLookupError:
            sent = False
    started = time.monotonic()
    hangs = []
    try:
        running.process.wait(END_SECONDS[way])
    except subprocess.TimeoutExpired:
        hangs = [f"process the command itself, after {END_SECONDS[way]:.0f} s"]
        running.process.kill()
        running.process.wait()
    found = {
        "command": name,
        "signal": way,
        "sent": sent,
        "moment": round(moment / seconds, 3),
        "exit": running.process.returncode,
        "end_seconds": round(time.monotonic() - started, 2),
        "left": hangs + running.left(),
        "lost": running.lost(),
    }
    shutil.rmtree(running.folder, ignore_errors=True)
    return found


# -- The report


def described(kill: Mapping[str, Any]) -> str:
    """A kill on one line."""
    what = "SIGKILL to a worker" if kill["signal"] == "worker" else kill["signal"]
    sent = "" if kill["sent"] else " (had ended)"
    left, lost = kill["left"] or "nothing", kill["lost"] or "nothing"
    end = f"exit {kill['exit']} after {kill['end_seconds']} s, left {left}, lost {lost}"
    return f"{kill['command']}, {what}{sent} at {kill['moment']:.0%}: {end}"


def render(data: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    kills: Sequence[Mapping[str, Any]] = data["kills"]
    sent = [one for one in kills if one["sent"]]
    bad = [one for one in sent if one["left"] or one["lost"]]
    lines = head("Kills, and what they leave", data)
    lines += [
        f"{len(sent)} kills; {len(kills) - len(sent)} commands more had ended before their signal. "
        f"Something was left or lost after {len(bad)}.",
        "",
        "| command | seconds | "
        + " | ".join(SIGNALS[:-1])
        + " | SIGKILL of a worker | left something | lost something |",
        "|---|" + "---|" * (len(SIGNALS) + 3),
    ]
    for name in dict.fromkeys(one["command"] for one in kills):
        mine = [one for one in sent if one["command"] == name]
        count = Counter(one["signal"] for one in mine)
        figures = [count[way] for way in SIGNALS] + [sum(bool(one[key]) for one in mine) for key in ("left", "lost")]
        lines.append(f"| `{name}` | {data['seconds'][name]:.1f} | " + " | ".join(map(str, figures)) + " |")
    if bad:
        lines += ["", "## What was left or lost", "", *(f"- {described(one)}" for one in bad)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
