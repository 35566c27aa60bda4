"""The hooks of the pytest plugin. Imports neither torch nor other modules of this package until a test or an option needs them.

Defines the fixture ``lowprec``, the marker ``lowprec``, and options and ini keys that start with ``lowprec``.
See docs/pytest.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec

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
    from lowprec_check.pytest_plugin.options import is_worker

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
    from lowprec_check.pytest_plugin import own_frames
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec
    from lowprec_check.pytest_plugin.marker import ONE_OF_THEM, Case

    own_frames.register(request.config)
    case = getattr(request, "param", None)
    if case is not None and not isinstance(case, Case):
        pytest.fail(f"@pytest.mark.parametrize cannot parametrize the fixture lowprec. {ONE_OF_THEM}", pytrace=False)
    return Lowprec(case)
