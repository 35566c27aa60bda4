"""Which model of a file or script is scanned: calls that make the model, such as dry runs, are not its first call."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Call
from user_files import NET

from lowprec_check import ScanResult, UsageError
from lowprec_check.engine.model import user_script
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.user_module import run_script

Write = Callable[..., Path]

PARTS = """import torch
from torch import nn

class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        return self.conv(x)

class Full(nn.Module):
    def __init__(self, enc, channels=4):
        super().__init__()
        self.enc, self.head = enc, nn.Conv2d(channels, 2, 1)
    @classmethod
    def of(cls, enc):
        return cls(enc)
    def forward(self, x):
        return self.head(self.enc(x))

def channels_of(enc):
    with torch.no_grad():
        for size in (8, 9):
            channels = enc(torch.zeros(1, 3, size, size)).shape[1]
    return channels

def build():
    enc = Enc()
    return Full(enc, channels_of(enc))

def build_and_try() -> nn.Module:
    net = Full(Enc())
    net(torch.zeros(1, 3, 8, 8))
    return net.eval()

def build_from_config(kind=Full) -> Full:
    parts = {"enc": Enc()}
    width = parts["enc"](torch.zeros(1, 3, 8, 8)).shape[1]
    return kind(channels=width, **parts)

def with_head(enc):
    return Full(enc)

def evaluate(net, loader):
    for x in loader:
        net(x)

def train(net, loader):
    for x in loader:
        net(x).sum().backward()
    return net

probe = torch.zeros(1, 3, 8, 8)
loader = [torch.randn(5, 3, 8, 8), torch.randn(5, 3, 8, 8)]
"""
LOOP = "\nfor x in loader:\n    {name}(x)\n"
LAZY = "net = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(5))\nnet(probe)\n"

SCRIPTS = {
    "a part, then a constructor": ("enc = Enc()\nenc(probe)\nmodel = Full(enc)" + LOOP.format(name="model"), "Full"),
    "a part, then a constructor, once": (
        "enc = Enc()\nenc(probe)\nmodel = Full(enc).eval()\nout = model(loader[0])",
        "Full",
    ),
    "a part, with a class method": ("enc = Enc()\nenc(probe)\nmodel = Full.of(enc)\nmodel(loader[0])", "Full"),
    "a part in a list": (
        "layers = [Enc(), nn.Conv2d(4, 2, 1)]\nlayers[0](probe)\nnet = nn.Sequential(*layers)\nnet(loader[0])",
        "Sequential",
    ),
    "a part that is appended": (
        "net, enc = nn.Sequential(), Enc()\nenc(probe)\nnet.append(enc)\nnet(loader[0])",
        "Sequential",
    ),
    "a part that is assigned": ("net, enc = Full(Enc()), Enc()\nenc(probe)\nnet.enc = enc\nnet(loader[0])", "Full"),
    "a part, then a function": ("enc = Enc()\nenc(probe)\nmodel = with_head(enc)\nmodel(loader[0])", "Full"),
    "a helper's probe": ("model = build()" + LOOP.format(name="model"), "Full"),
    "a helper's probe, in a call": ("evaluate(build().eval(), loader)", "Full"),
    "a helper's probe, in main()": ("def main():\n    model = build()\n    evaluate(model, loader)\nmain()", "Full"),
    "a builder that tries its model": ("model = build_and_try()\nfor x in loader:\n    model(x)", "Full"),
    "a builder that says what it returns": ("model = build_from_config()\nevaluate(model, loader)", "Full"),
    "lazy layers": (LAZY + "net.eval()\nout = net(loader[0])", "Sequential"),
    "another model that a loop calls": (
        "enc = Enc()\nwidth = enc(probe).shape[1]\nhead = nn.Conv2d(width, 2, 1)\n"
        "for x in [torch.randn(5, 4, 8, 8)]:\n    head(x)",
        "Conv2d",
    ),
    "another model that a function's loop calls": (
        "enc = Enc()\nwidth = enc(probe).shape[1]\ndef run(m, data):\n    for x in data: m(x)\n"
        "head = nn.Conv2d(width, 2, 1)\nrun(head, [torch.randn(5, 4, 8, 8)])",
        "Conv2d",
    ),
    "a look at the shape, of the model itself": (
        "model = Full(Enc())\nmodel(loader[0]).shape\ncriterion = nn.MSELoss()\n"
        "for x in loader:\n    criterion(model(x), model(x))",
        "Full",
    ),
    "a linear probe of features": (
        "enc = Enc()\nhead = nn.Linear(enc(loader[0]).numel(), 2)\nhead(torch.ones(1, 720))",
        "Enc",
    ),
    "an evaluation that returns its model": (
        "def run():\n    net = Full(Enc())\n    for x in loader:\n        net(x)\n    return net\nrun()",
        "Full",
    ),
    "helpers that loops call": (
        "net = Full(Enc()).eval()\nout = net(loader[0])\nimport logging\nlog = logging.getLogger()\n"
        "def rows(): return [str]\nwrite = rows()\nfor row in out:\n    write(row)\n    log.info('x')\n"
        "raise SystemExit('ran on')",
        "Full",
    ),
    "a main program that returns its model": (
        "def main():\n    net = Full(Enc()).eval()\n    out = net(loader[0])\n    assert not len(out)\n"
        "    return net, out\nmain()",
        "Full",
    ),
    "an object that runs its model": (
        "class Runner:\n    def __init__(self):\n        self.net = Full(Enc())\n    def run(self) -> nn.Module:\n"
        "        self.net(loader[0])\n        assert 0\n        return self.net\nnet = Runner().run()",
        "Full",
    ),
    "a wrapper that is exported": (
        "net = Full(Enc()).eval()\nref = net(loader[0])\nwith_softmax = nn.Sequential(net, nn.Softmax(1))\n"
        "torch.jit.trace(with_softmax, probe)\nraise SystemExit('ran on')",
        "Full",
    ),
    "layer by layer": (
        "net, x = nn.Sequential(Enc(), nn.Conv2d(4, 2, 1)), probe\nfor layer in net:\n    x = layer(x)\nnet(loader[0])",
        "Sequential",
    ),
    "layers that are appended in a loop": (
        "layers, x = [], probe\nfor width in (3, 3):\n    layer = nn.Conv2d(3, width, 1)\n    x = layer(x)\n"
        "    layers.append(layer)\nnet = nn.Sequential(*layers)\nnet(loader[0])",
        "Sequential",
    ),
    "shapes of several outputs": (
        "enc = Enc()\nwidths = [y.shape[0] for y in enc(probe)]\nmodel = Full(enc, widths[0])\nmodel(loader[0])",
        "Full",
    ),
    "a part of a model that gets another head": (
        "net = Full(Enc())\nwidth = net.enc(probe).shape[1]\nnet.head = nn.Conv2d(width, 5, 1)\nnet(loader[0])",
        "Full",
    ),
    "parts in a dictionary": (
        "parts, enc = {}, Enc()\nenc(probe)\nparts['enc'] = enc\nmodel = Full(**parts)\nmodel(loader[0])",
        "Full",
    ),
    "a model that gets more layers": (
        "net = nn.Sequential()\nfor width in (3, 3):\n    net.append(nn.Conv2d(3, width, 1))\n    net(probe)\n"
        "net(loader[0])",
        "Sequential",
    ),
    "functions that call each other": (
        "net = Full(Enc())\n"
        + "".join(f"def f{i}(n):\n" + "".join(f"    f{j}(n)\n" for j in range(12)) for i in range(12))
        + "net(loader[0])\nf0(3)",
        "Full",
    ),
    "training, then a larger model": (
        "def main():\n    enc = Enc()\n    for x in loader:\n        pass\n    train(enc, loader)\n"
        "    return Full(enc)\nmain()",
        "Enc",
    ),
    "an evaluation, then a larger model": (
        "enc = Enc()\nevaluate(enc, loader * 9)\nraise_if_reached = Full(enc)",
        "Enc",
    ),
    "a wrapper": ("net = Full(Enc())\nnet(loader[0])\nnet = nn.DataParallel(net)\nnet(loader[0])", "Full"),
    "a comprehension": (
        "enc = Enc()\nout = [enc(x) for x in loader]\nhead = nn.Conv2d(4, 2, 1)\nfor x in out:\n    head(x)",
        "Enc",
    ),
    "training that returns its model": ("net = train(Full(Enc()), loader)\nnet(loader[0])", "Full"),
}


@pytest.mark.parametrize("guard", [False, True], ids=["", "guard"])
@pytest.mark.parametrize("case", SCRIPTS)
def test_the_first_call_of_a_model(here: Path, write: Write, case: str, guard: bool) -> None:
    body, kind = SCRIPTS[case]
    body = body.replace("\n", "\n    ")
    text = f"if __name__ == '__main__':\n    {body}" if guard else body.replace("\n    ", "\n")
    target = load_target(str(write(PARTS + text, "infer.py")))
    assert type(target.model).__name__ == kind
    assert target.args[0].shape[0] == 5, "its first batch, not what it was tried on"


def test_a_long_script_is_read_once(here: Path, write: Write) -> None:
    counting = (
        "class Counting(Full):\n    asked = 0\n    def modules(self):\n        Counting.asked += 1\n"
        "        return super().modules()\n"
    )
    later = "".join(f"use(net, {number})\n" for number in range(300))
    text = (
        f"{counting}def use(net, number): return net\nnet = Counting(Enc()).eval()\nCounting.asked = 0\n"
        f"net(loader[0])\n{later}"
    )
    target = load_target(str(write(PARTS + text, "infer.py")))
    assert type(target.model).asked < 30  # type: ignore[attr-defined]


def test_a_dry_run_that_nothing_follows_is_the_first_call(here: Path, write: Write) -> None:
    target = load_target(str(write(PARTS + "model = build_and_try()\nprint(model)", "infer.py")))
    assert target.args[0].shape == (1, 3, 8, 8)


def test_a_dry_run_before_training_is_the_first_call(here: Path, write: Write) -> None:
    later = (
        "opt = torch.optim.SGD(net.parameters(), 1.0)\n"
        "torch.stack([p.sum() for p in net.parameters()]).sum().backward()\n"
    )
    text = f"{LAZY}{later}raise SystemExit('the optimizer has made a step')"
    target = load_target(str(write(PARTS + text, "train.py")))
    assert target.args[0].shape == (1, 3, 8, 8)
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_a_part_that_is_called_alone_is_no_model(here: Path, write: Write) -> None:
    text = "enc = Enc()\nenc(probe)\nmodel = Full(enc)\nprint(model)"
    target = load_target(str(write(PARTS + text, "infer.py")), ("2x3x8x8",))
    assert (type(target.model).__name__, target.args[0].shape) == ("Full", (2, 3, 8, 8))


def test_what_was_taken_and_why(here: Path, write: Write) -> None:
    write(NET + "model, inputs = Net(), torch.ones(7, 3)", "model.py")
    assert load_target("model.py").taken == "model of model.py"
    assert load_target("model.py:Net", ("2x3",)).taken == "Net of model.py, --inputs"
    write(NET + "net = Net()\nnet(torch.ones(7, 3))", "script.py")
    assert load_target("script.py").taken == "called at script.py:11, the first call of a model in the script"
    assert load_target("script.py:net").taken == "net of script.py, called at script.py:11"
    write(PARTS + LAZY + "net(loader[0])", "lazy.py")
    first = "the first call of a model in the script; the call at lazy.py:56 initializes lazy layers"
    assert load_target("lazy.py").taken == f"called at lazy.py:57, {first}"


BUILDERS = [
    *("ssd300_vgg16", "ssdlite320_mobilenet_v3_large", "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2"),
    *("fcos_resnet50_fpn", "fasterrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"),
]
"""Of torchvision, those that build a model around a backbone; the first two call it."""
HYBRIDS = [
    *("vit_tiny_r_s16_p8_224", "vit_tiny_r_s16_p8_384", "vit_small_r26_s32_224", "vit_small_r26_s32_384"),
    *("vit_base_r26_s32_224", "vit_base_r50_s16_224", "vit_base_r50_s16_384", "vit_large_r50_s32_224"),
    *("vit_large_r50_s32_384", "vit_small_resnet26d_224", "vit_small_resnet50d_s16_224", "vit_base_resnet26d_224"),
    *("vit_base_resnet50d_224", "vit_base_mci_224", "vitamin_small_224", "vitamin_base_224", "vitamin_large_224"),
    *("vitamin_large2_224", "vitamin_large_256", "vitamin_large2_256", "vitamin_large_336", "vitamin_large2_336"),
    *("vitamin_large_384", "vitamin_large2_384", "vitamin_xlarge_256", "vitamin_xlarge_336", "vitamin_xlarge_384"),
]
"""All models of timm 1.0.31 whose builders call a part to learn its output shape; those of diffusers 0.42 call none."""


@pytest.mark.slow
def test_library_builders_that_call_a_part(here: Path, write: Write) -> None:
    lines = "import torch\nfrom torch import nn\nwith torch.device('meta'):\n    net = {make}\nnet({given})\n"
    no_weights = "weights=None, weights_backbone=None"
    made = {f"torchvision.models.detection.{name}({no_weights})": "[torch.ones(3, 9, 9)]" for name in BUILDERS}
    made |= {f"timm.create_model('{name}')": "torch.ones(1, 3, 9, 9)" for name in HYBRIDS}
    assert len(made) > 30
    with torchvision_works():
        import timm  # type: ignore[import-untyped]  # noqa: F401  # once, not in each script

        for number, (make, given) in enumerate(made.items()):
            text = f"import {make.partition('.')[0]}\n" + lines.format(make=make, given=given)
            path = write(text.replace("import torchvision", "import torchvision.models.detection"), f"build{number}.py")
            script = run_script(path)
            assert script.ran.call is not None
            assert script.ran.call.model is script.module.net, make
            assert script.ran.call.line == f"{path.name}:6"


@pytest.mark.slow
def test_a_detector_in_a_file_that_defines_it(here: Path, write: Write) -> None:
    made = "ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None).eval()"
    text = (
        f"import torch\nfrom torchvision.models.detection import *\nmodel = {made}\ninputs = ([torch.rand(3, 32, 32)],)"
    )
    target = load_target(str(write(text, "detector.py")))
    assert (type(target.model).__name__, target.model.training) == ("SSD", False)


# -- Files that define their model and inputs are loaded to their end

FILES = {
    "a dry run": "model = Net()\nmodel(torch.zeros(1, 3))\nmodel.eval()\ninputs = torch.ones(7, 3)",
    "a call after both": "model, inputs = Net(), torch.ones(7, 3)\nprint(model(inputs))\nmodel.eval()",
    "functions": "net = Net()\nnet(torch.zeros(1, 3))\ndef model(): return net.eval()\n"
    "def inputs(): return torch.ones(7, 3)",
    "a few steps of training": "model, inputs = Net(), torch.ones(7, 3)\nfor _ in range(3):\n"
    "    model(inputs).sum().backward()\nmodel.eval()",
    "an exit": "model, inputs = Net().eval(), torch.ones(7, 3)\nmodel(torch.zeros(1, 3))\nraise SystemExit",
    "imports": "from parts_of_it import model, inputs\nmodel(torch.zeros(1, 3))\nmodel.eval()",
    "other weights": "model, inputs = Net().eval(), torch.ones(7, 3)\nmodel(inputs)\nmodel.train()\n"
    "with torch.no_grad():\n    nn.init.ones_(model.linear.bias)\n    model(inputs)\n"
    "    model.linear.weight.zero_()\nmodel(inputs)\nmodel.eval()",
    "either of two": "if torch.cuda.is_available():\n    model = Net()\nelse:\n    model = Net()\n"
    "model(torch.zeros(1, 3))\nmodel.eval()\ninputs = torch.ones(7, 3)",
    "a cast in place": "model, inputs = Net().eval(), torch.ones(7, 3)\nout = model(inputs)\nmodel = model.half()\n"
    "inputs = inputs.half()",
    "a trace": "model, inputs = Net().eval(), torch.ones(7, 3)\nout = model(inputs)\n"
    "model = torch.jit.trace(model, inputs)\nmodel.save('x.pt')",
    "a long loop": "model, inputs = Net().eval(), torch.ones(7, 3)\nwhile True:\n    model(inputs)",
    "training": "model, inputs = Net().eval(), torch.ones(7, 3)\nfor epoch in range(10**9):\n"
    "    loss = model(inputs).sum()\n    loss.backward()",
    "a condition": "if True:\n    model = Net()\n    model(torch.zeros(1, 3))\n    inputs = torch.ones(7, 3)\n"
    "model.eval()",
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_defines_its_model_and_inputs_is_loaded_to_its_end(here: Path, write: Write, case: str) -> None:
    write(NET + "model, inputs = Net(), torch.ones(7, 3)", "parts_of_it.py")
    write(NET + FILES[case], "model.py")
    for spec in ("model.py", "model.py:model"):
        target = load_target(spec)
        assert (type(target.model).__name__, target.args[0].shape) == ("Net", (7, 3))
        assert not target.model.training


@pytest.mark.parametrize(
    "case",
    [
        name
        for name in FILES
        if "training" not in name and name not in ("an exit", "a trace", "a cast in place", "a long loop")
    ],
)
def test_a_file_with_a_dry_run_is_trained_as_it_defines(here: Path, write: Write, case: str) -> None:
    write(NET + "model, inputs = Net(), torch.ones(7, 3)", "parts_of_it.py")
    write(NET + FILES[case] + "\ndef loss(output): return output.sum()", "model.py")
    target = load_target("model.py", steps=2)
    assert (type(target.model).__name__, target.args[0].shape, target.observed) == ("Net", (7, 3), None)
    assert target.loss is not None
    assert not target.notes or not any("was run up to" in note for note in target.notes)


def test_a_file_that_runs_on_after_it_has_defined_its_model(
    here: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_script, "SECONDS", 0.5)
    text = "import time\nmodel, inputs = Net(), torch.ones(7, 3)\nmodel(inputs)\ntime.sleep(600)\nmodel.eval()"
    target = load_target(str(write(NET + text, "model.py")))
    assert target.args[0].shape == (7, 3)
    assert any("had defined its model and inputs, while it still ran" in note for note in target.notes)
    target = load_target(str(write(PARTS + "net = build_and_try()\nimport time\ntime.sleep(600)", "serve.py")))
    assert target.args[0].shape == (1, 3, 8, 8)


def test_a_model_that_is_defined_only_sometimes(here: Path, write: Write) -> None:
    text = (
        "model = Net()\nif model is None:\n    inputs = torch.ones(7, 3)\nfor x in [torch.ones(5, 3)]:\n"
        "    model(x).sum().backward()\nassert 0"
    )
    assert load_target(str(write(NET + text, "model.py"))).args[0].shape == (5, 3)
    text = "model = Net()\nfor x in [torch.ones(5, 3)]:\n    model(x).sum().backward()\nassert 0"
    assert load_target(str(write(NET + text, "shapes.py")), ("2x3",)).args[0].shape == (2, 3)


def test_a_name_that_was_asked_for(here: Path, write: Write) -> None:
    write(NET + "net = Net()\nnet(torch.zeros(1, 3))\nother = Net().eval()\ninputs = torch.ones(7, 3)", "model.py")
    target = load_target("model.py:other")
    assert (target.model.training, target.args[0].shape) == (False, (7, 3))
    assert load_target("model.py:other", ("2x3",)).args[0].shape == (2, 3)


def test_a_file_that_fails_after_a_dry_run(here: Path, write: Write) -> None:
    write(
        NET + "model, inputs = Net(), torch.ones(7, 3)\nmodel(inputs)\nif inputs.any(): raise OSError('no weights')\n"
        "model.eval()",
        "model.py",
    )
    with pytest.raises(UsageError, match=r"OSError at model\.py:12: no weights"):
        load_target("model.py")


def test_the_first_line_of_the_screen(here: Path, write: Write, call: Call) -> None:
    path, saved = write(PARTS + "model = build()\nmodel(loader[0])", "infer.py"), here / "scan.json"
    done = call("scan", str(path), "-p", "bf16", "--times", "off", "--json", str(saved))
    assert done.returncode == 0, done.stderr
    first = " ".join(done.stdout.split())
    assert re.match(
        r"Full \(called at \S*infer\.py:56, the first call of a model in the script; "
        r"the call at \S*infer\.py:24 is of a part of Full\) · 122 parameters · input \(5, 3, 8, 8\) · torch ",
        first,
    )
    assert ScanResult.load(saved).model.taken.endswith("is of a part of Full")


def test_a_probe_in_the_source_of_a_lambda_or_a_string(here: Path, write: Write) -> None:
    text = "enc = Enc()\n(lambda: enc(probe))()\nexec('enc(probe)')\nmodel = Full(enc)\nmodel(loader[0])"
    assert type(load_target(str(write(PARTS + text, "infer.py"))).model).__name__ == "Full"
