"""What to do: the verdict, what it rests on, and why the other runs were not chosen."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from lowprec_check.analysis.recommend import (
    SAME_MEMORY,
    action,
    changes_nothing,
    loses_time,
    missing_runs,
    recommended_run,
)
from lowprec_check.analysis.run_summary import (
    CLOSE,
    candidates,
    compared_peaks,
    degenerate_output,
    differing_integers,
    fails_elsewhere,
    is_cast,
    is_too_small,
    label,
    lacked_time,
    memory_ratio,
    missing_kernels,
    part_of_tolerance,
    passes_all,
    reference_of,
    saved_memory,
    saves_memory,
)
from lowprec_check.analysis.speed import Speed, in_turns, is_faster, speed
from lowprec_check.analysis.statements.kinds import Detail, Made, Said, kinds, per_run, per_scan, said, warn_if
from lowprec_check.analysis.statements.status import NEAR, on_further, passes_but, why
from lowprec_check.analysis.training_status import drawback, is_timed, part_of_limit, remedies, way_text
from lowprec_check.schema.axes import kept_in
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.module_paths import number_of
from lowprec_check.schema.plan import Plan
from lowprec_check.schema.precisions import PRECISIONS, low_precisions
from lowprec_check.schema.registry import choices
from lowprec_check.schema.run_key import PLAN
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import (
    Figure,
    Sentence,
    Statement,
    Tone,
    bytes_figure,
    chained,
    counted,
    plain,
    say,
    say_if,
)

_TOO_HIGH = 0.5  # an upper bound from few inputs, which tells nothing


def verdict(result: ScanResult) -> str:
    """The verdict alone: ``Use half``, ``Stay in fp32``."""
    return said(result, "verdict")


@per_scan("verdict", "advice")
def _verdict(result: ScanResult) -> Iterator[Made]:
    """What to do, in a few words."""
    best, run, advised = result.recommendation, recommended_run(result), action(result)
    # ``After 2 of 5 runs``, if the scan made no more.
    missing, planned = missing_runs(result), len(result.runs)
    early = say_if(missing, "After {made:number} of {planned:count run}", made=planned - missing, planned=planned)
    if best is None:
        ablated = [run.ablation.status for run in result.runs if run.ablation is not None]
        yield Said(chained(early, _no_pass(result), between=": "), "warn" if "ok" in ablated else "bad")
        return
    kept = ""
    if best.kept:
        kept = f" with {in_fp32(best, result.model.modules, result.plan)}"
    named: dict[str, Figure] = {"name": f"{best.label}{way_text(best.way)}", "kept": kept}
    # a run that barely passes is named with a warning, one without a known gain without praise
    tone: Tone = "good" if advised == "use" else "none"
    part = 0.0
    if run is not None and result.training is not None:
        part = part_of_limit(run, best.way, result.training)
    elif run is not None:
        part = part_of_tolerance(run)
    if part >= CLOSE and advised != "stay":
        tone = "warn"
    if advised == "not judged":
        words = say("{name:text}{kept:text} could not be judged", **named)
    elif advised == "use":
        words = say("Use {name:text}{kept:text}", **named)
    elif advised == "passes":
        words = _passes(best, run, result, named)
    else:
        words = _stay(best, run, result, named)
    yield Said(chained(early, words, between=": "), tone)


def _passes(best: Recommendation, run: Run | None, result: ScanResult, named: dict[str, Figure]) -> Sentence:
    """That the recommended run passes, what memory it saves, and what is not known of its speed."""
    unknown, saved = what_is_unknown(result), None
    if run is not None and is_timed(run, best.way):
        saved = saved_memory(run, result.runs)
    if saved is None:
        return say("{name:text}{kept:text} passes ({unknown:text})", **named, unknown=unknown)
    peak, fp32 = saved
    words = "{name:text}{kept:text} passes and saves {share:share} of the memory ({fp32:bytes} → {peak:bytes})"
    figures: dict[str, Figure] = {"share": 1 - peak / fp32, "fp32": fp32, "peak": peak, "unknown": unknown}
    return say(f"{words}; {{unknown:text}}", **named, **figures)


def what_is_unknown(result: ScanResult) -> str:
    """Why a recommended run is only said to pass, in a few words: what is known of its speed."""
    best, run = result.recommendation, recommended_run(result)
    if result.evidence == "predicted":
        return "predicted"
    if best is None or run is None or not is_timed(run, best.way):
        return "not timed"
    against_fp32 = speed(run, result.runs)
    if against_fp32.told == "unknown":
        return "not timed"
    return "speed unclear" if against_fp32.told == "noisy" else against_fp32.text()


def _stay(best: Recommendation, run: Run | None, result: ScanResult, named: dict[str, Figure]) -> Sentence:
    """That fp32 is better, and what is gained otherwise."""
    fp32 = "fp32" if any(other.is_low for other in result.runs) else "eager fp32"
    stay, gain = "Stay in {fp32:text}: ", "was not measured to be faster"
    prefer: dict[str, Figure] = {}
    if best.worth == "nothing":
        gain = _gains_nothing(run, result)
    elif best.worth != "unknown":  # what it gains is not what the user prefers
        stay, prefer["prefer"] = "Stay in {fp32:text} for {prefer:text}; ", best.prefer
        gain = best.gain if best.gain.startswith("saves") else f"is {best.gain}"
    return say(f"{stay}{{name:text}}{{kept:text}} {{gain:text}}", fp32=fp32, **prefer, **named, gain=gain)


def _gains_nothing(run: Run | None, result: ScanResult) -> str:
    """What is said of the recommended run, if it is not worth using."""
    if run is None:
        return "is not faster"
    against_fp32, ratio = speed(run, result.runs), memory_ratio(run, result.runs)
    # a little slower is "not faster": noise does not change the verdict
    slower = against_fp32.told == "slower" and loses_time(run, result.runs)
    if not slower and changes_nothing(run):
        return "computes nothing in 16 bits"
    is_slower, factor = "is not faster", against_fp32.factor()
    if slower:
        is_slower = f"is {factor.text} slower" if factor else "is slower"
    if ratio is None:
        return is_slower
    if ratio >= SAME_MEMORY:
        return f"{is_slower} and takes {_memory(ratio, result).text}"
    peaks = compared_peaks(run, result.runs)
    if ratio <= 1 / SAME_MEMORY and peaks is not None:
        return f"{is_slower} and saves only {bytes_figure(peaks[1] - peaks[0])}"
    return f"{is_slower} and saves no memory"


def _memory(ratio: float, result: ScanResult) -> Sentence:
    """``50 % less memory``, of the ratio to that of fp32."""
    fp32 = reference_of(result.runs)
    if ratio <= 1 / SAME_MEMORY:
        return say("{share:share} less memory", share=1 - ratio)
    if ratio < SAME_MEMORY:
        return plain("about as much memory")
    least = "at least " if fp32 is not None and is_too_small(fp32.process_memory_bytes) else ""
    return say(f"{least}{{share:share}} more memory", share=ratio - 1)


def _no_pass(result: ScanResult) -> Sentence:
    tried = [run for run in candidates(result.runs) if run.base is None and run.status != "skipped"]
    # what was emulated is never recommended, whether it passes or not
    tried = [run for run in tried if run.without_kernels is None]
    tried = [run for run in tried if run.is_low] or tried
    late = [label(run) for run in tried if lacked_time(run)]
    stay = "Stay in fp32 or raise --budget: " if late else "Stay in fp32: "
    # what was not run yet may pass
    if missing_runs(result):
        stay = ""
    if not tried:
        emulated = any(run.without_kernels is not None for run in result.runs)
        return plain(f"{stay}{'the rest is emulated' if emulated else 'nothing else could be run'}")
    where, names = "", [label(run) for run in tried]
    if any(map(fails_elsewhere, [*tried, *(run for run in result.runs if run.precision == PLAN)])):
        where = " on every input"
    here, fails = f"passed{where} here", f"did not pass{where} here"
    if result.evidence == "predicted":
        here, fails = f"is predicted to pass{where}", f"is predicted not to pass{where}"
    if late == names:
        here, fails, late = f"ended in time{where}", f"did not end in time{where}", []
    in_time = None
    if late:
        in_time = say("{late:text} did not end in time", late=choices(late, "and"))
    # Names are listed only where they are not all that there are.
    if {precision.name for precision in low_precisions()} <= {run.precision for run in tried}:
        return chained(say(f"{stay}no low precision {{here:text}}", here=here), in_time)
    if len(tried) == 1:
        return say(f"{stay}{{name:text}} {{fails:text}}", name=names[0], fails=fails)
    none = f"none of {choices(names, 'and')}"
    if len(tried) == 2:
        none = f"neither {choices(names, 'nor')}"
    return chained(say(f"{stay}{{none:text}} {{here:text}}", none=none, here=here), in_time)


def in_fp32(keeps: Plan | Recommendation, modules: int, plan: Plan | None) -> str:
    """``timestep and 2 of 6 modules in fp32`` of 7 ``modules``, the model included; a ``plan``
    names all.
    """
    kept = [*keeps.keep_fp32_inputs]
    count = number_of(keeps.keep_fp32, plan.modules if plan is not None else ())
    if 0 < count < modules:
        kept.append(f"{count} of {counted(modules - 1, 'module')}")
    elif count:
        kept.append(counted(count, "module"))
    base = keeps.base if isinstance(keeps, Plan) else keeps.precision
    return f"{choices(kept, 'and')} in {kept_in(keeps.backend, base)}"


# -- what the verdict rests on


@per_run("passes", "advice", basis=10)
def judged(run: Run, result: ScanResult) -> Made:
    """On how many inputs the recommended run passes, and how near it comes to its limit."""
    best = result.recommendation
    if best is None or run is not recommended_run(result) or not result.is_forward:
        return None
    # After "Stay in fp32" a reader does not know what passes.
    name = f"{best.label} " if best.stay_in_fp32 else ""
    odd = degenerate_output(run, result.runs)
    if odd is not None:
        return Said(say("{name:text}cannot be judged: {odd:text}", name=name, odd=odd), "warn")
    if run.status != "ok":
        return Said(chained(plain(name), why(run), between=""), "warn")
    passes_ = "passes" if run.evidence == "measured" else "predicted to pass"
    further = run.further_inputs
    tried = further.tried if further is not None else 0
    inputs = run.batch_count + tried
    on = f"{{name:text}}{passes_} on {{inputs:number}} of {{inputs:count input}}"
    passed = say(on, name=name, inputs=inputs)
    if run.distance is None or not run.tolerance:
        return passed
    part, is_near = part_of_tolerance(run), part_of_tolerance(run) >= NEAR
    if not part:
        equal = "all values are equal"
        if run.by_meaning is not None:  # boxes may be in another order
            equal = run.by_meaning.text
        return chained(passed, plain(equal), between=", ")
    limit = "tolerance" if run.by_meaning is None else f"limit of {run.by_meaning.measure}"
    worst = f"worst {{part:share}} of the {limit}" if inputs > 1 else f"at {{part:share}} of the {limit}"
    bound = None
    if is_near and further is not None and tried and further.high < _TOO_HIGH:
        bound = say("at most {high:share} of such inputs fail (95 % confidence)", high=further.high)
    elif is_near:
        bound = plain("other inputs can exceed it: try --batches 8")
    near = chained(passed, say(worst, part=part), between=", ")
    return warn_if(is_near, chained(near, bound, differing_integers(run)))


@per_run("judged-by", "advice", basis=11, detail="more")
def judged_by(run: Run, result: ScanResult) -> Made:
    """The error of the recommended run, and on what inputs its status rests."""
    is_judged = run is recommended_run(result) and run.status == "ok" and result.is_forward
    if not is_judged or run.distance is None or not run.tolerance or degenerate_output(run, result.runs):
        return None
    what = f" of the output of {run.compared_module}" if run.compared_module else ""
    batches = run.batch_count
    on = "{batches:count batch} of inputs" if batches == 1 else "each of {batches:count batch} of inputs"
    if run.by_meaning is not None:
        return chained(plain(f"judged by {run.by_meaning.measure}: {run.by_meaning.text}"), on_further(run))
    kind = "{error:percent} of the values differ" if run.rel_l2 is None else "error {error:error}"
    words = f"{kind}{{what:text}}, tolerance {{limit:limit}}, on {on}"
    error = say(words, batches=batches, error=run.distance, what=what, limit=run.tolerance)
    return chained(error, on_further(run))


@per_run("gain", "advice", basis=5)
def gain(run: Run, result: ScanResult) -> Made:
    """How fast the recommended run is and how much memory it takes, against fp32, as far as the
    verdict does not say it.
    """
    best, advised = result.recommendation, action(result)
    if run is not recommended_run(result) or best is None or result.evidence == "predicted":
        return None
    if not is_timed(run, best.way):
        return None
    # Without support of the device, no speed is to be expected.
    against_fp32, short = speed(run, result.runs), run.format.short if run.format else ""
    is_slow = against_fp32.told != "faster" and result.environment.get(f"{short}_accelerated") is False
    slow = say_if(is_slow, "this device does not accelerate {format:text}", format=short)
    how_fast: Sentence | None = _speed(against_fp32, run)
    ratio = memory_ratio(run, result.runs)
    memory = _memory(ratio, result) if ratio is not None else None
    if advised == "stay" and best.worth == "nothing":
        how_fast, memory = None, None
    elif advised == "stay" and best.worth == "smaller":
        memory = None
        if against_fp32.told == "slower":
            how_fast = chained(say("{name:text} is", name=best.label), how_fast, between=" ")
    elif advised == "stay" and best.worth == "faster":
        how_fast = None
    elif advised == "passes":
        # the verdict says what it saves, and that the speed is unclear
        how_fast = _why_unclear(against_fp32, run, " to tell its speed") if against_fp32.told == "noisy" else None
        memory = None if saves_memory(run, result.runs) else memory
    if not any((how_fast, memory, slow)):
        return None
    if against_fp32.told in ("noisy", "unknown"):  # what is known comes first
        how_fast, memory = memory, how_fast
    return chained(how_fast, memory, slow, between=", ")


@per_run("interval", "advice", basis=6, detail="more")
def interval(run: Run, result: ScanResult) -> Made:
    """The interval of the speed of the recommended run."""
    in_rounds = in_turns(run) if run is recommended_run(result) else None
    if in_rounds is None or in_rounds.rounds <= 1:
        return None
    words = "{low:three} – {high:three} times as fast as fp32 in {rounds:count round}"
    return say(words, low=in_rounds.low, high=in_rounds.high, rounds=in_rounds.rounds)


LONG_SETUP = 1.0  # seconds of set-up that are worth naming


@per_run("setup", "advice", basis=80)
def setup(run: Run, result: ScanResult) -> Made:
    """How long the recommended run took to set up, if that is long."""
    is_long = run is recommended_run(result) and (run.setup_seconds or 0.0) >= LONG_SETUP
    return say_if(is_long, "setting it up took {seconds:seconds}", seconds=run.setup_seconds)


def basis(said: Sequence[Statement], details: Collection[Detail] = ("first", "more")) -> str:
    """What the recommendation rests on, as one text, from the statements of a result, of kinds with
    these ``details``.
    """
    places = {name: kind.basis for name, kind in kinds().items() if kind.basis is not None}
    rests_on = [each for each in said if each.kind in places and kinds()[each.kind].detail in details]
    rests_on.sort(key=lambda statement: places[statement.kind])
    return sentences(statement.text for statement in rests_on)


def sentences(texts: Iterable[str]) -> str:
    """Sentences with capitals, but for names of precisions, and full stops."""
    ended = [text if text.endswith((".", "…")) else f"{text}." for text in texts]
    names = PRECISIONS.names()
    return " ".join(text if text.startswith(tuple(names)) else text[:1].upper() + text[1:] for text in ended)


def _speed(against_fp32: Speed, run: Run) -> Sentence:
    if against_fp32.told in ("faster", "slower", "same"):
        return plain(against_fp32.text())
    if against_fp32.told != "noisy":
        return plain("not timed")
    unclear = _why_unclear(against_fp32, run)
    if against_fp32.on_gpu is not None:
        return unclear
    return say("speed not known ({why:text})", why=unclear.text)


def _why_unclear(against_fp32: Speed, run: Run, end: str = "") -> Sentence:
    """Why no speed can be told from times, with an ``end``, or what is known instead."""
    if against_fp32.on_gpu is not None:
        return say("the GPU needs {part:figure} of fp32's time", part=1 / against_fp32.on_gpu)
    in_rounds = in_turns(run)
    if against_fp32.ratio is not None and math.isinf(against_fp32.high):
        return plain(f"its calls are too short{end}")
    if in_rounds is not None and in_rounds.rounds <= 1:
        return plain(f"it was called too few times{end}")
    return plain(f"its times varied too much{end}")


# -- the others


@per_run("not-chosen", "advice")
def not_chosen(run: Run, result: ScanResult) -> Made:
    """Why a run that was not recommended fails."""
    best = recommended_run(result)
    if result.recommendation is not None and (best is None or run is best):
        return None
    fails = passes_but(run)
    like_best = best is not None and run.status == best.status and fails is None
    # What was not tried, and what fails like the recommended run, needs no reason.
    unknown = run.status == "skipped" or (run.precision == PLAN and fails is None)
    if run not in candidates(result.runs) or unknown or like_best:
        return None
    if run.status == "ok":
        if fails is None:
            return None
        return Said(fails, "bad")
    odd, passing = degenerate_output(run, result.runs), remedies(run)
    reason = say_if(odd, "it cannot be judged: {odd:text}", odd=odd) or why(run)
    if passing:
        reason = chained(reason, say("passes with {ways:names}", ways=passing))
    return Said(reason, "bad")


@per_run("also-faster", "advice", detail="more")
def also_faster(run: Run, result: ScanResult) -> Made:
    """A run that passes, and is faster than fp32 and the recommended one by more than noise."""
    best, against_fp32 = recommended_run(result), speed(run, result.runs)
    if best is None or run is best or run.is_reference or against_fp32.told != "faster":
        return None
    if result.recommendation is not None and not is_timed(best, result.recommendation.way):
        return None
    if not passes_all(run, result.runs) or not is_faster(against_fp32, speed(best, result.runs)):
        return None
    factor = against_fp32.factor()
    faster = plain("passes too, faster than fp32")
    if factor is not None:
        faster = chained(say("passes too,"), factor, say("as fast as fp32"), between=" ")
    return _passes_too(faster, run, best, result)


@per_run("also-smaller", "advice", detail="more")
def also_smaller(run: Run, result: ScanResult) -> Made:
    """A run that passes and takes less memory, where the recommended one gains nothing."""
    best, ratio = recommended_run(result), memory_ratio(run, result.runs)
    gains = result.recommendation is None or result.recommendation.worth != "nothing"
    if best is None or gains or run is best or ratio is None or not saves_memory(run, result.runs):
        return None
    if not passes_all(run, result.runs):
        return None
    return _passes_too(say("passes too, saves {share:share} of the peak memory", share=1 - ratio), run, best, result)


def _passes_too(gain: Sentence, run: Run, best: Run, result: ScanResult) -> Sentence:
    """What ``run`` gains, and why ``best`` is named nevertheless."""
    lacking = any(missing_kernels(other) for other in result.runs if is_cast(other))
    is_unsafe = lacking and is_cast(run) and not is_cast(best)
    # A cast of the model may meet ops without a kernel on other paths.
    unsafe = say_if(is_unsafe, "{text:text}", text="but some ops lack a kernel in another cast of the model")
    return chained(gain, unsafe, drawback(run), between=", ")


@per_run("slower-than", "advice", detail="more")
def slower_than(run: Run, result: ScanResult) -> Made:
    """A run that passes and was slower than the recommended one in the same rounds."""
    best = recommended_run(result)
    if best is None or run.latency is None or not passes_all(run, result.runs):
        return None
    name, slower = best.key.label, "slower than {best:text} in the same rounds"
    return say_if(name in run.latency.slower_than, slower, best=name)
