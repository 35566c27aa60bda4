"""Aliases of functions, and the functions that the modules of ``torch.nn`` call."""

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
"""The aliases of torch, and ``sdpa``; ``special.expit`` is looked up without ``special``."""

_FUNCTION = {
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
"""The function that a module calls, if it has another name than the module."""

_RECURRENT = re.compile(r"^_*(mkldnn_|thnn_fused_|quantized_)?(lstm|gru|rnn)|transformer")
_NOT_IN_OPINFO = re.compile(r"^(fold|lp_?pool(\dd)?|crossmaplrn2d|adaptivelogsoftmaxwithloss)$")
_CONTAINERS = re.compile(r"^((base|data|distributed)?(module|parameter|parallel)\w*|container|sequential|identity)$")


def functions_of(module: str, ops: Iterable[str]) -> list[str]:
    """The functions that a module of ``torch.nn`` calls, variants included: ``nn.functional.batch_norm`` for ``LazyBatchNorm2d``."""
    name = re.sub(r"^(lazy|sync)", "", module.lower())
    stem = re.sub(r"\dd$", "", name)
    ops = list(ops)
    for wanted in (name, stem, name.removesuffix("loss")):
        function = _FUNCTION.get(wanted, wanted).replace("_", "")
        for space in ("nn.functional.", ""):
            found = [op for op in ops if op.startswith(space) and function in _forms(op.removeprefix(space))]
            if found:
                return found
    return []


def _forms(function: str) -> tuple[str, str]:
    """The spellings that module names use: ``pad.constant`` and ``pad``, ``batchnorm`` for ``batch_norm``."""
    plain = function.replace("_", "")
    return plain, plain.partition(".")[0]


def why_unmeasured(name: str) -> tuple[str, str] | None:
    """Why the catalog has no operator of that name, and what to do instead; ``None`` if the name is unknown."""
    name = name.lower()
    if _CONTAINERS.search(name):
        return (
            "has no operator of its own.",
            "Look up the modules inside it, or scan the model: `lowprec-check scan TARGET`.",
        )
    recurrent, other = _RECURRENT.search(name), _NOT_IN_OPINFO.search(name)
    if not recurrent and not other:
        return None
    missing = "recurrent or fused transformer layers" if recurrent else "it"
    return (
        f"is not measured: OpInfo, torch's description of its operators, does not include {missing}.",
        "Scan a model that uses it: `lowprec-check scan TARGET` runs it and lists what is not supported.",
    )
