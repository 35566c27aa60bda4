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
    "loader-classifier": (
        TEACHER
        + """
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
X = torch.randn(512, 20)
inputs = DataLoader(TensorDataset(X, (X @ TEACHER).argmax(1)), batch_size=32)
loss = nn.CrossEntropyLoss(label_smoothing=0.1)
""",
        ("momentum", "adam", "cosine"),
    ),
    "dropout-classifier": (
        TEACHER
        + """
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 5))
def inputs(batch=0): return draw(batch, 64, 20)
def loss(output, x): return F.cross_entropy(output, (x.float() @ TEACHER).argmax(-1))
""",
        ("adamw", "momentum"),
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
    "residual-groupnorm": (
        """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
    def forward(self, x): return x + self.body(x)

def make_model(): return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
def inputs(batch=0): return draw(batch, 16, 3, 16, 16)
def loss(output, x): return F.cross_entropy(output, (x.float().mean((1, 2, 3)) > 0).long())
""",
        ("sgd", "adamw"),
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
    "masked-language-model": (
        """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, 32), nn.Parameter(0.02 * torch.randn(24, 32))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 1, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40)
    def forward(self, ids, labels):
        output = self.head(self.encoder(self.tokens(ids) + self.positions))
        return {"loss": F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=-100), "logits": output}

def make_model(): return Masked()
def inputs(batch=0):
    ids = (integers(batch, 39, 16, 1) + torch.arange(24)) % 39
    hidden = draw(batch, 16, 24) > 1
    return {"ids": ids.masked_fill(hidden, 39), "labels": ids.masked_fill(~hidden, -100)}
""",
        ("adamw", "adam"),
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
    "gru-forecast": (
        """
class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
    def forward(self, x): return self.head(self.gru(x)[0])

def make_model(): return Forecast()
def inputs(batch=0): return torch.sin(torch.arange(25) * 0.3 + 6 * draw(batch, 16, 1)).unsqueeze(-1)
def loss(output, x): return F.mse_loss(output[:, :-1], x[:, 1:].to(output.dtype))
""",
        ("adam", "rmsprop", "clipped"),
    ),
    "rnn-parity": (
        """
class Parity(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.RNN(1, 32, batch_first=True), nn.Linear(32, 1)
    def forward(self, x): return self.head(self.rnn(x)[0][:, -1]).squeeze(-1)

model = Parity()
def inputs(batch=0): return (draw(batch, 32, 6, 1) > 0).float()
loss_function = nn.BCEWithLogitsLoss()
def loss(output, x): return loss_function(output.float(), x.float().sum((1, 2)).remainder(2))
""",
        ("adamw", "clipped"),
    ),
    "regression": (
        """
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
def inputs(batch=0): return draw(batch, 64, 8)
def loss(output, x): return F.mse_loss(output.squeeze(-1), (x.float().sin().sum(-1)).to(output.dtype))
""",
        ("sgd", "adam", "adamw", "momentum"),
    ),
    "huber-regression": (
        """
def make_model(): return nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 2))
def inputs(batch=0): return draw(batch, 32, 8)
def loss(output, x): return F.smooth_l1_loss(output, torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], 1).to(output.dtype))
""",
        ("adamw", "nadam"),
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
    "dice-segmentation": (
        """
def make_model(): return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.InstanceNorm2d(12, affine=True), nn.ReLU(), nn.Conv2d(12, 1, 1))
def inputs(batch=0): return F.avg_pool2d(draw(batch, 8, 1, 16, 16), 3, 1, 1)
def loss(output, x):
    mask, found = (x.float() > 0.2).float(), output.float().sigmoid()
    return 1 - (2 * (found * mask).sum() + 1) / (found.sum() + mask.sum() + 1) + F.binary_cross_entropy_with_logits(output.float(), mask)
""",
        ("adamw", "adam"),
    ),
    "contrastive": (
        """
class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16))
    def forward(self, first, second): return F.normalize(self.encoder(first), dim=1), F.normalize(self.encoder(second), dim=1)

model = Views()
def inputs(batch=0):
    x = draw(batch, 64, 20)
    return x + 0.3 * draw(batch + 50000, 64, 20), x + 0.3 * draw(batch + 90000, 64, 20)
def loss(output):
    scores = output[0] @ output[1].T / 0.2
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
""",
        ("sgd", "adamw", "momentum"),
    ),
    "clip-pairs": (
        """
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text, self.scale = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16)), nn.Embedding(32, 16), nn.Parameter(torch.tensor(2.0))
    def forward(self, images, ids): return self.scale.exp() * F.normalize(self.image(images), dim=-1) @ F.normalize(self.text(ids), dim=-1).T

def make_model(): return Pairs()
CENTERS = torch.randn(32, 20, generator=torch.Generator().manual_seed(3))
def inputs(batch=0):
    ids = torch.randperm(32, generator=torch.Generator().manual_seed(batch))
    return CENTERS[ids] + 0.3 * draw(batch, 32, 20), ids
def loss(scores):
    labels = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
""",
        ("adamw", "adam"),
    ),
    "triplet": (
        """
class Triplet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
    def forward(self, a, p, n): return self.body(a), self.body(p), self.body(n)

model = Triplet()
def inputs(batch=0):
    a = draw(batch, 64, 10)
    return a, a + 0.5 * draw(batch + 40000, 64, 10), draw(batch + 80000, 64, 10)
loss_function = nn.TripletMarginLoss()
def loss(output): return loss_function(*output)
""",
        ("adam", "sgd"),
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
    "autoencoder": (
        """
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 32))
MIX = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
def inputs(batch=0): return draw(batch, 64, 4) @ MIX
def loss(output, x): return F.mse_loss(output, x.to(output.dtype))
""",
        ("adam", "sgd", "adamw"),
    ),
    "vae": (
        """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))
    def forward(self, x):
        mean, log = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log

def make_model(): return Vae()
MIX = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
def inputs(batch=0): return draw(batch, 64, 4) @ MIX
def loss(output, x):
    found, mean, log = (part.float() for part in output)
    return F.mse_loss(found, x.float()) - 0.005 * (1 + log - mean.square() - log.exp()).sum(-1).mean()
""",
        ("adam", "adamw"),
    ),
    "denoiser": (
        """
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = nn.Embedding(10, 16), nn.Sequential(nn.Linear(18, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))
    def forward(self, x, t): return self.body(torch.cat([x, self.time(t)], -1))

model = Denoiser()
def inputs(batch=0):
    angle, t = 6.28 * draw(batch, 64, 1), integers(batch, 10, 64)
    return torch.cat([angle.cos(), angle.sin()], 1) + t[:, None] / 10 * draw(batch + 60000, 64, 2), t
def loss(output, x, t): return F.mse_loss(output, F.normalize(x.float(), dim=-1).to(output.dtype))
""",
        ("adamw", "adam"),
    ),
    "recommender": (
        """
class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items, self.bias = nn.Embedding(50, 8), nn.Embedding(60, 8), nn.Embedding(60, 1)
    def forward(self, user, item): return (self.users(user) * self.items(item)).sum(-1) + self.bias(item).squeeze(-1)

def make_model(): return Factors()
RATINGS = torch.randn(50, 3, generator=torch.Generator().manual_seed(1)) @ torch.randn(3, 60, generator=torch.Generator().manual_seed(2))
def inputs(batch=0): return integers(batch, 50, 256), integers(batch + 70000, 60, 256)
def loss(output, user, item): return F.mse_loss(output, RATINGS.to(output.device, output.dtype)[user, item])
""",
        ("adagrad", "adam", "sparse-like"),
    ),
    "graph": (
        """
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 3)
    def forward(self, nodes, edges): return self.second(edges @ self.first(edges @ nodes).relu())

model = Graph()
def inputs(batch=0):
    links = (draw(batch, 16, 10, 10) > 0.8).float() + torch.eye(10)
    return draw(batch + 20000, 16, 10, 12), links / links.sum(-1, keepdim=True)
def loss(output, nodes, edges): return F.cross_entropy(output.flatten(0, 1), (edges.float() @ nodes.float())[..., :3].argmax(-1).flatten())
""",
        ("adam", "momentum"),
    ),
    "detector": (
        """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.box, self.label = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()), nn.Linear(256, 2), nn.Linear(256, 2)
    def forward(self, x): return self.box(self.body(x)), self.label(self.body(x))

def make_model(): return Detector()
def inputs(batch=0):
    place = integers(batch, 16, 16, 2)
    image = 0.1 * draw(batch, 16, 1, 16, 16)
    image[torch.arange(16), 0, place[:, 0], place[:, 1]] += 3
    return image
def loss(output, x):
    peak = x.float().flatten(1).argmax(1)
    place = torch.stack([peak // 16, peak % 16], 1).float() / 16
    return F.smooth_l1_loss(output[0].float(), place) + F.cross_entropy(output[1].float(), (place[:, 0] > 0.5).long())
""",
        ("adam", "adamw"),
    ),
    "lora-head": (
        """
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
for parameter in model[0].parameters(): parameter.requires_grad_(False)
nn.init.zeros_(model[2].weight); nn.init.zeros_(model[2].bias)
"""
        + TEACHER
        + """
def inputs(batch=0): return draw(batch, 64, 20)
def loss(output, x): return F.cross_entropy(output, (x.float() @ TEACHER).argmax(-1))
""",
        ("adamw", "sgd"),
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
