"""Arguments of the Python API that people pass by mistake, or in another form than documented."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

from lowprec_check import UsageError, find_plan, scan

NET = nn.Linear(3, 2).eval()
INPUTS = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"budget": "long"}, "budget is 'long'.\nGive a number above 0"),
        ({"budget": 0}, "budget is 0"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"tolerance": "1e-2"}, "tolerance is '1e-2'"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": -1}, "tolerance is -1.\nGive a number of at least 0"),
        ({"seed": None}, "seed is None"),
        ({"seed": "0"}, "seed is '0'"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"batches": None}, "batches is None.\nGive an integer of at least 1"),
        ({"torch_version": 2.13}, "torch_version is 2.13.\nGive a string"),
        ({"device": torch.device("meta")}, "Unknown device 'meta'"),
        ({"select": ["XX"]}, "No diagnostic code starts with 'XX'"),
        ({"ignore": "LP9,XX"}, "No diagnostic code starts with 'XX'"),
        ({"without_kernel": "aten.dot"}, "'aten.dot' names no kernel to run without"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        scan(NET, INPUTS, **given, isolation="none")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": "long"}, "seconds is 'long'"),
        ({"seconds": None}, "seconds is None.\nGive a number above 0"),
        ({"max_drop": -1, "metric": float}, "max_drop is -1"),
        ({"dtype": ["fp16", "fp99"]}, "Unknown precision 'fp99'"),
        ({"device": torch.device("meta")}, "Unknown device 'meta'"),
    ],
)
def test_a_wrong_argument_of_a_search_is_a_usage_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_plan(NET, INPUTS, **given, isolation="none")
    assert message in str(raised.value)


@pytest.mark.parametrize("function", [scan, find_plan])
def test_an_unknown_argument_is_reported_with_the_name_of_the_function(function: Callable[..., Any]) -> None:
    for wrong in ("policies", "use_metric"):
        message = rf"{function.__name__}\(\): got an unexpected keyword argument '{wrong}'"
        with pytest.raises(TypeError, match=message):
            function(NET, INPUTS, **{wrong: True})
    with pytest.raises(TypeError, match=rf"{function.__name__}\(\): too many positional"):
        function(NET, INPUTS, "half")


@pytest.mark.parametrize("function", [scan, find_plan])
def test_the_signature_and_the_type_hints_agree(function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)
    hints = get_type_hints(function)
    assert {name: each.annotation for name, each in signature.parameters.items()} | {"return": hints["return"]} == hints
    assert signature.return_annotation is hints["return"]
    assert hints["model"] is nn.Module
    assert "several in a string with commas" in (function.__doc__ or "")


def test_other_forms_of_arguments() -> None:
    result = scan(
        NET,
        INPUTS,
        precision=torch.float16,
        device=torch.device("cpu"),
        without_kernel="aten.addmm:half,aten.mm:half",
        select="LP1",
        plan=False,
        isolation="none",
    )
    assert [finding.code for finding in result.diagnostics] == ["LP101"]
    assert scan(NET, INPUTS, precision="half,", ignore="LP", plan=False, isolation="none").diagnostics == []
    assert scan(
        NET, INPUTS, precision="half", without_kernel=None, select=None, ignore=None, plan=False, isolation="none"
    ).runs  # type: ignore[arg-type]
    planning = find_plan(
        NET, INPUTS, dtype=[torch.float16, "autocast-bf16"], device=torch.device("cpu"), isolation="none"
    )
    assert [attempt.base for attempt in planning.attempts] == ["autocast-bf16", "autocast-fp16", "half"]


class Refuses(nn.Linear):
    """As quantized models of transformers do."""

    error: type[BaseException] = ValueError

    def half(self) -> Any:
        raise self.error("cast it to another dtype")


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_model_that_refuses_a_precision_is_a_failed_run(error: type[BaseException]) -> None:
    model = Refuses(3, 2).eval()
    model.error = error
    result = scan(model, INPUTS, precisions="half,bfloat16", isolation="none")
    refused = result.run("half")
    assert refused.status == "error"
    assert refused.exception is not None
    assert (refused.exception.type, refused.exception.message) == (error.__name__, "cast it to another dtype")
    assert refused.exception.source is not None
    assert refused.exception.source.startswith("tests/core/test_arguments.py:")
    assert not refused.gaps
    assert result.run("bfloat16").status == "ok"
    assert model.weight.dtype == torch.float32
