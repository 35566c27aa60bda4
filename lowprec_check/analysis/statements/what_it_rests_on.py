"""What the conclusions of a scan rest on, and what it did not see."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.run_summary import candidates, reference_of
from lowprec_check.analysis.speed import CHANGED, cores_were_used, speed
from lowprec_check.analysis.statements.kinds import Made, Said, per_run, per_scan
from lowprec_check.catalog.versions import release_of
from lowprec_check.schema.measures import Latency
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, plain, say

# -- inputs and weights


@per_scan("scope", "inputs", evidence="declared")
def scope(result: ScanResult) -> Iterator[Made]:
    """What was run: the forward pass, or steps of training."""
    setup = result.training
    if setup is None:
        yield plain("only the forward pass was run")
        return
    default = {True: " (default)", False: ""}
    batches = [] if setup.steps == 1 else ["a new batch each step" if setup.new_batches else "the same batch each step"]
    yield say(
        "{steps:count step} of {optimizer:text}, loss: {loss:text}{batches:text}",
        steps=setup.steps,
        optimizer=setup.optimizer + default[setup.default_optimizer],
        loss=setup.loss + default[setup.default_loss],
        batches=f", {batches[0]}" if batches else "",
    )


@per_scan("seeds", "inputs", disproof="more steps, or the whole training")
def seeds(result: ScanResult) -> Iterator[Made]:
    """What a run in low precision is judged by."""
    setup = result.training
    if setup is None:
        return
    if setup.seeds:
        yield say("judged by {seeds:count fp32 run} from other seeds, after the last step", seeds=setup.seeds)
    else:
        yield Said(plain("no fp32 run from another seed finished, so the loss is not judged"), "warn")


@per_scan("inputs", "inputs", disproof="a scan with other inputs, --batches")
def inputs(result: ScanResult) -> Iterator[Made]:
    """On how many inputs the statuses rest."""
    passing = [run for run in candidates(result.runs) if run.status == "ok"]
    batches = min((len(run.batches.statuses) if run.batches else 1 for run in passing), default=1)
    if result.training is None:
        yield say("{batches:count batch} of inputs", batches=batches)
    reference = reference_of(result.runs)
    if reference is not None and reference.nondeterministic:
        yield Said(plain("two fp32 runs differ, so the tolerances are wider"), "warn")
    if any(run.random for run in result.runs):
        yield plain("the model draws random numbers; all runs draw the same")


@per_scan("weights", "weights", evidence="declared", disproof="a scan with trained weights, --weights")
def weights(result: ScanResult) -> Iterator[Made]:
    """Where the weights come from, if that is known."""
    words = {
        "random": "random weights: trained weights can have other errors and overflows",
        "scaled": "random weights, scaled where the signal vanishes or explodes: trained weights can have other errors and overflows",
        "loaded": "weights loaded from a file",
    }.get(result.model.weights)
    if words is not None:
        yield Said(plain(words), "none" if result.model.weights == "loaded" else "warn")


@per_scan("note", "inputs", evidence="declared")
def notes(result: ScanResult) -> Iterator[Made]:
    """What to know of the model and its inputs."""
    for note in result.model.notes:
        yield Said(plain(note), "warn")


# -- predictions


@per_scan("prediction", "prediction", evidence="predicted", disproof="the same scan on the device")
def prediction(result: ScanResult) -> Iterator[Made]:
    """That nothing ran on the device, what is known of its kernels, and how much of the model that covers."""
    device = result.prediction
    if device is None:
        return
    if device.name != "cpu":
        missing = f"nothing ran on {device.name}"
    elif device.torch != release_of(str(result.environment["torch"])):
        missing = f"nothing ran with torch {device.torch}"
    else:
        missing = "the 16-bit kernels of the CPU were emulated"
    policy = f"; its autocast policy: torch {device.autocast}" if device.autocast != device.torch else ""
    assumed = sorted({op for run in result.runs for op in run.assumed_ops})
    known = {op for run in result.runs for op in run.known_ops} - {*assumed}
    covered = plain("no op ran in 16 bits")
    if known or assumed:
        covered = say(
            "the catalog knows {known:number} of {total:count op} in 16 bits",
            known=len(known),
            total=len(known) + len(assumed),
        )
    others = say(", the others are assumed to run: {ops:ops}", ops=assumed) if assumed else None
    head = say(
        "Predicted: {missing:text}. Its kernels: {kernels:text}{policy:text}",
        missing=missing,
        kernels=device.kernels,
        policy=policy,
    )
    yield Said(chained(head, chained(covered, others, between=""), between="; "), "warn")


# -- times


def spread_of(latency: Latency) -> float:
    """Half the distance of the quartiles, relative to the median."""
    low, high = latency.quartiles_ms
    return (high - low) / 2 / latency.median_ms if latency.median_ms else 0.0


@per_scan("rounds", "times", disproof="another scan on a quiet machine")
def rounds(result: ScanResult) -> Iterator[Made]:
    """In how many rounds the runs were timed in turns with fp32, and how far the calls of fp32 varied."""
    reference = reference_of(result.runs)
    if result.prediction is not None or reference is None:
        return
    counts = [run.latency.speedup.rounds for run in result.runs if run.latency and run.latency.speedup]
    if not counts:
        timed = reference.latency_ms is not None
        yield plain("times were not compared in rounds" if timed else "no times were taken")
        return
    least, most = min(counts), max(counts)
    found = say("times of {rounds:count round}", rounds=most)
    if least < most:
        found = say("times of {least:number} – {rounds:count round}", least=least, rounds=most)
    words = "in which fp32 varied by ±{spread:share}"
    spread = say(words, spread=spread_of(reference.latency)) if reference.latency is not None else None
    yield chained(found, spread, between=", ")


@per_scan("other-programs", "times", disproof="another scan on a quiet machine")
def other_programs(result: ScanResult) -> Iterator[Made]:
    """What disturbed the times of all runs."""
    found = result.timing_conditions
    if found is None:
        return
    if cores_were_used(found):
        words = "other programs used these cores while times were taken: the model's threads waited {share:share} of the time"
        yield Said(say(words, share=found.waited or 0.0), "warn")
    elif (found.speed_change or 1.0) > CHANGED:
        words = "the processor's speed changed by a factor of {factor:figure} while times were taken"
        yield Said(say(words, factor=found.speed_change or 1.0), "warn")


@per_run("one-core", "times")
def one_core(run: Run, result: ScanResult) -> Made:
    """A run that was compared with fp32 on one core, where other programs disturb less."""
    is_alone = (
        run.latency is not None
        and run.timing is None
        and run.latency.speedup is not None
        and run.latency.speedup.one_core
    )
    return (
        Said(plain("compared with fp32 on one core, since other programs used the others"), "warn")
        if is_alone
        else None
    )


@per_run("noisy", "times", disproof="another scan on a quiet machine")
def noisy(run: Run, result: ScanResult) -> Made:
    """A run whose speed cannot be told."""
    if run.status == "skipped" or run.is_reference or run.latency is None or speed(run, result.runs).told != "noisy":
        return None
    return Said(plain("its speed cannot be told: calls are too short, or varied too much"), "warn")


# -- what was not seen


@per_run("partly-analyzed", "analysis")
def partly_analyzed(run: Run, result: ScanResult) -> Made:
    """How far the op-by-op analysis got, and whether it changed the output."""
    if run.is_reference or not run.is_eager or run.status == "skipped":
        return None
    if not run.complete:
        reason = run.incomplete_because or (
            run.stopped_by.text if run.stopped_by is not None else "the reason is not known"
        )
        return Said(say("analyzed op by op only in part: {reason:text}", reason=reason.rstrip(".")), "warn")
    if run.perturbed:
        return Said(plain("the op-by-op analysis changed its output"), "warn")
    return None if len(run.op_calls) else plain("not analyzed op by op")


@per_run("emulated", "analysis")
def emulated(run: Run, result: ScanResult) -> Made:
    """Ops that the analysis computed in fp32 and rounded, as their kernels are too slow or crash."""
    ops = sorted(run.emulated)
    return (
        say("computed in fp32 and rounded in the analysis, as the kernels are too slow or crash: {ops:ops}", ops=ops)
        if ops
        else None
    )


@per_scan("not-called", "not run")
def not_called(result: ScanResult) -> Iterator[Made]:
    """Modules whose parameters no op read."""
    low = candidates(result.runs)
    never = next((run.uncalled_modules for run in low if run.complete and len(run.op_calls)), [])
    if never:
        yield say("{count:count module} whose parameters no op read: {names:modules}", count=len(never), names=never)
