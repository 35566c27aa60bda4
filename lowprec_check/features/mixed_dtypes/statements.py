"""That the model as given has several floating dtypes, and whether it fails for them."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.statements.kinds import Made, Said, per_scan
from lowprec_check.schema.findings import ModelAsGiven
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, module_name, say, some


@per_scan("fails-as-given", "model", after="note", place=-1)
def fails_as_given(result: ScanResult) -> Iterator[Made]:
    """That a call of it raises, at which op, and the dtypes that meet there."""
    given = result.as_given
    if given is None or given.exception is None:
        return
    error = given.exception
    where = ", ".join(filter(None, (error.module and module_name(error.module), error.source)))
    at = fill(" in {}", where)
    fails = say("The model as given fails{at:text}: {error:text}", at=at, error=error.message.removesuffix("."))
    meets = None
    if given.mixed is not None:
        by_dtype = {tensor.dtype: tensor.argument for tensor in given.mixed.inputs}
        inputs = ", ".join(f"{name} is {dtype}" for dtype, name in by_dtype.items())
        meets = say("{op:op} gets several dtypes: {inputs:text}", op=given.mixed.op, inputs=inputs)
    converted = say("runs below convert it to one dtype, but for those under autocast")
    yield Said(chained(fails, meets, _parameters(given), converted), "warn")


@per_scan("several-dtypes", "model", after="note", place=-1, detail="more")
def several_dtypes(result: ScanResult) -> Iterator[Made]:
    """That a model which runs as given has parameters of several dtypes."""
    given = result.as_given
    if given is not None and given.exception is None and len(given.dtypes) > 1:
        yield Said(_parameters(given), "warn")


def _parameters(given: ModelAsGiven) -> Sentence:
    names = [f"{dtype} ({some(list(map(module_name, modules)))})" for dtype, modules in given.dtypes.items()]
    return say("the model has parameters in {dtypes:text}", dtypes=" and ".join(names))
