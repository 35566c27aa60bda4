"""What quantization adds to the error of a precision, what it saves, and what is emulated."""

from __future__ import annotations

from lowprec_check.analysis.statements.kinds import Made, per_run
from lowprec_check.schema.run_key import EAGER
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.statements import chained, say


@per_run("without-kernels", "analysis", after="emulated", detail="more")
def without_kernels(run: Run, result: ScanResult) -> Made:
    """Why values were quantized and dequantized in place of a kernel."""
    if run.without_kernels is None:
        return None
    words = "values are quantized and dequantized, and not timed: {why:text}"
    return say(words, why=run.without_kernels)


@per_run("unquantized", "error", after="unknown-cause", detail="more")
def unquantized(run: Run, result: ScanResult) -> Made:
    """The error beside that of the same precision without quantization."""
    eager = next((other for other in result.runs if other.key == run.key._replace(backend=EAGER)), None)
    if run.unquantized_error is None or eager is None or eager.is_reference or eager.rel_l2 is None:
        return None
    base = say("{precision:text} {base:error}", precision=eager.precision, base=eager.rel_l2)
    quantized = say("{backend:text} {error:error}", backend=run.backend, error=run.rel_l2)
    between = say("{error:error} from {precision:text}", error=run.unquantized_error, precision=eager.precision)
    return chained(chained(base, quantized, between=", "), between)


@per_run("quantized-weights", "error", after="unknown-cause", detail="more")
def quantized_weights(run: Run, result: ScanResult) -> Made:
    """The memory of the weights."""
    if run.weight_bytes is None or not run.unquantized_bytes:
        return None
    words = "its weights take {weights:bytes}, without quantization {unquantized:bytes}"
    return say(words, weights=run.weight_bytes, unquantized=run.unquantized_bytes)
