"""How well a scan predicts a device: predicts on the CPU, compares with the device.

    python benchmarks/prediction_fidelity.py ops --device cuda --output reports/prediction/ops-cuda
    python benchmarks/prediction_fidelity.py models --device cuda --output reports/prediction/models-cuda
    python benchmarks/prediction_fidelity.py models --device cuda --measured reports/breadth-cuda.json --output …

``ops``: every operator of OpInfo in half and bfloat16, forward, on the samples of the sweep: do all, some or none run? On a machine
without the device, the predictions are compared with the sweep in the catalog, which was measured on the device.
``models``: the status and the output error of every run, and, where the device is here, the dtypes of each op, in order. Without
the device, ``--measured`` names figures that ``benchmarks/breadth.py --verify`` measured on it.
Writes OUTPUT.md and OUTPUT.json.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import json
import multiprocessing
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from breadth import EXAMPLES, classification_models, shape_for
from verdict_breadth import PRECISIONS, SEVERITY, Case, cases, in_processes

from lowprec_check import ScanResult, scan
from lowprec_check.catalog.measured import sweep_of
from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.catalog.records import LOW
from lowprec_check.engine.device_twin.twin import become_twin, emulating
from lowprec_check.engine.model.device import is_available
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.sweep.calls import Caller, Setting
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.samples import larger, load_operators, samples_of, seed_all
from lowprec_check.schema.predicted_device import PredictedDevice

State = dict[str, Any]


def state_of(passed: int, tried: int) -> str | None:
    """``all``, ``some`` or ``none`` of the samples run."""
    return None if not tried else "all" if passed == tried else "some" if passed else "none"


# -- operators


def predicted_ops(device: PredictedDevice, names: list[str], send: Any) -> None:
    """In a process of its own: for each operator and dtype, how many samples are predicted to run; and the first error."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    operators = load_operators()
    become_twin(device)
    for name in names:
        with contextlib.suppress(KeyError):
            send.put((name, predicted_op(device, name, operators[name], sweep_of(device.name).header.samples)))
    send.put(None)


def predicted_op(device: PredictedDevice, name: str, operator: Any, bound: int) -> dict[str, State]:
    """By dtype: the samples that are predicted to run, those tried, and the first error."""
    seed_all(name)
    caller = Caller(name, operator, Setting("cpu", bound, ("float16", "bfloat16"), torch.float64))
    try:
        drawn = [sample for sample in samples_of(operator, "cpu", bound) if sample.floating()]
    except Exception as error:
        return {dtype: {"passed": 0, "tried": 0, "error": f"no samples: {type(error).__name__}"} for dtype in LOW}
    samples = [sample for sample in drawn if caller.size_of_result(sample) != 0] or drawn
    samples += larger(samples, caller.size_of_result)
    found: dict[str, State] = {}
    in_fp32 = [caller.attempt(sample, torch.float32, "forward").outcome is True for sample in samples]
    for dtype in LOW:
        with emulating(device):
            outcomes = [caller.attempt(sample, getattr(torch, dtype), "forward").outcome for sample in samples]
        counted = [outcome for outcome, runs in zip(outcomes, in_fp32, strict=True) if runs or outcome is True]
        error = next((outcome.message for outcome in counted if isinstance(outcome, Raised)), None)
        found[dtype] = {"passed": sum(o is True for o in counted), "tried": len(counted), "error": error}
    return found


def ops_in_processes(device: PredictedDevice, names: list[str], jobs: int) -> dict[str, dict[str, State]]:
    """The predictions for all operators, from ``jobs`` processes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    random.Random(0).shuffle(names)
    workers = [context.Process(target=predicted_ops, args=(device, names[index::jobs], queue)) for index in range(jobs)]
    for worker in workers:
        worker.start()
    found: dict[str, dict[str, State]] = {}
    ended = 0
    while ended < jobs:
        item = queue.get(timeout=600)
        if item is None:
            ended += 1
        else:
            found[item[0]] = item[1]
    for worker in workers:
        worker.join()
    return found


def compare_ops(device: PredictedDevice, jobs: int) -> Iterator[dict[str, Any]]:
    """A row for each operator and dtype that was measured on the device."""
    sweep = sweep_of(device.name)
    names = [name for name in load_operators() if name in sweep.records]
    predicted = ops_in_processes(device, names, jobs)
    for name, of_op in sorted(predicted.items()):
        record = sweep.records[name]
        for dtype in LOW:
            measured, found = sweep.state(name, dtype, "forward"), of_op[dtype]
            state = state_of(found["passed"], found["tried"])
            if measured is None or state is None:
                continue
            failure = record.failure(dtype, "forward")
            yield {
                "op": name,
                "dtype": dtype,
                "measured": measured,
                "predicted": state,
                "error_measured": failure.message if failure else None,
                "error_predicted": found["error"],
            }


def claims(device: PredictedDevice) -> Counter[bool]:
    """How often what OpInfo claims for the device agrees with the measurement: the claims know only all and none."""
    sweep, operators = sweep_of(device.name), load_operators()
    agree: Counter[bool] = Counter()
    for name, operator in operators.items():
        for dtype in LOW:
            measured = sweep.state(name, dtype, "forward") if name in sweep.records else None
            if measured is not None:
                claimed = getattr(torch, dtype) in operator.supported_dtypes(device.name)
                agree[measured == ("all" if claimed else "none")] += 1
    return agree


def summary_of_ops(rows: list[dict[str, Any]], claimed: Counter[bool], options: argparse.Namespace) -> list[str]:
    """The report on operators."""
    equal = sum(row["measured"] == row["predicted"] for row in rows)
    missed = [row for row in rows if row["measured"] == "none" and row["predicted"] == "all"]
    lines = [
        f"# Do operators run in 16 bits on {options.device}?",
        "",
        f"Predicted on a CPU with torch {torch.__version__}; measured with torch {sweep_of(options.device).release} (the catalog's sweep).",
        "All, some or none of the samples of each operator, forward, in half and bfloat16. The predictions rest on the same sweep, op by op: this "
        "tests whether what it says of operators holds for the ops that they dispatch, not whether it is right.",
        "",
        f"- **{equal} of {len(rows)}** equal ({equal / len(rows):.2%}); none run but all are predicted to: {len(missed)}",
        f"- what OpInfo claims: {claimed[True]} of {claimed.total()} equal ({claimed[True] / claimed.total():.2%})",
        "",
        "| operator | dtype | measured | predicted | error |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        if row["measured"] != row["predicted"]:
            error = (row["error_measured"] or row["error_predicted"] or "").replace("|", "¦")
            lines.append(f"| {row['op']} | {row['dtype']} | {row['measured']} | {row['predicted']} | {error[:100]} |")
    return lines


# -- models


class Outcome(NamedTuple):
    """One run, predicted or measured."""

    status: str
    rel_l2: float | None
    gaps: list[str] | None
    """``None`` if unknown."""
    ops: list[tuple[str, str]]
    """Each op call: its name and its dtypes; empty if unknown."""
    detail: str = ""


Outcomes = dict[str, dict[str, Outcome]]
"""By model and precision."""

MOVING = (
    "aten.t.",
    "aten.view",
    "aten.transpose",
    "aten._to_copy",
    "aten.clone",
    "aten.copy_",
    "aten.detach",
    "aten.lift_fresh",
)


def outcomes_of(result: ScanResult) -> dict[str, Outcome]:
    """The runs of a scan by precision."""
    found = {}
    for run in result.runs[1:]:
        ops = [(row.op, row.dtypes) for row in run.op_calls.rows() if not row.op.startswith(MOVING)]
        error = run.output_error.rel_l2 if run.output_error else None
        detail = run.reason or (run.exception.text[:200] if run.exception else "")
        found[run.precision] = Outcome(run.status, error, sorted({gap.op for gap in run.gaps}), ops, detail)
    return found


def predicted_case(case: Case, options: argparse.Namespace) -> dict[str, Outcome]:
    """In a fork: the predictions for one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, inputs = case.build()
    return outcomes_of(scan(model, inputs, predict=True, torch_version=options.torch, device=options.device, **SCAN))


def measured_case(case: Case, options: argparse.Namespace) -> dict[str, Outcome]:
    """The same model on the device itself."""
    model, inputs = case.build()
    return outcomes_of(scan(model, inputs, device=options.device, **SCAN))


SCAN: dict[str, Any] = {
    "precisions": list(PRECISIONS),
    "errors": "none",
    "plan": False,
    "times": "off",
    "budget": 300.0,
}


def breadth_cases() -> list[Case]:
    """The models of ``benchmarks/breadth.py``, as it names them."""

    def load(spec: str, inputs: tuple[str, ...]) -> tuple[Any, Any]:
        target = load_target(spec, inputs)
        return target.model, target.kwargs or target.args

    torchvision = [(f"torchvision:{name}", (shape_for(name, 64),)) for name in classification_models()]
    examples = [(f"examples/{path.name}", ()) for path in EXAMPLES]
    return [Case(spec, functools.partial(load, spec, inputs)) for spec, inputs in (*examples, *torchvision)]


def read_measured(path: Path) -> Outcomes:
    """Figures measured before: rows of ``breadth.py``, or the table of ``verdict_breadth.py``."""
    found: Outcomes = {}
    if path.suffix == ".json":
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["precision"] in PRECISIONS:
                found.setdefault(row["model"], {})[row["precision"]] = Outcome(
                    row["by_hand"] or row["status"], row["rel_l2"], row["gaps"], []
                )
        return found
    table = path.read_text(encoding="utf-8").partition("## All runs")[2]
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 1 + len(PRECISIONS) and cells[1] in SEVERITY:
            statuses = dict(zip(PRECISIONS, cells[1:], strict=True))
            found[cells[0]] = {name: Outcome(status, None, None, []) for name, status in statuses.items()}
    return found


ON_GPU = {
    "aten.cudnn_batch_norm.default": "aten.native_batch_norm.default",
    "aten.cudnn_grid_sampler.default": "aten.grid_sampler_2d.default",
    "aten._cudnn_rnn.default": "aten.mkldnn_rnn_layer.default",
}
"""Ops of cuDNN, and those that a CPU runs in their place."""


def same_path(one: list[tuple[str, str]], other: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """Where two runs took the same path: the op, and its dtypes in both."""
    names = [[ON_GPU.get(op, op) for op, _ in ops] for ops in (one, other)]
    matcher = difflib.SequenceMatcher(None, *names, autojunk=False)
    for block in matcher.get_matching_blocks():
        for (op, dtypes), (_, others) in zip(
            one[block.a : block.a + block.size], other[block.b : block.b + block.size], strict=True
        ):
            yield op, dtypes, others


def factor(predicted: float, measured: float) -> float:
    """By how much two errors differ, at least 1; errors of less than 1e-7 are rounding of fp32."""
    low, high = sorted((max(predicted, 1e-7), max(measured, 1e-7)))
    return high / low


def summary_of_models(predicted: Outcomes, measured: Outcomes, options: argparse.Namespace) -> list[str]:
    """The report on models."""
    pairs = [
        (model, precision, found, measured[model][precision])
        for model, of_model in predicted.items()
        for precision, found in of_model.items()
        if model in measured and precision in measured[model]
    ]
    equal = [pair for pair in pairs if pair[2].status == pair[3].status]
    severe = [pair for pair in pairs if _coarse(pair[2].status) == _coarse(pair[3].status)]
    errors = [
        (model, precision, factor(found.rel_l2, truth.rel_l2), found.rel_l2, truth.rel_l2)
        for model, precision, found, truth in pairs
        if found.rel_l2 is not None and truth.rel_l2  # an output of zeros has no relative error
    ]
    within = [row for row in errors if row[2] <= 3]
    with_gaps = [pair for pair in pairs if pair[3].gaps is not None and (pair[2].gaps or pair[3].gaps)]
    same_gaps = sum(found.gaps == truth.gaps for _, _, found, truth in with_gaps)
    lines = [
        f"# Predicted and measured runs on {options.device}",
        "",
        f"Predicted on a CPU with torch {torch.__version__}, for torch {options.torch or 'installed'}. Measured: {options.source}.",
        "",
        f"- models: {len({pair[0] for pair in pairs})}, runs: {len(pairs)}",
        f"- status (ok, inaccurate, nonfinite, error) equal: **{len(equal)} of {len(pairs)}** ({_share(equal, pairs)}); ok and inaccurate "
        f"as one: {len(severe)} ({_share(severe, pairs)})",
        f"- rel_l2 of the output within a factor of 3: **{len(within)} of {len(errors)}** ({_share(within, errors)})"
        + (f"; median factor {statistics.median(row[2] for row in errors):.2f}" if errors else ""),
        f"- runs with gaps, measured or predicted: {len(with_gaps)}; the same ops: {same_gaps}"
        if any(truth.gaps is not None for *_, truth in pairs)
        else "- gaps: not compared, those of the device are not known",
        *_dtypes(pairs, "autocast", "under autocast"),
        *_dtypes(pairs, ("half", "bfloat16"), "in half and bfloat16"),
        "",
        "## Other status",
        "",
        *(
            f"- {model}, {precision}: predicted **{found.status}** {_error(found)}, measured **{truth.status}** {_error(truth)} {found.detail[:120]}"
            for model, precision, found, truth in pairs
            if found.status != truth.status
        ),
        "",
        "## Errors that differ by more than a factor of 3",
        "",
        *(
            f"- {model}, {precision}: predicted {found:.1e}, measured {truth:.1e}"
            for model, precision, by, found, truth in errors
            if by > 3
        ),
        "",
        "## Other gaps",
        "",
        *(
            f"- {model}, {precision}: predicted {found.gaps}, measured {truth.gaps}"
            for model, precision, found, truth in with_gaps
            if found.gaps != truth.gaps
        ),
    ]
    return lines


def _coarse(status: str) -> str:
    return "ok" if status == "inaccurate" else status


def _share(some: list[Any], of: list[Any]) -> str:
    return f"{len(some) / len(of):.1%}" if of else "–"


def _error(outcome: Outcome) -> str:
    return f"({outcome.rel_l2:.1e})" if outcome.rel_l2 is not None else ""


def _dtypes(pairs: list[tuple[str, str, Outcome, Outcome]], precisions: str | tuple[str, ...], where: str) -> list[str]:
    """How many op calls in ``precisions`` have the same dtypes, where both runs have ops and took the same path."""
    counts: Counter[bool] = Counter()
    causes: Counter[str] = Counter()
    calls = 0
    compared = [pair for pair in pairs if pair[1].startswith(precisions) and pair[2].ops and pair[3].ops]
    for _, _, found, truth in compared:
        calls += len(truth.ops)
        for op, mine, theirs in same_path(found.ops, truth.ops):
            counts[mine == theirs] += 1
            if mine != theirs:
                causes[f"{op}: predicted {mine}, measured {theirs}"] += 1
    if not counts:
        return [f"- dtypes of op calls {where}: not compared, the op calls of the device are not known"]
    return [
        f"- op calls {where} on the same path: {counts.total()} of {calls} measured; dtypes equal: **{counts[True]}** "
        f"({counts[True] / counts.total():.2%})",
        *(f"  - {count} × {cause}" for cause, count in causes.most_common(20)),
    ]


# -- the command


def write(output: Path | None, lines: list[str], data: Any) -> None:
    """Print the report, and write it."""
    text = "\n".join(lines) + "\n"
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".md").write_text(text, encoding="utf-8")
        if data is not None:
            output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def compare_models(options: argparse.Namespace) -> None:
    """Predict, measure or read what was measured, and report."""
    measured = read_measured(options.measured) if options.measured else {}
    from_breadth = options.measured is not None and options.measured.suffix == ".json"
    chosen = breadth_cases() if from_breadth else cases(options.only)[0]
    wanted = [case for case in chosen if (case.name in measured or not options.measured)]
    wanted = [case for case in wanted if not options.only or case.name.startswith(tuple(options.only))][: options.limit]
    options.source = f"`{options.measured}`" if options.measured else f"on this machine, torch {torch.__version__}"
    predicted: Outcomes = {}
    started = time.monotonic()
    work = functools.partial(predicted_case, options=options)
    for case, found, problem in in_processes(work, wanted, options.jobs):
        print(f"{time.monotonic() - started:.0f} s {case.name} {problem}", file=sys.stderr, flush=True)
        predicted |= {case.name: found} if found else {}
    if not options.measured:
        for case in wanted:
            with contextlib.suppress(Exception):
                measured[case.name] = measured_case(case, options)
    lines = summary_of_models(predicted, measured, options)
    data = {
        model: {
            precision: {
                "predicted": [outcome.status, outcome.rel_l2, outcome.gaps],
                "measured": list(measured[model][precision][:3]),
            }
            for precision, outcome in of_model.items()
            if model in measured and precision in measured[model]
        }
        for model, of_model in predicted.items()
    }
    write(options.output, lines, data)


def main() -> None:
    """Compare operators or models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ops", "models"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", help="release to predict for; default: the installed one")
    parser.add_argument("--measured", type=Path, help="figures measured on the device before")
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="models with this prefix")
    parser.add_argument("--limit", type=int, help="only the first N models")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    if options.part == "models":
        if options.measured is None and not is_available(options.device):
            parser.error(f"{options.device} is not here: name figures that were measured on it by --measured")
        compare_models(options)
        return
    device = predicted_device(options.device, options.torch or str(torch.__version__), str(torch.__version__))
    rows = list(compare_ops(device, options.jobs))
    write(options.output, summary_of_ops(rows, claims(device), options), rows)


if __name__ == "__main__":
    main()
