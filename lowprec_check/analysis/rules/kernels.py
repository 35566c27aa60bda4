"""LP1xx: ops that fail, run elsewhere, or are slow in a low precision."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator

from lowprec_check.analysis.rules.registry import FAILED_HERE, RAN_HERE, Finding, catalog_fix, line_of, low_runs, rule
from lowprec_check.analysis.rules.relevance import ADVICE, advice_for, faster, in_phase_of, tried_runs
from lowprec_check.analysis.run_summary import failing_gaps, fails_elsewhere, on_which_call, passes_all, reference_of
from lowprec_check.analysis.speed import cores_were_used
from lowprec_check.analysis.training_status import first_way, unscales_fp16
from lowprec_check.schema.axes import DEVICES, device_type
from lowprec_check.schema.op_calls import PRODUCTS, fallback_of, seconds_killed
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Gap, GapKind, Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, plain, say, say_if


def from_gaps(
    result: ScanResult,
    kind: GapKind,
    help: str | Callable[[Gap, Run], str],
    observed: Callable[[Gap, Run], Sentence | None] = lambda _gap, _run: None,
) -> Iterator[Finding]:
    """A finding for each gap of ``kind``; ``help`` is about one in the forward pass. What was
    ``observed`` there is added to its message.
    """
    for run in low_runs(result):
        fails_by = set()
        if run.status not in ("ok", "unjudged", "inaccurate", "nonfinite"):
            fails_by = {id(gap) for gap in failing_gaps(run)}
        caught = say("the model catches this exception and continues")
        if run.backend != EAGER:  # gaps are those of eager mode
            caught = say("only in eager mode, the {backend:text} backend runs it", backend=run.backend)
        for gap in run.gaps:
            if gap.kind != kind:
                continue
            harmless = id(gap) not in fails_by
            advice, continued = _advice(gap, run, result, help), caught if harmless else None
            if gap.layer == "backend":
                advice = f"{'compute it in fp32' if harmless else 'use another backend'}, or use other ops here"
            if gap.layer == "backend" or gap.is_between_casts:
                continued = None
            # A predicted run rests on the catalog, or on code that ran here.
            rests_on = gap.predicted_by
            if run.evidence == "predicted" and rests_on is None:
                rests_on = RAN_HERE if gap.layer == "function" else FAILED_HERE
            more, error = chained(observed(gap, run), continued), gap.message
            if more.template:
                error = error.removesuffix(".")
            message = in_phase_of(gap.phase, say("{error:text}", error=error))
            if more.template:
                message = chained(message, more)
            finding = Finding(message, run, gap.module, gap.op, line_of(gap, result), help=advice, calls=gap.calls)
            yield finding._replace(severity="note" if harmless else None, rests_on=rests_on)


def _advice(gap: Gap, run: Run, result: ScanResult, help: str | Callable[[Gap, Run], str]) -> str:
    """What to do about ``gap``, and the release that fixes it."""
    if gap.custom_function is not None and run.is_autocast:
        # Its ``backward``, which runs without autocast, gets other dtypes than in fp32.
        function, device = gap.custom_function, device_type(run.device)
        forward = f'@torch.amp.custom_fwd(device_type="{device}", cast_inputs=torch.float32)'
        backward = f'@torch.amp.custom_bwd(device_type="{device}")'
        return f"decorate {function}.forward with {forward} and {function}.backward with {backward}"
    advice = help if isinstance(help, str) else help(gap, run)
    by_values = {other.place for other in run.gaps if other.kind == "numeric-failure"}
    if gap.phase in ADVICE and gap.custom_function is None:
        advice = advice_for(gap.phase, run, advice) + or_autocast(gap, run, result)
    elif gap.kind != "numeric-failure" and gap.place in by_values:
        advice = "compute it and its inputs in fp32" + or_autocast(gap, run, result)
    return "; ".join(filter(None, (advice, catalog_fix(gap, run, result))))


def back(gap: Gap, result: str = "the result back") -> str:
    """What to cast back after an op in fp32: most complex results have no 16-bit dtype."""
    return "back the real values computed from its result" if gap.gives_complex else result


def or_autocast(gap: Gap, run: Run, result: ScanResult) -> str:
    """``; it runs under autocast`` in this scan, if possible in the run's own dtype."""
    if run.is_autocast:
        return ""
    tried = [other for other in tried_runs(result) if other.is_autocast]
    # Those that run the op without help, and fail for no other reason.
    reaching = []
    for other in tried:
        # A function at the line of the op may be what calls it.
        callers = [failed for failed in other.gaps if failed.layer == "function"]
        stops = any(failed.op == gap.op for failed in other.gaps)
        stops |= (gap.module, gap.source) in [(failed.module, failed.source) for failed in callers]
        raises = other.status == "error" and not other.gaps  # what it raises is no missing kernel
        is_wrong = other.status in ("inaccurate", "nonfinite") or raises or fails_elsewhere(other)
        if not stops and not is_wrong and (other.complete or gap.op in other.op_calls.op):
            reaching.append(other)
    reaching = [other for other in reaching if passes_all(other, result.runs)] or reaching
    if any(other.format == run.format for other in reaching):
        return "; it runs under autocast"
    if reaching:
        return f"; it runs in {reaching[0].key.label}"
    return ""


SLOW_RATIO = 5.0  # times as long as in fp32
SLOW_MS = 5.0
SHORT_MS = 0.1  # of a shorter call, what surrounds the kernel is too large a part to compare two of them
WAIT_MS = 100.0  # how long a call with threads may wait for busy cores: over 80 ms was observed


@rule("LP101", "missing-kernel", "error")
def missing_kernel(result: ScanResult) -> Iterator[Finding]:
    """PyTorch has no kernel of this op for this dtype on this device.

    Observed: the op failed on its low-precision inputs and succeeded on the same inputs converted
    to fp32. The scan continued with the fp32 result, rounded to the dtype, so one scan finds all
    such ops. `onnxruntime` does so itself. It is a note if no run fails by it: the model catches
    the exception, or ONNX Runtime computes it in fp32.

    Predicted, for a device that is not here: the catalog says so. For CUDA it was seen on a GPU;
    for XPU it is declared in the sources of its kernels, or reported in a known issue for releases
    before. `-v` and `rests_on` name the row.

    Usual causes: ops with kernels for fp32 and fp64 only, such as matrix decompositions and
    `torch.cdist` on the CPU.

    What to do: use autocast if it passes in the same scan. If the code is not yours, keep the
    module that contains the op in fp32: `lowprec-check plan` prints the code. Otherwise compute
    this op in fp32 and cast the result back, under autocast in a block `with
    torch.autocast(x.device.type, enabled=False):`

        # before
        y = torch.linalg.cholesky(x)
        # after
        y = torch.linalg.cholesky(x.float()).to(x.dtype)
    """

    def advice(gap: Gap, run: Run) -> str:
        # autocast would cast the inputs of a product to 16 bits again
        outside = ", without autocast," if run.is_autocast and PRODUCTS.search(gap.op) else ""
        return f"compute it in fp32{outside} and cast {back(gap, 'back')}{or_autocast(gap, run, result)}"

    yield from from_gaps(result, "missing-kernel", advice)


@rule("LP102", "unsupported-dtype", "error")
def unsupported_dtype(result: ScanResult) -> Iterator[Finding]:
    """The function rejects the dtype before it calls a kernel.

    Observed: the call failed in the function itself, and succeeded with its inputs converted to
    fp32. The scan finds these in a second op-by-op analysis, which intercepts torch's functions as
    well as its ops. Some modules leave their fused fast path then; `function_mode` is true in the
    saved JSON.

    Usual causes: a dtype check in the function, as in `torch.fft.*`, `torch.quantile` and
    `torch.linalg.lstsq`.

    What to do: call the function on fp32 inputs and cast the result back; if it is complex, real
    values made of it:

        # before
        y = torch.quantile(x, 0.9)
        # after
        y = torch.quantile(x.float(), 0.9).to(x.dtype)
    """
    yield from from_gaps(result, "unsupported-dtype", lambda gap, _: f"call it on x.float() and cast {back(gap)}")


@rule("LP104", "no-backend-kernel", "error")
def no_backend_kernel(result: ScanResult) -> Iterator[Finding]:
    """The op has no kernel on this device, not even in fp32.

    Observed: the op failed on the device in fp32 too, and succeeded on the CPU. Or `openvino` or
    `onnxruntime` lacks it.

    Predicted, for a device that is not here: the op has no kernel registered for the device in the
    sources of that release of torch, and is not on the list of ops that fall back to the CPU
    without being asked (LP105).

    What to do: let PyTorch run such ops on the CPU by setting an environment variable before Python
    starts: `PYTORCH_ENABLE_XPU_FALLBACK=1` on XPU, `PYTORCH_ENABLE_MPS_FALLBACK=1` on MPS. Each
    call then copies its inputs to the CPU and its result back. Or do it in the code:

        # before
        y = torch.linalg.eigvals(x)
        # after
        y = torch.linalg.eigvals(x.cpu()).to(x.device)
    """

    def advice(_: Gap, run: Run) -> str:
        device = DEVICES.find(device_type(run.device))
        if device and device.fallback_variable:
            return f"run it on the CPU, or set {device.fallback_variable}=1"
        return "run it on the CPU"

    yield from from_gaps(result, "no-backend-kernel", advice)


@rule("LP105", "silent-fallback", "warning")
def silent_fallback(result: ScanResult) -> Iterator[Finding]:
    """The op runs on the CPU instead of the device.

    Observed: PyTorch warned that the device has no kernel for the op and that it runs on the CPU.
    PyTorch warns once, but every such call waits until the device is idle, copies its inputs to the
    CPU and its result back.

    Predicted, for a device that is not here: the sources of its kernels list the op among those
    that fall back. The finding has the number of calls in one forward pass, and the bytes that they
    copy to the CPU. No time is predicted.

    Usual causes: XPU runs about 30 ops this way without being asked; for others,
    `PYTORCH_ENABLE_XPU_FALLBACK=1` or `PYTORCH_ENABLE_MPS_FALLBACK=1` is set.

    What to do: if the run is too slow, replace the op by one that the device supports (see
    `lowprec-check op NAME`), or run the part of the model around it on the CPU, so that the data is
    copied once:

        # before: each of the two ops copies its input to the CPU and its result back
        y = torch.linalg.eigvals(torch.linalg.inv(x))
        # after
        y = torch.linalg.eigvals(torch.linalg.inv(x.cpu())).to(x.device)
    """
    advice = "replace the op, or run the part of the model around it on the CPU"
    for run in result.runs:
        sizes: dict[str, list[int]] = defaultdict(list)
        for warning in run.fallbacks:
            fallback = fallback_of(warning)
            if fallback is None:
                yield Finding(plain(warning), run=run, help=advice)
            else:
                sizes[fallback.op].append(fallback.size)
        where = [run]
        if run.is_reference:  # which is not analyzed op by op
            where += result.runs
        for op, copied in sizes.items():
            calls = ([row for row in other.op_calls.rows() if row.op == op] for other in where)
            rows = next(filter(None, calls), [])
            module, source, rests_on = None, result.model.source, None
            if rows:
                module, source = rows[0].module, rows[0].source or source
            if result.prediction:
                rests_on = f"{result.prediction.kernels}: {op} falls back to the CPU"
            # Calls of one size cost the same; their number is not known if no run was analyzed.
            most, is_same = max(copied), min(copied) == max(copied)
            copies = f"copies its inputs ({'' if is_same else 'up to '}{{most:bytes}}) to the CPU, and its result back"
            message = say(f"runs on the CPU: each call waits for the device, {copies}", most=most)
            if len(rows) > 1:
                total = say_if(is_same, ", {total:bytes} in all", total=len(rows) * most)
                message = chained(message, chained(say("{calls:count call}", calls=len(rows)), total, between=""))
            count = len(rows) or 1
            yield Finding(message, run, module, op, source, help=advice, calls=count, rests_on=rests_on)


@rule("LP106", "slow-kernel", "warning", timed=True)
def slow_kernel(result: ScanResult) -> Iterator[Finding]:
    """The op runs, but much slower than in fp32.

    Observed: in total, the calls of this op took at least 5 times as long as the same calls in
    fp32, and more than 5 ms and 5 % of the time of the run; and so did the typical call, not only
    one that had to wait for a core. Each call that seems slow is timed again, in both. What the
    table says of the run must agree: it takes longer than fp32 by at least half of that. While
    other programs use the cores, or without times, only calls of over 100 ms count. If an op is too
    slow for the time budget, the scan times one call and computes the others in fp32 (LP903). A
    call that does not end in time is ended, and tried once more: if it takes too long again, its
    time is compared with the longest fp32 call of the op in the scan, or with all of fp32. An op in
    which a budget only happened to end is not listed. On another backend, and for compiled code,
    the ops are timed in eager mode; they are listed only if the run itself takes at least as long.
    Times depend on the load of the machine, so this finding is never part of a baseline, and
    `--fail-on` ignores it if there is one.

    Usual causes: a CPU without fp16 arithmetic, which makes convolutions and matrix products slow.

    What to do: use a dtype that the device accelerates, if there is one: the head of the report and
    `lowprec-check env` name them. Otherwise keep the modules with this op in fp32, and check the
    time of the whole model: `lowprec-check plan`.

        # before: fp16 on a CPU that accelerates only bf16
        y = model.half()(x.half())
        # after
        y = model.bfloat16()(x.bfloat16())
    """
    eager = [run for run in low_runs(result) if run.is_low and (run.is_eager or run.latency_ms is not None)]
    # Where the scan does not know whether other programs used the cores, they may have.
    is_off = result.options.get("times") == "off"
    conditions = result.timing_conditions
    is_unknown = (conditions is None and not result.complete) or is_off
    shortest = WAIT_MS if is_unknown or cores_were_used(conditions) else SHORT_MS
    reference = reference_of(result.runs)
    fp32_ms = (reference and reference.latency_ms) or 0.0
    slow = [(run, _slow_ops(run, shortest, fp32_ms)) for run in eager]
    # The same for ops with a call that was ended for taking too long, if fp32 was timed.
    for run, slow_ops in slow:
        for op, reason in run.emulated.items():
            here = 1e3 * (seconds_killed(reason) or 0.0)
            rows = [row for other in result.runs for row in other.op_calls.rows() if row.op == op]
            most = max((row.reference_ms for row in rows if row.reference_ms is not None), default=None)
            all_of_it = None
            if most is None and reference is not None:
                most, all_of_it = reference.latency_ms, say("the time of all of fp32")
            if not is_off and most and here > SLOW_RATIO * most:
                slower = "more than {ratio:times} slower than in fp32: over {here:seconds} instead of {fp32:ms}"
                message = say(slower, ratio=here / most, here=here / 1e3, fp32=most)
                slow_ops[op] = (chained(message, all_of_it, between=", "), 1)
    for run, slow_ops in slow:
        for op, (message, calls) in slow_ops.items():
            formats = {other.format for other, ops in slow if op in ops and other.format}
            yield Finding(message, run=run, op=op, help=faster(run, result, formats), calls=calls)


LEAST_PART = 0.05  # of the time of a run: an op that takes less of it makes nothing slow


def _slow_ops(run: Run, shortest: float, fp32_ms: float) -> dict[str, tuple[Sentence, int]]:
    """How much slower, and in how many calls, for each slow op, the one that takes most time first.

    A total that exceeds fp32's by twice what the plain run does, if it ran these ops, is ignored:
    something else slowed it down. So is a total that a few calls make, which had to wait for a
    processor: the typical call must be slow too, and take more than ``shortest`` ms.
    """
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in run.op_calls.rows():
        if row.time_ms is not None and row.reference_ms is not None:
            times[row.op].append((row.time_ms, row.reference_ms))
    # Twice what the run loses against fp32, by the times that the table shows.
    most, where = math.inf, None
    if run.latency_ms is not None:
        most = 2 * (run.latency_ms - fp32_ms)
    if not run.is_eager:
        most, where = run.latency_ms or 0.0, say("in eager mode")
    least = max(SLOW_MS, LEAST_PART * (run.latency_ms or 0.0))
    slow: dict[str, tuple[float, float]] = {}
    for op, calls in times.items():
        here, fp32 = sum(here for here, _ in calls), sum(fp32 for _, fp32 in calls)
        if here <= max(least, SLOW_RATIO * fp32) or here - fp32 >= most:
            continue
        # Typical is the median ratio among the calls that make up 80 % of the op's time in fp32.
        left, chosen = 0.8 * fp32, list[tuple[float, float]]()
        for call in sorted(calls, key=lambda call: -call[1]):
            chosen.append(call)
            left -= call[1]
            if left <= 0:
                break
        typical = sorted(chosen, key=lambda call: call[0] / max(call[1], 1e-6))[(len(chosen) - 1) // 2]
        if typical[0] > max(shortest, SLOW_RATIO * typical[1]):
            slow[op] = here, fp32
    answers, slower = {}, "{ratio:times} slower than in fp32: {here:ms} instead of {fp32:ms}"
    for op, (here, fp32) in sorted(slow.items(), key=lambda item: -item[1][0]):
        message = say(slower, ratio=here / max(fp32, 1e-6), here=here, fp32=fp32)
        answers[op] = (chained(message, where, between=", "), len(times[op]))
    return answers


@rule("LP108", "unexplained-error", "error")
def unexplained_error(result: ScanResult) -> Iterator[Finding]:
    """The run fails, and no op explains it.

    Observed: the model raised an exception as the user would run it. The instrumented part, which
    always runs in eager mode, reached the end of the model and found no op that fails, or was
    stopped by the same exception (LP905).

    Usual causes: a check in Python that raises in this dtype; the model fails when it is called
    again, because it keeps a tensor of another dtype between calls; the backend cannot compile or
    run the model; code that only runs without instruments.

    What to do: read the exception. Use the eager backend or report the failure to the backend's
    project, or fix the line that the exception names; here, what the model keeps between calls:

        # before: self.last, which the next call adds, becomes fp32
        y = self.linear(x + self.last)
        self.last = y.float()
        # after
        y = self.linear(x + self.last)
        self.last = y
    """
    for run in low_runs(result):
        error, stop = run.exception, run.stopped_by
        if error is None or run.status != "error" or failing_gaps(run):
            continue
        # The text of the exception that stopped the analysis may have other addresses.
        is_same = stop is not None and (stop.type, stop.source) == (error.type, error.source)
        if not (run.complete or is_same) or unscales_fp16(first_way(run)):  # the latter is LP505
            continue
        advice = error.hint or "use the eager backend, or fix this exception"
        if run.failed_call:
            left = "" if run.is_forward else "the weights that the steps before left, and "
            advice = f"look at {left}what the model keeps between calls"
        elif run.backend == EAGER:
            advice = error.hint or "fix this exception"
        message = say("{when:text}{error:text}", when=on_which_call(run), error=error.text)
        yield Finding(message, run, error.module, None, error.source, help=advice)


@rule("LP107", "crash", "error")
def crash(result: ScanResult) -> Iterator[Finding]:
    """The process died while this op ran.

    Observed: the process ended by a signal or an exit, not by a Python exception. Each run has a
    process of its own, so the scan continued. An op is named only if the process died twice while
    it ran: at the same place, or at two places. Without an op, the place is not known, or another
    one each time.

    Usual causes: a fault in the kernel, often signal 11 (segmentation fault); too little memory,
    often signal 9, sent by the operating system; memory that an earlier op damaged, if the place
    changes.

    What to do, in this order:

    1. Rule out memory: scan again with smaller inputs, and watch the memory of the machine.
    2. Compute the op in fp32, or use another precision or backend that passes in the same scan.
    3. Try another torch release. `lowprec-check op NAME` shows in which releases the op runs.
    4. If the newest release crashes too, reproduce it with this op alone and search PyTorch's
       issues for it.

    The second step, for an op that crashes in 16 bits:

        # before
        y = torch.linalg.svdvals(x)
        # after
        y = torch.linalg.svdvals(x.float()).to(x.dtype)
    """
    yield from from_gaps(result, "crash", "it runs in fp32")
    for run in low_runs(result):
        if run.status == "crashed" and not any(gap.kind == "crash" for gap in run.gaps):
            yield Finding(plain(run.reason or "the process died"), run=run)
