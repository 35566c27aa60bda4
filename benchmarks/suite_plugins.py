"""pytest plugins of ``plugin_on_suites.py``: ``-p suite_plugins`` writes what each test did to file ``SUITE_OUT``.

With ``SUITE_MODE=replay``, every distinct call of an operator is also run bare in half, outside of this package: its
floating arguments are cast, and the op of torch is called on them. That is the truth which the cells of the coverage
are held against.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec_check.engine.model.torchvision_ops import torchvision_works

MOST_CALLS = 40
"""Distinct calls of an operator that are replayed."""
MOST_VALUES = 1_000_000
_torchvision = contextlib.ExitStack()


def pytest_configure(config: pytest.Config) -> None:
    """Let torchvision be imported with a torch that its compiled ops do not fit, in all runs alike."""
    _torchvision.enter_context(torchvision_works())
    torch.set_num_threads(1)
    config.pluginmanager.register(Outcomes(), "suite-outcomes")


def pytest_unconfigure() -> None:
    """Forget it."""
    _torchvision.close()


class Outcomes:
    """Outcome, text and processor time of each test; the operators whose calls ran or failed in half."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        mode = os.environ.get("SUITE_MODE")
        self.replay = Replay() if mode == "replay" else None
        self.mode = self.replay

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure a test with its fixtures and other plugins' hooks; what it draws and prints is equal in all runs."""
        torch.manual_seed(0)
        started = time.process_time()
        with self.mode or contextlib.nullcontext():
            result = yield
        self.tests.setdefault(item.nodeid, {})["seconds"] = time.process_time() - started
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of each phase, and the text of a failure without addresses and times."""
        test = self.tests.setdefault(report.nodeid, {})
        if report.when == "call" or report.outcome != "passed":
            text = re.sub(r"0x[0-9a-f]+|\d+\.\d+(e-?\d+)?", "N", str(report.longrepr or ""))
            test.setdefault("reports", []).append([report.when, report.outcome, text])

    def pytest_sessionfinish(self) -> None:
        """Write them."""
        replayed = self.replay.results if self.replay else {}
        Path(os.environ["SUITE_OUT"]).write_text(json.dumps({"tests": self.tests, "replayed": replayed}))


class Empty(TorchDispatchMode):
    """Runs ops by the shortest path."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compilers alone."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = getattr(func, "_op", func)
        return op(*args, **kwargs) if kwargs else op(*args)


class Replay(Empty):
    """Runs calls again in half."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, list[Any]] = defaultdict(lambda: [0, 0, ""])
        """By op: how many distinct calls ran, how many failed, and the error of the first."""
        self.seen: dict[str, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composite = isinstance(func, torch._ops.OpOverload) and func._can_decompose() and func._is_composite()
        if isinstance(func, torch._ops.OpOverload) and not types and not composite:
            self.replay(func, args, kwargs)
        return func(*args, **kwargs)

    def replay(self, func: Any, args: Any, kwargs: Any) -> None:
        """Run a call in half, if its floating tensors are real numbers and no such call was run."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        floating = [tensor for tensor in tensors if tensor.dtype in (torch.float32, torch.float64)]
        if not floating or sum(tensor.numel() for tensor in tensors) > MOST_VALUES:
            return
        seen = self.seen[str(func)]
        key = repr(pytree.tree_map(_shape, (args, kwargs)))
        if key in seen or len(seen) >= MOST_CALLS:
            return
        seen.add(key)
        try:
            with torch.random.fork_rng(), torch.no_grad():
                func(*pytree.tree_map(_half, args), **pytree.tree_map(_half, kwargs))
            self.results[str(func)][0] += 1
        except Exception as error:
            found = self.results[str(func)]
            found[1:] = [found[1] + 1, found[2] or str(error).partition("\n")[0]]


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), str(leaf.dtype)) if isinstance(leaf, torch.Tensor) else leaf


def _half(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(torch.half if leaf.is_floating_point() else leaf.dtype, copy=True)
    return torch.half if leaf in (torch.float32, torch.float64) else leaf
