"""The process that makes kept calls again, with ops that kill or stop it."""

from __future__ import annotations

import os
import signal
import time

import torch

from lowprec_check.pytest_plugin.fixture import cast_replay

LIBRARY = torch.library.Library("killing_replay_ops", "DEF")


def define(name: str, dtype: torch.dtype) -> None:
    """An op that does not come back in ``dtype``."""

    def run(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == dtype:
            if name.startswith("hangs"):
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGSEGV)
        return x + 1

    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, run, "CPU")


define("dies", torch.half)
define("dies_in_fp32", torch.float32)
define("hangs", torch.half)
define("runs", torch.int8)

if __name__ == "__main__":
    cast_replay.importlib.import_module = lambda _: None  # type: ignore[assignment]
    cast_replay.main()
