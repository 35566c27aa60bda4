"""Compare the scan results of two checkouts of this project: ``python benchmarks/compare_scans.py OLD NEW``.

OLD and NEW are folders of checkouts. Each example, the decoder without its fp16 ``dot`` kernel, and ResNet-50 are scanned
with both, each scan in its own process. The two JSON files are then compared key by key. The exit code is 1 if there are
unexpected differences.

Not compared, because they depend on time:

- the keys in ``TIMES``, at any depth;
- the finding LP106 (slow kernel), and the measured milliseconds and ratios inside other texts (``MEASURED``);
- speed in the recommendation. Its choice among several passing precisions depends on time too: if the two choices
  differ, both must have passed in both scans, and the rest of the recommendation is skipped;
- which ops are emulated because they were slow, on a busy machine: if the two scans differ in that, both are repeated,
  at most ``ATTEMPTS`` times in total.

Findings are compared as a set, regardless of order. Intended differences are listed in ``CHANGED``, ``REMOVED`` and
``ADDED``, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCANS: dict[str, tuple[str, ...]] = {
    **{path.stem: (f"examples/{path.name}",) for path in sorted((ROOT / "examples").glob("*.py"))},
    "spade_decoder_without_dot": ("examples/spade_decoder.py", "--without-kernel", "aten.dot:half"),
    "torchvision_resnet50": ("torchvision:resnet50",),
}

TIMES = {"latency_ms", "time_ms", "reference_ms", "speedup", "seconds"}

MEASURED = re.compile(r"\d[\d.,]*(?= (?:ms|s|times slower|times as fast)\b)")

ATTEMPTS = 4

SPEED = re.compile(
    r" \(too short a run to compare times\)|, about as fast as fp32|, N times as fast as fp32"
    r"|, N times slower than fp32 \(on this machine fp32 is the faster way\)"
    r"| [\w-]+(?: and [\w-]+)* is faster, but kernels are missing for another blanket cast\."
)
"""The parts about speed in the reason of a recommendation, after :data:`MEASURED` has been applied."""

CHANGED: list[tuple[str, str, str, str]] = []
"""Texts changed on purpose: pattern of the key's path (``runs.*.gaps.*.kind``), regular expression for the old text, new
text, reason."""

REMOVED: dict[str, str] = {}
"""Keys that only OLD has: pattern of the path, and the reason."""

ADDED: dict[str, str] = {}
"""Keys that only NEW has: pattern of the path, and the reason."""


def scan(checkout: Path, arguments: tuple[str, ...], saved: Path) -> Any:
    """Scan with the code of ``checkout``, and return the saved JSON; raises ``CalledProcessError`` if the scan fails."""
    command = [sys.executable, "-m", "lowprec_check", "scan", *arguments, "-q", "--device", "cpu"]
    command += ["--fail-on", "never", "--json", str(saved)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: there is no recommendation
        sys.stderr.write(done.stderr)
        done.check_returncode()
    return json.loads(saved.read_text(encoding="utf-8"))


def scan_both(checkouts: list[Path], arguments: tuple[str, ...]) -> list[dict[str, Any]]:
    """Scan with each checkout; repeat if they emulated different kernels."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ATTEMPTS):
            results = [scan(checkout, arguments, Path(folder) / "scan.json") for checkout in checkouts]
            if emulated(results[0]) == emulated(results[1]):
                break
    return results


# -- What is compared


def comparable(result: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``result`` without anything that depends on time, and with its runs by name."""
    found: dict[str, Any] = without_times(result)
    found["runs"] = {name_of(run): run for run in found["runs"]}
    found["diagnostics"] = [finding for finding in found["diagnostics"] if finding["code"] != "LP106"]
    advice = found["recommendation"]
    if advice is not None:
        advice["reason"] = SPEED.sub("", advice["reason"])
        if chosen(result) != chosen(other) and both_pass([result, other]):
            found["recommendation"] = "one of those that passed"
    return found


def without_times(value: Any) -> Any:
    """``value`` without the keys of :data:`TIMES` and without measured times in texts."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [without_times(inner) for inner in value]
    return MEASURED.sub("N", value) if isinstance(value, str) else value


def name_of(run: dict[str, Any]) -> str:
    """The name that identifies a run."""
    return "/".join(filter(None, [run["precision"], run["backend"], run["device"], run["base"]]))


def chosen(result: dict[str, Any]) -> str | None:
    """The recommended precision."""
    return result["recommendation"] and str(result["recommendation"]["precision"])


def both_pass(results: list[dict[str, Any]]) -> bool:
    """Whether the precision that each scan recommends passed in all scans, by itself or as the base of a plan."""
    passed = [{run["base"] or run["precision"] for run in made["runs"] if run["status"] == "ok"} for made in results]
    return all(chosen(made) in each for made in results for each in passed)


def emulated(result: dict[str, Any]) -> dict[str, list[str]]:
    """The emulated ops of each run."""
    return {name_of(run): sorted(run["emulated"]) for run in result["runs"]}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its path; each finding with the number of times it occurs."""
    if path == "diagnostics":
        texts = Counter(json.dumps(finding, sort_keys=True, ensure_ascii=False) for finding in value)
        yield from ((f"{path}.{text}", count) for text, count in texts.items())
    elif isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def as_new(value: Any, path: str = "") -> Any:
    """A value of OLD after the changes in :data:`CHANGED`."""
    if isinstance(value, dict):
        return {key: as_new(inner, f"{path}.{key}" if path else key) for key, inner in value.items()}
    if isinstance(value, list):
        return [as_new(inner, f"{path}.{index}") for index, inner in enumerate(value)]
    for pattern, old, new, _ in CHANGED:
        if isinstance(value, str) and fnmatchcase(path, pattern):
            value = re.sub(old, new, value)
    return value


# -- Differences


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One line for each unexpected difference; differences in the same column of numbers share a line."""
    before, after = dict(leaves(as_new(comparable(old, new)))), dict(leaves(comparable(new, old)))
    columns: dict[str, list[str]] = defaultdict(list)
    for path in dict.fromkeys([*before, *after]):
        if path not in after and not any(fnmatchcase(path, pattern) for pattern in REMOVED):
            columns[column(path)].append(f"{path}: only in OLD: {before[path]!r}")
        elif path not in before and not any(fnmatchcase(path, pattern) for pattern in ADDED):
            columns[column(path)].append(f"{path}: only in NEW: {after[path]!r}")
        elif path in before and path in after and before[path] != after[path]:
            columns[column(path)].append(f"{path}: {before[path]!r} → {after[path]!r}")
    return [found[0] + (f"  (and {len(found) - 1} more there)" if found[1:] else "") for found in columns.values()]


def column(path: str) -> str:
    """The path without list indices; the path of a finding is unchanged."""
    return path if path.startswith("diagnostics.") else re.sub(r"\.\d+(?=\.|$)", "", path)


def main() -> int:
    """Scan everything with both checkouts and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", choices=SCANS, action="append", help="Only this scan; repeatable.")
    given = parser.parse_args()
    checkouts = [given.old.resolve(), given.new.resolve()]
    unexpected = 0
    for name in given.only or SCANS:
        found = differences(*scan_both(checkouts, SCANS[name]))
        unexpected += len(found)
        print(f"{name:28} {f'{len(found)} differences' if found else 'equal'}", *found, sep="\n    ", flush=True)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
