"""Backends and memory formats: each row is what the bare recipe gives, limits hold, nothing leaks into other rows."""

from __future__ import annotations

import copy
import gc
import math
import re
import runpy
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, Call, Register
from torch import Tensor, nn

from lowprec_check import Backend, ScanResult, UsageError, scan
from lowprec_check.analysis.run_summary import error_of
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.plain_run import output_tensors
from lowprec_check.schema.axes import replaced
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.run_key import RunKey
from lowprec_check.torchkit.devices import peak_allocated, seed_everything
from lowprec_check.torchkit.output_comparison import compare_outputs

LOW = ("bfloat16", "autocast-bf16", "half", "autocast-fp16")
FAST: Any = {"plan": False, "times": "off", "further_inputs": 0}


class ConvNet(nn.Module):
    """Convolution, batch norm, a functional ReLU, pooling and a classifier."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        torch.manual_seed(0)
        self.conv, self.norm, self.head = conv(3, 8, 3), norm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        return self.head(x.flatten(2).mean(-1))


IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def statuses(result: ScanResult) -> dict[str, str]:
    return {run.key.label: run.status for run in result.runs}


def error_of_code(code: str, space: dict[str, Any], reference: list[Tensor]) -> float | str:
    """What the printed code gives after ``space``, the user's file: the error of its output, or its exception."""
    seed_everything(0)
    cached = torch.is_autocast_cache_enabled()
    try:
        with warnings.catch_warnings(action="ignore"):
            exec(code, space)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_autocast_cache_enabled(cached)
    return compare_outputs(output_tensors(space["output"]), reference).distance


def check_rows(result: ScanResult, file: Callable[[], dict[str, Any]], reference: list[Tensor]) -> int:
    """Each row of ``result`` that is not the reference has the status and error of the code that is printed for it."""
    checked = 0
    for run in result.runs:
        if run.is_reference or run.status == "skipped":
            continue
        code = snippet(run.key, result.model)
        found = error_of_code(code, file(), reference)
        if run.status == "error":
            assert run.exception is not None
            assert str(found).startswith(run.exception.type), (run.key.label, found)
        elif run.status == "nonfinite":
            assert found == math.inf
        elif (
            run.failed_input is not None
        ):  # the code passes on the inputs of the file: the error is that of another input
            assert isinstance(found, float)
            assert found <= (run.tolerance or 0.0) < error_of(run)
        else:
            assert not isinstance(found, str), (run.key.label, found, code)
            assert run.output_error is not None
            assert run.output_error.distance == pytest.approx(found, rel=1e-3, abs=1e-12), (run.key.label, code)
        checked += 1
    return checked


def conv_net() -> dict[str, Any]:
    """What a file with :class:`ConvNet` defines."""
    return {"model": ConvNet().eval(), "inputs": IMAGES}


@torch.no_grad()
def conv_net_output() -> list[Tensor]:
    """Its output in fp32."""
    return output_tensors(ConvNet().eval()(IMAGES))


SMALLER = {
    "spade_decoder": {"torch.randn(1, 64, 16, 16,": "torch.randn(1, 64, 4, 4,"},
}
"""What to make smaller: where a CPU has no bf16 arithmetic, a convolution of the whole takes a second or more."""


@pytest.mark.slow
# ResNet-50, which trains first, takes a third of the time of all. Its convolutions with batch norm are traced below.
@pytest.mark.parametrize("file", [p for p in EXAMPLES if p.stem != "cifar_resnet50"], ids=lambda file: file.stem)
def test_traced_rows_equal_the_printed_code_on_every_example(
    file: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file.stem in SMALLER:
        text = file.read_text(encoding="utf-8")
        for size, smaller in SMALLER[file.stem].items():
            assert size in text
            text = text.replace(size, smaller)
        file = tmp_path / file.name
        file.write_text(text, encoding="utf-8")
    saved = tmp_path / "scan.json"
    done = call(
        "scan",
        file,
        "--backend",
        "jit",
        "-p",
        "fp32,bf16,amp-bf16",
        "--json",
        saved,
        "--no-plan",
        "-q",
        "--times",
        "off",
        "--errors",
        "none",
        "--further-inputs",
        "2",
    )
    assert done.returncode in (0, 1), done.stderr  # 1: no precision passes

    result = ScanResult.load(saved)
    seed_everything(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a scan loads so, in a process that forks, and what a file trains may depend on it
    target = load_target(str(file))
    torch.set_num_threads(threads)
    with torch.no_grad():
        reference = output_tensors(target.model(*target.args, **target.kwargs))

    def defined() -> dict[str, Any]:
        module, made = types.ModuleType(file.stem), copy.deepcopy(target.model)
        space = vars(module)
        space.update(runpy.run_path(str(file)))
        space["model"] = made if isinstance(space["model"], nn.Module) else lambda: made
        monkeypatch.setitem(sys.modules, file.stem, module)  # the printed code imports its names
        return space

    rows = check_rows(result, defined, reference)
    assert rows == len(result.runs) - 1 - sum(run.status == "skipped" for run in result.runs) >= 3
    assert {run.backend for run in result.runs[1:]} == {"jit"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["inductor", "inductor-freeze"])
def test_compiled_rows_equal_the_printed_code(backend: str) -> None:
    result = scan(
        ConvNet().eval(),
        IMAGES,
        precisions="autocast-bf16",
        backends=backend,
        memory_formats="channels_last",
        errors="none",
        **FAST,
    )
    before = torch._inductor.config.freezing
    try:
        assert check_rows(result, conv_net, conv_net_output()) == 1
    finally:
        torch._inductor.config.freezing = before
        torch._dynamo.reset()
    assert all(run.setup_seconds and run.setup_seconds > 0.1 for run in result.runs[1:])
    assert all(run.compiler and run.compiler.verdict != "worse" for run in result.runs[1:])


def test_channels_last_rows_equal_the_printed_code() -> None:
    result = scan(
        ConvNet().eval(),
        IMAGES,
        memory_formats="channels_last",
        backends="eager,jit",
        precisions="fp32,bf16,amp-bf16",
        errors="none",
        **FAST,
    )
    assert check_rows(result, conv_net, conv_net_output()) == 6
    code = snippet(RunKey("bfloat16", memory_format="channels_last"), result.model)
    assert "model.bfloat16().to(memory_format=torch.channels_last)" in code
    assert "inputs = inputs.to(torch.bfloat16, memory_format=torch.channels_last)" in code


class Strides(nn.Module):
    """Returns the strides that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tensor([*x.stride(), *self.conv.weight.stride()], dtype=torch.float32)
        return seen + 0 * self.conv(x).sum()


def test_the_model_and_its_inputs_are_in_the_memory_format() -> None:
    model, images = Strides().eval(), IMAGES.clone()
    result = scan(model, images, precisions="autocast-bf16", memory_formats="contiguous,channels_last", **FAST)
    assert statuses(result) == {
        "fp32": "ok",
        "autocast-bf16": "ok",
        "autocast-bf16 · channels_last": "inaccurate",  # the strides are others
    }
    assert model.conv.weight.is_contiguous()
    assert images.is_contiguous()


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (nn.Linear(4, 4), torch.ones(2, 4), "neither weights nor inputs have 4 dimensions"),
        (ConvNet(3).eval(), torch.ones(1, 3, 5, 5, 5), "weights of 5 (channels_last_3d)"),
    ],
)
def test_channels_last_is_skipped_where_it_does_not_apply(model: nn.Module, inputs: Tensor, reason: str) -> None:
    result = scan(model, inputs, precisions="bfloat16", memory_formats="nhwc", **FAST)
    run = result.run("bfloat16", memory_format="channels_last")
    assert run.status == "skipped"
    assert reason in (run.reason or "")


# -- limits and isolation


def work_for(seconds: float) -> None:
    """Use the processor: a process that only waits counts as one that waits for a lost thread."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class Hanging(Backend):
    """Never finishes to compile."""

    name = "hanging"
    summary = "never ready"
    setup_budget = 1000.0

    def prepare(self, model: Any, example: Any) -> Any:
        work_for(1000)


def test_a_backend_that_hangs_in_compilation_ends_at_the_budget(register: Register) -> None:
    register(Hanging())
    started = time.monotonic()
    result = scan(
        ConvNet().eval(), IMAGES, precisions="bfloat16", backends="hanging,jit", budget=2, errors="none", **FAST
    )
    assert time.monotonic() - started < 60
    assert statuses(result) == {"fp32": "ok", "bfloat16 · hanging": "timeout", "bfloat16 · jit": "ok"}
    assert "budget of 2 s" in (result.run("bfloat16", "hanging").reason or "")


class Patient(Hanging):
    """Takes longer to prepare than a call may take."""

    name = "patient"
    setup_budget = 30.0

    def prepare(self, model: Any, example: Any) -> Any:
        work_for(2)
        return model


def test_preparing_has_a_budget_of_its_own(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    register(Patient())
    monkeypatch.setattr("lowprec_check.core.target_runs.TargetRuns.budget", 1.5)
    result = scan(
        ConvNet().eval(), IMAGES, precisions="bfloat16", backends="patient", plan=False, errors="none", further_inputs=0
    )
    run = result.run("bfloat16", "patient")
    assert run.status == "ok"
    assert run.setup_seconds == pytest.approx(2, abs=1.5)
    assert run.latency_ms is not None
    assert run.latency_ms < 1000


class Careless(Backend):
    """Changes global state."""

    name = "careless"
    summary = "changes its process"
    changes_process = True

    def prepare(self, model: Any, example: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(1)
        return model


def test_a_backend_that_changes_its_process_changes_no_other_row(register: Register) -> None:
    register(Careless())
    before = (torch.get_default_dtype(), torch.get_num_threads())
    for isolation in ("fork", "none"):
        result = scan(
            ConvNet().eval(),
            IMAGES,
            precisions="bfloat16",
            backends="careless,jit",
            errors="none",
            isolation=isolation,
            **FAST,
        )
        careless = result.run("bfloat16", "careless")
        assert careless.status == ("ok" if isolation == "fork" else "skipped")
        assert result.run("bfloat16", "jit").status == "ok"
        assert (torch.get_default_dtype(), torch.get_num_threads()) == before
    assert "runs in a worker only" in (careless.reason or "")


def test_tracing_in_this_process_leaves_its_state() -> None:
    before = torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.get_default_dtype()
    model = ConvNet().eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    result = scan(model, IMAGES, precisions="autocast-bf16", backends="jit", isolation="none", **FAST)
    assert result.run("autocast-bf16", "jit").status == "ok"
    assert before == (torch.is_autocast_cache_enabled(), torch.is_grad_enabled(), torch.get_default_dtype())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


# -- what explains a row


class Whitened(nn.Module):
    """Uses an op without a 16-bit kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(x @ x.mT + torch.eye(4, dtype=x.dtype))


def test_gaps_under_a_backend_are_explained_by_the_eager_run() -> None:
    result = scan(Whitened(), torch.randn(3, 4, 6), precisions="bfloat16", backends="jit,eager", **FAST)
    eager, traced = result.run("bfloat16"), result.run("bfloat16", "jit")
    assert [run.backend for run in result.runs] == ["eager", "eager", "jit"]  # eager first
    assert traced.status == "error"
    assert traced.explained_by == "bfloat16"
    assert traced.gaps == eager.gaps != []
    assert not len(traced.op_calls)
    found = [d for d in result.diagnostics if d.code.startswith("LP1") and d.backend == "jit"]
    assert len(found) == 1


def test_what_is_prepared_for_the_first_batch_is_called_on_the_others() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if x.abs().max() < 500 else x.cos()

    def data() -> Iterator[Tensor]:
        for scale in (1.0, 1000.0, 1000.0):
            yield scale * torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) + scale / 1000

    result = scan(Branch().eval(), data(), precisions="fp32", backends="eager,jit", batches=3, plan=False, times="off")
    jit = result.run("fp32", "jit")
    assert (jit.status, jit.failed_batch) == ("inaccurate", 1)
    assert any("its first 3 items were used" in note for note in result.model.notes)


def test_a_backend_alone_is_explained_in_eager_mode() -> None:
    result = scan(Whitened(), torch.randn(3, 4, 6), precisions="bfloat16", backends="jit", **FAST)
    traced = result.run("bfloat16", "jit")
    assert traced.explained_by is None
    assert [gap.op for gap in traced.gaps] == ["aten.linalg_inv_ex.default"]


# -- memory, metric, sets of runs


def test_peak_memory_counts_what_is_allocated() -> None:
    megabyte = 2**20 // 4

    def work() -> None:
        first = torch.empty(megabyte)
        del first
        second, third = torch.empty(megabyte), torch.empty(2 * megabyte)
        del second, third

    assert peak_allocated(work) == 3 * 2**20


def test_peak_memory_leaves_out_garbage_of_an_earlier_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_garbage() -> None:
        cycle = [torch.empty(1000)]
        cycle.append(cycle)  # type: ignore[arg-type]

    def collect() -> None:
        if gc.isenabled():  # as Python may at any time
            gc.collect()

    def work() -> None:
        collect()
        torch.empty(1000)

    enable = torch.autograd._enable_profiler_legacy
    monkeypatch.setattr(torch.autograd, "_enable_profiler_legacy", lambda config: (enable(config), collect()))
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        peak_allocated(make_garbage)
        assert peak_allocated(work) == 4000
    finally:
        gc.set_threshold(*thresholds)


def test_the_metric_of_a_row_is_that_of_its_backend(register: Register) -> None:
    class Negated(Backend):
        """Returns minus what the model returns."""

        name = "negated"
        summary = "minus the model"

        def prepare(self, model: Any, example: Any) -> Any:
            return lambda *args: -model(*args)

    register(Negated())

    def metric(model: nn.Module) -> float:
        assert model.head.out_features == 4
        return float(model(IMAGES).float().sum())

    result = scan(ConvNet().eval(), IMAGES, precisions="bfloat16", backends="eager,negated", metric=metric, **FAST)
    eager, negated = result.run("bfloat16").metric, result.run("bfloat16", "negated").metric
    assert eager
    assert negated == pytest.approx(-eager)


def test_every_precision_runs_on_every_backend() -> None:
    options = ScanOptions(precisions=["fp32", "half"], backends=["jit", "eager"])
    assert [key.label for key in options.keys("cpu")] == ["fp32", "half", "fp32 · jit", "half · jit"]
    with pytest.raises(UsageError, match="Unknown memory format"):
        scan(nn.Linear(2, 2), torch.ones(1, 2), memory_formats="channel_first")


def test_a_backend_is_replaced_where_it_cannot_run(register: Register) -> None:
    class Archived(Careless):
        """Runs as another backend."""

        name = "archived"

        def replacement(self) -> Any:
            return ("jit", "it is archived")

    class Replaced(Archived):
        """The same with the type."""

        def replacement(self) -> Any:
            from lowprec_check.schema.axes import Replacement

            return Replacement(*super().replacement())

    register(Replaced())
    assert replaced(["archived", "jit"]) == (["jit"], ["archived runs as jit here: it is archived"])
    result = scan(ConvNet().eval(), IMAGES, precisions="bfloat16", backends="archived", errors="none", **FAST)
    assert statuses(result) == {"fp32": "ok", "bfloat16 · jit": "ok"}
    assert "archived runs as jit here: it is archived" in result.model.notes


def test_help_lists_backends_and_memory_formats(call: Call) -> None:
    text = re.sub(r"[│\s]+", " ", call("scan", "--help-all").stdout)
    for words in (
        "inductor (torch.compile)",
        "jit (torch.jit.trace and freeze)",
        "channels_last",
    ):
        assert words in text, words
