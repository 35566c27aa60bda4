"""Compares a backend, or what the user compiled, with eager mode in the worker of its run."""

from __future__ import annotations

import msgspec

from lowprec_check.core.feature_hooks import Feature, Measurement
from lowprec_check.core.messages import Started
from lowprec_check.core.plain_part import SLOW, PlainPart
from lowprec_check.core.preparation import OnBackend
from lowprec_check.features.backend_checks.backend_checker import BackendChecker
from lowprec_check.features.backend_checks.compiler_checker import CompilerChecker
from lowprec_check.schema.axes import BACKENDS
from lowprec_check.schema.backend_checks import BackendCheck, InputChange


def check_backend(part: PlainPart) -> None:
    """Report how the backend differs from eager mode; the verdict, if changed inputs fail."""
    task, report, so_far = part.task, part.report, part.report.so_far
    if not part.is_compiled or so_far.failed or not task.measured:
        return
    if part.too_slow:
        report.add(backend_check=BackendCheck(reason=SLOW))
        return

    def start(change: InputChange) -> None:
        """If the worker ends now, the run fails on changed inputs."""
        failed = msgspec.structs.replace(report.run, failed_input=change)
        late = None
        if change != "larger-batch":  # it may compile for any time
            late = msgspec.structs.replace(failed, status="timeout")
        crashed = msgspec.structs.replace(failed, status="crashed")
        report.send(Started(seconds=task.measure_budget, if_crashed=crashed, if_late=late))

    quantizes = BACKENDS.get(task.backend).lowers_precision
    checker = BackendChecker(_compiler_checker(part), so_far, quantizes=quantizes)
    try:
        checker.check(part.warnings, start)
    finally:
        report.replace_run(msgspec.structs.replace(checker.result, backend_check=checker.observed))


def check_compiler(part: PlainPart) -> None:
    """Report whether the compiler made the output worse, if it is compiled and not random."""
    task, report = part.task, part.report
    compiled = part.is_compiled and not BACKENDS.get(task.backend).lowers_precision and task.evidence == "measured"
    if compiled and part.outputs and not (report.run.random or part.too_slow or task.keep_fp32):
        # Each is reported, in case time is too short for what follows.
        checker = _compiler_checker(part)
        for check in checker.checks():
            report.add(compiler=check)
        # In a run that passes it is a warning, which is not worth a minute of search.
        last_check, asked = report.run.compiler, task.explains_all or report.run.status != "ok"
        if last_check is not None and last_check.verdict == "worse" and asked:
            report.send(Started(seconds=task.measure_budget, doing="bisecting the compiler"))
            report.add(compiler=msgspec.structs.replace(last_check, culprit=checker.bisect()))


def add_layer_errors(part: PlainPart) -> None:
    """Report the errors of the layers that a backend quantized, if the model ran."""
    call = part.ready.call
    if isinstance(call, OnBackend) and part.task.measured and not part.report.so_far.failed:
        with part.ready.context():
            part.report.add(layer_errors=call.layer_errors())


def _compiler_checker(part: PlainPart) -> CompilerChecker:
    return CompilerChecker(part.task, part.target, part.ready, part.rewind, by_dynamo=part.report.run.compiled)


class BackendChecks(Feature):
    """The checks of a backend."""

    measurements = (
        Measurement(10, "comparing with eager mode", check_backend),
        Measurement(40, "checking the compiler", check_compiler),
        Measurement(50, "comparing the layers", add_layer_errors),
    )


BACKEND_CHECKS = BackendChecks()
