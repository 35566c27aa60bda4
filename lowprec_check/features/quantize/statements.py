"""What quantization adds to the error of a precision, what it saves, and what is emulated."""

from __future__ import annotations

from lowprec_check.analysis.recommend import best_run
from lowprec_check.analysis.run_summary import label
from lowprec_check.analysis.statements.kinds import Made, per_run
from lowprec_check.schema.run_key import EAGER, REFERENCE
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
    """The error beside that of the best run in 16 bits, or of its precision in eager mode."""
    precision = run.base or run.precision
    key = run.key._replace(precision=precision, backend=EAGER)
    unquantized = [other for other in result.runs if not other.is_quantized]
    base, words = best_run(unquantized, result.environment), "best in 16 bits: {base:text} {error:error}"
    if base is None or not base.is_low or base.key == key:
        base = next((other for other in unquantized if other.key == key), None)
        words = "{base:text} {error:error}"
    if run.unquantized_error is None or base is None or base.is_reference or base.rel_l2 is None:
        return None
    best = say(words, base=label(base), error=base.rel_l2)
    quantized = say("{backend:text} {error:error}", backend=run.backend, error=run.rel_l2)
    both = chained(best, quantized, between=", ")
    if precision == REFERENCE:
        return both
    return chained(both, say("{error:error} from {precision:text}", error=run.unquantized_error, precision=precision))


@per_run("quantized-weights", "error", after="unknown-cause", detail="more")
def quantized_weights(run: Run, result: ScanResult) -> Made:
    """The memory of the weights."""
    if run.weight_bytes is None or not run.unquantized_bytes:
        return None
    words = "its weights take {weights:bytes}, without quantization {unquantized:bytes}"
    return say(words, weights=run.weight_bytes, unquantized=run.unquantized_bytes)
