"""Save the results of several hundred scans, to check reports against: ``python benchmarks/saved_results.py FOLDER``.

    python benchmarks/saved_results.py /tmp/results --files my_models/ --files my_training.py
    python benchmarks/saved_results.py /tmp/results --only files --files my_models/ --options "--backend inductor,int8"
    python benchmarks/saved_results.py /tmp/results --device cuda --part 1/4      # and 2/4, 3/4, 4/4 beside it

Scans the examples, the files that are given, models of torchvision, timm and transformers, and generated models with planted
faults. Each model is scanned with the default options and with some of ``VARIANTS``, in turns; a file that names a loss or an
optimizer is trained as well. A scan is one command in a fork of this process, which has imported torch. Its result is
FOLDER/NAME.json and what it printed FOLDER/logs/NAME.txt; results that are there already are kept. A scan that fails or takes
too long costs itself only: it is ended by SIGTERM, so that what is finished is saved.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from generated_files import inference_files, training_files
from page_cases import page_cases

from lowprec_check.cli.main import main as lowprec_check
from lowprec_check.compat.scan_process import read_list

HERE = Path(__file__).resolve().parent
KINDS = ("examples", "files", "generated", "trained", "cut", "backends", "zoo", "pages")
WHAT_IF = "fp8-e4m3,fp8-e5m2,tf32,int8-weights,bf16-accumulate"
VARIANTS = (
    "-p half --no-plan",
    "--device xpu",
    "--plan",
    f"-p half,autocast-fp16 --what-if {WHAT_IF}",
    "--batches 4 --times off",
    "--device cuda --torch 2.11 --predict",
    "--without-kernel aten.addmm:half --without-kernel aten.convolution:bfloat16",
    "-p half,bfloat16 --backend eager,jit",
    "--prefer memory --errors accumulated",
    "--budget 0.2",
    "--reference fp64 --tolerance 1e-4",
    "--prefer accuracy --errors none",
    "--device xpu --torch 2.8 -p half,bfloat16",
    "-p bfloat16,half --scenario offline",
    "-p autocast-bf16 --memory-format contiguous,channels_last",
    "-p half --budget-error off --fail-on warning",
    "--select LP3,LP2 --ignore LP303 --times off",
    "-p half,bfloat16 --isolation none --seed 3",
    f"--device xpu --what-if {WHAT_IF}",
    "-p autocast-fp16 --isolation spawn",
)
TRAINING = ("--steps 4", "--steps 3", "--steps 8 -p half,autocast-fp16", "--errors none --times off")
BACKENDS = (
    "-p half,autocast-bf16 --backend inductor",
    "-p autocast-bf16 --backend int8",
    "-p bfloat16 --scenario realtime",
    "-p half --backend jit --plan",
)


class Case(NamedTuple):
    """One scan."""

    kind: str
    target: str
    options: str = ""
    seconds: float | None = None
    """After which it is ended; by default after ``--timeout``."""

    @property
    def name(self) -> str:
        told = self.target if ":" in self.target else Path(self.target).stem
        end = "" if self.seconds is None else f" after {self.seconds:g} s"
        return "-".join(re.findall(r"[\w.]+", f"{self.kind} {told[:60]} {self.options or 'default'}{end}"))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All scans, of the kinds that are asked for."""
    models = options.folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    made = inference_files(models, options.models)
    for path in (HERE.parent / "examples").glob("*.py"):
        yield from of_file("examples", path, 3)
    for given in options.files:
        for path in sorted(given.glob("*.py")) if given.is_dir() else [given]:
            yield from of_file("files", path, 2, options.options)
    for path in made:
        yield from of_file("generated", path, 2)
    for path in training_files(models, options.models // 2):
        yield from of_file("trained", path, 0)
    for number, path in enumerate(made[:20]):
        yield Case("cut", str(path), ("", "--plan")[number % 2], 1.5 + number / 6)
        yield Case("backends", str(path), BACKENDS[number % len(BACKENDS)])
    for library, count in (("torchvision", 12), ("timm", 12), ("transformers", 40)):
        for request in read_list(HERE / "zoo" / f"{library}.txt")[:count]:
            given = shlex.join(request.options)
            yield Case("zoo", request.target, given)
            yield Case("zoo", request.target, f"{given} {next(turns)}")
    for page in page_cases():
        yield from of_file("pages", page.path(models), 1)


turns = itertools.cycle(VARIANTS)
training_turns = itertools.cycle(TRAINING)


def of_file(kind: str, path: Path, variants: int, further: list[str] | None = None) -> Iterator[Case]:
    """Scans of a file: with the default options, with the next variants, and of training."""
    text = path.read_text(encoding="utf-8")
    trains = re.search(r"\b(loss|optim\w*)\b", text) is not None
    fitting = (given for given in turns if "--batches" not in given or "def inputs(batch" in text)
    chosen = further or [*([""] if variants else []), *itertools.islice(fitting, variants)]
    if trains and not further:
        chosen += [f"--train {given}" for given in itertools.islice(training_turns, 2)]
    for given in chosen:
        yield Case(kind, str(path.resolve()), given)


def run(case: Case, options: argparse.Namespace) -> str:
    """Scan in a fork, and return how it ended."""
    log, result = options.folder / "logs" / f"{case.name}.txt", options.folder / f"{case.name}.json"
    words = shlex.split(case.options)
    words += [] if "--device" in words else ["--device", options.device]
    command = ["lowprec-check", "scan", case.target, "--quiet", *words, "--json", str(result)]
    child = multiprocessing.get_context("fork").Process(target=scan, args=(command, log))
    child.start()
    child.join(options.timeout if case.seconds is None else case.seconds)
    for end in (child.terminate, child.kill):
        if child.is_alive():
            end()
            child.join(20)
    if result.exists():
        return "saved" if child.exitcode in (0, 1) else "saved, ended early"
    return f"failed with {child.exitcode}"


def scan(command: list[str], log: Path) -> None:
    """Run the command in this process, with what it prints in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = command
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # for what the model writes
        lowprec_check()


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the results")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--files", type=Path, action="append", default=[], help="a file, or a folder of files; repeatable"
    )
    parser.add_argument("--options", action="append", help="scan the files with these only; repeatable")
    parser.add_argument("--only", action="append", choices=KINDS, help="repeatable")
    parser.add_argument("--models", type=int, default=60, help="how many models are generated")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no scan is started")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which one scan is ended")
    parser.add_argument("--part", default="1/1", help="scan only every Nth: 1/N to N/N")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    return options


def main() -> None:
    """Scan all, and print what failed."""
    options, started = parse(), time.monotonic()
    (options.folder / "logs").mkdir(parents=True, exist_ok=True)
    importlib.import_module("torch._dynamo")
    importlib.import_module("lowprec_check.engine.session")
    part, parts = map(int, options.part.split("/"))
    chosen = [case for case in cases(options) if options.only is None or case.kind in options.only]
    random.Random(0).shuffle(chosen)  # whenever it is stopped, there is something of everything
    chosen = [case for case in chosen[part - 1 :: parts] if not (options.folder / f"{case.name}.json").exists()]
    found: Counter[str] = Counter()
    for number, case in enumerate(chosen, 1):
        if time.monotonic() - started > options.seconds:
            break
        ended = run(case, options)
        found[f"{case.kind}: {ended}"] += 1
        print(f"{time.monotonic() - started:5.0f} s  {number}/{len(chosen)}  {ended}  {case.name}", flush=True)
    print("\n".join(f"{count:4}  {ended}" for ended, count in sorted(found.items())))


if __name__ == "__main__":
    main()
