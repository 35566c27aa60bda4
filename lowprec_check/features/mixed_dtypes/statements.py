"""That the model as given has several floating dtypes, and whether it fails for them."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.statements.kinds import Made, Said, per_scan
from lowprec_check.schema.findings import ModelAsGiven
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, module_name, say, some


@per_scan("fails-as-given", "model", after="note", place=-1)
def fails_as_given(result: ScanResult) -> Iterator[Made]:
    """That a call of it raises, and that fp32 is another model, which does not."""
    given = result.as_given
    if given is None or given.exception is None:
        return
    error = given.exception
    where = fill("{}", error.module and module_name(error.module)) + fill(" ({})", error.source)
    at = fill(" in {}", where.strip())
    fails = say("As it is, your model fails{at:text}: {error:text}", at=at, error=error.message.removesuffix("."))
    converted = say("fp32 below is model.float()")
    yield Said(chained(fails, _parameters(given), converted), "warn")


@per_scan("several-dtypes", "model", after="note", place=-1, detail="more")
def several_dtypes(result: ScanResult) -> Iterator[Made]:
    """That a model which runs as given has parameters of several dtypes."""
    given = result.as_given
    if given is not None and given.exception is None and len(given.dtypes) > 1:
        yield Said(_parameters(given), "warn")


def _parameters(given: ModelAsGiven) -> Sentence:
    names = [f"{dtype} ({some(list(map(module_name, modules)))})" for dtype, modules in given.dtypes.items()]
    return say("the model has parameters in {dtypes:text}", dtypes=" and ".join(names))
