"""Compare what two checkouts of this project find in the same models: ``python benchmarks/compare_scans.py OLD NEW``.

OLD and NEW are folders of checkouts. Each example, the decoder without its fp16 ``dot`` kernel and ResNet-50 are scanned
with both, each scan in a process of its own. The two JSONs are then compared key by key. Exit code 1 if anything differs
that is not expected.

Not compared, because it depends on time:

- the keys in ``TIMES``, wherever they are;
- the finding LP106 (slow kernel), and the measured milliseconds and ratios inside other texts (``MEASURED``);
- what the recommendation says about speed. Which of several passing precisions it names depends on time too: where
  the two differ in that, both choices must have passed in both scans, and the rest of the recommendation is skipped;
- which ops are emulated because they were slow, on a busy machine: where the two differ in that, both scans are
  repeated, at most ``ATTEMPTS`` times in all.

The order of findings is not compared. Differences made on purpose are in ``CHANGED``, ``REMOVED`` and ``ADDED``.
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
from collections.abc import Iterator, Sequence
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
    r"; this device does not accelerate \w+| \(too short (?:a run )?to compare times\)|, about as fast as fp32|, N times as fast as fp32"
    r"|, N times slower than fp32(?: on this machine| \(on this machine fp32 is the faster way\))"
    r"| [\w-]+(?: and [\w-]+)* (?:is|are) faster(?:, but kernels are missing for another blanket cast"
    r"| but less safe: some ops have no kernel in another dtype)\."
)
"""What the reason of a recommendation says about speed, after :data:`MEASURED`."""

CHANGED: list[tuple[str, str, str, str]] = [
    (
        "diagnostics.*.help",
        r"(.*)fails up to torch ([\d.]+)(.*)",
        r"(.*)no torch release up to ([\d.]+) supports it(.*)",
        "English",
    ),
    ("diagnostics.*.help", r"(.*)runs since torch ([\d.]+)(.*)", r"(.*)supported since torch ([\d.]+)(.*)", "English"),
    (
        "diagnostics.LP304/*.message",
        r"(\d+) of the decisions differ from fp32's",
        r".*?(\d+) (?:times?|elements?)\b.*",
        "English",
    ),
    ("diagnostics.LP304/*.message", r"(\w+) .*", r"(\w+) .*", "counts have a total"),
    ("diagnostics.LP304/*.help", r".*", r".*", "it depends on the run's status"),
    (
        "diagnostics.LP101/*.help",
        r"(compute it.*?), or .*",
        r"(compute it[^,]*).*",
        "autocast only where the op runs under it",
    ),
    (
        "diagnostics.LP201/*.help",
        r"(keep this module in fp32).*",
        r"(keep this module in fp32).*",
        "bf16 only where it passes",
    ),
    ("diagnostics.LP301/*.help", r".*", r".*", "it names what the scan recommends"),
    (
        "recommendation.reason",
        r"(.*?)(\d+) ops? ha(?:s|ve)( no kernel.*)",
        r"(.*?)(\d+) of \d+ ops ha(?:s|ve)( no kernel.*)",
        "counts have a total",
    ),
    ("diagnostics.LP201/*.message", r"[\d,]+ values? .*", r"[\d,]+ of [\d,]+ values? .*", "counts have a total"),
    ("diagnostics.LP202/*.message", r"(\d+%?).*", r"(\d+(?: %)?).*", "English"),
    (
        "recommendation.reason",
        r"(.*?-overflow: )(.*)",
        r"(.*?-overflow: )RuntimeError: (.*)",
        "the type of the exception",
    ),
    ("diagnostics.LP204/*.help", r"use torch.finfo.*?(; reported.*)?", r"use torch.finfo.*?(; reported.*)?", "English"),
    ("diagnostics.LP402/*.message", r".*; (\w+) has no kernel for it", r".*there is no kernel for (\w+)", "English"),
    ("diagnostics.LP903/*.message", r"emulated: (.*)", r"computed in fp32 and rounded: (.*)", "English"),
    ("diagnostics.*.help", r"None", r".+", "a finding says what to do"),
    (
        "recommendation.code",
        r"([\s\S]*)# and the inputs(?=\n)([\s\S]*)",
        r"([\s\S]*)# move the inputs, too(?=\n)([\s\S]*)",
        "English",
    ),
]
"""Texts changed on purpose: pattern of the key's path (``runs.*.gaps.*.kind``), regular expressions for the whole old and the
whole new text, reason. What the groups of the two match must be equal."""

REMOVED: dict[str, str] = {
    "diagnostics.LP401/*": "one finding for the model",
    "diagnostics.LP304/*_pool*": "one finding for the model",
}
"""Pattern of a key's path that only OLD has: the reason."""

ADDED: dict[str, tuple[Any, str]] = {
    "*.memory_format": ("contiguous", "the memory format is part of what identifies a run"),
    "diagnostics.*.backend": ("eager", "a finding names the whole run"),
    "options.backends.0": ("eager", "backends can be chosen"),
    "runs.*.incomplete_because": (None, "why an analysis that ended early did so"),
    "runs.*.op_calls.compared_*": (..., "the totals of counts"),
    "diagnostics.LP401/*": (..., "one finding for the model"),
    "diagnostics.LP304/*_pool*": (..., "one finding for the model"),
}
"""Pattern of a key's path that only NEW has: its value (``...``: any), and the reason."""

MISSING = "(missing)"


def scan(checkout: Path, arguments: Sequence[str], saved: Path) -> Any:
    """Scan with the code of ``checkout``; the JSON that it saved. Raises ``CalledProcessError`` if it fails."""
    command = [sys.executable, "-m", "lowprec_check", "scan", *arguments, "-q"]
    command += ["--fail-on", "never", "--json", str(saved)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=True)
    return json.loads(saved.read_text(encoding="utf-8"))


def scan_both(checkouts: list[Path], arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Scan with each; again where the two found other kernels too slow to run."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ATTEMPTS):
            results = [scan(checkout, arguments, Path(folder) / "scan.json") for checkout in checkouts]
            if emulated(results[0]) == emulated(results[1]):
                break
    return results


# -- What is compared


def comparable(result: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """``result`` without what depends on time, its runs by name."""
    found: dict[str, Any] = without_times(result)
    found["runs"] = {name_of(run): run for run in found["runs"]}
    found["diagnostics"] = dict(findings(found["diagnostics"]))
    advice = found["recommendation"]
    if advice is not None:
        advice["reason"] = SPEED.sub("", SPEED.sub("", advice["reason"]))  # what is in parentheses, then these
        if chosen(result) != chosen(other) and {chosen(result), chosen(other)} <= passed(result) & passed(other):
            found["recommendation"] = "one of those that passed"
    return found


def findings(diagnostics: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The findings by place, without LP106; of several at one place, the messages tell which is which."""
    seen: Counter[str] = Counter()
    for finding in sorted(diagnostics, key=lambda finding: str(finding["message"])):
        place = "/".join(str(finding[key]) for key in ("code", "precision", "module", "op", "source"))
        if finding["code"] != "LP106":
            yield f"{place}#{seen[place]}", finding
        seen[place] += 1


def without_times(value: Any) -> Any:
    """``value`` without the keys of :data:`TIMES`, its texts without measured times."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [without_times(inner) for inner in value]
    return MEASURED.sub("N", value) if isinstance(value, str) else value


def name_of(run: dict[str, Any]) -> str:
    """What identifies a run."""
    return "/".join(filter(None, [run["precision"], run["backend"], run["device"], run["base"]]))


def chosen(result: dict[str, Any]) -> str | None:
    """The recommended precision."""
    return result["recommendation"] and str(result["recommendation"]["precision"])


def passed(result: dict[str, Any]) -> set[str]:
    """The precisions that passed, as they are or as the base of a plan."""
    return {run["base"] or run["precision"] for run in result["runs"] if run["status"] == "ok"}


def emulated(result: dict[str, Any]) -> dict[str, list[str]]:
    """By run, the ops that were computed in fp32 and rounded."""
    return {name_of(run): sorted(run["emulated"]) for run in result["runs"]}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its path."""
    if not value or not isinstance(value, dict | list):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def is_intended(path: str, was: Any, now: Any) -> bool:
    """Whether a text was changed on purpose, and says the same as before."""
    for pattern, old, new, _ in CHANGED:
        if fnmatchcase(path, pattern):
            before, after = re.fullmatch(old, str(was)), re.fullmatch(new, str(now))
            if before and after and before.groups() == after.groups():
                return True
    return False


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every unexpected difference as a line; those of one column of numbers as one."""
    before = dict(leaves(comparable(old, new)))
    after = dict(leaves(comparable(new, old)))
    columns: dict[str, list[str]] = defaultdict(list)
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path, MISSING), after.get(path, MISSING)
        removed = now is MISSING and any(fnmatchcase(path, pattern) for pattern in REMOVED)
        added = was is MISSING and any(
            fnmatchcase(path, key) and value in (..., now) for key, (value, _) in ADDED.items()
        )
        if was != now and not removed and not added and not is_intended(path, was, now):
            columns[column(path)].append(f"{path}: {was!r} → {now!r}")
    return [found[0] + (f"  (and {len(found) - 1} more there)" if found[1:] else "") for found in columns.values()]


def column(path: str) -> str:
    """What a line is printed for: a finding, or a path without the index into a list."""
    return path.rpartition("#")[0] or re.sub(r"\.\d+(?=\.|$)", "", path)


def main() -> int:
    """Scan everything twice and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", choices=SCANS, action="append", help="These scans only; repeatable.")
    parser.add_argument("--device", default="cpu", help="Device to scan on.")
    given = parser.parse_args()
    checkouts = [given.old.resolve(), given.new.resolve()]
    unexpected = 0
    for name in given.only or SCANS:
        found = differences(*scan_both(checkouts, [*SCANS[name], "--device", given.device]))
        unexpected += len(found)
        print(f"{name:28} {f'{len(found)} differences' if found else 'equal'}", *found, sep="\n    ", flush=True)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
