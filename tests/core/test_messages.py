"""Messages of a worker are decoded as they were sent."""

from __future__ import annotations

import math

import msgspec
import pytest
from conftest import Mlp
from shared_result import gap

from lowprec_check.core.messages import (
    GapFound,
    OpCallsFound,
    PartFailed,
    Reporter,
    Started,
    TaskAnswer,
    TaskMessage,
    WeightRead,
    decode,
    encode,
)
from lowprec_check.core.mode import Mode
from lowprec_check.core.outcome import Outcome, finished
from lowprec_check.core.tasks import RunTask, TaskFiles
from lowprec_check.engine.model.run_so_far import RunSoFar
from lowprec_check.errors import UsageError, WorkerError
from lowprec_check.process.function_worker import Ended
from lowprec_check.schema.op_calls import OpCall, OpCalls, to_columns
from lowprec_check.schema.scan_result import Run
from lowprec_check.schema.verdict import ErrorStats, ExceptionInfo
from lowprec_check.torchkit.isolation import isolated

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


RUN = Run(
    precision="half",
    device="cpu",
    status="error",
    exception=RAISED,
    output_error=ERROR,
    gaps=[gap("aten.dot.default")],
    uncalled_modules=["a.b"],
    called_modules=["a", ""],
    complete=False,
    perturbed=False,
    lockstep_error=ERROR,
    emulated={"aten.mm.default": "slow"},
    notes=["one", "two"],
    random=True,
    loss=-math.inf,
)
SO_FAR = RunSoFar(run=RUN, is_judged=True, seconds=0.5, self_error=ERROR, nonfinite_at=("op", "", None))
EXPLAINED = msgspec.structs.replace(SO_FAR.with_fields(op_calls=op_calls(3)), is_explained=True)
LATE = msgspec.structs.replace(RUN, status="timeout")
MESSAGES: list[TaskMessage] = [
    Started(seconds=20.0, op_seconds=1.0, call=2),
    Started(seconds=math.inf, if_late=LATE),
    SO_FAR,
    GapFound(gap("aten.fill_.Scalar", kind="scalar-overflow", constant=-math.inf)),
    EXPLAINED,
    WeightRead("layers.0", 0.5),
    PartFailed("measuring failed"),
    TaskAnswer.of([1.0, math.inf]),
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
    assert math.isnan(TaskAnswer.of([math.nan]).read(list[float])[0])
    received = decode(encode(SO_FAR.with_fields(metric=math.nan)))
    assert isinstance(received, RunSoFar)
    assert received.run.metric is not None
    assert math.isnan(received.run.metric)


def test_a_message_with_invalid_unicode_is_sent() -> None:
    odd = SO_FAR.with_fields(exception=msgspec.structs.replace(RAISED, message="\udcff.bin"), loss=math.inf)
    received = decode(encode(odd))
    assert isinstance(received, RunSoFar)
    assert received.run.exception is not None
    assert received.run.exception.message == "\\udcff.bin"
    assert received.run.loss == math.inf


def test_equal_texts_of_a_column_are_stored_once() -> None:
    received = decode(encode(EXPLAINED))
    assert isinstance(received, RunSoFar)
    for name in ("op", "module", "dtypes", "shape"):
        assert len({id(text) for text in getattr(received.run.op_calls, name)}) == 1


@pytest.mark.parametrize("data", [b"", b"\x80", msgspec.msgpack.encode({"type": "gap"}), encode(Ended())[:-1]])
def test_other_data_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(data)


def outcome_of(*messages: TaskMessage) -> Outcome:
    outcome = Outcome()
    for message in messages:
        outcome.add(message)
    return outcome


def test_an_outcome_collects_the_messages() -> None:
    outcome = outcome_of(*MESSAGES)
    assert (outcome.so_far, outcome.run, outcome.faults) == (EXPLAINED, EXPLAINED.run, ["measuring failed"])
    assert (outcome.call, outcome.is_explained) == (2, True)
    assert [found.op for found in outcome.gaps] == ["aten.fill_.Scalar"]
    assert [answer.read(list[float]) for answer in outcome.answers] == [[1.0, math.inf]]


def test_op_calls_are_sent_once() -> None:
    sent: list[TaskMessage] = []
    report = Reporter(SO_FAR, sent.append)
    report.add(op_calls=op_calls(3))
    report.add(metric=1.0)
    report.add_facts(draws=True)
    assert [len(message.run.op_calls) for message in sent if isinstance(message, RunSoFar)] == [3, 0, 0]
    assert outcome_of(*sent).so_far == report.so_far
    assert (report.run.metric, report.so_far.draws, len(report.run.op_calls)) == (1.0, True, 3)


# -- The run of a task whose worker has ended, by what it had said of it

TASK = RunTask(precision="half", device="cpu", mode=Mode(), files=TaskFiles(0, 0, ()), budget=20.0)
PASSED = msgspec.structs.replace(TASK.begun().with_fields(status="ok", calls=3), is_judged=True)


def ended(how: str, *messages: TaskMessage, reason: str | None = None) -> Run:
    outcome = outcome_of(*messages)
    outcome.ended, outcome.reason = how, reason  # type: ignore[assignment]
    outcome.take_end()
    return finished(TASK, outcome)


def test_a_worker_that_ends_in_a_call_gives_no_verdict() -> None:
    call = Started(seconds=20.0, call=2)
    run = ended("crashed", call, reason="died")
    assert (run.status, run.reason, run.calls, run.failed_call) == ("crashed", "died on call 2", 2, 2)
    assert not run.complete
    run = ended("timeout", Started(seconds=20.0, call=1))
    assert (run.status, run.reason, run.failed_call) == ("timeout", "exceeded the budget of 20 s", None)


def test_a_worker_that_ends_after_the_verdict_keeps_it() -> None:
    run = ended("crashed", Started(seconds=20.0, call=3), PASSED, Started(seconds=20.0))
    assert (run.status, run.reason, run.calls) == ("ok", None, 3)


@pytest.mark.parametrize(
    ("how", "status"), [("crashed", "crashed"), ("timeout", "ok"), ("stuck", "ok"), ("done", "ok")]
)
def test_a_worker_says_what_a_run_is_if_it_ends_now(how: str, status: str) -> None:
    crashed = msgspec.structs.replace(PASSED.run, status="crashed", failed_input="reversed")
    run = ended(how, PASSED, Started(seconds=20.0, if_crashed=crashed), reason="died")
    assert (run.status, run.failed_input) == (status, "reversed" if status == "crashed" else None)
    assert run.reason == ("died" if status == "crashed" else None)


def test_what_was_found_before_an_end_op_by_op_is_kept() -> None:
    run = ended("crashed", PASSED, GapFound(gap("aten.dot.default")), OpCallsFound(op_calls(2)), PartFailed("no"))
    assert ([found.op for found in run.gaps], len(run.op_calls), run.notes) == (["aten.dot.default"], 2, ["no"])


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


def test_a_lack_of_memory_is_of_other_tasks_only_where_the_worker_made_the_call() -> None:
    error = ExceptionInfo(type="torch.OutOfMemoryError", message="no memory")
    failed = msgspec.structs.replace(TASK.begun().with_fields(status="error", exception=error), is_judged=True)
    for calls in (True, False):
        outcome = outcome_of(*[Started(seconds=20.0, call=1)] * calls, failed)
        outcome.reused = True
        assert outcome.may_be_of_others == calls
