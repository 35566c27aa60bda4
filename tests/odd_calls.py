"""Odd calls: what people type and feed by mistake, and how each must end. Run by ``test_odd_calls.py``; ``benchmarks/odd_calls.py``
writes what each prints into a report.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

NET = """import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
    def forward(self, x):
        {body}
        return self.linear(x)
torch.manual_seed(0)
model = Net().eval()
inputs = torch.ones(4, 3)
"""
BASE = NET.format(body="pass")


class OddCall(NamedTuple):
    """One call of the command, in a folder with ``model.py`` (a Linear) and the ``files`` given."""

    arguments: str
    exit_code: int
    shows: str
    """A part of what it prints on standard output or standard error."""
    files: dict[str, str | bytes | Path | None] = {}
    """Content of each file; a path: a symbolic link to it; ``None``: a folder."""
    own_process: str = ""
    """If it needs a process of its own, how that is started: ``closed``, ``full``, ``ascii``, ``limit`` or ``plain``."""

    @property
    def name(self) -> str:
        """For the list of tests."""
        return f"{self.arguments}{f' [{self.own_process}]' if self.own_process else ''}"


def file(content: str | bytes | Path | None) -> dict[str, str | bytes | Path | None]:
    """The one file ``odd.py``."""
    return {"odd.py": content}


def body(code: str) -> dict[str, str | bytes | Path | None]:
    """``odd.py`` with ``code`` in the model's ``forward``."""
    return file(NET.format(body=code))


HALF = "-p half -q"

TARGETS = [
    OddCall("scan missing.py", 2, "No such file: missing.py"),
    OddCall("scan", 2, "Missing argument"),
    OddCall("scan ''", 2, "neither a Python file"),
    OddCall("scan nonsense", 2, "neither a Python file"),
    OddCall("scan .", 2, "is a folder"),
    OddCall("scan folder", 2, "(with hf:folder its config.json is loaded)", {"folder/config.json": "{}"}),
    OddCall("scan weights.pt", 2, "a file with another suffix", {"weights.pt": b"x"}),
    OddCall("scan odd.py", 2, "odd.py is a folder", file(None)),
    OddCall("scan odd.py", 2, "Too many levels of symbolic links", file(Path("odd.py"))),
    OddCall("scan odd.py", 2, "No such file: odd.py", file(Path("gone.py"))),
    OddCall("scan odd.py", 2, "it has null bytes", file(b"\0\1\2")),
    OddCall("scan odd.py", 2, "Syntax error at odd.py:1", file(b"x = '\xff'")),
    OddCall("scan odd.py", 2, "Syntax error at odd.py:2", file("x = 1\ndef broken(:")),
    OddCall("scan odd.py", 2, "defines no model", file("")),
    OddCall("scan odd.py", 2, "defines no `inputs`", file("import torch\nmodel = torch.nn.Linear(2, 2)")),
    OddCall("scan odd.py", 2, "defines several models", file(f"{BASE}del model\nclass Other(Net):\n    pass")),
    OddCall("scan odd.py:Nothing", 2, "has no attribute 'Nothing'", file(BASE)),
    OddCall("scan odd.py:make", 2, "returned an object of type int", file(f"{BASE}def make():\n    return 3")),
    OddCall("scan odd.py", 2, "has type int, not torch.nn.Module", file("model = 3\ninputs = 1")),
    OddCall(
        "scan odd.py",
        2,
        "RuntimeError at odd.py:2: no model",
        file("def __getattr__(name):\n    raise RuntimeError('no ' + name)"),
    ),
    OddCall("scan no_such_package.module:net", 2, "No module named 'no_such_package.module'"),
    OddCall("scan os:nothing", 2, "has no attribute 'nothing'"),
    OddCall("scan torchvision:resnet81", 2, "Did you mean resnet18"),
    OddCall("scan timm:resnet1", 2, "timm has no model 'resnet1'"),
    OddCall("scan transformers:BertModle", 2, "Did you mean BertModel"),
    OddCall("scan transformers:pipeline", 2, "neither a model nor its configuration"),
    OddCall("scan hf:folder", 2, "folder has no config.json"),
]

LOADING = [
    OddCall("scan odd.py", 2, "the process ended with exit code 0 at odd.py:2", file("import os\nos._exit(0)")),
    OddCall("scan odd.py", 2, "was killed by SIGSEGV at odd.py:2", file("import ctypes\nctypes.string_at(0)")),
    OddCall("scan odd.py", 2, "was killed by SIGKILL", file("import os\nos.kill(os.getpid(), 9)")),
    OddCall(
        "scan odd.py --budget 1", 2, "not loaded within 1 s; it was at odd.py:2", file("import time\ntime.sleep(100)")
    ),
    OddCall("scan odd.py", 2, "SystemExit at odd.py:2: 3", file("import sys\nsys.exit(3)")),
    OddCall(
        "scan odd.py",
        2,
        "closes file descriptors that it did not open",
        file(f"{BASE}import os\nos.closerange(3, 1000)"),
    ),
    OddCall("scan odd.py", 2, "`inputs` is empty", file(f"{BASE}inputs = torch.utils.data.DataLoader([])")),
    OddCall("scan odd.py", 2, "EOFError at odd.py:1", file("input('name? ')")),
    OddCall(
        "scan odd.py",
        2,
        "ModuleNotFoundError at odd.py:1: No module named 'no_such_package'",
        file("import no_such_package"),
    ),
    OddCall(
        "scan odd.py",
        2,
        "RuntimeError at helper.py:4: no backend (caused by ModuleNotFoundError at helper.py:2",
        {
            "odd.py": "import helper",
            "helper.py": "try:\n    import no_such_package\nexcept ImportError:\n    raise RuntimeError('no backend')",
        },
    ),
    OddCall("scan odd.py", 2, "RecursionError at odd.py:2", file("def f():\n    f()\nf()")),
    OddCall("scan odd.py", 2, "FileNotFoundError at odd.py:1", file("open('weights.bin')")),
    OddCall(f"scan model.py --weights gone.pt {HALF}", 2, "No such file: gone.pt"),
    OddCall(f"scan model.py --weights odd.pt {HALF}", 2, "odd.pt is not a file of weights", {"odd.pt": b"garbage"}),
    OddCall(
        f"scan model.py --weights odd.safetensors {HALF}", 2, "Cannot read weights", {"odd.safetensors": b"garbage"}
    ),
    OddCall(f"scan model.py --inputs 999999999x64 {HALF}", 2, "Cannot make the input --inputs 999999999x64"),
    OddCall(f"scan model.py --inputs 4xtwo {HALF}", 2, "Cannot parse --inputs '4xtwo'"),
    OddCall(f"scan model.py --inputs 4x3:float17 {HALF}", 2, "Cannot parse --inputs '4x3:float17'"),
    OddCall(f"scan model.py --inputs 4x7 {HALF}", 2, "Check that the inputs fit the model"),
    OddCall(f"scan model.py --inputs x=4x3,4x3 {HALF}", 2, "with and without a name"),
]

RUNNING = [
    OddCall(f"scan odd.py {HALF}", 1, "AssertionError", body("assert x.dtype == torch.float32")),
    OddCall(f"scan odd.py {HALF}", 1, "KeyError: 'scale'", body("x.dtype == torch.half and {}['scale']")),
    OddCall(f"scan odd.py {HALF}", 1, "SystemExit: 3", body("x.dtype == torch.half and exit(3)")),
    OddCall(f"scan odd.py {HALF}", 1, "exit code 7", body("import os; x.dtype == torch.half and os._exit(7)")),
    OddCall(
        f"scan odd.py {HALF} --budget 1",
        1,
        "exceeded the budget of 1 s, at odd.py:8",
        body("import time; x.dtype == torch.half and time.sleep(99)"),
    ),
    OddCall(
        f"scan odd.py {HALF} --budget 1",
        2,
        "did not finish in fp32 within 1 s; it was at odd.py:8",
        body("import time; time.sleep(99)"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "crashed in fp32: the process was killed by SIGSEGV at odd.py:8",
        body("import ctypes; ctypes.string_at(0)"),
    ),
    OddCall(
        f"scan odd.py {HALF}", 2, "fails in fp32 on cpu at odd.py:8: ValueError: odd", body("raise ValueError('odd')")
    ),
    OddCall(f"scan odd.py {HALF}", 2, "fp32 output has NaN or Inf", body("x = x * float('nan')")),
    OddCall(f"scan odd.py {HALF}", 0, "Use half", body("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)")),
    OddCall(f"scan odd.py {HALF}", 0, "No findings", file(f"{BASE}inputs = inputs.to_sparse()")),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "Two fp32 runs with the same seed differ",
        body("import time; x = x * (time.perf_counter() * 1e3 % 100)"),
    ),
    OddCall(f"scan odd.py {HALF}", 2, "ScriptModule", file(f"{BASE}model = torch.jit.script(model)")),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "no floating-point parameters or inputs",
        file(f"{BASE}model = nn.Flatten()\ninputs = torch.ones(2, 3).long()"),
    ),
    OddCall(f"scan odd.py {HALF}", 2, "meta device", file(f"{BASE}model = model.to('meta')")),
    OddCall(f"scan odd.py {HALF}", 2, "shapes: none", file(f"{BASE}inputs = ()")),
    OddCall(f"scan odd.py {HALF}", 2, "fp32", file(f"{BASE}inputs = 'a text'")),
    OddCall(f"scan odd.py {HALF}", 0, "Use half", file(f"{BASE}print('x' * 100_000)")),
    OddCall(f"scan odd.py {HALF}", 0, "the model is in training mode", file(f"{BASE}model.train()")),
    OddCall(f"scan odd.py {HALF}", 2, "`loss` in odd.py has type int", file(f"{BASE}loss = 5")),
]

OPTIONS = [
    OddCall("scan model.py -p fp61", 2, "Did you mean"),
    OddCall("scan model.py -p fp8", 2, "Unknown precision 'fp8'"),
    OddCall("scan model.py -p ''", 2, "Unknown precision ''"),
    OddCall("scan model.py -p FP16,Amp_BF16 -q", 0, "autocast-bf16"),
    OddCall("scan model.py -p torch.float16 -q", 0, "Use half"),
    OddCall("scan model.py --device gpu", 2, "Unknown device 'gpu'"),
    OddCall("scan model.py --device xpu", 2, "'xpu' is not available"),
    OddCall("scan model.py --device cuda:99", 2, "cuda"),
    OddCall("scan model.py --backend inductr", 2, "Unknown backend 'inductr'"),
    OddCall("scan model.py --budget soon", 2, "--budget"),
    OddCall("scan model.py --budget 0", 2, "--budget"),
    OddCall("scan model.py --tolerance -1", 2, "--tolerance"),
    OddCall("scan model.py --errors some", 2, "--errors"),
    OddCall("scan model.py --select XX9", 2, "No diagnostic code starts with 'XX9'"),
    OddCall("scan model.py --without-kernel aten.dot", 2, "aten.dot"),
    OddCall("scan model.py --report out.pdf", 2, "out.pdf"),
    OddCall("scan model.py --report gone/out.html", 2, "Cannot write gone/out.html"),
    OddCall("scan model.py --json folder", 2, "folder", {"folder": None}),
    OddCall("scan model.py --save-plan -", 2, "--save-plan needs a file name"),
    OddCall("scan model.py --update-baseline", 2, "--baseline"),
    OddCall("scan model.py --baseline odd.json", 2, "odd.json", {"odd.json": "{"}),
    OddCall("scan model.py --nonsense", 2, "No such option"),
    OddCall("scan model.py extra", 2, "unexpected extra argument"),
    OddCall("sacn model.py", 2, "sacn"),
    OddCall("plan model.py --dtype fp8", 2, "Unknown precision 'fp8'"),
    OddCall("plan model.py --dtype fp32", 2, "No plan can start from fp32"),
    OddCall("plan model.py --base amp", 2, "Unknown base 'amp'"),
    OddCall("plan model.py --metric", 2, "defines no metric"),
    OddCall("plan model.py --max-drop 0.1", 2, "--max-drop needs a metric"),
    OddCall("plan model.py --inputs-from 2", 2, "`inputs` is not a function"),
    OddCall("plan missing.py", 2, "No such file: missing.py"),
]

OTHERS = [
    OddCall("report gone.json", 2, "Cannot read gone.json: No such file"),
    OddCall("report odd.json", 2, "not a scan result", {"odd.json": "{}"}),
    OddCall("report odd.json", 2, "upgrade lowprec-check", {"odd.json": '{"schema": 99, "tool": "lowprec-check 9"}'}),
    OddCall("report odd.json -f pdf", 2, "pdf", {"odd.json": "{}"}),
    OddCall("diff gone.json gone.json", 2, "Cannot read gone.json"),
    OddCall("op conv", 2, "conv"),
    OddCall("op dot --dtype fp99", 2, "fp99"),
    OddCall("op dot --device tpu", 2, "tpu"),
    OddCall("op dot --torch 9.9", 2, "9.9"),
    OddCall("explain LP999", 2, "LP999"),
    OddCall("catalog diff 2.8 9.9", 2, "9.9"),
    OddCall("catalog gaps --dtype int4", 2, "int4"),
    OddCall("compat", 2, "target"),
    OddCall("compat model.py -o model.py", 2, "model.py"),
    OddCall("compat --from-file gone.txt", 2, "gone.txt"),
    OddCall("env --device toaster", 2, "Unknown device 'toaster'"),
]

STREAMS = [
    OddCall(f"scan model.py {HALF}", 0, "", own_process="closed"),
    OddCall(f"scan model.py {HALF}", 2, "No space left on device", own_process="full"),
    OddCall(f"scan model.py {HALF} --json out.json", 2, "No space left on device", own_process="full"),
    OddCall(f"scan model.py {HALF} --json /dev/full", 2, "Use half", own_process="plain"),
    OddCall(f"scan model.py {HALF} --report out.html", 2, "File too large", own_process="limit"),
    OddCall(f"scan model.py {HALF}", 0, "Use half", own_process="ascii"),
]

CALLS = [*TARGETS, *LOADING, *RUNNING, *OPTIONS, *OTHERS, *STREAMS]


def make_files(folder: Path, files: dict[str, str | bytes | Path | None]) -> None:
    """Write ``model.py`` and ``files`` into ``folder``."""
    for name, content in {"model.py": BASE, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, Path):
            os.symlink(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
