"""What times rest on: rounds, what disturbed or ended them, and why a speed cannot be told."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.run_summary import HOPELESS, reference_of
from lowprec_check.analysis.speed import (
    CHANGED,
    cores_were_used,
    failure_while_timed,
    in_turns,
    launch_bound,
    speed,
    told_on_device,
)
from lowprec_check.analysis.statements.kinds import Made, Said, per_run, per_scan
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, plain, say, say_if


@per_run("failed-while-timed", "times", after="compared-module")
def while_timed(run: Run, result: ScanResult) -> Made:
    """A run that passed, and failed when its times were taken."""
    note, counts = failure_while_timed(run), run.status == "ok" or run.is_reference
    if not note or not counts or reference_of(result.runs) is None:
        return None
    return plain(note)


@per_run("launch-bound", "times", after="compared-module")
def launched_too_slowly(run: Run, result: ScanResult) -> Made:
    """A run whose accelerator waits for the host, so that 16 bits cannot make it faster."""
    if run.latency is None or not launch_bound(run):
        return None
    hint = "your Python limits it: use CUDA graphs, torch.compile or a larger batch"
    ratio = told_on_device(run.latency)
    if ratio is not None:
        return Said(say(f"the GPU needs {{part:figure}} of fp32's time, {hint}", part=1 / ratio), "warn")
    call, device = run.latency.median_ms, run.latency.device_ms or 0.0
    return Said(say(f"the GPU needs {{device:ms}} of a call of {{call:ms}}, {hint}", device=device, call=call), "warn")


@per_scan("rounds", "times", after="not-called", detail="more")
def rounds(result: ScanResult) -> Iterator[Made]:
    """In how many rounds runs were timed in turns with fp32, and how far fp32's calls varied."""
    reference = reference_of(result.runs)
    if result.prediction is not None or reference is None:
        return
    speedups = (run.latency.speedup for run in result.runs if run.latency)
    counts = [speedup.rounds for speedup in speedups if speedup and speedup.rounds]
    if not counts:
        conditions = result.timing_conditions
        if conditions is not None and conditions.reason is not None and reference.latency_ms is not None:
            yield plain(f"times were not compared in rounds: {conditions.reason}")
        elif reference.latency_ms is not None:
            yield plain("times were not compared in rounds")
        elif reference.timing is not None:
            yield plain(f"times were taken in the {reference.timing.scenario} scenario only")
        else:
            yield plain("no times were taken")
        return
    least, most, fp32 = min(counts), max(counts), reference.latency
    if most == 1:
        yield plain("each run was timed once beside fp32, which is too little to compare")
        return
    times = say("times of {rounds:count round}", rounds=most)
    if least < most:
        times = say("times of {least:number} – {rounds:count round}", least=least, rounds=most)
    if fp32 is None:
        yield times
        return
    # How far the middle half of the calls of fp32 are apart: half of that is meant by ±.
    low, high = fp32.quartiles_ms
    spread = (high - low) / 2 / (fp32.median_ms or 1.0)
    varied = say(f"in which fp32 varied by {'±' if spread >= 0.005 else ''}{{spread:share}}", spread=spread)
    if high > 2 * fp32.median_ms:  # half their distance could be more than the median
        varied = say("in which half of the calls of fp32 took from {low:ms} to {high:ms}", low=low, high=high)
    yield chained(times, varied, between=", ")


@per_scan("other-programs", "times", after="not-called", detail="more")
def other_programs(result: ScanResult) -> Iterator[Made]:
    """What disturbed the times of all runs."""
    conditions = result.timing_conditions
    if conditions is None:
        return
    speed_change = conditions.speed_change or 1.0
    if cores_were_used(conditions):
        words = "other programs used these cores while times were taken: the model's threads waited"
        yield Said(say(f"{words} {{share:share}} of the time", share=conditions.waited or 0.0), "warn")
    elif speed_change > CHANGED:
        words = "the processor's speed changed by a factor of {factor:figure} while times were taken"
        yield Said(say(words, factor=speed_change), "warn")


@per_run("one-core", "times", after="not-called", detail="more")
def one_core(run: Run, result: ScanResult) -> Made:
    """A run that was compared with fp32 on one core, where other programs disturb less."""
    speedup = in_turns(run)
    if speedup is None or not speedup.one_core:
        return None
    return Said(plain("compared with fp32 on one core, since other programs used the others"), "warn")


@per_run("one-call", "times", after="not-called", detail="more")
def one_call(run: Run, result: ScanResult) -> Made:
    """A run whose speed is that of one call, or the fastest of a few, instead of rounds."""
    speedup = in_turns(run)
    if run.judged_by_one_call and run.format is not None:
        hint = "{format:text} is not accelerated here (--thorough calls it again)"
        ratio, over = (run.one_call_ratio, "") if run.one_call_ratio else (HOPELESS, "over ")
        words = f"judged by one call, which took {over}{{ratio:times}} as long as fp32's: {hint}"
        return Said(say(words, ratio=ratio, format=run.format.short), "warn")
    if speedup is None or speedup.rounds:
        return None
    fastest = "the fastest of " if run.calls > 1 else ""
    call = say(f"speed is that of {fastest}{{calls:count call}}, not of rounds", calls=run.calls)
    reasons = {"slower": "it is too slow to call it often", "noisy": "too few to compare it with fp32's"}
    why = reasons.get(speed(run, result.runs).told)
    if run.status in ("error", "crashed", "timeout"):
        why = "a run that fails is not called again"
    return Said(chained(call, say_if(why, "{text:text}", text=why), between=": "), "warn")


@per_run("noisy", "times", after="not-called", detail="more")
def noisy(run: Run, result: ScanResult) -> Made:
    """A run whose speed cannot be told."""
    if run.status == "skipped" or run.is_reference or run.latency is None or speed(run, result.runs).told != "noisy":
        return None
    # These say why, or what can be told.
    if one_call(run, result) is not None or launched_too_slowly(run, result) is not None:
        return None
    on_gpu = speed(run, result.runs).on_gpu
    if on_gpu is not None:
        told = "the GPU needs {part:figure} of fp32's time; whole calls varied too much to compare them"
        return Said(say(told, part=1 / on_gpu), "warn")
    is_once = run.latency.speedup is not None and run.latency.speedup.rounds == 1
    why = "it was compared in one round only" if is_once else "calls are too short, or varied too much"
    return Said(say("speed cannot be told: {why:text}", why=why), "warn")
