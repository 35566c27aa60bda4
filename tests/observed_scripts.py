"""Training scripts of many kinds, each with three steps; every one is compared with itself, run as it is."""

from __future__ import annotations

HEAD = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
X, Y = torch.randn(96, 8), torch.randint(0, 3, (96,))
def batches():
    return zip(X.split(32), Y.split(32))
def net(out=3):
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, out))
"""

SCRIPTS = {
    "classification": """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 3.0]))
for x, y in batches():
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
""",
    "a function and a guard": """
def train(model, optimizer):
    for step, (x, y) in enumerate(batches()):
        out = model(x)
        loss = F.cross_entropy(out, y) + 0.1 * out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if __name__ == "__main__":
    model = net()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))
""",
    "evaluation first": """
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model.eval()
with torch.no_grad():
    print((model(X).argmax(1) == Y).float().mean())
model.train()
for x, y in batches():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "an evaluation with gradients before its steps": """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    model.eval()
    print(F.cross_entropy(model(X), Y).item())
    model.train()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a graph that is traced before its steps": """
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 3))
torch.jit.trace(model, X)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "an autoencoder with a penalty on its weights": """
model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, _ in batches():
    x = x * 2
    noisy = x + 0.1 * torch.randn_like(x)
    loss = F.mse_loss(model(noisy), x)
    loss += 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "clipping and a scheduler": """
model = net()
groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[3].parameters()}]
groups += [{"params": model[1].parameters(), "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.2, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=6)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
""",
    "clipping by value": """
from torch.nn.utils import clip_grad_value_
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
""",
    "a siamese network": """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
temperature = nn.Parameter(torch.tensor(0.5))
optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
for x, _ in batches():
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
    loss = F.cross_entropy(a @ b.T / temperature, torch.arange(len(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "an encoder and a decoder": """
encoder, decoder = nn.Linear(8, 3), nn.Sequential(nn.Linear(3, 8))
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
for x, _ in batches():
    code = encoder(x).relu()
    loss = F.smooth_l1_loss(decoder(code), x) + 1e-3 * code.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a GAN": """
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8))
critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
for x, _ in batches():
    fake = generator(torch.randn(len(x), 2))
    of_critic.zero_grad()
    F.binary_cross_entropy_with_logits(critic(x), torch.ones(len(x), 1)).backward()
    F.binary_cross_entropy_with_logits(critic(fake.detach()), torch.zeros(len(x), 1)).backward()
    of_critic.step()
    of_generator.zero_grad()
    F.binary_cross_entropy_with_logits(critic(fake), torch.ones(len(x), 1)).backward()
    of_generator.step()
""",
    "a GAN that trains its generator first": """
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8))
critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_critic = torch.optim.Adam(critic.parameters(), lr=0.0)
of_generator = torch.optim.SGD(generator.parameters(), lr=1e-2)
for x, _ in batches():
    fake = generator(torch.randn(len(x), 2))
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_generator.step()
    of_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(x).mean()).backward()
    of_critic.step()
""",
    "a gradient penalty": """
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
for x, _ in batches():
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = out.mean() + (grad.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "accumulation": """
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    for xs, ys in zip(x.split(8), y.split(8)):
        (F.cross_entropy(model(xs), ys) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "a model that returns its loss": """
class Output(dict):
    __getattr__ = dict.__getitem__
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = net()
    def forward(self, ids, labels=None):
        logits = self.body(ids)
        return Output(loss=F.cross_entropy(logits, labels), logits=logits)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in batches():
    model(ids=x, labels=y).loss.backward()
    optimizer.step()
    model.zero_grad()
""",
    "checkpointing": """
from torch.utils.checkpoint import checkpoint
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        return self.b(checkpoint(lambda x: self.a(x).tanh(), x, use_reentrant=False))
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a custom function of autograd": """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    loss = Square.apply(model(x).squeeze(1) - y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a closure": """
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "a buffer that is filled anew, and in-place functions": """
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.empty(32, 8)
for x, y in batches():
    batch.copy_(x)
    out = model(batch)
    out[:, 0] = out[:, 0] * 2
    loss = out.mul_(0.5).logsumexp(1).mean() - out.gather(1, y[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    batch.zero_()
    optimizer.step()
""",
    "mixture of a teacher": """
model, teacher = net(), net().eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    with torch.no_grad():
        soft = teacher(x).softmax(1)
    hard = teacher(x)
    out = model(x)
    loss = F.kl_div(out.log_softmax(1), soft, reduction="batchmean") + F.mse_loss(out, hard.detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "a rollout and an evaluation in training mode": """
model, critic = net(2), net(1)
optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
for x, _ in batches():
    values, actions = torch.zeros(32), []
    with torch.no_grad():
        mean = model(x).mean()
        for row in range(0, 32, 8):
            scores = model(x[row:row + 8])
            values[row:row + 8] = critic(x[row:row + 8])[:, 0]
            actions += torch.distributions.Categorical(logits=scores).sample().tolist()
    wanted = torch.tensor(actions)
    weighted = F.cross_entropy(model(x), wanted, reduction="none") * (1 - values)
    loss = weighted.mean() + F.mse_loss(critic(x)[:, 0], wanted.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    "pseudo labels": """
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    out = model(x)
    loss = F.cross_entropy(out, out.argmax(1)) + F.cross_entropy(out, y)
    print(loss.item())
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
""",
    "a loader with workers, and a step for the scheduler": """
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=32, num_workers=1):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "a resumed optimizer": """
model = nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for p in model.parameters():
    averages = {"exp_avg": torch.full_like(p, 0.1), "exp_avg_sq": torch.full_like(p, 0.2)}
    optimizer.state[p] = {"step": torch.tensor(5.0), **averages}
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
}
"""By kind; each makes its steps in fp32."""

REFUSED = {
    "gradients that nothing uses": (
        "for x, y in batches():\n    F.cross_entropy(model(x), y).backward()\n",
        "makes no step of a torch.optim.Optimizer with the gradients that it computes: observed are 3 calls of models "
        "and 3 of backward()",
    ),
    "an update by hand that is no SGD": (
        "for x, y in batches():\n    F.cross_entropy(model(x), y).backward()\n    for p in model.parameters():\n"
        "        p.data -= 0.1 * p.grad.sign()\n        p.grad.zero_()\n",
        "train.py:16 changes weights",
    ),
    "a climb before the step": (
        "for x, y in batches():\n    F.cross_entropy(model(x), y).backward()\n"
        "    before = [p.detach().clone() for p in model.parameters()]\n"
        "    for p in model.parameters():\n        p.data += p.grad\n    model.zero_grad()\n"
        "    F.cross_entropy(model(x), y).backward()\n"
        "    for p, own in zip(model.parameters(), before):\n        p.data = own\n"
        "    optimizer.step()\n    model.zero_grad()\n",
        "train.py:17 changes weights between the backward passes of a step",
    ),
    "gradients that the script changes": (
        "for x, y in batches():\n    F.cross_entropy(model(x), y).backward()\n    for p in model.parameters():\n"
        "        p.grad *= 0.5\n    optimizer.step()\n",
        "the gradients that the optimizer gets differ from those of the loss at train.py:14 by 100.0%",
    ),
    "a gradient of its own": (
        "for x, y in batches():\n    out = model(x)\n    out.backward(torch.ones_like(out))\n    optimizer.step()\n",
        "train.py:15 calls backward() of more than one number",
    ),
    "a random number from elsewhere": (
        "count = iter(range(9))\nclass Odd(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.body = model\n    def forward(self, x):\n        return self.body(x) * (1 + next(count))\n"
        "odd = Odd()\nfor x, y in batches():\n    optimizer.zero_grad()\n    F.cross_entropy(odd(x), y).backward()\n"
        "    optimizer.step()\n",
        "computed again from the same batch, the loss at train.py:23 is",
    ),
    "a thread": (
        "import threading\ndef work():\n    for x, y in batches():\n        F.cross_entropy(model(x), y).backward()\n"
        "        optimizer.step()\nt = threading.Thread(target=work)\nt.start()\nt.join()\n",
        "it calls its model in another thread",
    ),
}
"""Scripts that cannot be made again, and what is said of each."""

FRAMEWORKS = {
    "lightning": """
import lightning
from torch.utils.data import DataLoader, TensorDataset
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = net()
    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.body(x), y)
        self.log("loss", loss)
        return loss
    validation_step = training_step
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]
data = DataLoader(TensorDataset(X, Y), batch_size=32)
quiet = {"logger": False, "enable_checkpointing": False}
trainer = lightning.Trainer(max_steps=3, gradient_clip_val=0.1, accelerator="cpu", **quiet)
trainer.fit(Module(), data, data)
""",
    "transformers": """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
model = BertForSequenceClassification(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
data = [{"input_ids": torch.randint(0, 50, (12,)), "labels": torch.tensor(number % 2)} for number in range(32)]
quiet = {"output_dir": "out", "report_to": [], "save_strategy": "no"}
options = TrainingArguments(per_device_train_batch_size=8, max_steps=3, use_cpu=True, **quiet)
Trainer(model, options, train_dataset=data).train()
""",
    "accelerate": """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
accelerator = Accelerator(cpu=True)
model = net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(X, Y), batch_size=32)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
""",
}
"""By what trains."""

MIXED = {
    "autocast": 'with torch.autocast("cpu", dtype=torch.bfloat16):\n    loss = F.cross_entropy(model(x), y)\n',
    "autocast around the model alone": 'with torch.autocast("cpu", dtype=torch.bfloat16):\n    out = model(x)\n'
    "loss = F.cross_entropy(out.float(), y)\n",
    "several calls under autocast": 'with torch.autocast("cpu", dtype=torch.bfloat16):\n'
    "    loss = sum(F.cross_entropy(model(each), y) for each in (x, 1 - x, 2 * x, -x))\n",
    "dropout and random numbers": "loss = F.cross_entropy(F.dropout(model(x + torch.rand_like(x)), 0.5), y)\n",
}
"""How the loss of a step is computed. Scans differ or draw other numbers, so only the first step is made again."""

SCRIPTS["the official example of a GAN"] = """
netG = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
netD = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizerD, optimizerG = torch.optim.Adam(netD.parameters(), lr=2e-4), torch.optim.Adam(netG.parameters(), lr=2e-4)
for data, _ in batches():
    netD.zero_grad()
    label = torch.full((len(data),), 1.0)
    output = netD(data).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    D_x = output.mean().item()
    fake = netG(torch.randn(len(data), 2))
    label.fill_(0.0)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    output = netD(fake).view(-1)
    criterion(output, label).backward()
    optimizerG.step()
"""
SCRIPTS["a global model and inputs, and a guard"] = """
model, inputs = net(), X[:32]
def main():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
if __name__ == "__main__":
    main()
"""
SCRIPTS["mixup, and a weight that changes from step to step"] = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(batches()):
    share = float(torch.rand(()))
    other = torch.randperm(len(x))
    out = model(share * x + (1 - share) * x[other])
    loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])
    if step:
        loss = loss + 0.1 * step * out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS["accumulation of a varying number of batches"] = """
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    for xs, ys in zip(x.split(16 >> step), y.split(16 >> step)):
        F.cross_entropy(model(xs), ys, reduction="sum").div(32).backward()
    optimizer.step()
"""
SCRIPTS["lazy modules"] = """
model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
model(X)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS["a compiled step"] = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model_too = torch.compile(model, backend="eager")
@torch.compile(backend="eager")
def loss_of(x, y):
    return F.cross_entropy(model(x), y)
for step, (x, y) in enumerate(batches()):
    loss = loss_of(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS["evaluation with gradients first"] = """
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.eval()
for x, y in [*batches()] * 40:
    print(model(x).argmax(1).eq(y).sum().item())
model.train()
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    print(loss.item())
    optimizer.step()
"""
SCRIPTS["a call of forward"] = """
class Net(nn.Linear):
    def forward(self, x):
        return torch.mm(x, self.weight.T) + self.bias
model = Net(8, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    loss = F.cross_entropy(model.forward(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS["calls of other methods"] = """
class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.reset()
    def reset(self):
        nn.init.orthogonal_(self.actor.weight, 0.1)
    def value(self, x):
        return self.critic(self.body(x).tanh())[:, 0]
    def evaluate(self, x, y):
        scores = torch.distributions.Categorical(logits=self.actor(self.body(x).tanh()))
        return scores.log_prob(y), scores.entropy(), self.value(x)
model = Agent()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for x, y in batches():
    with torch.no_grad():
        wanted = x.sum(1) - model.value(x)
    chosen, entropy, value = model.evaluate(x, y)
    loss = -(chosen * wanted).mean() - 0.01 * entropy.mean() + (value - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SCRIPTS["methods that keep what they compute"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.seen = nn.Linear(8, 3), []
    def take(self, x):
        self.x = x
    def compute(self):
        self.out = self.body(self.x)
        self.seen.append(self.out.square().mean())
        return self.out.tanh()
    def add_loss(self, loss):
        return loss + sum(self.seen)
    def learn(self, loss):
        optimizer.zero_grad()
        self.add_loss(loss).backward()
        optimizer.step()
        self.seen.clear()
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    model.take(x)
    model.learn(F.cross_entropy(model.compute(), y) + model.out.mean())
"""
SCRIPTS["tensors that are filled with what a model computes"] = """
model = nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches():
    before = torch.empty(33, 3)
    before[0] = 1.0
    before[1:] = model(x)
    after = torch.zeros(2, 32, 3)
    for number in range(2):
        after[number] = before[1:] * (1 + number) + before[0]
    loss = F.cross_entropy(after.sum(0), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BY_HAND = {
    "p.data": "    for p in model.parameters():\n        p.data.add_(p.grad, alpha=-0.1)\n    model.zero_grad()\n",
    "zeroed before the next loss": "    for p in model.parameters():\n        p.data = p.data - 0.1 * p.grad\n"
    "        p.grad.zero_()\n",
    "no_grad": "    with torch.no_grad():\n        for p in model.parameters():\n            p -= 0.1 * p.grad\n"
    "            p.grad = None\n",
    "weight decay and a rate that falls": "    with torch.no_grad():\n        for p in model.parameters():\n"
    "            p.sub_((p.grad + 0.1 * p) * (0.1 / (1 + step)))\n    model.zero_grad()\n",
    "momentum": "    with torch.no_grad():\n        for p, v in zip(model.parameters(), moments):\n"
    "            v.mul_(0.9).add_(p.grad)\n            p -= 0.1 * v\n    model.zero_grad()\n",
    "clipping": "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    with torch.no_grad():\n"
    "        torch._foreach_sub_([*model.parameters()], [0.1 * p.grad for p in model.parameters()])\n"
    "    model.zero_grad()\n",
    "frozen weights": "    with torch.no_grad():\n        for p in model[3].parameters():\n"
    "            p -= 0.1 * p.grad\n    model.zero_grad()\n",
}
"""Updates that SGD makes too, by how they are written."""
REFUSED["other processes"] = (
    "import multiprocessing\ndef work(part):\n    pass\nif __name__ == '__main__':\n"
    "    process = multiprocessing.get_context('fork').Process(target=work, args=(model,))\n"
    "    process.start()\n    process.join()\n    model(X)\n",
    "it starts other processes at train.py:18, in which nothing is observed, and computes no gradients in its own",
)
REFUSED["a loss that torch cannot see"] = (
    "@torch.jit.script\ndef f(a):\n    return (a.logsumexp(1) - a[:, 0]).mean()\nfor x, y in batches():\n"
    "    loss = f(model(x))\n    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n",
    "the loss was computed in a way that no function of torch shows",
)
GAN_HEAD = """
generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8))
critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2)
"""
REFUSED["one clip for two optimizers"] = (
    "first, second = (torch.optim.Adam([one]) for one in model.parameters())\nfor x, y in batches():\n"
    "    model.zero_grad()\n    F.cross_entropy(model(x), y).backward()\n"
    "    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)\n    first.step()\n    second.step()\n",
    "; the script clips them together with those of other parameters, the scan clips those of each optimizer alone",
)
REFUSED["a further optimizer of all weights"] = (
    "first, second = (torch.optim.Adam([one]) for one in model.parameters())\n"
    "both = torch.optim.Adam(model.parameters(), lr=1e-3)\nfor x, y in batches():\n"
    "    for one in (first, second, both):\n        one.zero_grad()\n"
    "        F.cross_entropy(model(x), y).backward()\n        one.step()\n",
    "Adam, made at train.py:14, makes a step after those of its first step",
)
SEVERAL = {
    "two models, evaluated with gradients before their steps": (
        2,
        """
models = [net(), net()]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
for x, y in batches():
    for model in models:
        model.eval()
        print(F.cross_entropy(model(X), Y).item())
        model.train()
    for model, optimizer in zip(models, optimizers):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
""",
    ),
    "two models whose losses are computed before the first backward pass": (
        2,
        """
first, second = net(), net()
of_first, of_second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
for x, y in batches():
    losses = [F.cross_entropy(model(x), y) for model in (first, second)]
    of_first.zero_grad()
    of_second.zero_grad()
    for loss in losses:
        loss.backward()
    of_first.step()
    of_second.step()
""",
    ),
    "a GAN that trains its critic three times": (
        4,
        GAN_HEAD
        + """
for number, x in enumerate(torch.randn(9, 32, 8)):
    of_critic.zero_grad()
    loss = critic(generator(torch.randn(32, 2)).detach()).mean() - critic(x).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 0.05)
    of_critic.step()
    if number % 3 == 2:
        of_generator.zero_grad()
        (-critic(generator(torch.randn(32, 2))).mean()).backward()
        of_generator.step()
""",
    ),
    "a GAN that computes all gradients first": (
        2,
        GAN_HEAD
        + """
for x, _ in batches():
    fake = generator(torch.randn(32, 2))
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(x).mean()).backward()
    of_generator.step()
    of_critic.step()
""",
    ),
    "a GAN whose critic sees images without gradients": (
        2,
        GAN_HEAD
        + """
for x, _ in batches():
    of_critic.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=False):
        with torch.no_grad():
            fake = generator(torch.randn(32, 2)).clamp(-2, 2)
        loss = critic(fake).mean() - critic(x).mean()
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(generator(torch.randn(32, 2))).mean()).backward()
    of_generator.step()
""",
    ),
    "two optimizers of one model": (
        2,
        """
model = net()
matrices, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
first, second = torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
for x, y in batches():
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    first.step()
    second.step()
    scheduler.step()
""",
    ),
    "a GAN with a penalty on its weights": (
        2,
        GAN_HEAD
        + """
for x, _ in batches():
    of_critic.zero_grad()
    fake = generator(torch.randn(32, 2))
    loss = critic(fake.detach()).mean() - critic(x).mean() + 0.1 * sum(p.square().sum() for p in critic.parameters())
    loss.backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(fake).mean() + 0.01 * critic[0].weight.square().sum()).backward()
    of_generator.step()
""",
    ),
}
"""How many steps its optimizers make together before each has made one, and the script."""
SCRIPTS |= {kind: script for kind, (_, script) in SEVERAL.items()}

STEP = "    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
NOTED = {
    "the script does not clear its gradients before its second step: the scan clears them in each step": (
        "for x, y in batches():\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    optimizer.step()\n"
    ),
    "the script has another optimizer, Adam, made at train.py:14: the scan does not make its steps": (
        "other = nn.Linear(8, 8)\nsecond = torch.optim.Adam(other.parameters())\nfor x, y in batches():\n"
        "    loss = F.cross_entropy(model(other(x)), y)\n" + STEP
    ),
    "2 of the 4 steps are observed: their batches are repeated, since there is no further one like that": (
        "for x, y in [*batches()][:2]:\n    loss = F.cross_entropy(model(x), y)\n" + STEP
    ),
    "1 of the 4 steps is observed: its batch is repeated, "
    "since train.py:16 calls other models than in the step before": (
        "first = nn.Linear(8, 8)\noptimizer.add_param_group({'params': first.parameters()})\n"
        "for step, (x, y) in enumerate(batches()):\n    out = model(first(x)) if step else model(x)\n"
        "    loss = F.cross_entropy(out, y)\n" + STEP
    ),
    "train.py:15 makes a number of what the model computes (item)": "for x, y in batches():\n    out = model(x)\n"
    "    loss = F.cross_entropy(out, y) * out.max().item()\n" + STEP,
    "train.py:15 reads the dtype of what the model computes": "for x, y in batches():\n    out = model(x)\n"
    "    scale = 2.0 if out.dtype == torch.float16 else 1.0\n    loss = F.cross_entropy(out * scale, y)\n" + STEP,
    "the script calls backward() 2 times for a step": "for x, y in batches():\n    out = model(x)\n"
    "    out.mean().backward(retain_graph=True)\n    F.cross_entropy(out, y).backward()\n    optimizer.step()\n"
    "    optimizer.zero_grad()\n",
    "the loss follows from 2 calls (Linear)": "for x, y in batches():\n"
    "    loss = (model(x) - model(x + 1)).square().mean()\n" + STEP,
}
"""By what is said of it, scripts that a scan trains otherwise in some way."""

SAM = """
class SAM(torch.optim.Optimizer):
    def __init__(self, parameters, base, rho=0.05, **settings):
        super().__init__(parameters, dict(rho=rho, **settings))
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)
    @torch.no_grad()
    def first_step(self, zero_grad=False):
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * self.param_groups[0]["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()
    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.data = self.state[p]["old_p"]
        self.base.step()
        if zero_grad:
            self.zero_grad()
    @torch.no_grad()
    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step(zero_grad=True)
        closure()
        self.second_step()
"""
LOOKAHEAD = """
from collections import defaultdict
class Lookahead(torch.optim.Optimizer):
    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups, self.state, self.defaults = optimizer.param_groups, defaultdict(dict), {}
        for group in self.param_groups:
            group["counter"] = 0
    def zero_grad(self):
        self.optimizer.zero_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            if group["counter"] == 0:
                for fast in group["params"]:
                    state = self.state[fast]
                    if "slow" not in state:
                        state["slow"] = fast.data.clone()
                    state["slow"] += (fast.data - state["slow"]) * self.alpha
                    fast.data.copy_(state["slow"])
            group["counter"] = (group["counter"] + 1) % self.k
        return loss
"""
WHOLE = {
    "both calls of a sharpness-aware optimizer": SAM
    + """
model = net()
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    optimizer.first_step(zero_grad=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step(zero_grad=True)
""",
    "a zero-initialized head": SAM
    + """
model = net()
nn.init.zeros_(model[3].weight)
nn.init.zeros_(model[3].bias)
optimizer = SAM(model.parameters(), torch.optim.AdamW, rho=2.0, lr=0.01)
for x, y in batches():
    for half in (optimizer.first_step, optimizer.second_step):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        half()
        optimizer.zero_grad()
""",
    "a sharpness-aware optimizer with a closure": SAM
    + """
model = net()
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.1, lr=0.1)
for x, y in batches():
    def closure():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    closure()
    optimizer.step(closure)
    optimizer.zero_grad()
""",
    "an object that climbs and descends": """
class Asam:
    def __init__(self, optimizer, model, rho):
        self.optimizer, self.model, self.rho, self.state = optimizer, model, rho, {}
    @torch.no_grad()
    def ascent_step(self):
        for name, p in self.model.named_parameters():
            self.state[p] = self.rho * p.grad / (p.grad.norm() + 1e-16)
            p.add_(self.state[p])
        self.optimizer.zero_grad()
    @torch.no_grad()
    def descent_step(self):
        for name, p in self.model.named_parameters():
            p.sub_(self.state[p])
        self.optimizer.step()
        self.optimizer.zero_grad()
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
minimizer = Asam(optimizer, model, 0.1)
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    minimizer.ascent_step()
    F.cross_entropy(model(x), y).backward()
    minimizer.descent_step()
    scheduler.step()
""",
    "an extrapolation": """
class Extra(torch.optim.SGD):
    @torch.no_grad()
    def extrapolate(self):
        self.before = [p.clone() for p in self.param_groups[0]["params"]]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)
    def step(self, closure=None):
        for p, before in zip(self.param_groups[0]["params"], self.before):
            p.data = before
        return super().step(closure)
model = net()
optimizer = Extra(model.parameters(), lr=0.1)
for x, y in batches():
    for update in (optimizer.extrapolate, optimizer.step):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        update()
""",
    "an optimizer that looks ahead": LOOKAHEAD
    + """
model = net()
optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
for x, y in batches():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "one that looks ahead after more steps than are observed": LOOKAHEAD.replace(
        "class Lookahead(torch.optim.Optimizer)", "class Ahead(torch.optim.Optimizer)"
    ).replace("== 0:", "== 2:")
    + """
model = net()
optimizer = Ahead(torch.optim.SGD(model.parameters(), lr=0.1), k=3)
for x, y in batches():
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a wrapper that changes the weights after the step": """
class Ema:
    def __init__(self, optimizer):
        self.optimizer = optimizer
    def step(self):
        self.optimizer.step()
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)
model = net()
optimizer = Ema(torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in batches():
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "an optimizer of an optimizer": """
class Outer(torch.optim.Optimizer):
    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base
    def step(self):
        self.base.step()
        for p in self.param_groups[0]['params']:
            p.data.mul_(0.9)
model = net()
outer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in batches():
    F.cross_entropy(model(x), y).backward()
    outer.step()
    outer.zero_grad()
""",
    "an optimizer that needs a closure": """
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
for x, y in batches():
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
""",
    "a line search": """
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.LBFGS(model.parameters(), history_size=4, max_iter=3, line_search_fn="strong_wolfe")
for x, y in batches():
    def closure():
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return loss
    print(optimizer.step(closure).item())
""",
}
"""Scripts whose optimizers make more than a step after a backward pass."""
