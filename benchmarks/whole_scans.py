"""Whole scans, as a user waits for them: seconds to the first row and to the end, and where they go.

    python benchmarks/whole_scans.py --rounds 5 --minutes 25 --output whole-scans
    python benchmarks/whole_scans.py --device cuda --cases mlp,bert
    python benchmarks/whole_scans.py --cases mlp,resnet50 --checkouts ../old,.   # two checkouts in turns

Each scan is the command ``lowprec-check scan`` in a process of its own, and a figure is the median of the rounds; the
cases are gone through once a round, and what is known after ``--minutes`` is printed. The cost that cannot be avoided
is measured beside each: ``bare`` is a process that imports torch, loads the model and calls it once in fp32; ``calls``
one that calls it five times in fp32 and in each precision that the hardware accelerates, or makes a step of a training
by hand in each. ``ratio`` is the end of the scan over ``calls``, ``to bare`` over ``bare``. ``processor`` is the
processor time of the command and all its processes, which other programs change less; for the cases of ``START`` it is
relative to ``import typer, rich``. ``cause`` is when the terminal, which each scan has, first shows why a run fails: a
sentence with op, module and source line; ``cause to bare`` is that over ``bare``.
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import pty
import re
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from shared import ROOT, head, made, parser_of, save
from tabulate import tabulate

from lowprec_check.schema.statements import module_name, short_op

MLP = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.LayerNorm(256), nn.Linear(256, 10)).eval()
inputs = torch.randn(32, 64)
"""
BERT = """
import torch
from transformers import BertConfig, BertModel

torch.manual_seed(0)
model = BertModel(BertConfig()).eval()
inputs = {"input_ids": torch.randint(0, 30000, (1, 128))}
"""
UNET = """
import torch
from diffusers import UNet2DConditionModel

torch.manual_seed(0)
model = UNet2DConditionModel(cross_attention_dim=768).eval()
inputs = {
    "sample": torch.randn(1, 4, 64, 64),
    "timestep": torch.tensor(500),
    "encoder_hidden_states": torch.randn(1, 77, 768),
    "return_dict": False,
}
"""
T5 = """
import torch
from transformers import T5Config, T5EncoderModel

torch.manual_seed(0)
model = T5EncoderModel(T5Config(d_model=512, d_ff=2048, num_layers=4, num_heads=8)).eval()
with torch.no_grad():
    model.encoder.block[2].layer[1].DenseReluDense.wo.weight.mul_(1e5)  # as trained ones, it overflows in fp16
inputs = {"input_ids": torch.randint(0, 30000, (1, 128))}
"""
SMALL_UNET = """
import torch
from diffusers import UNet2DConditionModel

torch.manual_seed(0)
sizes = {"block_out_channels": (64, 128, 256, 256), "layers_per_block": 1}
model = UNet2DConditionModel(cross_attention_dim=768, **sizes).eval()
with torch.no_grad():
    model.mid_block.resnets[0].conv2.weight.mul_(1e6)  # as in the VAE of SDXL, it overflows in fp16
inputs = {
    "sample": torch.randn(1, 4, 64, 64),
    "timestep": torch.tensor(500),
    "encoder_hidden_states": torch.randn(1, 77, 768),
    "return_dict": False,
}
"""
MNIST = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout2(F.relu(self.fc1(torch.flatten(self.dropout1(x), 1))))
        return F.log_softmax(self.fc2(x), dim=1)

torch.manual_seed(1)
batch = lambda: (torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)))
loss_of, optimizer_of = F.nll_loss, lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0)
"""
NANOGPT = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, size=384, heads=6):
        super().__init__()
        self.heads, self.ln_1, self.ln_2 = heads, nn.LayerNorm(size), nn.LayerNorm(size)
        self.c_attn, self.c_proj = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size), nn.Dropout(0.2))

    def forward(self, x):
        parts = self.c_attn(self.ln_1(x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))

class Net(nn.Module):
    def __init__(self, vocabulary=65, size=384, layers=3):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(vocabulary, size), nn.Embedding(256, size), nn.Dropout(0.2)
        self.h, self.ln_f = nn.Sequential(*(Block() for _ in range(layers))), nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        return self.lm_head(self.ln_f(self.h(x)))

torch.manual_seed(1337)
batch = lambda: (torch.randint(0, 65, (16, 256)), torch.randint(0, 65, (16, 256)))
loss_of = lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten())
optimizer_of = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
"""
LOOP = """
model = Net()
optimizer = optimizer_of(model)
for number in range(200):
    data, target = batch()
    optimizer.zero_grad()
    loss = loss_of(model(data), target)
    loss.backward()
    optimizer.step()
"""
"""What follows in a script of training."""
BY_HAND = """
import sys
device = sys.argv[2]
rows = [(low, autocast) for low in (torch.bfloat16, torch.half) for autocast in (True, False)]
for dtype, autocast in [(torch.float32, False), *rows]:
    model = Net().to(device).to(torch.float32 if autocast else dtype)
    optimizer = optimizer_of(model)
    data, target = (tensor.to(device) for tensor in batch())
    data = data.to(dtype) if data.is_floating_point() and not autocast else data
    with torch.autocast(device, dtype=dtype if autocast else torch.bfloat16, enabled=autocast):
        loss = loss_of(model(data), target)
    loss.backward()
    optimizer.step()
getattr(torch, device).synchronize()
"""
"""What follows in a process that makes the same steps: one in each precision."""


class Case(NamedTuple):
    """A scan."""

    target: str
    """As on the command line; from the checkout of this benchmark, or the text of a file."""
    options: tuple[str, ...] = ()
    by_hand: str = ""
    """What is run to compare with, in place of the calls of a model: a text."""


CASES = {
    "mlp": Case(MLP),
    "resnet50": Case("torchvision:resnet50", ("--inputs", "1x3x224x224")),
    "resnet50-b32": Case("torchvision:resnet50", ("--inputs", "32x3x224x224")),
    "bert": Case(BERT),
    "unet": Case(UNET, ("-p", "half,bfloat16,autocast-bf16")),
    "detector": Case("torchvision:fasterrcnn_resnet50_fpn"),
    "readme": Case("examples/speaker.py"),
    "whitening": Case("examples/whitening.py"),
    "spade": Case("examples/spade_decoder.py"),
    "spade-fails": Case("examples/spade_decoder.py", ("--without-kernel", "aten.dot:half")),
    "t5": Case(T5, ("-p", "half")),
    "unet-fails": Case(SMALL_UNET, ("-p", "half")),
    "compilers": Case(
        "torchvision:resnet50",
        ("--inputs", "8x3x224x224", "--backend", "eager,inductor", "-p", "bfloat16,autocast-bf16"),
    ),
    "mnist": Case(MNIST + LOOP, ("--train", "--steps", "1"), MNIST + BY_HAND),
    "nanogpt": Case(NANOGPT + LOOP, ("--train", "--steps", "1"), NANOGPT + BY_HAND),
}
START = {"--help": ("--help",), "op dot": ("op", "dot")}
"""Commands whose processor time is compared with that of the imports of two libraries."""
LIBRARIES = "import typer, rich"  # what it was made of when first measured; transformers installs both

WATCHED = """
import json, os, sys, time
started, path = float(sys.argv[1]), sys.argv[2]
found = {"events": [], "rows": []}
now = lambda: round(time.monotonic() - started, 3)

from lowprec_check.cli.progress import Progress
step, done = Progress.step, Progress.done

def watched_step(self, run, doing):
    found["events"].append([now(), run, doing])
    step(self, run, doing)

def watched_done(self, result, *more):
    found["rows"].append([now(), len(result.runs)])
    done(self, result, *more)

def watched_judged(self, result):
    found["rows"].append([now(), len(result.runs)])
    judged(self, result)

Progress.step, Progress.done = watched_step, watched_done
judged = getattr(Progress, "judged", None)
if judged is not None:  # an earlier version has none
    Progress.judged = watched_judged
sys.argv = ["lowprec-check", *sys.argv[3:]]
from lowprec_check.__main__ import main
parent = os.getpid()
try:
    main()
finally:
    if os.getpid() == parent:
        with open(path, "w") as file:
            json.dump(found, file)
"""
"""A process that is the command, and notes when it shows progress and rows."""

PLAIN = """
import sys
from lowprec_check.engine.model.target_source import load_spec
from lowprec_check.engine.model.target_spec import TargetSpec
import torch

_, name, device, calls, *inputs = sys.argv
target = load_spec(TargetSpec(name, tuple(inputs)), 0)
move = lambda value: value.to(device) if isinstance(value, torch.Tensor) else value
args, kwargs = torch.utils._pytree.tree_map(move, (target.args, target.kwargs))
model = target.model.to(device)
wait = getattr(torch, device).synchronize

def call(model, dtype, autocast):
    casts = lambda value: isinstance(value, torch.Tensor) and value.is_floating_point() and not autocast
    cast = lambda value: value.to(dtype) if casts(value) else value
    given, named = torch.utils._pytree.tree_map(cast, (args, kwargs))
    with torch.no_grad(), torch.autocast(device, dtype=dtype if autocast else torch.bfloat16, enabled=autocast):
        model(*given, **named)
    wait()

def accelerated(kind):
    return device != "cpu" or getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported", bool)()

rows = [(torch.float32, False)]
if calls != "1":
    rows += [(torch.bfloat16, True), (torch.bfloat16, False)] * accelerated("bf16")
    rows += [(torch.float16, True), (torch.float16, False)] * accelerated("fp16")
for dtype, autocast in rows:
    model.float() if autocast else model.to(dtype)
    try:
        for _ in range(int(calls)):
            call(model, dtype, autocast)
    except Exception:
        pass
"""


SCREEN = (50, 120)
"""Lines and columns of the terminal of a scan."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What moves the cursor, or sets a colour."""
FRAME, SENTENCE = 10_000, 300
"""Characters that a live display sends at once, at most, and of a finding on it."""
FAILED = ("error", "crashed", "nonfinite", "inaccurate", "timeout")


def main() -> None:
    """Go through the cases once a round, until the time is over, and print their medians."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", default=",".join([*CASES, *START]), help="with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a scan is ended")
    parser.add_argument("--minutes", type=float, default=600.0, help="after which nothing more is begun")
    parser.add_argument("--checkouts", default=str(ROOT), help="folders of checkouts that are compared, with commas")
    given = parser.parse_args()
    checkouts = [Path(folder).resolve() for folder in given.checkouts.split(",")]
    end = time.monotonic() + 60 * given.minutes
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for name in given.cases.split(","):
                # What runs first has the caches cold.
                for checkout in checkouts if number % 2 == 0 else checkouts[::-1]:
                    left = end - time.monotonic()
                    if left <= 0 or name in problems:
                        continue
                    try:
                        figures = figures_of(name, checkout, Path(folder), given.device, min(given.limit, left))
                    except (subprocess.SubprocessError, OSError, KeyError, ValueError, IndexError) as error:
                        problems[name] = f"{type(error).__name__}: {str(error)[-300:]}"
                        print(f"{name}: {problems[name]}", file=sys.stderr, flush=True)
                        continue
                    measured.setdefault((name, checkout.name), []).append(figures)
                    shown = {key: value for key, value in figures.items() if key not in ("steps", "status")}
                    print(f"round {number + 1} {name} {checkout.name}: {shown}", file=sys.stderr, flush=True)
    results = [medians(name, checkout, rounds) for (name, checkout), rounds in measured.items()]
    save(given.output, {"made": made(given.device), "results": results, "problems": problems}, render)


def figures_of(name: str, checkout: Path, folder: Path, device: str, limit: float) -> dict[str, Any]:
    """The figures of one scan with the code of ``checkout``, and of what it is compared with."""
    if name in START:
        libraries = processor_seconds([sys.executable, "-c", LIBRARIES], checkout)
        own = processor_seconds([sys.executable, "-m", "lowprec_check", "--no-settings", *START[name]], checkout)
        return {"bare": libraries, "processor": own, "to bare": own / libraries}
    case = CASES[name]
    target, options = case.target, case.options
    if "\n" in target:
        path = folder / f"{name}.py"
        path.write_text(target, encoding="utf-8")
        target = str(path)
    elif target.endswith(".py"):
        target = str(ROOT / target)
    shapes = options[1:2] if options[:1] == ("--inputs",) else ()
    figures = {}
    if case.by_hand:
        figures["calls"] = plain_seconds([case.by_hand, target, device], limit)
    else:
        figures["bare"] = plain_seconds([PLAIN, target, device, "1", *shapes], limit)
        figures["calls"] = plain_seconds([PLAIN, target, device, "5", *shapes], limit)
    command = ["scan", target, *options, "--device", device, "--fail-on", "never"]
    figures |= scanned(checkout, command, folder, limit)
    figures["ratio"] = figures["end"] / figures["calls"]
    if "bare" in figures:
        figures["to bare"] = figures["end"] / figures["bare"]
    if "bare" in figures and figures["cause"] is not None:
        figures["cause to bare"] = figures["cause"] / figures["bare"]
    return figures


def medians(name: str, checkout: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of figures over ``rounds``, with the status and steps of the last."""
    result: dict[str, Any] = {"case": name, "checkout": checkout, "rounds": len(rounds)}
    for key, value in rounds[-1].items():
        values = [figures[key] for figures in rounds if isinstance(figures.get(key), (int, float))]
        result[key] = round(statistics.median(values), 2) if values else value
    return result


def plain_seconds(arguments: list[str], limit: float) -> float:
    """Seconds of a program: its text, then its arguments."""
    started = time.monotonic()
    command = [sys.executable, "-c", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    nowhere = subprocess.DEVNULL
    subprocess.run(command, cwd=ROOT, env=environment, stdout=nowhere, stderr=nowhere, check=True, timeout=limit)
    return time.monotonic() - started


def processor_seconds(command: list[str], checkout: Path) -> float:
    """The least processor time of five calls of a command, since the clock has steps of some milliseconds."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), *sys.path[1:]])}
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def scanned(checkout: Path, command: list[str], folder: Path, limit: float) -> dict[str, Any]:
    """What one scan with the code of ``checkout`` took, in seconds."""
    events, saved = folder / "events.json", folder / "scan.json"
    for path in (events, saved):
        path.unlink(missing_ok=True)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    watched = [sys.executable, "-c", WATCHED, str(started), str(events), "--no-settings", *command]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), *sys.path[1:]]), "TERM": "xterm"}
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", *SCREEN, 0, 0))
    scan = subprocess.Popen(
        [*watched, "--json", str(saved)], cwd=checkout, env=environment, stdout=its_end, stderr=its_end
    )
    os.close(its_end)
    screen: list[tuple[float, str]] = []
    reader = threading.Thread(target=read_screen, args=(terminal, started, screen))
    reader.start()
    try:
        scan.wait(limit)
    except subprocess.TimeoutExpired:
        scan.send_signal(2)  # it saves what is known
        try:
            scan.wait(30)
        except subprocess.TimeoutExpired:
            scan.kill()
            scan.wait()
    end, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    reader.join()
    os.close(terminal)
    if not saved.exists() or not events.exists():
        raise ValueError(f"exit code {scan.returncode}: {''.join(text for _, text in screen)}")
    seen, result = json.loads(events.read_bytes()), json.loads(saved.read_bytes())
    rows = seen["rows"]
    return {
        "start": rows[0][0],
        "first row": next((at for at, count in rows if count > 1), end),
        "cause": cause_shown(screen, result),
        "rows": next((at for at, count in rows if count == rows[-1][1]), end),
        "end": end,
        "processor": (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        "status": {run["precision"]: run["status"] for run in result["runs"]},
        "steps": steps(seen["events"], end),
    }


def read_screen(terminal: int, started: float, screen: list[tuple[float, str]]) -> None:
    """Add what the terminal is sent to ``screen``, each part with its second, until the scan ends."""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # no process has it any more
            return
        if not part:
            return
        text = CONTROL.sub("", part.decode(errors="replace"))
        screen.append((time.monotonic() - started, "".join(text.split())))  # without breaks of lines


def cause_shown(screen: list[tuple[float, str]], result: dict[str, Any]) -> float | None:
    """When ``screen`` first shows why a run of ``result`` fails; ``None`` if none is explained."""
    failed = {run["precision"] for run in result["runs"] if run["status"] in FAILED}
    causes = []
    for finding in result["diagnostics"]:
        is_cause = finding["severity"] == "error" and finding.get("precision") in failed
        if is_cause and finding.get("op") and finding.get("source") and finding.get("module") is not None:
            named = [short_op(finding["op"]), module_name(finding["module"]), finding["source"]]
            causes.append((f"{finding['code']}{finding['name']}", named))
    last = ""
    for at, part in screen:
        last = (last + part)[-FRAME:]
        for lead, named in causes:
            sentence = last[last.rfind(lead) :][:SENTENCE] if lead in last else ""
            if sentence and all(name in sentence for name in named):
                return at
    return None


def steps(events: list[Any], end: float) -> dict[str, float]:
    """Seconds by run and step, the longest first; it starts before the first event and prints after the last."""
    spent: collections.Counter[str] = collections.Counter()
    at, now = 0.0, "start"
    for moment, run, doing in [*events, [end, "", ""]]:
        spent[now] += moment - at
        step = doing.rpartition(" · ")[2]  # without the verdict so far
        at, now = moment, f"{Path(run).name}: {'op by op' if step.startswith('op ') else step.partition(':')[0]}"
        if run == "times":
            now = "times"
        if doing.startswith("trial "):
            now = "plan: trials"
    return {name: round(seconds, 1) for name, seconds in spent.most_common() if seconds >= 0.05}


def render(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    columns = [
        "bare",
        "calls",
        "start",
        "first row",
        "cause",
        "cause to bare",
        "rows",
        "end",
        "processor",
        "ratio",
        "to bare",
        "rounds",
    ]
    several = len({result["checkout"] for result in data["results"]}) > 1
    rows = [
        {"scan": result["case"]}
        | ({"checkout": result["checkout"]} if several else {})
        | {name: result.get(name, "") for name in columns}
        | {"where": ", ".join(f"{step} {seconds}" for step, seconds in list(result.get("steps", {}).items())[:5])}
        for result in data["results"]
    ]
    problems = [f"- {name}: {problem}" for name, problem in data["problems"].items()]
    table = tabulate(rows, "keys", tablefmt="github", disable_numparse=True)
    return "\n".join([*head("Whole scans", data), table, "", *problems, ""])


if __name__ == "__main__":
    main()
