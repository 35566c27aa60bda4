"""Models of :mod:`saved_results`, each a file that a user could scan."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

EXAMPLES = ("whitening", "t5_feed_forward", "masked_attention", "fourier_mixer", "spade_decoder")

IMAGES = {
    "resnet18": 224,
    "mobilenet_v3_small": 224,
    "squeezenet1_1": 224,
    "swin_t": 64,
}
"""torchvision's classifiers, with the side of their images."""

OTHERS = (
    "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn",
    "timm:convnext_atto",
    "timm:gmlp_ti16_224",
    "timm:visformer_tiny",
    "timm:vit_tiny_patch16_224",
    "transformers:bert",
    "transformers:bigbird",
    "transformers:dpt",
    "transformers:fnet",
    "transformers:gpt2",
    "transformers:gpt2 (keeps its cache in fp32)",
    "transformers:llama (top 5 tokens)",
    "transformers:nystromformer",
    "transformers:t5",
)
"""Of benchmarks/verdict_breadth.py: images of 64 × 64, sequences of 32 tokens."""

_IMAGES = '''\
"""torchvision's {name} on one image."""

import torch

from lowprec_check.engine.model.zoo import import_torchvision

models = import_torchvision().models


def model():
    torch.manual_seed(0)
    return models.get_model({name!r}, weights=None).eval()


def inputs():
    return torch.randn(1, 3, {side}, {side}, generator=torch.Generator().manual_seed(1))
'''

_OTHERS = '''\
"""{name} of benchmarks/verdict_breadth.py."""

import sys

sys.path.insert(0, {folder!r})
from verdict_breadth import cases

case = next(case for case in cases([{name!r}])[0] if case.name == {name!r})


def model():
    return case.build()[0]


def inputs():
    return case.build()[1]
'''


class PageCase(NamedTuple):
    """A model in a file that defines ``model()`` and ``inputs``."""

    name: str
    text: str

    def path(self, folder: Path) -> Path:
        """The file, which is written if it is not there."""
        path = folder / f"{''.join(char if char.isalnum() else '_' for char in self.name)}.py"
        if not path.exists() or path.read_text(encoding="utf-8") != self.text:
            path.write_text(self.text, encoding="utf-8")
        return path


def page_cases() -> list[PageCase]:
    """All models."""
    here = Path(__file__).parent
    examples = [
        PageCase(f"examples/{name}.py", (here.parent / f"examples/{name}.py").read_text(encoding="utf-8"))
        for name in EXAMPLES
    ]
    images = [
        PageCase(f"torchvision:{name} ({side})", _IMAGES.format(name=name, side=side)) for name, side in IMAGES.items()
    ]
    others = [PageCase(name, _OTHERS.format(name=name, folder=str(here))) for name in OTHERS]
    return examples + images + others
