"""Generated models: chains of steps drawn by hypothesis, each a module of its own, some with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 8


class Step(nn.Module):
    """One step of a chain, on tensors of shape (batch, WIDTH)."""


class Project(Step):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Residual(Project):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Norm(Step):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class BatchNorm(Step):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class InPlace(Step):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, ::2].mul_(0.5)
        y.view(-1)[1:].add_(0.1)
        return y.relu_()


class OutArgument(Step):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.mul(x, 0.75, out=out)
        return out


class SplitCat(Step):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        return torch.cat([b.sigmoid(), a.t().contiguous().t()], 1)


class Select(Step):
    def forward(self, x: Tensor) -> Tensor:
        values, index = x.sort(dim=1)
        return values + x.gather(1, index) * (x > 0)


class Attend(Step):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


class BufferWrite(Step):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.seen


class Indexed(Step):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.index_put_((torch.arange(len(x)),), x * 2)
        y[0] = x[-1]
        return torch.where(y > 5, y.clamp(max=5), y)


class Recurrent(Step):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[None])[0][0]


STEPS: list[type[Step]] = [
    Project,
    Residual,
    Norm,
    BatchNorm,
    InPlace,
    OutArgument,
    SplitCat,
    Select,
    Attend,
    BufferWrite,
    Indexed,
]


# -- steps whose ops lack 16-bit kernels on the CPU


class Cholesky(Step):
    def forward(self, x: Tensor) -> Tensor:
        gram = x.T @ x / len(x) + 4 * torch.eye(WIDTH, dtype=x.dtype)
        return x + torch.linalg.cholesky(gram).diagonal() * 0.1


class Inverse(Step):
    def forward(self, x: Tensor) -> Tensor:
        gram = x.T @ x / len(x) + 4 * torch.eye(WIDTH, dtype=x.dtype)
        return x @ torch.linalg.inv(gram)


class Distance(Step):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cdist(x, x, p=1.0).mean() * 0.1


class Quantile(Step):
    def forward(self, x: Tensor) -> Tensor:
        return x - torch.quantile(x, 0.5)


class Fourier(Step):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=WIDTH)


class Svd(Step):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + torch.linalg.svdvals(x.T @ x)[0])


GAPS: list[type[Step]] = [Cholesky, Inverse, Distance, Quantile, Fourier, Svd]


# -- planted faults: (step, what must be said of it)


class Overflow(Step):
    """Passes fp16's largest number, and comes back: finite in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x) * 300 + 400) * 1000 * 1e-5


class Underflow(Step):
    """All values below fp16's smallest subnormal number, and back up."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x) + 2) * 1e-9 * 1e9


class LossyCast(Step):
    """Goes through 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e5m2).to(x.dtype)


class Nan(Step):
    """inf − inf, or 0 / 0, in fp16 only: the small number is 0 there."""

    def forward(self, x: Tensor) -> Tensor:
        tiny = (x.abs() + 1) * 1e-8
        return x + tiny / tiny


class Fault(NamedTuple):
    """A planted fault and the rule that must find it."""

    make: type[Step]
    code: str
    precisions: tuple[str, ...]


FAULTS = [
    Fault(Overflow, "LP201", ("half",)),
    Fault(Underflow, "LP202", ("half",)),
    Fault(LossyCast, "LP302", ("half", "bfloat16")),
    Fault(Nan, "LP203", ("half",)),
]


class Chain(nn.Module):
    """Steps in a row."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


def build(kinds: list[type[Step]], *, training: bool = False) -> Chain:
    """A chain with weights from seed 0."""
    torch.manual_seed(0)
    return Chain([kind() for kind in kinds]).train(training)


def inputs(rows: int = 6) -> Tensor:
    """(rows, WIDTH), seeded."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


chains = st.lists(st.sampled_from(STEPS), min_size=1, max_size=6)
chains_with_gaps = st.lists(st.sampled_from([*STEPS[:8], *GAPS]), min_size=1, max_size=6)

Make = Callable[..., Any]
