"""ResNet-50 on small generated images: trained for a few steps, used in fp32 and bf16, in all the ways of this torch.

    python examples/cifar_resnet50.py                  # accuracy and milliseconds per image of each way
    lowprec-check scan examples/cifar_resnet50.py      # the checks

The images are 3 × 32 × 32, as CIFAR's, of ten classes: a pattern for each, and noise. Nothing is downloaded. It runs
with and without Intel's extension, which needs torch 2.8; a way that is not available says why. Needs torchvision.
"""

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
STEPS, BATCH = 16, 40
NOISE = 0.6
_libraries: list[torch.library.Library] = []


def import_resnet50() -> Callable[..., nn.Module]:
    """Return torchvision's ``resnet50``, even if its compiled ops, which are not needed, fit another torch."""
    try:
        from torchvision.models import resnet50
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _libraries.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _libraries[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        from torchvision.models import resnet50
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"{error}: install the torchvision of your torch, 0.28 for torch 2.13, 0.23 for torch 2.8"
        ) from None
    return resnet50


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images (count, 3, 32, 32) and their labels (count)."""
    patterns = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    patterns = F.interpolate(patterns, size=(32, 32), mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    return patterns[labels] + NOISE * torch.randn(count, 3, 32, 32, generator=generator), labels


def untrained() -> nn.Module:
    """Random weights, seed 0; with small residuals, as for training, so that 50 random layers do not amplify errors."""
    resnet50 = import_resnet50()
    torch.manual_seed(0)
    network = resnet50(num_classes=CLASSES)
    for name, module in network.named_modules():
        if name.endswith("bn3"):
            nn.init.constant_(module.weight, 0.2)
    return network


@torch.no_grad()
def settle(network: nn.Module) -> nn.Module:
    """Give batch norm the statistics of a batch: so few steps leave outdated averages. Returns it in eval mode."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    network.train()(images(100, seed=1)[0])
    return network.eval()


# -- What lowprec-check scans


@torch.no_grad()
def model() -> nn.Module:
    """Random features and a last layer fitted to them by least squares, which takes a second."""
    network = settle(untrained())
    x, labels = images(100, seed=1)
    head, network.fc = network.fc, nn.Identity()
    features = network(x)
    centered, wanted = features - features.mean(0), F.one_hot(labels, CLASSES) - 1 / CLASSES
    kernel = centered @ centered.T
    solved = torch.linalg.solve(kernel + 0.01 * kernel.trace() / len(x) * torch.eye(len(x)), wanted)
    head.weight.copy_((centered.T @ solved).T)
    head.bias.copy_(-head.weight @ features.mean(0))
    network.fc = head
    return network


def inputs() -> Tensor:
    """Two images."""
    return images(2, seed=2)[0]


def calibration() -> list[Tensor]:
    """Two batches of training images."""
    return [images(16, seed)[0] for seed in (1, 3)]


@torch.no_grad()
def metric(network: Callable[[Tensor], Tensor]) -> float:
    """The share of test images whose class is found."""
    x, labels = images(50, seed=4)
    return float((network(x).argmax(1) == labels).float().mean())


# -- The ways to train and to use it


def import_extension() -> Any:
    """Intel's extension. Importing it beside another torch ends the process, so versions are compared first."""
    try:
        extension = version("intel-extension-for-pytorch")
    except PackageNotFoundError:
        raise RuntimeError("Intel's extension is not installed (archived; its last release needs torch 2.8)") from None
    if extension.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise RuntimeError(f"Intel's extension {extension} needs another torch than {torch.__version__}")
    import intel_extension_for_pytorch as ipex

    return ipex


def autocast(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bf16; without its cache of weights, which a trace cannot hold."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled, cache_enabled=False)


def train(*, bf16: bool, extension: bool) -> tuple[nn.Module, float]:
    """The trained model in fp32, and the median of seconds per image."""
    network = untrained().train()
    plain = copy.deepcopy(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.003, momentum=0.9)
    if extension:
        dtype = torch.bfloat16 if bf16 else torch.float32
        network, optimizer = import_extension().optimize(network, dtype=dtype, optimizer=optimizer)
    seconds = []
    for step in range(STEPS):
        x, labels = images(BATCH, seed=100 + step)
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            output = network(x)
        F.cross_entropy(output.float(), labels).backward()
        optimizer.step()
        seconds.append((time.perf_counter() - start) / BATCH)
    plain.load_state_dict(network.state_dict())
    return settle(plain), statistics.median(seconds)


def traced(network: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The frozen graph."""
    return torch.jit.freeze(torch.jit.trace(network, x, check_trace=False, strict=False))


def ways(bf16: bool) -> Iterator[tuple[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]]]:
    """The name of each way, and how it prepares the model; the extension comes last, since it changes the process."""
    dtype = torch.bfloat16 if bf16 else torch.float32

    def optimized(network: nn.Module, **options: Any) -> nn.Module:
        return import_extension().optimize(network, dtype=dtype, **options)

    if bf16:
        yield "cast", lambda network, _: lambda x: network.bfloat16()(x.bfloat16())
    yield "autocast" if bf16 else "eager", lambda network, _: network
    yield "trace", traced
    yield "compile", lambda network, _: torch.compile(network)
    yield "ipex", lambda network, _: optimized(network)
    yield "ipex + trace", lambda network, x: traced(optimized(network), x)
    yield (
        "ipex + compile",
        lambda network, _: torch.compile(optimized(network, weights_prepack=False), backend="ipex"),
    )


@torch.no_grad()
def infer(network: nn.Module, prepare: Callable[..., Any], *, bf16: bool, cast: bool) -> tuple[float, float]:
    """Accuracy on the test images, and the median of seconds per image."""
    x = images(50, seed=4)[0]
    with autocast(bf16 and not cast):
        call = prepare(copy.deepcopy(network), x)
        for _ in range(3):  # it compiles, or profiles and optimizes its graph
            call(x)
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            call(x)
            seconds.append((time.perf_counter() - start) / len(x))
        return metric(call), statistics.median(seconds)


def show(mode: str, precision: str, way: str, run: Callable[[], tuple[float, float]]) -> None:
    """One line: what ``run`` returns, accuracy and seconds per image, or why it is not available."""
    try:
        accuracy, seconds = run()
        result = f"{accuracy:8.0%} {1e3 * seconds:10.2f}"
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        result = f"       – {'–':>10}  {lines[0][:100]}"
    print(f"{mode:<8}{precision:<6}{way:<16}{result}", flush=True)


def main() -> None:
    """Train and use the model in each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="threads of torch; by default one for each core")
    threads = parser.parse_args().threads
    if threads:
        torch.set_num_threads(threads)
    print(f"torch {torch.__version__} · {torch.get_num_threads()} threads · chance is {1 / CLASSES:.0%}")
    print(f"{'':<8}{'':<6}{'':<16}accuracy   ms/image")
    found: list[nn.Module] = []

    def trained(**how: bool) -> tuple[float, float]:
        network, seconds = train(**how)
        found.append(network)
        return metric(network), seconds

    show("train", "fp32", "eager", lambda: trained(bf16=False, extension=False))
    show("train", "bf16", "autocast", lambda: trained(bf16=True, extension=False))
    prepared = [(bf16, *way) for bf16 in (False, True) for way in ways(bf16)]
    for bf16, way, prepare in sorted(prepared, key=lambda row: "ipex" in row[1]):
        name, cast = ("bf16" if bf16 else "fp32"), way == "cast"
        show("infer", name, way, lambda p=prepare, b=bf16, c=cast: infer(found[0], p, bf16=b, cast=c))
    for bf16 in (False, True):
        name = "bf16" if bf16 else "fp32"
        show("train", name, "ipex", lambda b=bf16: trained(bf16=b, extension=True))


if __name__ == "__main__":
    main()
