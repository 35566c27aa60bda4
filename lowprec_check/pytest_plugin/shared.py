"""What the plugin's parts share: options, and tracebacks without the plugin's frames."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from lowprec_check.errors import UsageError
from lowprec_check.report.foreign_text import visible_text


def option_value(config: pytest.Config, name: str) -> Any:
    """The value of ``--lowprec-NAME``, else of the ini key ``lowprec_NAME``, if any."""
    return config.getoption(f"lowprec_{name}") or config.getini(f"lowprec_{name}")


def option_path(config: pytest.Config, name: str) -> Path | None:
    """A path: in an option relative to pytest's start directory, in an ini key to the file."""
    from_option = config.getoption(f"lowprec_{name}")
    if from_option:
        return config.invocation_params.dir / str(from_option)
    from_ini = config.getini(f"lowprec_{name}")
    if from_ini:
        return (config.inipath.parent if config.inipath else config.rootpath) / str(from_ini)
    return None


def wrong_option(config: pytest.Config, name: str, problem: object) -> pytest.UsageError:
    """The error about a value, which names the option or the ini key that it comes from."""
    where = f"lowprec_{name} in {config.inipath}"
    if config.getoption(f"lowprec_{name}"):
        where = f"--lowprec-{name.replace('_', '-')}"
    return pytest.UsageError(visible_text(f"{where}: {problem}"))


def shown_path(config: pytest.Config, path: Path) -> str:
    """A path as messages show it: relative to pytest's start directory, if it is below."""
    folder = config.invocation_params.dir
    if path.is_relative_to(folder):
        return path.relative_to(folder).as_posix()
    return str(path)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist; another process reports its results."""
    return hasattr(config, "workerinput")


# -- Tracebacks of failures without the frames of this package, in every style of traceback
#
# Under coverage a dispatch mode and hooks written in Python are on the stack of every operator, and
# so in the traceback of one that raises.

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NAME = "lowprec-frames"
_CALL_OF_OP = os.path.join("torch", "_ops.py")
# The function of pluggy that calls a hook which wraps others.
_CALL_OF_HOOK = "_multicall"
# What is raised in them is raised by an op.
_RUN_OPS = tuple(map(os.path.normpath, ("fixture/watch.py", "core/dispatch_mode.py", "core/op_kernels.py")))


def register_own_frames(config: pytest.Config) -> None:
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
        for info in (call.excinfo, *(getattr(item, "_excinfo", None) or ())):
            if info is not None and without_own_frames(info.value):
                info.traceback = type(info.traceback)(info.tb)  # it was built from all frames
        return (yield)


def without_own_frames(error: BaseException) -> bool:
    """Remove the frames from an exception and its causes; whether there were any."""
    errors: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in errors:
            continue
        errors[id(cause)] = cause
        waiting += [cause.__cause__, cause.__context__, *getattr(cause, "exceptions", ())]
        # The failed lines of a doctest: several with --doctest-continue-on-failure.
        several = getattr(cause, "failures", None)
        failures: list[Any] = several if isinstance(several, list) else [cause]
        for failure in failures:
            if type(failure).__name__ == "UnexpectedException":  # of doctest, which is not imported for it
                waiting.append(failure.exc_info[1])
    are_cut = [_cut(cause) for cause in errors.values()]
    return any(are_cut)


def _cut(error: BaseException) -> bool:
    """Remove the frames from one exception, unless they explain a bug of this package."""
    frames, frame = list[TracebackType](), error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    # Whether each is of this package, or a call that only one of these makes. ``dispatch`` gives a
    # higher-order op to a mode, which lets the function do it again, or to its kernel.
    own: list[bool] = []
    codes = [frame.tb_frame.f_code for frame in frames]
    for code, following in zip(codes, [*codes[1:], None], strict=True):
        of_op = code.co_filename.endswith(_CALL_OF_OP)
        if of_op and code.co_name == "dispatch":
            own.append(following is not None and following.co_filename.startswith(_PACKAGE))
        else:
            called = own[-1:] == [True] and (of_op or code.co_name == _CALL_OF_HOOK)
            own.append(called or code.co_filename.startswith(_PACKAGE))
    # An error that this package raises, but neither for the user nor from an op, is a bug of ours.
    raised_in = codes[-1].co_filename if codes else ""
    of_user = isinstance(error, (AssertionError, UsageError)) or raised_in.endswith((*_RUN_OPS, _CALL_OF_OP))
    if own[-1:] == [True] and not of_user:
        return False
    # The frames that stay are linked to each other.
    foreign = [frame for frame, is_own in zip(frames, own, strict=True) if not is_own]
    if len(foreign) == len(frames) or not foreign:
        return False
    for frame, next_frame in zip(foreign, [*foreign[1:], None], strict=True):
        frame.tb_next = next_frame
    error.__traceback__ = foreign[0]
    return True
