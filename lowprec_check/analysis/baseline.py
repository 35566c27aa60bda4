"""Accepted findings, identified by a fingerprint that survives edits of the file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

from lowprec_check.analysis.rules.registry import is_selected, rules
from lowprec_check.analysis.run_summary import was_checked
from lowprec_check.errors import UsageError, encodable
from lowprec_check.schema.base import Struct, decode, encode, write_file
from lowprec_check.schema.module_paths import role_of
from lowprec_check.schema.run_key import EAGER, MemoryFormat
from lowprec_check.schema.scan_result import Diagnostic, ScanResult

SCHEMA = 1


class Entry(Struct, frozen=True, kw_only=True):
    """One accepted finding; all fields but the fingerprint are for people to read."""

    fingerprint: str
    code: str
    name: str
    precision: str | None = None
    backend: str = EAGER
    memory_format: MemoryFormat = "contiguous"
    module: str | None = None
    op: str | None = None
    file: str | None = None
    message: str = ""
    target: str | None = None
    """What was scanned; unknown in older files."""


class Baseline(Struct, frozen=True, kw_only=True):
    """The content of a baseline file."""

    schema: int = SCHEMA
    findings: list[Entry]
    """Without a default: another file with a schema number must not pass for a baseline."""

    @property
    def fingerprints(self) -> set[str]:
        """Of all entries."""
        return {entry.fingerprint for entry in self.findings}


def fingerprint(diagnostic: Diagnostic) -> str:
    """16 hex digits from code, run, op, file and module, without lines, indices and figures.

    ``blocks.3.attn`` and ``blocks.4.attn`` have one fingerprint: a finding accepted for one layer
    of a stack is accepted for all. The message does not count, so that it can be reworded, but what
    code of the user's raises where no op is at fault.
    """
    d, words = diagnostic, ""
    raised = d.figures.get("error")
    if d.op is None and isinstance(raised, str):
        words = without_numbers(raised)
    if d.code == "LP301" and d.figures and d.figures.keys().isdisjoint({"error", "share", "note"}):
        words = "NaN or Inf"  # which is worse than an error that was accepted
    parts = (d.code, d.run_label, d.op, role_of(d.module or ""), file_of(d.source), words)
    # a separator that no part contains
    text = "\x1f".join(part or "" for part in parts)
    return hashlib.sha256(encodable(text).encode()).hexdigest()[:16]


def file_of(source: str | None) -> str:
    r"""``net/blocks.py`` of ``net\blocks.py:41``."""
    return re.sub(r":\d+$", "", encodable(source or "")).replace("\\", "/")


def _without_machine(target: str) -> str:
    """``src/net.py:model``, of an absolute path ``net.py:model``."""
    shown = encodable(target).replace("\\", "/")
    if re.match(r"/|[A-Za-z]:/", shown):
        return shown.rpartition("/")[2]
    return shown


def without_numbers(message: str) -> str:
    """``message`` with N for every number and address, and without folders."""
    message = re.sub(r"(?<![\w.])(?:/[\w.+~-]+)+/", "", re.sub(r"\b0x[0-9a-fA-F]+", "N", message))
    return re.sub(r"(?<![\w.])[-+]?\d[\d.,]*(?:e[-+]?\d+)?", "N", message)


def baseline_of(result: ScanResult, known: Baseline | None = None) -> Baseline:
    """The findings of ``result`` (but for times), and those of ``known`` it did not look for."""
    found = {fingerprint(d): d for d in reversed(result.diagnostics) if not d.timed}
    # entries of other targets, runs and codes stay
    others = []
    if known:
        others = [e for e in known.findings if e.fingerprint not in found and not _looked_for(e, result)]
    entries = [
        Entry(
            fingerprint=key,
            code=d.code,
            name=d.name,
            precision=d.precision,
            backend=d.backend,
            memory_format=d.memory_format,
            module=role_of(d.module or ""),
            op=d.op,
            file=file_of(d.source),
            message=without_numbers(d.message)[:200],
            target=_without_machine(result.target),
        )
        for key, d in found.items()
    ]

    def order(entry: Entry) -> tuple[str, ...]:
        fields = (entry.code, entry.precision, entry.file, entry.module, entry.op, entry.fingerprint)
        return tuple(field or "" for field in fields)

    return Baseline(findings=sorted([*entries, *others], key=order))


def _looked_for(entry: Entry, result: ScanResult) -> bool:
    """Whether this scan had the entry's target, completed its precision and selected its code."""
    # an older entry does not say its target
    key = (entry.precision, entry.backend, entry.memory_format)
    if entry.target not in (None, _without_machine(result.target)):
        return False
    runs = [run for run in result.runs if was_checked(run)]
    if entry.op is not None and entry.code.startswith(("LP2", "LP3")):  # these rest on the errors of ops
        runs = [run for run in runs if any(error is not None for error in run.op_calls.accumulated_error)]
    ran = entry.precision is None or key in [(run.precision, run.backend, run.memory_format) for run in runs]
    return ran and is_selected(entry.code, result.options.get("select", ()), result.options.get("ignore", ()))


def save(baseline: Baseline, path: Path) -> None:
    """Write it with one key per line, so that reviews show what changed."""
    write_file(path, encode(baseline))


def load(path: Path) -> Baseline:
    """Read it; raises :class:`UsageError` if that fails."""
    try:
        return decode(path.read_bytes(), Baseline, SCHEMA)
    except OSError as error:
        problem = f"Cannot read the baseline {path}: {error.strerror}."
        raise UsageError(problem, "Create it with --update-baseline.") from None
    except ValueError as error:
        raise UsageError(f"{path} is not a baseline: {error}.", "Give another file to --baseline.") from None


def accept(result: ScanResult, baseline: Baseline) -> tuple[ScanResult, list[Entry]]:
    """``result`` with known findings marked as accepted, and the entries that no longer occur.

    A finding that rests on times is neither, even if an older version has written it to the
    baseline.
    """
    accepted, seen, marked = baseline.fingerprints, set(), []
    for diagnostic in result.diagnostics:
        key = fingerprint(diagnostic)
        seen.add(key)
        marked.append(msgspec.structs.replace(diagnostic, accepted=key in accepted and not diagnostic.timed))
    # an entry is stale only if this scan would have shown it
    timed = {code for code, rule in rules().items() if rule.timed}
    missing = [entry for entry in baseline.findings if entry.fingerprint not in seen and entry.code not in timed]
    stale = [entry for entry in missing if _looked_for(entry, result)]
    return msgspec.structs.replace(result, diagnostics=marked), stale
