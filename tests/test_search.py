"""The search on synthetic trees and verdicts: its result is minimal, or the best found within the limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowprec_check.analysis.blame import Suspects
from lowprec_check.analysis.minimize import SearchResult, Trials, Verdict, search
from lowprec_check.analysis.module_tree import Keep, ModuleTree

NOTHING = Suspects([], [], False)


def stack(blocks: int, layers: int = 3) -> ModuleTree:
    kinds = {}
    for block in range(blocks):
        kinds[f"blocks.{block}"] = "Block"
        kinds |= {f"blocks.{block}.l{layer}": "Linear" for layer in range(layers)}
    return ModuleTree(kinds)


def find(
    tree: ModuleTree, needed: set[str], likely: list[str] | None = None, *, most: int = 10_000
) -> tuple[SearchResult, Trials]:
    """Search for a set that covers all of ``needed``."""

    def run(keep: Keep) -> Verdict:
        return Verdict(all(covered(name, keep) for name in needed))

    trials = Trials(tree, run, lambda count: "limit" if count >= most else None)
    order = likely if likely is not None else [path for path in tree.types if not tree.children(path)]
    return search(tree, Suspects([], order, False), trials, lambda keep: NOTHING), trials


def covered(name: str, keep: Keep) -> bool:
    return any(name == kept or name.startswith(f"{kept}.") for kept in keep)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[ModuleTree, set[str], list[str]]:
    tree = stack(draw(st.integers(1, 12)), draw(st.integers(1, 4)))
    leaves = [path for path in tree.types if not tree.children(path)]
    needed = draw(st.sets(st.sampled_from(leaves), min_size=1, max_size=6))
    return tree, needed, draw(st.permutations(leaves))


@settings(max_examples=200, deadline=None)
@given(stacks())
def test_finds_exactly_what_is_needed(drawn: tuple[ModuleTree, set[str], list[str]]) -> None:
    tree, needed, likely = drawn
    found, _ = find(tree, needed, likely)
    assert found == SearchResult(tree.normalized(needed), True)


@settings(max_examples=100, deadline=None)
@given(stacks(), st.integers(1, 40))
def test_a_stopped_search_returns_the_best_set_so_far(drawn: tuple[ModuleTree, set[str], list[str]], most: int) -> None:
    tree, needed, likely = drawn
    found, trials = find(tree, needed, likely, most=most)
    assert trials.count <= most
    if found.keep is None:
        assert not any(verdict.passes for verdict in trials.verdicts.values())
    else:
        assert all(covered(name, found.keep) for name in needed)
        assert found.minimal == (trials.stopped is None)


@pytest.mark.parametrize("bad", range(0, 126, 5))
def test_trials_for_one_bad_layer_grow_logarithmically(bad: int) -> None:
    tree = stack(42)
    leaves = [path for path in tree.types if not tree.children(path)]
    found, trials = find(tree, {leaves[bad]})
    assert found.keep == (leaves[bad],)
    assert trials.count <= 3 * 7 + 10


def test_one_trial_if_the_first_suspect_is_enough() -> None:
    tree = stack(42)
    _, trials = find(tree, {"blocks.7.l1"}, ["blocks.7.l1", "blocks.3.l0"])
    assert trials.count == 1


def test_counterparts_in_a_stack_are_tried_together() -> None:
    tree = stack(12)
    norms = [f"blocks.{block}.l1" for block in range(12)]
    _, trials = find(tree, set(norms), [norms[5], *(path for path in tree.types if not tree.children(path))])
    assert list(trials.verdicts)[1:3] == [("blocks.5.l1",), tuple(norms)]


def test_a_container_that_fails_in_its_own_forward_stays_whole() -> None:
    tree = stack(4)

    def run(keep: Keep) -> Verdict:
        return Verdict("blocks.2" in keep)

    trials = Trials(tree, run, lambda count: None)
    found = search(tree, Suspects([], list(tree.types)[1:4], False), trials, lambda keep: NOTHING)
    assert found == SearchResult(("blocks.2",), True)


def test_failures_hidden_by_the_first_one_are_found() -> None:
    tree, needed = stack(30), [f"blocks.{block}.l0" for block in (3, 17, 29)]

    def explain(keep: Keep) -> Suspects:
        return Suspects([next(name for name in needed if name not in keep)], [], False)

    trials = Trials(tree, lambda keep: Verdict(set(needed) <= set(keep)), lambda count: None)
    found = search(tree, Suspects(needed[:1], [], False), trials, explain)
    assert found == SearchResult(tuple(needed), True)
    assert trials.count <= 30
    assert sum(trials.verdicts[keep].passes for keep in list(trials.verdicts)[:3]) == 1


@pytest.mark.parametrize("verdict", [Verdict(False), Verdict(True, any_low=False)])
def test_all_ops_in_fp32_is_not_a_plan(verdict: Verdict) -> None:
    tree = stack(3)
    everything = tree.normalized(tree.children(""))

    def run(keep: Keep) -> Verdict:
        return verdict if keep == everything else Verdict(False)

    found, _ = (search(tree, NOTHING, (t := Trials(tree, run, lambda count: None)), lambda keep: NOTHING), t)
    assert found == SearchResult(None, False)


def test_one_trial_if_the_models_own_forward_fails() -> None:
    tree = stack(50)
    trials = Trials(tree, lambda keep: Verdict(False), lambda count: None)
    assert search(tree, Suspects([], [], True), trials, lambda keep: NOTHING).keep is None
    assert trials.count == 1


def test_nested_modules_count_once() -> None:
    tree = stack(2)
    assert tree.normalized(["blocks.1.l0", "blocks.1", "elsewhere"]) == ("blocks.1",)
    assert tree.leaves(["blocks.0"]) == {"blocks.0.l0", "blocks.0.l1", "blocks.0.l2"}
