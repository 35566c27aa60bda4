"""The search for a patch of the user's source: changes are proposed for what fails, tried together, and left out where nothing needs them.

No code of the user's runs in this process: each trial is a session of its own, which loads the changed source.
"""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.fixes.fix_kinds import proposals
from lowprec_check.analysis.fixes.fix_sites import OwnFiles, PatchedFile, Sites
from lowprec_check.analysis.fixes.fp32_fixes import kept_buffers
from lowprec_check.analysis.fixes.scene import Scene, Site, SourceFix, compose
from lowprec_check.analysis.fixes.seen_values import SeenValue, SourceTrial
from lowprec_check.analysis.fixes.source_text import SourceText, unified_diff
from lowprec_check.analysis.fixes.told_fixes import change_of, compared_with_plan, proven_by, shown_path
from lowprec_check.engine.machine import version
from lowprec_check.engine.run.target_spec import OnProgress, TargetSpec
from lowprec_check.engine.session import scan_file, try_source
from lowprec_check.engine.source_trial import growing_probe, growing_trial
from lowprec_check.errors import ProcessLostError, UsageError
from lowprec_check.process import Isolation, system
from lowprec_check.schema.fixing import Fixing, LeftAlone, Proven
from lowprec_check.schema.options import FixOptions, ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import counted, short_op

LEAST_SECONDS = 60.0
"""For the search after a scan that took less."""

MOST_ROUNDS = 8

_RANKS = {"ok": 0.0, "unjudged": 0.0, "skipped": 0.0, "inaccurate": 1.0, "nonfinite": 2.0}


class Patch:
    """What was found: texts of files with some of the changes, and what was proven of them."""

    def __init__(self, search: _Search, chosen: Sequence[_Chosen]) -> None:
        self._search, self._chosen = search, chosen

    def texts(self, numbers: Sequence[int]) -> dict[SourceText, str]:
        """The texts of the files with the changes of these ``numbers``."""
        patched = self._search.patched(self._state(numbers)) if numbers else {}
        return {file.source: file.text for file in patched.values()}

    def proven(self, numbers: Sequence[int]) -> list[Proven]:
        """How each precision does with these changes alone, tried now."""
        trial = self._search.tried(self._state(numbers), analyzed=False)
        return self._search.proven_by(trial)

    def _state(self, numbers: Sequence[int]) -> State:
        return {self._chosen[number].site.node: self._chosen[number] for number in numbers}


def fix_file(
    spec: TargetSpec,
    options: FixOptions,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
    scanned: ScanResult | None = None,
) -> Iterator[tuple[ScanResult, Patch | None]]:
    """Scan ``spec``, unless it was ``scanned``; then search for a patch. Yields the scan as it grows, last with what was found.

    Raises :class:`UsageError` and :class:`ProcessLostError` as :func:`~lowprec_check.engine.session.scan_file` does.
    """
    if isolation == "none":
        raise UsageError("Each change is tried in a process of its own.", "Leave --isolation none out.")
    started, result = system.monotonic(), scanned
    if result is None:
        for result in scan_file(spec, _scan_options(options), isolation, on_progress):
            yield result, None
        assert result is not None
        result = conclude(result)
    seconds = system.monotonic() - started
    yield result, None
    search = _Search(spec, options, isolation, on_progress, result, seconds)
    state, trial = search.found()
    ordered = sorted(
        state.values(), key=lambda each: (str(each.site.source.path), getattr(each.fix.anchor, "lineno", 0))
    )
    yield msgspec.structs.replace(result, fixing=search.told(ordered, trial)), Patch(search, ordered)


def _scan_options(options: FixOptions) -> ScanOptions:
    """The scan whose findings are fixed."""
    names = ("precisions", "device", "tolerance", "further_inputs", "plan", "seed", "without_kernel")
    return ScanOptions(times="off", **{name: getattr(options, name) for name in names})


def fails(run: Run) -> bool:
    """Whether a patch is due for ``run``."""
    further = run.further_inputs
    counts = run.is_low and run.backend == "eager" and run.base is None and run.evidence == "measured"
    return counts and (run.status not in ("ok", "unjudged", "skipped") or bool(further and further.failed))


@dataclass
class _Chosen:
    """What could be changed at one place, and which of it is tried."""

    site: Site
    options: list[SourceFix]
    option: int = 0
    round: int = 0
    """Of the search, in which it was added."""
    raises: bool = False
    """Whether the line raises an exception without it, given the changes of earlier rounds."""

    @property
    def fix(self) -> SourceFix:
        return self.options[self.option]


State = dict[ast.AST, _Chosen]


@dataclass
class _Search:
    spec: TargetSpec
    options: FixOptions
    isolation: Isolation | None
    on_progress: OnProgress | None
    scanned: ScanResult
    scan_seconds: float
    trials: int = 0
    rounds: int = 0
    stopped: str | None = None
    left_alone: dict[tuple[str | None, str], LeftAlone] = field(default_factory=dict)
    known: dict[tuple[tuple[str, str], ...], SourceTrial] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started = system.monotonic()
        self.failing = [run for run in self.scanned.runs if fails(run)]
        self.device = self.scanned.runs[0].device
        self.files = OwnFiles(self.spec.name, packages=self.options.include_packages)
        names = [run.precision for run in self.failing]
        self.scan_options = _scan_options(replace(self.options, precisions=names or None, device=self.device))
        self.bits = SourceTrial()

    # -- the search

    def found(self) -> tuple[State, SourceTrial | None]:
        """The smallest set of changes that passes, or comes nearest."""
        best = self._searched() if self.failing else None
        return self._smallest(*best) if best is not None else ({}, None)

    def _searched(self) -> tuple[State, SourceTrial] | None:
        state, analyzed, best = State(), self.scanned, None
        before = self._score(self.failing)
        buffers_tried = False
        for self.rounds in range(MOST_ROUNDS):
            if self._out_of_time():
                break
            patched = self.patched(state)
            probe = self.tried(state, probes=self._texts(patched))
            if probe is None:
                break
            if not state:
                self.bits = probe
            advanced = self._advance(state, analyzed, patched, probe)
            if not advanced and not buffers_tried:
                buffers_tried = True
                advanced = self._keep_buffers(state, probe)
            if not advanced:
                break
            trial = self._with_equal_bits(state)
            if trial is None or trial.result is None:
                break
            analyzed, score = trial.result, self._score(_low_runs(trial))
            if score < before and (best is None or score < self._score(_low_runs(best[1]))):
                best = {key: replace(chosen) for key, chosen in state.items()}, trial
            if not score[0]:
                break
        return best

    def _advance(
        self, state: State, analyzed: ScanResult, patched: dict[Path, PatchedFile], probe: SourceTrial
    ) -> bool:
        """Another change at each place that fails; whether there is any."""
        sites = Sites(self.files, patched, self.device)
        for run in analyzed.runs:
            if fails(run):
                sites.add(run, analyzed.diagnostics)
        advanced = False
        by_top: dict[ast.AST, ast.AST] = {c.fix.back[0]: key for key, c in state.items() if c.fix.back is not None}
        for node, site in sites.found.items():
            chosen = state.get(by_top.get(node, node))
            if chosen is not None:
                if chosen.option + 1 < len(chosen.options) and not chosen.site.mismatch:
                    chosen.option, advanced = chosen.option + 1, True
                continue
            found = proposals(site, self._scene(site, patched, probe))
            if found:
                raises = any(run.status == "error" for run in analyzed.runs if run.precision in site.precisions)
                state[node] = _Chosen(site, found, 0, self.rounds, raises)
                advanced = self._composes(state, node) or advanced
            else:
                self._leave_alone(site, "no change is known for it")
        self.left_alone |= sites.left_alone
        return advanced

    def _composes(self, state: State, newest: ast.AST) -> bool:
        """Whether the changes together are Python; those of the ``newest`` place are left out otherwise."""
        chosen = state[newest]
        for option in range(chosen.option, len(chosen.options)):
            chosen.option = option
            try:
                for file in self.patched(state).values():
                    ast.parse(file.text)
            except (ValueError, SyntaxError):
                continue
            return True
        del state[newest]
        self._leave_alone(chosen.site, "it overlaps with another change")
        return False

    def _keep_buffers(self, state: State, probe: SourceTrial) -> bool:
        """Buffers that a cast rounds stay in fp32."""
        if not any(PRECISIONS.get(run.precision).kind == "cast" for run in self.failing):
            return False
        added = False
        for owner, names in probe.buffers.items():
            file, _, name = owner.rpartition(":")
            source = self.files.find(os.path.relpath(file)) if file else ""
            fix = kept_buffers(source, name, names) if isinstance(source, SourceText) else None
            if fix is not None:
                site = Site(source, fix.anchor, "", {run.precision for run in self.failing})  # type: ignore[arg-type]
                state[fix.anchor], added = _Chosen(site, [fix], 0, self.rounds), True
        return added

    def _with_equal_bits(self, state: State) -> SourceTrial | None:
        """The trial of ``state``, analyzed; where it changes fp32, with other changes, or without those that do."""
        trial = self.tried(state)
        while trial is not None and not self._keeps_bits(trial):
            others = [
                c for c in state.values() if c.fix.kind in ("constant", "scale") and c.option + 1 < len(c.options)
            ]
            for chosen in others:
                chosen.option += 1
            if not others:
                break
            trial = self.tried(state)
        if trial is None or self._keeps_bits(trial):
            return trial
        for key in list(state):
            alone = self.tried({key: state[key]}, analyzed=False)
            if alone is None or not self._keeps_bits(alone):
                self._leave_alone(state.pop(key).site, "the changes that are known for it change fp32's results")
        trial = self.tried(state) if state else None
        return trial if trial is not None and self._keeps_bits(trial) else None

    def _smallest(self, state: State, trial: SourceTrial) -> tuple[State, SourceTrial]:
        """Without what is not needed: each change is left out once, where it is not known that its line raises without it."""
        best, dropped = self._score(_low_runs(trial)), False
        for key, chosen in sorted(state.items(), key=lambda each: each[1].round):
            fewer = {other: each for other, each in state.items() if other is not key}
            if not fewer or self._out_of_time():
                break
            if chosen.raises and (chosen.round == 0 or not dropped):
                continue
            tried = self.tried(fewer, analyzed=False)
            if tried is not None and self._keeps_bits(tried) and self._at_least(self._score(_low_runs(tried)), best):
                state, trial, dropped = fewer, tried, True
        return state, trial

    @staticmethod
    def _at_least(score: tuple[float, float], best: tuple[float, float]) -> bool:
        """Whether a set is as good as the best: it passes as well, or its error is not more than a tenth larger."""
        return score[0] < best[0] or (score[0] == best[0] and (not best[0] or score[1] <= 1.1 * best[1]))

    # -- trials

    def tried(self, state: State, *, analyzed: bool = True, probes: dict[str, str] | None = None) -> SourceTrial | None:
        """What a session with the changes of ``state`` finds; ``None`` if its process dies, or the file cannot be loaded."""
        texts = probes if probes is not None else self._texts(self.patched(state))
        key = (*sorted(texts.items()), ("", f"{analyzed} {probes is not None}"))
        if key in self.known:
            return self.known[key]
        spec = self.spec._replace(sources=tuple(texts.items()), probed=probes is not None)
        if self.on_progress is not None:
            doing = f"trial {self.trials}: {counted(len(state), 'change')}" if state else "looking at the source"
            self.on_progress("fix", doing)
        grow = growing_probe if probes is not None else functools.partial(growing_trial, analyzed=analyzed)
        self.trials += probes is None
        try:
            self.known[key] = try_source(spec, self.scan_options, self.isolation, grow)
        except (UsageError, ProcessLostError):
            return None
        return self.known[key]

    def _keeps_bits(self, trial: SourceTrial) -> bool:
        """Whether fp32 gives the same outputs and gradients, where two calls of the original do."""
        return (not self.bits.outputs or trial.outputs == self.bits.outputs) and (
            not self.bits.gradients or trial.gradients == self.bits.gradients
        )

    def _score(self, runs: Sequence[Run]) -> tuple[float, float]:
        """How far runs are from passing, and the sum of their errors; less is better."""
        rank, error = 0.0, 0.0
        for run in runs:
            rank += _RANKS.get(run.status, 3.0)
            rank += 0.5 if run.further_inputs is not None and run.further_inputs.failed else 0.0
            error += min(run.distance, 1e3) if run.distance is not None else 1e3
        return rank, error

    def _out_of_time(self) -> bool:
        limit = self.options.seconds or max(LEAST_SECONDS, self.scan_seconds)
        if system.monotonic() - self.started > limit:
            self.stopped = f"after {limit:.0f} s (--budget)"
        return self.stopped is not None

    # -- files

    def patched(self, state: State) -> dict[Path, PatchedFile]:
        """Each file that reports name, with the changes of ``state``; raises ``ValueError`` if two of these overlap."""
        fixes: dict[Path, tuple[SourceText, list[SourceFix]]] = {}
        for chosen in state.values():
            fixes.setdefault(chosen.site.source.path, (chosen.site.source, []))[1].append(chosen.fix)
        if not fixes:
            rows = [row for run in self.failing for row in run.op_calls.rows()]
            gaps = [gap for run in self.failing for gap in run.gaps]
            named = {line for each in rows for line in (each.source, each.caller) if line}
            named |= {line for gap in gaps for line in (gap.source, gap.caller) if line}
            found = map(self.files.find, dict.fromkeys(line.rpartition(":")[0] for line in sorted(named)))
            fixes = {source.path: (source, []) for source in found if isinstance(source, SourceText)}
        return {path: PatchedFile(source, compose(source, given)) for path, (source, given) in fixes.items()}

    @staticmethod
    def _texts(patched: dict[Path, PatchedFile]) -> dict[str, str]:
        return {str(path): file.text for path, file in patched.items()}

    def _scene(self, site: Site, patched: dict[Path, PatchedFile], probe: SourceTrial) -> Scene:
        """What the expressions around ``site`` gave: in fp32, and in the first precision that fails there."""
        file = patched.get(site.source.path) or PatchedFile(site.source)
        name = next(run.precision for run in self.failing if run.precision in site.precisions)
        both = (probe.seen.get("fp32", {}), probe.seen.get(name, {}))
        fp32, low = (_by_node(file, places.get(str(site.source.path), {})) for places in both)
        return Scene(site.source, fp32, low)

    def _leave_alone(self, site: Site, reason: str) -> None:
        source = f"{shown_path(site.source.path)}:{getattr(site.node, 'lineno', 1)}"
        op = short_op(site.op)
        known = LeftAlone(source=source, op=op, reason=reason, codes=tuple(sorted(site.codes)))
        self.left_alone.setdefault((source, op), known)

    # -- what is told

    def told(self, ordered: Sequence[_Chosen], trial: SourceTrial | None) -> Fixing:
        """What was found, to be saved."""
        runs = _low_runs(trial)
        passes = bool(runs) and not self._score(runs)[0] if self.failing else True
        patched = self.patched({each.site.node: each for each in ordered}) if ordered else {}
        changes = [change_of(chosen.site, chosen.fix) for chosen in ordered]
        return Fixing(
            tool=f"lowprec-check {version()}",
            target=self.spec.name,
            device=self.device,
            due=bool(ordered),
            passes=passes,
            changes=changes,
            diff="".join(unified_diff(f.source.text, f.text, shown_path(path)) for path, f in patched.items()),
            proven=self.proven_by(trial),
            outputs_equal=trial.outputs == self.bits.outputs if trial and self.bits.outputs else None,
            gradients_equal=trial.gradients == self.bits.gradients if trial and self.bits.gradients else None,
            left_alone=[] if passes else list(self.left_alone.values()),
            trials=self.trials,
            seconds=round(system.monotonic() - self.started, 2),
            scan_seconds=round(self.scan_seconds, 2),
            stopped=self.stopped,
            plan=compared_with_plan(self.scanned.plan, changes) if passes and ordered else None,
        )

    def proven_by(self, trial: SourceTrial | None) -> list[Proven]:
        """Each precision before and after."""
        runs = {run.precision: run for run in _low_runs(trial)}
        return [proven_by(run, runs.get(run.precision)) for run in self.failing]


def _low_runs(trial: SourceTrial | None) -> Sequence[Run]:
    return trial.result.runs[1:] if trial is not None and trial.result is not None else []


def _by_node(file: PatchedFile, places: dict[str, SeenValue]) -> dict[ast.AST, SeenValue]:
    """What the original's expressions gave, in the changed text."""
    found: dict[ast.AST, SeenValue] = {}
    for place, seen in places.items():
        node = file.exactly_at(place)
        if node is not None:
            found[node] = seen
    return found
