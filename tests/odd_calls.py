"""Odd calls: what people type and feed by mistake, and how each must end. Run by ``test_odd_calls.py``."""

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
    """If it needs a process of its own, how that is started: ``closed``, ``full``, ``gone`` (a pipe that nobody reads),
    ``read-only``, ``nowhere`` (in a folder that was removed), ``ascii``, ``limit`` or ``plain``."""

    saves: tuple[str, ...] = ()
    """Files that it writes, whatever else fails."""

    @property
    def name(self) -> str:
        """For the list of tests."""
        return f"{self.arguments[:100]}{f' [{self.own_process}]' if self.own_process else ''}"


def file(content: str | bytes | Path | None) -> dict[str, str | bytes | Path | None]:
    """The one file ``odd.py``."""
    return {"odd.py": content}


def body(code: str) -> dict[str, str | bytes | Path | None]:
    """``odd.py`` with ``code`` in the model's ``forward``."""
    return file(NET.format(body=code))


def method(code: str) -> dict[str, str | bytes | Path | None]:
    """``odd.py`` with a method added to the model's class."""
    name = code.partition("(")[0]
    return file(f"{BASE}def {code}\nNet.{name} = {name}\ndel {name}\nmodel.eval()\n")


def settings(code: str) -> dict[str, str | bytes | Path | None]:
    """``pyproject.toml`` with ``code`` in the table of this tool."""
    return {"pyproject.toml": f"[tool.lowprec-check]\n{code}\n"}


HALF = "-p half -q --times off"
PASSES = "half passes (not timed): 50 % less memory"

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
        "RuntimeError at odd.py:2: no inputs",
        file("def __getattr__(name):\n    raise RuntimeError('no ' + name)"),
    ),
    OddCall("scan no_such_package.module:net", 2, "No module named 'no_such_package.module'"),
    OddCall("scan os:nothing", 2, "has no attribute 'nothing'"),
    OddCall("scan torchvision:resnet81", 2, "Did you mean resnet18"),
    OddCall("scan timm:resnet1", 2, "timm has no model 'resnet1'"),
    OddCall("scan transformers:BertModle", 2, "Did you mean BertModel"),
    OddCall("scan transformers:pipeline", 2, "neither a model nor its configuration"),
    OddCall("scan hf:folder", 2, "folder has no config.json", {"folder": None}),
]

FORMS = [
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(b"\xef\xbb\xbf" + BASE.encode())),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(BASE.replace("\n", "\r\n"))),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(b"# coding: latin-1\nname = '\xe9'\n" + BASE.encode())),
    OddCall(
        "scan odd.py", 2, "Syntax error at odd.py: unknown encoding: nonsense", file("# coding: nonsense\n" + BASE)
    ),
    OddCall("scan odd.py", 2, "it has null bytes", file(BASE.encode("utf-16"))),
    OddCall(f"scan my-model.v2.py {HALF}", 0, PASSES, {"my-model.v2.py": BASE}),
    OddCall(f"scan 'my modèle.py' {HALF}", 0, PASSES, {"my modèle.py": BASE}),
    OddCall(f"scan 'a\nb.py' {HALF}", 0, PASSES, {"a\nb.py": BASE}),
    OddCall(f"scan torch.py {HALF}", 0, PASSES, {"torch.py": BASE}),
    OddCall("scan odd.ipynb", 2, "odd.ipynb is a notebook", {"odd.ipynb": "{}"}),
    OddCall("scan odd.pyc", 2, "a file with another suffix", {"odd.pyc": b"\xcb\r\r\n"}),
    OddCall("scan /dev/null", 2, "/dev/null is no regular file"),
    OddCall("scan model.py/", 2, "neither a Python file"),
    OddCall("scan :model", 2, "neither a Python file"),
    OddCall("scan model.py::model", 2, "neither a Python file"),
    OddCall("scan https://example.org/model.py", 2, "No such file: https:/example.org/model.py"),
    OddCall("scan torchvision", 2, "'torchvision' does not name a model"),
    OddCall("scan hf:", 2, "'hf:' does not name a model"),
    OddCall("scan hf:bert-base-uncased", 2, "is not a folder; nothing is downloaded"),
    OddCall("scan transformers:BertConfig,num_hidden_layers=x", 2, "num_hidden_layers': TypeError"),
]

ENDINGS = [
    OddCall("scan odd.py", 2, "KeyboardInterrupt at odd.py:1: no message", file("raise KeyboardInterrupt")),
    OddCall("scan odd.py", 2, "BaseException at odd.py:1: no message", file("raise BaseException")),
    OddCall("scan odd.py", 2, "GeneratorExit at odd.py:1", file("raise GeneratorExit")),
    OddCall("scan odd.py", 2, "BaseException at odd.py:1: ", file("def __getattr__(name): raise BaseException(name)")),
    OddCall(
        "scan odd.py",
        2,
        "KeyboardInterrupt at odd.py:2",
        file(
            "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # also in the background\n"
            "os.kill(os.getpid(), signal.SIGINT)"
        ),
    ),
    OddCall(
        f"scan odd.py --isolation none {HALF}",
        2,
        "Skipped at odd.py:2: no gpu",
        file("import pytest\npytest.skip('no gpu', allow_module_level=True)"),
    ),
    OddCall(
        f"scan odd.py --isolation none --json o.json {HALF}",
        0,
        PASSES,
        file(f"import os; os.chdir('/')\n{BASE}"),
        saves=("o.json",),
    ),
    OddCall("scan odd.py", 2, "the process was killed by SIGABRT at odd.py:1", file("import os; os.abort()")),
    OddCall("scan odd.py", 2, "SystemExit at odd.py:2", file("import argparse\nargparse.ArgumentParser().error('no')")),
    OddCall(
        "scan odd.py",
        2,
        "UserWarning at odd.py:3: odd",
        file("import warnings as w\nw.simplefilter('error')\nw.warn('odd')"),
    ),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"import os, tempfile; os.chdir(tempfile.mkdtemp())\n{BASE}")),
    OddCall(
        f"scan odd.py --isolation spawn {HALF}",
        0,
        PASSES,
        file(f"import os, tempfile; os.chdir(tempfile.mkdtemp())\n{BASE}"),
    ),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"import sys\nsys.stdout.close(); sys.stderr.close()\n{BASE}")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"import os\nos.close(1); os.close(2)\n{BASE}")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"{BASE}torch.set_default_device('meta')")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"{BASE}torch.set_default_dtype(torch.float64)")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"{BASE}torch.inference_mode().__enter__()")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"{BASE}import atexit, os; atexit.register(os._exit, 5)")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"{BASE}import os; os.remove('odd.py')")),
    OddCall(f"scan odd.py {HALF}", 0, "could not be judged", file(f"{BASE}nn.Linear.forward = lambda self, x: None")),
]

HOSTILE = [
    OddCall(
        f"scan odd.py {HALF}",
        1,
        "BaseException: 3",
        body("exec('raise BaseException(3)') if x.dtype == torch.half else 0"),
    ),
    OddCall(
        f"scan odd.py {HALF}", 1, "StopIteration (no message)", body("next(iter(())) if x.dtype == torch.half else 0")
    ),
    OddCall(f"scan odd.py {HALF}", 2, "EOFError", body("input('name? ')")),
    OddCall(f"scan odd.py {HALF}", 1, "RuntimeError: never", method("half(self): raise RuntimeError('never')")),
    OddCall(
        f"scan odd.py {HALF}",
        1,
        "LP905 incomplete-scan (half): odd.py:13: later ops were not checked",
        method("half(self): raise RuntimeError('never')"),
    ),
    OddCall(f"scan odd.py {HALF}", 1, "RuntimeError: never", method("_apply(self, *_): raise RuntimeError('never')")),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "RuntimeError at odd.py:13: never",
        method("parameters(self, *_): raise RuntimeError('never')"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        0,
        PASSES,
        method(
            "__getattr__(self, name):\n    assert name == 'linear', name\n    return nn.Module.__getattr__(self, name)"
        ),
    ),
    OddCall(f"scan odd.py {HALF}", 2, "odd.py:13: ZeroDivisionError", file(f"{BASE}loss = lambda output: 1 / 0")),
    OddCall(
        f"scan odd.py {HALF}",
        0,
        "cpu the metric failed: ZeroDivisionError: division by zero half passes",
        file(f"{BASE}metric = lambda model: 1 / 0"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "`inputs` is empty: it has no batch",
        file(f"{BASE}from torch.utils.data import DataLoader\ninputs = DataLoader([])"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "A NumPy array in `inputs` cannot become a tensor",
        file(f"{BASE}import numpy\ninputs = numpy.array(['a'])"),
    ),
    OddCall(f"scan model.py --weights . {HALF}", 2, "is a folder"),
    OddCall(f"scan model.py --weights model.py {HALF}", 2, "model.py is not a file of weights"),
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
    OddCall(f"scan model.py --inputs 9999999999999x64 {HALF}", 2, "Cannot make the input --inputs 9999999999999x64"),
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
    OddCall(f"scan odd.py {HALF}", 0, PASSES, body("import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)")),
    OddCall(
        f"scan odd.py {HALF}",
        0,
        "0.50 × import torch from odd",
        file(f"{BASE}inputs = inputs.to_sparse()"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "Two fp32 runs with the same seed differ",
        body(
            "from pathlib import Path; calls = Path('calls'); calls.touch(); "
            "calls.write_text(calls.read_text() + 'x'); x = x * 4.0 ** calls.stat().st_size"
        ),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "frozen ScriptModule",
        file(f"{BASE}model = torch.jit.freeze(torch.jit.script(model.eval()))"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "no floating-point parameters or inputs",
        file(f"{BASE}model = nn.Flatten()\ninputs = torch.ones(2, 3).long()"),
    ),
    OddCall(f"scan odd.py {HALF}", 2, "meta device", file(f"{BASE}model = model.to('meta')")),
    OddCall(f"scan odd.py {HALF}", 2, "shapes: none", file(f"{BASE}inputs = ()")),
    OddCall(f"scan odd.py {HALF}", 2, "fp32", file(f"{BASE}inputs = 'a text'")),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, file(f"{BASE}print('x' * 100_000)")),
    OddCall(f"scan odd.py {HALF}", 0, "the model is in training mode", file(f"{BASE}model.train()")),
    OddCall(f"scan odd.py {HALF}", 2, "`loss` in odd.py has type str", file(f"{BASE}loss = 'mse'")),
]

OPTIONS = [
    OddCall("scan model.py -p fp61", 2, "Did you mean"),
    OddCall("scan model.py -p fp32", 2, "fp32 is the reference that every scan runs"),
    OddCall("scan model.py -p fp8", 2, "Unknown precision 'fp8'"),
    OddCall("scan model.py -p ''", 2, "Unknown precision ''"),
    OddCall("scan model.py -p FP16,Amp_BF16 -q", 0, "autocast-bf16"),
    OddCall("scan model.py -p torch.float16 -q --times off", 0, PASSES),
    OddCall("scan model.py --device gpu", 2, "Unknown device 'gpu'"),
    OddCall("scan model.py --device mps", 2, "'mps' is not available"),
    OddCall("scan model.py --device xpu", 0, "xpu, predicted on a CPU"),
    OddCall("scan model.py --device cuda:99", 0, "cuda, predicted on a CPU"),
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
    OddCall("plan model.py --batches 2", 2, "`inputs` is neither a function"),
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

NAMES = [
    OddCall("scan model.py -p half,,fp16 -q --times off", 0, PASSES),
    OddCall("scan model.py -p 'half bf16'", 2, "Unknown precision 'half bf16'"),
    OddCall("scan model.py -p 16", 2, "Did you mean half?"),
    OddCall("scan model.py -p plan", 2, "Unknown precision 'plan'"),
    OddCall("plan model.py -p fp16,bf16 --base cast -q", 0, "bfloat16"),
    OddCall("plan model.py -p fp16,bf61", 2, "Unknown precision 'bf61'"),
    OddCall("plan model.py -p autocast-fp16,amp-bf16 --base cast", 2, "No precision is both"),
    OddCall("op conv2d --dtype amp-fp16", 2, "autocast-fp16 is not a dtype"),
    OddCall("op ''", 2, "The catalog has no operator ''"),
    OddCall("op '[bold]x[/bold]'", 2, "no operator '[bold]x[/bold]'"),
    OddCall("op aten::conv2d", 0, "nn.functional.conv2d"),
    OddCall("op torch.nn.Conv2d --dtype HALF", 0, "nn.functional.conv2d"),
    OddCall("explain ''", 2, "Unknown diagnostic code ''"),
    OddCall("catalog diff a b", 2, "'a' is not a version of torch"),
    OddCall("compat --from-file list.txt", 2, "nothing to scan", {"list.txt": "# nothing\n"}),
    OddCall("compat --from-file list.txt", 2, "Cannot parse list.txt:1", {"list.txt": 'model.py -p "half\n'}),
    OddCall("report .", 2, "Cannot read .: Is a directory"),
    OddCall("report model.py", 2, "not a scan result"),
]

SETTINGS = [
    OddCall("explain LP101", 2, "tool is not a table", {"pyproject.toml": "tool = 3"}),
    OddCall("explain LP101", 2, "Did you mean [tool.lowprec-check]?", {"pyproject.toml": "[tool.lowprec_check]"}),
    OddCall("explain LP101", 0, "missing-kernel", {"pyproject.toml": b"\xef\xbb\xbf[tool.lowprec-check]\nseed = 1\n"}),
    OddCall("explain LP101", 2, "pyproject.toml: ", {"pyproject.toml": b"\xff\xfe"}),
    OddCall("explain LP101", 0, "missing-kernel", {"pyproject.toml": None}),
    OddCall("explain LP101", 2, "precision: a text or a number is expected", settings("precision = {a = 1}")),
    OddCall("explain LP101", 2, "precision: a text or a number is expected", settings("precision = [['half']]")),
    OddCall("explain LP101", 2, "budget: a text or a number is expected, not True", settings("budget = true")),
    OddCall("explain LP101", 2, "seed: a text or a number is expected", settings("seed = 2024-01-01")),
    OddCall("explain LP101", 2, "tolerance: ", settings("tolerance = nan")),
    OddCall("explain LP101", 2, "unknown key 'scan'", settings("scan = 3")),
    OddCall("explain LP101", 2, "unknown key 'target'", settings("target = 'model.py'")),
    OddCall("explain LP101", 2, "Did you mean fail-on?", settings("fail_on = 'error'")),
    OddCall("explain LP101", 2, "a value is nested too deeply", settings(f"precision = {'[' * 5000}{']' * 5000}")),
    OddCall("explain LP101", 2, "a value is nested too deeply", settings(f"precision = {'{a=' * 5000}1{'}' * 5000}")),
    OddCall("explain LP101", 2, "a key has more than 1,000 parts", settings(f"{'a.' * 100_000}a = 1")),
    OddCall("explain LP101", 2, "a key has more than 1,000 parts", settings(f"[[{'a . ' * 100_000}a]]")),
    OddCall("explain LP101", 2, "Exceeds the limit", settings(f"seed = {'9' * 5000}")),
    OddCall("scan model.py", 2, "embedded null byte", settings('json = "a\\u0000b"')),
    OddCall(
        "scan model.py -q --times off",
        0,
        PASSES.removeprefix("half "),
        settings("precision = []\nplan = false\njson = 'scan.json'"),
    ),
    OddCall("scan model.py", 2, "Unknown precision 'fp99'", settings("precision = ['half', 'fp99']")),
    OddCall("plan model.py -q", 0, "half", settings("precision = ['half']\nbase = 'cast'")),
]

LONG = "x" * 300
_USES_LONG = {
    f"scan {LONG}.py": "",
    f"scan model.py --weights {LONG}": "",
    f"scan model.py --json {LONG}": "",
    f"scan model.py --report {LONG}.html": "",
    f"scan model.py --baseline {LONG}": "",
    f"scan model.py --baseline {LONG} --update-baseline": "",
    f"scan model.py --save-plan {LONG}": "",
    f"scan hf:{LONG}": "is not a folder",
    f"plan model.py --save-plan {LONG}": "",
    f"compat model.py -o {LONG}": "",
    f"compat --from-file {LONG}": "",
    f"report {LONG}": "",
    f"diff {LONG} {LONG}": "",
}
LONG_NAMES = [OddCall(call, 2, shows or "File name too long") for call, shows in _USES_LONG.items()]

VALUES = [
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "nested too deeply or contains itself",
        file(f"{BASE}inputs = [inputs]; inputs.append(inputs)"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "nested too deeply or contains itself",
        file(f"{BASE}inputs = {{'x': inputs}}; inputs['y'] = inputs"),
    ),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, body("y = [self.linear(x)]; y.append(y); return y")),
    OddCall(
        f"scan odd.py {HALF}",
        0,
        PASSES,
        body("y = self.linear(x)\n        for _ in range(2000): y = [y]\n        return y"),
    ),
    OddCall(f"scan odd.py {HALF}", 0, PASSES, body("return self.linear(x), 10**5000, -(2**63) - 1")),
    OddCall(
        f"scan odd.py {HALF}",
        1,
        "half: RecursionError: maximum recursion depth exceeded",
        file(f"{BASE.replace('.eval()', '')}model.me = model\nmodel.training = False"),
    ),
    OddCall(f"scan odd.py {HALF}", 2, "RecursionError at odd.py", file(f"{BASE}model.me = model\nmodel.eval()")),
]

_WRITES = (
    "import os\n{0}for number in range(3, 200):\n{0}    try: os.write(number, b'garbage' * 9999)\n"
    "{0}    except OSError: pass\n"
)
DESCRIPTORS = [
    OddCall(
        "scan odd.py", 2, "writes to file descriptors that it did not open", file(BASE + _WRITES.format("")), "plain"
    ),
    OddCall(
        f"scan odd.py {HALF}", 2, "writes to file descriptors that it did", body(_WRITES.format("        ")), "plain"
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "Too many open files",
        file(f"{BASE}import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (3, 3))"),
    ),
    OddCall(
        f"scan odd.py {HALF}",
        2,
        "File too large",
        file(f"{BASE}import resource as r, sys; sys.dont_write_bytecode = 1; r.setrlimit(r.RLIMIT_FSIZE, (512, 512))"),
    ),
]

STREAMS = [
    OddCall("--version", 141, "", own_process="gone"),
    OddCall("op dot", 141, "", own_process="gone"),
    OddCall("explain", 141, "", own_process="gone"),
    OddCall(f"scan model.py {HALF} --json o.json --report o.md", 141, "", own_process="gone", saves=("o.json", "o.md")),
    OddCall("plan model.py -p half -q --save-plan plan.json", 141, "", own_process="gone", saves=("plan.json",)),
    OddCall("op dot", 2, "Cannot write to standard output: Bad file descriptor", own_process="read-only"),
    OddCall("op dot", 0, "dispatches dot", own_process="nowhere"),
    OddCall(f"scan model.py {HALF}", 0, "", own_process="closed"),
    OddCall(f"scan model.py {HALF} --json o.json", 2, "No space left on device", own_process="full", saves=("o.json",)),
    OddCall(f"scan model.py {HALF} --json /dev/full", 2, PASSES, own_process="plain"),
    OddCall(f"scan model.py {HALF} --report out.html", 2, "File too large", own_process="limit"),
    OddCall(f"scan model.py {HALF}", 0, PASSES, own_process="ascii"),
]

CALLS = [
    *TARGETS,
    *FORMS,
    *ENDINGS,
    *HOSTILE,
    *LOADING,
    *RUNNING,
    *OPTIONS,
    *OTHERS,
    *NAMES,
    *SETTINGS,
    *LONG_NAMES,
    *VALUES,
    *DESCRIPTORS,
    *STREAMS,
]


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
