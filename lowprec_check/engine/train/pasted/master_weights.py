import torch


class MasterWeights:
    """Updates 16-bit parameters through fp32 copies of them, which the optimizer sees."""

    def __init__(self, parameters, make_optimizer, scaler=None):
        self.parameters = [p for p in parameters if p.requires_grad]
        wide = [torch.promote_types(p.dtype, torch.float32) for p in self.parameters]  # complex stays complex
        self.masters = [torch.nn.Parameter(p.detach().to(w, copy=True)) for p, w in zip(self.parameters, wide)]
        self.optimizer = make_optimizer(self.masters)
        self.scaler = scaler

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    def backward(self, loss):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.copy_(master)
