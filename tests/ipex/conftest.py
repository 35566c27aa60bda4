"""Tests with Intel's extension in its own environment (CONTRIBUTING.md); in others, importing it ends the process."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

HERE = Path(__file__).parent


def release(distribution: str) -> str:
    """``2.8``, or ``none``."""
    try:
        return ".".join(version(distribution).split(".")[:2])
    except PackageNotFoundError:
        return "none"


INSTALLED = release("torch") == release("intel-extension-for-pytorch") == "2.8"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where the extension cannot be imported. It and torch's tracer warn about themselves."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.skipif(not INSTALLED, reason="needs torch 2.8 and Intel's extension 2.8"))
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if "compile" in item.name:
            item.add_marker(pytest.mark.skipif(COMPILER is None, reason="torch.compile needs a C++ compiler"))


@pytest.fixture(scope="session")
def ipex() -> Any:
    """The extension: importing it changes the process, so only the tests that ask for it do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("intel_extension_for_pytorch")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    if INSTALLED:
        torch._dynamo.reset()


class Case(NamedTuple):
    """A model in eval mode and its call, with the result in fp32."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Tensor

    def call(self, model: Callable[..., Any], **changed: Any) -> Tensor:
        """The output of ``model``: what the classifier returns, or the last hidden state."""
        found = model(*changed.get("args", self.args), **self.kwargs)
        return found if isinstance(found, Tensor) else found["last_hidden_state"]

    def error(self, output: Tensor) -> float:
        """The rel_l2 of an output."""
        return float((output.float() - self.expected).norm() / self.expected.norm())


def resnet50() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """ResNet-50 with random weights, and two small images."""
    models = importlib.import_module("torchvision.models")
    torch.manual_seed(0)
    return models.resnet50().eval(), (torch.randn(2, 3, 64, 64),), {}


def bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Two layers of BERT with random weights, called by keyword."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=1000, **sizes)).eval()
    return model, (), {"input_ids": torch.randint(0, 1000, (2, 16)), "attention_mask": torch.ones(2, 16).long()}


@pytest.fixture(params=[resnet50, bert], ids=["resnet50", "bert"])
def case(request: pytest.FixtureRequest) -> Case:
    """Each model, with its output in eager fp32."""
    return make_case(request.param)


@pytest.fixture
def resnet() -> Case:
    """ResNet-50, with its output in eager fp32."""
    return make_case(resnet50)


def make_case(make: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> Case:
    """The model, and what it returns in fp32."""
    model, args, kwargs = make()
    case = Case(model, args, kwargs, torch.empty(0))
    with torch.no_grad():
        return case._replace(expected=case.call(model).clone())


@contextlib.contextmanager
def inference(dtype: torch.dtype) -> Iterator[None]:
    """The context of a call, as Intel documents it: autocast for bf16."""
    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False)
    with torch.no_grad(), autocast:
        yield


@pytest.fixture(name="inference")
def _inference() -> Any:
    """The context manager :func:`inference`."""
    return inference
