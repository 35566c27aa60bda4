"""The user's file, a dotted name or a zoo's: a model, its inputs, and what else the file says of them."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lowprec_check.engine.core.pytree import leaves
from lowprec_check.engine.core.source_location import is_users, show_line
from lowprec_check.engine.model.inputs import PASTE_INPUTS, as_call, call_form, parse_inputs
from lowprec_check.errors import UsageError

T = TypeVar("T")

_PASTE_BATCHES = """Make `inputs` a function of the batch's number:

    def inputs(batch=0):
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(1, 3, 224, 224, generator=generator)"""

FACTORIES = ("make_model", "build_model", "create_model", "get_model")


class WithLoss(NamedTuple):
    """What is called where the file defines a loss: the output, and the loss on it."""

    output: Any
    loss: Tensor


class Target(NamedTuple):
    """A model and how to call it."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None = None
    metric: Callable[[nn.Module], float] | None = None
    source: str | None = None
    """Where the model is made, for ops that no line of its own calls."""
    form: str = "model(*inputs)"
    """How ``inputs`` are given to the model, as code."""
    setup: tuple[str, ...] = ()
    """Code that makes ``model`` and ``inputs`` of what the file defines."""
    notes: tuple[str, ...] = ()
    make_batch: Callable[[int], Any] | None = None
    """Makes the inputs of batch 0, 1, 2, …, where they are not fixed; draws from torch's generator, or is seeded."""

    def batch(self, index: int) -> Target:
        """This target with the inputs of another batch; raises :class:`UsageError` where there is only one."""
        if index == 0:
            return self
        if self.make_batch is None:
            raise UsageError("The inputs are fixed, so there is only one batch.", _PASTE_BATCHES)
        args, kwargs = as_call(self.make_batch(index))
        mine, others = (list(leaves(given)) for given in ((self.args, self.kwargs), (args, kwargs)))
        if len(mine) == len(others) and all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, others, strict=True)):
            raise UsageError(f"Batch {index} is the same as batch 0.", _PASTE_BATCHES)
        return self._replace(args=args, kwargs=kwargs)

    def call(self, model: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """What to call: ``model`` (by default the target's own), and the loss on its output if there is one."""
        model, loss = model or self.model, self.loss
        if loss is None:
            return model

        def model_and_loss(*args: Any, **kwargs: Any) -> WithLoss:
            output = model(*args, **kwargs)
            return WithLoss(output, loss(output))

        return model_and_loss


def load_target(spec: str, inputs: tuple[str, ...] = ()) -> Target:
    """Load ``file.py``, ``file.py:attr``, ``package.module:attr`` or ``torchvision:name``.

    ``inputs`` are shapes (``1x3x224x224``, ``ids=1x128:int64``) for where the file gives none. Raises
    :class:`UsageError` for everything that is the caller's to mend.
    """
    if spec.startswith("torchvision:"):
        from lowprec_check.engine.model.torchvision_zoo import load_torchvision

        target = load_torchvision(spec.partition(":")[2], inputs)
    else:
        with contextlib.redirect_stdout(sys.stderr), _own_arguments(spec):
            target = _load_from_module(spec, inputs)
    return check(target)


def make_target(model: nn.Module, inputs: Any, *, loss: Any = None, metric: Any = None) -> Target:
    """A target from objects at hand; raises :class:`UsageError` as :func:`load_target` does."""
    given = inputs() if _is_function(inputs) else inputs
    args, kwargs = as_call(given)
    name, source, form = type(model).__name__, _class_line(model), call_form(given)
    make_batch = functools.partial(_call_with_number, inputs) if _is_function(inputs) else None
    return check(Target(name, model, args, kwargs, loss, metric, source, form, make_batch=make_batch))


@contextlib.contextmanager
def _own_arguments(spec: str) -> Iterator[None]:
    """A file that parses ``sys.argv`` sees its own name and nothing of ours."""
    kept, sys.argv = sys.argv, [spec.rpartition(":")[0] or spec]
    try:
        yield
    finally:
        sys.argv = kept


# -- checking


def check(target: Target) -> Target:
    """Refuse what cannot be scanned, and unwrap what can be scanned better inside."""
    model, notes = target.model, list(target.notes)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "The model is a ScriptModule: its ops belong to no Python module or line, so nothing could be located.",
            "Scan the Python module that it was made from.",
        )
    original = getattr(model, "_orig_mod", None)
    if isinstance(original, nn.Module):
        notes.append("the model was compiled: the original module was scanned in eager mode")
        model = original
    if not isinstance(model, nn.Module):
        raise UsageError(f"The target is a {type(model).__name__}, not a torch.nn.Module.")
    state = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in state):
        raise UsageError(
            "The model has parameters on the meta device: there are no values to run.",
            "Materialise it first: model.to_empty(device='cpu'), then load or initialise its weights.",
        )
    if not any(tensor.is_floating_point() for tensor in state):
        raise UsageError(
            "The model has no floating parameters: there is nothing to cast.",
            "If it is quantised, scan the floating-point model that it was made from.",
        )
    if any(is_lazy(tensor) for tensor in state):
        raise UsageError(
            "The model has lazy modules that were not run yet: their shapes are unknown.",
            "Run it once on its inputs in your file, before the scan.",
        )
    dtypes = {str(p.dtype)[6:] for p in model.parameters() if p.is_floating_point()} - {"float32"}
    if dtypes:
        notes.append(f"the model has {' and '.join(sorted(dtypes))} parameters: it was scanned as fp32")
    if model.training:
        notes.append("the model is in training mode; call model.eval() in your file if you mean inference")
    return target._replace(model=model, notes=tuple(notes))


# -- loading


def _load_from_module(spec: str, inputs: tuple[str, ...]) -> Target:
    path, attribute = _split(spec)
    module = _import_file(Path(path)) if path.endswith(".py") else _import_name(path)
    found_name, found = _find_model(module, attribute)
    model, source = _make(module, found_name, found)
    given = parse_inputs(inputs) if inputs else _inputs_of(module)
    args, kwargs = as_call(given)
    title = f"{Path(path).stem if path.endswith('.py') else path}:{found_name}" if attribute else type(model).__name__
    return Target(
        title,
        model,
        args,
        kwargs,
        loss=_optional(module, "loss"),
        metric=_optional(module, "metric"),
        source=source or _class_line(model),
        form=call_form(given),
        make_batch=_make_batch(module, inputs),
        setup=_setup(module, found_name, found, given_by_file=not inputs),
    )


def _split(spec: str) -> tuple[str, str | None]:
    path, colon, attribute = spec.rpartition(":")
    if not colon or attribute.endswith(".py") or "/" in attribute or "\\" in attribute:
        path, attribute = spec, ""
    if not path.endswith(".py"):
        if not attribute and (path.endswith(("/", "\\")) or Path(path).exists()):
            raise UsageError(
                f"{spec} is not a Python file.", "Give a .py file, package.module:attr or torchvision:name."
            )
        if not attribute:
            raise UsageError(
                f"{spec!r} names neither a file nor an attribute of a module.",
                "Give mymodel.py, mymodel.py:make_model, package.module:attr or torchvision:resnet50.",
            )
    return path, attribute or None


def _import_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise UsageError(f"No such file: {path}.", "Give the path of the Python file that makes the model.")
    path = path.resolve()
    package, root = path.stem, path.parent
    if (root / "__init__.py").exists():
        while (root / "__init__.py").exists():
            package, root = f"{root.name}.{package}", root.parent
    else:  # a package around the file's folder, so that `from .helper import x` works too
        parent = types.ModuleType(f"_lowprec_target_{root.name}")
        parent.__path__ = [str(root)]
        sys.modules[parent.__name__] = parent
        package = f"{parent.__name__}.{path.stem}"
    for folder in (str(root), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return _guarded(package, lambda: _execute(package, path))


def _execute(name: str, path: Path) -> types.ModuleType:
    if "." in name and not name.startswith("_lowprec_target_"):
        importlib.import_module(name.rpartition(".")[0])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_name(name: str) -> types.ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        missing = importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        missing = True
    if missing:
        raise UsageError(f"No module named {name!r}.", "Is it installed, or below this folder?")
    return _guarded(name, lambda: importlib.import_module(name))


def _guarded(what: str, work: Callable[[], T]) -> T:
    """Run the user's code; an exception becomes one line with their line."""
    try:
        return work()
    except UsageError:
        raise
    except SyntaxError as error:
        where = show_line(error.filename or what, error.lineno or 0)
        text = (error.text or "").strip()
        raise UsageError(f"Syntax error at {where}: {error.msg}.", f"    {text}" if text else None) from None
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if is_users(frame.filename)]
        if not theirs:
            raise UsageError(
                f"Calling {what}() failed: {type(error).__name__}: {error}", "It must need no argument."
            ) from None
        frame = ([f for f in theirs if "site-packages" not in f.filename] or theirs)[-1]
        where = show_line(frame.filename, frame.lineno or 0)
        raise UsageError(
            f"{type(error).__name__} at {where}: {str(error).strip() or 'no message'}", f"    {frame.line}"
        ) from None


# -- finding


def _find_model(module: types.ModuleType, attribute: str | None) -> tuple[str, Any]:
    if attribute is not None:
        if not hasattr(module, attribute):
            names = ", ".join(_candidates(module)) or "nothing that makes a model"
            raise UsageError(f"{_title(module)} has no {attribute!r}.", f"It has: {names}.")
        return attribute, getattr(module, attribute)
    if hasattr(module, "model"):
        return "model", module.model
    found = _candidates(module)
    if len(found) == 1:
        return found[0], getattr(module, found[0])
    name = _title(module)
    if found:
        choices = "\n".join(f"    lowprec-check scan {name}:{choice}" for choice in found)
        raise UsageError(f"{name} has several candidates for the model.", f"Name one:\n{choices}")
    raise UsageError(f"{name} has no model.", "Define `model`: a torch.nn.Module, or a function that makes one.")


def _candidates(module: types.ModuleType) -> list[str]:
    """Modules made at the top level; else factories by name; else classes that need no argument."""
    names = [name for name in vars(module) if not name.startswith("_")]
    instances = [name for name in names if isinstance(getattr(module, name), nn.Module)]
    factories = [name for name in names if name in FACTORIES and callable(getattr(module, name))]
    classes = [name for name in names if _is_zero_argument_module(getattr(module, name), module)]
    return instances or factories or classes


def _is_zero_argument_module(value: Any, module: types.ModuleType) -> bool:
    if not (isinstance(value, type) and issubclass(value, nn.Module)) or value.__module__ != module.__name__:
        return False
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):
        return False
    return True


def _make(module: types.ModuleType, name: str, found: Any) -> tuple[Any, str | None]:
    source = _definition_line(module, name)
    if isinstance(found, nn.Module) or not callable(found):
        return found, source
    made = _guarded(name, found)
    if not isinstance(made, nn.Module):
        raise UsageError(f"{_title(module)}:{name} made a {type(made).__name__}, not a torch.nn.Module.")
    return made, source


def _setup(module: types.ModuleType, name: str, found: Any, *, given_by_file: bool) -> tuple[str, ...]:
    lines = []
    if not isinstance(found, nn.Module):
        lines.append(f"model = {name}()")
    elif name != "model":
        lines.append(f"model = {name}")
    if given_by_file and _is_function(getattr(module, "inputs", None)):
        lines.append("inputs = inputs()")
    return tuple(lines)


def _inputs_of(module: types.ModuleType) -> Any:
    given = getattr(module, "inputs", None)
    if given is None:
        raise UsageError(f"{_title(module)} says nothing of its inputs.", PASTE_INPUTS)
    return _guarded("inputs", given) if _is_function(given) else given


def _make_batch(module: types.ModuleType, inputs: tuple[str, ...]) -> Callable[[int], Any] | None:
    if inputs:
        return lambda index: parse_inputs(inputs, seed=index)
    given: Any = getattr(module, "inputs", None)
    if not _is_function(given):
        return None
    return lambda index: _guarded("inputs", lambda: _call_with_number(given, index))


def _call_with_number(given: Callable[..., Any], index: int) -> Any:
    """``given(index)`` where it takes an argument, else ``given()``."""
    try:
        inspect.signature(given).bind(index)
    except (TypeError, ValueError):
        return given()
    return given(index)


def _optional(module: types.ModuleType, name: str) -> Any:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise UsageError(f"`{name}` in {_title(module)} is a {type(value).__name__}, not a function.")
    return value


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, (Tensor, Mapping))


def _title(module: types.ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return show_line(file, 0).removesuffix(":0") if file else module.__name__


def _definition_line(module: types.ModuleType, name: str) -> str | None:
    """Where ``name`` is assigned or defined at the top level of the file."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    try:
        body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in body:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        named = [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]
        if name in named:
            return show_line(file, node.lineno)
    return None


def _class_line(model: nn.Module) -> str | None:
    if type(model).__module__.startswith("torch."):
        return None
    try:
        return show_line(inspect.getfile(type(model)), inspect.getsourcelines(type(model))[1])
    except (OSError, TypeError):
        return None
