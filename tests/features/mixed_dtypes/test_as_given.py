"""A model with several floating dtypes is called as it is given, and fails first of all if the plain model does."""

from __future__ import annotations

import pytest
import torch
from helpers import scan_here, screen_of
from torch import Tensor, nn

from lowprec_check.schema.scan_result import ScanResult


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter in another dtype."""

    def __init__(self, base: torch.dtype, adapter: torch.dtype, *, casts: bool) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8).to(base), nn.Linear(8, 2).to(adapter), nn.Linear(2, 8)
        self.up.to(adapter)
        self.casts = casts

    def forward(self, x: Tensor) -> Tensor:
        if self.casts:
            return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)
        return self.base(x) + self.up(self.down(x))


def adapted(base: torch.dtype, adapter: torch.dtype, *, casts: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(base, adapter, casts=casts) for _ in range(4))).eval()


def scanned(model: nn.Module, x: Tensor) -> ScanResult:
    return scan_here(model, x, precisions=["bfloat16"], plan=False, further_inputs=0)


@pytest.mark.parametrize("base", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("adapter", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("casts", [False, True])
def test_the_model_is_said_to_fail_if_the_plain_call_does(base: torch.dtype, adapter: torch.dtype, casts: bool) -> None:
    x, model = torch.randn(3, 8).to(base), adapted(base, adapter, casts=casts)
    raised = ""
    try:
        with torch.no_grad():
            model(x)
    except RuntimeError as error:
        raised = str(error)
    assert bool(raised) == (base != adapter and not casts)

    result = scanned(model, x)
    screen = " ".join(screen_of(result, width=1000, verbose=True).split())
    if base == adapter:
        assert result.as_given is None
    else:
        assert result.as_given is not None
        names = {str(base)[6:]: ["*.base"], str(adapter)[6:]: ["*.down", "*.up"]}
        assert result.as_given.dtypes == names
        assert f"parameters in {str(base)[6:]} (*.base) and {str(adapter)[6:]} (*.down, *.up)" in screen
    assert ("As it is, your model fails" in screen) == bool(raised)
    if raised:
        assert result.as_given is not None
        assert result.as_given.mixed is not None
        assert (result.as_given.mixed.module, result.as_given.mixed.op) == ("0.down", "aten.addmm.default")
        assert raised.removesuffix(".") in screen
        assert screen.index("As it is, your model fails") < screen.index("Only the forward pass")
    assert all(parameter.dtype in (base, adapter) for parameter in model.parameters())


def test_inputs_of_another_dtype_than_the_model() -> None:
    result = scanned(nn.Sequential(nn.Linear(8, 8)).half().eval(), torch.randn(3, 8))
    assert result.as_given is not None
    assert result.as_given.mixed is not None
    dtypes = {tensor.argument: (tensor.dtype, tensor.origin.kind) for tensor in result.as_given.mixed.inputs}
    assert dtypes["mat1"] == ("float32", "input")
    assert dtypes["mat2"] == ("float16", "parameter")


def test_another_exception_is_no_mismatch() -> None:
    class Fails(Adapted):
        def forward(self, x: Tensor) -> Tensor:
            if self.down.weight.dtype != self.base.weight.dtype:
                raise ValueError("only one dtype")
            return super().forward(x)

    result = scanned(Fails(torch.float16, torch.float32, casts=True).eval(), torch.randn(3, 8).half())
    assert result.as_given is not None
    assert result.as_given.exception is not None
    assert result.as_given.mixed is None
    assert "only one dtype" in screen_of(result, width=1000, verbose=True)
