"""Scripts written for Intel's extension, scanned as stock PyTorch runs them, whether it is installed or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Call
from torch import nn

from lowprec_check import UsageError
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.observed_training import ObservedTraining
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.torchkit import installation
from lowprec_check.torchkit.installation import extension_problem, prepack_problem

Write = Callable[..., Path]

HEAD = """import torch
from torch import nn
import intel_extension_for_pytorch as ipex
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
"""
TRAIN = (
    HEAD
    + """optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()
model.train()
{optimize}
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)
    optimizer.zero_grad()
    {context}loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""
)
FP32 = "model, optimizer = ipex.optimize(model, optimizer=optimizer)"
BF16 = "model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16{more})"
CASES = {
    "fp32": (FP32, ""),
    "fp32, by its name": (
        "from intel_extension_for_pytorch import optimize\n"
        "model, optimizer = optimize(model, optimizer=optimizer, inplace=True)",
        "",
    ),
    "compiled": (f'{FP32}\nmodel = torch.compile(model, backend="ipex")', ""),
    "bf16": (BF16.format(more=""), "with torch.autocast('cpu', dtype=torch.bfloat16): "),
    "bf16, not prepacked": (
        BF16.format(more=", weights_prepack=False"),
        "with torch.cpu.amp.autocast(dtype=torch.bfloat16): ",
    ),
    "if it is there": (
        "try:\n    import intel_extension_for_pytorch as ipex\n"
        "    model, optimizer = ipex.optimize(model, optimizer=optimizer)\nexcept ImportError:\n    pass",
        "",
    ),
}
if not hasattr(torch.cpu, "amp"):
    del CASES["bf16, not prepacked"]


def observed(path: Path, steps: int = 3) -> ObservedTraining:
    target = load_target(str(path), steps=steps)
    assert target.observed is not None
    return target.observed


def losses(text: str) -> list[float]:
    """Those of the script without the extension and without autocast."""
    kept = [
        line for line in text.splitlines() if "ipex" not in line and "optimize(" not in line and "except" not in line
    ]
    space: dict[str, list[float]] = {"losses": []}
    exec("\n".join(kept).replace("    optimizer.step()", "    losses.append(loss.item()); optimizer.step()"), space)
    return space["losses"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.torch.cpu.amp.autocast")
def test_training_with_the_extension_is_observed(here: Path, write: Write, case: str) -> None:
    optimize, context = CASES[case]
    text = TRAIN.format(optimize=optimize, context=context)
    path = write(text, "train.py")
    target = load_target(str(path), steps=3)
    assert target.observed is not None
    expected = losses(TRAIN.format(optimize="", context=""))[:3]
    if context == "":
        assert [round(loss, 5) for loss in target.observed.losses] == [round(loss, 5) for loss in expected]
    assert all(type(module).__module__.startswith("torch.nn") for module in target.model.modules())
    assert all(parameter.dtype == torch.float32 for parameter in target.model.parameters())
    note = next(note for note in target.notes if "is archived" in note)
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "optimize(model" in line)
    assert f"ipex.optimize (train.py:{line})" in note
    assert ('the backend "ipex" of torch.compile' in note) == (case == "compiled")
    assert "intel_extension_for_pytorch" not in sys.modules
    assert torch.compile.__module__ == "torch"


def test_inference_with_the_extension(here: Path, write: Write) -> None:
    optimize = "model = ipex.optimize(model.eval(), dtype=torch.bfloat16)\n"
    call = "with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):\n    model(torch.ones(2, 16))\n"
    target = load_target(str(write(HEAD + optimize + call, "infer.py")))
    assert type(target.model) is nn.Sequential
    assert target.model[0].weight.dtype == torch.float32
    functions = (
        "def model():\n    return ipex.llm.optimize(made.eval(), dtype=torch.bfloat16)\ndef inputs():\n"
        "    return torch.ones(2, 16)"
    )
    target = load_target(str(write(HEAD.replace("model =", "made =") + functions, "functions.py")))
    assert any("leaves out ipex.llm.optimize (functions.py:7)" in note for note in target.notes)


def test_what_the_processor_cannot_prepack(here: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "cpu_info", lambda _: "avx2 avx512bw avx512vl avx512dq")
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    assert prepack_problem("bfloat16") is None
    assert prepack_problem("float32") is None
    assert "without AVX512-FP16" in str(prepack_problem("float16"))
    monkeypatch.setattr(installation, "cpu_info", lambda _: "avx2")
    limit = "without AVX-512, ipex.optimize cannot prepack weights in bfloat16 and needs weights_prepack=False"
    assert prepack_problem("bfloat16") == limit
    for more, fails in (("", True), (", weights_prepack=False", False), (', level="O0"', False)):
        path = write(TRAIN.format(optimize=BF16.format(more=more), context=""), "train.py")
        notes = load_target(str(path), steps=1).notes
        assert (f"without the scan, the call at train.py:9 fails on this processor: {limit}" in notes) == fails
    monkeypatch.setattr(installation, "cpu_info", lambda _: "avx2 avx512bw avx512vl avx512dq")
    monkeypatch.setattr(installation, "cpu_info", lambda _: "avx512bw avx512vl avx512dq avx512_fp16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    assert (prepack_problem("bfloat16"), prepack_problem("float16") is None) == (None, False)
    for name, value in (("ONEDNN_MAX_CPU_ISA", "AVX2"), ("DNNL_MAX_CPU_ISA", "avx2"), ("ATEN_CPU_CAPABILITY", "avx2")):
        with monkeypatch.context() as limited:
            limited.delenv("ONEDNN_MAX_CPU_ISA")
            limited.setenv(name, value)
            assert prepack_problem("bfloat16") == limit


PLAIN = HEAD.replace("import intel_extension_for_pytorch as ipex\n", "")
OPTIONAL = {
    "try": "try:\n    import intel_extension_for_pytorch\n    has = True\nexcept ImportError:\n    has = False\n",
    "find_spec": "import importlib.util\nhas = importlib.util.find_spec('intel_extension_for_pytorch') is not None\n",
}


@pytest.mark.skipif(extension_problem() is None, reason="the extension is here")
@pytest.mark.parametrize("way", OPTIONAL)
def test_an_extension_that_is_optional_is_not_there(here: Path, write: Write, way: str) -> None:
    text = f"{PLAIN}{OPTIONAL[way]}model(torch.ones(2 + has, 16))"
    assert load_target(str(write(text, "infer.py"))).args[0].shape == (2, 16)


CALLS = [
    "model, _ = ipex.optimize(model, torch.bfloat16, torch.optim.SGD(model.parameters(), 1.0), 'O1', True)",
    "model = ipex.llm.optimize(model, None, torch.bfloat16)",
    "from intel_extension_for_pytorch.llm import optimize\nmodel = optimize(model, dtype=torch.bfloat16)",
    "import intel_extension_for_pytorch.llm as llm\nmodel = llm.optimize(model)",
    "ipex.set_fp32_math_mode(mode=1)\nipex.enable_onednn_fusion(True)\nassert ipex.__version__[:1] == '2'",
]


@pytest.mark.parametrize("use", CALLS)
def test_ways_to_use_the_extension(here: Path, write: Write, use: str) -> None:
    target = load_target(str(write(f"{HEAD}{use}\nmodel(torch.ones(2, 16))", "infer.py")))
    assert type(target.model) is nn.Sequential
    assert target.args[0].shape == (2, 16)


def test_a_trace_is_left(here: Path, write: Write) -> None:
    text = "model = ipex.optimize(model.eval())\ntorch.jit.freeze(torch.jit.trace(model, torch.ones(2, 16)))"
    target = load_target(str(write(HEAD + text, "infer.py")))
    assert torch._C._get_tracing_state() is None
    with torch.no_grad():
        assert target.model(*target.args).shape == (2, 4)


@pytest.mark.skipif(extension_problem() is None, reason="the extension is here")
@pytest.mark.parametrize(
    ("use", "error"),
    [
        ("from intel_extension_for_pytorch.quantization import prepare", "ModuleNotFoundError"),
        ("ipex.quantization.prepare(model)", "AttributeError"),
    ],
)
def test_other_parts_of_the_extension_need_it(here: Path, write: Write, use: str, error: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{error} at train\.py:6: .*intel_extension_for_pytorch\.quantization"
    ) as caught:
        load_target(str(write(HEAD + use, "train.py")))
    assert str(extension_problem()) in str(caught.value)
    assert "intel_extension_for_pytorch" not in sys.modules


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "torch.xpu.amp.autocast()",
            'torch.xpu.amp came with Intel\'s extension, which is archived: use torch.autocast("xpu"',
        ),
        (
            "torch.xpu.optimize(model)",
            "torch.xpu.optimize came with Intel's extension, which is archived: leave the call out",
        ),
    ],
)
def test_what_torch_no_longer_has_is_named(here: Path, write: Write, line: str, advice: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_target(str(write(HEAD + line, "train.py")))
    assert advice in (caught.value.hint or "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--train"]], ids=["inference", "training"])
def test_a_script_with_the_extension_is_scanned(here: Path, write: Write, call: Call, mode: list[str]) -> None:
    path = write(TRAIN.format(optimize=BF16.format(more=""), context=CASES["bf16"][1]), "train.py")
    options = ("-v", "-p", "autocast-bf16", "--times", "off", "--json", str(here / "scan.json"))
    done = call("scan", str(path), *mode, *options)
    assert done.returncode == 0, done.stderr
    result = ScanResult.load(here / "scan.json")
    assert [run.status for run in result.runs] == ["ok", "ok"]
    assert "ipex.optimize" in done.stdout
