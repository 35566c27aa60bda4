"""Ops that the catalog does not know, tried on one call of the tests, in a process of their own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from lowprec_check.catalog.aten import AtenCatalog, AtenSupport
from lowprec_check.catalog.records import Dtype
from lowprec_check.engine.sweep.failures import Raised, kind_of
from lowprec_check.process import system
from lowprec_check.process.command_worker import TaskQueue
from lowprec_check.process.interpreter import module_command
from lowprec_check.process.process_group import GUARDIAN
from lowprec_check.pytest_plugin.marker import is_device_available
from lowprec_check.pytest_plugin.shared import is_worker
from lowprec_check.schema.base import Struct

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.cast_replay import CallKeeper


# -- The messages to and from the process that makes kept calls again, one JSON object per line


class ReplayTask(Struct, frozen=True, kw_only=True):
    """Sent to the process: a call of an op, to be made in a dtype on a device."""

    op: str
    """``aten.mm.default``."""
    dtype: Dtype
    device: str
    call: bytes
    """The arguments, as :func:`cast_replay.loaded` reads them."""


class ReplayAnswer(Struct, frozen=True, kw_only=True):
    """How the call went. The first answer of a process only says that it has started."""

    tried: bool = False
    raised: Raised | None = None
    """What the call raised in the dtype; ``None`` if it ran."""
    why_not: str | None = None
    """Why it was not tried in the dtype."""


# Made at import: later, a test run inside a test may have removed this module.
_DECODER = msgspec.json.Decoder(ReplayAnswer)

Answers = dict[tuple[str, Dtype], ReplayAnswer]

# -- One call of the tests is made again in the dtype, in a process of its own
#
# While tests run, ``fixture/cast_replay.py`` keeps a call of each op that the catalog does not
# know, and makes it again.

_KEPT = "lowprec_kept_calls"
_TRIED = "one call of these tests, tried here,"


class KeptCall(NamedTuple):
    """A call of an op in a test, of types that pytest-xdist can send."""

    position: int
    """The number of the test in the order in which pytest collected them."""
    data: bytes | None = None
    """The arguments; ``None`` if they cannot be kept."""
    why_not: str | None = None

    @property
    def rank(self) -> tuple[bool, int]:
        """Of an op the call with the lowest rank is kept, however tests are spread."""
        return self.data is None, self.position


class KeptCalls:
    """A plugin: keeps calls where tests run, and tries them where results are collected."""

    def __init__(self, config: pytest.Config, catalogs: Iterable[AtenCatalog]) -> None:
        self.config, self.catalogs = config, list(catalogs)
        # In processes that run tests.
        self.keeper: CallKeeper | None = None
        self._positions: dict[str, int] = {}
        self._position = 0
        # By op, the call with the lowest rank, and how it went.
        self.calls: dict[str, KeptCall] = {}
        self.answers: Answers = {}

    # -- in processes that run tests

    def wants(self, op: str) -> bool:
        """Whether a call of the op can say more than the catalog."""
        device = self.catalogs[0].device
        return any(_can_learn(catalog.of(op)) for catalog in self.catalogs) and is_device_available(device)

    def position(self) -> int:
        """The number of the test that runs."""
        return self._position

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Number the tests: the same call is kept however pytest-xdist spreads them."""
        self._positions = {item.nodeid: number for number, item in enumerate(session.items)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs."""
        self._position = self._positions.get(nodeid, self._position)

    def finish(self) -> None:
        """At the end of the session: a worker of pytest-xdist sends what it has kept."""
        self._add(self.keeper.calls if self.keeper else {})
        if is_worker(self.config):
            sent = {op: (*call,) for op, call in self.calls.items()}
            self.config.workeroutput[_KEPT] = sent  # type: ignore[attr-defined]

    # -- in the process that collects results

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the calls of a worker of pytest-xdist."""
        self._add(getattr(node, "workeroutput", {}).get(_KEPT, {}))

    def _add(self, calls: Mapping[str, tuple[int, bytes | None, str | None]]) -> None:
        for op, call in calls.items():
            self.calls[op] = min(self.calls.get(op, KeptCall(*call)), KeptCall(*call), key=lambda call: call.rank)

    def try_all(self, supports: Iterable[tuple[str, Dtype, AtenSupport]]) -> None:
        """Try each op, in each dtype, of which a call can say more than the catalog."""
        tasks = []
        for op, dtype in sorted({(op, dtype) for op, dtype, support in supports if _can_learn(support)}):
            _, data, why_not = self.calls.get(op, KeptCall(0))
            if data is not None:
                tasks.append(ReplayTask(op=op, dtype=dtype, device=self.catalogs[0].device, call=data))
            elif why_not is not None:
                self.answers[op, dtype] = ReplayAnswer(why_not=why_not)
        if tasks:
            self.answers |= replay_calls(tasks, Path(GUARDIAN.temporary_folder()))

    def settled(self, op: str, dtype: Dtype, support: AtenSupport) -> AtenSupport:
        """The support of an op, with what its call has shown."""
        answer = self.answers.get((op, dtype))
        if answer is not None and _can_learn(support):
            return with_answer(op, support, answer)
        return support


def _can_learn(support: AtenSupport) -> bool:
    """Whether a call says more: under autocast not if autocast casts the inputs to fp32."""
    return support.applies and support.state in (None, "some") and support.autocast != "fp32"


def with_answer(op: str, support: AtenSupport, answer: ReplayAnswer) -> AtenSupport:
    """The support of an op that a call has shown, beyond what the catalog knows."""
    raised = answer.raised
    if not answer.tried:
        message = support.message or f"not tried here: {answer.why_not}"
        if support.state:
            return support
        return msgspec.structs.replace(support, message=message)
    if support.state == "some":
        condition = f"{support.condition or 'fails in part'}; {_TRIED} {'fails' if raised else 'runs'}"
        return msgspec.structs.replace(support, condition=condition, tried_here=True)
    if raised is None:
        return msgspec.structs.replace(support, state="all", message=f"{_TRIED} runs", tried_here=True)
    kind = kind_of(raised, op, fails_in_fp32=False)
    if kind == "timeout" or (kind == "dtype-mismatch" and "backward" in op):
        # a slow machine; or a derivative, whose forward op may return some tensors in another dtype
        return msgspec.structs.replace(support, message=f"not known: {_TRIED} raised {raised.message}")
    message = f"{_TRIED} fails: {raised.message}"
    return msgspec.structs.replace(support, state="none", kind=kind, message=message, tried_here=True)


# -- The process

WORKER = "lowprec_check.pytest_plugin.fixture.cast_replay"
START_SECONDS = 120.0
CALL_SECONDS = 10.0
"""A call that takes longer is ended, and its op stays unknown."""
ALL_SECONDS = 120.0
"""Ops that were not tried after this time stay unknown."""


def replay_calls(tasks: Iterable[ReplayTask], folder: Path) -> Answers:
    """Make calls in a process, and in another after one that ends it, in the time given."""
    queue: TaskQueue[ReplayTask, ReplayAnswer] = TaskQueue(
        module_command(WORKER),
        _DECODER.decode,
        folder,
        environment=os.environ | {"OMP_NUM_THREADS": "1"},
        start_seconds=START_SECONDS,
        call_seconds=CALL_SECONDS,
    )
    answers: Answers = {}
    queue.waiting.extend(tasks)
    total = len(queue.waiting)
    queue.deadline = system.monotonic() + ALL_SECONDS
    with queue.supervisor:
        queue.start()
        for task, event in queue.events():
            is_late = system.monotonic() > queue.deadline
            if isinstance(event, ReplayAnswer):
                if task is not None:
                    answers[task.op, task.dtype] = event
            elif task is None or is_late:  # a process that does not start is not tried again
                break
            else:
                raised = Raised.of_end(event.exit_code, f"no result within {CALL_SECONDS:.0f} s")
                answer = ReplayAnswer(why_not=f"the call does not run again as it was: {raised.message}")
                if event.position is not None and event.position.module == task.dtype:
                    answer = ReplayAnswer(tried=True, raised=raised)
                answers[task.op, task.dtype] = answer
            if len(answers) == total or is_late:
                break
    return answers
