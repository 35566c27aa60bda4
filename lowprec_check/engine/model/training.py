"""How a model is trained: its loss and its optimizer, those of the user's file or defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from lowprec_check.engine.model.observed_training import ObservedLoss
from lowprec_check.engine.model.user_code import call_user_code, parameters_of, required_arguments
from lowprec_check.engine.model.whole_optimizer import (
    OptimizerLike,
    OptimizersLike,
    OptimizersTogether,
    WholeOptimizer,
    takes_closure,
)
from lowprec_check.errors import UsageError, message_of, type_name
from lowprec_check.torchkit.floating_dtypes import is_float
from lowprec_check.torchkit.pytree import leaves

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

DEFAULT_LEARNING_RATE = 1e-3


class LossInputs(NamedTuple):
    """What a loss may read besides the output, for one batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...] = ()  # the elements of a batch that the model does not take


def loss_of(loss: Callable[..., Any] | None, output: Any, inputs: LossInputs) -> Tensor:
    """The loss of ``output``; a function that requires more gets the targets too, else the inputs.

    Without a function: the loss that the model itself returns, perhaps in a tuple; cross-entropy
    with fixed random labels for an output of shape (N, classes); else the mean squared difference
    from fixed random targets. Raises :class:`UsageError` for what is no loss.
    """
    if loss is None:
        own = _own_loss(output)
        if own is not None:
            return own.loss
        tensors = [tensor for _, tensor in leaves(output) if is_float(tensor) and tensor.numel()]
        if not tensors:
            hint = "Define `loss(output)` in the file."
            raise UsageError("The output of the model has no floating-point tensor to compute a loss from.", hint)
        # Drawn on the CPU, so that all devices and precisions train for the same
        generator = torch.Generator().manual_seed(0)
        scores = _scores(output, tensors)
        if scores is not None:
            labels = torch.randint(0, scores.shape[1], scores.shape[:1], generator=generator)
            return nn.functional.cross_entropy(scores, labels.to(scores.device))
        terms = []
        for tensor in tensors:
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            target = torch.randn(values.shape, generator=generator).to(values.device).to(values.dtype)
            terms.append((values - target).square().mean())
        if len(terms) > 1:
            return torch.stack(terms).sum()
        return terms[0]
    args, kwargs = (), dict[str, Any]()
    if required_arguments(loss) > 1:
        # A batch with more than the model takes has the targets; else the loss reads the inputs
        what, args = "targets", inputs.targets
        if not inputs.targets:
            what, args, kwargs = "inputs", inputs.args, inputs.kwargs
        try:
            inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(output, *args, **kwargs)
        except TypeError as error:
            raise UsageError(
                f"`loss` cannot be called with the output and the {what} of the batch: {message_of(error)}.",
                "Define `loss(output)`, or a function of the output and of these, in this order.",
            ) from None
    value = loss(output, *args, **kwargs)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise UsageError(
            f"`loss` returned an object of type {type_name(value)}{shape}, not a tensor with one element.",
            "Return a scalar tensor, for example torch.nn.functional.cross_entropy(output, labels).",
        )
    return value


class _OwnLoss(NamedTuple):
    loss: Tensor
    code: str


def _own_loss(output: Any) -> _OwnLoss | None:
    """The loss that the model returns: ``output.loss``, a scalar, or the only scalar of a tuple."""
    is_mapping = isinstance(output, Mapping)
    own = output.get("loss") if is_mapping else getattr(output, "loss", None)
    if _may_be_loss(own) and own.numel() == 1:
        return _OwnLoss(own, 'output["loss"]' if is_mapping else "output.loss")
    parts = enumerate(output) if isinstance(output, (list, tuple)) else ()
    values = [(output, "output"), *((part, f"output[{index}]") for index, part in parts)]
    scalars = [_OwnLoss(value, code) for value, code in values if _may_be_loss(value) and value.ndim == 0]
    # Several scalars may be parts of a loss, so none of them is taken
    return scalars[0] if len(scalars) == 1 else None


def _may_be_loss(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _scores(output: Any, tensors: list[Tensor]) -> Tensor | None:
    """The scores (N, classes): the only tensor, or ``logits`` (…, classes) of transformers."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and logits.ndim in (2, 3):
        scores = logits.flatten(0, -2)
    elif len(tensors) == 1 and tensors[0].ndim == 2:
        scores = tensors[0]
    else:
        return None
    # The cross-entropy of a single class is always zero
    return scores if scores.shape[1] > 1 and not scores.is_complex() else None


class DescribedLoss(NamedTuple):
    """A loss in words, and as code."""

    words: str
    code: str = "loss(output)"  # an expression of `output`, and perhaps `inputs` and `targets`
    setup: tuple[str, ...] = ()  # lines that define what the code needs


def describe_loss(loss: Callable[..., Any] | None, output: Any, form: str, targets_code: str) -> DescribedLoss:
    """The loss for an ``output`` of the model, which is called as ``form``: ``model(*inputs)``."""
    own = _own_loss(output)
    if isinstance(loss, ObservedLoss):
        code = own.code if loss.is_returned and own is not None else "loss(output)"
        return DescribedLoss(loss.words, code, loss.setup)
    if loss is not None:
        words = f"{getattr(loss, '__name__', type(loss).__name__)} of the file"
        if required_arguments(loss) <= 1:
            return DescribedLoss(words)
        if targets_code:
            return DescribedLoss(words, "loss(output, *targets)", (f"targets = {targets_code}",))
        return DescribedLoss(words, form.replace("model(", "loss(output, ", 1))
    if own is not None:
        return DescribedLoss("the loss that the model returns", own.code)
    tensors = [tensor for _, tensor in leaves(output) if is_float(tensor)]
    if _scores(output, tensors) is None:
        return DescribedLoss("mean squared difference from random targets", setup=(_MEAN_SQUARE,))
    code = _CROSS_ENTROPY if getattr(output, "logits", None) is None else _OF_LOGITS
    return DescribedLoss("cross-entropy with random labels", setup=(code,))


_SCORES = (
    "(scores,) = (t for t in torch.utils._pytree.tree_leaves(output) if torch.is_tensor(t) and t.is_floating_point())"
)
_CROSS_ENTROPY = f"""\
def loss(output):  # replace it with your own
    {_SCORES}
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, scores.shape[1], scores.shape[:1], generator=generator)
    return torch.nn.functional.cross_entropy(scores, labels.to(scores.device))
"""

_OF_LOGITS = _CROSS_ENTROPY.replace(_SCORES, "scores = output.logits.flatten(0, -2)")

_MEAN_SQUARE = """\
def loss(output):  # replace it with your own
    tensors = [t for t in torch.utils._pytree.tree_leaves(output) if torch.is_tensor(t) and t.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    targets = [torch.randn(t.shape, generator=generator).to(t.device).to(t.dtype) for t in tensors]
    return torch.stack([(t - target).square().mean() for t, target in zip(tensors, targets)]).sum()
"""


def make_optimizer(optimizer: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The user's ``optimizer(parameters)``, or AdamW; checks that it is an optimizer of these."""
    if not parameters:
        hint = "Check requires_grad of its parameters."
        raise UsageError("The model has no parameter that requires a gradient, so there is nothing to train.", hint)
    if optimizer is None:
        return torch.optim.AdamW(parameters, lr=DEFAULT_LEARNING_RATE)
    made: Any = optimizer(parameters)
    if not (callable(getattr(made, "step", None)) and hasattr(made, "param_groups")):
        hint = "Return one, for example torch.optim.AdamW(parameters, lr=1e-3)."
        raise UsageError(f"`optimizer` returned an object of type {type_name(made)}, not an optimizer.", hint)
    # One of other parameters would train nothing of the model that is scanned
    allowed = {id(parameter) for parameter in parameters}
    if any(id(parameter) not in allowed for group in made.param_groups for parameter in group["params"]):
        raise UsageError("`optimizer(parameters)` returned an optimizer of other parameters.", _GROUPS)
    return made  # type: ignore[no-any-return]


_GROUPS = """\
Make the optimizer of the parameters that it is given, which may be fp32 copies of the model's. For parameter groups:

    def optimizer(parameters):
        weights = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-3)

Or let `optimizer` be an optimizer of model.parameters(): the scan makes others with its class and groups."""


def check_optimizer(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    """Raise :class:`UsageError` unless the optimizer can be made of copies of ``parameters``."""
    # As some ways to train do
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    made = call_user_code("Calling optimizer(parameters)", lambda: make_optimizer(optimizer, copies))
    if takes_closure(made):
        problem = f"{type(made).__name__}.step() needs a closure, and a scan of training calls step() without one."
        raise UsageError(problem, "Use another optimizer, such as torch.optim.AdamW(parameters, lr=1e-3).")


def optimizer_code(optimizer: Any) -> tuple[tuple[str, ...], str]:
    """Lines of code, and the expression that makes the ``optimizer`` of the user's file."""
    if optimizer is None:
        return (), f"torch.optim.AdamW(parameters, lr={DEFAULT_LEARNING_RATE})"
    if isinstance(optimizer, OptimizersLike):
        own = '[p for group in optimizer.param_groups for p in group["params"]]'
        code = _LIKE.replace("(parameters)", "(parameters, optimizer)").replace("model.parameters()", own)
        return (code,), "optimizer_like(parameters, optimizer)"
    if isinstance(optimizer, OptimizerLike):
        return (_LIKE,), "optimizer_like(parameters)"
    return (), "optimizer(parameters)"


_LIKE = """\
def optimizer_like(parameters):  # as `optimizer`, which a scheduler may have changed
    of = dict(zip([p for p in model.parameters() if p.requires_grad], parameters))
    groups = [
        {**group, "lr": group.get("initial_lr", group["lr"]), "params": [of[p] for p in group["params"] if p in of]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)(groups)
"""


def describe_optimizer(made: Any) -> str:
    """``SGD(lr=0.1, momentum=0.9)``: learning rate, weight decay, and what is not default."""
    if isinstance(made, OptimizersTogether):
        return " and ".join(map(describe_optimizer, made.parts))
    if isinstance(made, WholeOptimizer):
        described = describe_optimizer(made.inner)
        return described if made.owner is made.inner else f"{type(made.owner).__name__} of {described}"
    # Settings that are left as they are say nothing
    usual = {name: parameter.default for name, parameter in parameters_of(type(made)).items()}
    settings = []
    for name in made.defaults:
        values = list(dict.fromkeys(_number(group.get(name)) for group in made.param_groups))
        if name in ("lr", "weight_decay") or (name in usual and values != [_number(usual[name])]):
            settings.append(f"{name}={' / '.join(values)}")
    groups = len(made.param_groups)
    return f"{type(made).__name__}({', '.join(settings)})" + (f" with {groups} parameter groups" if groups > 1 else "")


def _number(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():g}" if value.numel() == 1 else "a tensor"
    return f"{value:g}" if isinstance(value, float) else str(value)
