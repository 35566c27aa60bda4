"""A model with parameters and inputs of several floating dtypes, called as it is given."""

from __future__ import annotations

import re

import torch

from lowprec_check.core.trace.instrument import call_under
from lowprec_check.engine.model.plain_run import describe_error
from lowprec_check.engine.model.prepared import Prepared
from lowprec_check.engine.model.target import Target
from lowprec_check.features.mixed_dtypes.casts_tried import Casting
from lowprec_check.features.mixed_dtypes.dtype_origins import DtypeOrigins
from lowprec_check.schema.findings import ModelAsGiven
from lowprec_check.torchkit.pytree import leaves
from lowprec_check.torchkit.source_location import ModuleStack


def floating_dtypes(target: Target) -> set[torch.dtype]:
    """Those of the parameters and of the inputs."""
    tensors = [*target.model.parameters(), *(tensor for _, tensor in leaves(target.inputs))]
    return {tensor.dtype for tensor in tensors if tensor.is_floating_point()}


def called_as_given(ready: Prepared, target: Target, seed: int) -> ModelAsGiven:
    """What one call of the model gives, without autocast; the op at which dtypes meet, if any."""
    # The modules that own parameters of each dtype, with ``*`` for numbers; each once.
    modules: dict[str, dict[str, None]] = {}
    for name, parameter in target.model.named_parameters():
        if parameter.is_floating_point():
            owner = re.sub(r"\b\d+\b", "*", name.rpartition(".")[0])
            modules.setdefault(str(parameter.dtype)[6:], {})[owner] = None
    dtypes = {dtype: list(names) for dtype, names in modules.items()}
    without_autocast = ready._replace(enters_context=True)
    with ModuleStack(ready.model) as stack:
        inputs = ready.inputs(target.args, target.kwargs)
        mode = Casting(stack, DtypeOrigins(ready.model, inputs), torch.float16, "narrow", [], raises=True)
        _, error = call_under(mode, without_autocast, *inputs, seed)
    if error is None:
        return ModelAsGiven(dtypes=dtypes)
    mixed = next(iter(mode.calls.values()), None)
    return ModelAsGiven(dtypes=dtypes, exception=describe_error(error, ready.model), mixed=mixed)
