"""Weights that are read from their files when a module uses them: the same results, in less memory."""

from __future__ import annotations

import functools
import linecache
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import begun
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from lowprec_check.analysis.conclusion import conclude, conclude_early
from lowprec_check.analysis.run_summary import searched_plan
from lowprec_check.cli.scan import _unfinished
from lowprec_check.core import tasks
from lowprec_check.core.scan import growing_scan, scan_target
from lowprec_check.engine.model import streamed_weights
from lowprec_check.engine.model.plain_run import PlainCalls
from lowprec_check.engine.model.prepared import prepared
from lowprec_check.engine.model.streamed_weights import (
    ReadBack,
    Saved,
    is_unread,
    saved_tensors,
    stream_of,
    stream_weights,
    unread_weights,
)
from lowprec_check.engine.model.target_source import TargetSource, load_here
from lowprec_check.engine.model.target_spec import NOTICE, TargetSpec
from lowprec_check.errors import UsageError
from lowprec_check.process import Isolation, system
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.scanned_model import STREAMED


class Tied(nn.Module):
    """Reads weights of its children itself, shares one, and normalizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        nn.init.trunc_normal_(self.head.weight)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        x = x + self.attention(x, x, x)[0]
        x = self.lstm(x)[0] * self.scale
        return self.head(x) + F.linear(x, self.embed.weight)


def streamed(make: Callable[[], nn.Module], path: Path) -> tuple[nn.Module, nn.Module]:
    """A model, and the same with its weights in a file."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.uniform_(0.5, 1.5)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, path)
    with unread_weights():
        other = make().eval()
    stream_weights(other, [path])
    return model, other


@pytest.mark.parametrize("cast", [lambda m: m, nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_outputs_are_equal(cast: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model, other = streamed(Tied, tmp_path / "weights.safetensors")
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected, found = cast(model)(ids), cast(other)(ids)
    torch.testing.assert_close(
        found, expected, rtol=1e-5 if found.itemsize > 2 else 1e-2, atol=1e-6
    )  # sums depend on the alignment
    listed = dict(other.named_parameters())
    assert listed.keys() == dict(model.named_parameters()).keys()
    assert all(is_unread(weight) for name, weight in listed.items() if not name.startswith("lstm"))
    assert {weight.dtype for weight in other.parameters()} == {weight.dtype for weight in model.parameters()}


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first bytes of the parts that are read, as if the processor were an accelerator with little memory."""
    make, read, begins = torch.empty, Saved.read, list[int]()

    def unpinned(*shape: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return make(*shape, **options)

    def noted(saved: Saved, begin: int, into: Tensor) -> None:
        begins.append(saved.start + begin)
        read(saved, begin, into)

    monkeypatch.setattr(streamed_weights, "reads_ahead", lambda _device: True)
    monkeypatch.setattr(streamed_weights, "_PART_BYTES", 256)
    monkeypatch.setattr(streamed_weights, "AHEAD_BYTES", 1500)
    monkeypatch.setattr(streamed_weights, "HELD_BYTES", 1000)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(Tensor, "record_stream", lambda _tensor, _stream: None)
    monkeypatch.setattr(Saved, "read", noted)
    return begins


def test_weights_are_read_ahead_for_an_accelerator(tmp_path: Path, uploads: list[int]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))

    model, other = streamed(make, tmp_path / "weights.safetensors")
    stream, x, threads = stream_of(other), torch.randn(2, 16), threading.active_count()
    assert stream is not None
    with torch.inference_mode():
        assert torch.equal(other(x), model(x))
    assert len(uploads) == len(set(uploads)) == 9 * 5
    for module in (model, other):
        module._modules = dict(reversed(module._modules.items()))
    assert torch.equal(other(x), model(x))
    assert stream._uploads is not None
    for _, parts in stream._uploads._coming.values():  # what was started for a next call is not counted later
        for part in parts:
            part.result()
    uploads.clear()
    assert torch.equal(other.half()(x.half()), model.half()(x.half()))
    assert len(set(uploads)) == 9 * 5
    assert len(uploads) <= 9 * 5 + 9  # in the order of the call before, and at the end what a next one reads first
    stream.restart(None)
    assert threading.active_count() == threads


@pytest.mark.usefixtures("uploads")
def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    _, other = streamed(lambda: nn.Sequential(nn.Linear(64, 64)), tmp_path / "weights.safetensors")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match="ended while it was read"):
        other(torch.randn(2, 64))


def test_a_weight_that_was_not_read_cannot_be_used(tmp_path: Path) -> None:
    _, other = streamed(Tied, tmp_path / "weights.safetensors")
    weight = dict(other.named_parameters())["norm.weight"]
    with pytest.raises(RuntimeError, match="was not read"):
        weight + 1


@pytest.mark.parametrize(
    ("forward", "init", "says", "hint"),
    [
        (
            "self.layers[0].weight.mul_(2)",
            "",
            "The model writes to its weight layers.0.weight, which is read from its file again and again.",
            "without --stream",
        ),
        ("x = x + sum(p.mean() for p in self.parameters())", "", "a weight that was not read", "module.weight"),
        (
            "x = self.embed(x.long())[..., 0]",
            "self.embed = nn.Embedding(9, 2, max_norm=1e-3)",
            "The model writes to its weight embed.weight",
            "without --stream",
        ),
    ],
)
def test_what_cannot_be_streamed_is_said(forward: str, init: str, says: str, hint: str, tmp_path: Path) -> None:
    path, weights = written(tmp_path)
    if init:
        save_file({**load_file(weights), "embed.weight": torch.ones(9, 2)}, weights)
    text = path.read_text().replace("return self.mean(x)", f"{forward}\n        return self.mean(x)")
    path.write_text(
        text.replace("        self.norm", f"        {init or 'pass'}\n        self.norm").replace("randn", "rand")
    )
    before = weights.read_bytes()
    with pytest.raises(UsageError, match=re.escape(says)) as found:
        scanned(path, weights, stream=True, plan=False)
    assert hint in (found.value.hint or "")
    assert weights.read_bytes() == before


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    save_file({"0.weight": torch.zeros(3, 3)}, tmp_path / "weights.safetensors")
    with unread_weights():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"3 weights of the model are missing .* \(0.bias, 1.weight, 1.bias\)"):
        stream_weights(model, [tmp_path / "weights.safetensors"])


INIT = """
        self.register_buffer("table", torch.arange(32.0))
        self.register_buffer("average", self.layers[0].weight.detach().clone())
        self.register_buffer("none", torch.zeros(0))
"""


@pytest.mark.parametrize("lacks", [(), ("table",), ("average",)], ids=str)
@pytest.mark.parametrize("more", [{}, {"other": torch.ones(2)}], ids=["", "unknown"])
def test_a_file_must_have_what_the_model_saves(lacks: tuple[str, ...], more: dict[str, Tensor], tmp_path: Path) -> None:
    """Buffers too, also one that is made from a weight; streamed or not."""
    path, weights = written(tmp_path)
    text = path.read_text().replace(
        "    def forward(self, x):\n        for", f"{INIT}    def forward(self, x):\n        for"
    )
    path.write_text(text.replace("return self.mean(x)", "return self.mean(x + self.table * 0.1 + self.average[0])"))
    buffers = {"table": torch.arange(32.0) / 7, "average": torch.ones(32, 32), "none": torch.zeros(0)}
    state = load_file(weights) | buffers | more
    save_file({name: tensor for name, tensor in state.items() if name not in lacks}, weights)
    found = []
    for stream in (False, True):
        try:
            found.append(str(scanned(path, weights, stream=stream, precisions=["bf16"]).run("bfloat16").output_error))
        except UsageError as error:
            found.append(error.message)
    assert found[0] == found[1]
    assert ("rel_l2" in found[0]) == (not lacks and not more)


def test_a_number_that_the_model_takes_from_a_weight_when_it_is_made_is_refused(tmp_path: Path) -> None:
    """It would be that of another model."""
    path, weights = written(tmp_path)
    first = "self.first = self.layers[0].weight[0, 0].item()\n        self.norm"
    path.write_text(path.read_text().replace("self.norm", first, 1))
    with pytest.raises(UsageError, match="a number is taken from a weight that was not read"):
        scanned(path, weights, stream=True)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("[]", "'list' object has no attribute"),
        ('{"a": {"dtype": "U16", "shape": [0], "data_offsets": [0, 0]}}', "a is in the format U16"),
    ],
)
def test_a_file_that_cannot_be_streamed_is_named(header: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(UsageError, match=re.escape(says)):
        stream_weights(nn.Linear(3, 3), [path])


def test_an_empty_tensor_at_the_end_of_the_last_page_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    header = b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    path.write_bytes((mmap.PAGESIZE - 8).to_bytes(8, "little") + header.ljust(mmap.PAGESIZE - 8))
    saved = saved_tensors(path)["a"]
    saved.prefetch()
    saved.forget(cached=False)
    assert saved.values.shape == (0,)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"0.weight": torch.zeros(3, 3)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match="has not as many bytes"):
        stream_weights(nn.Linear(3, 3), [path])


# -- Scans

MODEL = """
import torch
from torch import nn

class Mean(nn.Module):
    def forward(self, x):
        return (x * {factor}).sum(-1) / {factor}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear({width}, {width}) for _ in range({layers}))
        self.norm, self.mean = nn.LayerNorm({width}), Mean()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(self.norm(x)).relu()
        return self.mean(x)

def model():
    torch.manual_seed(0)
    return Model().eval()

inputs = torch.randn(2, {width}, generator=torch.Generator().manual_seed(0))
"""


def written(
    folder: Path, *, width: int = 32, layers: int = 3, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Path, Path]:
    """A file with a model, and one with its weights in ``dtype``."""
    path, weights = folder / "mymodel.py", folder / "weights.safetensors"
    path.write_text(MODEL.format(width=width, layers=layers, factor=factor))
    torch.manual_seed(0)
    state = {}
    for number in range(layers):
        state[f"layers.{number}.weight"] = torch.randn(width, width) / width**0.5
        state[f"layers.{number}.bias"] = torch.randn(width)
    state |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    save_file({name: tensor.to(dtype) for name, tensor in state.items()}, weights)
    return path, weights


def scanned(path: Path, weights: Path, *, stream: bool, **options: object) -> ScanResult:
    """The result of a scan without what a streamed one leaves out."""
    spec = TargetSpec(str(path), weights=weights, stream=stream)
    given = ScanOptions(**{"times": "off", "further_inputs": 0, "budget_error": "off", **options})  # type: ignore[arg-type]
    return scan_target(load_here(spec, 0), "none", given)


@pytest.fixture
def few_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the weights were more than may be kept."""
    for module in ("engine.model.streamed_weights", "features.streaming.run"):
        monkeypatch.setattr(f"lowprec_check.{module}.HELD_BYTES", 1000)


@pytest.fixture(scope="module")
def held_results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float, torch.dtype], ScanResult]:
    """Scans with the weights in memory, each once."""

    @functools.cache
    def scan_held(factor: float, dtype: torch.dtype) -> ScanResult:
        files = written(tmp_path_factory.mktemp("held"), factor=factor, dtype=dtype)
        return scanned(*files, stream=False, plan=False)

    return scan_held


@pytest.mark.parametrize("how", ["", "few_held", "uploads"])
@pytest.mark.parametrize(("factor", "dtype"), [(1.0, torch.float32), (1e4, torch.float32), (1.0, torch.bfloat16)])
def test_a_scan_finds_the_same(
    factor: float,
    dtype: torch.dtype,
    how: str,
    tmp_path: Path,
    held_results: Callable[[float, torch.dtype], ScanResult],
    request: pytest.FixtureRequest,
) -> None:
    held = held_results(factor, dtype)
    if how:
        request.getfixturevalue(how)
    other = scanned(*written(tmp_path, factor=factor, dtype=dtype), stream=True, plan=False)
    assert STREAMED in other.model.notes
    assert STREAMED not in held.model.notes
    assert [run.status for run in other.runs] == [run.status for run in held.runs]
    assert {run.status for run in other.runs} == ({"ok", "nonfinite"} if factor > 1 else {"ok"})
    for one, same in zip(other.runs[1:], held.runs[1:], strict=True):
        assert one.output_error is not None
        assert same.output_error is not None
        distances = one.output_error.rel_l2, same.output_error.rel_l2
        assert distances == (None, None) or distances[0] == pytest.approx(distances[1], rel=1e-6)
        assert one.op_calls.op == same.op_calls.op
        for name in ("local_error", "accumulated_error"):
            known = [
                (a, b)
                for a, b in zip(getattr(one.op_calls, name), getattr(same.op_calls, name), strict=True)
                if b is not None
            ]
            assert [a for a, _ in known] == pytest.approx([b for _, b in known], rel=1e-6)
        assert (one.latency_ms, one.peak_memory_bytes, one.uncalled_modules) == (None, None, same.uncalled_modules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_the_output_error_are_the_same_with_weights_that_are_read_back(
    dtype: torch.dtype, tmp_path: Path, few_held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no graph holds one meanwhile."""
    files = written(tmp_path, layers=5, dtype=dtype)
    asked: dict[str, Any] = {"plan": False, "precisions": "half,autocast-bf16", "budget_error": "on"}
    held = scanned(*files, stream=False, **asked)
    read, most = ReadBack._unpack, list[int]()

    def counted(self: ReadBack, packed: Any) -> Tensor:
        values = read(self, packed)
        alive = [name for name, storage in self._names.values() if storage() is not None]
        most.append(len({name for name in alive if name.endswith("weight")}))
        return values

    monkeypatch.setattr(ReadBack, "_unpack", counted)
    spec = TargetSpec(str(files[0]), weights=files[1], stream=True)
    options = ScanOptions(times="off", further_inputs=0, **asked)
    other = scan_target(load_here(spec, 0), "none", options)
    assert most
    assert max(most) <= 2  # of six
    for one, same in zip(held.runs[1:], other.runs[1:], strict=True):
        assert one.budget is not None
        assert one.budget.predicted
        derived = [msgspec.structs.replace(share, measured=None) for share in one.budget.modules]
        assert same.budget == msgspec.structs.replace(one.budget, modules=derived)
    without = scanned(*files, stream=True, plan=False, precisions="half", budget_error="auto")
    assert without.runs[1].budget is None


def notice(source: TargetSource, **options: object) -> str:
    """What a scan says before its first run."""
    shown = list[str]()
    source.on_progress = lambda run, doing: shown.append(doing) if run == NOTICE else None
    given = ScanOptions(**{"times": "off", "further_inputs": 0, "budget_error": "off", **options})  # type: ignore[arg-type]
    scan_target(source, "none", given)
    return " ".join(shown)


@pytest.mark.parametrize(("batches", "budget"), [(1, "off"), (2, "off"), (1, "on")])
def test_weights_are_read_at_least_as_often_as_is_shown(
    batches: int, budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    path, weights = written(tmp_path, width=256, layers=4)
    path.write_text(path.read_text().replace("inputs = torch", "inputs = lambda number=0: number + torch"))
    source = load_here(TargetSpec(str(path), weights=weights, stream=True), 0)
    stream = stream_of(source.target.model)
    assert stream is not None
    counts = Counter[str]()

    def counted(name: str, unread: Tensor, read: Callable[[str, Tensor], Tensor] = stream.read) -> Tensor:
        held = stream._held.get(name)
        found = read(name, unread)
        counts[name] += found is not held
        return found

    def counted_back(name: str, *about: Any, read: Callable[..., Tensor] = stream.read_back) -> Tensor:
        counts[name] += 1
        return read(name, *about)

    monkeypatch.setattr(stream, "read", counted)
    monkeypatch.setattr(stream, "read_back", counted_back)
    assert notice(source, precisions="half,bfloat16", plan=False, batches=batches) == ""  # all of them stay in memory
    request.getfixturevalue("few_held")
    counts.clear()
    said = notice(source, precisions="half,bfloat16", plan=False, batches=batches, budget_error=budget)
    shown = re.search(r"read at least (\d+) times", said)
    assert shown is not None
    assert int(shown[1]) == (4 if budget == "on" else 2) + batches
    assert ("twice in each other" in said) == (budget == "on")
    assert len(counts) == 10
    if budget == "on":  # no derivative needs the other ones
        counts = Counter({name: count for name, count in counts.items() if re.fullmatch(r"layers\.\d\.weight", name)})
    assert min(counts.values()) >= int(shown[1])
    assert batches > 1 or min(counts.values()) == 3 + int(shown[1]) - 1  # fp32 is fast enough to be called three times
    assert ("each batch" in said) == (batches > 1)


@pytest.mark.usefixtures("few_held")
@pytest.mark.parametrize(
    ("forward", "options"),
    [
        pytest.param("", {"without_kernel": ["aten.native_layer_norm:half"]}, id="a missing kernel"),
        pytest.param("x = nn.functional.dropout(x, 0.5)", {}, id="random numbers"),
        pytest.param("if x.dtype == torch.half: raise ValueError('not in half')", {}, id="an error"),
    ],
)
def test_what_no_analyzed_call_shows_is_run_as_its_user_runs_it(
    forward: str, options: dict[str, Any], tmp_path: Path
) -> None:
    path, weights = written(tmp_path)
    path.write_text(
        path.read_text().replace("return self.mean(x)", f"{forward or 'pass'}\n        return self.mean(x)")
    )
    held, other = (
        scanned(path, weights, stream=stream, plan=False, precisions="half,bfloat16", **options)
        for stream in (False, True)
    )
    for one, same in zip(other.runs, held.runs, strict=True):
        assert (one.status, one.exception, one.gaps, one.complete) == (
            same.status,
            same.exception,
            same.gaps,
            same.complete,
        )
        assert one.output_error == same.output_error


@pytest.mark.usefixtures("few_held")
def test_the_time_of_an_analyzed_call_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hopeless = property(lambda task: math.inf if task.is_reference else 0.0)
    monkeypatch.setattr(tasks.ModelTask, "hopeless_seconds", hopeless)
    # A call that waited for a core all the time takes 0 s.
    monkeypatch.setattr(system.CoreWaits, "longest", lambda _: None)
    files = written(tmp_path)
    for once in (True, False):
        if not once:
            monkeypatch.setattr("lowprec_check.features.streaming.run.HELD_BYTES", 1 << 30)
        half = scanned(*files, stream=True, plan=False, precisions="half").run("half")
        assert (half.status, half.calls, half.judged_by_one_call) == ("ok", 1, not once)


@pytest.mark.parametrize(
    ("plan", "says"), [(True, "If a precision fails, each trial"), (None, "If none of them passes"), (False, None)]
)
def test_the_search_for_a_plan_is_shown(
    plan: bool | None, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowprec_check.features.streaming.run.HELD_BYTES", 1000)
    path, weights = written(tmp_path)
    said = notice(load_here(TargetSpec(str(path), weights=weights, stream=True), 0), precisions="half", plan=plan)
    assert says in said if says else "plan" not in said


def test_what_it_takes_and_what_is_read_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowprec_check.features.streaming.run.HELD_BYTES", 64 << 20)
    path, weights = written(tmp_path, width=512, layers=100)
    source = load_here(TargetSpec(str(path), weights=weights, stream=True), 0)
    shown = list[tuple[str, str]]()
    source.on_progress = lambda *step: shown.append(step)
    scan_target(source, "fork", ScanOptions(precisions="half,bfloat16", plan=False))
    assert shown[0][0] == NOTICE
    assert shown[0][1].startswith("0.098 GiB of weights are read at least 3 times")
    plain = re.compile(r"plain run in layers\.\d+, [<\d.]+ % of the weights")
    assert any(run == "fp32" and plain.fullmatch(doing) for run, doing in shown)
    assert any(run == "half" and re.search(r"op \d+: aten.* % of the weights$", doing) for run, doing in shown)


FAILS = "mask = torch.zeros(x.shape[-1], dtype=torch.bool); x.masked_fill(mask, -1e9)"


def resumed(
    files: tuple[Path, Path], earlier: ScanResult | None, isolation: Isolation = "none", **options: object
) -> Iterator[ScanResult]:
    """The results of a scan, after each run; ``earlier`` is one that ended early."""
    given = ScanOptions(precisions="half", times="off", further_inputs=0, budget_error="off", **options)  # type: ignore[arg-type]
    sys.modules.pop(files[0].stem, None)  # each command imports it anew
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, files[0].name).exists()])
        source = load_here(TargetSpec(str(files[0]), weights=files[1], stream=True), 0)
        yield from growing_scan(source, isolation, given, earlier)


def ended_early(result: ScanResult) -> ScanResult:
    """As it is saved, with a mark on its last run."""
    marked = msgspec.structs.replace(result.runs[-1], notes=["of the first scan"])
    so_far = msgspec.structs.replace(result, runs=[*result.runs[:-1], marked])
    early = conclude_early(so_far, ScanOptions(precisions="half").keys("cpu"))
    assert early is not None
    return ScanResult.from_json(early.to_json())


@pytest.mark.parametrize("where", ["model", "constant", "import", "late import"])
def test_runs_of_another_source_are_not_resumed(where: str, tmp_path: Path) -> None:
    files = written(tmp_path)
    if where in ("model", "constant"):
        changed, place = files[0], f"        {FAILS}\n"
    else:
        changed, place = tmp_path / f"masks_{where[:4]}.py", "        hidden(x)\n"
        changed.write_text(f"import torch\n\ndef hidden(x):\n    {FAILS}\n")
    text = files[0].read_text().replace("        for layer", f"{place}        for layer")
    late = f"    def forward(self, x):\n        from {changed.stem} import hidden\n{place}"
    if where == "constant":  # in a line that no op names
        text = text.replace("-1e9", "LEAST").replace("class Mean", "LEAST = -1e9\n\nclass Mean")
    if where == "import":
        text = f"from {changed.stem} import hidden\n{text}"
    files[0].write_text(text.replace(f"    def forward(self, x):\n{place}", late) if where == "late import" else text)
    isolation: Isolation = "fork" if where == "late import" else "none"  # this process has not imported it then
    early = ended_early(list(resumed(files, None, isolation, plan=False))[1])
    assert early.runs[1].status == "error"
    first, *_, same = resumed(files, early, isolation, plan=False)
    assert first.digest == early.digest
    assert same.runs[1].notes == ["of the first scan"]
    changed.write_text(
        changed.read_text().replace("-1e9", "-6e4" if where == "constant" else "torch.finfo(x.dtype).min")
    )
    later = (
        changed.stat().st_mtime + 2
    )  # of the same size, within a second, it would be taken from the file of its bytecode
    os.utime(changed, (later, later))
    linecache.clearcache()  # another command reads it anew
    sys.modules.pop(changed.stem, None)
    *_, repaired = resumed(files, early, isolation, plan=False)
    assert (repaired.runs[1].status, repaired.runs[1].notes) == ("ok", [])


def test_runs_with_another_output_of_fp32_are_not_resumed(tmp_path: Path) -> None:
    files = written(tmp_path)
    early = ended_early(list(resumed(files, None, plan=False))[1])
    weights = load_file(files[1])
    save_file(weights | {"layers.2.weight": -weights["layers.2.weight"]}, files[1])
    *_, other = resumed(files, early, plan=False)
    assert other.digest != early.digest
    assert other.runs[1].notes == []


def test_a_scan_that_ended_in_its_search_for_a_plan_is_resumed(tmp_path: Path) -> None:
    files = written(tmp_path, factor=1e4)
    results = [each for each in resumed(files, None, plan=True) if each.plan is None]
    early = ended_early(results[-1])  # the last before the plan
    assert [run.status for run in early.runs] == ["ok", "nonfinite"]
    assert not early.complete
    early.save(tmp_path / "scan.json")
    found = _unfinished(tmp_path / "scan.json")
    assert found is not None
    assert not searched_plan(found)
    *_, whole = resumed(files, found, plan=True)
    assert whole.complete
    assert whole.runs[1].notes == ["of the first scan"]
    assert whole.plan is not None
    assert searched_plan(whole)
    conclude(whole).save(tmp_path / "scan.json")
    assert _unfinished(tmp_path / "scan.json") is None
    older = msgspec.json.decode(early.to_json())
    del older["complete"]
    assert ScanResult.from_json(msgspec.json.encode(older)).complete


def test_a_plan_was_searched_only_if_a_run_fails_that_is_no_hopeless_one(tmp_path: Path) -> None:
    *_, result = resumed(written(tmp_path, factor=1e4), None, plan=False)
    asked = msgspec.structs.replace(result, options=result.options | {"plan": None})
    fp32, half = asked.runs

    def searched(half: Run, *more: Run) -> bool:
        return searched_plan(msgspec.structs.replace(asked, runs=[fp32, half, *more]))

    assert searched(half)
    assert not searched_plan(result)  # it was refused
    assert not searched(msgspec.structs.replace(half, judged_by_one_call=True))
    passes = msgspec.structs.replace(half, precision="bfloat16", status="ok")
    assert not searched(half, passes)


KILLED = """
    def forward(self, x):
        if x.dtype == torch.float16 and not Path("killed").exists():
            Path("killed").touch()
            while not Path("scan.json").exists():
                time.sleep(0.1)
            psutil.Process().parents()[1].kill()  # this process is of a run, whose parent loaded the model
            time.sleep(60)
"""


@pytest.mark.slow
def test_a_scan_that_was_killed_is_resumed(tmp_path: Path) -> None:
    path, weights = written(tmp_path)
    text = path.read_text().replace("\n    def forward(self, x):\n        for", f"{KILLED}        for")
    path.write_text(f"import time\nfrom pathlib import Path\nimport psutil\n{text}")
    found = tmp_path / "scan.json"
    command = [sys.executable, "-m", "lowprec_check", "scan", str(path), "--weights", str(weights), "--stream"]
    command += ["-p", "bfloat16,half", "--no-plan", "--json", str(found)]

    def ended() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)

    assert ended().returncode == -signal.SIGKILL
    early = ScanResult.load(found)
    assert [run.status for run in early.runs] == ["ok", "ok", "skipped"]
    marked = msgspec.structs.replace(early.runs[1], notes=["of the first scan"])
    msgspec.structs.replace(early, runs=[early.runs[0], marked, early.runs[2]]).save(found)
    assert "Resumed: bfloat16 of the scan that ended early." in ended().stderr
    whole = ScanResult.load(found)
    assert [run.status for run in whole.runs] == ["ok", "ok", "ok"]
    assert whole.runs[1].notes == ["of the first scan"]


def test_a_plan_is_found(tmp_path: Path) -> None:
    files = written(tmp_path, factor=1e4)
    result = scanned(*files, stream=True, precisions="half", plan=True)
    assert result.plan is not None
    assert "mean" in result.plan.keep_fp32


def test_what_needs_the_weights_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--train needs the weights in memory"):
        scanned(*written(tmp_path), stream=True, train=True)
    with pytest.raises(UsageError, match="--stream reads weights from files of safetensors"):
        load_here(TargetSpec(str(tmp_path / "mymodel.py"), stream=True), 0)


class Imports(nn.Linear):
    """Imports something in its first call, so that its time proves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        sys.modules[f"imported_by_{id(self)}"] = sys
        return super().forward(x)


def test_a_slow_call_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for model, calls in zip(streamed(lambda: Imports(4, 4), tmp_path / "weights.safetensors"), (2, 1), strict=True):
        with prepared(model, PRECISIONS.get("fp32"), torch.device("cpu")) as ready:
            plain = PlainCalls(ready, (torch.ones(4),), {}, seed=0).run(begun("fp32"), seconds=0.0)
            assert plain.run.calls == calls


def test_what_analyzed_a_run_is_told_of_no_later_weight(tmp_path: Path) -> None:
    path, weights = written(tmp_path)
    source = load_here(TargetSpec(str(path), weights=weights, stream=True), 0)
    scan_target(source, "none", ScanOptions(precisions="half", plan=False))
    stream = stream_of(source.target.model)
    assert stream is not None
    assert stream.on_read is None


def test_a_backend_is_skipped(tmp_path: Path) -> None:
    result = scanned(*written(tmp_path), stream=True, precisions="bfloat16", backends="jit", plan=False)
    assert result.run("bfloat16", "jit").reason == "only eager runs are streamed"


WIDTH, BYTES = 2048, 670 << 20
LIMIT = 500 << 20


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_larger_than_the_limit_of_memory_is_scanned(dtype: torch.dtype, tmp_path: Path) -> None:
    """``RLIMIT_DATA`` limits what a process allocates, beside what torch itself took when it was imported."""
    layers = BYTES // (WIDTH * WIDTH * dtype.itemsize)
    path, weights = written(tmp_path, width=WIDTH, layers=layers, dtype=dtype)
    code = f"""
import resource, sys
import torch, lowprec_check.core.session
from lowprec_check.__main__ import main
used = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData"))) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + {LIMIT}, used + {LIMIT}))
sys.argv = ["lowprec-check", "scan", {str(path)!r}, "--weights", {str(weights)!r}, *sys.argv[1:]]
main()
"""
    arguments = ("-p", "bfloat16", "--no-plan", "--isolation", "none", "-q")

    def ended(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments, *more], capture_output=True, text=True, check=False, timeout=300
        )

    assert weights.stat().st_size > LIMIT
    if dtype == torch.float32:  # in bfloat16, they would take twice as much
        assert ended().returncode != 0
    streamed_ = ended("--stream")
    assert streamed_.returncode == 0, streamed_.stderr
    assert "bfloat16" in streamed_.stdout
