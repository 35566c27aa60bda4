"""Messages of a worker are decoded as they were sent."""

from __future__ import annotations

import math

import msgspec
import pytest
from conftest import Mlp
from shared_result import gap

from lowprec_check.engine.model.plain_run import PlainResult
from lowprec_check.engine.run.isolation import isolated
from lowprec_check.engine.run.messages import GapFound, Measures, PartFailed, TaskMessage, decode, encode
from lowprec_check.engine.run.outcome import Outcome
from lowprec_check.engine.trace.instrument import Instrumented
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process.function_worker import Ended
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo

ERROR = ErrorStats(rel_l2=math.inf, max_abs=-math.inf, cosine=0.5, sqnr_db=None, top1=1.0)
RAISED = ExceptionInfo(type="RuntimeError", message="„no” kernel", module="layer", source="model.py:3")
ROW = OpCall(
    op="aten.mm.default",
    module="layer",
    source=None,
    dtypes="f16→f16",
    shape="2×3",
    outcome="rescued",
    local_error=math.inf,
    accumulated_error=1e-3,
    input_error=None,
    absmax=65504.0,
    rms=1.0,
    introduced_inf=1 << 40,
    introduced_nan=0,
    flushed=0.25,
    input_flushed=None,
    flips=0,
    recast=1,
    to_python=0,
    time_ms=0.1,
    reference_ms=None,
)


def op_calls(rows: int) -> OpCalls:
    """``rows`` calls whose texts are equal but not identical objects, as in a worker's columns."""
    again = [msgspec.json.decode(msgspec.json.encode(ROW), type=OpCall) for _ in range(rows - 1)]
    return to_columns([ROW, *again])


FOUND = Instrumented(
    gaps=[gap("aten.dot.default")],
    op_calls=op_calls(3),
    uncalled_modules=["a.b"],
    called_modules=["a", ""],
    complete=False,
    exception=RAISED,
    perturbed=False,
    lockstep_error=ERROR,
    emulated={"aten.mm.default": "slow"},
    faults=("one", "two"),
)
PLAIN = PlainResult(
    status="error", exception=RAISED, output_error=ERROR, seconds=0.5, random=True, notes=("n",), loss=-math.inf
)
MESSAGES: list[TaskMessage] = [
    PLAIN,
    Measures(peak_memory_bytes=3, self_error=ERROR, nonfinite_at=("op", "", None), metric=1.0),
    GapFound(gap("aten.fill_.Scalar", kind="scalar-overflow", constant=-math.inf)),
    FOUND,
    PartFailed("measuring failed"),
    Ended(),
    Ended(message="No.", hint="Do this."),
    Ended(traceback="Traceback"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_arrives_as_it_was_sent(message: TaskMessage) -> None:
    received = decode(encode(message))
    assert type(received) is type(message)
    assert received == message


def test_a_nan_arrives_as_a_nan() -> None:
    received = decode(encode(Measures(metric=math.nan)))
    assert isinstance(received, Measures)
    assert received.metric is not None
    assert math.isnan(received.metric)


def test_a_message_with_invalid_unicode_is_sent() -> None:
    odd = msgspec.structs.replace(PLAIN, exception=msgspec.structs.replace(RAISED, message="\udcff.bin"), loss=math.inf)
    received = decode(encode(odd))
    assert isinstance(received, PlainResult)
    assert received.exception is not None
    assert received.exception.message == "\\udcff.bin"
    assert received.loss == math.inf


def test_equal_texts_of_a_column_are_stored_once() -> None:
    received = decode(encode(FOUND))
    assert isinstance(received, Instrumented)
    for name in ("op", "module", "dtypes", "shape"):
        assert len({id(text) for text in getattr(received.op_calls, name)}) == 1


@pytest.mark.parametrize("data", [b"", b"\x80", msgspec.msgpack.encode({"type": "gap"}), encode(Ended())[:-1]])
def test_other_data_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)


def test_an_outcome_collects_the_messages() -> None:
    outcome = Outcome()
    for message in MESSAGES:
        outcome.add(message)
    assert (outcome.plain, outcome.explained, outcome.faults) == (PLAIN, FOUND, ["measuring failed"])
    assert outcome.measures is not None
    assert [found.op for found in outcome.gaps] == ["aten.fill_.Scalar"]


def wrong_call() -> Mlp:
    raise UsageError("No.", "Do this.")


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_an_isolated_function_returns_and_raises_as_a_local_one(isolation: str) -> None:
    assert isolated(lambda: {"x": [1, None, math.inf]}, isolation, dict) == {"x": [1, None, math.inf]}  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        isolated(wrong_call, isolation, Mlp)  # type: ignore[arg-type]
    assert (caught.value.message, caught.value.hint) == ("No.", "Do this.")


def test_an_unexpected_exception_in_a_worker_has_its_traceback() -> None:
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        isolated(lambda: 1 // 0, "fork", int)
