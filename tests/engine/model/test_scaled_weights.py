"""Random weights scaled where the signal vanishes or explodes: zeros are drawn anew, nothing else changes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowprec_check.analysis.conclusion import conclude
from lowprec_check.core.session import scan_file
from lowprec_check.core.target_runs import TargetRuns
from lowprec_check.engine.model.target import Target, make_target
from lowprec_check.engine.model.target_source import load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.weights import LARGEST, SMALLEST, TARGET, scale_weights
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import ScanResult


def size(tensor: Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt())


def scaled(model: nn.Module, inputs: Any, seed: int = 0) -> Target:
    return scale_weights(make_target(model.eval(), inputs), seed, 1e-12)


def sizes_of_outputs(model: nn.Module, inputs: Tensor, *kinds: type[nn.Module]) -> list[float]:
    found: list[float] = []
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output: found.append(size(output)))
        for module in model.modules()
        if isinstance(module, kinds)
    ]
    with torch.no_grad():
        model(inputs)
    for handle in handles:
        handle.remove()
    return found


def shrinking() -> nn.Sequential:
    """Twenty layers, each of which divides the signal by about 60."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(20):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.05 if parameter.ndim > 1 else 1.0)
        for module in model:
            if isinstance(module, nn.Conv2d):
                assert module.bias is not None
                module.bias.zero_()
    return model.eval()


def test_a_signal_that_vanishes_is_kept_up() -> None:
    model, image = shrinking(), torch.randn(2, 3 + 5, 6, 6)
    before = sizes_of_outputs(model, image, nn.Conv2d)
    assert before[-1] < 1e-20
    target = scaled(model, image)
    assert target.weights == "scaled"
    assert target.notes[-1].startswith(
        "random weights of 19 of 41 layers were scaled: with the initial ones the output is 1e-12"
    )
    sizes = sizes_of_outputs(model, image, nn.Conv2d, nn.Linear)
    assert all(SMALLEST <= found <= LARGEST for found in sizes)
    assert sizes[1:-1] == pytest.approx([TARGET] * 19, rel=1e-3)


def test_layers_that_explode_shrink() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100.0)
    scaled(model, inputs := torch.randn(4, 64))
    assert all(SMALLEST <= found <= LARGEST for found in sizes_of_outputs(model, inputs, nn.Linear))


def test_a_healthy_model_keeps_its_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64))
    before = [parameter.clone() for parameter in model.parameters()]
    target = scaled(model, torch.randn(4, 64))
    assert (target.weights, target.notes) == ("unknown", ())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Residual(nn.Module):
    """What is zero or tiny at the start: a gamma, LayerScale, the output projection, the head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-6))
        self.skip = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(8, 5)
        with torch.no_grad():
            for zero in (self.norm.weight, self.head.weight, self.head.bias):
                zero.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)) * self.scale
        return self.head((y * self.skip).mean((2, 3)))


def test_what_is_zero_is_drawn_anew() -> None:
    torch.manual_seed(0)
    model = Residual()
    scaled(model, image := torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        assert size(model(image)) == pytest.approx(TARGET, rel=1e-3)
    assert bool((model.norm.weight == model.norm.weight[0]).all())
    assert size(model.norm(model.conv(image)) * model.scale) == pytest.approx(TARGET, rel=1e-3)
    assert float(model.norm.weight.detach()[0]) == 1.0
    assert model.head.weight.count_nonzero() == 40
    assert model.head.bias.count_nonzero() == 0
    assert bool(model.skip.detach())


def test_attention_and_shared_weights() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.out = nn.Linear(32, 50, bias=False)
            self.out.weight = self.embed.weight
            nn.init.normal_(self.embed.weight, std=1e-4)
            nn.init.normal_(self.layer.self_attn.in_proj_weight, std=1e-4)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.out(self.layer(self.embed(ids)))
            return logits

    torch.manual_seed(0)
    model, ids = Net().eval(), torch.randint(0, 50, (2, 16))
    before = model.layer.self_attn.in_proj_weight.clone()
    scaled(model, ids)
    with torch.no_grad():
        assert size(model.embed(ids)) == pytest.approx(TARGET, rel=1e-3)  # its first use counts
        x = model.embed(ids)
        projected = nn.functional.linear(x, model.layer.self_attn.in_proj_weight, model.layer.self_attn.in_proj_bias)
    assert size(projected) == pytest.approx(TARGET, rel=1e-3)
    assert not torch.equal(before, model.layer.self_attn.in_proj_weight)
    ratio = before / model.layer.self_attn.in_proj_weight
    assert float(ratio.detach().std() / ratio.detach().mean().abs()) < 1e-5  # one factor for all


def test_nothing_else_changes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model.train()
    inputs = torch.randn(4, 8)
    kept, running = inputs.clone(), model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    scale_weights(make_target(model, inputs), 0, 0.0)
    assert torch.equal(inputs, kept)
    assert torch.equal(model[1].running_mean, running)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), state)
    assert (torch.get_num_threads(), model.training) == (threads, True)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_seed_decides_what_is_drawn() -> None:
    def head(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = Residual()
        scaled(model, torch.randn(2, 3, 8, 8), seed)
        return model.head.weight.detach()

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))


def test_a_model_that_fails_is_named() -> None:
    with pytest.raises(UsageError, match="could not be scaled, since the model fails: RuntimeError: mat1"):
        scaled(nn.Linear(4, 4), torch.randn(2, 5))


def test_each_load_gives_the_same_weights(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 9))\n"
        "inputs = torch.randn(64, 512)\n"
    )
    before, models = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            models.append(scale_weights(load_spec(TargetSpec(str(file)), 0), 0, 0.0).model)
    finally:
        torch.set_num_threads(before)
    one, two = models
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


VANISHING = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(40)))
inputs = torch.randn(1, 64)
"""


OPTIONS = ScanOptions(precisions="half", errors="none", times="off", plan=False, further_inputs=0, budget=300.0)


def last(spec: TargetSpec, isolation: Isolation) -> ScanResult:
    *_, result = scan_file(spec, OPTIONS, isolation)
    return result


def test_a_model_of_the_user_keeps_its_weights(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(VANISHING)
    result = last(TargetSpec(str(file)), "none")
    assert result.model.weights == "unknown"
    assert not any("scaled" in note for note in result.model.notes)
    assert (result.run("half").status, (result.run("half").output_rms or 1) < 1e-8) == ("inaccurate", True)


@pytest.mark.parametrize(
    "isolation", ["none", "fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "shared"))]
)
def test_a_model_by_name_whose_output_vanishes_is_scaled(isolation: Isolation) -> None:
    import_torchvision()
    result = last(TargetSpec("torchvision:mobilenet_v3_small", ("1x3x32x32",)), isolation)
    assert result.model.weights == "scaled"
    assert re.search(
        r"random weights of \d+ of \d+ layers were scaled: .* output is \de-\d+", "\n".join(result.model.notes)
    )
    assert result.run("half").status == "ok"
    assert SMALLEST <= (result.run("half").output_rms or 0) <= LARGEST
    assert not [finding for finding in conclude(result).diagnostics if finding.code == "LP902"]


def test_a_healthy_model_by_name_is_run_once_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    import_torchvision()
    references, reference = [], TargetRuns.reference
    monkeypatch.setattr(
        TargetRuns, "reference", lambda *a, **b: references.append(reference(*a, **b)) or references[-1]
    )
    result = last(TargetSpec("torchvision:squeezenet1_1", ("1x3x32x32",)), "none")
    assert (result.model.weights, len(references)) == ("random", 1)
    assert not any("scaled" in note for note in result.model.notes)
