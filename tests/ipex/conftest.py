"""Tests with Intel's extension in its own environment (CONTRIBUTING.md); in others, importing it ends the process."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lowprec_check.torchkit.installation import prepack_problem

HERE = Path(__file__).parent


def release(distribution: str) -> str:
    """``2.8``, or ``none``."""
    try:
        return ".".join(version(distribution).split(".")[:2])
    except PackageNotFoundError:
        return "none"


INSTALLED = release("torch") == release("intel-extension-for-pytorch") == "2.8"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


NEEDS_AVX512 = {
    "test_int8.py::test_the_error_is_that_of_8_bits_and_a_reloaded_model_gives_the_same_bits[encoder-fp32]",
    "test_recipes.py::test_batch_norm_is_folded[off-bf16]",
    "test_recipes.py::test_batch_norm_is_folded[on-bf16]",
    "test_recipes.py::test_channels_last[bf16]",
    "test_recipes.py::test_optimize_alone[bert-bf16]",
    "test_recipes.py::test_optimize_alone[resnet50-bf16]",
    "test_recipes.py::test_the_fused_encoder_layer_cannot_read_prepacked_bf16_weights",
    "test_recipes.py::test_trace_and_freeze[bert-bf16]",
    "test_recipes.py::test_trace_and_freeze[resnet50-bf16]",
    "test_recipes.py::test_training_in_bf16[AdamW]",
    "test_recipes.py::test_training_in_bf16[SGD]",
    "test_recipes.py::test_training_resnet50_in_bf16",
    "test_recipes.py::test_weights_are_prepacked[bert-off-bf16]",
    "test_recipes.py::test_weights_are_prepacked[bert-on-bf16]",
    "test_recipes.py::test_weights_are_prepacked[resnet50-on-bf16]",
}
"""Tests of weights that are prepacked in bf16, one of a layer norm in bf16, and one whose int8 sums saturate without
VNNI. They are skipped and counted where the processor or the environment lacks AVX-512; any other failure counts."""

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Kernels that were compiled and cached for the whole processor crash under this limit.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{capability}")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip where the extension cannot be imported. It and torch's tracer warn about themselves."""
    here = {f"{item.path.name}::{item.name}": item for item in items if str(item.path).startswith(f"{HERE}/")}
    files = {item.path.name for item in here.values()}
    unknown = [name for name in NEEDS_AVX512 if name.partition("::")[0] in files and name not in here]
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"tests/ipex/conftest.py names tests that do not exist: {', '.join(sorted(unknown))}")
    problem = prepack_problem("bfloat16")
    for name, item in here.items():
        item.add_marker(pytest.mark.skipif(not INSTALLED, reason="needs torch 2.8 and Intel's extension 2.8"))
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if problem is not None and name in NEEDS_AVX512:
            item.add_marker(pytest.mark.skip(reason=problem))
        if "compile" in item.name:
            item.add_marker(pytest.mark.skipif(COMPILER is None, reason="torch.compile needs a C++ compiler"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests this processor left out."""
    problem = prepack_problem("bfloat16")
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if str(problem) in str(report.longrepr)]
    if problem is not None:
        terminalreporter.write_line(f"{len(skipped)} of {len(NEEDS_AVX512)} tests in NEEDS_AVX512 skipped: {problem}")


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
