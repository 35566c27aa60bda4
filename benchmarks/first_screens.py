"""Lines and words of the first screen of 12 scans: ``python benchmarks/first_screens.py [--against OLD_CHECKOUT]``.

Each model is scanned in a process of its own, at 100 columns, with each checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared import ROOT, head, made, parser_of, save

TINY = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128"
MODELS = {
    "mlp": (
        "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))",
        "torch.randn(64, 256)",
    ),
    "cnn": (
        "nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3),"
        " nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))",
        "torch.randn(4, 3, 48, 48)",
    ),
    "unet": (
        "UNet()",
        "(torch.randn(1, 4, 24, 24), torch.tensor([998.4]))",
    ),
    "detector": (
        "Detector()",
        "torch.randn(1, 3, 64, 64)",
    ),
    "guard": (
        "Guard()",
        "torch.cat([torch.zeros(1, 16), torch.randn(7, 16)])",
    ),
}
CLASSES = """
class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time, self.into = nn.Linear(2 * width, width), nn.Conv2d(4, width, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, width, 3, 2, 1), nn.ConvTranspose2d(width, width, 2, 2)
        self.norm, self.out = nn.GroupNorm(4, 2 * width), nn.Conv2d(2 * width, 4, 3, padding=1)

    def forward(self, x, timestep):
        angles = timestep[:, None] * torch.exp(-torch.arange(16, device=x.device) / 16 * 9.2)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        first = self.into(x) + time[:, :, None, None]
        return self.out(torch.relu(self.norm(torch.cat([first, self.up(torch.relu(self.down(first)))], 1))))

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x):
        found = self.head(torch.relu(self.body(x))).flatten(2).mT
        scores, boxes = found[..., 0].sigmoid(), found[..., 1:].cumsum(-1)
        best = scores.topk(20).indices
        return torch.gather(boxes, 1, best[..., None].expand(-1, -1, 4))

class Guard(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        y = self.linear(x)
        return y / (y.norm(dim=1, keepdim=True) + 1e-10)
"""

SCANS: dict[str, Sequence[str]] = {
    "healthy small": ("mlp.py",),
    "CNN": ("cnn.py",),
    "BERT": (f"transformers:bert,{TINY}",),
    "UNet": ("unet.py",),
    "detector": ("detector.py",),
    "missing kernels": ("examples/whitening.py",),
    "overflow": ("examples/t5_feed_forward.py",),
    "eps that vanishes": ("guard.py",),
    "random weights": ("torchvision:mobilenet_v3_small", "--inputs", "1x3x64x64"),
    "training": ("--train", "examples/train_classifier.py"),
    "backend": ("mlp.py", "--backend", "eager,onnxruntime", "-p", "half,bfloat16"),
    "prediction": ("examples/whitening.py", "--device", "cuda"),
}


def screen(name: str, folder: Path, checkout: Path) -> str:
    """What ``scan`` prints for one of :data:`SCANS`, with the code of a checkout."""
    arguments = []
    for argument in SCANS[name]:
        arguments.append(str(ROOT / argument) if argument.startswith("examples/") else argument)
    env = os.environ | {"PYTHONPATH": str(checkout), "COLUMNS": "100"}
    command = [sys.executable, "-m", "lowprec_check", "scan", "-q", *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=600, check=False).stdout


def render(data: Mapping[str, Any]) -> str:
    """A row per screen."""
    checkouts = list(data["screens"])
    lines = head("The first screen of 12 scans, at 100 columns", data)
    names = [f"{figure} {checkout}" for figure in ("lines", "words") for checkout in checkouts]
    lines += [f"| scan | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for name in SCANS:
        shown = [data["screens"][checkout][name] for checkout in checkouts]
        counts = [len(text.splitlines()) for text in shown] + [len(text.split()) for text in shown]
        lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Scan with one checkout or with two."""
    parser = parser_of(__doc__)
    parser.add_argument("--against", type=Path, help="an older checkout")
    parser.add_argument("--only", help="comma-separated names of scans")
    parser.add_argument("--screens", type=Path, help="folder for the screens")
    options = parser.parse_args()
    checkouts = {"now": ROOT} if options.against is None else {"before": options.against.resolve(), "now": ROOT}
    screens: dict[str, dict[str, str]] = {name: dict.fromkeys(SCANS, "") for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for file, (model, inputs) in MODELS.items():
            code = f"import torch\nfrom torch import nn\n{CLASSES}\n"
            code += f"def model():\n    torch.manual_seed(0)\n    return {model}.eval()\n\n"
            code += f"def inputs():\n    torch.manual_seed(1)\n    return {inputs}\n"
            (Path(folder) / f"{file}.py").write_text(code, encoding="utf-8")
        for name in options.only.split(",") if options.only else SCANS:
            for checkout, path in checkouts.items():
                screens[checkout][name] = screen(name, Path(folder), path)
                print(f"{name}, {checkout}: {len(screens[checkout][name].splitlines())} lines", file=sys.stderr)
                if options.screens is not None:
                    options.screens.mkdir(parents=True, exist_ok=True)
                    (options.screens / f"{name}-{checkout}.txt").write_text(screens[checkout][name], encoding="utf-8")
    save(options.output, {"made": made(), "screens": screens}, render)


if __name__ == "__main__":
    main()
