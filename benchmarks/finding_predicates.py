"""What each finding claims, recomputed from the raw JSON, and what its advice may name: :data:`FINDINGS`, by code."""

# fmt: off
# ruff: noqa: ARG001, ARG005
from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from statement_predicates import WAYS, Case, Claim, Raw, integers_differ, label, lost_kinds, reads, same, short, total

from lowprec_check.schema.precisions import FP32, PRECISIONS, FloatFormat


def _of_call(*names: str) -> Claim:
    """A clause with one figure, which a call at the place has."""

    def claim(c: Case, **figures: Any) -> bool:
        [value] = figures.values()
        return c.at_place(*names, equal=value)

    return claim


def _in_phase(phase: str) -> Claim:
    def claim(c: Case) -> bool:
        gaps = (gap["phase"] for gap in c.run["gaps"] if gap["op"] == c.d["op"])
        return phase in gaps or any(row["phase"] == phase for row in c.rows())

    return claim


def _narrowest(dtypes: str) -> FloatFormat | None:
    known = {its.format.mark: its.format for its in PRECISIONS}
    marks = re.split(r"[+→]", dtypes)
    return min((its for mark, its in known.items() if mark in marks), key=lambda its: its.largest, default=None)


def _share(c: Case, share: float, column: str = "share") -> bool:
    """The share of the ops at the place of the finding."""
    rows = [row for row in c.rows() if c.d["source"] in (row["source"], c.result["model"]["source"])]
    total = sum(row.get(column) or 0.0 for row in rows if row["source"] == c.d["source"] or row["source"] is None)
    listed = [its for its in c.budget["shares"] if not its["rounding"] and (its["module"], its["op"]) == (c.d["module"], c.d["op"])]
    return same(share, total) or any(same(share, its["share"]) for its in listed) or same(share, c.d["share"])


def _first_bad(c: Case) -> bool:
    bad = (row for row in _all(c) if row["introduced_nan"] or (row["introduced_inf"] and row["outcome"] != "rescued"))
    first = next(bad, {})
    return (first.get("module"), first.get("op")) == (c.d["module"], c.d["op"])


def _tried(c: Case, status: str, error: float | None = None) -> bool:
    """Whether the values at the place of the finding were tried alone, with this result."""
    tried = (its for its in c.run["range_trials"] if (its["module"], its["op"]) == (c.d["module"], c.d["op"]))
    return any(its["status"] == status and error in (None, its["rel_l2"]) for its in tried)


def _all(c: Case) -> Sequence[Raw]:
    calls = c.run["op_calls"]
    return [{name: column[index] for name, column in calls.items()} for index in range(len(calls["op"]))]


def _up_to(c: Case, share: float) -> bool:
    """All calls up to the last one at the place."""
    rows = _all(c)
    places = [(row["module"], row["op"], row["source"]) for row in rows]
    sources = [c.d["source"], None]
    for index in range(len(rows) - 1, -1, -1):
        if places[index][:2] == (c.d["module"], c.d["op"]) and places[index][2] in sources:
            before = sum(row["share"] or 0.0 for row in rows[: index + 1])
            inputs = sum(its["share"] for its in c.budget["shares"] if its["op"] == "cast input" and not its["rounding"])
            if same(share, before + inputs):
                return True
    return False


def _flips(c: Case, flips: list[int], op: str = "") -> bool:
    return c.at_place("flips", "compared_choices", equal=flips) and op in ("", c.d["op"])


_POOLS = re.compile(r"(adaptive_|fractional_)?max_pool\d?d.*|(lu|ldl|linalg_lu|linalg_ldl)_factor.*|(linalg_)?solve_ex|(linalg_)?det|(linalg_)?slogdet")


def _pools(c: Case, flips: list[int]) -> bool:
    rows = [row for row in _all(c) if row["phase"] in (None, "forward") and _POOLS.fullmatch(short(row["op"]))]
    return flips == [sum(row["flips"] for row in rows), sum(row["compared_choices"] for row in rows)]


def _op_counts(c: Any, run: Any) -> Counter[tuple[str, str]]:
    """How often each module of a run calls each op."""
    return Counter((row["module"], row["op"]) for row in Case(c.result, run, c.d).rows())


def _lockstep(c: Case, same_: float, **first: float) -> bool:
    found = c.run["lockstep_error"]
    distance = found["mismatched"] if found["rel_l2"] is None and found["max_abs"] is None else found["rel_l2"]
    return same(same_, distance) and all(same(value, c.error) for value in first.values()) and distance <= (c.run["tolerance"] or 0)


def _casts(c: Case, casts: list[int]) -> bool:
    rows = [row for row in _all(c) if row["op"] == "aten._to_copy.default" and row["phase"] in (None, "forward")]
    return casts == [sum(row["recast"] for row in rows), len(rows)]


def _here(c: Case, here: int) -> bool:
    return here == sum(row["recast"] for row in _all(c) if row["op"] == "aten._to_copy.default" and row["source"] == c.d["source"])


def _slow(c: Case, ratio: float, here: float, fp32: float) -> bool:
    times = [(row["time_ms"], row["reference_ms"]) for row in _all(c) if row["op"] == c.d["op"] and row["time_ms"] is not None and row["reference_ms"] is not None]
    counted = times[1:] if len(times) > 1 else times
    sums = sum(one for one, _ in counted), sum(other for _, other in counted)
    return same([here, fp32], sums) and same(ratio, here / max(fp32, 1e-6)) and ratio >= 5


def _small_gradients(c: Case, share: float, parameters: list[str]) -> bool:
    found = [its for its in c.run["training"]["gradients"] if its["underflow"] >= 0.1 and its["parameter"].rpartition(".")[0] == c.d["module"]]
    mean = sum(its["underflow"] * its["elements"] for its in found) / sum(its["elements"] for its in found)
    return same(share, mean) and parameters == [its["parameter"].rpartition(".")[2] for its in found]


def _bad_gradients(c: Case, parameters: list[str], values: list[int]) -> bool:
    found = [its for its in c.run["training"]["gradients"] if its["overflow"] > 0]
    elements = sum(max(1, round(its["overflow"] * its["elements"])) for its in found)
    return parameters == [its["parameter"] for its in found] and values == [elements, sum(its["elements"] for its in found)]


def _way_of(c: Case, words: str) -> Raw:
    return c.way(next((name for name, shown in WAYS.items() if shown == words), words))


def _lost(c: Case, lost: float | None = None, decay: float | None = None, group: int | None = None) -> bool:
    kinds = lost_kinds(c)
    mine = [its for name, its in kinds.items() if name == f"weights of group {group}"] if group is not None else [kinds.get("weights", []), *(its for name, its in kinds.items() if name.startswith("weights of group"))]
    return any((lost is None or same(lost, total(its))) and (decay is None or same(decay, total(its, "decay_lost"))) for its in mine if its)


def _most_in(c: Case, tensor: str, most: float) -> bool:
    return any(its["name"] == tensor and same(its["lost"], most) for its in c.run["training"]["lost_updates"])


def _stalled(c: Case, values: str, lost: float, name: str, tensors: int = 1) -> bool:
    found = [its for its in c.run["training"]["lost_updates"] if its["values"] == values and its["lost"] >= 0.5 and its["name"].rpartition(" · ")[2].rpartition(".")[2] == name]
    return tensors == len(found) and same(lost, total(found))


def _epsilon(c: Case, share: float) -> bool:
    return same(share, max(check["nonfinite"] for check in c.run["training"]["epsilon"] if check["error"] is None))


def _outside(c: Case, **figures: float) -> bool:
    found = c.first["divergence"]
    return all(same(value, found[name]) for name, value in figures.items())


def _untold(c: Case, steps: int) -> bool:
    found, varied = c.first["divergence"], {*c.setup["varied"]} - {"random draws", "1 % noise on the initial weights"}
    tells = bool(varied) if found["what"] == "loss" else found["what"] == "progress" and found["value"] < 0.5
    return steps == c.setup["steps"] and not tells


def _loss_at(after: int) -> Claim:
    return lambda c, step: c.first["losses"].index(None) == step - 1 + after


def _course(name: str) -> Claim:
    def claim(c: Case, first: float | None = None, last: float | None = None, loss: float | None = None) -> bool:
        losses = (c.way(name) if name else c.first)["losses"]
        return losses[0] == losses[-1] == loss if loss is not None else same([first, last], [losses[0], losses[-1]])

    return claim


def _constant(c: Case, constant: float, dtype: str) -> bool:
    rows = [row for row in c.rows() if same(row["vanished"], constant)]
    written = next((_narrowest(row["dtypes"]) for row in rows), None)
    return bool(rows) and written is not None and written.short == dtype and abs(constant) <= written.smallest_subnormal / 2


def _later(c: Case, op: str, what: str, at: str) -> bool:
    rows = [row for row in _all(c) if row["module"] == c.d["module"] and row["op"] == op]
    return any(row["introduced_nan" if what == "NaN" else "introduced_inf"] and at in ("", f" at {row['source']}") for row in rows)


def _ranges(c: Case) -> list[Raw]:
    """The largest value, and shares flushed and below the smallest normal number, of the calls at the place, per batch."""
    batches = c.run["batches"]
    places = batches["places"] if batches and batches["places"] else []
    return [its for its in places if (its["module"], its["op"]) == (c.d["module"], c.d["op"])]


def _range(c: Case, key: str, value: float, pick: Any = max) -> bool:
    """Whether a place at the finding has this figure, the worst of its batches."""
    columns = {"largest": "absmax", "flushed": "flushed", "subnormal": "subnormal"}
    seen = [row[columns[key]] for row in c.rows() if row[columns[key]] is not None]
    batches = [[its or 0.0 for its in found[key]] for found in _ranges(c)]
    return any(same(value, its) for its in seen) or any(same(value, pick(its)) or value in its for its in batches)


def _room(c: Case, room: float) -> bool:
    values = [row["absmax"] for row in c.rows() if row["absmax"]] + [max(filter(None, its["largest"]), default=0.0) for its in _ranges(c)]
    return any(value and same(room, known.largest / value) for value in values for known in _FORMATS)


_FORMATS = {its.format for its in PRECISIONS if its.format != FP32}


def _room_of(c: Case, room: float, largest: float, dtype: str) -> bool:
    return _range(c, "largest", largest) and any(known.short == dtype and same(room, known.largest / largest) for known in _FORMATS)


def _below(c: Case, share: float, smallest: float, dtype: str, op: str = "", module: str = "") -> bool:
    place = Case(c.result, c.run, {**c.d, **({"op": op, "module": module} if op else {})})
    return _range(place, "subnormal", share) and any(known.short == dtype and same(smallest, known.smallest_normal) for known in _FORMATS)


def _ablation(c: Case, modules: list[str], error: float | None = None) -> bool:
    return modules == c.ablation["keep_fp32"] and same(error, c.ablation["rel_l2"])


def _gap(c: Case, error: str) -> bool:
    return any(gap["message"] == error and gap["op"] == c.d["op"] and gap["module"] == c.d["module"] for gap in c.run["gaps"])


def _raised(c: Case, error: str, when: str = "") -> bool:
    raised = [its for its in (c.run["exception"], c.run["stopped_by"], *[way["exception"] for way in c.ways]) if its]
    return any(error.rstrip(".") in f"{its['type']}: {its['message']} (no message)" for its in raised)


def _compiled(c: Case, **figures: Any) -> bool:
    check = c.run["compiler"]
    known = {
        "values": check["nonfinite"],
        "exact": check["exact"],
        "compiled": [check["compiled_changed"], check["decisions"]] if isinstance(figures.get("compiled"), list) else check["compiled_error"],
    }
    return check["verdict"] == "worse" and all(same(figures[name], value) for name, value in known.items() if name in figures)


def _eager(c: Case, eager: float) -> bool:
    return eager in (c.run["compiler"]["eager_changed"],) or same(eager, c.run["compiler"]["eager_error"] or 0.0)


_KINDS = {"drawn anew": "drawn", "the next batches": "batches", "with resampled values": "resampled"}


def _fails_further(c: Case) -> bool:
    found = c.run["further_inputs"]
    return found is not None and any(status != "ok" for status in found["statuses"])


def _elsewhere(c: Case, failed: int, tried: int, kind: str) -> bool:
    found = c.run["further_inputs"]
    bad = sum(count for status, count in found["statuses"].items() if status != "ok")
    return c.run["status"] == "ok" and (failed, tried, _KINDS[kind]) == (bad, sum(found["statuses"].values()), found["kind"]) and failed > 0


def _failing(c: Case, high: float, low: float | None = None) -> bool:
    """Clopper and Pearson: as many failures or more have a probability of 2.5 % at the lower end, as many or fewer at the upper end; half of
    that where the first 16 decided whether to try more.
    """
    statuses = c.run["further_inputs"]["statuses"]
    count = sum(statuses.values())
    failed = count - statuses.get("ok", 0)

    def chance(share: float, numbers: range) -> float:
        return sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in numbers)

    ends = [(chance(high, range(failed + 1)), high < 1)]
    ends += [(chance(low, range(failed, count + 1)), low > 0)] if low is not None else []
    tails = (0.025, 0.0125)[: 2 if count > 16 else 1]
    fits = any(all(math.isclose(end, tail, rel_tol=1e-3) for end, is_inside in ends if is_inside) for tail in tails)
    return fits and (low is None or (low > 0) == (failed > 0)) and (high < 1) == (failed < count)


def _remark(kind: str) -> Claim:
    def claim(c: Case, text: str) -> bool:
        return any((its["kind"], its["text"], its["source"]) == (kind, text, c.d["source"]) for its in c.run["backend_check"]["remarks"])

    return claim


_COMMON: dict[str, Claim] = {
    "in the backward pass": _in_phase("backward"),
    "in the optimizer step": _in_phase("optimizer"),
    "the output passes": lambda c: c.run["status"] == "ok" and not _fails_further(c),
    "the training passes": lambda c: c.run["status"] == "ok" and c.run["training"] is not None,
    "the output passes on these inputs": lambda c: c.run["status"] == "ok" and _fails_further(c),
    "the output error is within the tolerance": lambda c: (c.budget["measured"] or 0.0) <= (c.run["tolerance"] or 0.0),
    "the first op with Inf or NaN": _first_bad,
    "this {what} reaches the output": lambda c, what: any(row.get("reaches_output") for row in c.rows()),
    "this {what} does not reach the output": lambda c, what: any(row.get("reaches_output") is False for row in c.rows()),
    **{
        f"fp32 with {becomes} in only these places gives {what}": claim
        for becomes in ("Inf", "zeros")
        for what, claim in {
            "NaN or Inf in the output": lambda c: _tried(c, "nonfinite"),
            "an output error of {error}": lambda c, error: _tried(c, "inaccurate", error),
            "an output that passes": lambda c: _tried(c, "ok"),
        }.items()
    },
    "error {error}": lambda c, error: _tried(c, "ok", error),
    "its share of the output error is {share}": lambda c, share: _share(c, share) and share >= 0.03,
    "{share} of the output error is the rounding of its result": lambda c, share: _share(c, share, "leaving"),
    "its share of the output error is {share}, that of the rounding of its result {leaving}": lambda c, share, leaving: _share(c, share) or _share(c, share + leaving),
    "with {modules} in fp32 the error is still {error}": lambda c, **m: _ablation(c, **m) and c.disproved,
    "with {modules} in fp32 the output still has NaN or Inf": lambda c, **m: _ablation(c, **m) and c.ablation["status"] == "nonfinite",
    "the model catches this exception and continues": lambda c: c.run["status"] in ("ok", "inaccurate", "nonfinite"),
    "only in eager mode, the {backend} backend runs it": lambda c, backend: c.run["backend"] == backend,
}
_GAPS: dict[str, Claim] = {"{error}": _gap, **_COMMON}
_OVERFLOW = "{values} became Inf where fp32 is finite: too large for the dtype, or divided by 0"

FINDINGS: dict[str, dict[str, Claim]] = {
    **dict.fromkeys(("LP101", "LP102", "LP103", "LP104", "LP204", "LP305"), _GAPS),
    "LP105": {"{text}": lambda c, text: text in c.run["fallbacks"], **{f"runs on the CPU: each call waits for the device, copies its inputs ({up}{{most}}) to the CPU, and its result back": lambda c, most: any(str(most) in its for its in c.run["fallbacks"]) for up in ("", "up to ")}, "{calls}": lambda c, calls: calls == c.d["calls"], "{total} in all": lambda c, total: total % c.d["calls"] == 0},
    "LP106": {
        "{ratio} slower than in fp32: {here} instead of {fp32}": _slow,
        "more than {ratio} slower than in fp32: over {here} instead of {fp32}": lambda c, ratio, here, fp32: same(ratio, 1e3 * here / fp32) and ratio >= 5,
        "in eager mode": lambda c: c.run["backend"] != "eager" or c.run["compiled"],
        "the time of all of fp32": lambda c: True,
    },
    "LP107": {**_GAPS, "{text}": lambda c, text: text in (c.run["reason"], "the process died")},
    "LP108": {"{when}{error}": _raised},
    "LP201": {"{values} overflowed to Inf where fp32 is finite": _of_call("introduced_inf", "compared_values"), _OVERFLOW: _of_call("introduced_inf", "compared_values"), _OVERFLOW.partition(":")[0]: _of_call("introduced_inf", "compared_values"), **_COMMON},
    "LP202": {"{share} of the values that are non-zero in fp32 became zero": _of_call("flushed"), **_COMMON},
    "LP203": {"{values} became NaN though the inputs are finite": _of_call("introduced_nan", "compared_values"), **_COMMON},
    "LP205": {
        "largest value {largest}, room for a factor of {room} in {dtype}": _room_of,
        "{share} of the non-zeros in fp32 are below {smallest}, the smallest normal number of {dtype}": _below,
        "{share} of the non-zeros in fp32 of {op} in {module} are below {smallest}, the smallest normal number of {dtype}": _below,
        "{lost} become zero": lambda c, lost: True,
        "and {more}": lambda c, more: more > 0,
        "the worst of {batches}": lambda c, batches: batches == len(c.run["batches"]["statuses"]),
        "on batch {batch}, {values} overflowed to Inf where fp32 is finite": lambda c, batch, values: any(its["overflows"][batch] == values for its in _ranges(c)),
        "the largest value grows from {first} to {most} on batch {batch}: room for a factor of {room}": lambda c, first, most, batch, room: any(same([first, most], [its["largest"][0], its["largest"][batch]]) for its in _ranges(c)) and _room(c, room),
        "the share of non-zeros that become zero grows from {first} to {most} on batch {batch}": lambda c, first, most, batch: any(same([first, most], [its["flushed"][0], its["flushed"][batch]]) for its in _ranges(c)),
        **_COMMON,
    },
    "LP206": {"the constant {constant} is 0 in {dtype}": _constant, "{op} gives {what}{at}": _later, "{op}, which reads its result, gives {what}{at}": _later, **_COMMON},
    "LP207": {"{op} of {pole} is infinite in {values}": lambda c, op, pole, values: op == c.d["op"] and c.at_place("introduced_inf", "compared_values", equal=values), "which are finite in fp32": lambda c: True, **_COMMON},
    "LP301": {
        "{when}": lambda c, when: when.startswith("on ") and str(c.run["failed_call"] or c.run["failed_batch"]) in when,
        "{output} has NaN or Inf where fp32 is finite": lambda c, output: c.run["status"] == "nonfinite" and output == c.judged_output,
        "error {error} of {output} exceeds the tolerance {limit}": lambda c, error, output, limit: same(error, c.rel_l2) and same(limit, c.run["tolerance"]) and error > limit and output == c.judged_output,
        "output error {error} exceeds the tolerance {limit}": lambda c, error, limit: same(error, c.rel_l2) and same(limit, c.run["tolerance"]) and error > limit,
        "{share} of the values differ, over the tolerance {limit}": lambda c, share, limit: same(share, c.error) and same(limit, c.run["tolerance"]) and share > limit,
        "the output cannot be compared with that of fp32": lambda c: c.error is None,
        "{note}": lambda c, note: note in c.run["notes"],
        "op by op in eager mode the error is {eager}": lambda c, eager: same(eager, c.run["lockstep_error"]["rel_l2"]),
        "cannot be judged: {odd}": lambda c, odd: c.run["status"] == "inaccurate" and ("tiny" in odd or "zeros" in odd),
    },
    "LP302": {"this op adds a relative error of {error}: all its values are zero": lambda c, error: c.at_place("local_error", equal=error) and c.at_place("absmax", equal=0.0), "this op adds a relative error of {error}; its values are at most {most}, where {dtype} has few digits": lambda c, error, most, dtype: c.at_place("local_error", equal=error) and c.at_place("absmax", equal=most) and most < c.format.smallest_normal, "this op adds a relative error of {error}, rounding alone at most {roundoff}": lambda c, error, roundoff: c.at_place("local_error", equal=error) and c.format is not None and same(roundoff, c.format.roundoff) and error > roundoff, **_COMMON},
    "LP303": {
        "this op magnifies the relative error of its inputs from {before} to {after}": lambda c, before, after: any(same([before, after], [row["input_error"] or 0.0, row["accumulated_error"] or 0.0]) for row in c.rows()) and after > before,
        "this op magnifies the rounding of weights or buffers to a relative error of {after}": lambda c, after: any(not row["input_error"] and same(after, row["accumulated_error"] or 0.0) for row in c.rows()),
        "the share of all ops up to it in the output error is {share}": _up_to,
        **_COMMON,
    },
    "LP304": {
        "{op} picked a different element than fp32 {flips}": _flips,
        "{op} differs from fp32 in {flips}": _flips,
        "a value is read into Python": lambda c: any(row["to_python"] for row in c.rows()),
        "no op picks differently; values read by .tolist() or .numpy(), or Python code, may differ": lambda c: not any(c.run["op_calls"]["flips"]),
        "pooling indices or pivots differ from fp32 in {flips}": _pools,
        "{share} of the integers or booleans in a tensor of the output differ, which is not judged": integers_differ,
        "the share of all such choices in the output error is {share}": lambda c, share: same(share, c.budget["decisions"]) and c.is_over,
        "output error {error}, but {same} with the same choices in fp32": lambda c, error, same: _lockstep(c, same, error=error),
        "it calls {ops} where fp32 does not; output error {error}, but {same} where fp32 does the same": lambda c, ops, error, same: _lockstep(c, same, error=error) and set(ops) <= {op for _, op in _op_counts(c, c.run) - _op_counts(c, c.result["runs"][0])},
        "{share} of the values differ, but {same} with the same choices in fp32": lambda c, share, same: _lockstep(c, same, share=share),
        **_COMMON,
    },
    "LP306": {
        "{what} gives {values}{where} where eager and {exact} have numbers": _compiled,
        "{what} changes {compiled}{where} against {exact}; eager changes {eager}": lambda c, eager, **m: _compiled(c, **m) and _eager(c, eager),
        "the error of {what} against {exact} is {compiled}{where}, that of eager {eager}": lambda c, eager, **m: _compiled(c, **m) and _eager(c, eager),
    },
    "LP307": {"passes here, fails on {failed} of {tried} ({kind})": _elsewhere, "at least {low} and at most {high} of such inputs fail (95 % confidence)": _failing, "at most {high} of such inputs fail (95 % confidence)": _failing},
    "LP308": {
        "{values} {differ} after two calls than after two calls in eager mode": lambda c, values, differ: values == c.run["backend_check"]["changed"] and differ == ("has other values" if len(values) == 1 else "have other values"),
        "its output is {other}, that of eager mode {eager}": lambda c, other, eager: [eager, other] in c.run["backend_check"]["dtypes"],
    },
    "LP309": {"{text}": _remark("warning")},
    "LP310": {"graph break: {text}": _remark("graph-break")},
    "LP401": {"{casts} repeated or undid an earlier cast of the same tensor": _casts, "{here} of them here": _here},
    "LP402": {"it runs here on fp32 inputs; in {other} it fails": lambda c, other: any(label(run) == other and c.d["op"] in [gap["op"] for gap in run["gaps"]] for run in c.runs)},
    "LP501": {"gradients that are non-zero in fp32 became zero: {share} of the elements of {parameters}": _small_gradients, "training with {way} passes": lambda c, way: _way_of(c, way)["status"] == "ok"},
    "LP502": {
        "the gradients of {parameters} have NaN or Inf where those of fp32 are finite, in {values}": _bad_gradients,
        "no op of the analysis turns finite values into them": lambda c: not any((row["introduced_nan"] or row["introduced_inf"]) and row["phase"] == "backward" for row in _all(c)),
        "{what} originates in {op}, whose inputs are finite": lambda c, what, op: any(row["phase"] == "backward" and row["introduced_nan" if what == "NaN" else "introduced_inf"] for row in _all(c) if row["op"] == op),
    },
    "LP503": {
        "{lost} of the updates of weights are lost to rounding": _lost,
        "{lost} of the updates of weights of parameter group {group} are lost to rounding": _lost,
        "{decay} of the updates of weights by weight decay alone are lost to rounding, {lost} of those with gradients": _lost,
        "{decay} of the updates of weights of parameter group {group} by weight decay alone are lost to rounding, {lost} of those with gradients": _lost,
        "by weight decay alone: {decay}": _lost,
        "most in {tensor}: {most}": _most_in,
        "{lost} of the updates of the average of the weights are lost to rounding": lambda c, lost: same(lost, total(lost_kinds(c)["averages of weights"])),
    },
    "LP504": {"{values}: {lost} of the updates of {name} are lost to rounding": _stalled, "{values}: {lost} of the updates of {name} of {tensors} are lost to rounding": _stalled, "most in {tensor}: {most}": _most_in},
    "LP505": {"{error}: GradScaler needs gradients, and so weights, in fp32": _raised},
    "LP506": {"a step with zero gradients makes {share} of the weights NaN or Inf: eps is zero in the dtype": _epsilon, "with {fails}, not with {works}": lambda c, fails, works: all(bool(check["nonfinite"]) == (check["implementation"] in fails) for check in c.run["training"]["epsilon"] if check["error"] is None and check["implementation"] != "as given")},
    "LP507": {
        "GradScaler skips step {step} with every scale: gradients are not finite": lambda c, step: step == len(c.first["losses"]) + 1,
        "the loss is NaN or Inf after step {step}, where fp32 is finite": _loss_at(1),
        "the loss is NaN or Inf in step {step}, where fp32 is finite": _loss_at(0),
        "weights are NaN or Inf after step {step}, where fp32 is finite": lambda c, step: c.first["status"] == "nonfinite" and None not in c.first["losses"],
        "the trajectory leaves the range of fp32 runs from other seeds": lambda c: c.first["status"] == "inaccurate",
        "the loss is outside the range of fp32 runs before the first step: off by {value}": _outside,
        "from step {step} on, the loss is outside the range of fp32 runs: it has changed by {value}, the limit is {limit}": _outside,
        "from step {step} on, the weights differ from those of fp32 by {value} of the way that these moved; the limit is {limit}": _outside,
        "from step {step} on, the weights have moved {value} times as far as in fp32; the limit is {limit}": _outside,
        "from step {step} on, {name} has moved {value} times as far as in fp32; the limit is {limit}": lambda c, name, **m: _outside(c, **m) and c.first["divergence"]["stands_still"] and name == c.first["divergence"]["parameter"],
        "furthest from fp32: {parameter}": _outside,
        "{steps} cannot tell whether it trains worse": _untold,
    },
    "LP508": {
        **{f"{how}, {what}": _course(name) for how, name in (("in one autocast block around all steps", "one-autocast"), ("entered in each step", "")) for what in ("the loss goes from {first} to {last}", "the loss is still {loss} after the last step")},
        "in one autocast block around all steps, training fails": lambda c: c.way("one-autocast")["status"] != "ok",
    },
    "LP509": {
        "{way}GradScaler skipped {steps}": lambda c, way, steps: any(its["skipped_steps"] == steps and way in ("", f"{WAYS[its['name']]}: ") for its in c.ways),
        "with an initial loss scale of {scale}": lambda c, scale: any(way["initial_scale"] == scale for way in c.ways),
        "gradients overflow": lambda c: True,
    },
    "LP901": {"never ran on these inputs: not covered": lambda c: all(any(f"{c.d['module']}.".startswith(f"{name}.") for name in run["uncalled_modules"]) for run in c.runs if run["complete"] and run["op_calls"]["op"])},
    "LP902": {"two fp32 runs with one seed differ": lambda c: c.run["nondeterministic"], "each tolerance is at least three times their difference": lambda c: c.setup is None},
    "LP903": {"computed in fp32 and rounded: {reason}": lambda c, reason: c.run["emulated"].get(c.d["op"]) == reason},
    "LP904": {"the op-by-op analysis gave another output than the plain run": lambda c: c.run["perturbed"]},
    "LP905": {"later ops were not checked: {why}": lambda c, why: not c.run["complete"] and (_raised(c, why) or why in (c.run["incomplete_because"], c.run["reason"], "the op-by-op analysis ended early"))},
}
"""By code, then by clause."""


_TRIES = re.compile(r"^(try|check|scan|calibrate|find|ignore|see|fix|compute|look|report|raise|clamp|scale|make|replace|run|call|use one dtype|use torch\.finfo|use a constant|use GradScaler\(|use eager mode|use the eager backend|use a dtype|enter|a smaller|fp32 for this module|keep the (weights|average)|the device|fused=|foreach=|reported in|no torch release|supported since|torch's bisection|set torch|try)")


def false_advice(case: Case, help: str | None) -> list[str]:
    """What advice names that did not pass in this scan, or that is the run itself."""
    wrong = []
    names = sorted({name for run in case.runs for name in (label(run), run["precision"])}, key=len, reverse=True)
    for part in filter(None, re.split(r"; |, or (?=use|try|keep|find|calibrate|replace)", help or "")):
        named = re.match(r"use ([^,;(]+)", part)
        if named:
            for alternative in re.split(r" or (?!GradScaler)", named[1]):
                wrong += _false_use(case, alternative.strip(), names)
        elif part.startswith("keep ") and " in fp32, as the plan does" in part:
            wrong += [] if case.plan else [f"no plan of this run passes: {part}"]
        elif found := re.match(r"keep (.*) in fp32, with which the error is (\S+)", part):
            wrong += [] if case.ablation and not case.disproved and reads(found[2], case.ablation["rel_l2"]) else [f"not so: {part}"]
        elif part.startswith("keep the modules in fp32 that the recommendation names"):
            wrong += [] if case.advice and case.advice["keep_fp32"] else [f"it names none: {part}"]
        elif not _TRIES.match(part) and not part.startswith("or "):
            wrong.append(f"neither tried here nor worded as a try: {part}")
    return wrong


def _false_use(case: Case, name: str, names: Sequence[str]) -> list[str]:
    run_name, _, way = name.partition(" with ")
    words = {shown: key for key, shown in WAYS.items()}
    if run_name in words or name in words:
        key = words.get(name) or words[run_name]
        return [] if case.way(key).get("status") == "ok" else [f"{name} did not pass in this run"]
    if name == "autocast":  # of the run's own dtype
        dtype = "autocast-bf16" if "bf" in case.run["precision"] else "autocast-fp16"
        ran = [run for run in case.runs if run["precision"] == dtype and run["status"] != "skipped"]
        return [] if any(case.d["op"] not in {gap["op"] for gap in run["gaps"]} for run in ran) else [f"not in {dtype}"]
    if run_name not in names:
        return [] if _TRIES.match(f"use {name}") else [f"no run of this scan: {name}"]
    runs = [run for run in case.runs if run_name in (label(run), run["precision"], label({**run, "base": None, "precision": run["base"] or run["precision"]}))]
    if way in words:
        passing = [run for run in runs if case.of(run).way(words[way]).get("status") == "ok"]
        return [] if passing else [f"{name} did not pass"]
    if not any(run["status"] == "ok" or "where it runs" in (case.d.get("help") or "") for run in runs):
        return [f"{name} did not pass"]
    itself = label(case.run) == run_name if case.found else False
    return [f"{name} is the run itself"] if itself else []
