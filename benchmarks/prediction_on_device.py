"""Predict and measure on one machine that has the device, in many processes and within a limit of time.

    python benchmarks/prediction_on_device.py --device cuda --seconds 430 --output reports/prediction/h200

``prediction_fidelity.py models`` does the same one model at a time. Here, the models of ``verdict_breadth.py`` and of ``breadth.py``, and others, are
predicted and measured side by side, and so are OpInfo's operators: every sample, of which the catalog's sweep has a few only.
What is not finished at the limit is left out. Writes OUTPUT-models.md, OUTPUT-classifiers.md, OUTPUT-unseen.md and OUTPUT-ops.md with the JSON beside them, and
OUTPUT-details.json.gz: every op call and every message. ``--details`` writes the reports again from such files, for example predictions that
were made elsewhere after the measurements.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import gzip
import importlib
import json
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from prediction_fidelity import (
    Outcome,
    Outcomes,
    breadth_cases,
    comparison,
    measured_case,
    predicted_case,
    render,
)
from report_files import head, made, save
from verdict_breadth import Case, cases, in_processes

from lowprec_check.catalog.measured import sweep_of
from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.catalog.records import LOW
from lowprec_check.engine.model.zoo import import_torchvision
from lowprec_check.engine.stand_in.stand_in_process import become_stand_in, standing_in
from lowprec_check.engine.sweep.calls import Caller
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.samples import MAX_GENERATED, larger, load_operators, samples_of, seed_all

SUITES = ("models", "classifiers", "unseen")
POOLS = ("predict", "measure", "predict-ops", "measure-ops")
SLOW = ("torchvision:vit_h_14",)
"""Models whose prediction takes minutes."""
LIMIT = {"predict": 240.0, "measure": 150.0, "predict-ops": 40.0, "measure-ops": 40.0}
"""Seconds of one task."""
START = 60.0
"""Seconds in which a process imports all libraries."""


# -- the models

TIMM = {
    224: "resnet26 ghostnetv2_100 coatnet_nano_rw_224 hardcorenas_e mobilenetv4_conv_small_035 nf_seresnet26 mnasnet_050 mobilenetv2_035 mobileone_s2 hardcorenas_d repghostnet_111 resnest26d tf_mixnet_s mixer_s16_224 dla34 tf_efficientnet_lite0 swiftformer_xs efficientvit_m0 convit_tiny efficientnet_blur_b0 mobilenetv4_conv_small ghostnetv3_130 repvit_m2",
    240: "efficientnet_b1_pruned crossvit_9_dagger_240",
    256: "cs3darknet_focus_m maxvit_rmlp_nano_rw_256 vit_dwee_patch16_reg1_gap_256 vit_wee_patch16_reg1_gap_256 cs3darknet_m",
}
"""By the side of their images: 30 of timm's models with less than 20 million parameters, drawn at random."""


def unseen_cases() -> Iterator[Case]:
    """Models that were in no comparison while predictions were developed."""
    for side, names in TIMM.items():
        for name in names.split():
            yield Case(f"timm:{name}", functools.partial(of_timm, name, side))
    backbone = {"weights_backbone": None}
    sizes = {"min_size": 128, "max_size": 128, **backbone}
    boxes = {"box_score_thresh": 0.0, "rpn_post_nms_top_n_test": 50, "box_detections_per_img": 20}
    single = {"score_thresh": 0.0, "detections_per_img": 20}
    detectors = {
        "fcos_resnet50_fpn": sizes | single,
        "ssd300_vgg16": backbone | single,
        "fasterrcnn_resnet50_fpn_v2": sizes | boxes,
        "maskrcnn_resnet50_fpn": sizes | boxes,
        "keypointrcnn_resnet50_fpn": sizes | boxes,
        "retinanet_resnet50_fpn_v2": sizes | single,
    }
    for name, options in detectors.items():
        picture = [noise(3, 128, 128).sigmoid()]
        yield Case(f"torchvision:{name}", functools.partial(of_torchvision, name, picture, options))
    for name in ("fcn_resnet50", "deeplabv3_resnet50"):
        yield Case(f"torchvision:{name}", functools.partial(of_torchvision, name, noise(1, 3, 128, 128), backbone))
    for name in ("mc3_18", "r2plus1d_18"):
        yield Case(f"torchvision:{name}", functools.partial(of_torchvision, name, noise(1, 3, 8, 64, 64), {}))


def of_timm(name: str, side: int) -> tuple[Any, Any]:
    """A model of timm with an image."""
    return importlib.import_module("timm").create_model(name, pretrained=False), (noise(1, 3, side, side),)


def of_torchvision(name: str, inputs: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """A model of torchvision with its inputs."""
    return import_torchvision().models.get_model(name, weights=None, **options), (inputs,)


def noise(*shape: int) -> torch.Tensor:
    """Always the same numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


# -- the work of one process


def chosen_cases() -> dict[str, dict[str, Case]]:
    """The models by suite and name."""
    classifiers = [case for case in breadth_cases() if case.name not in SLOW]
    return {
        "models": {case.name: case for case in cases([])[0]},
        "classifiers": {case.name: case for case in classifiers},
        "unseen": {case.name: case for case in unseen_cases()},
    }


def outcomes_of_op(name: str, operator: Any, caller: Caller, emulate: Any) -> dict[str, Any]:
    """Of each sample: what it is, and by dtype whether it runs, or the message; ``None`` where fp32 fails as well."""
    seed_all(name)
    device = caller.device
    drawn = [sample for sample in samples_of(operator, device, MAX_GENERATED) if sample.floating()]
    samples = [sample for sample in drawn if caller.size_of_result(sample) != 0] or drawn
    samples += larger(samples, caller.size_of_result)
    found: dict[str, Any] = {"samples": [[list(tensor.shape) for tensor in sample.tensors()] for sample in samples]}
    in_fp32 = [caller.attempt(sample, torch.float32, "forward").outcome is True for sample in samples]
    for dtype in LOW:
        with emulate():
            outcomes = [caller.attempt(sample, getattr(torch, dtype), "forward").outcome for sample in samples]
        found[dtype] = [
            None
            if not runs and isinstance(outcome, Raised)
            else outcome.message
            if isinstance(outcome, Raised)
            else True
            for outcome, runs in zip(outcomes, in_fp32, strict=True)
        ]
    return found


def work(options: argparse.Namespace) -> None:
    """A worker: names from stdin, answers to stdout."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pool = options.worker
    if pool.endswith("ops"):
        operators = load_operators()
        predicted = predicted_device(options.device, options.torch or str(torch.__version__), str(torch.__version__))
        device = "cpu" if pool == "predict-ops" else options.device
        if pool == "predict-ops":
            become_stand_in(predicted)
    else:
        known = chosen_cases()
    for line in sys.stdin:
        suite, name = json.loads(line)
        answer: Any = None
        problem = ""
        try:
            if pool == "predict":
                case = known[suite][name]
                ((_, answer, problem),) = in_processes(lambda case: predicted_case(case, options), [case], 1)
            elif pool == "measure":
                answer = measured_case(known[suite][name], options)
            else:
                emulate = (lambda: standing_in(predicted)) if pool == "predict-ops" else contextlib.nullcontext
                answer = outcomes_of_op(name, operators[name], Caller(operators[name], device), emulate)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"[:300]
        plain = {k: tuple(v) for k, v in answer.items()} if answer and not pool.endswith("ops") else answer
        answers.write(base64.b64encode(pickle.dumps((plain, problem))) + b"\n")


# -- the processes


class Task(NamedTuple):
    """What one process is asked for."""

    suite: str
    name: str


class Pool:
    """Processes that do one kind of work; one that dies or takes too long is replaced, and its task is lost."""

    def __init__(self, kind: str, tasks: list[Task], options: argparse.Namespace, deadline: float) -> None:
        self.kind, self.options, self.deadline = kind, options, deadline
        self.tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            self.tasks.put(task)
        self.found: dict[Task, tuple[Any, str, float]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> list[threading.Thread]:
        """One thread per process."""
        threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _serve(self) -> None:
        process: subprocess.Popen[bytes] | None = None
        while time.monotonic() < self.deadline:
            try:
                task = self.tasks.get_nowait()
            except queue.Empty:
                break
            process = process or self._process()
            started = time.monotonic()
            limit = min(LIMIT[self.kind] + START, self.deadline - started)
            timer = threading.Timer(limit, self._kill, [process])
            timer.start()
            try:
                assert process.stdin
                assert process.stdout
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = b""
            timer.cancel()
            seconds = time.monotonic() - started
            if line:
                self.found[task] = (*pickle.loads(base64.b64decode(line)), seconds)
            else:
                self._kill(process)
                self.found[task] = (
                    None,
                    f"the process ended ({process.wait()}) or took too long: {seconds:.0f} s",
                    seconds,
                )
                process = None
            print(f"{self.kind} {task.name} {seconds:.1f} s {self.found[task][1]}", file=sys.stderr, flush=True)
        if process:
            self._kill(process)
        print(f"{self.kind}: a process is done", file=sys.stderr, flush=True)

    def _process(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, __file__, "--worker", self.kind, "--device", self.options.device]
        argv += ["--torch", self.options.torch] if self.options.torch else []
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            if process.poll() is None:
                self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


# -- the comparison


def state_of(passed: int, tried: int) -> str | None:
    """``all``, ``some`` or ``none`` of the samples run."""
    return None if not tried else "all" if passed == tried else "some" if passed else "none"


def comparison_of_ops(found: dict[str, Any]) -> dict[str, Any]:
    """What the report on operators is rendered from: totals, and the operators that differ."""
    rows: list[dict[str, str]] = []
    states: Counter[bool] = Counter()
    samples: Counter[str] = Counter()
    messages: Counter[bool] = Counter()
    by_device = 0
    for name, (predicted, measured) in sorted(found.items()):
        alike = predicted["samples"] == measured["samples"]
        by_device += not alike
        for dtype in LOW:
            mine, theirs = predicted[dtype], measured[dtype]
            pairs = [pair for pair in zip(mine, theirs, strict=True) if None not in pair] if alike else []
            of_each = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            if not alike:
                of_each = ([one for one in mine if one is not None], [one for one in theirs if one is not None])
            state, truth = (state_of(sum(one is True for one in side), len(side)) for side in of_each)
            if state is None or truth is None:
                continue
            states[state == truth] += 1
            other = [pair for pair in pairs if (pair[0] is True) != (pair[1] is True)]
            samples["equal"] += len(pairs) - len(other)
            samples["only measured"] += sum(pair[1] is True for pair in other)
            samples["only predicted"] += sum(pair[0] is True for pair in other)
            messages.update(one == two for one, two in pairs if True not in (one, two))
            if state != truth or other:
                error = next((text for side in of_each[::-1] for text in side if text is not True), "")
                row = {"operator": name, "dtype": dtype, "measured": truth, "predicted": state}
                rows.append(row | {"samples that differ": f"{len(other)} of {len(pairs)}", "error": error[:100]})
    return {
        "states": {"equal": states[True], "all": states.total()},
        "samples": samples,
        "messages": {"equal": messages[True], "all": messages.total()},
        "by_device": by_device,
        "rows": rows,
    }


def render_ops(data: dict[str, Any]) -> str:
    """The report on operators, and on each sample."""
    states, samples, messages = data["states"], data["samples"], data["messages"]
    total = sum(samples.values())
    keys = ("operator", "dtype", "measured", "predicted", "samples that differ", "error")
    lines = [
        *head("Do operators run in 16 bits?", data),
        f"Predicted on a CPU {data['predicted']}. Measured: {data['measured']}. OpInfo's samples, at most {data['most_samples']} of each operator, and",
        "larger ones, forward, in half and bfloat16. The predictions rest on the catalog's sweep, which has at most "
        f"{data['sampled']} samples of each operator.",
        "",
        f"- all, some or none of the samples run: **{states['equal']} of {states['all']}** equal ({_share(states['equal'], states['all'])})",
        f"- sample by sample: **{samples['equal']} of {total}** equal ({_share(samples['equal'], total)}); predicted to run but fail: "
        f"{samples.get('only predicted', 0)}; predicted to fail but run: {samples.get('only measured', 0)}",
        f"- of those that fail in both, the first line of the message is the same in {messages['equal']} of {messages['all']}",
        f"- operators whose samples differ by device, which are not compared sample by sample: {data['by_device']}",
        "",
        f"| {' | '.join(keys)} |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row[key].replace('|', '¦') for key in keys)} |" for row in data["rows"]),
        "",
        "## Not compared",
        "",
        *(f"- {entry}" for entry in data["not_compared"]),
    ]
    return "\n".join(lines) + "\n"


def _share(some: int, of: int) -> str:
    return f"{some / of:.2%}" if of else "–"


def details_of(pools: dict[str, Pool], options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was found so far, as it is saved."""
    details: dict[str, Any] = {"device": options.name, "torch": str(torch.__version__)}
    for kind, pool in pools.items():
        details[kind] = [
            [*task, answer, problem, round(seconds, 1)] for task, (answer, problem, seconds) in list(pool.found.items())
        ]
    return details


def merged(paths: list[Path]) -> dict[str, Any]:
    """The details of several files; of an answer that several have, that of the last one."""
    read = [json.loads(gzip.decompress(path.read_bytes())) for path in paths]
    details = dict(read[0])
    for kind in POOLS:
        rows = [row for one in read for row in one.get(kind, ())]
        rows.sort(key=lambda row: bool(row[2]))  # those without an answer first: any answer replaces them
        details[kind] = list({(suite, name): [suite, name, *rest] for suite, name, *rest in rows}.values())
    return details


def compare(details: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the reports."""
    how = made("cpu") | {"machine": details["device"]}
    about = {
        "predicted": f"for {options.device} with torch {torch.__version__}{f', as torch {options.torch}' * bool(options.torch)}",
        "measured": f"on {details['device']}, torch {details['torch']}",
    }
    for suite in SUITES:
        predicted, measured = (outcomes(details[kind], suite) for kind in ("predict", "measure"))
        predicted = {model: predicted[model] for model in sorted(predicted) if model in measured}
        data = comparison(predicted, measured) | {"not_compared": not_compared(details, POOLS[:2], suite)}
        save(Path(f"{options.output}-{suite}"), {"made": how, **about, **data}, render)
    predicted_ops, measured_ops = (
        {name: answer for _, name, answer, *_ in details[kind] if answer} for kind in POOLS[2:]
    )
    both = {name: (predicted_ops[name], measured_ops[name]) for name in predicted_ops if name in measured_ops}
    limits = {"most_samples": MAX_GENERATED, "sampled": sweep_of(options.device).header.samples}
    data = comparison_of_ops(both) | {"not_compared": not_compared(details, POOLS[2:], "ops")}
    save(Path(f"{options.output}-ops"), {"made": how, **about, **limits, **data}, render_ops)


def outcomes(rows: list[Any], suite: str) -> Outcomes:
    """The runs of the models of one suite."""
    return {
        name: {
            precision: Outcome(status, error, gaps, [(op, dtypes) for op, dtypes in ops], detail)
            for precision, (status, error, gaps, ops, detail) in answer.items()
        }
        for of_suite, name, answer, *_ in rows
        if of_suite == suite and answer
    }


def not_compared(details: dict[str, Any], kinds: tuple[str, ...], suite: str) -> list[str]:
    """What has no figures, and why."""
    rows = [(kind, row) for kind in kinds for row in details[kind] if row[0] == suite and row[3]]
    return [f"{name}, {kind}: {problem.splitlines()[0]}" for kind, (_, name, _, problem, _) in rows]


def main() -> None:
    """Predict and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--torch", help="release to predict for; default: the installed one")
    parser.add_argument("--seconds", type=float, default=430, help="limit of the whole")
    parser.add_argument(
        "--output", type=Path, required="--worker" not in sys.argv, help="path of the reports without -models.md"
    )
    parser.add_argument("--processes", default="10,6,2,2", help=f"of each kind: {', '.join(POOLS)}; 0 leaves it out")
    parser.add_argument("--limit", type=int, help="only the first N models of each list, and N operators")
    parser.add_argument("--worker", choices=POOLS, help=argparse.SUPPRESS)
    parser.add_argument(
        "--details",
        type=Path,
        nargs="+",
        help="only write the reports from these files, OUTPUT-details.json.gz of earlier runs",
    )
    options = parser.parse_args()
    if options.worker:
        work(options)
    elif options.details:
        compare(merged(options.details), options)
    else:
        run(options)


def run(options: argparse.Namespace) -> None:
    """Predict and measure until the limit."""
    deadline = time.monotonic() + options.seconds
    counts = dict(zip(POOLS, map(int, options.processes.split(",")), strict=True))
    models = [Task(suite, name) for suite, names in shuffled_models().items() for name in names[: options.limit]]
    ops = [Task("ops", name) for name in shuffled(set(load_operators()) & set(sweep_of(options.device).records))]
    pools = {
        kind: Pool(kind, ops[: options.limit] if kind.endswith("ops") else models, options, deadline) for kind in POOLS
    }
    for thread in [thread for kind, pool in pools.items() for thread in pool.start(counts[kind])]:
        thread.join(max(0.0, deadline - time.monotonic()) + 5)
    for pool in pools.values():
        pool.stop()
    # now that no other process may be forked from this one, it may use the device
    module = torch.get_device_module(options.device)
    options.name = f"an {module.get_device_name()}" if options.device != "cpu" and counts["measure"] else options.device
    details = details_of(pools, options)
    Path(f"{options.output}-details.json.gz").write_bytes(gzip.compress(json.dumps(details).encode()))
    compare(details, options)


def shuffled_models() -> dict[str, list[str]]:
    """The names of the models by suite: in any part of the time, some of each family are run."""
    return {suite: shuffled(set(of_suite)) for suite, of_suite in chosen_cases().items()}


def shuffled(names: set[str]) -> list[str]:
    """``names`` in an order that is the same in all runs."""
    found = sorted(names)
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    main()
