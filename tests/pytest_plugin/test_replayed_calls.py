"""Ops that the catalog does not know: one call of the tests is kept and made again in the dtype."""

from __future__ import annotations

import json
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, which works once in a process
from conftest import ROOT

from lowprec_check.catalog.aten import AtenCatalog, AtenSupport
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.pytest_plugin import replayed_calls
from lowprec_check.pytest_plugin.fixture import watch  # noqa: F401 - imported once for all projects
from lowprec_check.pytest_plugin.fixture.cast_replay import MAX_BYTES, CallKeeper, loaded, try_call
from lowprec_check.pytest_plugin.replayed_calls import ReplayAnswer, ReplayTask, replay_calls, with_answer

aten = torch.ops.aten

SUITE = """
import torch
import torch.nn.functional as F
from torch import distributions

def test_linear(): torch.nn.Linear(3, 3)(torch.randn(2, 3))
def test_bicubic(): F.interpolate(torch.rand(1, 3, 8, 8), size=(5, 5), mode="bicubic", antialias=True)
def test_distance():
    x = torch.randn(4, 3, requires_grad=True)
    torch.cdist(x, torch.randn(5, 3)).sum().backward()
def test_binomial(): distributions.Binomial(5, torch.tensor([0.2, 0.5])).sample()
def test_gamma(): distributions.Gamma(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])).sample()
def test_dirichlet(): distributions.Dirichlet(torch.tensor([1.0, 2.0])).sample()
def test_rrelu(): F.rrelu(torch.rand(4) - 0.5, training=True)
def test_optimizer():
    x = torch.nn.Parameter(torch.rand(3))
    x.grad = torch.rand(3)
    torch.optim.Adagrad([x], fused=True).step()
"""


def bare(dtype: torch.dtype) -> dict[str, Any]:
    """By op of the suite, the same call alone in the dtype."""
    x, y = torch.randn(4, 3).to(dtype), torch.randn(5, 3).to(dtype)
    distance = torch.cdist(x.float(), y.float()).to(dtype)
    return {
        "_upsample_bicubic2d_aa": lambda: aten._upsample_bicubic2d_aa(x[None, None], [2, 2], False),
        "_cdist_backward": lambda: aten._cdist_backward(distance, x, y, 2.0, distance),
        "binomial": lambda: torch.binomial(x.abs(), x.abs().clamp(max=1)),
        "_standard_gamma": lambda: torch._standard_gamma(x.abs()),
        "_sample_dirichlet": lambda: torch._sample_dirichlet(x.abs()),
        "_fused_adagrad_": lambda: aten._fused_adagrad_(
            [x], [x.clone()], [x.abs()], [torch.tensor(1.0)],
            lr=0.1, lr_decay=0, weight_decay=0, eps=1e-8, maximize=False,
        ),
    }  # fmt: skip


def failure_of(call: Callable[[], object]) -> str | None:
    """The first line of what a call raises."""
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]
    return None


@pytest.fixture
def suite(project: pytest.Pytester) -> pytest.Pytester:
    project.makepyfile(test_suite=SUITE)
    return project


def saved(suite: pytest.Pytester, *options: str, precision: str = "half,bfloat16") -> bytes:
    """The JSON report."""
    suite.runpytest("--lowprec-coverage", precision, "--lowprec-report", "out.json", *options).assert_outcomes(passed=8)
    return Path("out.json").read_bytes()


def supports(report: bytes) -> dict[str, dict[str, Any]]:
    """By operator and dtype, its support in a report."""
    ops = json.loads(report)["ops"]
    return {use["op"].removeprefix("aten.").removesuffix(".default"): use["support"] for use in ops}


def test_verdicts_are_those_of_bare_calls(suite: pytest.Pytester) -> None:
    found = supports(saved(suite))
    for name in ("float16", "bfloat16"):
        catalog = AtenCatalog("cpu", name, torch.__version__)  # type: ignore[arg-type]
        for op, call in bare(getattr(torch, name)).items():
            assert catalog.of(op).state is None, f"{op} is known by now: choose another"
            support = found[op][name]
            assert support["tried_here"]
            message = failure_of(call)
            if message is None:
                assert (support["state"], support["message"]) == ("all", "one call of these tests, tried here, runs")
            else:
                assert support["state"] == "none", op
                assert message in support["message"]
                assert support["message"].startswith("one call of these tests, tried here, fails: ")

    # An op that runs in part shows whether this call runs.
    support = found["rrelu_with_noise"]["float16"]
    assert support["state"] == "some"
    assert support["condition"] == "fails where training; one call of these tests, tried here, fails"


def test_junit_has_the_gaps_that_a_call_has_shown(suite: pytest.Pytester) -> None:
    saved(suite, "--junitxml", "junit.xml", precision="half")
    cases = {
        case.get("name"): {each.get("name"): each.get("value") for each in case.iter("property")}
        for case in ElementTree.parse("junit.xml").getroot().iter("testcase")
    }
    assert len(cases) == 8
    assert cases["test_linear"] == {}
    assert cases["test_gamma"] == {"lowprec_half": "_standard_gamma"}
    assert cases["test_rrelu"] == {"lowprec_half": "rrelu_with_noise (in part)"}


def test_under_autocast_a_call_is_tried_unless_autocast_casts_to_fp32(suite: pytest.Pytester) -> None:
    found = supports(saved(suite, precision="half,autocast-bf16"))
    assert found["binomial"]["autocast-bf16"]["state"] == "none"
    assert found["binomial"]["autocast-bf16"]["autocast"] == "inputs"
    assert not found["_cdist_forward"]["autocast-bf16"].get("tried_here")
    assert found["_cdist_backward"]["float16"]["state"] == "none"


def test_a_device_that_is_not_here_is_not_tried(suite: pytest.Pytester) -> None:
    found = supports(saved(suite, "--lowprec-device", "xpu"))
    assert not any(each["tried_here"] for support in found.values() for each in support.values())


@pytest.mark.slow
def test_reports_are_the_same_bytes_with_workers(suite: pytest.Pytester) -> None:
    twice = SUITE.replace("test_", "test_again_").replace("[0.2, 0.5]", "[[0.2], [0.5]]")
    suite.makepyfile(test_suite=SUITE, test_twice=twice)
    reports = []
    for options in ((), ("-n2", "--dist=worksteal", "-p", "no:terminal")):
        # in processes of their own: what earlier tests imported decides how torch.distributions checks its arguments
        suite.runpytest_subprocess("--lowprec-coverage", "half,bfloat16", "--lowprec-report", "out.json", *options)
        reports.append(Path("out.json").read_bytes())
    assert len(set(reports)) == 1
    assert supports(reports[0])["binomial"]["float16"]["state"] == "none"


def test_ops_of_the_suite_and_large_calls_stay_unknown(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import torch

        @torch.library.custom_op("own_suite::double", mutates_args=())
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def test_own(): double(torch.ones(3))
        def test_large(): torch._standard_gamma(torch.ones(1000, 1000))
        """
    )
    project.runpytest("--lowprec-coverage", "half", "--lowprec-report", "out.json").assert_outcomes(passed=2)
    found = supports(Path("out.json").read_bytes())
    own, large = found["own_suite.double"]["float16"], found["_standard_gamma"]["float16"]
    assert own["state"] is large["state"] is None
    assert own["message"] == "not tried here: no installed package is named own_suite"
    assert large["message"] == "not tried here: its arguments take more than 1 MiB"


# -- what is kept


def keeper(position: int = 0) -> CallKeeper:
    return CallKeeper(lambda: position)


def test_kept_arguments_have_their_strides_memory_and_types() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    named = (
        torch.half,
        torch.strided,
        torch.device("cpu"),
        torch.channels_last,
        2.5,
        True,
        None,
        [1, 2],
        1 + 2j,
        "none",
    )
    keep = keeper()
    keep("op", aten.add.Tensor, (base.t()[1], [base[:, 1:2].expand(3, 4), None], *named), {"alpha": 3})
    assert keep.calls["op"].data is not None
    args, kwargs = loaded(keep.calls["op"].data, "cpu")
    left, (right, nothing), *rest = args
    assert (left.stride(), right.stride(), nothing) == ((4,), (4, 0), None)
    assert torch.equal(left, base.t()[1])
    left.zero_()
    assert not right.any()
    assert tuple(rest) == named
    assert kwargs == {"alpha": 3}


def test_keeping_a_call_shows_nowhere() -> None:
    functions: list[object] = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            functions.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.nn.Parameter(torch.ones(2))
    x.register_hook(lambda gradient: gradient)
    keep, drawn = keeper(), torch.get_rng_state()
    with warnings.catch_warnings(), Functions():
        warnings.simplefilter("error")
        keep("op", aten.neg.default, (x,), {})
    assert keep.calls["op"].why_not is None
    assert functions == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert x.requires_grad


def test_the_first_test_whose_call_can_be_kept_decides() -> None:
    large, small = torch.ones(MAX_BYTES // 4 + 1), torch.ones(3)
    calls = {4: small, 1: large, 3: torch.zeros(3), 5: large}
    for order in ([4, 1, 3, 5], [1, 3, 4, 5], [5, 4, 3, 1]):
        keep = CallKeeper(iter(order).__next__)
        for position in order:
            keep("op", aten.neg.default, (calls[position],), {})
        kept = keep.calls["op"]
        assert kept.position == 3
        assert kept.data is not None
        assert not loaded(kept.data, "cpu")[0][0].any()


def test_what_cannot_be_kept_says_why() -> None:
    keep = keeper()
    keep("sparse", aten.neg.default, (torch.eye(2).to_sparse(),), {})
    keep("object", aten.neg.default, (torch.eye(2), object()), {})
    assert keep.calls["sparse"].why_not == "an argument is not a plain dense tensor"
    assert keep.calls["object"].why_not == "its arguments cannot be saved: object"


# -- the process


@pytest.fixture
def with_killers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The process has the ops of `killing_replay`."""
    monkeypatch.setattr(replayed_calls, "WORKER", "killing_replay")
    monkeypatch.setattr(replayed_calls, "CALL_SECONDS", 1.5)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    return tmp_path


@pytest.mark.slow
def test_a_call_that_ends_the_process_costs_only_its_op(with_killers: Path) -> None:
    keep = keeper()
    keep("x", aten.neg.default, (torch.ones(2),), {})
    call = keep.calls["x"].data
    assert call is not None
    names = ("dies", "dies_in_fp32", "hangs", "runs")
    tasks = [
        ReplayTask(op=f"killing_replay_ops.{name}.default", dtype="float16", device="cpu", call=call) for name in names
    ]
    answers = replay_calls(tasks, with_killers)
    found = {name: answers[f"killing_replay_ops.{name}.default", "float16"] for name in names}
    assert found["dies"].raised is not None
    assert (found["dies"].raised.type, found["dies"].raised.died) == ("SIGSEGV", True)
    assert not found["dies_in_fp32"].tried
    assert found["hangs"].raised is not None
    assert found["hangs"].raised.type == "timeout"
    assert found["runs"] == ReplayAnswer(tried=True)
    unknown = AtenSupport(state=None)
    states = {name: with_answer(name, unknown, answer) for name, answer in found.items()}
    assert {name: support.state for name, support in states.items()} == {
        "dies": "none", "dies_in_fp32": None, "hangs": None, "runs": "all",
    }  # fmt: skip
    assert states["dies"].kind == "crash"


def test_a_process_that_does_not_start_leaves_all_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(replayed_calls, "WORKER", "no_such_module_of_ours")
    task = ReplayTask(op="aten.neg.default", dtype="float16", device="cpu", call=b"")
    assert replay_calls([task], tmp_path) == {}


def test_a_mismatch_of_dtypes_in_a_derivative_says_nothing() -> None:
    raised = Raised("RuntimeError", "expected scalar type Float but found Half")
    answer = ReplayAnswer(tried=True, raised=raised)
    assert with_answer("aten.some_backward.default", AtenSupport(state=None), answer).state is None
    assert with_answer("aten.some.default", AtenSupport(state=None), answer).state == "none"


def test_steps_of_an_optimizer_stay_in_fp32() -> None:
    x = torch.ones(2)
    args = ([x], [x.clone()], [x.clone()], [torch.tensor(1.0)])
    numbers = {"lr": 0.1, "lr_decay": 0, "weight_decay": 0, "eps": 1e-8, "maximize": False}
    assert try_call(aten._fused_adagrad_.default, args, numbers, torch.bfloat16) is None
    assert torch.equal(x, torch.ones(2))  # the call works on copies
