"""The search for a patch of the user's source: changes are tried together, needed ones kept.

No code of the user's runs here: each trial is a session of its own, with the changed source.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.analysis.error_shares import best_input_trial
from lowprec_check.analysis.snippet import snippet
from lowprec_check.analysis.statements.kinds import statements
from lowprec_check.catalog.versions import own_version
from lowprec_check.core.session import scan_file
from lowprec_check.engine.model.target_spec import OnProgress, TargetSpec
from lowprec_check.errors import ProcessLostError, UsageError
from lowprec_check.features.fix.fix_kinds import kept_buffers, proposals
from lowprec_check.features.fix.fix_sites import OwnFiles, PatchedFile, Sites, distance_of, fails, passing
from lowprec_check.features.fix.scene import Scene, Site, SourceFix, compose
from lowprec_check.features.fix.seen_values import SourceTrial
from lowprec_check.features.fix.source_text import SourceText, edited, lines_of, unified_diff
from lowprec_check.features.fix.source_trial import Goal, Look, PlainTrial, start_probing, try_source
from lowprec_check.process import Isolation, system
from lowprec_check.schema.fixing import Fixing, InputInFp32, LeftAlone, Proven, SourceChange
from lowprec_check.schema.measures import InputTrial
from lowprec_check.schema.module_paths import number_of
from lowprec_check.schema.op_calls import OpCalls
from lowprec_check.schema.options import FixOptions, ScanOptions
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import counted, short_op

# -- What a search chose


@dataclass
class Chosen:
    """What could be changed at one place, and which of it is tried."""

    site: Site
    options: list[SourceFix]
    option: int = 0
    round: int = 0  # of the search, in which it was added
    raises: bool = False
    """Whether the line raises an exception without it, given the changes of earlier rounds."""

    @property
    def fix(self) -> SourceFix:
        """The change that is tried."""
        return self.options[self.option]


State = dict[ast.AST, Chosen]


def next_option(places: Iterable[Chosen]) -> bool:
    """Take the next option of each of these places that has another one; whether any has."""
    others = [chosen for chosen in places if chosen.option + 1 < len(chosen.options)]
    for chosen in others:
        chosen.option += 1
    return bool(others)


def compute_instead(state: State) -> bool:
    """Compute in fp32 where a number was changed; whether there is such a place."""
    return next_option(chosen for chosen in state.values() if chosen.fix.kind in ("constant", "scale"))


# -- What is told


def shown_path(path: Path) -> str:
    """The path as a diff names it, relative to the current folder."""
    relative = os.path.relpath(path)
    if relative.startswith(".."):
        return str(path).lstrip(os.sep)
    return relative


def change_of(site: Site, fix: SourceFix, beside: Iterable[SourceFix] = ()) -> SourceChange:
    """The lines of one change; a cast that one ``beside`` it undoes is not named."""
    stays = fix.back is not None and any(fix.back[0] in other.widened for other in beside)
    changed = edited(site.source.text, compose(site.source, [fix]))
    old, new = lines_of(site.source.text).texts, lines_of(changed).texts
    # all lines from the first to the last that differ
    blocks = [b for b in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if b[0] != "equal"]
    first, last = (blocks[0], blocks[-1]) if blocks else (("", 0, 0, 0, 0),) * 2
    op: str | None = short_op(site.op)
    if op in ("", "to_copy"):  # a cast is not what is computed in fp32
        op = None
    why = fix.why
    if stays:
        why = why.replace(" and cast back", "")
    return SourceChange(
        kind=fix.kind,
        file=shown_path(site.source.path),
        line=first[1] + 1,
        end_line=max(last[2], first[1] + 1),
        before="".join(old[first[1] : last[2]]),
        after="".join(new[first[3] : last[4]]),
        why=why,
        codes=tuple(sorted(site.codes)),
        op=op,
        precisions=tuple(sorted(site.precisions)),
    )


def proven_by(before: Run, after: Run | None) -> Proven:
    """A precision before and after."""
    # without a run after the patch, it changes nothing
    last, tried, failed = after or before, 0, 0
    if last.further_inputs is not None:
        tried, failed = last.further_inputs.tried, last.further_inputs.failed
    return Proven(
        precision=before.precision,
        before=before.status,
        after=last.status,
        error_before=before.relative_error,
        error_after=last.relative_error,
        tolerance=before.relative_tolerance,
        further=tried,
        further_failed=failed,
    )


def proven_by_input(run: Run, trial: InputTrial, scan: ScanResult) -> InputInFp32:
    """A precision of a scan that passes with inputs in fp32."""
    return InputInFp32(
        precision=run.precision,
        inputs=trial.inputs,
        code=snippet(run.key, scan.model, keep_fp32_inputs=trial.inputs, torch_version=scan.torch),
        error_before=run.relative_error,
        error_after=trial.rel_l2,
        tolerance=run.relative_tolerance,
    )


def compared_with_plan(plan: Plan | None, changes: Sequence[SourceChange]) -> str | None:
    """How much a plan keeps in fp32, and how much a patch changes; ``None`` if there is no plan."""
    if plan is None:
        return None
    lines = sum(change.end_line - change.line + 1 for change in changes)
    modules, changed = counted(number_of(plan.keep_fp32, plan.modules), "module"), counted(lines, "line")
    return f"A plan from {plan.base} keeps {modules} in fp32; the patch changes {changed}"


LEAST_SECONDS = 60.0  # for the search after a scan that took less, and for each trial
SLOW_SECONDS = 30.0  # after a longer scan, each run of a trial has its own process, with limits for calls and ops
MOST_ROUNDS = 8


# -- The search


def fix_file(
    spec: TargetSpec,
    options: FixOptions,
    isolation: Isolation | None = None,
    on_progress: OnProgress | None = None,
    scanned: ScanResult | None = None,
) -> Iterator[tuple[ScanResult, dict[SourceText, str] | None]]:
    """Scan ``spec``, unless it was ``scanned``, and search for a patch; raises as ``scan_file``.

    Yields the scan as it grows, last with what was found and the texts of the files with it.
    """
    if isolation == "none":
        raise UsageError("Each change is tried in a process of its own.", "Leave --isolation none out.")
    started, result = system.monotonic(), scanned
    if result is None:
        for result in scan_file(spec, _scan_options(options), isolation, on_progress):
            yield result, None
        assert result is not None
        result = conclude(result)
    search = _Search(spec, options, isolation, on_progress, result, system.monotonic() - started)
    yield result, None
    state, trial = search.found()
    ordered = sorted(
        state.values(), key=lambda chosen: (str(chosen.site.source.path), getattr(chosen.fix.anchor, "lineno", 0))
    )
    patched = search.patched({chosen.site.node: chosen for chosen in ordered}) if ordered else {}
    result = msgspec.structs.replace(result, fixing=search.fixing(ordered, patched, trial))
    texts = {file.source: file.text for file in patched.values()}
    yield msgspec.structs.replace(result, statements=statements(result)), texts


def _scan_options(options: FixOptions) -> ScanOptions:
    names = ("precisions", "device", "tolerance", "judge", "limit", "further_inputs", "plan", "seed", "without_kernel")
    return ScanOptions(times="off", **{name: getattr(options, name) for name in names})


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
    made: dict[tuple[Any, ...], SourceTrial] = field(default_factory=dict)
    """By the texts of files and the goal of the trial."""

    def __post_init__(self) -> None:
        self.started = system.monotonic()
        wanted = self.options.precisions
        failing = [run for run in self.scanned.runs if fails(run) and run.precision in (wanted or [run.precision])]
        # The cast of an input is no line of the source: no patch where a run passes without it.
        trials = [(run, best_input_trial(run)) for run in failing]
        self.by_input = [(run, trial) for run, trial in trials if trial is not None and trial.status == "ok"]
        self.failing = [run for run in failing if all(run is not repaired for repaired, _ in self.by_input)]
        self.device = self.scanned.runs[0].device
        self.files = OwnFiles(self.spec.name)
        names = [run.precision for run in self.failing] or None
        self.scan_options = _scan_options(replace(self.options, precisions=names, device=self.device))
        self.bits = SourceTrial()
        limited = any(run.status in ("crashed", "timeout") for run in self.scanned.runs)
        self.step = PlainTrial(
            goal="step",
            fp32=msgspec.structs.replace(self.scanned.runs[0], op_calls=OpCalls()),
            passing=passing(self.scanned.runs),
            apart=limited or self.scan_seconds > SLOW_SECONDS,
        )

    # -- the search

    def found(self) -> tuple[State, SourceTrial | None]:
        """The smallest set of changes that passes, or comes nearest."""
        best = None
        if self.failing:
            best = self._searched()
        if best is None:
            return {}, None
        # Without what is not needed, found at a glance; by proofs if that set fails.
        state, trial = best
        score = distance_of(trial.runs)
        # A change without which the model raises is needed in any case
        may_go = [key for key, chosen in state.items() if not chosen.raises or chosen.round]
        may_go.sort(key=lambda key: (state[key].site.breaks, state[key].round, -getattr(key, "lineno", 0)))
        for goal in ("glance", "proof"):
            fewer = self._without(may_go, state, score, goal)
            tried = self._as_good(fewer, score, "proof")
            if tried is not None:
                return fewer, tried
        return state, trial

    def _searched(self) -> tuple[State, SourceTrial] | None:
        state, analyzed, best = State(), self.scanned, None
        before, first = distance_of(self.failing), self._looked(state)
        if first is None:
            return None
        # Buffers whose rounding alone makes a run fail stay in fp32.
        for owner, names in first.buffers.items():
            file, _, name = owner.rpartition(":")
            source = file and self.files.find(os.path.relpath(file))
            if not isinstance(source, SourceText):
                continue
            fix = kept_buffers(source, name, names)
            if fix is not None:
                site = Site(source, fix.anchor, "", {run.precision for run in self.failing})
                state[fix.anchor] = Chosen(site, [fix], 0, self.rounds)
        advanced = bool(state)
        for self.rounds in range(MOST_ROUNDS):
            if self._out_of_time() or not (advanced or self._advance(state, analyzed)):
                break
            advanced = False
            trial = self._with_equal_bits(state)
            if trial is None:
                break
            # The scan with the runs of the trial instead of those that fail.
            analyzed = conclude(msgspec.structs.replace(self.scanned, runs=[self.scanned.runs[0], *trial.runs]))
            score = distance_of(trial.runs)
            if score < before and not trial.broken and (best is None or score < distance_of(best[1].runs)):
                best = {key: replace(chosen) for key, chosen in state.items()}, trial
            if not score[0]:
                break
        return best

    def _advance(self, state: State, analyzed: ScanResult) -> bool:
        """Another change at each place that fails, and at new ones if needed; whether any."""
        patched = self.patched(state)
        without_cast = [run.precision for run in self.failing if run.input_trials]
        sites = Sites(self.files, patched, self.device, without_cast)
        failing = [run for run in analyzed.runs if fails(run)]
        for run in failing:
            sites.add(run, analyzed.diagnostics)

        # Places of earlier rounds, and new ones. A change may cover other nodes than its place.
        new, met = list[Site](), list[Chosen]()
        by_top: dict[ast.AST, ast.AST] = {c.fix.back[0]: key for key, c in state.items() if c.fix.back is not None}
        for node, site in sites.found.items():
            chosen = state.get(by_top.get(node, node))
            if chosen is None:
                new.append(site)
            elif all(chosen is not other for other in met):
                met.append(chosen)
        given_pass = all(run.status == "ok" for run in failing)
        instead = not given_pass and not any(site.breaks for site in new) and compute_instead(state)
        advanced = instead or next_option(chosen for chosen in met if not chosen.site.mismatch)
        advanced = advanced or (not new and next_option(met))
        tops = {c.fix.back[0] for key, c in state.items() if c.fix.back is not None and c.fix.back[0] is not key}
        for covered in tops.intersection(state):
            del state[covered]

        # New ones, only if the given inputs fail, or nothing else is left.
        if new and not (advanced and (given_pass or instead)):
            looked = self._looked(state)
            for site in new:
                if looked is None:
                    break
                options = proposals(site, self._scene(site, patched, looked))
                if options:
                    raises = any(run.status == "error" for run in failing if run.precision in site.precisions)
                    state[site.node] = Chosen(site, options, 0, self.rounds, raises)
                    advanced = self._composes(state, site.node) or advanced
                elif not (state and short_op(site.op) == "to_copy"):  # a cast of the changes
                    self._leave_alone(site, "no change is known for it")
        self.left_alone |= sites.left_alone
        return advanced

    def _composes(self, state: State, newest: ast.AST) -> bool:
        """Whether the changes together are Python; else, the ``newest`` place is left out."""
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

    def _with_equal_bits(self, state: State) -> SourceTrial | None:
        """The trial of ``state``, without the changes that change fp32 if others do not help."""
        trial = self.tried(state)
        while trial is not None and not self._keeps_bits(trial) and compute_instead(state):
            trial = self.tried(state)
        if trial is None or self._keeps_bits(trial):
            return trial
        # Each change alone shows which of them changes fp32
        for key in list(state):
            alone = self.tried({key: state[key]}, "proof")
            if alone is None or not self._keeps_bits(alone):
                self._leave_alone(state.pop(key).site, "the changes that are known for it change fp32's results")
        if state:
            trial = self.tried(state)
            if trial is not None and self._keeps_bits(trial):
                return trial
        return None

    def _without(self, keys: Sequence[ast.AST], state: State, best: tuple[float, float], goal: Goal) -> State:
        """``state`` without ``keys`` that are not needed: all at once, or else by halves."""
        fewer = {key: chosen for key, chosen in state.items() if key not in keys}
        if not keys or self._out_of_time():
            return state
        if fewer and self._as_good(fewer, best, goal) is not None:
            return fewer
        if len(keys) == 1:
            return state
        half = len(keys) // 2
        return self._without(keys[half:], self._without(keys[:half], state, best, goal), best, goal)

    def _as_good(self, state: State, best: tuple[float, float], goal: Goal) -> SourceTrial | None:
        """The trial of ``state``, if it passes as ``best``, or has an error at most 10 % larger."""
        tried = self.tried(state, goal)
        if tried is None or tried.broken or not self._keeps_bits(tried):
            return None
        score = distance_of(tried.runs)
        is_near = score[0] == best[0] and (not best[0] or score[1] <= 1.1 * best[1])
        return tried if score[0] < best[0] or is_near else None

    # -- trials

    def tried(self, state: State, goal: Goal = "step") -> SourceTrial | None:
        """What a trial with the changes of ``state`` gives; ``None`` if it cannot be made."""
        texts = tuple(sorted(self._texts(self.patched(state)).items()))
        # One with another goal may tell as much.
        for other in ("glance", "proof", "step"):
            earlier = self.made.get((*texts, other))
            if earlier is not None and (goal in (other, "glance") or (goal == "proof" and earlier.outputs)):
                return earlier
        self.trials += 1
        doing = f"trial {self.trials}: {counted(len(state), 'change')}"
        trial = self._session(self.spec._replace(sources=texts), replace(self.step, goal=goal), doing)
        if trial is not None:
            self.made[(*texts, goal)] = trial
        return trial

    def _looked(self, state: State) -> SourceTrial | None:
        """What the files' expressions give with the changes of ``state``; without any, once."""
        first = not self.bits.seen
        if not state and not first:
            return self.bits
        spec = self.spec._replace(sources=tuple(self._texts(self.patched(state)).items()), rewrites=start_probing)
        look = self._session(spec, Look(device=self.device, first=first), "looking at the source")
        if first and look is not None:
            self.bits = look
            # Trials, which are forks of this process, have the packages then.
            for name in look.packages:
                if name not in sys.modules:
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
        return look

    def _session(self, spec: TargetSpec, what: PlainTrial | Look, doing: str) -> SourceTrial | None:
        if self.on_progress is not None:
            self.on_progress("fix", doing)
        try:
            return try_source(spec, self.scan_options, self.isolation, what, max(LEAST_SECONDS, 4 * self.scan_seconds))
        except (UsageError, ProcessLostError):
            return None

    def _keeps_bits(self, trial: SourceTrial) -> bool:
        """Whether fp32 gives the same outputs and gradients, as far as both trials know them."""
        both = ((self.bits.outputs, trial.outputs), (self.bits.gradients, trial.gradients))
        return not trial.outputs or all(not before or after == before for before, after in both)

    def _out_of_time(self) -> bool:
        limit = self.options.seconds or max(LEAST_SECONDS, self.scan_seconds)
        if system.monotonic() - self.started > limit:
            self.stopped = f"after {limit:.0f} s (--search-seconds)"
        return self.stopped is not None

    # -- files

    def patched(self, state: State) -> dict[Path, PatchedFile]:
        """Each file that reports name, with changes; ``ValueError`` if two of these overlap."""
        fixes: dict[Path, tuple[SourceText, list[SourceFix]]] = {}
        for chosen in state.values():
            fixes.setdefault(chosen.site.source.path, (chosen.site.source, []))[1].append(chosen.fix)
        if not fixes:
            rows = [row for run in self.failing for row in run.op_calls.rows()]
            gaps = [gap for run in self.failing for gap in run.gaps]
            named = {line for row in rows for line in (row.source, row.caller) if line}
            named |= {line for gap in gaps for line in (gap.source, gap.caller) if line}
            files = map(self.files.find, dict.fromkeys(line.rpartition(":")[0] for line in sorted(named)))
            fixes = {source.path: (source, []) for source in files if isinstance(source, SourceText)}
        return {path: PatchedFile(source, compose(source, changes)) for path, (source, changes) in fixes.items()}

    @staticmethod
    def _texts(patched: dict[Path, PatchedFile]) -> dict[str, str]:
        return {str(path): file.text for path, file in patched.items()}

    def _scene(self, site: Site, patched: dict[Path, PatchedFile], probe: SourceTrial) -> Scene:
        """What expressions around ``site`` gave: in fp32, and in the first failing precision."""
        file = patched.get(site.source.path) or PatchedFile(site.source)
        # No precision fails there if a change has made another one fail.
        names = [run.precision for run in self.failing if run.precision in site.precisions]
        name = (names or [self.failing[0].precision])[0]
        both = (probe.seen.get("fp32", {}), probe.seen.get(name, {}))
        fp32, low = (file.by_node(places.get(str(site.source.path), {})) for places in both)
        return Scene(site.source, fp32, low)

    def _leave_alone(self, site: Site, reason: str) -> None:
        source = f"{shown_path(site.source.path)}:{getattr(site.node, 'lineno', 1)}"
        op = short_op(site.op)
        left = LeftAlone(source=source, op=op, reason=reason, codes=tuple(sorted(site.codes)))
        self.left_alone.setdefault((source, op), left)

    # -- what is told

    def fixing(self, ordered: Sequence[Chosen], patched: dict[Path, PatchedFile], trial: SourceTrial | None) -> Fixing:
        """What was found, to be saved."""
        runs = {run.precision: run for run in (trial.runs if trial is not None else [])}
        passes = not self.failing or (trial is not None and bool(runs) and not distance_of(trial.runs)[0])
        fixes = [chosen.fix for chosen in ordered]
        changes = [change_of(chosen.site, chosen.fix, fixes) for chosen in ordered]
        return Fixing(
            tool=f"lowprec-check {own_version()}",
            target=self.spec.name,
            device=self.device,
            due=bool(ordered),
            passes=passes,
            changes=changes,
            diff="".join(unified_diff(f.source.text, f.text, shown_path(path)) for path, f in patched.items()),
            proven=[proven_by(run, runs.get(run.precision)) for run in self.failing],
            by_input=[proven_by_input(run, trial, self.scanned) for run, trial in self.by_input],
            outputs_equal=trial.outputs == self.bits.outputs if trial and self.bits.outputs else None,
            gradients_equal=trial.gradients == self.bits.gradients if trial and self.bits.gradients else None,
            left_alone=[] if passes else list(self.left_alone.values()),
            trials=self.trials,
            seconds=round(system.monotonic() - self.started, 2),
            scan_seconds=round(self.scan_seconds, 2),
            stopped=self.stopped,
            plan=compared_with_plan(self.scanned.plan, changes) if passes and ordered else None,
        )
