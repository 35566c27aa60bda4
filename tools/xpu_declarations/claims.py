"""Writes the dtypes that OpInfo claims for XPU, and the aten ops of each claim: `python claims.py OUT.json`.

Run it with the torch to examine (2.8 or later, any build, plus `expecttest`); it imports nothing from lowprec-check.
OpInfo is private to torch. A claim of `op.supported_dtypes("xpu")` is about a Python function. Its aten ops are those
that the first samples of the function dispatch on the CPU with floating inputs of that dtype; an op that the CPU does
not support is computed in float32. Conditions on CUDA hardware inside OpInfo evaluate as on a machine without CUDA, the
same as on an XPU machine. The claims with CUDA hardware are stored too (`on_cuda`): a dtype that is only missing
because there is no CUDA hardware says nothing about XPU.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

DTYPES = {"float32": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
SAMPLES = 64
SECONDS = 10
"""Time limit for one op in one dtype; the ops collected until then are kept."""


class OpCollector(TorchDispatchMode):
    """Collects the aten ops called with a floating input of `dtype`; ops without a kernel are computed in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op unchanged, or in float32 if that fails."""
        kwargs = kwargs or {}
        if any(self._low(leaf) for leaf in tree_iter((args, kwargs))) and func.namespace == "aten":
            self.names.add(
                func._schema.name.partition("::")[2] + (f".{name}" if (name := func._schema.overload_name) else "")
            )
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError):
            if self.dtype is torch.float32:
                raise
            return self._widened(func, args, kwargs)

    def _low(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.dtype is self.dtype

    def _widened(self, func: Any, args: Any, kwargs: Any) -> Any:
        wide: dict[int, torch.Tensor] = {}

        def widen(leaf: Any) -> Any:
            return wide.setdefault(id(leaf), leaf.float()) if self._low(leaf) else leaf

        result = func(*tree_map(widen, args), **tree_map(widen, kwargs))
        back = {}
        for leaf in tree_iter((args, kwargs)):
            if self._low(leaf):
                back[id(wide[id(leaf)])] = leaf
                if func._schema.is_mutable:
                    if leaf.shape != wide[id(leaf)].shape:  # the op resized its `out=`
                        leaf.resize_(wide[id(leaf)].shape)
                    leaf.copy_(wide[id(leaf)])

        def narrow(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dtype is not torch.float32:
                return leaf
            return back.get(id(leaf), leaf.to(self.dtype) if not func._schema.is_mutable else leaf)

        return tree_map(narrow, result)


@contextlib.contextmanager
def budget(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in the block after that many seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def dispatched_ops(op: Any, dtype: torch.dtype, backward: bool) -> list[str]:
    """The aten ops that the first samples of `op` dispatch, in the forward or in the backward pass."""
    mode = OpCollector(dtype)
    with contextlib.suppress(Exception), budget(SECONDS):
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), SAMPLES):
            with contextlib.suppress(RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
                trace(partial(op, sample.input, *sample.args, **sample.kwargs), mode, backward)
    return sorted(mode.names)


def trace(call: Callable[[], Any], mode: OpCollector, backward: bool) -> None:
    """Run `call` under `mode`; with `backward`, only the backward pass is collected."""
    if not backward:
        with torch.no_grad(), mode:
            call()
        return
    with OpCollector(mode.dtype):  # computes in float32 what the CPU does not support; its names are not used
        outputs = [out for out in tree_iter(call()) if isinstance(out, torch.Tensor) and out.requires_grad]
    if outputs:
        total = sum(out.abs().sum().float() for out in outputs)
        with mode:
            total.backward()  # type: ignore[union-attr]


def names_of(dtypes: Any) -> list[str]:
    """The names of those DTYPES that are in `dtypes`."""
    return [name for name, dtype in DTYPES.items() if dtype in dtypes]


def claims_on_cuda() -> dict[str, list[str]]:
    """The forward dtypes that OpInfo would claim on a machine with a recent CUDA device, found in a new process."""
    done = subprocess.run([sys.executable, __file__, "--on-cuda"], capture_output=True, text=True, check=True)
    claims: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return claims


def print_on_cuda() -> None:
    """Print the claims with CUDA hardware; runs in the new process."""
    from torch.testing._internal import common_cuda

    for name in dir(common_cuda):
        if re.fullmatch(r"SM\d+OrLater", name):
            setattr(common_cuda, name, True)
    from torch.testing._internal.common_methods_invocations import op_db

    print(json.dumps({name_of(op): names_of(op.supported_dtypes("xpu")) for op in op_db}))


def name_of(op: Any) -> str:
    """The name in OpInfo, with the variant."""
    return str(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""))


def claim_of(op: Any) -> dict[str, Any]:
    """The aten name, the forward and backward dtypes that OpInfo claims for XPU, and the aten ops of each."""
    forward = names_of(op.supported_dtypes("xpu"))
    backward = names_of(op.supported_backward_dtypes("xpu")) if op.supports_autograd else []
    traced = forward if "float32" in forward else []
    return {
        "aten": op.aten_name,
        "forward": forward,
        "backward": backward,
        "forward_ops": {name: dispatched_ops(op, DTYPES[name], backward=False) for name in traced},
        "backward_ops": {name: dispatched_ops(op, DTYPES[name], backward=True) for name in traced if name in backward},
    }


def main(path: Path) -> None:
    """Write the claims of this torch to `path`."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    on_cuda = claims_on_cuda()
    claims = {name_of(op): claim_of(op) | {"on_cuda": on_cuda[name_of(op)]} for op in op_db}
    head = {"torch": torch.__version__.partition("+")[0], "commit": torch.version.git_version}
    path.write_text(json.dumps(head | {"claims": claims}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print_on_cuda() if sys.argv[1] == "--on-cuda" else main(Path(sys.argv[1]))
