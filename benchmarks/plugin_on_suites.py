"""Run test suites of other projects plain and with ``--lowprec-coverage``, and compare.

    python benchmarks/plugin_on_suites.py --sources FOLDER [--suite timm] [--output reports/plugin-on-suites]

FOLDER holds the sources, one folder a project: ``pip download --no-binary :all: --no-deps timm gpytorch einops``,
unpacked, and a checkout of kornia, tensordict and diffusers. All are installed here, with ``onnx`` and ``onnxruntime``.

Each suite runs plain, then in three rounds with coverage and plain, and last with every call replayed bare in half
(``suite_plugins.py``). The report has

- tests whose outcome or text of failure differs under coverage from the plain runs, which agree with each other;
- the cells of the table that every bare call confirms: "yes" if all of its calls run in half, "no" if none does;
- the processor time with coverage over the mean of the plain runs around it (median of the rounds), and their spread.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import operator
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared import head, made, parser_of, save

ROOT = Path(__file__).resolve().parent.parent


class Suite(NamedTuple):
    """The tests of one project; those that are left out need a network, hours, or more memory."""

    folder: str
    """Where the tests are run, as a pattern in the folder of sources."""
    arguments: str
    package: str
    on_device: str = ""
    """Further arguments that run the tests on ``{device}``; timm reads it from its environment."""


SUITES = {
    "timm optimizers": Suite("timm*", "tests/test_optim.py -k 'adamw or sgd or lion'", "timm"),
    "timm": Suite("timm*", "tests/test_layers.py tests/test_layers_pool.py tests/test_scheduler.py", "timm"),
    "gpytorch": Suite(
        "gpytorch*",
        "test/kernels test/likelihoods test/means test/distributions test/functions test/variational",
        "gpytorch",
    ),
    "einops": Suite(
        "einops*", "einops/tests/test_ops.py einops/tests/test_layers.py einops/tests/test_packing.py", "einops"
    ),
    "kornia": Suite(
        "kornia*",
        "tests/color tests/enhance tests/filters tests/morphology tests/losses tests/onnx",
        "kornia",
        "--device {device}",
    ),
    "tensordict": Suite("tensordict*", "test/nn", "tensordict"),
    "diffusers": Suite("diffusers*", "tests/schedulers", "diffusers"),
}


def run(suite: Suite, folder: Path, device: str, options: Sequence[str] = (), mode: str = "") -> dict[str, Any]:
    """What each test did, and the saved coverage if ``options`` ask for it."""
    with tempfile.TemporaryDirectory() as temporary:
        out, coverage = Path(temporary) / "out.json", Path(temporary) / "coverage.json"
        environment = os.environ | {
            "SUITE_OUT": str(out),
            "SUITE_MODE": mode,
            "TORCH_DEVICE": device,
            "OMP_NUM_THREADS": "1",
            "EINOPS_TEST_BACKENDS": "torch",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]),
        }
        report = ["--lowprec-report", str(coverage)] if options else []
        plugins = ["suite_plugins", "no:cacheprovider", "no:randomly", *_plugin_of_checkout()]
        command = [sys.executable, "-m", "pytest", "-q", *(word for plugin in plugins for word in ("-p", plugin))]
        command += [
            "--continue-on-collection-errors",
            "-o",
            "addopts=",
            *shlex.split(suite.arguments),
            *options,
            *report,
        ]
        command += suite.on_device.format(device=device).split() if device != "cpu" else []
        subprocess.run(
            command, check=False, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        found: dict[str, Any] = json.loads(out.read_text())
        if coverage.exists():
            found["coverage"] = json.loads(coverage.read_text())
            found["bytes"] = coverage.stat().st_size
        return found


def _plugin_of_checkout() -> list[str]:
    """The plugin, if this package is not installed, so that pytest does not find it."""
    installed = any(
        entry.value.startswith("lowprec_check.") for entry in importlib.metadata.entry_points(group="pytest11")
    )
    return [] if installed else ["lowprec_check.pytest_plugin.hooks"]


def changed(plain: Sequence[dict[str, Any]], watched: Sequence[dict[str, Any]]) -> list[str]:
    """The tests that are alike in all plain runs, and not in a run with coverage."""
    first, *others = ({test: found.get("reports") for test, found in result["tests"].items()} for result in plain)
    stable = {test for test, reports in first.items() if all(other.get(test) == reports for other in others)}
    return sorted(
        test
        for test in stable
        if any(result["tests"].get(test, {}).get("reports") != first[test] for result in watched)
    )


def cells(coverage: dict[str, Any], replayed: dict[str, list[Any]]) -> dict[str, tuple[int, int, list[str]]]:
    """By the state of a cell: how many were replayed, how many are confirmed, and the operators of the others."""
    found: dict[str, tuple[int, int, list[str]]] = {}
    for use in coverage["ops"]:
        support = use["support"]["float16"]
        ran, failed, why = replayed.get(use["op"], (0, 0, ""))
        if not support.get("applies", True) or not ran + failed:
            continue
        state = support["state"] or "unknown"
        confirmed = {"all": not failed, "none": not ran, "some": True, "unknown": True}[state]
        tried, right, wrong = found.get(state, (0, 0, []))
        found[state] = (
            tried + 1,
            right + confirmed,
            wrong if confirmed else [*wrong, f"{use['op']} {ran} + {failed}: {why}"],
        )
    return found


def measure(name: str, sources: Path, device: str, rounds: int) -> dict[str, Any]:
    """Run one suite ``3 * rounds + 2`` times."""
    suite = SUITES[name]
    folder = _folder(suite, sources)
    plain, watched = [run(suite, folder, device)], []
    for _ in range(rounds):
        watched.append(run(suite, folder, device, _watched(device)))
        plain.append(run(suite, folder, device))
    replayed = run(suite, folder, device, mode="replay")["replayed"]
    in_all = set.intersection(*(set(result["tests"]) for result in (*plain, *watched)))
    seconds = {
        way: [sum(result["tests"][test].get("seconds", 0.0) for test in in_all) for result in results]
        for way, results in (("plain", plain), ("coverage", watched))
    }
    around = [statistics.mean(pair) for pair in itertools.pairwise(seconds["plain"])]
    coverage = watched[-1]["coverage"]
    unknown = [use["op"] for use in coverage["ops"] if use["support"]["float16"]["state"] is None]
    return {
        "version": importlib.metadata.version(suite.package),
        "tests": len(plain[0]["tests"]),
        "changed": changed(plain, watched),
        "ratio": statistics.median(map(operator.truediv, seconds["coverage"], around)),
        "plain_spread": max(seconds["plain"]) / min(seconds["plain"]),
        "seconds": seconds,
        "operators": len(coverage["ops"]),
        "bytes": watched[-1]["bytes"],
        "cells": cells(coverage, replayed),
        "unknown_that_fail": [op for op in unknown if replayed.get(op, (0, 0, ""))[1]],
    }


def _folder(suite: Suite, sources: Path) -> Path:
    return next(path for path in sorted(sources.glob(suite.folder)) if path.is_dir())


def _watched(device: str) -> list[str]:
    return ["--lowprec-coverage", "half", "--lowprec-device", device]


def render(data: dict[str, Any]) -> str:
    """The figures as Markdown."""
    results = data["suites"]
    lines = [
        *head("The plugin on other projects' test suites", data),
        "| suite | tests | changed by coverage | yes: confirmed by bare calls | no | in part, replayed | "
        "not known that fail | time × plain | slowest ÷ fastest plain run | JSON |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        shown = {state: tuple(cell) for state, cell in found["cells"].items()}
        yes, no, some = (shown.get(state, (0, 0, [])) for state in ("all", "none", "some"))
        lines.append(
            f"| {name} {found['version']} | {found['tests']} | {len(found['changed'])} | {yes[1]} of {yes[0]} "
            f"| {no[1]} of {no[0]} | {some[0]} | {len(found['unknown_that_fail'])} | {found['ratio']:.2f} "
            f"| {found['plain_spread']:.2f} | {found['bytes'] / 1000:.0f} kB |"
        )
    for name, found in results.items():
        wrong = [op for _, _, ops in found["cells"].values() for op in ops]
        lines += [f"- {name}: `{entry}`" for entry in (*found["changed"], *wrong, *found["unknown_that_fail"])]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the suites, and write the figures after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--suite", choices=[*SUITES], action="append", help="default: all")
    parser.add_argument("--device", default="cpu", help="where kornia's and timm's tests run, and what is looked up")
    parser.add_argument("--rounds", type=int, default=3, help="of runs with coverage and plain")
    given = parser.parse_args()
    saved = given.output and given.output.with_suffix(".json")
    results: dict[str, Any] = json.loads(saved.read_text())["suites"] if saved and saved.exists() else {}
    for name in given.suite or SUITES:
        results[name] = measure(name, given.sources.resolve(), given.device, given.rounds)
        save(given.output, {"made": made(given.device), "suites": results}, render)


if __name__ == "__main__":
    main()
