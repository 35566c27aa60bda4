"""Plants faults in the package, one at a time, and counts those that the tests notice.

``python tools/mutation_check.py [--against CHECKOUT]``: each fault negates a comparison or loses
the last term of an expression. Those for ``--against``, an older checkout, are the same: only
expressions that both have are chosen, by ``--seed``. Tests that fail without a fault are left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
WHERE = ("analysis/rules", "analysis/statements", "core/trace", "features", "report")
"""Folders of the package in which faults are planted, as many in each."""
EVERYWHERE = ("analysis", "report")
"""Folders of tests that may notice any of them; those of the fault's own folder come first."""

NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class Fault(NamedTuple):
    """An expression of a file, which occurs in it once, and what stands in its place."""

    file: str
    expression: str
    replacement: str


def changed(node: ast.AST) -> str | None:
    """The expression with a fault; ``None`` where none is planted."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.unparse(ast.Compare(node.left, [NEGATED[type(node.ops[0])]()], node.comparators))
    if isinstance(node, ast.BoolOp):
        shorter = node.values[0] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[:-1])
        return ast.unparse(shorter)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
        return ast.unparse(node.left)
    return None


def possible(checkout: Path, folder: str) -> Iterator[Fault]:
    """The faults that can be planted in a folder of the package."""
    package = checkout / "lowprec_check"
    for path in sorted((package / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        texts = Counter(ast.unparse(node) for node in nodes if isinstance(node, ast.expr))
        for node in nodes:
            replacement = changed(node)
            if replacement is not None and texts[ast.unparse(node)] == 1:
                yield Fault(path.relative_to(package).as_posix(), ast.unparse(node), replacement)


def planted(text: str, fault: Fault) -> str:
    """The text of the file with the fault in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.expr) and ast.unparse(node) == fault.expression:
            segment = ast.get_source_segment(text, node)
            assert segment is not None
            # Where a segment occurs twice, the node's line says which one is meant.
            start = text.index(segment, sum(map(len, text.splitlines(keepends=True)[: node.lineno - 1])))
            return f"{text[:start]}({fault.replacement}){text[start + len(segment) :]}"
    raise ValueError(f"{fault.file} has no {fault.expression}")


def copy_of(checkout: Path, folder: Path) -> Path:
    """A copy of the checkout, without environments and caches."""
    left_out = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", ".hypothesis", ".whl")
    return Path(shutil.copytree(checkout, folder, ignore=left_out, symlinks=True))


def tests_of(checkout: Path, file: str) -> list[str]:
    """The folders of tests for a fault in ``file``, the nearest first."""
    near = next(str(folder) for folder in Path(file).parents if (checkout / "tests" / folder).is_dir())
    return [f"tests/{folder}" for folder in dict.fromkeys((near, *EVERYWHERE))]


def failed(checkout: Path, arguments: list[str], seconds: float) -> list[str] | None:
    """The tests that fail, ``None`` if they are not done in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    lines = [line.split(" - ")[0] for line in output.splitlines()]
    names = [line.split(maxsplit=1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    # A broken import or a crash of pytest itself names no test.
    return names or ([] if process.returncode == 0 else [f"exit code {process.returncode}"])


def check(checkout: Path, faults: list[Fault], options: argparse.Namespace, folder: Path) -> int:
    """Plant each fault in a copy of the checkout, print what notices it; the number of noticed ones."""
    copies: SimpleQueue[Path] = SimpleQueue()
    for number in range(options.jobs):
        copies.put(copy_of(checkout, folder / str(number)))
    clean = copies.get()
    start = time.monotonic()
    folders = {folder: None for fault in faults for folder in tests_of(clean, fault.file)}
    broken = failed(clean, ["-n", str(options.jobs), *folders], 3600)
    copies.put(clean)
    if broken is None:
        sys.exit(f"The tests of {checkout} do not end.")
    print(f"{checkout.name}: {len(broken)} tests fail without a fault, in {time.monotonic() - start:.0f} s", flush=True)
    deselected = [argument for name in broken for argument in ("--deselect", name)]

    def noticed(fault: Fault) -> str | None:
        copy = copies.get()
        path = copy / "lowprec_check" / fault.file
        text = path.read_text(encoding="utf-8")
        path.write_text(planted(text, fault), encoding="utf-8")
        failures = failed(copy, ["-x", *deselected, *tests_of(copy, fault.file)], options.seconds)
        path.write_text(text, encoding="utf-8")
        copies.put(copy)
        if failures is None:
            return "not within the time"
        return failures[0] if failures else None

    count = 0
    with ThreadPoolExecutor(options.jobs) as threads:
        for fault, test in zip(faults, threads.map(noticed, faults), strict=True):
            is_noticed = test not in (None, "not within the time")
            count += is_noticed
            print(f"{fault.file}: {fault.expression} -> {fault.replacement}: {test or 'not noticed'}", flush=True)
    return count


def main() -> None:
    """Print each fault with the test that notices it, and how many are noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="an older checkout, in which the same faults are planted")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of one fault")
    options = parser.parse_args()

    faults: list[Fault] = []
    for folder in WHERE:
        of_both = list(possible(ROOT, folder))
        if options.against is not None:
            older = set(possible(options.against, folder))
            of_both = [fault for fault in of_both if fault in older]
        faults += random.Random(options.seed).sample(of_both, options.faults // len(WHERE))

    for checkout in filter(None, (ROOT, options.against)):
        with tempfile.TemporaryDirectory() as folder:
            count = check(checkout, faults, options, Path(folder) / "copies")
        print(f"{checkout.name}: {count} of {len(faults)} faults noticed\n", flush=True)


if __name__ == "__main__":
    main()
