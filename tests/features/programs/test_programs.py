"""Programs: which models they call, what of each is kept and scanned, and the program with them in 16 bits."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import textwrap
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Call
from helpers import screen_of
from program_parts import PARTS
from shared_result import shared_result
from torch import Tensor, nn

from lowprec_check import UsageError, watch
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.features.programs import watching
from lowprec_check.features.programs.calls_of_model import MOST, CallsOfModel
from lowprec_check.features.programs.casting import ProgramCaster
from lowprec_check.features.programs.models_of_program import _progress_of
from lowprec_check.features.programs.program_document import check_format, program_document, program_report
from lowprec_check.features.programs.program_file import scan_program_file
from lowprec_check.features.programs.program_scan import (
    RECOMMENDED,
    Assignment,
    CallError,
    ProgramRun,
    ProgramScan,
    ScannedModel,
    assignments_of,
)
from lowprec_check.features.programs.watching import CallWatcher
from lowprec_check.report.layout.text import text
from lowprec_check.report.registry import FORMATS
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.options import ScanOptions
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.scanned_model import ModelInfo

INFO = ModelInfo(name="Net", parameters=1, inputs=["(1, 1)"], modules=1, training=False)
QUICK = {"times": "off", "further_inputs": 0, "isolation": "none", "precisions": "half,bfloat16"}


def pipe_of(**settings: Any) -> Any:
    """A pipeline of three models."""
    space: dict[str, Any] = {"__name__": "parts"}
    exec(PARTS, space)
    return space["Pipe"](**settings)


IDS = torch.arange(14).reshape(2, 7)


def test_the_outermost_calls_of_models_are_seen() -> None:
    pipe = pipe_of()
    torch.manual_seed(1)
    before = pipe(IDS)
    torch.manual_seed(1)
    with watch() as program:
        output = pipe(IDS)
    assert torch.equal(output, before)
    seen = [(model.name, model.method, model.calls) for model in program.models]
    assert seen == [("pipe.text", "", 1), ("pipe.unet", "", 8), ("pipe.vae.decode", "decode", 1)]
    text_call = program.models[0].kept[0]
    assert torch.equal(text_call.args[0], IDS)
    assert program.models[1].kept[0].kwargs["cond"].shape == (2, 16)
    assert program.models[1].kept[0].number == 1
    # Nothing of the program is changed
    assert "decode" in vars(type(pipe.vae))
    assert not hasattr(type(pipe.vae).decode, "__wrapped__")
    assert nn.Module.__call__ is nn.Module.__dict__["__call__"]


def test_only_outermost_calls_reach_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[object] = []
    call = CallWatcher._call
    monkeypatch.setattr(
        CallWatcher, "_call", lambda self, module, *rest: reached.append(module) or call(self, module, *rest)
    )
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(5)])
    hooked: list[object] = []
    model[2].register_forward_hook(lambda *_: hooked.append(None))
    with watch() as program:
        for _ in range(3):
            model(torch.ones(1, 2))
    assert reached == [model] * 3
    assert len(hooked) == 3
    assert program.models[0].calls == 3


class Decoder(nn.Module):
    """Generates by calling itself, and its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.table, self.last = nn.Linear(4, 8), nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids: Tensor, encoded: Tensor) -> Tensor:
        output: Tensor = self.last(self.table(ids) + encoded)
        return output

    def generate(self, features: Tensor, steps: int = 5) -> Tensor:
        """Some tokens."""
        encoded, ids = self.encoder(features), torch.zeros(1, 1, dtype=torch.long)
        for _ in range(steps):
            ids = torch.cat([ids, self(ids, encoded)[:, -1:].argmax(-1)], 1)
        return ids


@torch.no_grad()
def test_calls_in_a_method_that_calls_its_own_model_count() -> None:
    decoder = Decoder().eval()
    with watch() as program:
        decoder.generate(torch.randn(1, 1, 4))
        decoder.generate(torch.randn(1, 1, 4))
    assert [(model.name, model.calls) for model in program.models] == [("decoder.encoder", 2), ("decoder", 10)]
    shapes = [call.args[0].shape[1] for call in program.models[1].kept]
    assert shapes[0] == 1
    assert {shape.bit_length() for shape in shapes} == {1, 2, 3}  # 1; 2 or 3; 4 or 5


class Trainer(nn.Module):
    """Calls a part of it over and over; or when it is awaited."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)

    def fit(self) -> None:
        """Many calls."""
        for _ in range(100):
            self.part(torch.ones(1, 2))

    async def answer(self) -> Tensor:
        """One call."""
        output: Tensor = self.part(torch.ones(1, 2))
        return output


def test_of_a_method_with_many_calls_few_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []

    def copied(arguments: Any, _function: Any) -> Any:
        copies.append(arguments)
        return arguments

    monkeypatch.setattr(watching, "map_tensors", copied)
    model = Trainer()
    with watch() as program:
        model.fit()
    assert [(model.method, model.calls) for model in program.models] == [("fit", 1)]
    assert 0 < len(copies) < 50


def test_a_coroutine_stays_one() -> None:
    model = Trainer()
    with watch() as program:
        assert inspect.iscoroutinefunction(model.answer)
        asyncio.run(model.answer())
    assert [(type(model.module), model.calls) for model in program.models] == [(nn.Linear, 1)]


def test_a_model_in_another_thread_is_seen() -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with watch() as program:
        thread = threading.Thread(target=lambda: models[1](torch.ones(2, 4)))
        thread.start()
        thread.join()
        models[0](torch.ones(2, 4))
    assert [(model.name, model.calls) for model in program.models] == [("models[1]", 1), ("models[0]", 1)]
    assert [model.key for model in program.models] == ["Linear#0", "Linear#1"]


def test_calls_that_differ_most_are_kept() -> None:
    calls = CallsOfModel(nn.Linear(1, 1), "")
    for number in range(1, 101):
        size, scale = (7 if number == 31 else 2), (100.0 if number == 57 else 1.0)
        calls.note((torch.full((size,), scale + number / 1000),), {}, None)
    kept = [call.number for call in calls.kept()]
    assert kept[0] == 1
    assert kept[-1] == 100
    assert {31, 57} <= set(kept)
    assert len(kept) <= MOST


def test_copies_are_kept_and_a_last_call_that_was_overwritten_is_not() -> None:
    calls, values = CallsOfModel(nn.Linear(1, 1), ""), torch.ones(3)
    calls.note((values,), {}, None)
    values.mul_(0.5)
    calls.note((values,), {}, None)
    values.zero_()
    (kept,) = calls.kept()
    assert torch.equal(kept.args[0], torch.ones(3))


def test_equal_calls_are_kept_once() -> None:
    calls = CallsOfModel(nn.Linear(1, 1), "")
    for _ in range(3):
        calls.note((torch.ones(3),), {}, None)
    assert [call.number for call in calls.kept()] == [1]
    assert calls.count == 3


def test_each_model_is_scanned_on_its_calls() -> None:
    pipe = pipe_of(scale=3e4)
    with watch() as program:
        pipe(IDS)
    result = program.scan(**QUICK)
    assert result.complete
    statuses = {
        model.name: {run.precision: run.status for run in model.scan.runs} for model in result.models if model.scan
    }
    assert statuses["pipe.text"] == statuses["pipe.unet"] == {"fp32": "ok", "half": "ok", "bfloat16": "ok"}
    assert statuses["pipe.vae.decode"] == {"fp32": "ok", "half": "inaccurate", "bfloat16": "ok"}
    assert "pipe.vae.decode" in repr(result)
    assert msgspec.json.decode(msgspec.json.encode(result), type=ProgramScan) == result


def test_the_call_that_fails_is_named() -> None:
    pipe = pipe_of(at_step=6)
    with watch() as program:
        pipe(IDS)
    result = program.scan(**QUICK)
    unet = next(model for model in result.models if model.name == "pipe.unet")
    assert unet.scan is not None
    half = next(run for run in unet.scan.runs if run.precision == "half")
    assert half.status == "nonfinite"
    assert half.failed_batch is not None
    assert unet.kept[half.failed_batch] == 7


def test_without_calls_there_is_nothing_to_scan() -> None:
    with watch() as program:
        torch.ones(2).sum()
    with pytest.raises(UsageError, match="No model was called"):
        program.scan()


# -- Scripts that run to their end, and again with their models in other precisions


def scanned(path: Path, **settings: Any) -> ProgramScan:
    """The last result of a script."""
    quick = {name: value for name, value in QUICK.items() if name != "isolation"}
    *_, result = scan_program_file(TargetSpec(str(path)), ScanOptions(**{**quick, **settings}), "none")
    return result


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Writes a script after the parts."""

    def written(body: str) -> Path:
        path = tmp_path / "infer.py"
        path.write_text(PARTS + textwrap.dedent(body))
        return path

    return written


RUN = """
    pipe = Pipe({settings})
    if __name__ == "__main__":
        image = pipe(torch.arange(14).reshape(2, 7))
"""


def test_the_program_runs_again_with_its_models_in_16_bits(script: Any) -> None:
    result = scanned(script(RUN.format(settings="scale=3e4")))
    assert [model.name for model in result.models] == ["pipe.text", "pipe.unet", "pipe.vae.decode"]
    runs = {run.name: run for run in result.runs}
    again, half, bfloat16 = runs["fp32 again"], runs["half"], runs.get("bfloat16", runs[RECOMMENDED])
    assert {error.error for error in again.errors} == {0.0}
    assert len(again.errors) == 10
    for run in (bfloat16, runs[RECOMMENDED]):
        assert not any(error.exceeds(5e-2) for error in run.errors)
    # The image is black
    first = next(error for error in half.errors if error.exceeds(1e-2))
    assert (first.model, first.call, first.error) == ("Vae#0", 1, 1.0)
    shown = text(program_document(result))
    assert "pipe.vae.decode, call 1: differs by 1.0e+00" in shown
    # The same by hand
    pipe = pipe_of(scale=3e4)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        pipe = pipe_of(scale=3e4)
        for model in (pipe.text, pipe.unet, pipe.vae):
            model.to(dtype)
        outputs.append(by_hand(pipe, dtype))
    error = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
    assert bfloat16.errors[-1].error == pytest.approx(error, rel=1e-3)


@torch.no_grad()
def by_hand(pipe: Any, dtype: torch.dtype) -> Tensor:
    """The call of the pipeline with its models in ``dtype``, and all between them in fp32."""
    cond, x = pipe.text(IDS).float(), torch.randn(2, 16)
    for step in range(8):
        x = x - 0.1 * pipe.unet(x.to(dtype), step, cond=cond.to(dtype)).float()
    output: Tensor = pipe.vae.decode(x.to(dtype)).float()
    return output


def test_an_input_that_stays_in_fp32_is_not_cast(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []

    class Timed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
            seen.extend([x.dtype, timestep.dtype])
            output: Tensor = self.last(x) * timestep.to(x.dtype)
            return output

    model = Timed()
    assigned = {"Timed#0": Assignment("half", keep_fp32_inputs=["timestep"])}
    caster = ProgramCaster(assigned, [], tmp_path, calls=1, most=None)
    caster._keys[id(model)] = model, "Timed#0"
    with caster.watching(), torch.no_grad():
        output = model(torch.ones(2, 4), timestep=torch.tensor(3.0))
    assert seen == [torch.float16, torch.float32]
    assert output.dtype == torch.float32


def test_a_model_that_passes_in_no_precision_stays_in_fp32() -> None:
    models = [ScannedModel(name=name, kind="Net", calls=1, kept=[1], key=f"Net#{i}") for i, name in enumerate("ab")]
    result = ProgramScan(tool="lowprec-check", target="infer.py", models=models)
    assert [name for name, _ in assignments_of(result)] == ["fp32", "fp32 again"]
    half = Recommendation(precision="half", reason="", code="")
    passing = ScanResult(tool="", target="a", model=INFO, environment={}, runs=[], recommendation=half)
    models[0] = msgspec.structs.replace(models[0], scan=passing)
    result = msgspec.structs.replace(result, models=models)
    assigned = dict(assignments_of(result))[RECOMMENDED]
    assert {key: each.precision for key, each in assigned.items()} == {"Net#0": "half", "Net#1": "fp32"}


def scan_of(*passing: str, recommended: str) -> ScanResult:
    """A scan with a run for each precision that passes."""
    best = Recommendation(precision=recommended, reason="", code="")
    runs = [Run(precision=name, device="cpu", status="ok") for name in passing]
    return ScanResult(tool="", target="a", model=INFO, environment={}, runs=runs, recommendation=best)


def test_methods_of_one_model_get_what_passes_in_all() -> None:
    scans = {
        "encode": scan_of("fp32", "half", "bfloat16", recommended="half"),
        "decode": scan_of("fp32", "bfloat16", recommended="bfloat16"),
    }
    for names in (["encode", "decode"], ["decode", "encode"]):
        models = [
            ScannedModel(name=name, kind="Vae", calls=1, kept=[1], key="Vae#0", method=name, scan=scans[name])
            for name in names
        ]
        result = ProgramScan(tool="lowprec-check", target="infer.py", models=models)
        assert dict(assignments_of(result))[RECOMMENDED] == {"Vae#0": Assignment("bfloat16")}


def test_a_program_that_runs_only_once_says_nothing_of_its_models() -> None:
    scan = scan_of("fp32", "half", recommended="half")
    model = ScannedModel(name="net", kind="Net", calls=1, kept=[1], key="Net#0", scan=scan)
    run = ProgramRun("fp32", ["fp32"], problem="FileExistsError: out.png")
    result = ProgramScan(tool="lowprec-check", target="infer.py", models=[model], runs=[run])
    screen = text(program_document(result))
    assert "The program cannot run again in fp32: FileExistsError: out.png" in screen
    assert "Stay in fp32" not in screen


def test_calls_beyond_those_of_fp32_are_cast_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    monkeypatch.setattr(signal, "setitimer", lambda _timer, seconds: timers.append(seconds))
    model = nn.Linear(4, 4)
    caster = ProgramCaster({"Linear#0": Assignment("half")}, [], tmp_path, calls=1, most=1)
    with caster.watching(), torch.no_grad():
        outputs = [model(torch.ones(2, 4)) for _ in range(3)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert len(caster.errors) == len(timers) == 1


def test_a_run_with_nan_is_saved_and_shown(tmp_path: Path) -> None:
    model = ScannedModel(name="pipe.vae.decode", kind="Vae", calls=1, kept=[1], key="Vae#0", method="decode")
    run = ProgramRun("half", ["half"], [CallError("Vae#0", 1, None, True, method="decode")])
    result = ProgramScan(tool="lowprec-check", target="infer.py", models=[model], runs=[run])
    result.save(tmp_path / "program.json")
    assert msgspec.json.decode((tmp_path / "program.json").read_bytes(), type=ProgramScan) == result
    assert "pipe.vae.decode, call 1: has NaN or Inf" in text(program_document(result))


def test_a_page_draws_the_calls_of_each_run() -> None:
    errors = [CallError("Unet#0", call, 1e-6 * call) for call in range(1, 1001)]
    errors[699] = CallError("Unet#0", 700, None, nonfinite=True)
    model = ScannedModel(name="pipe.unet", kind="Unet", calls=1000, kept=[1], key="Unet#0")
    again = ProgramRun("fp32 again", ["fp32"], [CallError("Unet#0", 1, 0.0)])
    run = ProgramRun("half", ["half"], errors)
    result = ProgramScan(tool="lowprec-check", target="infer.py", models=[model], runs=[again, run])
    page = FORMATS.get("html").lay_out(program_document(result))
    wide = page.partition('aria-label="Calls of each model against fp32"')[2].partition("</svg>")[0]
    # Of 1000 calls some are drawn as one, as bad as the worst
    assert 100 < wide.count("<rect") < 400
    assert "all half: call 700: not finite" in wide
    assert 'aria-label="Error of each call against fp32"' in page
    assert "call 700: has NaN or Inf" in text(program_document(result))


def test_a_scan_of_a_script_says_beside_its_verdict_what_it_left_out() -> None:
    result = shared_result()
    taken = "called at infer.py:7, the first call of a model in the script"
    model = msgspec.structs.replace(result.model, taken=taken)
    screen = " ".join(screen_of(msgspec.structs.replace(result, model=model)).split())
    assert "(Whitening); --program scans every model that it calls." in screen
    assert screen.index("was stopped at its first call of a model (Whitening)") < screen.index("run status")
    assert "was stopped at" not in screen_of(shared_result())


def test_scan_hands_over_to_program(script: Any, call: Call, tmp_path: Path) -> None:
    path = script("import sys\nnet = nn.Linear(2, 2)\nnet(torch.ones(1, 2) * float(sys.argv[1]))\n")
    saved = tmp_path / "result.json"
    done = call("scan", path, "--program", "-p", "half", "--json", saved, "--", "3")
    assert done.returncode == 0, done.stderr
    assert [model["name"] for model in json.loads(saved.read_text())["models"]] == ["net"]
    for option in ("--weights", "--fail-on=never"):
        done = call("scan", path, "--program", option)
        assert done.returncode == 2
        assert f"{option} does not go with --program." in done.stderr
    done = call("compat", path, "--scan-options", "--program", "--report", tmp_path / "reports")
    assert done.returncode == 2
    assert "A row of compat is one model, so --program does not go with it" in " ".join(done.stderr.split())
    assert "--program " in call("scan", "--help").stdout
    assert "--program " not in call("plan", "--help").stdout


def test_sarif_has_a_run_for_each_model() -> None:
    models = [
        ScannedModel(name=name, kind="Net", calls=1, kept=[1], key=f"Net#{number}", scan=shared_result())
        for number, name in enumerate(["pipe.unet", "pipe.vae.decode"])
    ]
    models.append(ScannedModel(name="pipe.text", kind="Net", calls=1, kept=[1], problem="no"))
    result = ProgramScan(tool="lowprec-check 0.2", target="infer.py", models=models)
    file = Path("infer.sarif")
    check_format(file)
    log = json.loads(program_report(result, file))
    alone = json.loads(FORMATS.get("sarif").render(shared_result()))
    assert [run["automationDetails"]["id"] for run in log["runs"]] == ["pipe.unet/", "pipe.vae.decode/"]
    assert [run["results"] for run in log["runs"]] == [alone["runs"][0]["results"]] * 2
    nothing = json.loads(program_report(msgspec.structs.replace(result, models=[models[2]]), file))
    assert nothing == {"version": "2.1.0", "runs": []}
    with pytest.raises(UsageError, match="no report in this format"):
        check_format(Path("infer.xml"))


def test_progress_names_the_model_and_the_call() -> None:
    steps: list[tuple[str, str]] = []
    pipe = pipe_of(at_step=3)
    with watch() as program:
        pipe(IDS)
    unet = program.models[1]
    _progress_of(lambda run, doing: steps.append((run, doing)), unet, "half", "batch 1, plain run")
    assert unet.kept[1].number == 4
    assert steps == [("pipe.unet · half", "call 4, plain run")]


def test_what_is_finished_is_kept() -> None:
    pipe = pipe_of()
    with watch() as program:
        pipe(IDS)
    growing = program.growing_scan(ScanOptions(further_inputs=0, precisions=["half"], times="off"), "none")
    seen, first = next(growing), next(growing)
    assert [model.name for model in seen.models] == ["pipe.text", "pipe.unet", "pipe.vae.decode"]
    assert first.models[0].scan is not None
    assert "1 model of 3 scanned" in text(program_document(first))


def test_exit_is_an_end_and_an_exception_is_said(script: Any) -> None:
    result = scanned(script(RUN.format(settings="") + "    import sys\n    sys.exit(0)\n"))
    assert [model.calls for model in result.models] == [1, 8, 1]
    with pytest.raises(UsageError, match="lost"):
        scanned(script(RUN.format(settings="") + "    raise ValueError('lost')\n"))


def test_a_program_that_does_not_end_is_stopped(script: Any) -> None:
    body = """
        import time
        pipe = Pipe()
        while True:
            pipe(torch.arange(14).reshape(2, 7))
            time.sleep(0.2)  # each call that is kept is scanned
    """
    result = scanned(script(body), budget=1.0, precisions="half")
    assert any("stopped after 1 s" in note for note in result.notes)
    calls = sum(model.calls for model in result.models)
    assert all(0 < len(run.errors) <= calls for run in result.runs)
    assert [model.name for model in result.models] == ["pipe.text", "pipe.unet", "pipe.vae.decode"]


def test_files_are_left_as_they_are(script: Any, tmp_path: Path) -> None:
    kept = tmp_path / "image.txt"
    kept.write_text("before")
    path = script(
        RUN.format(settings="")
        + f"        with open({str(kept)!r}, 'w') as file:\n            file.write(str(image.sum()))\n"
    )
    scanned(path, precisions="half")
    assert kept.read_text() == "before"
