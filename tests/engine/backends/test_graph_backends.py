"""OpenVINO, ONNX Runtime and torchao's configs: each row is the library's result; what a graph cannot do fails."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowprec_check import ScanResult, UnsupportedOpsError, UsageError, scan
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.backends import exported, openvino
from lowprec_check.engine.backends.exported import GraphBackend
from lowprec_check.schema.axes import BACKENDS, Example
from lowprec_check.schema.precisions import PRECISIONS
from lowprec_check.torchkit import installation
from lowprec_check.torchkit.source_location import show_file

missing = {name: installation.missing_packages(*BACKENDS.get(name).packages) for name in ("openvino", "onnxruntime")}  # type: ignore[attr-defined]
needs_both = pytest.mark.skipif(any(missing.values()), reason=f"needs {missing}")


def example(*args: Any, precision: str = "fp32", **kwargs: Any) -> Example:
    return Example(
        args=args,
        kwargs=kwargs,
        precision=PRECISIONS.get(precision),
        device="cpu",
        calibration=lambda: [(args, kwargs)],
    )


# -- the graph: a library that runs it by torch itself


class ByTorch(GraphBackend):
    """Runs the graph by torch."""

    name, title, summary = "by-torch", "Torch", "the graph in torch"
    packages, computes_in, instead = (), {"fp32": "f32"}, "no"
    lacks: tuple[str, ...] = ()

    def load(self, program: Any, precision: str) -> Any:
        if self.lacks:
            raise NotImplementedError
        graph = program.module()
        return lambda arrays: [tensor.numpy(force=True) for tensor in graph(*map(torch.from_numpy, arrays))]

    def missing_ops(self, error: Exception, program: Any) -> list[str]:
        return list(self.lacks)


class Everything(nn.Module):
    """Convolution, attention, an LSTM; a dict of inputs, and outputs of several kinds, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 8)
        self.lstm, self.attention = nn.LSTM(8, 6, batch_first=True), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, image: Tensor, more: dict[str, Tensor], scale: float = 2.0) -> dict[str, Any]:
        x = self.head(self.conv(image).relu().flatten(2).mT) * scale + more["bias"]
        states, (last, _) = self.lstm(x)
        mixed, weights = self.attention(states, states, states)
        return {"out": mixed, "states": [last, weights], "again": mixed, "scale": scale, "none": None}


def everything() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randn(2, 3, 4, 4, generator=generator),
        "more": {"bias": torch.randn(8, generator=generator)},
        "scale": 0.5,
    }


@torch.no_grad()
def test_a_graph_is_called_as_its_model() -> None:
    model, inputs = Everything().eval(), everything()
    called = ByTorch().prepare(model, example(**inputs))
    found, expected = called(**inputs), model(**inputs)
    assert list(found) == list(expected)
    assert (found["scale"], found["none"], found["out"] is found["again"]) == (0.5, None, True)
    torch.testing.assert_close(found, expected)
    other = {**inputs, "image": 2 * inputs["image"]}
    torch.testing.assert_close(called(**other), model(**other))
    same = torch.ones(3)  # one tensor passed twice is two inputs
    added = ByTorch().prepare(Sum().eval(), example(same, same))
    assert torch.equal(added(same, 2 * same), 3 * same)


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@pytest.mark.parametrize(
    "changes",
    [{"image": torch.zeros(1, 3, 4, 4)}, {"image": torch.zeros(2, 3, 4, 4).double()}, {"scale": 3.0}, {"more": {}}],
    ids=["batch size", "dtype", "number", "structure"],
)
@torch.no_grad()
def test_a_graph_refuses_other_inputs(changes: dict[str, Any]) -> None:
    inputs = everything()
    called = ByTorch().prepare(Everything().eval(), example(**inputs))
    with pytest.raises(ValueError, match=r"the graph is for inputs .*\(2, 3, 4, 4\).* was called with"):
        called(**inputs | changes)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x)  # type: ignore[operator]
        return x - self.mean  # type: ignore[operator]


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(3)


@dataclass
class Holder:
    value: Tensor


class Held(nn.Module):
    def forward(self, x: Tensor) -> Holder:
        return Holder(x + 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Counting().eval(), "changes mean; in Torch it would not"),
        (InPlace().eval(), "changes tensors_0; in Torch"),
        (Noisy().eval(), "draws random numbers; Torch would draw others"),
        (Held().eval(), "takes and returns tensors in tuples, lists and dicts, not Holder"),
        (nn.Linear(3, 3), "training mode; by-torch is for inference"),
    ],
)
@torch.no_grad()
def test_what_a_graph_would_do_differently_is_refused(model: nn.Module, message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises((UsageError, TypeError), match=message):
        ByTorch().prepare(model, example(torch.ones(3)))
    assert torch.equal(torch.get_rng_state(), before)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = torch.linalg.eigvalsh(y @ y.mT)  # the line of a gap
        return torch.special.i0e(z)  # and of another


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


def line_of(comment: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{show_file(__file__)}:{next(number for number, line in enumerate(lines, 1) if line.endswith(comment))}"


def check_gaps(gaps: list[Any]) -> None:
    assert [(gap.op, gap.module, gap.source, gap.layer) for gap in gaps] == [
        ("aten.special_i0e.default", "inner", line_of("# and of another"), "backend"),
        ("aten._linalg_eigh.default", "inner", line_of("# the line of a gap"), "backend"),
    ]


def test_ops_that_are_missing_have_their_module_and_line() -> None:
    backend = ByTorch()
    backend.lacks = ("aten._linalg_eigh.default", "aten.special_i0e.default")
    with torch.no_grad(), pytest.raises(UnsupportedOpsError, match="Torch does not support") as caught:
        backend.prepare(Outer().eval(), example(torch.randn(4, 4)))
    check_gaps(caught.value.gaps)


# -- the precisions


def test_precisions_that_a_library_lacks_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(backend: str, precision: str, device: str = "cpu") -> str | None:
        return BACKENDS.get(backend).skip_reason(PRECISIONS.get(precision), device, "contiguous")

    assert "as autocast-bf16" in (reason("openvino", "bfloat16") or "")
    assert "use fp32 or half" in (reason("onnxruntime", "autocast-bf16") or "")
    assert "use the backend inductor on cuda" in (reason("openvino", "fp32", "cuda") or "")
    for capable, expected in ((["FP32", "BF16"], None), (["FP32"], "computes in fp32 on this CPU, which has no bf16")):
        monkeypatch.setattr(openvino, "_capabilities", lambda capable=capable: capable)
        monkeypatch.setattr(exported, "missing_packages", lambda *_: None)
        found = reason("openvino", "autocast-bf16")
        assert found is None if expected is None else expected in (found or "")
    monkeypatch.undo()
    monkeypatch.setattr(installation, "installed_version", lambda _: None)
    for name, packages in (("openvino", "openvino"), ("onnxruntime", "onnxruntime onnxscript")):
        assert (reason(name, "fp32") or "").endswith(f"not installed: pip install {packages}")


# -- the libraries themselves, in processes of their own, in which their threads end

BARE = """
import json, sys, torch, warnings
warnings.simplefilter("ignore")
from test_graph_backends import Everything, everything
import onnxruntime, openvino
model, inputs, found = Everything().eval(), everything(), {}
class Flat(torch.nn.Module):
    def forward(self, image, bias):
        out = model(image, {"bias": bias}, 0.5)
        return out["out"], *out["states"]
def error(values):
    return [float((torch.as_tensor(v) - r).norm() / r.norm()) for v, r in zip(values, reference, strict=True)]
with torch.no_grad():
    args = inputs["image"], inputs["more"]["bias"]
    reference = Flat()(*args)
    program = torch.export.export(Flat(), args, strict=False)
    compiled = openvino.compile_model(openvino.convert_model(program), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found["bare openvino"] = error(compiled([x.numpy() for x in args]).to_tuple())
    graph = torch.onnx.export(Flat(), args, dynamo=True, verbose=False).model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    found["bare onnxruntime"] = error(session.run(None, {n: x.numpy() for n, x in zip(names, args)}))
for label, code in json.load(sys.stdin).items():
    space = {"model": Everything().eval(), "inputs": everything()}
    exec(code, space)
    found[label] = error([x.float() for x in (space["output"]["out"], *space["output"]["states"])])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def scanned() -> ScanResult:
    return scan(
        Everything().eval(),
        everything(),
        precisions="fp32,half",
        backends="openvino,onnxruntime",
        plan=False,
        errors="none",
        times="off",
        further_inputs=0,
    )


@needs_both
@pytest.mark.slow
def test_rows_equal_the_libraries_and_the_printed_code(scanned: ScanResult) -> None:
    rows = {run.key.label: run for run in scanned.runs if run.backend != "eager" and run.status != "skipped"}
    assert {label: run.status for label, run in rows.items()} == dict.fromkeys(
        ("fp32 · openvino", "fp32 · onnxruntime", "half · onnxruntime"), "ok"
    )
    codes = {label: snippet(run.key, scanned.model) for label, run in rows.items()}
    done = subprocess.run(
        [sys.executable, "-c", BARE],
        input=json.dumps(codes),
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    errors = {label: max(found) for label, found in json.loads(done.stdout.splitlines()[-1]).items()}
    for label, run in rows.items():
        assert run.rel_l2 == pytest.approx(errors[label], rel=1e-3), label  # the printed code: bit for bit
        bare = errors[f"bare {run.backend}"]
        assert (errors[label] < 1e-6) == (bare < 1e-6) or run.precision == "half", (label, bare)


@needs_both
@pytest.mark.slow
def test_ops_that_onnxruntime_computes_in_fp32_are_notes(scanned: ScanResult) -> None:
    gaps = scanned.run("half", "onnxruntime").gaps
    assert {gap.layer for gap in gaps} == {"backend"}
    assert {("aten.conv2d.default", "conv"), ("aten.linear.default", "head"), ("aten.lstm.input", "lstm")} <= {
        (gap.op, gap.module) for gap in gaps
    }
    notes = [found for found in scanned.diagnostics if found.backend == "onnxruntime" and found.code == "LP101"]
    assert {found.severity for found in notes} == {"note"}
    assert "no fp16 kernel on the CPU: it computes this op in fp32" in notes[0].message
    assert not scanned.run("fp32", "onnxruntime").gaps


@needs_both
@pytest.mark.slow
def test_ops_on_integers_are_not_among_those_that_onnxruntime_computes_in_fp32() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(100, 16)

        def forward(self, ids: Tensor) -> Tensor:
            positions = ids * 3  # the integers
            hidden: Tensor = self.embed(positions)
            return hidden * hidden  # the values

    ids = torch.randint(0, 30, (4, 7))
    options = {"plan": False, "times": "off", "further_inputs": 0}
    result = scan(Net().eval(), ids, precisions="half", backends="onnxruntime", **options)
    sources = [gap.source for gap in result.run("half", "onnxruntime").gaps if "mul" in gap.op]
    assert sources == [line_of("# the values")]


@needs_both
@pytest.mark.slow
def test_ops_that_the_libraries_lack() -> None:
    result = scan(
        Outer().eval(),
        torch.randn(4, 4),
        precisions="fp32",
        backends="openvino,onnxruntime",
        plan=False,
        times="off",
        further_inputs=0,
    )
    found = result.run("fp32", "openvino")
    assert (found.status, result.run("fp32", "onnxruntime").status) == ("error", "error")
    check_gaps(found.gaps)
    first = result.run("fp32", "onnxruntime").gaps[0]
    assert (first.module, first.layer) == ("inner", "backend")
    codes = {(each.backend, each.code, each.source) for each in result.diagnostics if each.severity == "error"}
    assert ("openvino", "LP104", line_of("# the line of a gap")) in codes
    assert "does not support" in (found.exception.message if found.exception else "")
