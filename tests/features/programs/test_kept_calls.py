"""Which calls of a program are kept, with which state, and which are found by running it again."""

from __future__ import annotations

import enum
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lowprec_check import watch
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.features.programs import calls_of_model
from lowprec_check.features.programs.calls_of_model import MOST, CallsOfModel, Room
from lowprec_check.features.programs.casting import ProgramCaster
from lowprec_check.features.programs.program_document import program_document
from lowprec_check.features.programs.program_file import _timed, key_to_blame, missed_calls
from lowprec_check.features.programs.program_scan import (
    AGAIN,
    OTHER_INTEGERS,
    RECOMMENDED,
    Assignment,
    CallError,
    OtherChoice,
    ProgramRun,
    ProgramScan,
    ScannedModel,
    assignments_of,
)
from lowprec_check.features.programs.running import run_to_end
from lowprec_check.features.programs.watching import names_of_modules
from lowprec_check.report.layout.text import text
from lowprec_check.schema.findings import Recommendation
from lowprec_check.schema.scan_result import Run, ScanResult
from lowprec_check.schema.scanned_model import ModelInfo

INFO = ModelInfo(name="Net", parameters=1, inputs=["(1, 1)"], modules=1, training=False)


def test_a_call_is_kept_for_its_largest_input_whichever_it_is() -> None:
    calls = CallsOfModel(nn.Linear(1, 1), "")
    for number in range(1, 21):
        condition = torch.full((2,), 50.0 if number == 7 else 1.0)
        mask = torch.full((2,), -3e38)
        calls.note((torch.ones(2) * number, mask), {"condition": condition}, None)
    kept = [call.number for call in calls.kept()]
    assert {1, 7, 20} <= set(kept)
    assert len(kept) <= MOST


def test_a_call_is_kept_for_what_it_returns() -> None:
    calls = CallsOfModel(nn.Linear(1, 1), "")
    for number in range(1, 21):
        token = torch.tensor([number])
        calls.returned(calls.note((token,), {}, None), torch.full((3,), 80.0 if number == 7 else 1.0))
    assert {1, 7, 20} <= {call.number for call in calls.kept()}


def test_a_call_that_was_overwritten_is_not_kept_for_what_it_returns() -> None:
    calls, token = CallsOfModel(nn.Linear(1, 1), ""), torch.tensor([0])
    for number in range(1, 4):
        token += 1
        called = calls.note((token,), {}, None)
        token += 1
        calls.returned(called, torch.full((3,), float(10**number)))
    assert [call.number for call in calls.kept()] == [1]


@torch.inference_mode()
def test_a_call_that_was_overwritten_in_inference_mode_is_not_kept() -> None:
    calls, x = CallsOfModel(nn.Linear(1, 1), ""), torch.ones(3)
    for _ in range(3):
        calls.note((x,), {}, None)
    assert [call.number for call in calls.kept()] == [1]
    x += 0.1
    calls.note((x,), {}, None)
    assert [call.number for call in calls.kept()] == [1, 4]
    calls.note((x,), {}, None)
    x += 0.1
    assert [call.number for call in calls.kept()] == [1]


def test_calls_beyond_the_memory_are_on_disk_and_not_kept_beyond_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_of_model, "free_memory", lambda device: 8 * 1000)
    monkeypatch.setattr(calls_of_model.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 8 * 500))
    room = Room()
    calls = CallsOfModel(nn.Linear(1, 1), "", room)
    for number in range(1, 6):
        calls.note((torch.full((10, 10), 10.0**number).T,), {}, None)
    kept = calls.kept()
    assert [call.number for call in kept] == [1, 2, 3]
    assert [[*call.taken] for call in kept] == [[torch.device("cpu")], [torch.device("cpu")], ["disk"]]
    assert torch.equal(kept[2].args[0], torch.full((10, 10), 1000.0))
    assert kept[2].args[0].stride() == kept[1].args[0].stride()
    assert room.refused == 2
    CallsOfModel(nn.Linear(1, 1), "", room).note((torch.ones(1000),), {}, None)
    assert room.refused == 2  # the first call of a model is kept in any case
    calls.forget()
    assert room._left == {torch.device("cpu"): 1000, "disk": 500}


def test_a_call_on_the_meta_device_takes_no_memory() -> None:
    room = Room()
    calls = CallsOfModel(nn.Linear(1, 1), "", room)
    calls.note((torch.ones(3, device="meta"),), {}, None)
    assert [call.number for call in calls.kept()] == [1]


class Part(str, enum.Enum):
    """Keys of models."""

    TEXT = "text"


def test_models_have_ways_that_are_code() -> None:
    net = nn.ModuleDict({"class": nn.Linear(1, 1), "box": nn.Linear(1, 1)})
    names = names_of_modules({"net": net, "by_part": {Part.TEXT: nn.Linear(1, 1)}})
    assert list(names.values()) == ["net", "net.get_submodule('class')", "net.box"]


# -- State that a module keeps by itself


class Counter(nn.Module):
    """Its position is a buffer that every call replaces, or one that it adds to; it has a cache."""

    def __init__(self, start: float, *, in_place: bool) -> None:
        super().__init__()
        self.last, self.in_place = nn.Linear(4, 4), in_place
        self.register_buffer("position", torch.full((1,), start))
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Waves at the position."""
        if self.in_place:
            self.position += 1.0
        else:
            self.position = self.position + 1.0
        self.cache.append(self.position.clone())
        output: Tensor = self.last(x) + torch.cos(self.position) + len(self.cache)
        return output


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_each_call_is_scanned_from_the_state_that_it_had(in_place: bool) -> None:
    torch.manual_seed(0)
    model = Counter(2041.0, in_place=in_place).eval()
    with watch() as program:
        outputs = [model(torch.ones(2, 4)) for _ in range(12)]
    (counter,) = program.models
    numbers = [call.number for call in counter.kept]
    assert {1, 12} <= set(numbers)
    target = counter.target()
    for place, number in enumerate(numbers):
        batch = target.batch(place)
        # In fp32 as in the program, and again
        for _ in range(2):
            assert torch.equal(target.model(*batch.args, **batch.kwargs), outputs[number - 1])
    # The position after it, 2053, does not fit into fp16
    assert counter.kept[-1].state["", "position"].item() == 2052.0
    model.half()
    target = counter.target()
    batch = target.batch(len(numbers) - 1)
    output = target.model(*batch.args, x=batch.kwargs["x"].half(), state_of_call=batch.kwargs["state_of_call"])
    assert float((output.float() - outputs[-1]).norm() / outputs[-1].norm()) > 1e-2


def test_a_module_without_state_is_scanned_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with watch() as program:
        for number in range(3):
            model(torch.ones(2, 4) * number)
    assert program.models[0].target().model is model
    assert not any(call.state for call in program.models[0].kept)


# -- The program again


class Cache:
    """What a program keeps for a model."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []


class Cached(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache, history: list[Tensor]) -> tuple[Tensor, Cache]:
        """The sum of all calls."""
        cache.items.append(self.last(x))
        history.append(cache.items[-1])
        return torch.stack(cache.items).sum(0), cache


@torch.no_grad()
def test_a_cache_that_a_cast_model_fills_is_that_of_the_program(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Cached(), torch.randn(2, 4)
    expected = 4 * model(x, Cache(), [])[0]
    caster = ProgramCaster({"Cached#0": Assignment("half")}, [], tmp_path, calls=4, most=None)
    cache, history = Cache(), list[Tensor]()
    with caster.watching():
        for _ in range(4):
            output, same = model(x, cache, history)
    assert same is cache
    assert len(cache.items) == len(history) == 4
    assert {tensor.dtype for tensor in (*cache.items, *history)} == {torch.float32}
    assert torch.allclose(output, expected, rtol=1e-2)


def test_a_run_ends_after_the_calls_that_fp32_makes(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text("import torch\nnet = torch.nn.Linear(4, 4)\nwhile True:\n    net(torch.ones(2, 4))\n")
    caster = ProgramCaster({}, [], tmp_path, calls=5, most=5)
    run_to_end(TargetSpec(str(script)), 0, lambda _: caster.watching(), seconds=100.0)
    assert len(list(tmp_path.glob("*.pt"))) == 5


@torch.no_grad()
def test_another_token_is_no_error_of_the_call_that_gets_it(tmp_path: Path) -> None:
    model = nn.Embedding(9, 4)
    for assigned, tokens in (({}, (1, 2)), ({"Embedding#0": Assignment("bfloat16")}, (1, 3))):
        caster = ProgramCaster(assigned, [], tmp_path, calls=2, most=None)
        with caster.watching():
            for token in tokens:
                model(torch.tensor([token]))
    assert [error.note for error in caster.errors] == ["", OTHER_INTEGERS]


class CausalLMOutput(dict[str, Tensor]):
    """Logits of tokens, by the name that transformers has for them."""


class TokenModel(nn.Module):
    """Prefers token 1 to token 0, unless it computes in 16 bits; other logits are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([[2.0, 3.0]]))

    def forward(self, x: Tensor) -> CausalLMOutput:
        """Logits of 64 tokens."""
        others = torch.full((1, 62), -100.0, dtype=self.first.dtype)
        return CausalLMOutput(logits=torch.cat([(x * self.first + 4096) - 4096, others], 1)[None])


@torch.no_grad()
def test_an_output_is_judged_by_what_it_means(tmp_path: Path) -> None:
    def run_in(precision: str, judge: str | None = None) -> CallError:
        assigned = {"TokenModel#0": Assignment(precision)} if precision else {}
        caster = ProgramCaster(assigned, [], tmp_path, calls=1, most=None, asked=OutputForm(judge=judge))
        with caster.watching():
            TokenModel()(torch.ones(1, 1))
        assert caster.errors[0].seconds > 0
        return caster.errors[0]

    run_in("")
    by_meaning, by_distance = run_in("bfloat16"), run_in("bfloat16", "rel_l2")
    assert by_meaning.error == 1.0
    assert "tokens" in by_meaning.meaning
    assert by_meaning.exceeds(5e-2)
    assert by_distance.error == pytest.approx(13**0.5 / (13 + 62e4) ** 0.5, rel=1e-3)
    assert not by_distance.exceeds(5e-2)
    assert by_distance.choice == OtherChoice(chosen=0, of_fp32=1, apart=pytest.approx(1 / 3), among=64)
    in_fp32 = run_in("fp32")
    assert not in_fp32.exceeds(0.0)
    assert in_fp32.choice is None
    # The call that chose is named, not the one that gets another token from it
    next_call = msgspec.structs.replace(by_distance, call=2, note=OTHER_INTEGERS)
    program = a_program(msgspec.structs.replace(by_distance, model="Net#0"), next_call)
    assert program.runs[0].first_error is not None
    assert program.runs[0].first_error.call == 1
    screen = " ".join(text(program_document(program)).split())
    assert "Net, call 1: prefers 0 to 1; in fp32 their logits are 3.3e-01 apart" in screen


def a_model(name: str, *, kept: list[int]) -> ScannedModel:
    """A model that passes in half."""
    half = Recommendation(precision="half", reason="", code="")
    runs = [Run(precision=precision, device="cpu", status="ok") for precision in ("fp32", "half")]
    scan = ScanResult(tool="", target="", model=INFO, environment={}, runs=runs, recommendation=half)
    return ScannedModel(name=name, kind=name, calls=20, kept=kept, scan=scan, key=f"{name}#0")


def a_program(*errors: CallError, **more: Any) -> ProgramScan:
    models = [a_model("Text", kept=[1]), a_model("Net", kept=[1, 2, 20])]
    run = ProgramRun(RECOMMENDED, ["half", "half"], list(errors))
    return ProgramScan(tool="", target="infer.py", models=models, runs=[run], **more)


def test_a_call_at_which_the_program_parts_is_kept_next_time() -> None:
    program = a_program(CallError("Net#0", 6, 1e-3), CallError("Net#0", 7, None, nonfinite=True))
    assert missed_calls(program) == {("Net#0", ""): {7}}
    assert missed_calls(a_program(CallError("Net#0", 2, 1.0))) == {}
    assert missed_calls(a_program(CallError("Net#0", 7, 1.0, note=OTHER_INTEGERS))) == {}


def test_the_model_from_which_the_program_parts_stays_in_fp32() -> None:
    assert key_to_blame(a_program(CallError("Text#0", 1, 1e-3), CallError("Net#0", 1, 1e-3))) is None
    late = a_program(CallError("Text#0", 1, 1e-3), CallError("Net#0", 1, 1.0))
    assert key_to_blame(late) == "Net#0"
    # The other token came from the model before
    other = CallError("Net#0", 1, 1.0, note=OTHER_INTEGERS)
    assert key_to_blame(a_program(CallError("Text#0", 1, 1e-3), other)) == "Text#0"
    assigned = dict(assignments_of(a_program(stay_in_fp32=["Net#0"])))[RECOMMENDED]
    assert {key: each.precision for key, each in assigned.items()} == {"Text#0": "half", "Net#0": "fp32"}


def test_a_program_fails_unless_a_mixture_gives_the_result_of_fp32() -> None:
    right, wrong = CallError("Net#0", 1, 1e-3), CallError("Net#0", 1, 1.0)
    assert not a_program(right).fails
    assert a_program(wrong).fails
    again = ProgramRun(AGAIN, ["fp32", "fp32"], [CallError("Net#0", 1, 0.0)])
    assert msgspec.structs.replace(a_program(right), runs=[again]).fails
    # In Python the program does not run again
    assert not msgspec.structs.replace(a_program(right), runs=[]).fails
    models = [msgspec.structs.replace(model, scan=None) for model in a_program().models]
    assert msgspec.structs.replace(a_program(), runs=[], models=models).fails


def test_a_late_run_is_blamed_on_no_model() -> None:
    program = a_program(CallError("Net#0", 1, 1.0))
    late = msgspec.structs.replace(program.runs[0], is_late=True, problem="it did not end within 2 s")
    program = msgspec.structs.replace(program, runs=[late])
    assert key_to_blame(program) is None
    assert "half: Text, Net" not in text(program_document(program))
    assert "all half: not compared with fp32: it did not end within 2 s." in text(program_document(program))


@pytest.mark.parametrize(
    ("own", "after", "speed"), [(1.0, 2.0, 2.0), (4.0, 2.0, 0.5), (1.8, 2.0, None), (1.0, 3.2, None), (0.0, 2.0, None)]
)
def test_a_speed_is_told_if_it_is_clear(own: float, after: float, speed: float | None) -> None:
    """One call of twenty is slowed down by something else."""

    def a_run(seconds: float, calls: int = 20, waited: float = 0.0) -> ProgramRun:
        errors = [CallError("Net#0", n, 0.0, seconds=seconds if n != 7 else 50.0) for n in range(1, calls + 1)]
        total = sum(error.seconds for error in errors)
        return ProgramRun(RECOMMENDED, ["half", "half"], errors, seconds=total, waited=waited)

    run = a_run(own)
    timed = _timed(run, [a_run(2.0), a_run(after)])
    assert timed.speed == (None if speed is None else pytest.approx(speed))
    assert _timed(run, [a_run(2.0), a_run(2.0, calls=19)]).speed is None
    assert _timed(run, [a_run(2.0, calls=0)] * 2).speed is None
    assert _timed(run, [a_run(2.0), a_run(after, waited=9.0)]).speed is None  # other programs had the cores
    screen = " ".join(text(program_document(msgspec.structs.replace(a_program(), runs=[timed]))).split())
    assert ("about 2.0 times as fast" in screen) == (speed == 2.0)
    assert ("about 2.0 times as slow" in screen) == (speed == 0.5)
