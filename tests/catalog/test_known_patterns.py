"""Patterns of reported faults: what they ask for, and that other models do not show it."""

from __future__ import annotations

import re

import msgspec
import pytest
from conftest import ROOT

from lowprec_check.analysis.rules.registry import rules
from lowprec_check.catalog import declared
from lowprec_check.catalog.known_issues import KnownPattern, OpsAround, best_fit, known_issues, known_patterns

PATTERNS = known_patterns()


def shown_by(pattern: KnownPattern) -> OpsAround:
    """The least that it asks for."""
    return OpsAround(
        op=pattern.ops[0],
        reads=frozenset(names.partition("|")[0] for names in pattern.reads),
        feeds=frozenset(names.partition("|")[0] for names in pattern.feeds),
        largest=pattern.at_least,
        in_fp32=pattern.in_fp32,
        directly=frozenset(names.partition("|")[0] for names in pattern.directly),
        vanished=pattern.vanished,
    )


def test_kernels_and_patterns_are_at_least_forty() -> None:
    assert len(known_issues()) + len(PATTERNS) >= 40
    assert len({pattern.id for pattern in PATTERNS}) == len(PATTERNS)


def test_codes_ops_and_examples_exist() -> None:
    names = {op.partition(".")[0] for release in declared.releases("xpu") for op in declared.load("xpu", release).ops}
    functions = {"conv1d", "conv2d", "conv3d", "cdist"}
    for pattern in PATTERNS:
        assert set(pattern.codes) <= rules().keys(), pattern.id
        around = "|".join(
            [*pattern.ops, *pattern.reads, *pattern.feeds, *pattern.absent, *pattern.not_before, *pattern.directly]
        ).split("|")
        assert {name for name in around if name not in names} <= functions, pattern.id
        assert (ROOT / "tests" / "field" / f"{pattern.example}.py").is_file()


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.id)
def test_a_pattern_fits_what_it_asks_for_and_nothing_less(pattern: KnownPattern) -> None:
    around = shown_by(pattern)
    assert pattern.fits(around)
    assert not pattern.fits(around._replace(op="view"))
    if pattern.reads:
        assert not pattern.fits(around._replace(reads=frozenset()))
    if pattern.feeds:
        assert not pattern.fits(around._replace(feeds=frozenset()))
    for names in pattern.absent:
        assert not pattern.fits(around._replace(feeds=around.feeds | {names.partition("|")[0]}))
    if pattern.at_least is not None:
        assert not pattern.fits(around._replace(largest=pattern.at_least / 2))
    for names in pattern.not_before:
        assert not pattern.fits(around._replace(reads=around.reads | {names.partition("|")[0]}))
    if pattern.directly:
        assert not pattern.fits(around._replace(directly=frozenset()))
    if pattern.without_input:
        assert not pattern.fits(around._replace(from_input=True))
    if pattern.vanished:
        assert not pattern.fits(around._replace(vanished=False))
    if pattern.in_fp32:
        assert not pattern.fits(around._replace(in_fp32=False))


def test_the_pattern_that_asks_for_most_is_shown() -> None:
    cast_before, computed_low = (
        next(each for each in PATTERNS if each.id == name) for name in ("rope-buffer", "rope-tables")
    )
    both = [computed_low, cast_before]
    around = shown_by(cast_before)
    assert best_fit(both, around) is cast_before
    assert best_fit(both, around._replace(in_fp32=False)) is computed_low
    assert best_fit([], around) is None


def test_a_pattern_is_about_its_precisions_and_ways() -> None:
    pattern = next(each for each in PATTERNS if each.ways == ["autocast"])
    assert pattern.may_fit(pattern.codes[0], "half", "autocast")
    assert not pattern.may_fit(pattern.codes[0], "half", "cast")
    assert not pattern.may_fit("LP905", "half", "autocast")
    overflow = next(each for each in PATTERNS if each.dtypes == ["half"])
    assert not overflow.may_fit(overflow.codes[0], "bfloat16", "cast")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": "see there"}, "not an https link"),
        ({"codes": ["201"]}, "not a diagnostic code"),
        ({"ops": []}, "needs codes and ops"),
    ],
)
def test_an_entry_is_checked(change: dict[str, object], message: str) -> None:
    entry = msgspec.to_builtins(PATTERNS[0]) | change
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(entry, KnownPattern)


def test_the_file_has_only_keys_of_the_struct() -> None:
    text = (ROOT / "catalog" / "known_patterns.toml").read_text(encoding="utf-8")
    assert text.count("[[pattern]]") == len(PATTERNS)
    assert set(re.findall(r"^(\w+) =", text, re.MULTILINE)) <= set(KnownPattern.__struct_fields__)
