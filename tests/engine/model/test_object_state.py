"""What the saved state of Python objects reaches: a user's code, not all that installed packages define."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lowprec_check.engine.model.snapshot import ObjectState


def _method(folder: Path, package: str) -> Any:
    """A method of a module in ``folder`` that appends to a global."""
    module = types.ModuleType(package)
    code = compile("SEEN = []\ndef added(self): SEEN.append(1)\n", str(folder / f"{package}.py"), "exec")
    exec(code, vars(module))
    return module.added  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("folder", "name", "restored"),
    [
        ("project", "added", True),
        ("lib/site-packages", "added", False),  # as transformers adds nn.Module.smart_apply
        ("lib/dist-packages", "added", False),
        ("lib/site-packages", "forward", True),  # what every call of a module runs
    ],
)
def test_methods_that_are_added_to_classes_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, name: str, *, restored: bool
) -> None:
    method = _method(tmp_path / folder, "other")
    monkeypatch.setattr(nn.Module, name, method, raising=False)
    model = nn.Linear(2, 2)
    state = ObjectState([model], model.parameters())
    method(model)
    state.restore()
    assert method.__globals__["SEEN"] == ([] if restored else [1])


def test_a_class_of_an_installed_package_keeps_its_state(tmp_path: Path) -> None:
    method = _method(tmp_path / "lib" / "site-packages", "other")
    model = type("Model", (nn.Module,), {"forward": method, "__module__": "other"})()
    state = ObjectState([model], ())
    model.forward()
    state.restore()
    assert method.__globals__["SEEN"] == []


def test_hooks_of_all_modules_are_restored() -> None:
    hooks = nn.modules.module._global_forward_hooks
    state = ObjectState([nn.Linear(2, 2)], ())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        state.restore()
        assert not hooks
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("package", "restored"), [("other", True), ("torch.nn.x", True), ("torch.functional", False), ("yaml", False)]
)
def test_globals_of_functions_that_a_model_names(tmp_path: Path, package: str, *, restored: bool) -> None:
    called = _method(tmp_path, package)
    model = nn.Linear(2, 2)
    model.called = called
    state = ObjectState([model], model.parameters())
    called(model)
    state.restore()
    assert called.__globals__["SEEN"] == ([] if restored else [1])
