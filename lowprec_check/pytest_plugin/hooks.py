"""The hooks of the pytest plugin: fixture, marker, options and ini keys. See docs/pytest.md."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec


# -- Options, each with an ini key of the same name that is used if the option is not given

# What the help of an ini key adds to that of its option.
_OF_INI = dict.fromkeys(("report", "baseline", "manifest"), ", relative to the ini file")
_OF_INI["coverage"] = "; several are separated by spaces"

# By name: the metavariable, and the help.
_OPTIONS = {
    "coverage": (
        "NAME",
        "Record the operators of every test; at the end, list those that do not run in this precision: half, bfloat16, "
        "autocast-fp16 or autocast-bf16, or an alias such as fp16. Repeatable or comma-separated.",
    ),
    "device": (
        "DEVICE",
        "Device to look up for --lowprec-coverage, such as cuda; this machine does not need to have it. Default: cpu.",
    ),
    "report": (
        "FILE",
        "Write the full coverage table to FILE; the suffix sets the format: .json, .md or .html. In a .json file that "
        "exists, tests that this run does not complete keep their operators.",
    ),
    "format": (
        "FORMAT",
        "text, or github: also print a workflow command for each operator that does not run, which GitHub shows at the "
        "line that uses it. Default: text.",
    ),
    "fail_on": (
        "WHEN",
        "With --lowprec-coverage, fail a run whose tests pass if operators do not run in the precision: gaps, any; "
        "new, those that are not in --lowprec-baseline; never. Default: never.",
    ),
    "baseline": ("FILE", "Coverage that --lowprec-report saved as .json: name the gaps that it does not have."),
    "manifest": (
        "FILE",
        "TOML file of known failures: each test in it must fail with its exception, and is then reported as xfailed.",
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Define the options."""
    group = parser.getgroup("lowprec", "low precision (lowprec-check)")
    for name, (metavar, text) in _OPTIONS.items():
        option, several = f"--lowprec-{name.replace('_', '-')}", name == "coverage"
        group.addoption(option, metavar=metavar, help=text, action="append" if several else "store")
        kind: dict[str, Any] = {"type": "args", "default": []} if several else {"default": None}
        parser.addini(f"lowprec_{name}", f"Same as {option}{_OF_INI.get(name, '')}.", **kind)
    group.addoption(
        "--lowprec-update-manifest",
        action="store_true",
        help="Update the manifest with the results of this run; reasons are kept.",
    )


# -- Hooks. They import torch and this package only when a test or an option needs them

_MARKER = """lowprec(*precisions, device="cpu", backend="eager", tolerance=None): run the test once per precision \
({precisions}); use lowprec.cast(model), lowprec.autocast() and lowprec.allclose(y, reference) in it. device: where to \
run, one or several; those not available are skipped. backend: for lowprec.check ({backends}). tolerance: the largest \
rel_l2 that passes; default: that of the precision."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the parts that options need."""
    marker = "lowprec"
    if config.option.markers:  # --markers shows its help
        from lowprec_check.errors import UsageError
        from lowprec_check.schema.axes import BACKENDS
        from lowprec_check.schema.precisions import low_names

        try:
            marker = _MARKER.format(precisions=", ".join(low_names()), backends=", ".join(BACKENDS.names()))
        except UsageError as error:
            raise pytest.UsageError(str(error)) from None
    config.addinivalue_line("markers", marker)
    options = {name for name in (*_OPTIONS, "update_manifest") if config.getoption(f"lowprec_{name}")}
    of_manifest = {"manifest", "update_manifest"}
    try:
        if options & of_manifest or config.getini("lowprec_manifest"):
            from lowprec_check.pytest_plugin import known_failures

            known_failures.register(config)
        if options - of_manifest or config.getini("lowprec_coverage"):
            from lowprec_check.pytest_plugin import coverage

            coverage.register(config)
    except OSError as error:  # a name that the system does not accept
        from lowprec_check.errors import usage_error_of

        raise pytest.UsageError(str(usage_error_of(error) or error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per precision of the marker."""
    mark = metafunc.definition.get_closest_marker("lowprec")
    if mark is not None:
        from lowprec_check.pytest_plugin.marker import parametrize

        parametrize(metafunc, mark)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the worker of ``assert_supported`` if a test calls it: it imports torch meanwhile. Not
    in workers of pytest-xdist: each has all tests, but runs some.
    """
    is_worker = hasattr(session.config, "workerinput")
    if session.config.option.collectonly or is_worker:
        return
    # The names in the code of a test tell, unless a helper calls it: then the first call waits.
    codes = (getattr(getattr(item, "function", None), "__code__", None) for item in session.items)
    if any("assert_supported" in getattr(code, "co_names", ()) for code in codes):
        from lowprec_check.engine.sweep.kept_sweep import start_early

        start_early("cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail marked tests that would not run once per precision."""
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
    from lowprec_check.pytest_plugin.shared import register_own_frames

    register_own_frames(request.config)
    case = getattr(request, "param", None)
    if case is not None and not isinstance(case, Case):
        pytest.fail(f"@pytest.mark.parametrize cannot parametrize the fixture lowprec. {ONE_OF_THEM}", pytrace=False)
    return Lowprec(case, request.node.user_properties)


# -- What was not checked on the device that was asked for

# By the name of a test's property, what to say of its value: a device, or a reason.
_NOT_MEASURED = {
    "lowprec_predicted": "predicted from the catalog, not measured: device {} is not available",
    "lowprec_skipped": "skipped: device {} is not available",
    "lowprec_not_measured": "answered from the catalog, not measured: {}",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count the tests that were skipped, or answered from the catalog, with the reason."""
    properties: set[tuple[str, str, str]] = set()  # each once: a test has several reports
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    for report in (report for report in reports if isinstance(report, pytest.TestReport)):
        properties.update((name, str(value), report.nodeid) for name, value in report.user_properties)
        is_case = "lowprec" in report.keywords  # of the marker, which has no fixture to note it
        if report.skipped and is_case and isinstance(report.longrepr, tuple):
            devices = re.findall(r"device (\S+) is not available$", report.longrepr[2])
            properties.update(("lowprec_skipped", device, report.nodeid) for device in devices)
    counts = Counter((name, value) for name, value, _ in properties if name in _NOT_MEASURED)
    if counts:
        terminalreporter.section("lowprec")
    for (name, value), count in sorted(counts.items()):
        tests = "1 test was" if count == 1 else f"{count:,} tests were"
        terminalreporter.write_line(f"{tests} {_NOT_MEASURED[name].format(value)}")
