"""All classification models of torchvision at small size: nothing perturbed, and each status is the bare model's.

Half is left to ``benchmarks/breadth.py`` but for small models: without fp16 arithmetic a CPU takes minutes for it.
"""

from __future__ import annotations

import copy

import pytest
from conftest import run_bare
from helpers import run

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.zoo import import_torchvision

pytestmark = pytest.mark.slow

BIG = (
    "vit_h_14",
    "vit_l_16",
    "vit_l_32",
    "regnet_y_128gf",
    "regnet_y_32gf",
    "regnet_x_32gf",
    "convnext_large",
    "swin_b",
)
SMALL = ("mobilenet_v2", "mobilenet_v3_small", "resnet18", "shufflenet_v2_x0_5", "squeezenet1_1", "mnasnet0_5")


def names() -> list[str]:
    torchvision = import_torchvision()
    return [name for name in torchvision.models.list_models(module=torchvision.models) if name not in BIG]


def check(name: str, precision: str) -> None:
    side = 224 if name.startswith(("vit_", "maxvit")) else 96 if name == "inception_v3" else 64
    target = load_target(f"torchvision:{name}", (f"1x3x{side}x{side}",))
    reference = run_bare(copy.deepcopy(target.model), target.args, "fp32").double()
    plain, found = run(target.model, target.args, precision)
    output = run_bare(target.model, target.args, precision).double()
    agrees = bool((output - reference).norm() <= (1e-2 if "16" not in precision else 5e-2) * reference.norm())
    zero = not reference.any()  # a zero-initialized head, before the module that feeds it is compared
    assert plain.status == ("unjudged" if zero else "ok" if agrees else "inaccurate")
    assert found.complete
    assert not found.gaps
    assert found.perturbed is False


@pytest.mark.parametrize("name", names())
def test_bfloat16(name: str) -> None:
    check(name, "bfloat16")


@pytest.mark.parametrize("name", names()[::3])
def test_autocast(name: str) -> None:
    check(name, "autocast-bf16")


@pytest.mark.parametrize("name", SMALL)
def test_half(name: str) -> None:
    check(name, "half")
