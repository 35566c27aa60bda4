"""The values of tensors that code makes, also where one run is inside another."""

from __future__ import annotations

import torch
from torch import Tensor

from lowprec_check.torchkit.dispatch_mode import DispatchMode
from lowprec_check.torchkit.made_tensors import noting_made_tensors, tensor_being_made


class Seen(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[object] = []

    def handle(self, func: object, args: object, kwargs: object, keys: object) -> object:
        made = tensor_being_made()
        self.values += [made.values] if made is not None else []
        return func(*args, **kwargs)  # type: ignore[operator, misc, dict-item]


def scripted(x: Tensor) -> Tensor:
    return x + torch.tensor(2.0)


def test_values_are_seen_and_torch_is_as_before() -> None:
    before = torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor
    x = torch.ones(2, dtype=torch.half)
    with noting_made_tensors(), noting_made_tensors():
        with Seen() as seen:
            torch.tensor(1e-10, dtype=torch.half)
            x.new_tensor([1e-10])
            torch.tensor([x.sum()])
        assert torch.jit.script(scripted)(torch.ones(1)) == 3
    assert seen.values == [1e-10, [1e-10]]
    assert (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor) == before
    assert "new_tensor" not in vars(torch.Tensor)
