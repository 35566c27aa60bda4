"""Tracebacks of failures without the frames of this package, in every style of traceback.

Under coverage a dispatch mode and hooks written in Python are on the stack of every operator, and so in the traceback of one that
raises.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from types import CodeType, TracebackType
from typing import Any

import pytest

from lowprec_check.errors import UsageError

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NAME = "lowprec-frames"
_CALL_OF_OP = os.path.join("torch", "_ops.py")
_CALL_OF_HOOK = "_multicall"
"""The function of pluggy that calls a hook which wraps others."""
_RUN_OPS = (os.path.join("fixture", "watch.py"), os.path.join("core", "dispatch_mode.py"))
"""What is raised in them is raised by an op."""


def register(config: pytest.Config) -> None:
    """Remove the frames from the failures of this session."""
    if not config.pluginmanager.has_plugin(_NAME):
        config.pluginmanager.register(OwnFrames(), _NAME)


class OwnFrames:
    """Removes the frames from each failure before it is reported."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Remove them from the exception of the test, and from those that ``unittest`` keeps."""
        for found in (call.excinfo, *(getattr(item, "_excinfo", None) or ())):
            if found is not None and without_own_frames(found.value):
                found.traceback = type(found.traceback)(found.tb)  # it was built from all frames
        return (yield)


def without_own_frames(error: BaseException) -> bool:
    """Remove the frames from the tracebacks of an exception and of those that it was raised from; returns whether there were any."""
    cut = [_cut(each) for each in _with_causes(error)]
    return any(cut)


def _is_of_user(error: BaseException, innermost: TracebackType) -> bool:
    """Whether an error that was raised in a frame of this package says something to users; otherwise the frames explain a bug."""
    file = innermost.tb_frame.f_code.co_filename
    return isinstance(error, (AssertionError, UsageError)) or file.endswith((*_RUN_OPS, _CALL_OF_OP))


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ()), *_of_doctest(each)]


def _of_doctest(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of the failed lines of a doctest."""
    several = getattr(error, "failures", None)  # with --doctest-continue-on-failure
    failures: list[Any] = several if isinstance(several, list) else [error]
    for failure in failures:
        if type(failure).__name__ == "UnexpectedException":  # of doctest, which is not imported for it
            yield failure.exc_info[1]


def _cut(error: BaseException) -> bool:
    frames = [*_frames(error.__traceback__)]
    own = _own(frames)
    if own and own[-1] and not _is_of_user(error, frames[-1]):
        return False
    kept = [frame for frame, is_own in zip(frames, own, strict=True) if not is_own]
    if len(kept) == len(frames) or not kept:
        return False
    for frame, following in zip(kept, [*kept[1:], None], strict=True):
        frame.tb_next = following
    if kept[0] is not frames[0]:
        error.__traceback__ = kept[0]
    return True


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _own(frames: list[TracebackType]) -> list[bool]:
    """For each frame, whether it is of this package, or a call that only one of these makes."""
    found: list[bool] = []
    for frame, following in zip(frames, [*frames[1:], None], strict=True):
        code = frame.tb_frame.f_code
        if _gives_higher_order_op(code):
            found.append(following is not None and _is_own(following.tb_frame.f_code))
            continue
        after_own = bool(found) and found[-1]
        called = code.co_name == _CALL_OF_HOOK or code.co_filename.endswith(_CALL_OF_OP)
        found.append(_is_own(code) or (after_own and called))
    return found


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE)


def _gives_higher_order_op(code: CodeType) -> bool:
    """Whether a frame gives a higher-order op to a mode, or to its kernel: a mode of this package lets the same function do it again."""
    return code.co_name == "dispatch" and code.co_filename.endswith(_CALL_OF_OP)
