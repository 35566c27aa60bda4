"""One small model of each family of torchvision at small size: nothing perturbed, and each status is the bare model's.

The larger models of a family call the same ops more often.
"""

from __future__ import annotations

import copy

import pytest
from conftest import run_bare
from helpers import run

from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.zoo import import_torchvision

pytestmark = pytest.mark.slow

# The smallest of each file of torchvision, and of each kind of block: with or without bottleneck, groups, fusion.
FAMILIES = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3",
    "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11", "vit_b_32",
)  # fmt: skip
# Convolutions: without batch norm, depthwise, gated, concatenated, shuffled; layer norm; global and shifted attention.
KINDS = (
    "resnet18", "squeezenet1_1", "mobilenet_v3_small", "densenet121", "shufflenet_v2_x0_5", "convnext_tiny",
    "vit_b_32", "swin_v2_t",
)  # fmt: skip
# Without fp16 arithmetic a CPU takes minutes for larger ones. Gates, shuffled channels, no batch norm.
SMALL = ("mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1")


def test_every_family_has_a_case() -> None:
    models = import_torchvision().models
    names = models.list_models(module=models)
    families = {name: models.get_model_builder(name).__module__ for name in names}
    assert len(set(families.values())) > 10
    assert {families[name] for name in FAMILIES} == set(families.values())


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


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16(name: str) -> None:
    check(name, "bfloat16")


@pytest.mark.parametrize("name", KINDS)
def test_autocast(name: str) -> None:
    check(name, "autocast-bf16")


@pytest.mark.parametrize("name", SMALL)
def test_half(name: str) -> None:
    check(name, "half")
