"""The random number generators that a model may use: seeding, saving and restoring them."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowprec_check.engine.core.devices import initialized


def seed_everything(seed: int) -> None:
    """Seed torch (the CPU and all initialized accelerators), ``random``, and NumPy if it is loaded.

    ``torch.manual_seed`` is avoided: its first call imports ``torch._dynamo``, which takes a second in each worker.
    """
    torch.default_generator.manual_seed(seed)
    for module in initialized():
        module.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def generator_restorers() -> Iterator[Callable[[], Any]]:
    """What restores each generator to its state of now: of torch (the CPU and all initialized accelerators), ``random``, NumPy."""
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    for module in initialized():
        yield functools.partial(module.set_rng_state_all, module.get_rng_state_all())
    yield functools.partial(random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the generators as they were."""
    restorers = list(generator_restorers())
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def generator_states() -> list[Any]:
    """The states of torch's generators: of the CPU and of all initialized accelerators. They are equal until a number is drawn."""
    states: list[Any] = [torch.default_generator.get_state().tolist()]
    for module in initialized():
        states += [state.tolist() for state in module.get_rng_state_all()]
    return states


def default_generator(device: Any = None) -> torch.Generator:
    """The generator of torch for ``device``, by default that of the CPU."""
    device = torch.device("cpu" if device is None else device)
    generators = getattr(getattr(torch, device.type, None), "default_generators", None)
    if not generators:
        return torch.default_generator
    found: torch.Generator = generators[device.index or 0]
    return found
