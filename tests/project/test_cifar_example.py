"""The ResNet-50 example: each way has the accuracy of fp32 after training, or says why it is not available."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.nn import functional

from lowprec_check.torchkit.installation import extension_problem


def load_example() -> dict[str, Any]:
    """What the file defines."""
    return runpy.run_path(str(ROOT / "examples" / "cifar_resnet50.py"))


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """What the file defines, but it trains for fewer steps, on fewer and smaller images.

    A CPU without bf16 arithmetic takes a second for each image.
    """
    found = load_example()
    names, images = found["train"].__globals__, found["images"]

    def half_size(count: int, seed: int) -> tuple[Tensor, Tensor]:
        x, labels = images(count, seed)
        return functional.avg_pool2d(x, 2), labels

    names.update(images=half_size, STEPS=7, BATCH=10)
    return found


@pytest.fixture(scope="module")
def trained(example: dict[str, Any]) -> Any:
    """The model that eager fp32 trained."""
    network, seconds = example["train"](bf16=False, extension=False)
    assert seconds > 0
    return network


@pytest.mark.slow
def test_training_raises_the_accuracy(example: dict[str, Any], trained: Any) -> None:
    metric = example["metric"]
    assert metric(example["settle"](example["untrained"]())) < 0.4
    assert metric(trained) > 0.8
    assert metric(example["train"](bf16=True, extension=False)[0]) > 0.8


@pytest.mark.slow
def test_the_model_that_is_scanned_is_accurate() -> None:
    example = load_example()
    assert example["metric"](example["settle"](example["untrained"]())) < 0.4
    assert example["metric"](example["model"]()) > 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.jit and the extension warn about themselves
@pytest.mark.parametrize("bf16", [False, True])
def test_every_way_keeps_the_accuracy(example: dict[str, Any], trained: Any, bf16: bool) -> None:
    expected, seen = example["metric"](trained), []
    for way, prepare in example["ways"](bf16):
        if "compile" in way:  # takes a minute
            continue
        if "ipex" in way and extension_problem() is not None:
            with pytest.raises(RuntimeError, match="Intel's extension"):
                example["infer"](trained, prepare, bf16=bf16, cast=False)
        else:
            accuracy, seconds = example["infer"](trained, prepare, bf16=bf16, cast=way == "cast")
            assert accuracy == pytest.approx(expected, abs=0.05), way
            assert seconds > 0
        seen.append(way)
    assert seen == [*(["cast", "autocast"] if bf16 else ["eager"]), "trace", "ipex", "ipex + trace"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(extension_problem() is not None, reason="needs Intel's extension")
@pytest.mark.parametrize("bf16", [False, True])
def test_the_extension_trains_as_well(example: dict[str, Any], bf16: bool) -> None:
    if bf16 and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        pytest.skip("the extension prepacks bf16 weights with AVX-512 only")
    assert example["metric"](example["train"](bf16=bf16, extension=True)[0]) > 0.8


def test_images_are_the_same_each_time() -> None:
    example = load_example()
    x, labels = example["images"](20, seed=5)
    assert x.shape == (20, 3, 32, 32)
    assert labels.bincount().tolist() == [2] * 10
    assert torch.equal(x, example["images"](20, seed=5)[0])
    assert not torch.equal(x, example["images"](20, seed=6)[0])
