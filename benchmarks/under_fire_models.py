"""The small models of :mod:`under_fire`: some crash, hang, raise, or start processes and threads of their own."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

HEAD = """
import asyncio, ctypes, multiprocessing, os, signal, subprocess, threading, time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.data import DataLoader

"""


class Model(NamedTuple):
    """The parts of a model's file."""

    forward: str = ""
    """Lines at the start of ``forward``; ``half`` is true in half."""
    setup: str = ""
    """Lines at the top of the file."""
    layers: str = "nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)"
    shape: str = "2, 8"

    def text(self) -> str:
        """The content of the file."""
        forward = textwrap.indent(self.forward or "pass", " " * 8)
        return f"""{HEAD}{self.setup}

class Net(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential({self.layers})

    def forward(self, x):
        half = x.dtype == torch.half
        Net.calls += 1
{forward}
        return self.layers(x)


model, inputs = Net().eval(), torch.randn({self.shape})
"""


CRASHING_OP = """
def crash(x):
    return x.clone() if x.dtype != torch.half else ctypes.string_at(0)

LIBRARY = torch.library.Library("under_fire", "DEF")
LIBRARY.define("crash(Tensor x) -> Tensor")
LIBRARY.impl("crash", crash, "CPU")
"""

MODELS = {
    "mlp": Model(),
    "conv": Model(layers="nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)", shape="1, 3, 16, 16"),
    "transformer": Model(layers="nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)", shape="2, 5, 16"),
    "random": Model("x = x + torch.randn_like(x)"),
    "gaps": Model("x = x @ torch.linalg.cholesky(x.T @ x + 8 * torch.eye(8, dtype=x.dtype))"),
    "many_ops": Model("for _ in range(1000):\n    x = x + 1e-3"),
    "large": Model("x = x + torch.zeros(50_000_000)[0].to(x.dtype)"),
    "crashing_op": Model("x = torch.ops.under_fire.crash(x)", setup=CRASHING_OP),
    "dies_on_third_call": Model("if half and Net.calls == 3:\n    ctypes.string_at(0)"),
    "spins": Model("while half:\n    pass"),
    "sleeps": Model("if half:\n    time.sleep(600)"),
    "data_loader": Model("for _ in DataLoader([1, 2, 3], num_workers=2):\n    pass"),
    "pool": Model("with multiprocessing.Pool(2) as pool:\n    pool.map(abs, [1, 2])"),
    "leaves_process": Model('subprocess.Popen(["sleep", "600"])'),
    "threads": Model("POOL.submit(abs, 1)", setup="POOL = ThreadPoolExecutor(2)\nlist(POOL.map(abs, range(8)))"),
    "coroutine": Model("asyncio.run(asyncio.sleep(0))"),
    "thread_local": Model("x = x * LOCAL.scale", setup="LOCAL = threading.local()\nLOCAL.scale = 2"),
    "signal_handler": Model("signal.signal(signal.SIGTERM, signal.SIG_DFL)"),
    "odd_message": Model('if half:\n    raise ValueError("\\udc80")'),
    "prints": Model('os.write(1, b"x" * 100_000)'),
    "fails_in_fp32": Model('if x.dtype == torch.float32:\n    raise RuntimeError("no")'),
}

DIES = {"crashing_op", "dies_on_third_call"}
"""Models in which an op may be blamed for a crash."""


def write_models(folder: Path) -> None:
    """Write each model to ``NAME.py``."""
    for name, model in MODELS.items():
        (folder / f"{name}.py").write_text(model.text(), encoding="utf-8")
