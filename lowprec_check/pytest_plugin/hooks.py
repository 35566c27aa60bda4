"""The hooks of the pytest plugin, its options, and tracebacks without its frames. See docs/pytest.md.

Defines the fixture ``lowprec``, the marker ``lowprec``, and options and ini keys that start with ``lowprec``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec


# -- Options, each with an ini key of the same name that is used if the option is not given

_OPTIONS = {
    "coverage": (
        "NAME",
        "Record the operators of every test; at the end, list those that do not run in this precision: half, bfloat16, "
        "autocast-fp16 or autocast-bf16, or an alias such as fp16. Repeatable or comma-separated.",
        "; several are separated by spaces",
    ),
    "device": (
        "DEVICE",
        "Device to look up for --lowprec-coverage, such as cuda; this machine does not need to have it. Default: cpu.",
        "",
    ),
    "report": (
        "FILE",
        "Write the full coverage table to FILE; the suffix sets the format: .json, .md or .html.",
        ", relative to the ini file",
    ),
    "format": (
        "FORMAT",
        "text, or github: also print a workflow command for each operator that does not run, which GitHub shows at the "
        "line that uses it. Default: text.",
        "",
    ),
    "fail_on": (
        "WHEN",
        "With --lowprec-coverage, fail a run whose tests pass if operators do not run in the precision: gaps, any; new, "
        "those that are not in --lowprec-baseline; never. Default: never.",
        "",
    ),
    "baseline": (
        "FILE",
        "Coverage that --lowprec-report saved as .json: name the gaps that it does not have.",
        ", relative to the ini file",
    ),
    "manifest": (
        "FILE",
        "TOML file of known failures: each test in it must fail with its exception, and is then reported as xfailed.",
        ", relative to the ini file",
    ),
}
"""By name: the metavariable, the help, and what the help of the ini key adds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Define the options."""
    group = parser.getgroup("lowprec", "low precision (lowprec-check)")
    for name, (metavar, text, of_ini) in _OPTIONS.items():
        option, several = _option(name), name == "coverage"
        group.addoption(option, metavar=metavar, help=text, action="append" if several else "store")
        kind: dict[str, Any] = {"type": "args", "default": []} if several else {"default": None}
        parser.addini(f"lowprec_{name}", f"Same as {option}{of_ini}.", **kind)
    group.addoption(
        "--lowprec-update-manifest",
        action="store_true",
        help="Update the manifest with the results of this run; reasons are kept.",
    )


def _option(name: str) -> str:
    return f"--lowprec-{name.replace('_', '-')}"


def option_value(config: pytest.Config, name: str) -> Any:
    """The value of ``--lowprec-NAME``, else of the ini key ``lowprec_NAME``; ``None`` or empty if neither is given."""
    return config.getoption(f"lowprec_{name}") or config.getini(f"lowprec_{name}")


def option_path(config: pytest.Config, name: str) -> Path | None:
    """A path: in an option relative to the directory pytest was started in, in an ini key to the ini file."""
    given = config.getoption(f"lowprec_{name}")
    if given:
        return config.invocation_params.dir / str(given)
    from_ini = config.getini(f"lowprec_{name}")
    return (config.inipath.parent if config.inipath else config.rootpath) / str(from_ini) if from_ini else None


def wrong_option(config: pytest.Config, name: str, problem: object) -> pytest.UsageError:
    """The error about a value, which names the option or the ini key that it comes from."""
    given = config.getoption(f"lowprec_{name}")
    return pytest.UsageError(f"{_option(name) if given else f'lowprec_{name} in {config.inipath}'}: {problem}")


def shown_path(config: pytest.Config, path: Path) -> str:
    """A path as messages show it: relative to the directory pytest was started in, if it is below."""
    folder = config.invocation_params.dir
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is a worker of pytest-xdist; another process reports its results."""
    return hasattr(config, "workerinput")


# -- Hooks. They import neither torch nor other modules of this package until a test or an option needs them

_MARKER = """lowprec(*precisions, device="cpu", backend="eager", tolerance=None): run the test once per precision \
({precisions}); use lowprec.cast(model), lowprec.autocast() and lowprec.allclose(y, reference) in it. device: where to \
run, one or several; those not available are skipped. backend: for lowprec.check ({backends}). tolerance: the largest rel_l2 that \
passes; default: that of the precision."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the parts that options need."""
    config.addinivalue_line("markers", _marker_help() if config.option.markers else "lowprec")
    given = {name for name in (*_OPTIONS, "update_manifest") if config.getoption(f"lowprec_{name}")}
    of_manifest = {"manifest", "update_manifest"}
    if given & of_manifest or config.getini("lowprec_manifest"):
        from lowprec_check.pytest_plugin import known_failures

        known_failures.register(config)
    if given - of_manifest or config.getini("lowprec_coverage"):
        from lowprec_check.pytest_plugin import coverage

        coverage.register(config)


def _marker_help() -> str:
    from lowprec_check.errors import UsageError
    from lowprec_check.schema.axes import BACKENDS
    from lowprec_check.schema.precisions import low_names

    try:
        return _MARKER.format(precisions=", ".join(low_names()), backends=", ".join(BACKENDS.names()))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


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
    if session.config.option.collectonly or is_worker(session.config):
        return
    codes = (getattr(getattr(item, "function", None), "__code__", None) for item in session.items)
    if any("assert_supported" in getattr(code, "co_names", ()) for code in codes):
        from lowprec_check.engine.sweep.kept_sweep import start_early

        start_early("cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail marked tests that do not run once per precision: methods of ``unittest.TestCase``, and tests that were marked too late."""
    is_function = isinstance(item, pytest.Function)  # not a doctest of a marked module
    if not is_function or item.get_closest_marker("lowprec") is None:
        return
    unittest, owner = sys.modules.get("unittest"), getattr(item, "cls", None)
    if unittest is not None and isinstance(owner, type) and issubclass(owner, unittest.TestCase):
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
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec
    from lowprec_check.pytest_plugin.marker import ONE_OF_THEM, Case

    register_own_frames(request.config)
    case = getattr(request, "param", None)
    if case is not None and not isinstance(case, Case):
        pytest.fail(f"@pytest.mark.parametrize cannot parametrize the fixture lowprec. {ONE_OF_THEM}", pytrace=False)
    return Lowprec(case)


# -- Tracebacks of failures without the frames of this package, in every style of traceback
#
# Under coverage a dispatch mode and hooks written in Python are on the stack of every operator, and so in the traceback of one that
# raises.

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NAME = "lowprec-frames"
_CALL_OF_OP = os.path.join("torch", "_ops.py")
_CALL_OF_HOOK = "_multicall"
"""The function of pluggy that calls a hook which wraps others."""
_RUN_OPS = (
    os.path.join("fixture", "watch.py"),
    os.path.join("core", "dispatch_mode.py"),
    os.path.join("core", "op_kernels.py"),
)
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
    seen: dict[int, BaseException] = {}
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen[id(each)] = each
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ()), *_of_doctest(each)]
    cut = [_cut(each) for each in seen.values()]
    return any(cut)


def _of_doctest(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of the failed lines of a doctest."""
    several = getattr(error, "failures", None)  # with --doctest-continue-on-failure
    failures: list[Any] = several if isinstance(several, list) else [error]
    for failure in failures:
        if type(failure).__name__ == "UnexpectedException":  # of doctest, which is not imported for it
            yield failure.exc_info[1]


def _cut(error: BaseException) -> bool:
    """Remove the frames from the traceback of one exception, unless they explain a bug of this package."""
    from lowprec_check.errors import UsageError

    frames, frame = list[TracebackType](), error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    own = _are_own([each.tb_frame.f_code for each in frames])
    raised_in = frames[-1].tb_frame.f_code.co_filename if frames else ""
    of_user = isinstance(error, (AssertionError, UsageError)) or raised_in.endswith((*_RUN_OPS, _CALL_OF_OP))
    if own[-1:] == [True] and not of_user:
        return False
    kept = [each for each, is_own in zip(frames, own, strict=True) if not is_own]
    if len(kept) == len(frames) or not kept:
        return False
    for each, following in zip(kept, [*kept[1:], None], strict=True):
        each.tb_next = following
    error.__traceback__ = kept[0]
    return True


def _are_own(codes: list[CodeType]) -> list[bool]:
    """For each frame, whether it is of this package, or a call that only one of these makes.

    ``dispatch`` gives a higher-order op to a mode, or to its kernel: a mode of this package lets the same function do it again.
    """
    found: list[bool] = []
    for code, following in zip(codes, [*codes[1:], None], strict=True):
        of_op = code.co_filename.endswith(_CALL_OF_OP)
        if of_op and code.co_name == "dispatch":
            found.append(following is not None and following.co_filename.startswith(_PACKAGE))
        else:
            called = found[-1:] == [True] and (of_op or code.co_name == _CALL_OF_HOOK)
            found.append(called or code.co_filename.startswith(_PACKAGE))
    return found
