"""Intel's extension where it is missing or does not fit: nothing imports it. ``tests/ipex`` runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from conftest import Mlp, call_process
from torch import Tensor, nn

from lowprec_check.engine.backends import ipex
from lowprec_check.engine.backends.jit import frozen_trace, frozen_trace_code
from lowprec_check.schema.axes import Backend, Example, replaced
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.run_key import RunKey
from lowprec_check.schema.scan_result import ModelInfo
from lowprec_check.torchkit.installation import IPEX

BACKENDS: list[Backend] = [ipex.PLAIN, ipex.TRACED, ipex.COMPILED]
MODEL = """
import torch
from torch import nn

model = nn.Linear(8, 8)
inputs = torch.ones(2, 8)
"""
FAST = ("--no-plan", "--times", "off", "--errors", "none")
KILLS = """
import os, pathlib
pathlib.Path({path!r}).touch()
os._exit(127)
"""


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, str | None], None]:
    """Set the installed versions of torch and of the extension."""

    def install(torch_version: str | None, extension: str | None) -> None:
        installed = {"torch": torch_version, IPEX: extension}

        def version(name: str) -> str:
            found = installed[name]
            if found is None:
                raise PackageNotFoundError(name)
            return found

        monkeypatch.setattr("importlib.metadata.version", version)

    return install


@pytest.mark.parametrize(
    ("torch_version", "extension", "says"),
    [
        ("2.8.0+cpu", "2.8.0", None),
        ("2.8.1", "2.8.10+xpu", None),
        ("2.8.0", None, "is not installed; run pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0"),
        ("2.6.0", None, "is not installed"),
        ("2.13.0", None, "archived and its last release fits torch 2.8 only, but torch 2.13.0 is installed"),
        ("2.13.0", "2.8.0",
         "2.8.0 needs torch 2.8, but torch 2.13.0 is installed, and importing it would end the process"),
        ("2.8.0", "2.7.0", "2.7.0 needs torch 2.7, but torch 2.8.0"),
        (None, "2.8.0", "torch of an unknown version"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_reason_names_what_is_installed(
    versions: Callable[..., None], backend: Backend, torch_version: str | None, extension: str | None, says: str | None
) -> None:
    versions(torch_version, extension)
    reason = backend.skip_reason(PRECISIONS.get("bfloat16"), "cpu", "contiguous")
    assert (reason is None) == (says is None)
    assert says is None or says in str(reason)
    assert "use the backend inductor on xpu" in str(backend.skip_reason(PRECISIONS.get("half"), "xpu", "contiguous"))


def test_newer_torch_gets_what_replaced_the_extension(versions: Callable[..., None]) -> None:
    versions("2.13.0+cpu", None)
    found = {backend.name: backend.replacement() for backend in BACKENDS}
    assert {name: instead.backend for name, instead in found.items() if instead} == {
        "ipex": "inductor-freeze",
        "ipex-jit": "inductor-freeze",
        "ipex-compile": "inductor",
    }
    assert all(instead and "archived" in instead.why and "torch.xpu" in instead.why for instead in found.values())
    [jit, compiled] = replaced(["ipex", "ipex-jit", "ipex-compile"])[1]
    assert jit.startswith("ipex and ipex-jit run as inductor-freeze here: ")
    assert compiled.startswith("ipex-compile runs as inductor here: ")
    for installed in (("2.8.0", None), ("2.8.0", "2.8.0"), ("2.13.0", "2.8.0"), ("2.6.0", None)):
        versions(*installed)
        assert [backend.replacement() for backend in BACKENDS] == [None] * 3, installed


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="the extension fits torch 2.8")
def test_an_extension_for_another_torch_is_not_imported(tmp_path: Path) -> None:
    """It would end the process: ``os._exit(127)``."""
    package, imported = tmp_path / "intel_extension_for_pytorch", tmp_path / "imported"
    info = tmp_path / "intel_extension_for_pytorch-2.8.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intel-extension-for-pytorch\nVersion: 2.8.0\n")
    package.mkdir()
    (package / "__init__.py").write_text(KILLS.format(path=str(imported)))
    (tmp_path / "mymodel.py").write_text(MODEL)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    arguments = ("-p", "bfloat16", "--backend", "eager,ipex,ipex-jit,ipex-compile", "--json", "-", *FAST)
    done = call_process("scan", tmp_path / "mymodel.py", *arguments, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    runs = {run["backend"]: run for run in json.loads(done.stdout)["runs"] if run["precision"] == "bfloat16"}
    assert runs["eager"]["status"] == "ok"
    for name in ("ipex", "ipex-jit", "ipex-compile"):
        assert runs[name]["status"] == "skipped"
        assert "intel-extension-for-pytorch 2.8.0 needs torch 2.8, but torch 2." in runs[name]["reason"]
    assert not imported.exists()
    arguments = ("--train", "--steps", "2", "-p", "autocast-bf16", "--json", "-", "--fail-on", "never", *FAST)
    done = call_process("scan", tmp_path / "mymodel.py", *arguments, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    ways = [way["name"] for run in json.loads(done.stdout)["runs"] for way in run["training"]["ways"]]
    assert ways == ["plain", "plain", "one-autocast", "states-16bit"]  # none of the extension's
    assert not imported.exists()
    ended = call_process("scan", "--help", env=os.environ | {"PYTHONPATH": paths})
    assert ended.returncode == 0, ended.stderr
    assert not imported.exists()


# -- Traces, which need no extension


class Noisy(nn.Module):
    """Draws numbers, and uses one linear layer twice, for which autocast caches the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"y": self.linear(self.linear(x).relu()) + scale * torch.rand(2, 8)}


CALLS = {
    "model(*inputs)": lambda: (torch.ones(2, 8), torch.tensor(0.5)),
    "model(**inputs)": lambda: {"scale": torch.tensor(0.5), "x": torch.ones(2, 8)},
    "model(inputs)": lambda: torch.ones(2, 8),
}


def info(call: str) -> ModelInfo:
    return ModelInfo(name="Mlp", parameters=1, inputs=[], modules=1, training=False, call=call)


def example_of(call: str, precision: str) -> Example:
    inputs = CALLS[call]()
    args = inputs if call == "model(*inputs)" else (inputs,)
    arguments = ((), inputs) if call == "model(**inputs)" else (args, {})
    return Example(
        args=arguments[0],
        kwargs=arguments[1],
        precision=PRECISIONS.get(precision),
        device="cpu",
        calibration=lambda: [arguments],
    )


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the tracer: a number drawn, freeze
@pytest.mark.parametrize("precision", ["fp32", "autocast-bf16"])
@pytest.mark.parametrize("call", CALLS)
def test_a_frozen_trace_gives_what_the_model_and_the_code_give(call: str, precision: str) -> None:
    torch.manual_seed(0)
    model = (Mlp() if call == "model(inputs)" else Noisy()).eval()
    example, lines = example_of(call, precision), frozen_trace_code(info(call), RunKey(precision))
    context = torch.autocast("cpu", torch.bfloat16) if precision != "fp32" else contextlib.nullcontext()
    with torch.no_grad(), context:
        state = torch.get_rng_state()
        expected = model(*example.args, **example.kwargs)
        torch.set_rng_state(state)
        frozen = frozen_trace(model, example)
        torch.set_rng_state(state)
        assert torch.is_autocast_cache_enabled()
        found = frozen(*example.args, **example.kwargs)
        space = {"torch": torch, "model": model, "inputs": CALLS[call]()}
        exec("\n".join(lines), space)
        assert torch.is_autocast_cache_enabled() == (precision == "fp32")
        torch.set_rng_state(state)
        exec(f"output = {call}", space)
    assert torch.is_autocast_cache_enabled()
    tensors = [part["y"] if isinstance(part, dict) else part for part in (expected, found, space["output"])]
    bound = 1e-6 if precision == "fp32" else 1e-2
    assert isinstance(frozen, torch.jit.ScriptModule)
    assert torch.linalg.norm(tensors[1].float() - tensors[0].float()) <= bound * torch.linalg.norm(tensors[0].float())
    assert torch.equal(tensors[1], tensors[2])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trace_takes_arguments_of_both_kinds() -> None:
    torch.manual_seed(0)
    model, x, scale = Noisy().eval(), torch.ones(2, 8), torch.tensor(0.0)
    example = example_of("model(*inputs)", "fp32")
    example = dataclasses.replace(example, args=(x,), kwargs={"scale": scale})
    with torch.no_grad():
        frozen = frozen_trace(model, example)
        torch.testing.assert_close(frozen(x, scale=scale)["y"], model(x, scale=scale)["y"])
