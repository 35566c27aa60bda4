"""Loads a state dict from a file into a model: tensors only, no code in the file is run."""

from __future__ import annotations

import importlib
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowprec_check.engine.core.exceptions import first_line
from lowprec_check.errors import UsageError, message_of

_INSIDE = ("state_dict", "model_state_dict", "model", "module", "params")
"""Keys under which training scripts save a state dict beside other values."""

_SAVE = "Only weights are loaded. Save them with torch.save(model.state_dict(), FILE), or as .safetensors."

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Prefixes that ``DataParallel``, ``torch.compile`` and Lightning add to names."""


def load_weights(model: nn.Module, path: str) -> list[str]:
    """Load the state dict in ``path`` into ``model``, and return the code that does it.

    Raises :class:`UsageError` if the file cannot be read, or does not fit the model.
    """
    found, code = _read(path)
    key = None if _is_state(found) else next((key for key in _INSIDE if _is_state(found.get(key))), None)
    if key is not None:
        found, code = found[key], [*code[:-1], f"{code[-1]}[{json.dumps(key)}]"]
    if not _is_state(found):
        raise UsageError(
            f"{path} holds no state dict: names with tensors.", "Save one: torch.save(model.state_dict(), FILE)."
        )
    expected, load = model.state_dict(), "model.load_state_dict(state)"
    for prefix in _PREFIXES:
        if expected.keys().isdisjoint(found) and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
            load = f'model.load_state_dict({{name.removeprefix("{prefix}"): value for name, value in state.items()}})'
    _check_fit(path, expected, found)
    model.load_state_dict(found)
    return [*code, load]


def _read(path: str) -> tuple[dict[str, Any], list[str]]:
    """What the file holds, and the code that reads it."""
    if not Path(path).is_file():
        problem = f"{path} is a folder" if Path(path).is_dir() else f"No such file: {path}"
        raise UsageError(f"{problem}.", "Give --weights the path of a saved state dict.")
    name = json.dumps(path)
    try:
        if path.endswith(".safetensors"):
            load_file = _safetensors_loader()
            return load_file(path), ["from safetensors.torch import load_file", f"state = load_file({name})"]
        found = torch.load(path, map_location="cpu", weights_only=True)
        code = [f'state = torch.load({name}, map_location="cpu", weights_only=True)']
        return found if isinstance(found, dict) else {}, code
    except UsageError:
        raise
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", message_of(error))
        why = f"it holds an object of {named[1]}" if named else "torch.load does not accept it with weights_only=True"
        raise UsageError(f"{path} is not a file of weights: {why}.", _SAVE) from None
    except Exception as error:
        raise UsageError(f"Cannot read weights from {path}: {first_line(message_of(error))}", _SAVE) from None


def _safetensors_loader() -> Callable[[str], dict[str, Tensor]]:
    try:
        return importlib.import_module("safetensors.torch").load_file  # type: ignore[no-any-return]
    except ModuleNotFoundError:
        raise UsageError("safetensors is not installed.", "pip install safetensors") from None


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, Tensor) for item in value.values())


def _check_fit(path: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise :class:`UsageError` if names or shapes differ; a lazy parameter fits any shape."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    other = [
        f"{name}: {tuple(found[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and not is_lazy(tensor) and found[name].shape != tensor.shape
    ]
    problems = [
        f"{len(names)} of {total} {what} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for names, total, what in (
            (missing, len(expected), "names of the model are missing in the file"),
            (unknown, len(found), "names in the file are unknown to the model"),
            (other, len(expected), "tensors have another shape"),
        )
        if names
    ]
    if problems:
        raise UsageError(
            f"{path} does not fit the model: {'; '.join(problems)}.", "Make the model as it was when it was saved."
        )
