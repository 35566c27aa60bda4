"""The pytest plugin: what pytest calls. Imports neither torch nor a room of ours until a test or an option asks.

The fixture ``lowprec``, the marker ``lowprec``, and options and ini keys that all begin with ``lowprec``.
See docs/pytest.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec

_MARKER = """lowprec(*precisions, device="cpu", backend="eager", tolerance=None): run the test once in each precision \
({precisions}), with lowprec.cast(model), lowprec.autocast() and lowprec.allclose(y, reference); device: the test is \
skipped if it is not available; backend: for lowprec.check ({backends}); tolerance: the largest rel_l2 that passes, by \
default that of the precision."""


def marker_help(config: pytest.Config) -> str:
    """The marker's line in ``pytest --markers``, where it lists what is registered; elsewhere nothing is looked up."""
    if not config.option.markers:
        return "lowprec"
    from lowprec_check.schema.backends import BACKENDS
    from lowprec_check.schema.precisions import low_precisions

    precisions = ", ".join(precision.name for precision in low_precisions())
    return _MARKER.format(precisions=precisions, backends=", ".join(BACKENDS.names()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare options; each has an ini key of the same name, which counts where the option is absent."""
    group = parser.getgroup("lowprec", "low precision (lowprec-check)")
    group.addoption(
        "--lowprec-coverage",
        metavar="DTYPE",
        action="append",
        help="Record the operators of every test and end with a table of those that lack half or bfloat16; repeatable.",
    )
    group.addoption(
        "--lowprec-device",
        metavar="DEVICE",
        help="Device of that table: cpu, cuda or xpu; it need not be there. By default cpu.",
    )
    group.addoption(
        "--lowprec-report", metavar="FILE", help="Write all of that table to FILE: .json, .md or .html by its suffix."
    )
    group.addoption(
        "--lowprec-manifest",
        metavar="FILE",
        help="Known failures (TOML): these tests must fail, each with its exception; one that passes is a failure.",
    )
    group.addoption(
        "--lowprec-update-manifest",
        action="store_true",
        help="Rewrite the manifest from what the tests of this run do; reasons are kept.",
    )
    parser.addini("lowprec_coverage", "As --lowprec-coverage: half, bfloat16 or both.", type="args", default=[])
    parser.addini("lowprec_device", "As --lowprec-device.", default=None)
    parser.addini("lowprec_report", "As --lowprec-report, relative to the ini file.", default=None)
    parser.addini("lowprec_manifest", "As --lowprec-manifest, relative to the ini file.", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the parts that options ask for."""
    config.addinivalue_line("markers", marker_help(config))
    option = config.option
    if option.lowprec_manifest or option.lowprec_update_manifest or config.getini("lowprec_manifest"):
        from lowprec_check.pytest_plugin import known_failures as known

        known.register(config)
    wanted = (option.lowprec_coverage, config.getini("lowprec_coverage"))
    needs_it = (option.lowprec_device, option.lowprec_report)
    if any(wanted) or any(needs_it):
        from lowprec_check.pytest_plugin import coverage

        coverage.register(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each precision of the marker."""
    mark = metafunc.definition.get_closest_marker("lowprec")
    if mark is not None:
        from lowprec_check.pytest_plugin.marker import parametrize

        parametrize(metafunc, mark)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Methods of ``unittest.TestCase`` cannot be run once per precision: say so instead of running them once."""
    if getattr(item, "callspec", None) is None and item.get_closest_marker("lowprec") is not None:
        pytest.fail(
            "The marker lowprec does not work here: methods of unittest.TestCase take no fixtures. "
            "Make it a function or a method of a plain class.",
            pytrace=False,
        )


@pytest.fixture
def lowprec(request: pytest.FixtureRequest) -> Lowprec:
    """Assertions on low precision: ``check``, ``assert_supported``, ``assert_no_gaps``, ``record``.

    In a test with the marker ``lowprec`` also ``cast``, ``autocast`` and ``allclose``.
    """
    from lowprec_check.pytest_plugin.fixture.lowprec import Lowprec

    return Lowprec(getattr(request, "param", None))
