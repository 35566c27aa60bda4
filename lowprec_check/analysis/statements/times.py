"""What the times of a scan rest on: rounds, what disturbed them, and why a speed cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.run_summary import reference_of
from lowprec_check.analysis.speed import CHANGED, cores_were_used, speed
from lowprec_check.analysis.statements.kinds import Made, Said, per_run, per_scan
from lowprec_check.schema.measures import Latency
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, plain, say


def _variation(fp32: Latency) -> Sentence:
    """How far the middle half of the calls of fp32 are apart."""
    low, high = fp32.quartiles_ms
    if high > 2 * fp32.median_ms:  # half their distance could be more than the median
        return say("in which half of the calls of fp32 took from {low:ms} to {high:ms}", low=low, high=high)
    spread = (high - low) / 2 / (fp32.median_ms or 1.0)
    return say(f"in which fp32 varied by {'±' if spread >= 0.005 else ''}{{spread:share}}", spread=spread)


@per_scan("rounds", "times")
def rounds(result: ScanResult) -> Iterator[Made]:
    """In how many rounds the runs were timed in turns with fp32, and how far the calls of fp32
    varied.
    """
    reference = reference_of(result.runs)
    if result.prediction is not None or reference is None:
        return
    speedups = (run.latency.speedup for run in result.runs if run.latency)
    counts = [found.rounds for found in speedups if found and found.rounds]
    if not counts:
        taken = "times were not compared in rounds" if reference.latency_ms is not None else "no times were taken"
        if reference.latency_ms is None and reference.timing is not None:
            taken = f"times were taken in the {reference.timing.scenario} scenario only"
        yield plain(taken)
        return
    least, most = min(counts), max(counts)
    if most == 1:
        yield plain("no run was compared with fp32 in more than one round")
        return
    found = say("times of {rounds:count round}", rounds=most)
    if least < most:
        found = say("times of {least:number} – {rounds:count round}", least=least, rounds=most)
    yield chained(found, _variation(reference.latency) if reference.latency is not None else None, between=", ")


@per_scan("other-programs", "times")
def other_programs(result: ScanResult) -> Iterator[Made]:
    """What disturbed the times of all runs."""
    found = result.timing_conditions
    if found is not None and cores_were_used(found):
        words = "other programs used these cores while times were taken: the model's threads waited {share:share} of the time"
        yield Said(say(words, share=found.waited or 0.0), "warn")
    elif found is not None and (found.speed_change or 1.0) > CHANGED:
        words = "the processor's speed changed by a factor of {factor:figure} while times were taken"
        yield Said(say(words, factor=found.speed_change or 1.0), "warn")


@per_run("one-core", "times")
def one_core(run: Run, result: ScanResult) -> Made:
    """A run that was compared with fp32 on one core, where other programs disturb less."""
    found = run.latency.speedup if run.latency is not None and run.timing is None else None
    words = "compared with fp32 on one core, since other programs used the others"
    if found is not None and found.one_core:
        return Said(plain(words), "warn")
    return None


@per_run("one-call", "times")
def one_call(run: Run, result: ScanResult) -> Made:
    """A run whose speed is that of one call, or of the fastest of few, and not of rounds, as these
    showed that it is far slower than fp32.
    """
    found = run.latency.speedup if run.latency is not None and run.timing is None else None
    if run.judged_by_one_call and run.format is not None:
        words = "judged by one call, which took over 20 times as long as fp32's: {format:text} is not accelerated here (--thorough calls it again)"
        return Said(say(words, format=run.format.short), "warn")
    if found is None or found.rounds:
        return None
    words = f"speed is that of {'the fastest of ' if run.calls > 1 else ''}{{calls:count call}}, not of rounds"
    reasons = {"slower": "it is too slow to call it often", "noisy": "too few to compare it with fp32's"}
    why = reasons.get(speed(run, result.runs).told)
    if run.status in ("error", "crashed", "timeout"):
        why = "a run that fails is not called again"
    return Said(chained(say(words, calls=run.calls), plain(why) if why else None, between=": "), "warn")


@per_run("noisy", "times")
def noisy(run: Run, result: ScanResult) -> Made:
    """A run whose speed cannot be told."""
    if run.status == "skipped" or run.is_reference or run.latency is None or speed(run, result.runs).told != "noisy":
        return None
    if one_call(run, result) is not None:  # which says why
        return None
    once = run.latency.speedup is not None and run.latency.speedup.rounds == 1
    why = "it was compared in one round only" if once else "calls are too short, or varied too much"
    return Said(say("speed cannot be told: {why:text}", why=why), "warn")
