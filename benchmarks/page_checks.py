"""The conclusions of a page, one by one, held against :mod:`plain_experiments`: the checks of :mod:`page_conclusions`."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from page_cases import PageCase, loaded
from plain_experiments import (
    Outcome,
    Times,
    failures,
    first_nonfinite,
    is_all_zeros,
    outcome,
    outputs,
    times,
)
from torch import Tensor, nn
from verdict_breadth import PRECISIONS, TOLERANCE, dtype_of, judge_call

from lowprec_check import ScanResult
from lowprec_check.report.html.causes import RunCauses, run_causes
from lowprec_check.report.lights import Light, lights
from lowprec_check.schema.module_paths import is_inside
from lowprec_check.schema.scan_result import Run

ROOT = Path(__file__).parent.parent
SMALLEST_NORMAL = {torch.half: 2.0**-14, torch.bfloat16: 2.0**-126}
ALIKE = 0.05
"""Errors of the same experiment differ by at most this part."""
LEAST_SHARE, FACTOR = 0.2, 1.5
NAME = "(?:autocast-fp16|autocast-bf16|bfloat16|half)"
NAMES = re.compile(rf"(?<![\w-])({NAME}(?:(?:, | and ){NAME})*)( cannot be judged)?: (.*?)(?=[.…](?: |$))")
PASSING = re.compile(rf"(?<![\w-])({NAME}) is (?:within the|closest to its) tolerance: error (\S+) ")
FIGURE = re.compile(r"error (\d\.\de[-+]\d\d)|([\d.]+) % of the integers differ")


class Check(NamedTuple):
    """One conclusion of a page, and what the experiment gave."""

    model: str
    about: str
    page: str
    plain: str
    agrees: bool
    note: str = ""


class Facts(NamedTuple):
    """What the checks of one model need."""

    name: str
    result: ScanResult
    lights: list[Light]
    causes: list[RunCauses]
    model: nn.Module
    inputs: Any
    reference: list[list[Tensor]]
    """The fp32 outputs of three calls."""
    plain: dict[str, Outcome]

    def check(self, about: str, page: object, plain: object, agrees: bool, note: str = "") -> Check:
        """A check of this model."""
        return Check(self.name, about, str(page), str(plain), agrees, note)

    def odd(self, precision: str) -> bool:
        """Whether the output tells nothing: all zeros in fp32, or an error in values that the format can hardly hold."""
        if is_all_zeros(self.reference[0]):
            return True
        found = self.plain[precision]
        is_tiny = found.rms is not None and found.rms < SMALLEST_NORMAL[dtype_of(precision)]
        return found.status == "inaccurate" and is_tiny


def alike(one: float | None, other: float | None) -> bool:
    """Whether two errors are the same within :data:`ALIKE`; 2 digits of a printed one are."""
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return one == other
    return abs(one - other) <= max(ALIKE * max(one, other), 1e-12)


# -- the lights


def of_runs(facts: Facts) -> Iterator[Check]:
    """Does it run: the ways that raise."""
    light = facts.lights[0]
    failing = {name for name in PRECISIONS if facts.plain[name].status == "error"}
    named = {name for found in NAMES.finditer(light.answer) for name in re.findall(NAME, found[1])}
    color = "good" if not failing else "bad" if len(failing) == len(PRECISIONS) else "warn"
    yield facts.check("runs", sorted(named), sorted(failing), named == failing, light.answer)
    yield facts.check("runs: color", light.color, color, light.color == color)


def of_right(facts: Facts) -> Iterator[Check]:
    """Is it right: the ways that pass, fail and cannot be judged, their errors, and the color."""
    light, plain = facts.lights[1], facts.plain
    ran = [name for name in PRECISIONS if plain[name].status != "error"]
    odd = {name for name in ran if facts.odd(name)}
    wrong = {name for name in ran if plain[name].status != "ok"} - odd
    passed = set(ran) - odd - wrong
    said_odd, said_wrong = set(), set()
    for found in NAMES.finditer(light.answer):
        names = set(re.findall(NAME, found[1]))
        said_odd |= names if found[2] else set()
        said_wrong |= names if not found[2] else set()
        figure = FIGURE.search(found[3])
        for name in sorted(names) if figure and not found[2] else ():
            said = float(figure[1]) if figure and figure[1] else float(figure[2]) / 100 if figure else 0.0
            yield facts.check(
                f"right: error of {name}", f"{said:.1e}", f"{plain[name].error:.1e}", alike(said, plain[name].error)
            )
    for found in PASSING.finditer(light.answer):
        name, error = found[1], plain[found[1]].error
        yield facts.check(f"right: error of {name}", found[2], f"{error:.1e}", alike(float(found[2]), error))
        parts = {its: plain[its].error / TOLERANCE[dtype_of(its)] for its in passed}
        nearest = sorted(its for its in passed if alike(parts[its], max(parts.values())))
        yield facts.check("right: closest to its tolerance", name, nearest, name in nearest)
    yield facts.check("right: not passing", sorted(said_wrong), sorted(wrong), said_wrong == wrong, light.answer)
    yield facts.check("right: cannot be judged", sorted(said_odd), sorted(odd), said_odd == odd)
    plan = any(run.base is not None and run.status == "ok" for run in facts.result.runs)
    color = "none" if not passed and not wrong else "good" if not wrong | odd else "warn" if passed or plan else "bad"
    yield facts.check("right: color", light.color, color, light.color == color)


def claim_of(text: str) -> str:
    """What a light says of the time."""
    for words, claim in (("times as fast", "faster"), ("slower than fp32", "slower"), ("about as fast", "same")):
        if words in text:
            return claim
    return "not known"


def recommended(result: ScanResult) -> Run | None:
    """The run that is recommended."""
    best = result.recommendation
    found = (run for run in result.runs if best and (run.base or run.precision) == best.precision)
    return next((run for run in found if best and run.keep_fp32 == best.keep_fp32), None)


def of_worth(facts: Facts) -> Iterator[Check]:
    """Is it worth it: the direction of the time in a plain timing, and the color."""
    light, run, result = facts.lights[2], recommended(facts.result), facts.result
    if run is None:
        none = all(found.status != "ok" for found in facts.plain.values())
        yield facts.check("worth: nothing passes", light.answer, none, none and light.color == "none")
        return
    precision = run.base or run.precision
    found: Times = times(facts.model, facts.inputs, precision, run.keep_fp32)
    claim = claim_of(light.answer)
    rounds = run.latency.speedup if run.latency else None
    timed = f"{found.wall:.2f} (wall; quartiles {found.quartiles[0]:.2f} – {found.quartiles[1]:.2f}), {found.cpu:.2f} (processor)"
    holds = {
        "faster": found.wall > 1,
        "slower": found.wall < 1,
        "same": 0.8 <= found.wall <= 1.25,
        "not known": rounds is None or (rounds.low <= 1.05 and rounds.high >= 1 / 1.05),
    }
    yield facts.check(f"worth: {claim}", light.answer, timed, holds[claim])
    if rounds is not None:
        inside = rounds.low <= found.wall <= rounds.high
        page = f"{rounds.median:.2f} ({rounds.low:.2f} – {rounds.high:.2f})"
        yield facts.check("worth: interval of the scan", page, timed, inside)
    smaller = (run.peak_memory_bytes or math.inf) <= 0.9 * (result.runs[0].peak_memory_bytes or 0)
    gains = "none" if not smaller and claim != "faster" else "warn" if claim == "slower" else "good"
    color = "none" if facts.odd(precision) else gains
    yield facts.check("worth: color", light.color, color, light.color == color, f"smaller: {smaller}")


def of_sentence(facts: Facts, path: Path) -> Iterator[Check]:
    """What to do: the color follows what is gained, and the printed code gives the error claimed."""
    light, best = facts.lights[3], facts.result.recommendation
    worth = facts.lights[2].color
    if best is None:
        yield facts.check("do: color", light.color, "bad", light.color == "bad", light.answer)
        return
    stays = light.answer.startswith("Stay")
    wanted = "good" if worth in ("good", "warn") and not stays else "none"
    yield facts.check("do: color", light.color, wanted, light.color == wanted, light.answer)
    output = pasted(path, best.code)
    if isinstance(output, str):
        yield facts.check("do: printed code", "runs", output, False)
        return
    status, error = judge_call(output, facts.reference[0], TOLERANCE[dtype_of(best.precision)])
    run = recommended(facts.result)
    said = run.output_error.distance if run and run.output_error and not run.compared_module else error
    agrees = alike(said, error) and status == "ok"
    yield facts.check("do: printed code", f"ok, {said or 0:.2e}", f"{status}, {error:.2e}", agrees)


def pasted(path: Path, code: str) -> list[Tensor] | str:
    """The output's tensors of ``code`` behind the file's own text, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        saved, file = Path(folder, "output.pt"), Path(folder, "pasted.py")
        save = f"from verdict_breadth import tensors_in\ntorch.save(list(tensors_in(output)), {str(saved)!r})\n"
        file.write_text(f"{path.read_text(encoding='utf-8')}\n{code}\n{save}", encoding="utf-8")
        done = subprocess.run([sys.executable, file], env=environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
        tensors: list[Tensor] = torch.load(saved, weights_only=True)
        return tensors


def environment() -> dict[str, str]:
    """Of the processes that are started: one thread, and the modules beside this file."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}


# -- the causes


def of_causes(facts: Facts) -> Iterator[Check]:
    """Why it breaks: gaps, the first NaN or Inf, ablations, plans and shares of each run."""
    for cause in facts.causes:
        if cause.label.startswith("plan"):
            continue
        run = facts.result.run(cause.label)
        name = run.precision
        if cause.status == "error":
            yield from of_gaps(facts, cause, run)
        for place in cause.places if cause.status == "nonfinite" else ():
            if place.remark.startswith(("first NaN", "first Inf")):
                module, number = first_nonfinite(facts.model, facts.inputs, name)
                agrees = place.module == (module or "(model)")
                yield facts.check(
                    f"first NaN or Inf, {name}", f"{place.module}: {place.remark}", f"{module}: {number} values", agrees
                )
        if run.ablation is not None:
            yield from of_kept(
                facts, name, run.ablation.keep_fp32, run.ablation.status, run.ablation.rel_l2, " ".join(cause.proofs)
            )
        yield from of_shares(facts, cause, run)
    for plan in facts.result.runs:
        if plan.base is not None:
            error = plan.output_error.rel_l2 if plan.output_error else None
            yield from of_kept(facts, plan.base, plan.keep_fp32, plan.status, error, "plan")


def of_gaps(facts: Facts, cause: RunCauses, run: Run) -> Iterator[Check]:
    """The places that fail, and that each fails in the plain model."""
    found, ended = failures(facts.model, facts.inputs, run.precision)
    plain = {(failure.message[:80], failure.line) for failure in found}
    page = {(place.remark.partition(": ")[2][:80], Path(place.source).name) for place in cause.places}
    yield facts.check(f"gaps, {run.precision}", sorted(page), sorted(plain), page == plain, ended or cause.text)


def of_kept(
    facts: Facts, precision: str, keep: Sequence[str], status: str, rel_l2: float | None, text: str
) -> Iterator[Check]:
    """An ablation or a plan, repeated."""
    found = outcome(facts.model, facts.inputs, precision, facts.reference, keep)
    error = found.error if found.status in ("ok", "inaccurate") else None
    page, plain = (
        f"{its}, {'–' if err is None else f'{err:.2e}'}" for its, err in ((status, rel_l2), (found.status, error))
    )
    what = "plan" if text == "plan" else "ablation"
    agrees = found.status == status and alike(error, rel_l2)
    yield facts.check(f"{what}, {precision}: {', '.join(keep)}", page, plain, agrees, "" if text == "plan" else text)


def of_shares(facts: Facts, cause: RunCauses, run: Run) -> Iterator[Check]:
    """The submodule with the largest share, kept in fp32: the error that is left."""
    own = {bar.bar.name: bar.bar.share for bar in cause.bars if bar.bar.name in run.called_modules}
    best = max(own, key=own.__getitem__, default="")
    before = facts.plain[run.precision]
    if not best or own[best] < LEAST_SHARE or run.budget is None or before.status not in ("ok", "inaccurate"):
        return
    share = math.fsum(part.share for part in run.budget.shares if is_inside(part.module, best))
    after = outcome(facts.model, facts.inputs, run.precision, facts.reference, [best])
    low = before.error * math.sqrt(max(0.0, 1 - share))
    high = max(low, run.budget.next_error or 0.0)  # of a tensor of the output that the module may not reach
    hit = after.status != "nonfinite" and low / FACTOR <= after.error <= low * FACTOR
    predicted = f"{low:.2e}" + (f" to {high:.2e}" if high > low else "")
    page, plain = f"{before.error:.2e} → {predicted} ({share:.0%} {best})", f"{after.error:.2e}"
    yield facts.check(f"share, {run.precision}", page, plain, hit)
    less = before.error - after.error
    hit = (before.error - high) / FACTOR <= less <= (before.error - low) * FACTOR
    yield facts.check(f"share removed, {run.precision}", f"at most {before.error - low:.2e}", f"{less:.2e}", hit, best)


# -- all of one model


def examine(case: PageCase, result: ScanResult, path: Path) -> list[Check]:
    """Every check of one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, inputs = loaded(path)
    reference = list(outputs(model, inputs, "fp32"))
    plain = {name: outcome(model, inputs, name, reference) for name in PRECISIONS}
    facts = Facts(case.name, result, lights(result), run_causes(result), model, inputs, reference, plain)
    return [
        *of_runs(facts),
        *of_right(facts),
        *of_worth(facts),
        *of_sentence(facts, path),
        *of_causes(facts),
    ]
