"""The worker process of a sweep: reads names of operators from stdin, writes results to stdout, one per line.

Before every call the breadcrumb is updated, so that a crash can be located. Runs with torch 2.1 and later, and needs msgspec only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from lowprec_check.engine.sweep.calls import Caller
from lowprec_check.engine.sweep.failures import Raised
from lowprec_check.engine.sweep.measure import OperatorMeasurement
from lowprec_check.engine.sweep.messages import Answer, CannotMeasure, Hello, OperatorFault, Task, open_channel
from lowprec_check.engine.sweep.samples import load_operators
from lowprec_check.errors import UsageError, traceback_of
from lowprec_check.process.breadcrumb import Breadcrumb

Enter = Callable[[str, str], None]
"""Called with the cell and a detail before each step of an operator."""


def options_of(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of the command line: those of ``parser``, and those of every worker."""
    parser.add_argument("--device", required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--breadcrumb", required=True)
    return parser.parse_args()


def serve(
    options: argparse.Namespace,
    greet: Callable[[dict[str, Any]], Hello],
    answer: Callable[[str, Caller, dict[str, Raised], Enter], Answer],
    *,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Send a greeting about the operators, then the answer to each task, until stdin ends; ``prepare`` is called first."""
    send = open_channel()
    torch.set_num_threads(1)
    try:
        prepare()
        if options.device != "cpu" and not getattr(torch, options.device).is_available():
            raise UsageError(f"Device {options.device!r} is not available.", "Pass --device cpu.")
        operators = load_operators()
        hello = greet(operators)
    except UsageError as error:
        send(CannotMeasure(error.message, error.hint))
        return
    send(hello)
    breadcrumb = Breadcrumb.open(options.breadcrumb)
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)

        def enter(cell: str, detail: str, op: str = task.op) -> None:
            breadcrumb.enter(op, cell, detail)

        try:
            send(answer(task.op, Caller(operators[task.op], options.device), task.lost, enter))
        except Exception as error:
            send(OperatorFault(task.op, traceback_of(error)))


def torch_version() -> str:
    """The version of torch without the build's suffix, ``2.13.0``."""
    return torch.__version__.partition("+")[0]


def main() -> None:
    """Find out what runs of operators."""
    options = options_of(argparse.ArgumentParser())

    def answer(op: str, caller: Caller, lost: dict[str, Raised], enter: Enter) -> Answer:
        return Answer(OperatorMeasurement(op, caller, options.samples, lost, enter).measure())

    serve(options, lambda operators: Hello(torch_version(), list(operators)), answer)


if __name__ == "__main__":
    main()
