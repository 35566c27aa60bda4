"""Training of a small language model: lowprec-check scan examples/train_language_model.py --train --steps 8.

Fine-tuning has small updates: with a learning rate of 1e-5, bf16 weights lose nearly all of them. The average of the
weights, with a decay of 0.999, loses even more.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

VOCABULARY, WIDTH, LENGTH = 256, 128, 64


class Block(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class LanguageModel(nn.Module):
    """Two blocks; the head shares the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def optimizer(parameters) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices only."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-5)


def average(model: nn.Module) -> AveragedModel:
    """An exponential moving average of the weights."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))


def inputs(batch: int = 0) -> Tensor:
    """Sequences that count up by a step of their own."""
    generator = torch.Generator().manual_seed(batch)
    start, stride = torch.randint(0, VOCABULARY, (2, 8, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH)) % VOCABULARY


torch.manual_seed(0)
model = LanguageModel()
