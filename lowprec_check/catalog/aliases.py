"""Second names: of functions, and of the modules of ``torch.nn``, by the functions that they call. Never imports torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

ALIASES = {
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    "absolute": "abs",
    "adjoint": "mh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "expit": "sigmoid",
    "fix": "trunc",
    "gammainc": "igamma",
    "gammaincc": "igammac",
    "gammaln": "lgamma",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "grid_sampler": "grid_sample",
    "inverse": "linalg.inv",
    "less": "lt",
    "less_equal": "le",
    "linalg.matmul": "matmul",
    "linalg.matrix_exp": "matrix_exp",
    "moveaxis": "movedim",
    "multigammaln": "mvlgamma",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "orgqr": "linalg.householder_product",
    "psi": "digamma",
    "row_stack": "vstack",
    "sdpa": "scaled_dot_product_attention",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}
"""Torch's own, and one that people use; ``special.expit`` is looked up without ``special``."""

_CALLED = {
    "bceloss": "binary_cross_entropy",
    "bcewithlogitsloss": "binary_cross_entropy_with_logits",
    "circularpad": "pad.circular",
    "constantpad": "pad.constant",
    "multiheadattention": "multi_head_attention_forward",
    "reflectionpad": "pad.reflect",
    "replicationpad": "pad.replicate",
    "upsample": "interpolate",
    "upsamplingbilinear": "upsample_bilinear",
    "upsamplingnearest": "upsample_nearest",
    "zeropad": "pad.constant",
}
"""The function of a module that is not called after it."""

_RECURRENT = re.compile(r"^_*(mkldnn_|thnn_fused_|quantized_)?(lstm|gru|rnn)|transformer")
_NOT_DESCRIBED = re.compile(r"^(fold|lp_?pool(\dd)?|crossmaplrn2d|adaptivelogsoftmaxwithloss)$")
_CONTAINERS = re.compile(r"^((base|data|distributed)?(module|parameter|parallel)\w*|container|sequential|identity)$")


def functions_of(module: str, ops: Iterable[str]) -> list[str]:
    """What a module of ``torch.nn`` calls, variants included: ``nn.functional.batch_norm`` for ``LazyBatchNorm2d``."""
    name = re.sub(r"^(lazy|sync)", "", module.lower())
    stem = re.sub(r"\dd$", "", name)
    ops = list(ops)
    for wanted in (name, stem, name.removesuffix("loss")):
        function = _CALLED.get(wanted, wanted).replace("_", "")
        for space in ("nn.functional.", ""):
            found = [op for op in ops if op.startswith(space) and function in _forms(op.removeprefix(space))]
            if found:
                return found
    return []


def _forms(function: str) -> tuple[str, str]:
    """As modules are called: ``pad.constant`` and ``pad``, ``batchnorm`` for ``batch_norm``."""
    plain = function.replace("_", "")
    return plain, plain.partition(".")[0]


def why_unmeasured(name: str) -> tuple[str, str] | None:
    """Why the catalog has none of that name, and what to do instead; ``None`` where nothing is known of it."""
    name = name.lower()
    if _CONTAINERS.search(name):
        return "has no operator of its own.", "Ask for what is in it, or scan the model: `lowprec-check scan TARGET`."
    recurrent, other = _RECURRENT.search(name), _NOT_DESCRIBED.search(name)
    if not recurrent and not other:
        return None
    none_of = "no recurrent or fused transformer layers" if recurrent else "none of it"
    return (
        f"is not measured: torch's own description of its operators (OpInfo) has {none_of}.",
        "Scan a model that has it: `lowprec-check scan TARGET` runs it here and says what it lacks.",
    )
