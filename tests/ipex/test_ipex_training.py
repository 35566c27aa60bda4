"""The optimizers of Intel's extension as ways to train, against torch's and against loops as Intel documents them."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_loops import mean_square, sgd, trained, training

from lowprec_check.engine.model.prepared import prepared
from lowprec_check.features.training.advice import training_code
from lowprec_check.features.training.steps import state_bytes
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.ways_to_train import WAYS

Make = Callable[[Any], Any]

EXTENSION_WAYS = ["ipex-split", "ipex-master", "ipex-fused"]

TORCH: dict[str, Make] = {
    "sgd": sgd(1e-3, momentum=0.9),
    "nesterov": sgd(1e-3, momentum=0.9, weight_decay=0.1, nesterov=True),
    "dampening": sgd(1e-3, momentum=0.9, dampening=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4, weight_decay=0.1, lr_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-5, weight_decay=0.1),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-5, amsgrad=True),
}


def lamb(parameters: Any) -> Any:
    from intel_extension_for_pytorch.optim._lamb import Lamb

    return Lamb(parameters, lr=1e-4, weight_decay=0.1)


MAKERS = TORCH | {"lamb": lamb}
BY_OPTIMIZER = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def linear(size: int = 65) -> nn.Linear:
    """Its weights are bf16 values in fp32; sizes are no multiple of a vector of the processor."""
    torch.manual_seed(0)
    model = nn.Linear(size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh(), nn.Linear(33, 8))


def extension_updates(name: str, model: nn.Module, make: Make) -> Any:
    return WAYS.get(name).updates(model, make)


def split_updates(model: nn.Module, make: Make) -> Any:
    """Those of weights split by torch."""
    return WAYS.get("split-weights").updates(model.bfloat16(), make)


def trained_weights(updates: Any) -> list[Tensor]:
    return WAYS.get("ipex-split" if hasattr(updates, "trails") else "split-weights").weights(updates)


def extension_ways(optimizer: Any) -> list[str]:
    return [way.name for way in WAYS if way.trial == "own process" and not way.why_not(optimizer)]


def gradients(parameters: list[Any], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(parameter.shape, generator=generator).bfloat16() for parameter in parameters]


def moved(updates: Any, steps: int, start: list[Tensor]) -> Tensor:
    """How far the fp32 weights move in steps with given gradients."""
    for step in range(steps):
        updates.zero_grad()
        for parameter, gradient in zip(updates.parameters, gradients(updates.parameters, step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        updates.step()
    found = trained_weights(updates)
    return torch.cat([(w.detach() - before).flatten() for w, before in zip(found, start, strict=True)])


# -- the optimizers


@BY_OPTIMIZER
@pytest.mark.parametrize("name", EXTENSION_WAYS)
def test_the_updates_are_those_of_weights_split_by_torch(ipex: Any, make: Make, name: str) -> None:
    """Given the same gradients; split weights keep all 32 bits, and their optimizer computes in fp32."""
    model = linear()
    if name == "ipex-master" and isinstance(make(model.parameters()), torch.optim.Adagrad):
        pytest.skip("wrong in the extension, see below")
    start = [parameter.detach().clone() for parameter in model.parameters()]
    expected = moved(split_updates(copy.deepcopy(model), make), 20, start)
    updates = extension_updates(name, model, make)
    found = moved(updates, 20, start)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    assert [parameter.dtype == torch.bfloat16 for parameter in updates.parameters] == [name != "ipex-fused"] * 2


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="another kernel")
def test_adagrad_on_master_weights_is_wrong_at_the_end_of_a_tensor(ipex: Any) -> None:
    """A defect of the extension: only whole vectors of 32 elements get the right update."""
    model = nn.Linear(65, 1, bias=False)
    start = [model.weight.detach().clone()]
    plain = copy.deepcopy(model)
    optimizer = MAKERS["adagrad"](plain.parameters())
    for step in range(5):
        (plain.weight.grad,) = [gradient.float() for gradient in gradients([plain.weight], step)]
        optimizer.step()
    expected = (plain.weight - start[0]).detach().flatten()
    found = moved(extension_updates("ipex-master", model, MAKERS["adagrad"]), 5, start)
    torch.testing.assert_close(found[:64], expected[:64], rtol=1e-3, atol=1e-8)
    assert (found[64] - expected[64]).abs() > 0.1 * expected[64].abs()


def test_adam_with_decoupled_weight_decay_is_taken_for_adam(ipex: Any) -> None:
    """A defect of the extension: it reads the class of the optimizer only, so that such an Adam gets an L2 penalty."""

    def make(decoupled: bool) -> Make:
        return lambda parameters: torch.optim.Adam(
            parameters, lr=1e-3, weight_decay=1.0, decoupled_weight_decay=decoupled
        )

    start = [parameter.detach().clone() for parameter in linear().parameters()]
    decoupled, plain = (
        moved(extension_updates("ipex-split", linear(), make(kind)), 5, start) for kind in (True, False)
    )
    assert torch.equal(decoupled, plain)
    expected = moved(split_updates(linear(), make(True)), 5, start)
    assert (decoupled - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize("name", ["ipex-split", "ipex-master"])
def test_updates_that_bf16_loses_are_kept(ipex: Any, name: str) -> None:
    start = [torch.ones(8, 8), torch.ones(8)]

    def ones(dtype: torch.dtype = torch.float32) -> nn.Linear:
        model = nn.Linear(8, 8, dtype=dtype)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        return model

    def steps(updates: Any) -> list[Tensor]:
        for _ in range(100):
            for parameter in updates.parameters:
                parameter.grad = torch.ones_like(parameter)
            updates.step()
        return trained_weights(updates)

    low = ones(torch.bfloat16)
    optimizer = torch.optim.SGD(low.parameters(), lr=1e-5)
    for _ in range(100):
        for parameter in low.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all(torch.equal(p.float(), before) for p, before in zip(low.parameters(), start, strict=True))
    for weight in steps(extension_updates(name, ones(), sgd(1e-5))):
        assert weight.detach() == pytest.approx(torch.full_like(weight, 1 - 1e-3), abs=1e-5)


@pytest.mark.parametrize("make", [MAKERS["sgd"], MAKERS["adam"]], ids=["sgd", "adam"])
def test_split_weights_are_those_of_the_state_dict_and_take_the_memory_of_fp32(ipex: Any, make: Make) -> None:
    model = nn.Sequential(linear(), nn.LayerNorm(65)).train()
    names = [name for name, _ in model.named_parameters()]
    fp32 = sum(4 * parameter.numel() for parameter in model.parameters())
    updates = extension_updates("ipex-split", model, make)
    moved(updates, 3, [torch.zeros(1)] * 4)
    public = model.state_dict()
    for name, weight in zip(names, trained_weights(updates), strict=True):
        assert torch.equal(weight, public[name]), name
    assert {parameter.dtype for parameter in model[1].parameters()} == {torch.float32}
    buffers = 1 if "momentum" in updates.optimizer.defaults else 2
    assert state_bytes([updates]) == pytest.approx((1 + buffers) * fp32, abs=64)


def test_the_extension_has_kernels_for_these_optimizers(ipex: Any) -> None:
    from intel_extension_for_pytorch.optim import _lars, _optimizer_utils

    known = [make(linear().parameters()) for make in (*MAKERS.values(), lambda p: _lars.Lars(p, lr=0.1))]
    assert {type(optimizer) for optimizer in known} == set(_optimizer_utils.IPEX_FUSED_OPTIMIZER_LIST_CPU)
    assert all(extension_ways(optimizer) == list(EXTENSION_WAYS) for optimizer in known)
    for other in (torch.optim.AdamW, torch.optim.RMSprop, type("Mine", (torch.optim.Adam,), {})):
        assert other not in _optimizer_utils.OPTIMIZER_FUSED_STEP_MAPPING_CPU
        assert extension_ways(other(linear().parameters())) == ["ipex-master"]


def test_a_cast_model_cannot_be_split(ipex: Any) -> None:
    """So the ways of the extension are tried for autocast: ``ipex.optimize`` needs weights in fp32."""
    updates = extension_updates("ipex-split", linear().bfloat16(), sgd(1e-3))
    assert updates.trails == [None, None]
    with pytest.raises(RuntimeError, match="expect param2 to be"):
        moved(updates, 1, [torch.zeros(1)] * 2)


# -- the model


@pytest.mark.parametrize("name", EXTENSION_WAYS)
def test_the_model_is_restored(ipex: Any, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4)).train()
    before = {
        key: (id(value), value.clone(), value.stride()) for key, value in model.state_dict(keep_vars=True).items()
    }
    attributes = [dict(vars(module)) for module in model.modules()]
    with prepared(model, PRECISIONS.get("autocast-bf16"), torch.device("cpu"), changes_parameters=True):
        with torch.enable_grad():
            updates = extension_updates(name, model, sgd(0.1))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(torch.randn(2, 3, 8, 8)).float().square().mean().backward()
        updates.step()
        assert model[0].weight.dtype == (torch.float32 if name == "ipex-fused" else torch.bfloat16)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    for key, (identity, value, stride) in before.items():
        assert (id(after[key]), after[key].stride(), after[key].dtype) == (identity, stride, value.dtype)
        assert torch.equal(after[key], value), key
    assert [vars(module).keys() for module in model.modules()] == [given.keys() for given in attributes]


# -- scans

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


def by_hand(ipex: Any, name: str, make: Make, steps: int) -> list[float]:
    """The losses of the loop that Intel documents, before each step."""
    model = deep().train()
    options: dict[str, Any] = {} if name == "ipex-fused" else {"dtype": torch.bfloat16}
    split = name == "ipex-split"
    model, optimizer = ipex.optimize(
        model, optimizer=make(model.parameters()), split_master_weight_for_bf16=split, weights_prepack=False, **options
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = mean_square(model(X))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "lamb"])
def test_a_scan_trains_as_the_documented_loop_does_and_as_its_code(ipex: Any, kind: str) -> None:
    make = MAKERS[kind]
    result = training(deep(), X, "autocast-bf16", steps=6, optimizer=make, isolation="fork")
    run, figures = trained(result, "autocast-bf16")
    assert not run.notes
    assert [way.name for way in figures.ways if way.name.startswith("ipex")] == list(EXTENSION_WAYS)
    assert result.training is not None
    for name in EXTENSION_WAYS:
        way = figures.way(name)
        assert way is not None
        assert way.losses[:6] == by_hand(ipex, name, make, 6)
        if (kind, name) != ("adagrad", "ipex-master"):
            assert (way.status, way.progress) == ("ok", pytest.approx(1.0, abs=0.05))
        space: dict[str, Any] = {"make_model": deep, "inputs": X, "loss": mean_square, "optimizer": make}
        space["model"] = deep().train()
        exec(training_code(run.key, result.model, result.training, way, torch_version=result.torch), space)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert float(mean_square(space["model"](X))) == way.losses[-1]


def test_scans_leave_the_extension_to_the_workers(ipex: Any) -> None:
    """In this process none; AdamW has master weights only; a worker that jobs share is not used after it."""
    code = """
import sys, torch, lowprec_check
from torch import nn
model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 4))
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
def ways(isolation, optimizer=None):
    result = lowprec_check.scan(model, x, train=True, steps=3, precisions="autocast-bf16,autocast-fp16,bfloat16",
                                plan=False, times="off", isolation=isolation, optimizer=optimizer)
    assert "intel_extension_for_pytorch" not in sys.modules
    return [(run.precision, way.name, way.losses) for run in result.runs for way in run.training.ways]
def extension(found):
    return [name for _, name, _ in found if name.startswith("ipex")]
torch.manual_seed(0)
assert extension(ways("none")) == []
forked = ways("fork")
assert extension(forked) == ["ipex-master"], forked
assert ways("shared") == forked
assert extension(ways("fork", lambda p: torch.optim.SGD(p, lr=0.1))) == ["ipex-split", "ipex-master", "ipex-fused"]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
