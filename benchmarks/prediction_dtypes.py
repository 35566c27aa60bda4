"""Are the dtypes of each op under autocast those of a GPU? The twin's are compared with those of fake tensors on the device.

    python benchmarks/prediction_dtypes.py --output reports/prediction/dtypes-cuda

Needs a build of torch for the device, but no device: fake tensors have no values, and go through the device's own autocast kernels
in C++ and its choice of ops. Each model runs once on fake tensors and once on the twin; where both call the same ops in the same order,
the dtypes of inputs and outputs are compared. Models that ask for values (``nonzero``, ``item``) cannot run on fake tensors.
Writes OUTPUT.md and OUTPUT.json.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from verdict_breadth import Case, cases, in_processes

from lowprec_check.catalog.predictable import predicted_device
from lowprec_check.engine.core.dispatch_mode import AutocastKeys, DispatchMode, run_op
from lowprec_check.engine.device_twin.twin import become_twin, emulating

Flow = list[tuple[str, str]]
"""Each op call: its name, and the dtypes that go in and come out."""

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LEFT_OUT = ("aten._to_copy", "aten.detach", "aten.lift_fresh", "prim.", "aten.empty", "aten.view", "aten._unsafe_view")
"""Casts, which are seen in the dtypes of the ops around them, and what has no arithmetic."""


class Log(DispatchMode):
    """Notes the ops that are dispatched, with their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.flow: Flow = []

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], keys: AutocastKeys) -> Any:
        """Run and note an op."""
        out = run_op(func, args, kwargs, keys)
        if not str(func).startswith(LEFT_OUT):
            self.flow.append((str(func), f"{floating((args, kwargs))}→{floating(out)}"))
        return out


class FakeLog(TorchDispatchMode):
    """The same for fake tensors, some of whose attributes are ops that have no kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.flow: Flow = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith(LEFT_OUT):
            self.flow.append((str(func), f"{floating((args, kwargs))}→{floating(out)}"))
        return out


def floating(value: Any) -> str:
    """The floating dtypes of the tensors in ``value``."""
    found = {t.dtype for t in tree_leaves(value) if isinstance(t, Tensor) and t.dtype.is_floating_point}
    return "+".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def fake_flow(case: Case, dtype: torch.dtype, device: str) -> Flow:
    """The ops of the model on fake tensors on the device."""
    model, inputs = case.build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> FakeTensor:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, empty, torch.device(device))

    names = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    state = {name: fake(tensor) for name, tensor in names}
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
    log = FakeLog()
    # torch.autocast disables itself where the device is not here
    torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_enabled(device, True)
    torch.autocast_increment_nesting()
    try:
        with torch.no_grad(), mode, log:
            torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
    finally:
        torch.set_autocast_enabled(device, False)
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
    return log.flow


def twin_flow(case: Case, dtype: torch.dtype, device: str) -> Flow:
    """The ops of the model on the twin, in a process of its own."""
    model, inputs = case.build()
    predicted = predicted_device(device, str(torch.__version__), str(torch.__version__))
    become_twin(predicted)
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    log = Log()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype), emulating(predicted), log:
        model(*args, **kwargs)
    return log.flow


def compared(case: Case, device: str) -> dict[str, Any]:
    """In a fork: for each dtype, the ops on the same path, those with other dtypes, and the rest."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    flows = {name: fake_flow(case, dtype, device) for name, dtype in DTYPES.items()}
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():  # the first makes this process a twin
        mine, theirs = twin_flow(case, dtype, device), flows[name]
        matcher = difflib.SequenceMatcher(None, [op for op, _ in theirs], [op for op, _ in mine], autojunk=False)
        pairs = [
            (theirs[block.a + index], mine[block.b + index])
            for block in matcher.get_matching_blocks()
            for index in range(block.size)
        ]
        different = Counter(
            f"{op}: {there} on the device, {here} predicted" for (op, there), (_, here) in pairs if here != there
        )
        matched_there = {block.a + index for block in matcher.get_matching_blocks() for index in range(block.size)}
        matched_here = {block.b + index for block in matcher.get_matching_blocks() for index in range(block.size)}
        found[name] = {
            "device": len(theirs),
            "predicted": len(mine),
            "same_path": len(pairs),
            "equal": len(pairs) - different.total(),
            "different": dict(different),
            "only_device": dict(Counter(op for index, (op, _) in enumerate(theirs) if index not in matched_there)),
            "only_predicted": dict(Counter(op for index, (op, _) in enumerate(mine) if index not in matched_here)),
        }
    return found


def markdown(rows: dict[str, Any], problems: dict[str, str], device: str) -> list[str]:
    """The report."""
    each = [of_dtype for row in rows.values() for of_dtype in row.values()]
    same, equal = sum(row["same_path"] for row in each), sum(row["equal"] for row in each)
    there = sum(row["device"] for row in each)
    different, only_there, only_here = (
        sum((Counter(row[key]) for row in each), Counter[str]())
        for key in ("different", "only_device", "only_predicted")
    )
    return [
        f"# Dtypes of ops under autocast on {device}",
        "",
        f"torch {torch.__version__}, without a device: fake tensors on {device} against the twin. fp16 and bf16.",
        "",
        f"- architectures: {len(rows)}, ops on the device: {there}",
        f"- on the same path: {same} ({same / there:.1%}); equal dtypes: **{equal}** ({equal / same:.2%})",
        "",
        "## Other dtypes, by cause",
        "",
        *(f"- {count} × {cause}" for cause, count in different.most_common(40)),
        "",
        "## Other path",
        "",
        "Only on the device: " + ", ".join(f"{op} {count}" for op, count in only_there.most_common(25)),
        "",
        "Only predicted: " + ", ".join(f"{op} {count}" for op, count in only_here.most_common(25)),
        "",
        "## Not run",
        "",
        *(f"- {name}: {problem[:160]}" for name, problem in problems.items()),
        "",
        "## Models",
        "",
        "| model | dtype | ops on the device | same path | equal |",
        "|---|---|---|---|---|",
        *(
            f"| {name} | {dtype} | {found['device']} | {found['same_path']} | {found['equal']} |"
            for name, row in rows.items()
            for dtype, found in row.items()
        ),
    ]


def main() -> None:
    """Compare all models, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX", help="models with this prefix")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads would not survive the forks
    torch._C._ensureCUDADeviceGuardSet()
    rows: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for case, found, problem in in_processes(
        functools.partial(compared, device=options.device), cases(options.only)[0], options.jobs
    ):
        print(case.name, problem, file=sys.stderr, flush=True)
        if found:
            rows[case.name] = found
        else:
            problems[case.name] = problem
    text = "\n".join(markdown(dict(sorted(rows.items())), dict(sorted(problems.items())), options.device)) + "\n"
    print(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
        options.output.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
