"""What each sentence about a result claims, recomputed from the raw JSON; nothing here is imported from lowprec_check.analysis.

``CLAIMS[kind]`` maps a clause, a part of a template without the types of its figures, to a function of a :class:`Case` and the figures
of the clause: whether it is true of the run. :func:`problems` takes a template apart into clauses; one that is not listed is a problem.
:func:`misread` holds what is printed against the figures, ranges included.
"""

# fmt: off
# ruff: noqa: ARG001, ARG005, A006
from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lowprec_check.schema.precisions import PRECISIONS, FloatFormat
from lowprec_check.schema.ways_to_train import WAYS as DECLARED

Raw = dict[str, Any]
Claim = Callable[..., bool]

WAYS = {way.name: way.words for way in DECLARED}
NO_KERNEL = ("missing-kernel", "unsupported-dtype", "no-backend-kernel", "crash")
BETWEEN = "rounding between modules"
LEAST_SHARE = 0.03
"""Docs: a share that matters."""


# -- a result as its JSON


def label(run: Raw) -> str:
    """Its name in reports."""
    name = run["precision"] if run.get("base") is None else f"{run['precision']} ({run['base']})"
    parts = [name, *([run["backend"]] if run["backend"] != "eager" else [])]
    parts += [run["memory_format"]] if run["memory_format"] != "contiguous" else []
    return " · ".join([*parts, *(["predicted"] if run["evidence"] == "predicted" else [])])


def is_reference(run: Raw) -> bool:
    """Whether it is the fp32 run that all others are compared with."""
    return (run["precision"], run["backend"], run["memory_format"]) == ("fp32", "eager", "contiguous")


def short(op: str) -> str:
    """The name of an op in reports."""
    parts = op.split(".")
    return parts[1].removeprefix("_") if len(parts) == 3 and parts[0] != "torch" else op


def same(one: Any, other: Any) -> bool:
    """Whether two figures are the same: of floats up to rounding of sums."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


class Case:
    """A raw result, one of its runs, and perhaps the raw diagnostic that is checked."""

    def __init__(self, result: Raw, run: Raw | None = None, finding: Raw | None = None) -> None:
        self.result, self.found, self.d = result, run, finding or {}
        self.runs: list[Raw] = result["runs"]
        self.reference = next((its for its in self.runs if is_reference(its)), None)
        low = [its for its in self.runs if its["precision"] != "fp32" or its.get("quantized")]
        self.low = low or [its for its in self.runs if not is_reference(its)]
        self.advice: Raw | None = result["recommendation"]
        self.setup: Raw | None = result["training"]

    @property
    def run(self) -> Raw:
        assert self.found is not None, "a statement about a run names none"
        return self.found

    def of(self, run: Raw) -> Case:
        return Case(self.result, run, self.d)

    @property
    def format(self) -> FloatFormat | None:
        known = PRECISIONS.find(self.run.get("base") or self.run["precision"])
        return known.format if known else None

    @property
    def error(self) -> float | None:
        """What is held against the tolerance."""
        found = self.run["output_error"]
        if found is None:
            return None
        return found["mismatched"] if found["rel_l2"] is None and found["max_abs"] is None else found["rel_l2"]

    @property
    def rel_l2(self) -> float | None:
        return self.run["output_error"] and self.run["output_error"]["rel_l2"]

    @property
    def budget(self) -> Raw:
        return self.run["budget"] or {}

    @property
    def ablation(self) -> Raw:
        return self.run["ablation"] or {}

    @property
    def plan(self) -> Raw | None:
        """The plan made of the run, if it passes."""
        mine = (self.run["precision"], self.run["backend"], self.run["memory_format"])
        made = (its for its in self.runs if (its["base"], its["backend"], its["memory_format"]) == mine)
        return next((its for its in made if its["status"] == "ok" and its["keep_fp32"]), None)

    # training

    @property
    def ways(self) -> list[Raw]:
        return self.run["training"]["ways"] if self.run["training"] else []

    def way(self, name: str | None) -> Raw:
        return next((its for its in self.ways if its["name"] == name), {})

    @property
    def first(self) -> Raw:
        return self.ways[0] if self.ways else {}

    @property
    def advised(self) -> Raw:
        """The way to train that is recommended."""
        return self.way((self.advice or {}).get("way") or "plain")

    def passes(self) -> bool:
        return self.run["status"] == "ok" or any(its["status"] == "ok" for its in self.ways)

    def is_advised(self) -> bool:
        best = self.advice
        if best is None:
            return False
        mine = (self.run["base"] or self.run["precision"], self.run["backend"], self.run["memory_format"], self.run["keep_fp32"])
        return mine == (best["precision"], best["backend"], best["memory_format"], best["keep_fp32"])

    # times and memory, by the definitions of docs/schema.json

    def speed(self) -> tuple[str, float | None]:
        """``faster``, ``slower``, ``same``, ``noisy`` or ``unknown``, and the ratio."""
        reference = self.reference
        if reference is None or (reference["timing"] is None) != (self.run["timing"] is None):
            return "unknown", None
        latency = self.run["latency"]
        if latency is not None and self.run["timing"] is None:
            rounds = latency["speedup"]
            if rounds is None:
                return ("unknown" if any("failed while it was timed" in note for its in (self.run, reference) for note in its["notes"]) else "noisy"), None
            return told(rounds["median"], rounds["low"], rounds["high"]), rounds["median"]
        fp32, mine = (its["timing"]["median_ms"] if its["timing"] else its["latency_ms"] for its in (reference, self.run))
        if not fp32 or not mine:
            return "unknown", None
        busy = any((its["latency"] or {}).get("noisy") or ((its["latency"] or {}).get("speedup") or {}).get("one_core") for its in (self.run, reference))
        ratio, margin = max(fp32, 1.0) / max(mine, 1.0), 1.5 if busy else 1.05
        low = ratio / margin if fp32 >= 1 else 0.0
        return ("noisy" if mine < 1 else told(ratio, low, ratio * margin)), ratio

    @property
    def speedup(self) -> Raw:
        """What the rounds of the run told; empty if it has none."""
        return (self.run["latency"] or {}).get("speedup") or {}

    def memory(self) -> float | None:
        fp32 = self.reference and self.reference["peak_memory_bytes"]
        return self.run["peak_memory_bytes"] / fp32 if fp32 and self.run["peak_memory_bytes"] else None

    @property
    def judged_output(self) -> str:
        """What the status is about, in words."""
        tensor = self.run["compared_output"]
        return "the output" if tensor is None else f"output {tensor}"

    # shares

    def shares(self) -> list[tuple[str, float, Raw]]:
        """Per module: its share of the squared error, and its largest entry."""
        sums: dict[str, list[Raw]] = {}
        for share in self.budget.get("shares", []):
            sums.setdefault(BETWEEN if share["rounding"] and not share["module"] else share["module"], []).append(share)
        parts = [(name, sum(one["share"] for one in its), max(its, key=lambda one: one["share"])) for name, its in sums.items()]
        return sorted(parts, key=lambda part: -part[1])

    def share(self, module: str, share: float, **largest: Any) -> bool:
        """Whether what goes with a module in fp32, and its largest op, are these; ``share`` is one that matters.

        It is of the module with all inside, measured if it was tried, or of the ops at a place that is no module. Of the rest of a
        module, beside some inside it, the share lies between that of its own ops and that of all inside; of one that is named after others,
        it may be what goes beside those.
        """
        rest = module.startswith("the rest of ")
        module = module.removeprefix("the rest of ")
        for name, own, first in self.shares():
            if name == module:
                source = f", {first['source']}" if first["source"] else ""
                rounding = "rounding of " if first["rounding"] and name != BETWEEN else ""
                known = {"op": first["op"], "source": source, "rounding": rounding}
                inside = self.inside(module)
                whole = self.whole(module)
                beside = not largest and LEAST_SHARE <= share < whole
                fits = min(own, inside) - 1e-9 <= share <= inside + 1e-9 if rest else same(share, whole) or beside
                return fits and all(known[key] == value for key, value in largest.items())
        return False

    def inside(self, module: str) -> float:
        """What goes with a module and all inside, of shares that add up; at a place that is no module, what its ops have."""
        called = self.run["called_modules"]
        if not (module in called if called else module not in ("", BETWEEN)):
            return next((own for name, own, _ in self.shares() if name == module), 0.0)
        return sum(one["share"] for one in self.budget["shares"] if f"{one['module']}.".startswith(f"{module}."))

    def whole(self, module: str) -> float:
        """What goes with a module in fp32, measured if it was tried."""
        tried = next((one for one in self.budget.get("modules", []) if one["module"] == module), None)
        if tried is None:
            return self.inside(module)
        return float(tried["share"] if tried.get("measured") is None else tried["measured"])

    @property
    def is_over(self) -> bool:
        """Whether the error that the shares are of is over the tolerance."""
        return (self.budget.get("measured") or 0.0) > (self.run["tolerance"] or 0.0)

    @property
    def disproved(self) -> bool:
        """Whether keeping the blamed modules in fp32 left at least nine tenths of the error."""
        after, before = self.ablation.get("rel_l2"), self.rel_l2
        passes = self.ablation.get("status") == "ok"
        return after is not None and before is not None and after >= 0.9 * before and not passes

    # op calls

    def rows(self, run: Raw | None = None, **where: Any) -> Iterator[Raw]:
        """The op calls at the place of the finding, or with these values."""
        calls = (run or self.run)["op_calls"]
        where = where or {"module": self.d["module"], "op": self.d["op"]}
        for index in range(len(calls["op"])):
            if all(calls[name][index] == value for name, value in where.items()):
                yield {name: column[index] for name, column in calls.items() if column}

    def at_place(self, *names: str, equal: Any) -> bool:
        """Whether a call at the place of the finding has these figures."""
        return any(same([row[name] for name in names] if len(names) > 1 else row[names[0]], equal) for row in self.rows())

    def no_kernel(self) -> list[str]:
        return list(dict.fromkeys(gap["op"] for gap in self.run["gaps"] if gap["kind"] in NO_KERNEL))


def told(ratio: float, low: float, high: float) -> str:
    """What a ratio with this interval tells."""
    if low > 1 and ratio >= 1.05:
        return "faster"
    if high < 1 and ratio <= 1 / 1.05:
        return "slower"
    return "same" if low >= 0.8 and high <= 1.25 else "noisy"


# -- clauses


def _error(c: Case, error: float | None, limit: float | None = None, what: str = "") -> bool:
    module = f" of the output of {c.run['compared_module']}" if c.run["compared_module"] else f" of {c.judged_output}"
    over = limit is None or (same(limit, c.run["tolerance"] or 0.0) and (error is None or error > limit))
    return same(error, c.error) and over and what in ("", module)


def _part(c: Case, error: float, part: float, limit: float, batches: int, what: str = "") -> bool:
    tried = len(c.run["batches"]["statuses"]) if c.run["batches"] else 1
    return (
        c.run["status"] == "ok"
        and c.run["training"] is None
        and _error(c, error, what=what)
        and same(limit, c.run["tolerance"])
        and same(part, error / limit)
        and part <= 1
        and batches == tried
    )


def _kept(c: Case, kept: list[str], after: float | None = None, before: float | None = None, ends: Sequence[str] = ()) -> bool:
    found = c.ablation
    return (
        kept == found.get("keep_fp32")
        and found["status"] in ends
        and same(after, found["rel_l2"])
        and same(before, c.rel_l2)
        and (found["status"] != "ok" or after is None or after <= (c.run["tolerance"] or 0.0))
    )


def _no_kernels(c: Case, ops: int, names: str, total: int = 0) -> bool:
    found = c.no_kernel()
    phases = {gap["op"]: gap["phase"] for gap in reversed(c.run["gaps"])}
    shown = [f"{short(op)}{'' if phases[op] == 'forward' else f' ({phases[op]})'}" for op in found]
    listed = ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:4])} and {len(shown) - 4} more"
    ran = len({*c.run["op_calls"]["op"], *found})
    return ops == len(found) and total in (0, ran) and names == listed


def _why(c: Case, text: str) -> bool:
    """A failure in words that are not ours: those of an exception, a reason or a note."""
    text = re.sub(r"^on (?:batch (\d+))?(?:, )?(?:call (\d+))?: ", lambda m: "" if _on(c, m) else m[0], text)
    run, raised = c.run, c.run["exception"]
    kinds = ", ".join(dict.fromkeys(gap["kind"] for gap in run["gaps"])) if not run["failed_call"] else ""
    plain = text.removeprefix(f"{kinds}: ") if kinds else text
    plain = re.sub(r"^(?:step (\d+))?(?:, )?(?:backward|optimizer)?: ", "", plain)
    if run["status"] == "error" and raised:
        message = f"{raised['type']}: {raised['message']}" if raised["message"].strip() else f"{raised['type']} (no message)"
        return message.startswith(plain.removesuffix("…")) and len(plain) > min(100, len(message) - 1)
    said = [run["reason"] or run["status"], "; ".join(run["notes"]), *NONFINITE.get(run["status"], ())]
    return text in said or (run["status"] == "error" and text == "it raised an exception")


NONFINITE = {"nonfinite": ("NaN or Inf in the output", "NaN or Inf in the loss of the first step", "NaN or Inf in the weights"), "inaccurate": ("the error is infinite",)}


def _on(c: Case, m: re.Match[str]) -> bool:
    return (m[1] and int(m[1])) == c.run["failed_batch"] and (m[2] is None or int(m[2]) == c.run["failed_call"])


def _rescued(c: Case, *kinds: str) -> int:
    """The calls that failed and were rescued, of all kinds or some."""
    return sum(gap["calls"] for gap in c.run["gaps"] if not kinds or gap["kind"] in kinds)


def _odd(c: Case, odd: str) -> bool:
    """Why an output cannot be judged."""
    rms = c.run["output_rms"] if c.run["output_rms"] is not None else c.budget.get("output_rms")
    if "all zeros" in odd:
        return bool(c.reference and c.reference["output_is_zero"]) or rms == 0
    m = re.fullmatch(r"the output is tiny \(rms (\S+)\): (\w+) (flushes it to zero|has few digits for it)", odd)
    if not m or not rms or c.format is None or m[2] != c.format.short or not reads(m[1], rms):
        return False
    lost = c.rel_l2 is None or c.rel_l2 >= 0.99
    what = "flushes it to zero" if lost else "has few digits for it"
    return rms < c.format.smallest_normal and m[3] == (what if rms < c.format.smallest_subnormal else "has few digits for it")


def _first_bad(c: Case, op: str, module: str, phase: str = "", what: str = "") -> bool:
    rows = (row for row in c.rows(op=op, module=module) if row["introduced_inf"] or row["introduced_nan"])
    return next(rows, None) is not None and c.run["status"] in ("nonfinite", "error", "inaccurate")


def _diverges(c: Case, step: int | None = None, where: str = "", **figures: float) -> bool:
    found = c.first.get("divergence") or {}
    about = f" ({found.get('parameter')})" if found.get("parameter") else ""
    known = {
        "loss": ((c.first.get("losses") or [0.0])[0] or 0.0) + found.get("value", 0.0),
        "beyond": abs(found.get("value", 0.0) - found.get("limit", 0.0)),
        "distance": found.get("value"),
        "part": found["value"] / found["limit"] if found.get("limit") else None,
        "moved": found.get("value"),
        "limit": found.get("limit"),
    }
    return step == (found.get("step") or None) and where == about and all(same(value, known[name]) for name, value in figures.items())


def _names_of_ways(c: Case, ways: list[str]) -> bool:
    passing = {WAYS[its["name"]] for its in c.ways if its["status"] == "ok"}
    return bool(ways) and set(ways) <= passing | ({"plain", "no GradScaler"} if c.way("plain").get("status") == "ok" else set())


def _verdict(c: Case, name: str, kept: str = "", predicted: str = "", prefer: str = "", gain: str = "", fp32: str = "fp32") -> bool:
    """That the run named passed, keeps as many modules in fp32 as is said, and gains what is said."""
    best, (precision, _, way) = c.advice, name.partition(" with ")
    if best is None or bool(predicted) != (c.result["prediction"] is not None):
        return False
    run = next((its for its in c.low if c.of(its).is_advised()), None)
    shown = " · ".join([best["precision"], *[its for its, usual in ((best["backend"], "eager"), (best["memory_format"], "contiguous")) if its != usual]])
    total = max(0, c.result["model"]["modules"] - 1)
    count = re.fullmatch(r" with (\d+)(?: of ([\d,]+))? modules? in fp32", kept)
    inside = [path for path in (c.result["plan"] or {"modules": best["keep_fp32"]})["modules"] if any(path == each or path.startswith(f"{each}.") for each in best["keep_fp32"])]
    right_kept = (count is not None and int(count[1]) == len({*inside, *best["keep_fp32"]}) and count[2] in (None, f"{total:,}")) if kept else not best["keep_fp32"]
    if run is None or precision != shown or not right_kept:
        return False
    its = c.of(run)
    used = its.way(next((key for key, words in WAYS.items() if words == way), "plain")) if c.setup else run
    if used.get("status") != "ok" or bool(gain) != bool(best["stay_in_fp32"] or best["worth"] == "nothing" or " is " in gain):
        return False
    return not gain or _gains(its, gain, prefer)


def _gains(c: Case, gain: str, prefer: str) -> bool:
    (speed, ratio), memory = c.speed(), c.memory()
    if prefer and (prefer != c.result["options"].get("prefer", "speed") or (prefer == "speed") != (speed == "slower")):
        return False
    for part in re.split(r", (?:and )?| and ", gain):
        saves, faster = re.search(r"saves ([<>]? ?\d+ %)", part), re.search(r"([\d.,]+) times (as fast|slower)", part)
        right = (
            (memory is not None and reads(saves[1], 1 - memory))
            if saves
            else speed == ("faster" if faster[2] == "as fast" else "slower") and reads(faster[1], ratio if speed == "faster" else 1 / (ratio or 1.0))
            if faster
            else {
                "is slower": speed == "slower",
                "is not faster": speed in ("slower", "same"),
                "computes nothing in 16 bits": not any(c.format.mark in dtypes for dtypes in c.run["op_calls"]["dtypes"]),
                "saves no memory": memory is not None and memory > 1 / 1.05,
                "saves little memory": memory is not None and memory > 0.9,
            }.get(part.strip(), False)
        )
        if not right:
            return False
    return True


def _all_fail(c: Case, here: str, none: str = "", name: str = "") -> bool:
    """That no run passed; with names, that these are the ones that were tried."""
    tried = [its for its in c.low if its["status"] != "skipped" and not its["base"]]
    names = re.split(r", | and | nor ", re.sub(r"^(neither|none of) ", "", none)) if none else [name] if name else []
    return not any(c.of(its).passes() for its in c.low) and (not names or sorted(names) == sorted(map(label, tried))) and ("predicted" in here) == (c.result["prediction"] is not None)


def _rounds(told: str) -> Claim:
    """A claim that a run is ``faster`` or ``slower``, with its interval."""

    def claim(c: Case, ratio: float, low: float | None = None, high: float | None = None, rounds: int | None = None) -> bool:
        median, ends = c.speed()[1] or 1.0, [] if low is None else [c.speedup["low"], c.speedup["high"]]
        if told == "slower":
            median, ends = 1 / median, [1 / end for end in reversed(ends)]
        known = low is None or same([low, high, rounds], [*ends, c.speedup["rounds"]])
        return c.speed()[0] == told and same(ratio, median) and known

    return claim


def _says(c: Case, claims: Mapping[str, Claim], text: str) -> bool:
    """A text without figures, by its beginning."""
    return any(text.startswith(words) and claim(c) for words, claim in claims.items())


def _constants(c: Case, constants: list[str], format: str) -> bool:
    known = {f"{gap['constant']:g} in {short(gap['op'])}": gap["constant"] for gap in c.run["gaps"] if gap["constant"] is not None}
    return c.format is not None and c.format.short == format and list(known) == constants and all(abs(value) > c.format.largest for value in known.values())


_GAIN: dict[str, Claim] = {
    "it is {ratio} as fast as fp32 ({low} – {high} in {rounds})": _rounds("faster"),
    "it is {ratio} as fast as fp32": _rounds("faster"),
    "it is {ratio} slower than fp32 on this machine ({low} – {high} in {rounds})": _rounds("slower"),
    "it is {ratio} slower than fp32 on this machine": _rounds("slower"),
    "it saves {share} of the peak memory": lambda c, share: same(share, 1 - (c.memory() or 0)) and share > 0,
    "it takes at least {share} more memory": lambda c, share: c.reference["process_memory_bytes"] < 4 << 20 and same(share, c.run["process_memory_bytes"] / (4 << 20) - 1),
    "it takes {share} more memory": lambda c, share: same(share, (c.memory() or 0) - 1) and share > 0,
    "this device does not accelerate {format}": lambda c, format: c.format is not None and c.format.short == format and c.result["environment"].get(f"{format}_accelerated") is False,
    "{text}": lambda c, text: _says(
        c,
        {
            "it is about as fast as fp32": lambda c: c.speed()[0] == "same",
            "its times varied too much": lambda c: c.speed()[0] == "noisy" and c.speedup.get("rounds", 2) > 1,
            "it was called too few times": lambda c: c.speed()[0] == "noisy" and c.speedup["rounds"] <= 1,
            "its calls are too short": lambda c: c.speed()[0] == "noisy" and min(its["latency_ms"] or 1.0 for its in (c.run, c.reference or c.run)) < 1.5,
            "it was not timed": lambda c: c.speed()[0] == "unknown",
            "it takes about as much memory": lambda c: 1 / 1.05 < (c.memory() or 0) < 1.05,
        },
        text,
    ),
}


def _how_known(c: Case, text: str) -> bool:
    measured = [its.get("measured") is not None for its in c.budget.get("modules", [])]
    return {
        "shares of the error": lambda: c.is_over and not c.disproved,
        "measured": lambda: any(measured),
        "estimated": lambda: not all(measured or [False]) and 2 * c.budget.get("spread", 0.0) < LEAST_SHARE,
        "no module stands out": lambda: not any(share > 0 for _, share, _ in c.shares()),
    }[text.removeprefix(", ")]()


_PASSES_TOO: dict[str, Claim] = {
    "passes too": lambda c: c.run["status"] == "ok",
    "{ratio} as fast as fp32": lambda c, ratio: c.speed()[0] == "faster" and same(ratio, c.speed()[1]),
    "saves {share} of the peak memory": lambda c, share: same(share, 1 - c.memory()) and share >= 0.1,
    "but some ops lack a kernel in another cast of the model": lambda c: any(c.of(run).no_kernel() for run in c.low),
    "but its weights are in {format}": lambda c, format: c.format is not None and c.format.short == format,
    "rounding loses {lost} of their updates": lambda c, lost: same(lost, c.first["lost_updates"]),
}


_SHARES: dict[str, Claim] = {
    "{share} {module} ({rounding}{op}{source})": lambda c, share, module, **largest: c.share(module, share, **largest),
    "{share} {module}": lambda c, share, module: c.share(module, share),
    "{share} {module} (in part the same)": lambda c, share, module: c.share(module, share),
    "the error of {module} cancels part of it": lambda c, module: c.whole(module) <= -0.1 and all(c.whole(module) <= its["share"] for its in c.budget["modules"]),
    "{share} choices that differ from fp32": lambda c, share: same(share, c.budget["decisions"]),
    "{share} not explained": lambda c, share: same(share, c.budget["unexplained"] - c.budget["decisions"]),
    "first order predicts {share} too much": lambda c, share: same(-share, c.budget["unexplained"] - c.budget["decisions"]),
    "spread over {modules}": lambda c, modules: modules == sum(share > 0 for _, share, _ in c.shares()) > 1,
    "the largest is {share} {module}": lambda c, share, module: any(name == module and same(share, own) for name, own, _ in c.shares()[:1]),
    "shares of the error {where}": lambda c, where: where == ("in eager mode" if c.run["backend"] != "eager" or c.run["compiled"] else "in the first call" if c.run["failed_call"] else "op by op") and not c.is_over,
    "which is only {error}": lambda c, error: same(error, c.budget["measured"] or 0.0),
    "estimated to within {chance}": lambda c, chance: same(chance, 2 * c.budget["spread"]) and chance >= LEAST_SHARE,
    "{text}": _how_known,
}
_FAILURE: dict[str, Claim] = {
    "error {error}{what} over the tolerance {limit}": _error,
    "{share} from {module}": lambda c, share, module: c.share(module, share) and not c.disproved and share >= LEAST_SHARE,
    "about {share} from {module}": lambda c, share, module: c.share(module, share) and not c.disproved and share >= LEAST_SHARE,
    "{decisions} from choices that differ from fp32": lambda c, decisions: same(decisions, c.budget["decisions"]) and c.is_over,
    "{share} of the values differ": lambda c, share: same(share, c.error) and c.rel_l2 is None,
    "tolerance {limit}": lambda c, limit: same(limit, c.run["tolerance"]) and (c.error or 0) > limit,
    "{ops} of {total} has no kernel: {names}": _no_kernels,
    "{ops} of {total} have no kernel: {names}": _no_kernels,
    "{ops} has no kernel: {names}": _no_kernels,
    "{ops} have no kernel: {names}": _no_kernels,
    "cannot be judged: {odd}": _odd,
    "it cannot be judged: {odd}": _odd,
    "runs": lambda c: c.run["status"] == "unjudged",
    "but {reason}": lambda c, reason: reason == "; ".join(c.run["notes"]) or "nothing to compare" in reason,
    "the constant {constants} is outside the range of {format}": _constants,
    "the constants {constants} are outside the range of {format}": _constants,
    "{what}": lambda c, what: _why(c, what) or what.startswith("NaN or Inf"),
    "first in {op}{phase} of {module}": _first_bad,
    "the first that reaches an output is from {op}{phase} of {module}": lambda c, **m: _first_bad(c, **m) and c.run["compared_output"] is not None,
    "NaN or Inf in the loss after step {step}": lambda c, step: c.first["losses"].index(None) == step,
    "NaN or Inf in the gradients of step {step} with every scale of GradScaler": lambda c, step: step == len(c.first["losses"]) + 1 and c.first["skipped_steps"] > 0,
    "the loss differs from that of fp32 before the first step{where}": _diverges,
    "loss diverges from step {step}{where}: {loss}": _diverges,
    "{beyond} above its limit": lambda c, beyond: _diverges(c, c.first["divergence"]["step"], _where(c), beyond=beyond) and c.first["divergence"]["value"] > c.first["divergence"]["limit"],
    "{beyond} below its limit": lambda c, beyond: _diverges(c, c.first["divergence"]["step"], _where(c), beyond=beyond) and c.first["divergence"]["value"] < c.first["divergence"]["limit"],
    "weights diverge from step {step}{where}: {distance} from those of fp32": _diverges,
    "{part} of the limit": lambda c, part: same(part, c.first["divergence"]["value"] / c.first["divergence"]["limit"]) and part > 1,
    "weights move too far from step {step}{where}: {moved} as far as in fp32": lambda c, moved, **m: _diverges(c, moved=moved, **m) and moved > c.first["divergence"]["limit"],
    "weights move too little from step {step}{where}: {moved} as far as in fp32": lambda c, moved, **m: _diverges(c, moved=moved, **m) and moved < c.first["divergence"]["limit"],
    "{name} moves too little from step {step}: {moved} as far as in fp32": lambda c, name, moved, step: _diverges(c, step, _where(c), moved=moved) and c.first["divergence"]["stands_still"] and name == c.first["divergence"]["parameter"],
    "limit {limit}": lambda c, limit: same(limit, c.first["divergence"]["limit"]),
    "passes with {ways}": _names_of_ways,
    "{text}": _why,
}


def _where(c: Case) -> str:
    parameter = c.first["divergence"]["parameter"]
    return f" ({parameter})" if parameter else ""


def _stays(c: Case, **figures: float | None) -> bool:
    setup, way = c.setup or {}, c.advised
    done = len(way["losses"]) - 1
    known = {"first": way["losses"][0], "last": way["losses"][-1], "fp32_first": setup["losses"][0], "fp32_last": setup["losses"][min(done, len(setup["losses"]) - 1)], "done": done, "distance": (way["distances"] or [None])[-1]}
    return way["status"] == "ok" and c.is_advised() and all(same(value, known[name]) for name, value in figures.items())


def _distance_limit(c: Case) -> float:
    return max(2.0 * (c.setup or {})["distances"][len(c.advised["distances"]) - 1], c.run["tolerance"] or 0.0)


def _distance_part(c: Case, part: float, seeds: int) -> bool:
    is_part = same(part, c.advised["distances"][-1] / _distance_limit(c)) and part <= 1.0 + 1e-9
    return is_part and seeds == (c.setup or {})["seeds"]


def integers_differ(c: Case, share: float) -> bool:
    """Whether that share of the integers of an output differs, beside floating tensors that decide."""
    return c.run["output_error"]["rel_l2"] is not None and same(share, c.run["output_error"]["mismatched"])


def _plain_lost(c: Case, lost: float) -> bool:
    return same(lost, c.way("plain").get("lost_updates"))


def total(tensors: Sequence[Raw], key: str = "lost") -> float:
    """The share of all updates of ``tensors`` together."""
    weighed = [(one[key] or 0.0, (one["updates"] if key == "lost" else 0) or one["elements"]) for one in tensors if key == "lost" or one[key] is not None]
    return sum(share * count for share, count in weighed) / (sum(count for _, count in weighed) or 1)


def lost_kinds(c: Case) -> dict[str, list[Raw]]:
    """Tensors by the words that name their kind."""
    words = {"weight": "weights", "buffer": "buffers", "optimizer state": "optimizer state", "average": "averages of weights"}
    kinds: dict[str, list[Raw]] = {}
    for one in c.run["training"]["lost_updates"]:
        key = f" {one['name'].rpartition(' · ')[2]}" if one["values"] == "optimizer state" else ""
        for name in {f"{words[one['values']]}{key}", f"{words[one['values']]}{key} of group {one['group']}"}:
            kinds.setdefault(name, []).append(one)
    return kinds


_TRAINING: dict[str, Claim] = {
    "it passes after {done}": _stays,
    "its loss goes from {first} to {last}": _stays,
    "in fp32 from {fp32_first} to {fp32_last}": _stays,
    "its weights end {distance} from those of fp32": _stays,
    "relative to how far these moved": lambda c: True,
    "{part} of the limit from {seeds} with other seeds": lambda c, **m: _distance_part(c, **m) and _distance_limit(c) != c.run["tolerance"],
    "{part} of the tolerance": lambda c, part: _distance_part(c, part, c.setup["seeds"]) and _distance_limit(c) == c.run["tolerance"],
    "no GradScaler is needed: {format} has the range of fp32": lambda c, format: c.format is not None and c.format.short == format == "bf16",
    "{underflow} of the elements of gradients underflow in the first step without it": lambda c, underflow: same(underflow, c.run["training"]["underflow"]),
    "with GradScaler from {scale}": lambda c, scale: same(scale, c.advised["initial_scale"]) and c.is_advised(),
    "{skipped} skipped": lambda c, skipped: skipped == c.advised["skipped_steps"],
    "no step skipped": lambda c: not c.advised["skipped_steps"],
    "it trains with {way}": lambda c, way: WAYS[c.advised["name"]] == way,
    "with {way}": lambda c, way: WAYS[(c.advised or c.first)["name"]] == way or WAYS[c.first["name"]] == way,
    "as it is": lambda c: True,
    "rounding loses {lost} of the updates of weights": _plain_lost,
    "no master weights are needed: rounding loses {lost} of the updates of weights": _plain_lost,
    "which a longer training may show": lambda c: c.way("plain")["lost_updates"] > 0,
    "weights and optimizer state take {state}": lambda c, state: state == c.advised["state_bytes"],
    "as in fp32": lambda c: c.reference is not None and c.of(c.reference).first["state_bytes"] == c.advised["state_bytes"],
    "in fp32 {fp32}": lambda c, fp32: c.reference is not None and c.of(c.reference).first["state_bytes"] == fp32,
    "{first} it does not pass": lambda c, first: c.first["status"] != "ok" and c.run["status"] != "ok",
    "{text}": lambda c, text: _says(
        c,
        {
            "which is not judged": lambda c: c.advised["name"] == "stochastic-rounding",
            "no gradient underflows": lambda c: c.run["training"]["underflow"] == 0,
            "it passes without GradScaler too": lambda c: c.way("plain").get("status") == "ok",
            "it passes without GradScaler": lambda c: c.advised["initial_scale"] is None,
            "the weights stay in fp32": lambda c: c.advised.get("lost_updates") is None and "autocast" in (c.run["base"] or c.run["precision"]),
            "stays in the range of fp32 runs": lambda c: c.advised["status"] == "ok" and c.advised["divergence"] is None,
        },
        text,
    ),
}


def _gradient(name: str) -> Claim:
    return lambda c, share, parameter: any(found["parameter"] == parameter and same(share, found[name]) for found in c.run["training"]["gradients"])


_GRADIENTS: dict[str, Claim] = {
    "{underflow} of the elements underflow": lambda c, underflow: same(underflow, c.run["training"]["underflow"]),
    "{share} of {parameter}": lambda c, **m: _gradient("underflow")(c, **m) or _gradient("overflow")(c, **m),
    "{share} from {parameter}": _gradient("error_share"),
    "of {more} more": lambda c, more: more + 2 in {sum(f["underflow"] >= 0.001 for f in c.run["training"]["gradients"]), sum(f["overflow"] > 0 for f in c.run["training"]["gradients"])},
    "error {error}": lambda c, error: same(error, c.run["training"]["gradient_error"]),
    "{text}": lambda c, text: text.strip() in ("(", ")") or (text == "elements overflow" and any(f["overflow"] for f in c.run["training"]["gradients"])),
}


def _scale(c: Case, scale: str | float | None = None, skips: int | None = None) -> bool:
    found = c.run["training"]["loss_scale"]
    value = found["scale"] if scale is None else 2.0 ** float(scale[2:]) if isinstance(scale, str) and scale.startswith("2^") else float(scale)
    return same(value, found["scale"]) and skips in (None, c.way("grad-scaler").get("skipped_steps"))


_LOSS_SCALE: dict[str, Claim] = {
    "keep the initial scale of GradScaler": lambda c: c.way("grad-scaler")["initial_scale"] == c.run["training"]["loss_scale"]["scale"],
    "the default scale of GradScaler will do": lambda c: c.way("grad-scaler")["status"] == "ok",
    "{scale} was tried": _scale,
    "start GradScaler at {scale}: its default skips {skips}": _scale,
    "start GradScaler at {scale}": _scale,
    "{scale}": _scale,
    "the largest 16-bit gradient of the backward pass is {largest}{where}": lambda c, largest, where: same(largest, c.run["training"]["loss_scale"]["largest"]),
    "{scaled} with this scale": lambda c, scaled: same(scaled, c.run["training"]["loss_scale"]["largest"] * c.run["training"]["loss_scale"]["scale"]),
    "of at most {limit}": lambda c, limit: c.format is not None and same(limit, c.format.largest),
    "{without} of the elements of gradients underflow without scaling": lambda c, without: same(without, c.run["training"]["loss_scale"]["underflow_unscaled"]),
    "{here} with it": lambda c, here: same(here, c.run["training"]["loss_scale"]["underflow"]),
    "tried in {done}: {skipped} skipped": lambda c, done, skipped: skipped == c.run["training"]["loss_scale"]["skipped_steps"],
    "tried in {done}: no step skipped": lambda c, done: c.run["training"]["loss_scale"]["skipped_steps"] == 0,
    "tried: no step skipped": lambda c: c.run["training"]["loss_scale"]["skipped_steps"] == 0,
    "tried: {skipped} skipped": lambda c, skipped: skipped == c.run["training"]["loss_scale"]["skipped_steps"],
    "{text}": lambda c, text: text.startswith("no element of the gradients underflows") and not c.run["training"]["loss_scale"]["underflow_unscaled"],
}
_LOST: dict[str, Claim] = {
    "{values} {lost}": lambda c, values, lost: values in lost_kinds(c) and same(lost, total(lost_kinds(c)[values])),
    " ({tensor})": lambda c, tensor: any(tensor in one["name"] for one in c.run["training"]["lost_updates"]),
    " (most in {tensor}, {most})": lambda c, tensor, most: any(tensor in one["name"] and same(most, one["lost"]) for one in c.run["training"]["lost_updates"]),
    "their weight decay {decay}": lambda c, decay: any(same(decay, total(its, "decay_lost")) for its in lost_kinds(c).values()),
}


def _bad_steps(c: Case) -> list[float]:
    return [check["nonfinite"] for check in c.run["training"]["epsilon"] if check["error"] is None and check["nonfinite"]]


_ZERO = "a step with gradients of zero makes {}{{share}} of the weights NaN or Inf with {{bad}}"


def _covered(c: Case, **figures: Any) -> bool:
    assumed = {op for run in c.runs for op in run["assumed_ops"]}
    known = {op for run in c.runs for op in run["known_ops"]} - assumed
    return all(same(value, {"known": len(known), "total": len(known) + len(assumed), "ops": sorted(assumed)}[name]) for name, value in figures.items())


def _least_batches(c: Case) -> int:
    reached = max((run["failed_batch"] or 0 for run in c.low), default=0) + 1
    return min((len(run["batches"]["statuses"]) if run["batches"] else 1 for run in c.low if run["status"] == "ok"), default=reached)


def _fp32_spread(c: Case) -> float:
    latency = (c.reference or {}).get("latency") or {}
    low, high = latency["quartiles_ms"]
    return (high - low) / 2 / latency["median_ms"]


def _waited(c: Case) -> float:
    return (c.result["timing_conditions"] or {}).get("waited") or 0.0


def _all_rounds(c: Case) -> set[int]:
    return {run["latency"]["speedup"]["rounds"] for run in c.runs if (run["latency"] or {}).get("speedup")}


def _equal(c: Case, what: str, batches: int) -> bool:
    """All integers of the output are those of fp32."""
    return c.run["status"] == "ok" and c.rel_l2 is None and c.error == 0 and (not what or c.run["compared_module"] in what) and batches == (len(c.run["batches"]["statuses"]) if c.run["batches"] else 1)


def _own_lines(c: Case, line: str, lines: int = 1) -> bool:
    """Lines of the user's own, of ops that fail or whose error matters, which no search for a patch has tried."""
    failing = [run for run in c.low if run["status"] not in ("ok", "unjudged", "skipped") or (run["further_inputs"] or {}).get("failed")]
    calls = [(its["source"], its["caller"]) for run in failing for its in run["gaps"]]
    calls += [at for run in failing for at in zip(run["op_calls"]["source"], run["op_calls"]["caller"], strict=True)]
    own = {source for source, caller in calls if source and caller is None}
    return c.result["fixing"] is None and line in own and lines <= len(own)


CLAIMS: dict[str, dict[str, Claim]] = {
    "verdict": {
        "Use {name}{kept}{predicted}": _verdict,
        "Stay in {fp32} for {prefer}; {name}{kept} {gain}": _verdict,
        "Stay in {fp32}: {name}{kept} {gain}": _verdict,
        "Stay in fp32: no low precision {here}": _all_fail,
        "Stay in fp32: {none} {here}": _all_fail,
        "Stay in fp32: {name} {fails}": lambda c, name, fails: _all_fail(c, fails, name=name),
        "{name}{kept} could not be judged": lambda c, name, kept: not any(run["status"] == "ok" and not (c.reference or {}).get("output_is_zero") for run in c.low),
        "{text}": lambda c, text: text == "Stay in fp32: nothing else could be run" and all(run["status"] == "skipped" for run in c.low),
    },
    "passes": {
        **{f"{said}: {figure}{{what}}, {{part}} of the tolerance {{limit}}, on {on}": _part for said in ("it passes", "it is predicted to pass") for figure in ("error {error}", "{error} of the values differ") for on in ("{batches} of inputs", "each of {batches} of inputs")},
        **{f"{said}: all values are equal{{what}}, on {on}": _equal for said in ("it passes", "it is predicted to pass") for on in ("{batches} of inputs", "each of {batches} of inputs")},
        "other inputs can exceed it: try --batches 8": lambda c: c.run["batches"] is None,
        "{share} of the integers or booleans in a tensor of the output differ, which is not judged": integers_differ,
        "it cannot be judged: {odd}": _odd,
        "{text}{reason}": lambda c, text, reason: text == "it " and reason == "; ".join(c.run["notes"]),
        **_FAILURE,
        "{text}": lambda c, text: text.strip() == "it",
    },
    "gain": _GAIN,
    "training": _TRAINING,
    "scaling": _TRAINING,
    "updates": _TRAINING,
    "state": _TRAINING,
    "other-way": {**_TRAINING, **_FAILURE, "{text}": lambda c, text: _why(c, text) or _TRAINING["{text}"](c, text)},
    "setup": {"setting it up took {seconds}": lambda c, seconds: same(seconds, c.run["setup_seconds"])},
    "kept": {"kept in fp32: {kept}": lambda c, kept: kept == c.run["keep_fp32"]},
    "not-chosen": _FAILURE,
    "failure": _FAILURE,
    "passing-ways": {"passes with {ways}": _names_of_ways, "with {way}": lambda c, way: WAYS[c.first["name"]] == way and c.run["status"] == "ok", "after {done} of {steps}": lambda c, done, steps: 0 < done == len(c.first["losses"]) - 1 < steps == c.setup["steps"]},
    "also-faster": _PASSES_TOO,
    "also-smaller": _PASSES_TOO,
    "margin": {"near its limit: {part} of the tolerance": lambda c, part: same(part, (c.error or 0) / c.run["tolerance"]) and 0.5 <= part <= 1},
    "compared-module": {"compared by the output of {module}": lambda c, module: c.run["compared_module"] == module},
    "failed-while-timed": {"{text}": lambda c, text: text in c.run["notes"]},
    "shares": _SHARES,
    "unknown-cause": {
        **{
            f"first order explains only {{share}} of the error of {of}": lambda c, share, of=of: same(share, max(0.0, 1 - c.budget["unexplained"])) and share < 0.5 and bool(c.run["failed_call"]) == (of != "the run")
            for of in ("the run", "the first call")
        },
        "{share} choices that differ from fp32": lambda c, share: same(share, c.budget["decisions"]),
        **{
            f"first order predicts {{ratio}} the error of {of}": lambda c, ratio, of=of: same(ratio, c.budget["predicted"] / c.budget["measured"]) and ratio > 1 and bool(c.run["failed_call"]) == (of != "the run")
            for of in ("the run", "the first call")
        },
        "where the error comes from is not known: {reason}": lambda c, reason: c.budget["predicted"] is None and reason in (c.budget["reason"], "it was not computed"),
    },
    "ablation": {
        "with {kept} in fp32 the error is {after} instead of {before} and it passes": lambda c, **m: _kept(c, **m, ends=("ok",)),
        "with {kept} in fp32 the error is {after} instead of {before}": lambda c, **m: _kept(c, **m, ends=("inaccurate",)) and not c.disproved,
        "keeping {kept} in fp32 does not help: the error is {after} instead of {before}": lambda c, **m: _kept(c, **m, ends=("ok", "inaccurate")) and c.disproved and c.ablation["status"] != "ok",
        "with {kept} in fp32 the output is finite": lambda c, kept: _kept(c, kept, c.ablation["rel_l2"], c.rel_l2, ("ok", "inaccurate")),
        "error {after} and it passes": lambda c, after: same(after, c.ablation["rel_l2"]) and c.ablation["status"] == "ok",
        "error {after}": lambda c, after: same(after, c.ablation["rel_l2"]) and c.ablation["status"] != "ok",
        "with {kept} in fp32 the output has NaN or Inf": lambda c, kept: kept == c.ablation["keep_fp32"] and c.ablation["status"] == "nonfinite",
        "with {kept} in fp32 the run ends as {status}": lambda c, kept, status: kept == c.ablation["keep_fp32"] and status == c.ablation["status"],
    },
    "way-out": {
        "passes with {kept} in fp32, error {after}": lambda c, **m: c.result["recommendation"] is None and _kept(c, **m, before=c.rel_l2, ends=("ok",)),
        **{f"lowprec-check {command} searches for the fewest modules": lambda c: c.result["plan"] is None for command in ("plan", "scan --plan")},
    },
    "no-plan": {
        f"{{outcome}} ({{trials}}){longer}": lambda c, outcome, trials: c.result["plan"] is None and any((its["base"], its["trials"], its["outcome"]) == (c.run["precision"], trials, outcome) for its in c.result["attempts"])
        for longer in ("", "; lowprec-check plan searches longer")
    },
    "patch": {
        "no plan was found": lambda c: c.result["plan"] is None,
        "the plan keeps {kept} in fp32": lambda c, kept: kept == len(c.result["plan"]["keep_fp32"]),
        **{
            f"a patch of your code at {where} was not tried: lowprec-check fix TARGET{more} searches for one": lambda c, line, lines=1, plan=bool(more): _own_lines(c, line, lines) and plan == (c.result["plan"] is not None)
            for where in ("{line}", "{lines}, first {line},")
            for more in ("", " --plan")
        },
        "and shows the size of both": lambda c: c.result["plan"] is not None,
    },
    "plan-passes": {
        "with {kept} in fp32 (the plan) it passes": lambda c, kept: c.plan is not None and kept == c.plan["keep_fp32"],
        "error {error}": lambda c, error: c.plan is not None and same(error, c.of(c.plan).rel_l2),
    },
    "rescued": {
        "{calls} failed and succeeded with inputs in fp32": lambda c, calls: calls == _rescued(c) - _rescued(c, "dtype-mismatch", "no-backend-kernel", "numeric-failure"),
        "{calls} failed and succeeded with inputs of one dtype": lambda c, calls: calls == _rescued(c, "dtype-mismatch"),
        "{calls} failed and succeeded on the CPU in fp32": lambda c, calls: calls == _rescued(c, "no-backend-kernel"),
        "{calls} failed and succeeded with the values that fp32 has there": lambda c, calls: calls == _rescued(c, "numeric-failure"),
        "the model then ran to its end": lambda c: c.run["complete"],
        "the model then ran on, but not to its end": lambda c: not c.run["complete"],
    },
    "tiny-output": {"{text}": _odd},
    "scope": {
        "{text}": lambda c, text: text == "only the forward pass was run" and c.setup is None,
        "{steps} of {optimizer}, loss: {loss}{batches}": lambda c, steps, optimizer, loss, batches: c.setup is not None
        and steps == c.setup["steps"]
        and optimizer == c.setup["optimizer"] + " (default)" * c.setup["default_optimizer"]
        and loss == c.setup["loss"] + " (default)" * c.setup["default_loss"]
        and batches == ("" if steps == 1 else f", {c.setup['batches']} batches in turn" if c.setup["batches"] else f", {'a new batch' if c.setup['new_batches'] else 'the same batch'} each step"),
    },
    "seeds": {
        "judged by {seeds} from other seeds": lambda c, seeds: c.setup is not None and seeds == c.setup["seeds"],
        " (other {varied})": lambda c, varied: c.setup is not None and varied == c.setup["varied"] and {*varied} - {"random draws"} != set(),
        " ({varied} only)": lambda c, varied: c.setup is not None and varied == c.setup["varied"] and {*varied} <= {"random draws", "1 % noise on the initial weights"},
        "{steps} cannot tell whether the loss falls: one that does not change is within the limits": lambda c, steps: c.setup is not None and steps == c.setup["steps"] and c.setup["limit_low"][-1] <= 0 <= c.setup["limit_high"][-1],
        "{text}": lambda c, text: c.setup is not None and (text == "after the last step" if c.setup["seeds"] else text.startswith("no fp32 run from another seed finished")),
    },
    "inputs": {
        "{batches} of inputs": lambda c, batches: batches == _least_batches(c),
        "{text}": lambda c, text: _says(c, {"two fp32 runs differ": lambda c: c.reference is not None and c.reference["nondeterministic"], "the model draws random numbers": lambda c: any(run["random"] for run in c.runs)}, text),
    },
    "weights": {"{text}": lambda c, text: text.startswith({"random": "random weights:", "scaled": "random weights, scaled", "loaded": "weights loaded"}[c.result["model"]["weights"]])},
    "note": {"{text}": lambda c, text: text in c.result["model"]["notes"]},
    "prediction": {
        "Predicted: {missing}. Its kernels: {kernels}{policy}": lambda c, missing, kernels, policy: kernels == c.result["prediction"]["kernels"] and (c.result["prediction"]["name"] in missing or c.result["prediction"]["torch"] in missing or "CPU" in missing),
        "the catalog knows {known} of {total} in 16 bits": _covered,
        "the others are assumed to run: {ops}": _covered,
        "{text}": lambda c, text: text == "no op ran in 16 bits" and _covered(c, total=0),
    },
    "rounds": {
        "times of {rounds}": lambda c, rounds: {rounds} == _all_rounds(c),
        "times of {least} – {rounds}": lambda c, least, rounds: (least, rounds) == (min(_all_rounds(c)), max(_all_rounds(c))) and least < rounds,
        "in which fp32 varied by ±{spread}": lambda c, spread: same(spread, _fp32_spread(c)) and spread <= 1,
        "in which fp32 varied by {spread}": lambda c, spread: same(spread, _fp32_spread(c)) and spread < 0.005,
        "in which half of the calls of fp32 took from {low} to {high}": lambda c, low, high: [low, high] == c.reference["latency"]["quartiles_ms"] and high > 2 * c.reference["latency_ms"],
        "no run was compared with fp32 in more than one round": lambda c: _all_rounds(c) == {1},
        "{text}": lambda c, text: not _all_rounds(c) and c.reference is not None and text == ("times were not compared in rounds" if c.reference["latency_ms"] is not None else "no times were taken"),
    },
    "other-programs": {
        "other programs used these cores while times were taken: the model's threads waited {share} of the time": lambda c, share: same(share, _waited(c)) and share > 0.1,
        "the processor's speed changed by a factor of {factor} while times were taken": lambda c, factor: same(factor, c.result["timing_conditions"]["speed_change"]) and factor > 1.2,
    },
    "one-core": {"{text}": lambda c, text: text.startswith("compared with fp32 on one core") and c.run["latency"]["speedup"]["one_core"]},
    "slower-than": {"slower than {best} in the same rounds": lambda c, best: best in c.run["latency"]["slower_than"]},
    "noisy": {"speed cannot be told: {why}": lambda c, why: c.speed()[0] == "noisy" and (why == "it was compared in one round only") == (c.speedup.get("rounds") == 1)},
    "launch-bound": {
        "launch-bound: {host} of {call} on the host, {device} on the device: faster kernels hardly help; CUDA graphs, torch.compile or a larger batch do": lambda c, host, call, device: same(call, c.run["latency"]["median_ms"]) and same(device, c.run["latency"]["device_ms"]) and same(host, min(call, c.run["latency"]["host_ms"])) and host >= 0.9 * call and device <= 0.8 * call,
    },
    "partly-analyzed": {
        "analyzed op by op only in part: {reason}": lambda c, reason: not c.run["complete"] and reason.rstrip(".") in f"{c.run['incomplete_because']} {(c.run['stopped_by'] or {}).get('type')}: {(c.run['stopped_by'] or {}).get('message')} the reason is not known (no message)",
        "{text}": lambda c, text: _says(c, {"the op-by-op analysis changed its output": lambda c: c.run["perturbed"], "not analyzed op by op": lambda c: not c.run["op_calls"]["op"]}, text),
    },
    "one-call": {
        "judged by one call, which took over 20 times as long as fp32's: {format} is not accelerated here (--thorough calls it again)": lambda c, format: c.run["judged_by_one_call"] and c.result["environment"][f"{format}_accelerated"] is False and not c.result["options"]["thorough"],
        "speed is that of {calls}, not of rounds": lambda c, calls: calls == c.run["calls"] == c.run["latency"]["samples"] and not c.run["latency"]["speedup"]["rounds"],
        "speed is that of the fastest of {calls}, not of rounds": lambda c, calls: calls == c.run["calls"] > c.run["latency"]["samples"] and not c.run["latency"]["speedup"]["rounds"],
        "{text}": lambda c, text: c.speed()[0] == {"it is too slow to call it often": "slower", "too few to compare it with fp32's": "noisy"}[text],
    },
    "emulated": {"computed in fp32 and rounded in the analysis, as the kernels are too slow or crash: {ops}": lambda c, ops: ops == sorted(c.run["emulated"])},
    "not-withheld": {"no call needed {spec}, which --without-kernel names": lambda c, spec: spec in c.result["options"]["without_kernel"] and not any(gap["op"].startswith(spec.partition(":")[0] + ".") for run in c.runs for gap in run["gaps"])},
    "not-called": {"{count} whose parameters no op read: {names}": lambda c, count, names: count == len(names) and all(any(f"{name}.".startswith(f"{other}.") for other in run["uncalled_modules"]) for name in names for run in c.runs if run["complete"] and run["op_calls"]["op"])},
    "gradients": _GRADIENTS,
    "loss-scale": _LOSS_SCALE,
    "lost-updates": _LOST,
    "zero-gradients": {
        _ZERO.format(""): lambda c, share, bad: same(share, max(_bad_steps(c))) and len(set(_bad_steps(c))) == 1,
        _ZERO.format("up to "): lambda c, share, bad: same(share, max(_bad_steps(c))) and len(set(_bad_steps(c))) > 1,
        "none with {fine}": lambda c, fine: any(not check["nonfinite"] for check in c.run["training"]["epsilon"] if check["error"] is None),
    },
}
"""By kind, then by clause."""


# -- sentences taken apart


_FIELD = re.compile(r"\{(\w+?)(?:_\d+)*(?::[^}]*)?\}")
_BETWEEN = ("); ", "; ", ", ", ": ", " (", "), ", ")", " and ", " ", "")


def clauses(template: str, names: Sequence[str]) -> list[tuple[str, list[str]]] | None:
    """The clauses of a template, each with the names of its figures in it; ``None`` if a part of it is no known clause."""
    fields = [found[0][1:-1].partition(":")[0] for found in _FIELD.finditer(template)]
    words = _FIELD.sub(lambda found: f"{{{found[1]}}}", template)
    known = sorted(names, key=len, reverse=True)

    def rest(start: int, used: int) -> list[tuple[str, list[str]]] | None:
        if start == len(words):
            return []
        for clause in known:
            if not words.startswith(clause, start) or not clause:
                continue
            count = len(_FIELD.findall(clause))
            for between in _BETWEEN:
                end = start + len(clause)
                if end == len(words) or words.startswith(between, end):
                    after = rest(min(len(words), end + len(between)), used + count)
                    if after is not None:
                        return [(clause, fields[used : used + count]), *after]
        return None

    return rest(0, 0)


def problems(kind: str, template: str, figures: Raw, case: Case) -> list[str]:
    """What is false in a sentence about one run, or about the whole scan."""
    claims = CLAIMS.get(kind)
    if claims is None:
        return [f"no predicate for the kind {kind}"]
    parts = clauses(template, list(claims))
    if parts is None:
        return [f"no predicate for {template!r}"]
    wrong = []
    for clause, names in parts:
        plain = [re.sub(r"(_\d+)+$", "", name) for name in names]
        wanted = {field: figures[name] for field, name in zip(_FIELD.findall(clause), names, strict=True)}
        assert len(set(plain)) == len(plain), clause
        try:
            right = claims[clause](case, **wanted)
        except (KeyError, TypeError, ValueError, IndexError, AssertionError, ZeroDivisionError) as error:
            right, wanted = False, {**wanted, "raised": repr(error)}
        if not right:
            wrong.append(f"{clause} {wanted}")
    return wrong


# -- what is printed, against the figures

_TOKENS = {
    "error": r"infinite|0|\d(?:\.\d)?e[+-]\d+",
    "limit": r"\d(?:\.\d+)?e[+-]\d+",
    "share": r"(?:[<>] )?−?[\d,.]+(?: %)?|–",
    "percent": r"(?:[<>] )?−?[\d,.]+(?: %)?|–",
    "number": r"[\d,]+",
    "times": r"[\d,.]+(?: times)?",
    "seconds": r"[\d.,]+(?: s)?",
    "ms": r"[\d.,e+-]+(?: ms)?|–",
    "bytes": r"[\d.,]+(?: (?:GiB|MiB|KiB|bytes?))?|–",
    "loss": r"Inf/NaN|-?[\d.e+-]+",
}
_UNITS = {"%": 0.01, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def reads(token: str, value: float | None, unit: str = "", side: int = 0) -> bool:
    """Whether ``value`` is what the printed ``token`` says, rounded; of a range, at or inside of its end on one ``side``."""
    if value is None:
        return token in ("infinite", "–", "Inf/NaN")
    if token in ("infinite", "Inf/NaN"):
        return side == -1 or math.isinf(value)
    found = re.fullmatch(r"([<>] )?(−|-)?([\d,]*\.?\d*)(?:e([+-]\d+))?(?: ?(%|[KMG]iB|times|ms|s|bytes?))?", token.strip())
    if not found:
        return False
    scale = _UNITS.get(found[5] or unit, 1) * 10.0 ** int(found[4] or 0)
    number = float(found[3].replace(",", "")) * (-1 if found[2] else 1)
    if found[1]:
        return ((abs(value) + (side == 1) > 0 and abs(value) < number * scale) or side == -1) if found[1] == "< " else (value > number * scale or side == 1)
    digits = len(found[3].partition(".")[2])
    significant = len(found[3].replace(".", "").replace(",", "").lstrip("0"))
    half = 0.5000001 * 10.0**-digits * scale
    if not digits and significant == 1 and not found[4] and abs(value) < 1e15:
        half = max(half, 0.0)
    inside = {-1: value >= number * scale - half, 1: value <= number * scale + half, 0: abs(value - number * scale) <= half}
    return inside[side]


def misread(template: str, figures: Sequence[Raw], text: str) -> list[str]:
    """What ``text`` shows of the figures of several runs that is not true of each."""
    pattern, names = "", []
    for part in re.split(r"(\{[^{}]+\})", template.replace("{{", "\0").replace("}}", "\1")):
        field = re.fullmatch(r"\{(\w+):([^}]+)\}", part)
        if not field:
            pattern += re.escape(part.replace("\0", "{").replace("\1", "}"))
            continue
        name, kind, noun = field[1], *(field[2].partition(" ")[::2])
        if kind == "count":
            token = r"[\d,]+ (?:– [\d,]+ )?" + _noun(noun)
        elif kind == "of":
            token = r"[\d,]+(?: – [\d,]+)?(?: of [\d,]+(?: – [\d,]+)?)? " + _noun(noun) + r"(?: \([^)]*\))?"
        elif kind in ("op", "module", "text", "names", "modules", "ops"):
            pattern += re.escape(_names(figures[0][name], kind))
            continue
        else:
            one = _TOKENS.get(kind, r"-?[\d.,]+(?:e[+-]\d+)?")
            token = f"(?:{one})(?: – (?:{one}))?"
        pattern += f"({token})"
        names.append((name, kind, noun))
    found = re.fullmatch(pattern, text, re.S)
    if not found:
        return [f"the text is not what the template says: {text!r}"]
    wrong = []
    for (name, kind, noun), token in zip(names, found.groups(), strict=True):
        for each in figures:
            bare = re.sub(rf" {_noun(noun)}(?= \(|$)", "", token) if noun else token
            if not _shows(bare, each[name], kind):
                wrong.append(f"{name}: {token!r} is not {each[name]!r}")
    return wrong


def _noun(noun: str) -> str:
    return re.escape(noun) + "(?:es|s)?"


def _shows(token: str, value: Any, kind: str) -> bool:
    if kind == "of":
        numbers, _, rest = token.partition(" of ")
        if not rest:
            return _shows(numbers, value[0], "number")
        total, _, share = rest.partition(" (")
        right = _shows(numbers, value[0], "number") and _shows(total, value[1], "number")
        return right and (not share or _shows(share.rstrip(")"), value[0] / value[1], "percent"))
    low, dash, high = token.partition(" – ")
    if not dash:
        return reads(token, value)
    unit = high.rpartition(" ")[2] if " " in high else ""
    return (value is None and reads(high, None)) or (value is not None and reads(low, value, unit, -1) and reads(high, value, unit, 1))


def _names(value: Any, kind: str) -> str:
    """A figure that is no number, as a sentence shows it."""

    def module(path: str) -> str:
        return "the model itself" if not path else f'"{path}"' if path.replace(".", "").isdigit() else path

    if kind in ("op", "module", "text"):
        return {"op": short, "module": module}.get(kind, str)(value)
    shown = [{"ops": short, "modules": module}.get(kind, str)(name) for name in value]
    most = 4 if kind == "ops" else 3
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
