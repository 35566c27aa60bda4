"""Set-ups of training as people write them: files with a model, inputs, a loss and an optimizer, small enough for 300 steps in seconds.

:data:`SETUPS` has the text of each file by name: a task with one of its optimizers.
"""

from __future__ import annotations

START = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

def draw(batch, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + batch))

def integers(batch, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(2000 + batch))

torch.manual_seed(0)
"""

TEACHER = "TEACHER = torch.randn(20, 5, generator=torch.Generator().manual_seed(9))\n"

TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mlp-classifier": (
        TEACHER
        + """
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
def inputs(batch=0): return draw(batch, 64, 20)
def loss(output, x): return F.cross_entropy(output, (x.float() @ TEACHER).argmax(-1))
""",
        ("sgd", "adamw", "adagrad", "clipped"),
    ),
    "cnn-classifier": (
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Linear(32, 4)
    def forward(self, x): return self.head(self.features(x).mean((2, 3)))

def make_model(): return Net()
def inputs(batch=0): return draw(batch, 16, 3, 16, 16) + integers(batch, 4, 16, 1, 1, 1).float() / 2
def loss(output, x): return F.cross_entropy(output, (2 * x.float().mean((1, 2, 3))).round().clamp(0, 3).long())
""",
        ("momentum", "adamw", "rmsprop", "cosine"),
    ),
    "language-model": (
        """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)

class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions, self.blocks, self.norm = nn.Embedding(64, 32), nn.Embedding(32, 32), nn.Sequential(Block(), Block()), nn.LayerNorm(32)
        nn.init.normal_(self.tokens.weight, std=0.02)
    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)

model = LanguageModel()
def inputs(batch=0): return (integers(batch, 64, 16, 1) + (1 + integers(batch + 7, 5, 16, 1)) * torch.arange(32)) % 64
def loss(output, ids): return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
""",
        ("adamw", "clipped", "warmup", "groups"),
    ),
    "lstm-tagger": (
        """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(30, 16), nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 3)
    def forward(self, ids): return self.head(self.lstm(self.embedding(ids))[0])

model = Tagger()
def inputs(batch=0): return integers(batch, 30, 16, 12)
def loss(output, ids): return F.cross_entropy(output.flatten(0, 1), (ids.cumsum(1) % 3).flatten())
""",
        ("adam", "clipped", "sgd"),
    ),
    "segmentation": (
        """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 16, 2, 2), nn.Conv2d(17, 2, 3, padding=1)
    def forward(self, x):
        low = self.mid(self.down(x).relu()).relu()
        return self.out(torch.cat([self.up(low).relu(), x], 1))

model = UNet()
def inputs(batch=0): return F.avg_pool2d(draw(batch, 8, 1, 16, 16), 3, 1, 1)
def loss(output, x): return F.cross_entropy(output, (F.avg_pool2d(x.float(), 3, 1, 1)[:, 0] > 0).long())
""",
        ("adam", "momentum", "cosine"),
    ),
    "gan": (
        """
class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    def forward(self, noise, real):
        fake = self.generator(noise)
        frozen = [p.detach() for p in self.critic.parameters()]
        hidden = F.leaky_relu(F.linear(fake, frozen[0], frozen[1]), 0.2)
        return self.critic(real), self.critic(fake.detach()), F.linear(hidden, frozen[2], frozen[3])

def make_model(): return Gan()
def inputs(batch=0): return draw(batch, 64, 4), 0.3 * draw(batch + 30000, 64, 2) + 1
def loss(output):
    real, fake, fooled = output
    return F.softplus(-real).mean() + F.softplus(fake).mean() + F.softplus(-fooled).mean()
""",
        ("gan-adam", "rmsprop", "adam"),
    ),
    "fixed-batch": (
        """
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
inputs = torch.randn(64, 20)
""",
        ("sgd", "adamw"),
    ),
}

OPTIMIZERS = {
    "sgd": "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)",
    "momentum": "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)",
    "adam": "def optimizer(parameters): return torch.optim.Adam(parameters, lr=1e-2)",
    "adamw": "def optimizer(parameters): return torch.optim.AdamW(parameters, lr=3e-3)",
    "nadam": "def optimizer(parameters): return torch.optim.NAdam(parameters, lr=3e-3)",
    "rmsprop": "def optimizer(parameters): return torch.optim.RMSprop(parameters, lr=1e-3)",
    "adagrad": "def optimizer(parameters): return torch.optim.Adagrad(parameters, lr=5e-2)",
    "sparse-like": "def optimizer(parameters): return torch.optim.SGD(parameters, lr=1.0)",
    "gan-adam": "def optimizer(parameters): return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.9))",
    "groups": """\
def optimizer(parameters):
    parameters = list(parameters)
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=3e-3)""",
    "clipped": """\
def optimizer(parameters):
    parameters = list(parameters)
    made = torch.optim.AdamW(parameters, lr=3e-3)
    made.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 1.0) and None)
    return made""",
    "warmup": """\
def optimizer(parameters):
    made = torch.optim.AdamW(parameters, lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / 20))
    made.register_step_post_hook(lambda *_: schedule.step())
    return made""",
    "cosine": """\
def optimizer(parameters):
    made = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, 300)
    made.register_step_post_hook(lambda *_: schedule.step())
    return made""",
}

SETUPS: dict[str, str] = {
    f"{task}/{optimizer}": f"{START}{text}\n{OPTIMIZERS[optimizer]}\n"
    for task, (text, optimizers) in TASKS.items()
    for optimizer in optimizers
}
