"""A file of the user's runs up to its first call of a model, and changes no file."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import Call
from user_files import NET

from lowprec_check import ScanResult, UsageError
from lowprec_check.cli.app import app
from lowprec_check.cli.options import script_arguments
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.user_script import parked_threads
from lowprec_check.schema.registry import modules_in

Write = Callable[..., Path]

KEPT = {"ckpt.pt": b"a checkpoint", "train.log": b"a log\n", "old/weights.bin": b"weights", "config.json": b"{}"}

SAVE = "torch.save(net.state_dict(), 'ckpt.pt')"

LATER = {
    "the next line": f"out = net(x)\n{SAVE}",
    "a loop": f"for step in range(3):\n    loss = net(x).sum()\n    loss.backward()\n    {SAVE}",
    "finally": f"try:\n    net(x)\nfinally:\n    {SAVE}",
    "except Exception": f"try:\n    net(x)\nexcept Exception:\n    {SAVE}",
    "except BaseException": f"try:\n    net(x)\nexcept BaseException:\n    {SAVE}\nnet(x)\n{SAVE}",
    "except without a class, in a loop": f"while True:\n    try:\n        net(x)\n    except:\n        {SAVE}\n"
    "        break",
    "with": "class Saves:\n    def __enter__(self): pass\n    def __exit__(self, *_):\n"
    f"        {SAVE}\n        return True\nwith Saves():\n    net(x)",
    "contextlib": "import contextlib\n@contextlib.contextmanager\ndef saves():\n    try:\n        yield\n    finally:\n"
    f"        {SAVE}\nwith saves():\n    net(x)",
    "a generator": f"def batches():\n    try:\n        yield net(x)\n    finally:\n        {SAVE}\nlist(batches())",
    "a thread": "import threading\ndef work():\n    try:\n        net(x)\n    finally:\n"
    f"        {SAVE}\nt = threading.Thread(target=work)\nt.start()\nt.join()\n{SAVE}",
    "a pool of threads": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(1) as pool:\n"
    f"    pool.submit(net, x).result()\n{SAVE}",
    "deleting it": "import os, shutil\nnet(x)\nos.remove('ckpt.pt')\nshutil.rmtree('old')",
    "an exit handler": f"import atexit\natexit.register(lambda: {SAVE})\nnet(x)",
}

BEFORE = {
    "a log": "import logging\nlogging.basicConfig(filename='train.log', filemode='w', force=True)\n"
    "logging.warning('started')",
    "a log that is continued": "log = open('train.log', 'a')\nprint('started', file=log, flush=True)",
    "a configuration": "import pathlib\npathlib.Path('config.json').write_text('[1]')\n"
    "assert pathlib.Path('config.json').read_text() == '[1]'",
    "a checkpoint": f"{SAVE}\nassert torch.load('ckpt.pt')",
    "a checkpoint that is replaced": "import os\ntorch.save(net.state_dict(), 'new.pt')\n"
    "os.replace('new.pt', 'ckpt.pt')\nwith open('ckpt.pt', 'rb') as f: assert torch.load(f)\n"
    "assert not os.path.exists('new.pt')",
    "deleted files": "import os, pathlib\nos.remove('ckpt.pt')\npathlib.Path('train.log').unlink()\n"
    "open('train.log', 'x').close()",
    "a deleted folder": "import os, shutil\nshutil.rmtree('old')\nos.makedirs('old/logs')\n"
    "open('old/weights.bin', 'w').close()",
    "a renamed folder": "import os\nos.rename('old', 'older')",
    "a renamed file": "import os\nos.rename(src='ckpt.pt', dst='older.pt')",
    "a file that is cut": "import os\nos.truncate('train.log', length=0)",
}


@pytest.fixture
def files(here: Path) -> Iterator[Path]:
    """The current folder, with files, which must be as before at the end."""
    for name, content in KEPT.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_bytes(content)
    yield here
    assert {name: (here / name).read_bytes() for name in KEPT} == KEPT


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("later", LATER)
def test_no_line_after_the_first_call_of_a_model_runs(files: Path, write: Write, later: str, guard: bool) -> None:
    body = f"net, x = Net(), torch.ones(4, 3)\n{LATER[later]}"
    text = f"def main():\n{textwrap.indent(body, '    ')}\nif __name__ == '__main__':\n    main()" if guard else body
    target = load_target(str(write(NET + text, "train.py")))
    assert target.args[0].shape == (4, 3)
    assert torch.is_grad_enabled()


def test_a_script_runs_once_to_its_call(files: Path, write: Write, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        "print('started')\nnet = Net()\nmodel = net\nfor inputs, labels in [(torch.ones(6), 0)]:\n"
        "    net(inputs.view(2, 3))\n    print('next')"
    )
    target = load_target(str(write(NET + text, "train.py")))
    assert target.args[0].shape == (2, 3)
    output = capfd.readouterr()
    assert (output.out + output.err).count("started") == 1
    assert "next" not in output.out + output.err


@pytest.mark.parametrize("before", BEFORE)
def test_files_that_a_script_writes_before_its_call_are_kept(files: Path, write: Write, before: str) -> None:
    text = f"net, x = Net(), torch.ones(4, 3)\n{BEFORE[before]}\nnet(x)"
    target = load_target(str(write(NET + text, "train.py")))
    assert any("which the scan left as they are" in note for note in target.notes)


def test_what_a_script_makes_before_its_call_is_its_own(files: Path, write: Write) -> None:
    text = (
        "import os, shutil, tempfile\nos.makedirs('run/a')\nopen('run/a/log', 'w').close()\n"
        "open('run/a/log', 'a').close()\nassert os.path.getsize('run/a/log') == 0\nos.remove('run/a/log')\n"
        "shutil.rmtree('run')\nassert not os.path.exists('run')\nwith tempfile.TemporaryDirectory() as folder:\n"
        "    open(folder + '/x', 'w').close()\nassert not os.path.exists(folder)\nNet()(torch.ones(4, 3))"
    )
    target = load_target(str(write(NET + text, "train.py")))
    assert not any("left as they are" in note for note in target.notes)


def test_functions_are_as_before_after_a_script(files: Path, write: Write) -> None:
    before = open, os.remove, os.mkdir, torch.save, threading.Thread.start
    load_target(str(write(NET + f"net, x = Net(), torch.ones(4, 3)\nnet(x)\n{SAVE}", "train.py")))
    assert before == (open, os.remove, os.mkdir, torch.save, threading.Thread.start)


def test_a_call_while_a_model_is_constructed_is_not_its_first(files: Path, write: Write) -> None:
    text = """
class Sized(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(self.body(torch.zeros(1, 3, 8, 8)).numel(), 2)
    def forward(self, x):
        return self.head(self.body(x).flatten(1))
Sized()(torch.ones(5, 3, 8, 8))
"""
    target = load_target(str(write(NET + text, "train.py")))
    assert (type(target.model).__name__, target.args[0].shape) == ("Sized", (5, 3, 8, 8))


def test_a_file_with_a_model_and_inputs_that_calls_it(files: Path, write: Write) -> None:
    text = (
        f"model, inputs = Net().eval(), torch.ones(7, 3)\nmodel(torch.ones(1, 3))\nnet = model\n{SAVE}\n"
        "def loss(output): return output.sum()\n"
    )
    target = load_target(str(write(NET + text, "model.py")))
    assert target.args[0].shape == (7, 3)
    assert target.loss is not None
    assert any("which the scan left as they are" in note for note in target.notes)


def test_a_file_whose_inputs_are_not_at_its_top_level(files: Path, write: Write) -> None:
    text = (
        "net = Net().eval()\nglobals()['inputs'] = torch.ones(7, 3)\nnet(torch.ones(1, 3))\n"
        "def loss(output): return output.sum()\n"
    )
    target = load_target(f"{write(NET + text, 'model.py')}:net")
    assert target.args[0].shape == (7, 3)
    assert any(
        "run up to its first call of a model, at model.py:12: loss below is not used" in note for note in target.notes
    )


def test_a_named_attribute_of_a_script(files: Path, write: Write) -> None:
    write(NET + f"net, x = Net(), torch.ones(4, 3)\nnet(x)\nother = Net()\n{SAVE}", "train.py")
    assert load_target("train.py:net").args[0].shape == (4, 3)
    assert load_target("train:Net", ("2x3",)).args[0].shape == (2, 3)
    with pytest.raises(UsageError, match="no attribute 'other'"):
        load_target("train.py:other")


def test_an_import_that_calls_a_model(files: Path, write: Write) -> None:
    write(NET + f"net = Net()\nnet(torch.ones(4, 3))\n{SAVE}", "helper_of_script.py")
    target = load_target(str(write(f"import torch, helper_of_script\n{SAVE.replace('net', 'helper.net')}", "train.py")))
    assert target.source == "helper_of_script.py:11"
    import helper_of_script  # type: ignore[import-not-found]  # it would wait for the import that was stopped

    assert helper_of_script.net is target.model


CONTEXTS: dict[str, Callable[[], object]] = {
    "torch.no_grad()": torch.is_grad_enabled,
    "torch.inference_mode()": torch.is_inference_mode_enabled,
    "torch.autocast('cpu')": lambda: torch.is_autocast_enabled("cpu"),
    "torch.autocast('cpu', dtype=torch.float16)": lambda: torch.get_autocast_dtype("cpu"),
    "torch.device('meta')": lambda: torch.ones(1).device,
    "FlopCounterMode(display=False)": lambda: (
        torch._C._len_torch_dispatch_stack(),
        len(vars(torch.nn.modules.module)["_global_forward_pre_hooks"]),
    ),
    "contextlib.redirect_stderr(open('new.txt', 'w'))": lambda: sys.stderr,
    "contextlib.redirect_stdout(open('new.txt', 'w'))": lambda: sys.stdout,
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_around_the_call_are_left(files: Path, write: Write, context: str) -> None:
    before = CONTEXTS[context]()
    imports = "import contextlib\nfrom torch.utils.flop_counter import FlopCounterMode\n"
    text = (
        f"{imports}net, x = Net(), torch.ones(4, 3)\nwith {context}:\n    with torch.autocast('cpu'):\n        net(x)"
    )
    load_target(str(write(NET + text, "train.py")))
    assert CONTEXTS[context]() == before
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


def test_a_thread_that_is_not_waited_for(files: Path, write: Write) -> None:
    text = (
        "import threading, time\nnet, x = Net(), torch.ones(4, 3)\nt = threading.Thread(target=net, args=(x,))\n"
        "t.start()\n"
    )
    write(NET + f"{text}while t.is_alive():\n    time.sleep(0.01)\n{SAVE}", "train.py")
    before = {*threading.enumerate(), *parked_threads()}
    assert load_target("train.py").args[0].shape == (4, 3)
    assert {*threading.enumerate()} - before <= {*parked_threads()}


@pytest.mark.parametrize(
    ("words", "target", "arguments"),
    [
        ("a.py -q", "a.py", ()),
        ("a.py -q --", "a.py", ()),
        ("-q -- a.py", "a.py", ()),
        ("-- -a.py", "-a.py", ()),
        ("a.py -- --rows 6", "a.py", ("--rows", "6")),
        ("-q -- a.py --rows 6", "a.py", ("--rows", "6")),
        ("a.py -- -- b", "a.py", ("--", "b")),
    ],
)
def test_what_follows_two_hyphens(words: str, target: str, arguments: tuple[str, ...]) -> None:
    modules_in("lowprec_check.cli")  # each registers its command
    scan = app.commands["scan"]
    context = scan.make_context("scan", words.split())
    assert (context.params["target"], script_arguments(context)) == (target, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_a_scan_of_a_script_changes_nothing(files: Path, write: Write, call: Call, isolation: str) -> None:
    text = (
        "import argparse, atexit, signal\np = argparse.ArgumentParser()\np.add_argument('--rows', type=int)\n"
        "net, x = Net(), torch.ones(p.parse_args().rows, 3)\n"
        f"def save(*_):\n    {SAVE}\n"
        "atexit.register(save)\nsignal.signal(signal.SIGTERM, save)\n"
        "try:\n    net(x)\nfinally:\n    save()\n"
    )
    done = call(
        "scan",
        str(write(NET + text, "train.py")),
        "-p",
        "half,autocast-bf16",
        "--json",
        "-",
        "--isolation",
        isolation,
        "--",
        "--rows",
        "6",
    )
    assert done.returncode == 0, done.stderr
    result = ScanResult.from_json(done.stdout.encode())
    assert [run.status for run in result.runs] == ["ok"] * 3
    assert result.model.inputs == ["(6, 3)"]


OUTSIDE = {
    "import subprocess\nsubprocess.run(['true'])": "starts true at train.py:4",
    "import subprocess\nsubprocess.run('true; true', shell=True)": "starts sh at train.py:4",
    "import os\nos.system('true now')": "starts true at train.py:4",
    "import sqlite3\nsqlite3.connect('runs.db').close()": "opens the database runs.db at train.py:4",
    "import socket, contextlib\nwith contextlib.suppress(OSError):\n    socket.create_connection(('127.0.0.1', 9))": (
        "connects to 127.0.0.1:9 at train.py:5"
    ),
    "import sqlite3\nsqlite3.connect(':memory:').close()": None,
    "torch.cpu._is_avx512_supported()\nopen('log', 'w').close()": None,
}


@pytest.mark.parametrize("code", OUTSIDE)
def test_what_happens_outside_the_process_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.chdir(tmp_path)
    script = f"import torch\nnet = torch.nn.Linear(2, 2)\n{code}\nnet(torch.ones(1, 2))\n"
    Path("train.py").write_text(script)
    said = [note for note in load_target("train.py").notes if "outside this process" in note]
    wanted = OUTSIDE[code]
    if wanted is None:
        assert not said
    else:
        assert said == [f"the file {wanted}: what that changes outside this process stays changed"]


def test_dynamo_that_a_file_imports_compiles_the_model_as_elsewhere(tmp_path: Path) -> None:
    """It keeps some functions of torch when it is imported, which a scan replaces while it loads."""
    path = tmp_path / "sliced.py"
    path.write_text(
        "import torch, torch._dynamo\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))\n"
        "    def forward(self, x):\n        for layer in self.layers[:2]:\n            x = layer(x)\n        return x\n"
        "model, inputs = Net(), torch.randn(2, 4)\nmodel(inputs)\n"
    )
    code = (
        "import sys, torch\nfrom lowprec_check.engine.model.load_target import load_target\n"
        "target = load_target(sys.argv[1])\nassert 'torch._dynamo' in sys.modules\n"
        "torch.compile(target.model, backend='eager', fullgraph=True)(*target.args)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
