"""Training scripts as people write them, 300 steps in seconds: a loop or a Lightning module, with its task.

:data:`SCRIPTS` has each by name. Comments mark lines: ``# forward`` to ``# end`` compute the loss, at ``# optimizer``
the model is complete, ``# clip`` is before gradients are clipped. :func:`rewritten` rewrites a script for a precision.
"""

from __future__ import annotations

import math
import re
import textwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

START = """\
import argparse
import json
import os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
fixed = torch.Generator().manual_seed(9)
"""


class Task(NamedTuple):
    """What a script trains."""

    data: str
    """Defines ``make_data()``, ``make_model()`` and perhaps ``criterion``."""
    forward: str
    """Computes ``loss`` from ``model`` and ``batch``."""


TASKS = {
    "classifier": Task(
        """
TEACHER = torch.randn(20, 5, generator=fixed)
def make_data():
    x = torch.randn(1024, 20)
    return TensorDataset(x, (x @ TEACHER).argmax(1))
def make_model():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
criterion = nn.CrossEntropyLoss()
""",
        "x, y = batch\noutput = model(x)\nloss = criterion(output, y)",
    ),
    "images": Task(
        """
class Images(Dataset):
    def __init__(self):
        self.labels = torch.arange(512) % 4
        self.images = torch.randn(512, 3, 8, 8) + self.labels[:, None, None, None] / 2
    def __len__(self): return len(self.labels)
    def __getitem__(self, index): return self.images[index], int(self.labels[index])
def make_data(): return Images()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 4)
    def forward(self, x): return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))
def make_model(): return Net()
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
""",
        "images, labels = batch\nloss = criterion(model(images), labels)",
    ),
    "language-model": Task(
        """
def make_data():
    starts, strides = torch.randint(0, 32, (512, 1)), torch.randint(1, 4, (512, 1))
    return TensorDataset((starts + strides * torch.arange(16)) % 32)
class LanguageModel(nn.Module):
    def __init__(self, vocabulary=32, width=32, length=16):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)
    def forward(self, ids):
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        return self.head(self.block(hidden, src_mask=mask))
def make_model(): return LanguageModel()
""",
        "ids = batch[0]\nlogits = model(ids[:, :-1])\n"
        "loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())",
    ),
}

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(PARAMETERS, lr=0.05)",
    "momentum": "torch.optim.SGD(PARAMETERS, lr=0.02, momentum=0.9, weight_decay=1e-4)",
    "adam": "torch.optim.Adam(PARAMETERS, lr=5e-3)",
    "adamw": "torch.optim.AdamW(PARAMETERS, lr=3e-3, weight_decay=0.01)",
    "groups": 'torch.optim.AdamW([{"params": [p for p in PARAMETERS if p.ndim > 1], "weight_decay": 0.1}, '
    '{"params": [p for p in PARAMETERS if p.ndim <= 1], "weight_decay": 0.0}], lr=3e-3)',
}

STYLES = {
    "flat": """
loader = DataLoader(make_data(), batch_size=32, shuffle=True)
model = make_model()
# optimizer
optimizer = OPTIMIZER
for epoch in range(1000):
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        # forward
        FORWARD
        # end
        loss.backward()
        optimizer.step()
        print(epoch, step, file=open("steps.log", "a"))
        if step % 3 == 0:
            torch.save(model.state_dict(), "ckpt.pt")
""",
    "main": """
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--log", default="log.csv")
    args = parser.parse_args()
    loader = DataLoader(make_data(), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = make_model()
    # optimizer
    optimizer = OPTIMIZER
    with open(args.log, "w") as log:
        for epoch in range(args.epochs):
            total = 0.0
            for batch in loader:
                # forward
                FORWARD
                # end
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                print(epoch, file=open("steps.log", "a"))
                total += loss.item()
            print(epoch, total / len(loader), sep=",", file=log)
    os.remove("ckpt.pt")

if __name__ == "__main__":
    main()
""",
    "clipped": """
def train(model, loader, optimizer, scheduler):
    for epoch in range(1000):
        for batch in loader:
            optimizer.zero_grad()
            # forward
            FORWARD
            # end
            loss.backward()
            # clip
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            with open("steps.log", "a") as log:
                log.write(json.dumps({"loss": loss.item(), "norm": norm.item(), "lr": scheduler.get_last_lr()}) + "\\n")

if __name__ == "__main__":
    model = make_model()
    # optimizer
    optimizer = OPTIMIZER
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    train(model, DataLoader(make_data(), batch_size=32, shuffle=True), optimizer, scheduler)
""",
    "accumulated": """
ACCUMULATE = 4
model, loader = make_model(), DataLoader(make_data(), batch_size=8, shuffle=True)
# optimizer
optimizer = OPTIMIZER
for epoch in range(1000):
    for number, batch in enumerate(loader, 1):
        # forward
        FORWARD
        loss = loss / ACCUMULATE
        # end
        loss.backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(number, file=open("steps.log", "a"))
""",
    "lightning": """
import lightning as L
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()
    def training_step(self, batch, batch_idx):
        model = self.model
        # forward
        FORWARD
        # end
        self.log("train_loss", loss)
        return loss
    def configure_optimizers(self):
        model = self.model
        return OPTIMIZER

if __name__ == "__main__":
    L.seed_everything(0)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=1000, accelerator="cpu", devices=1, **quiet, MORE)
    trainer.fit(Module(), DataLoader(make_data(), batch_size=32, shuffle=True))
""",
}


def _script(style: str, task: str, optimizer: str, more: str = "") -> str:
    found = TASKS[task]
    text = START + found.data + STYLES[style]
    text = re.sub(r"^( *)FORWARD$", lambda match: textwrap.indent(found.forward, match[1]), text, flags=re.MULTILINE)
    text = text.replace("OPTIMIZER", OPTIMIZERS[optimizer]).replace("MORE", more)
    return text.replace("PARAMETERS", "model.parameters()")


_DTYPES = {"bf16": "torch.bfloat16", "bfloat16": "torch.bfloat16", "fp16": "torch.half", "half": "torch.half"}


def rewritten(text: str, precision: str, scale: float | None = None) -> str:
    """The script for ``precision``: its framework's switch, else autocast around the lines of the loss, or casts.

    ``scale`` is the initial scale of a ``GradScaler``, which needs a loop of the script's own.
    """
    kind, _, short = precision.partition("-")
    dtype = _DTYPES.get(short or kind)
    if dtype is None:
        return text
    if kind == "autocast":
        if "L.Trainer(" in text and short == "bf16":
            return text.replace("L.Trainer(", 'L.Trainer(precision="bf16-mixed", ')
        text = re.sub(r"( *)# forward\n(.*?)\n *# end\n", lambda match: _autocast(match, dtype), text, flags=re.DOTALL)
    elif "L.Trainer(" in text:
        return text.replace("L.Trainer(", f'L.Trainer(precision="{"16" if kind == "half" else "bf16"}-true", ')
    else:
        text = re.sub(r"( *)# optimizer\n", rf"\1model.to({dtype})\n", text)
        low = f"batch = [t.to({dtype}) if t.is_floating_point() else t for t in batch]"
        text = re.sub(r"( *)# forward\n", rf"\1{low}\n\1# forward\n", text)
        text = re.sub(r"^(criterion = .*)$", rf"\1.to({dtype})", text, flags=re.MULTILINE)
    if scale is not None:
        text = text.replace("\nfixed =", f'\nscaler = torch.amp.GradScaler("cpu", init_scale={scale})\nfixed =')
        text = text.replace("loss.backward()", "scaler.scale(loss).backward()")
        text = text.replace("# clip\n", "scaler.unscale_(optimizer)\n")
        text = re.sub(r"( *)(optimizer)\.step\(\)", r"\1scaler.step(\2)\n\1scaler.update()", text)
    return text


def _autocast(match: re.Match[str], dtype: str) -> str:
    indent, lines = match[1], textwrap.indent(match[2], "    ")
    return f'{indent}with torch.autocast("cpu", dtype={dtype}):\n{lines}\n'


_QUIET = "logger=False, enable_checkpointing=False"

SCRIPTS: dict[str, str] = {
    f"script {style}/{task}/{optimizer}": _script(style, task, optimizer, _QUIET)
    for style, task, optimizer in (
        ("flat", "classifier", "sgd"),
        ("main", "images", "momentum"),
        ("clipped", "language-model", "adamw"),
        ("accumulated", "classifier", "momentum"),
        ("accumulated", "language-model", "groups"),
        ("lightning", "classifier", "sgd"),
        ("lightning", "language-model", "groups"),
        ("flat", "images", "adam"),
        ("clipped", "images", "momentum"),
    )
}
WRITTEN_FOR: dict[str, tuple[str, float | None]] = {
    "script flat/images/adam": ("autocast-bf16", None),
    "script clipped/images/momentum": ("autocast-fp16", 1024.0),
}
"""Scripts that are scanned as they are written for a precision, and the initial scale of their ``GradScaler``."""


# -- running one plainly


class Done(BaseException):
    """Raised after the last step that is wanted."""


def train(text: str, steps: int, draws: bool) -> tuple[list[float], list[Tensor]]:  # noqa: C901 - hooks in one place
    """Run a script for ``steps`` of all its optimizers: the loss of each step, and the first and last parameters.

    Losses of several ``backward()`` for a step are added up. With ``draws``, each step has the seed that a scan gives
    it. The run ends early after a loss that is not finite.
    """
    losses, pending, weights, found = list[float](), list[Tensor](), list[Tensor](), list[torch.optim.Optimizer]()
    several = max(1, len(re.findall(r"torch\.optim\.[A-Z]", text)))
    made: set[torch.optim.Optimizer] = set()
    unscaled: dict[int, Tensor] = {}
    kept_backward, kept_scale, kept_call = torch.autograd.backward, torch.amp.GradScaler.scale, nn.Module.__call__

    def copies(of: list[torch.optim.Optimizer]) -> list[Tensor]:
        return [p.detach().double().clone() for one in of for group in one.param_groups for p in group["params"]]

    def scale(scaler: Any, loss: Any) -> Any:
        scaled = kept_scale(scaler, loss)
        unscaled[id(scaled)] = loss
        return scaled

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        pending.append(unscaled.pop(id(tensors), tensors).detach().clone())
        kept_backward(tensors, *args, **kwargs)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            draws
            and not pending
            and torch.is_grad_enabled()
            and next(module.parameters(), None) is not None
            and not inside
        ):
            torch.manual_seed(1_000_003 * len(losses))
        inside.append(module)
        try:
            return kept_call(module, *args, **kwargs)
        finally:
            inside.pop()

    inside: list[nn.Module] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer not in found:
            found.append(optimizer)
            weights.extend(copies([optimizer]))

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        made.add(optimizer)
        if not pending or len(made) < several:
            return
        losses.append(float(sum(pending[1:], pending[0].float() if several > 1 else pending[0])))
        pending.clear()
        made.clear()
        if len(losses) == steps or not math.isfinite(losses[-1]):
            raise Done

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    torch.autograd.backward, torch.amp.GradScaler.scale, nn.Module.__call__ = backward, scale, call  # type: ignore[assignment, method-assign]
    try:
        exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
    except Done:
        pass
    finally:
        torch.autograd.backward, torch.amp.GradScaler.scale, nn.Module.__call__ = kept_backward, kept_scale, kept_call  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return losses, [*weights, *copies(found)]
