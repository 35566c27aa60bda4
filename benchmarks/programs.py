"""Whether ``lowprec-check program`` names what is wrong with a program, and nothing if nothing is.

    python benchmarks/programs.py --jobs 14 --output programs
    python benchmarks/programs.py --only sdxl,thread --variants faulty
    python benchmarks/programs.py --watching

24 small programs of four kinds, of public libraries with random weights: diffusion, generation, perception, scripts
with models of their own; each healthy, and with one planted fault. ``plain`` is the program without lowprec-check: its
models cast by hand, with inputs and outputs at their borders, in the precision of the fault. A healthy program must be
as in fp32 there, and a faulty one must not be. ``named``: the model that fails, the call, and the op or its module.
``pasted``: the program by hand with each model in the precision that was recommended. ``--watching`` measures what
watching costs instead.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import tomllib
from shared import ROOT, described, head, in_processes, made, parser_of, save
from tabulate import tabulate

from lowprec_check.features.programs.program_document import where_it_parts
from lowprec_check.features.programs.program_scan import ProgramScan

HEAD = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_grad_enabled(False)
ids = torch.arange(3, 19)[None]
"""


class Program(NamedTuple):
    """A script in parts."""

    name: str
    made: str
    """What makes its models."""
    run: str
    """Leaves ``result``, a tensor or several."""
    models: str
    """What it calls, as the program reaches it: ``pipe.vae.decode``."""
    fault: str
    """Goes between the two."""
    model: str
    """Which fails then."""
    call: int
    where: str
    """The op that fails, or a module that has it."""
    precision: str = "half"


def programs_of(data: Mapping[str, Any]) -> dict[str, list[Program]]:
    """The programs by kind."""
    kinds: dict[str, list[Program]] = {}
    for each in data["programs"]:
        made = "\n".join([*(data["heads"][name] for name in each.pop("uses")), each.pop("made")])
        kinds.setdefault(each.pop("kind"), []).append(Program(made=made, **each))
    return kinds


DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KINDS = programs_of(DATA)
PROGRAMS = [program for programs in KINDS.values() for program in programs]
BY_HAND = """
import copy
from torch.utils._pytree import tree_map

def cast(model, method, dtype, *others):
    weights = [(weight, weight.data) for other in others for weight in other.parameters()]
    model.to(dtype)
    for weight, data in weights:  # of models inside it with a precision of their own
        weight.data = data
    inner = getattr(model, method)
    def called(*args, **kwargs):
        given = tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))
        return tree_map(lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x,
            inner(*given[0], **given[1]))
    setattr(model, method, called)
"""
DTYPES = {"half": "torch.float16", "bfloat16": "torch.bfloat16", "fp32": "torch.float32"}


def script_of(program: Program, *, is_faulty: bool, precisions: Mapping[str, str] | None = None) -> str:
    """The script; with ``precisions`` of its models, these are cast by hand."""
    by_hand = ""
    if precisions is not None:
        places = {name: place_of(name) for name in precisions}
        owners = list(dict.fromkeys(owner for owner, _ in places.values()))
        # A model has one precision, whichever of its methods is called
        in_fp32 = {places[name][0] for name, precision in precisions.items() if precision == "fp32"}
        inside = {owner: [other for other in owners if other.startswith(f"{owner}.")] for owner in owners}
        by_hand = BY_HAND + "".join(f"{part} = copy.deepcopy({part})\n" for parts in inside.values() for part in parts)
        for name, (owner, method) in places.items():
            dtype = DTYPES["fp32" if owner in in_fp32 else precisions[name]]
            by_hand += f"cast({', '.join([owner, repr(method), dtype, *inside[owner]])})\n"
    fault = program.fault if is_faulty else ""
    return "\n".join([HEAD, program.made, fault, by_hand, "torch.manual_seed(1)", program.run])


def place_of(name: str) -> tuple[str, str]:
    """The model, and what of it is called."""
    owner, _, method = name.rpartition(".")
    return (owner, method) if method in METHODS else (name, "forward")


METHODS = ("decode", "encode", "get_text_features", "get_image_features")


def result_of(script: str) -> Any:
    """What the script leaves, without lowprec-check."""
    import torch

    space: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(script, "script.py", "exec"), space)
    return torch.as_tensor(space["result"]).double()


def differs(script: str, reference: Any) -> float | str:
    """The relative difference of what two scripts leave, or the exception."""
    import torch

    randn = torch.randn

    def drawn(*size: Any, dtype: Any = None, **options: Any) -> Any:
        return randn(*size, **options).to(dtype or torch.float32)

    try:
        with mock.patch.object(torch, "randn", drawn):  # in 16 bits it draws other numbers
            result = result_of(script)
    except Exception as error:
        return described(error)
    if result.shape != reference.shape:
        return "other shape"
    norm = torch.linalg.vector_norm(reference).clamp(min=1e-12)
    distance = float(torch.linalg.vector_norm(result - reference) / norm)
    return "NaN" if math.isnan(distance) else distance


def is_right(difference: float | str, limit: float = 5e-2) -> bool:
    """Whether a result is as in fp32."""
    return isinstance(difference, float) and difference <= limit


class Answer(NamedTuple):
    """What lowprec-check says of a program."""

    models: list[str]
    """Which fail, or return something else than in fp32."""
    calls: list[int]
    """On which they do."""
    where: list[str]
    """Modules and ops of the findings."""
    parts: str
    """Where the program in the precision parts from fp32."""
    precisions: dict[str, str]
    """Recommended, by model."""
    mixture: float | str
    """0 if the program with each model as recommended gives the result of fp32; else what it gives."""


def answer_of(result: ProgramScan, precision: str) -> Answer:
    """What a saved result says."""
    models, calls, where, precisions = [], [], [], {}
    for model in result.models:
        precisions[model.name] = "fp32"
        if model.scan is None:
            continue
        if model.scan.recommendation is not None and model.key not in result.stay_in_fp32:
            precisions[model.name] = model.scan.recommendation.precision
        for run in model.scan.runs:
            if run.precision == precision and run.status != "ok":
                models.append(model.name)
                calls.append(model.kept[run.failed_batch or 0])
        placed = [each for each in model.scan.diagnostics if each.module or each.op]
        found = [each for each in placed if each.severity == "error"]
        if model.name in models and not found:
            found = [each for each in placed if each.severity == "warning"]
        where += [f"{each.module or ''} {each.op or ''}".strip() for each in found]
    runs = {run.name: run for run in result.runs}
    mixed, parts = runs.get("each as recommended"), ""
    low = runs.get(precision, mixed)
    if low is not None and low.first_error is not None:
        names = {(model.key, model.method): model.name for model in result.models}
        error = low.first_error
        parts = f"{names[error.model, error.method]}, call {error.call}"
        if error.choice is not None:
            where.append(where_it_parts(low, result.models) or "")
    elif low is not None:
        parts = low.problem
    mixture: float | str = 0.0
    if mixed is not None and not mixed.passes:
        mixture = mixed.problem or f"not as in fp32: {where_it_parts(mixed, result.models)}"
    return Answer(models, calls, where, parts, precisions, mixture)


def is_named(program: Program, answer: Answer) -> bool:
    """Whether the fault is named: the model, the call, and the op or a module around it."""
    is_there = any(program.where in place for place in answer.where)
    at = program.call in answer.calls or answer.parts == f"{program.model}, call {program.call}"
    models = set(answer.models) or {answer.parts.partition(",")[0]}  # a choice that flips fails no scan
    return models == {program.model} and at and is_there


def scanned(program: Program, *, is_faulty: bool, options: Sequence[str]) -> Answer:
    """What the command says of the script."""
    with tempfile.TemporaryDirectory() as folder:
        script, result = Path(folder) / f"{program.name}.py", Path(folder) / "result.json"
        script.write_text(script_of(program, is_faulty=is_faulty))
        command = ["program", str(script), "-p", program.precision, "--no-plan", "--json", str(result), *options]
        if "none" in options:  # the libraries are imported
            sys.argv[1:] = command
            from lowprec_check.cli.main import main as run

            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
                run()
        else:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "lowprec_check", *command]
            subprocess.run(command, env=environment, capture_output=True, check=False)
        return answer_of(msgspec.json.decode(result.read_bytes(), type=ProgramScan), program.precision)


def examined(program: Program, is_faulty: bool, options: Sequence[str]) -> dict[str, Any]:
    """A row of the report."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    reference = result_of(script_of(program, is_faulty=is_faulty))
    low = dict.fromkeys(program.models.split(), program.precision)
    plain = differs(script_of(program, is_faulty=is_faulty, precisions=low), reference)
    answer = scanned(program, is_faulty=is_faulty, options=options)
    by_hand = differs(script_of(program, is_faulty=is_faulty, precisions=answer.precisions), reference)
    return {
        "program": program.name,
        "variant": "faulty" if is_faulty else "healthy",
        "plain": plain,
        **answer._asdict(),
        "right": is_named(program, answer) if is_faulty else not (answer.models or answer.where or answer.parts),
        "by hand": by_hand,
        "pasted": is_right(by_hand) and is_right(answer.mixture),
        "seconds": round(time.monotonic() - started, 1),
    }


def rendered(data: Mapping[str, Any]) -> str:
    """The report: what is wrong in full, a line for each program, and counts."""
    rows, by_name = [], {(row["program"], row["variant"]): row for row in data["rows"]}
    wrong = [f"- {name}: {problem}" for name, problem in data["problems"].items()]
    for program in PROGRAMS:
        cells = [program.name]
        for variant in ("healthy", "faulty"):
            row = by_name.get((program.name, variant))
            if row is None:
                cells += ["–"] * 3
                continue
            cells += [row["plain"], "yes" if row["right"] else "NO", "yes" if row["pasted"] else "NO"]
            if not (row["right"] and row["pasted"]):
                said = {key: row[key] for key in ("models", "calls", "parts", "precisions", "mixture", "by hand")}
                wrong.append(f"- {program.name}, {variant}: {said}; findings in {row['where'][:3]}")
        if set(cells[1:]) != {"–"}:
            rows.append(cells)
    names = ["program", "plain cast", "silent", "pasted", "plain cast, fault", "named", "pasted"]
    counts = []
    for what, key, variants in (
        ("right model, call and op named", "right", ["faulty"]),
        ("healthy ones silent", "right", ["healthy"]),
        ("pasted mixtures pass", "pasted", ["healthy", "faulty"]),
    ):
        asked = [name for name in data["asked"] if name.partition(", ")[2] in variants]
        counts.append(f"{what} {sum(row[key] for row in data['rows'] if row['variant'] in variants)} of {len(asked)}")
    table = tabulate(rows, names, tablefmt="github")
    return "\n".join([*head("Programs", data), table, "", *wrong, "", ", ".join(counts) + ".", ""])


def watched(name: str, made: str, run: str, rounds: int = 9) -> dict[str, Any]:
    """What watching a program costs, in processor time: it runs alternately without and with it."""
    import torch

    import lowprec_check

    torch.set_num_threads(1)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(HEAD + made, space)
    code, now = compile(run, "run.py", "exec"), time.process_time
    exec(code, space)
    ratios, alone, further, calls = [], [], [], 1
    for _ in range(rounds):
        times = [now()]
        exec(code, space)
        times.append(now())
        with lowprec_check.watch() as program:
            exec(code, space)
            calls = sum(model.calls for model in program.models)
            times.append(now())
            exec(code, space)  # the models are known
            times.append(now())
        alone.append(times[1] - times[0])
        ratios.append((times[2] - times[1]) / alone[-1])
        further.append((times[3] - times[2] - alone[-1]) / calls)
    once = [(ratio - 1) * time - calls * per_call for ratio, time, per_call in zip(ratios, alone, further, strict=True)]
    return {
        "program": name,
        "ms per call": 1e3 * median(alone) / calls,
        "ratio": median(ratios),
        "ratio, further runs": median(1 + calls * each / time for each, time in zip(further, alone, strict=True)),
        "µs per call": 1e6 * median(further),
        "ms once": 1e3 * median(once),
    }


def rendered_watching(data: Mapping[str, Any]) -> str:
    """The report of what watching costs."""
    return "\n".join([*head("Watching", data), tabulate(data["rows"], "keys", "github", floatfmt=".3f"), ""])


def main() -> None:
    """Read the options, examine the programs in turn, and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", help="names of programs or kinds, with commas between")
    parser.add_argument("--variants", default="healthy,faulty", help="which of the two")
    parser.add_argument("--processes", action="store_true", help="scan by the command in processes of its own")
    parser.add_argument("--jobs", type=int, default=1, help="scans at a time, of one thread each")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each scan")
    parser.add_argument("--watching", action="store_true", help="measure what watching costs instead")
    given = parser.parse_args()
    from lowprec_check.engine.model.torchvision_ops import torchvision_works

    if given.watching:
        with torchvision_works():
            import_libraries()
            rows = [watched(**each) for each in DATA["watched"]]
        save(given.output, {"made": made(), "rows": rows}, rendered_watching)
        return
    wanted = (given.only or ",".join(KINDS)).split(",")
    programs = [each for kind, of_kind in KINDS.items() for each in of_kind if kind in wanted or each.name in wanted]
    options = [] if given.processes else ["--isolation", "none"]
    with torchvision_works():
        import_libraries()
        rows, problems = [], {}
        items = [(program, name) for program in programs for name in given.variants.split(",")]
        for (program, variant), row, problem in in_processes(
            lambda item: examined(item[0], item[1] == "faulty", options), items, given.jobs, limit=given.limit
        ):
            print(f"{program.name}, {variant}:", row or problem, file=sys.stderr, flush=True)
            if row is None:
                problems[f"{program.name}, {variant}"] = problem
            else:
                rows.append(row)
    asked = [f"{program.name}, {variant}" for program, variant in items]
    data = {"made": made(), "asked": asked, "rows": rows, "problems": problems}
    save(given.output, data, rendered)
    if given.output is not None:  # a line for each
        lines = [json.dumps({key: data[key] for key in ("made", "problems")}), *map(json.dumps, rows)]
        given.output.with_suffix(".json").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(rendered(data))


def import_libraries() -> None:
    """Import what most programs use, once for all."""
    import diffusers
    import torchvision.models.detection
    import transformers

    assert all((diffusers, torchvision, transformers))


if __name__ == "__main__":
    main()
