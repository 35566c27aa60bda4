"""A sweep's worker with a few operators of its own, some of which kill or stop the process they run in."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import torch

from lowprec_check.engine.sweep import operator_worker


def dies(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.half:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x + 1


def always_dies(x: torch.Tensor) -> torch.Tensor:
    os._exit(3)


def hangs(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.bfloat16:
        time.sleep(1000)
    return x + 1


def prints(x: torch.Tensor) -> torch.Tensor:
    print("not a message")
    return x * 2


def refuses_large(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.half and x.numel() > 100:
        raise RuntimeError("too large for half")
    return x - 1


def operator(function: Any) -> SimpleNamespace:
    def sample_inputs(device: str, dtype: torch.dtype, requires_grad: bool) -> Any:
        for size in (2, 3):
            x = torch.linspace(1, 2, size, device=device, dtype=dtype).requires_grad_(requires_grad)
            yield SimpleNamespace(input=x, args=(), kwargs={}, output_process_fn_grad=lambda out: out)

    return SimpleNamespace(
        name=function.__name__,
        op=function,
        sample_inputs=sample_inputs,
        supported_dtypes=lambda device: {torch.float32},
        supports_autograd=True,
    )


FUNCTIONS = (dies, always_dies, hangs, prints, refuses_large)
operator_worker.load_operators = lambda: {function.__name__: operator(function) for function in FUNCTIONS}

if __name__ == "__main__":
    operator_worker.main()
