"""The hooks of the pytest plugin, its options, and tracebacks without its frames."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec


# -- Values of options; if an option is not given, its ini key is used


def option_value(config: pytest.Config, name: str) -> Any:
    """The option_value of ``--lowprec-NAME``, else of the ini key ``lowprec_NAME``; ``None`` or empty if neither is given."""
    given = config.getoption(f"lowprec_{name}")
    return given if given else config.getini(f"lowprec_{name}")


def option_path(config: pytest.Config, name: str) -> Path | None:
    """A option_path: in an option relative to the directory pytest was started in, in an ini key to the ini file."""
    given = config.getoption(f"lowprec_{name}")
    if given:
        return config.invocation_params.dir / str(given)
    from_ini = config.getini(f"lowprec_{name}")
    return (config.inipath.parent if config.inipath else config.rootpath) / str(from_ini) if from_ini else None


def option_name(config: pytest.Config, name: str) -> str:
    """The option or ini key that a option_value comes from, for error messages."""
    option = f"--lowprec-{name.replace('_', '-')}"
    return option if config.getoption(f"lowprec_{name}") else f"lowprec_{name} in {config.inipath}"


def shown_path(config: pytest.Config, option_path: Path) -> str:
    """A option_path as messages show it: relative to the directory pytest was started in, if it is below."""
    folder = config.invocation_params.dir
    return option_path.relative_to(folder).as_posix() if option_path.is_relative_to(folder) else str(option_path)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist; another process reports its results."""
    return hasattr(config, "workerinput")


def worker_of(config: pytest.Config) -> str:
    """``gw0:`` in a worker of pytest-xdist; empty without workers."""
    return f"{config.workerinput['workerid']}:" if is_worker(config) else ""  # type: ignore[attr-defined]


# -- Tracebacks of failures without the frames of this package, in every style of traceback
#
# Under coverage a dispatch mode and hooks written in Python are on the stack of every operator, and so in the traceback of one that
# raises.

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NAME = "lowprec-frames"
_CALL_OF_OP = os.path.join("torch", "_ops.py")
_CALL_OF_HOOK = "_multicall"
"""The function of pluggy that calls a hook which wraps others."""
_RUN_OPS = (os.path.join("fixture", "watch.py"), os.path.join("core", "dispatch_mode.py"))
"""What is raised in them is raised by an op."""


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
    own = _are_own(frames)
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


def _are_own(frames: list[TracebackType]) -> list[bool]:
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


# -- The hooks of the pytest plugin. Imports neither torch nor other modules of this package until a test or an
# option needs them
#
# Defines the fixture ``lowprec``, the marker ``lowprec``, and options and ini keys that start with ``lowprec``.
# See docs/pytest.md.

_MARKER = """lowprec(*precisions, device="cpu", backend="eager", tolerance=None): run the test once per precision \
({precisions}); use lowprec.cast(model), lowprec.autocast() and lowprec.allclose(y, reference) in it. device: where to \
run, one or several; those not available are skipped. backend: for lowprec.check ({backends}). tolerance: the largest rel_l2 that \
passes; default: that of the precision."""


def marker_help(config: pytest.Config) -> str:
    """The marker's description in ``pytest --markers``; otherwise only its name, so that nothing is imported."""
    if not config.option.markers:
        return "lowprec"
    from lowprec_check.errors import UsageError
    from lowprec_check.schema.axes import BACKENDS
    from lowprec_check.schema.precisions import low_names

    try:
        return _MARKER.format(precisions=", ".join(low_names()), backends=", ".join(BACKENDS.names()))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Define the options. Each has an ini key of the same name, used if the option is not given."""
    group = parser.getgroup("lowprec", "low precision (lowprec-check)")
    group.addoption(
        "--lowprec-coverage",
        metavar="NAME",
        action="append",
        help="Record the operators of every test; at the end, list those that do not run in this precision: half, bfloat16, "
        "autocast-fp16 or autocast-bf16, or an alias such as fp16. Repeatable or comma-separated.",
    )
    group.addoption(
        "--lowprec-device",
        metavar="DEVICE",
        help="Device to look up for --lowprec-coverage, such as cuda; this machine does not need to have it. Default: cpu.",
    )
    group.addoption(
        "--lowprec-report",
        metavar="FILE",
        help="Write the full coverage table to FILE; the suffix sets the format: .json, .md or .html.",
    )
    group.addoption(
        "--lowprec-format",
        metavar="FORMAT",
        help="text, or github: also print a workflow command for each operator that does not run, which GitHub shows at the "
        "line that uses it. Default: text.",
    )
    group.addoption(
        "--lowprec-fail-on",
        metavar="WHEN",
        help="With --lowprec-coverage, fail a run whose tests pass if operators do not run in the precision: gaps, any; new, "
        "those that are not in --lowprec-baseline; never. Default: never.",
    )
    group.addoption(
        "--lowprec-baseline",
        metavar="FILE",
        help="Coverage that --lowprec-report saved as .json: name the gaps that it does not have.",
    )
    group.addoption(
        "--lowprec-manifest",
        metavar="FILE",
        help="TOML file of known failures: each test in it must fail with its exception, and is then reported as xfailed.",
    )
    group.addoption(
        "--lowprec-update-manifest",
        action="store_true",
        help="Update the manifest with the results of this run; reasons are kept.",
    )
    parser.addini(
        "lowprec_coverage", "Same as --lowprec-coverage; several are separated by spaces.", type="args", default=[]
    )
    parser.addini("lowprec_device", "Same as --lowprec-device.", default=None)
    parser.addini("lowprec_report", "Same as --lowprec-report, relative to the ini file.", default=None)
    parser.addini("lowprec_format", "Same as --lowprec-format.", default=None)
    parser.addini("lowprec_fail_on", "Same as --lowprec-fail-on.", default=None)
    parser.addini("lowprec_baseline", "Same as --lowprec-baseline, relative to the ini file.", default=None)
    parser.addini("lowprec_manifest", "Same as --lowprec-manifest, relative to the ini file.", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the parts that options need."""
    config.addinivalue_line("markers", marker_help(config))
    option = config.option
    if option.lowprec_manifest or option.lowprec_update_manifest or config.getini("lowprec_manifest"):
        from lowprec_check.pytest_plugin import known_failures as known

        known.register(config)
    wanted = (option.lowprec_coverage, config.getini("lowprec_coverage"))
    needs_it = (option.lowprec_device, option.lowprec_report, option.lowprec_format)
    gate = (option.lowprec_fail_on, option.lowprec_baseline)
    if any(wanted) or any(needs_it) or any(gate):
        from lowprec_check.pytest_plugin import coverage

        coverage.register(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per precision of the marker."""
    mark = metafunc.definition.get_closest_marker("lowprec")
    if mark is not None:
        from lowprec_check.pytest_plugin.marker import parametrize

        parametrize(metafunc, mark)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the worker of ``assert_supported`` if a test calls it: it imports torch while other tests run.

    Not in workers of pytest-xdist: each has all tests, but runs some.
    """
    if session.config.option.collectonly or not any(map(_asserts_support, session.items)):
        return

    if is_worker(session.config):
        return
    from lowprec_check.engine.sweep.kept_sweep import start_early

    start_early("cpu")


def _is_of_unittest(item: pytest.Item) -> bool:
    unittest, owner = sys.modules.get("unittest"), getattr(item, "cls", None)
    return unittest is not None and isinstance(owner, type) and issubclass(owner, unittest.TestCase)


def _asserts_support(item: pytest.Item) -> bool:
    code = getattr(getattr(item, "function", None), "__code__", None)
    return "assert_supported" in getattr(code, "co_names", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail marked tests that do not run once per precision: methods of ``unittest.TestCase``, and tests that were marked too late."""
    is_function = isinstance(item, pytest.Function)  # not a doctest of a marked module
    if not is_function or item.get_closest_marker("lowprec") is None:
        return
    if _is_of_unittest(item):
        pytest.fail(
            "The marker lowprec does not work on methods of unittest.TestCase, which cannot use fixtures. "
            "Make the test a function or a method of a plain class.",
            pytrace=False,
        )
    if "lowprec" not in getattr(getattr(item, "callspec", None), "params", {}):
        pytest.fail(
            "The marker lowprec was added after the tests were collected, so the test would run once, in no precision. "
            "Write it above the test or its class, or as pytestmark in its module.",
            pytrace=False,
        )


@pytest.fixture
def lowprec(request: pytest.FixtureRequest) -> Lowprec:
    """Assertions on low precision: ``check``, ``assert_supported``, ``assert_no_gaps``, ``record``.

    In a test with the marker ``lowprec`` also ``cast``, ``autocast`` and ``allclose``.
    """
    from lowprec_check.pytest_plugin import hooks as own_frames
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec
    from lowprec_check.pytest_plugin.marker import ONE_OF_THEM, Case

    own_frames.register(request.config)
    case = getattr(request, "param", None)
    if case is not None and not isinstance(case, Case):
        pytest.fail(f"@pytest.mark.parametrize cannot parametrize the fixture lowprec. {ONE_OF_THEM}", pytrace=False)
    return Lowprec(case)
