"""What a script does to its weights itself: casts to 16 bits, and updates without an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowprec_check.schema.training import WeightCast
from lowprec_check.torchkit.floating_dtypes import NARROW
from lowprec_check.torchkit.source_location import own_line

_FIT = 1e-4
"""The part of an update by which it may differ from what SGD does."""


class Sgd(NamedTuple):
    """How an update by hand follows from gradients: what ``torch.optim.SGD`` does."""

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.0


class WeightChanges:
    """Compares weights with copies that it keeps, and with the gradients of a backward pass."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self.gradients: dict[int, Tensor] = {}
        """Of the weights that the script may update itself, as they were computed last."""
        self._earlier: dict[int, Tensor] = {}  # their last update
        self.line: str | None = None  # that changed one last

    def keep(self, parameter: nn.Parameter, copy: Tensor | None = None) -> None:
        """Keep what it is now, perhaps in a ``copy`` that exists already."""
        if copy is None:
            copy = parameter.detach().clone()
        self._copies[id(parameter)] = (parameter, copy)

    def keep_all(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep what these are now."""
        for parameter in parameters:
            self.keep(parameter)

    def keep_gradients(self, but: Mapping[int, nn.Parameter]) -> None:
        """Keep the gradients, ``but`` not those of the weights that optimizers train."""
        with torch.no_grad():
            for key, (parameter, _) in self._copies.items():
                if parameter.grad is not None and key not in but:
                    self.gradients[key] = parameter.grad.detach().clone()

    def forget(self) -> None:
        """Free the copies: weights are no longer watched."""
        self._copies.clear()
        self.gradients.clear()

    def owner(self, tensor: Tensor) -> bool:
        """Whether a tensor is a kept weight, or lies in its memory."""
        places = {parameter.data_ptr() for parameter, _ in self._copies.values()}
        return tensor.layout == torch.strided and tensor.data_ptr() in places

    def changed(self) -> dict[int, nn.Parameter]:
        """The weights that differ from what they were."""
        return {
            key: parameter
            for key, (parameter, copy) in self._copies.items()
            if parameter.shape != copy.shape or not parameter.detach().equal(copy)
        }

    def trained(self, changed: Mapping[int, nn.Parameter], lr: float) -> dict[int, nn.Parameter]:
        """Those, and the weights of which rounding loses the whole update."""
        return {
            key: parameter
            for key, (parameter, copy) in self._copies.items()
            if key in changed or (key in self.gradients and copy.sub(self.gradients[key], alpha=lr).equal(copy))
        }

    def is_lost(self, key: int, lr: float) -> bool:
        """Whether rounding may lose the whole update of a weight, also one with momentum."""
        if key not in self.gradients:
            return False
        copy = self._copies[key][1]
        rounding = 4 * torch.finfo(copy.dtype).eps * float(copy.norm())
        return lr * float(self.gradients[key].norm()) <= rounding

    def sgd(self, changed: Mapping[int, nn.Parameter]) -> Sgd | None:
        """What makes these changes of their gradients; ``None`` if SGD does not."""
        if not changed or not changed.keys() <= self.gradients.keys():
            return None
        updates = {key: (p.detach() - self._copies[key][1]).double() for key, p in changed.items()}
        rounding = sum(float(self._copies[key][1].double().square().sum()) for key in changed) ** 0.5
        rounding *= 4 * max(torch.finfo(parameter.dtype).eps for parameter in changed.values())
        gradients = [self.gradients[key].double() for key in changed]
        wanted, made = list(updates.values()), None
        weights = [self._copies[key][1].double() for key in changed]
        # Rounding may have lost the whole update of a weight
        earlier = [self._earlier.get(key, torch.zeros_like(update)) for key, update in updates.items()]
        # The simplest that explains all changes, then with momentum, then with decay
        plain = _fit(wanted, [gradients], rounding)
        decayed = _fit(wanted, [gradients, weights], rounding)
        carried = _fit(wanted, [gradients, earlier], rounding) if self._earlier else None
        if plain is not None:
            made = Sgd(_short(-plain[0]))
        elif carried is not None:
            made = Sgd(_short(-carried[0]), momentum=_short(carried[1]))
        elif decayed is not None:
            made = Sgd(_short(-decayed[0]), weight_decay=_short(decayed[1] / decayed[0]))
        self._earlier = updates
        if made is None or min(made) < 0 or not made.lr or made.momentum > 1:
            return None
        return made


def _fit(wanted: list[Tensor], parts: list[list[Tensor]], rounding: float) -> list[float] | None:
    """The factors of ``parts`` whose sum is ``wanted``; ``None`` if there are none."""

    def product(one: list[Tensor], other: list[Tensor]) -> float:
        return sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))

    matrix = torch.tensor([[product(one, other) for other in parts] for one in parts], dtype=torch.float64)
    right = torch.tensor([product(part, wanted) for part in parts], dtype=torch.float64)
    factors = torch.linalg.lstsq(matrix, right, driver="gelsd").solution.tolist()
    rest = 0.0
    for index, update in enumerate(wanted):
        made = sum(factor * part[index] for factor, part in zip(factors, parts, strict=True))
        rest += float((update - made).square().sum())
    size = product(wanted, wanted) ** 0.5
    return factors if rest**0.5 <= _FIT * size + rounding else None


def _short(value: float) -> float:
    """The shortest number that is as good: 0.1 for 0.09999998."""
    # People write few digits; the fit has rounding in it
    for digits in range(1, 6):
        short = float(f"{value:.{digits}g}")
        if abs(short - value) <= 1e-5 * abs(value):
            return short
    return value


# -- Casts to 16 bits


class WeightCasts:
    """The calls that cast parameters to 16 bits, by the id of the parameter."""

    def __init__(self) -> None:
        self._casts: dict[int, WeightCast] = {}

    @property
    def functions(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """What to replace: the owner, the name, and a function that gets the original first."""
        return [(nn.Module, name, self._cast) for name in ("to", "half", "bfloat16")]

    def _cast(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # What has 16 bits already was cast elsewhere
        wide = [parameter for parameter in module.parameters() if parameter.dtype not in NARROW]
        result = original(module, *args, **kwargs)
        for parameter in wide:
            if parameter.dtype in NARROW:
                line = own_line(sys._getframe(2)) or ""
                dtype = str(parameter.dtype).removeprefix("torch.")
                self._casts[id(parameter)] = WeightCast(line=line, call=original.__name__, dtype=dtype)
        return result

    def of(self, root: nn.Module) -> WeightCast | None:
        """The cast of trained weights, perhaps without a line; ``None`` if all are in fp32."""
        narrow = [p for p in root.parameters() if p.requires_grad and p.dtype in NARROW]
        if not narrow:
            return None
        casts = (self._casts[id(parameter)] for parameter in narrow if id(parameter) in self._casts)
        dtype = str(narrow[0].dtype).removeprefix("torch.")
        return next(casts, WeightCast(line="", call="", dtype=dtype))


def widen(root: nn.Module) -> None:
    """Take all weights and buffers from 16 bits to fp32, in place."""
    for tensor in (*root.parameters(), *root.buffers()):
        if tensor.dtype in NARROW:
            # A gradient has the dtype of its weight
            tensor.grad = None
            tensor.data = widened(tensor.data)


def widened(tensor: Tensor) -> Tensor:
    """A tensor in fp32 if it has 16 bits, else itself."""
    return tensor.float() if tensor.dtype in NARROW else tensor
