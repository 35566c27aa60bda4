"""The formats of ``scan --what-if``, and the output errors predicted for them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from lowprec_check.schema.base import Struct
from lowprec_check.schema.measures import Share
from lowprec_check.schema.registry import Registry

# -- The formats of ``scan --what-if``: how hardware computes a matrix product in each
#
# To add one, add an entry to :data:`WHAT_IF_FORMATS`, or register it from another package
# (CONTRIBUTING.md).

Scale = Literal["none", "tensor", "channel"]
"""What shares a factor to the largest number: nothing, a tensor, or an output channel."""


@dataclass(frozen=True)
class OperandFormat:
    """How an operand of a product is rounded."""

    dtype: str
    """A floating dtype of torch, ``float8_e4m3fn``; ``tf32``; or a symmetric integer, ``int8``."""
    scale: Scale = "none"


@dataclass(frozen=True, kw_only=True)
class WhatIfFormat:
    """A way to compute matrix products and convolutions that the device may lack."""

    name: str
    summary: str
    """In a few words, for ``--help``."""
    aliases: tuple[str, ...] = ()
    activations: OperandFormat | None = None
    """How operands that are not weights are rounded; ``None``: not at all."""
    weights: OperandFormat | None = None
    """How weights are rounded."""
    block: int | None = None
    """Products summed exactly before a sum rounded to ``result``; ``None``: all of them."""
    result: str | None = None
    """The dtype that the result is rounded to, the bias included, ``bfloat16``; ``None``: fp32."""
    weights_only: bool = False
    """Whether it applies to layers with weights only, not to products of activations."""


def _problem(format: WhatIfFormat) -> str | None:
    """What is wrong with a format of another package."""
    operands = [operand.dtype for operand in (format.activations, format.weights) if operand is not None]
    unknown = [dtype for dtype in operands if not re.fullmatch(r"tf32|int\d+|b?float\d\w*", dtype)]
    if unknown:
        return f"its dtype {unknown[0]!r} is neither a floating dtype of torch nor tf32 or an integer such as int8"
    if format.block is not None and (format.block < 1 or format.result is None):
        return "a block needs at least one product and a result dtype"
    return None


_E4M3, _E5M2 = OperandFormat("float8_e4m3fn", "tensor"), OperandFormat("float8_e5m2", "tensor")
_TF32, _BF16 = OperandFormat("tf32"), OperandFormat("bfloat16")
WHAT_IF_FORMATS: Registry[WhatIfFormat] = Registry(
    "what-if format",
    WhatIfFormat,
    (
        # torchao's ``Float8DynamicActivationFloat8WeightConfig`` with its default granularity, one
        # scale per tensor, amax / 448, found from the values of the call; ``torch._scaled_mm``
        # multiplies, adds up in fp32 and returns bf16. Like there, and in Transformer Engine's
        # recipes, layers are in fp8, and products of two activations are not.
        WhatIfFormat(
            name="fp8-e4m3",
            summary="layers in 8 bits, e4m3",
            aliases=("fp8", "e4m3", "float8_e4m3fn", "torch.float8_e4m3fn"),
            activations=_E4M3,
            weights=_E4M3,
            result="bfloat16",
            weights_only=True,
        ),
        # The same with activations in e5m2, amax / 57344. Weights stay in e4m3:
        # ``torch._scaled_mm`` and cuBLASLt multiply no two e5m2 matrices.
        WhatIfFormat(
            name="fp8-e5m2",
            summary="layers in 8 bits, activations e5m2",
            aliases=("e5m2", "float8_e5m2", "torch.float8_e5m2"),
            activations=_E5M2,
            weights=_E4M3,
            result="bfloat16",
            weights_only=True,
        ),
        # ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.backends.cudnn.allow_tf32``. Both
        # operands are rounded to 10 bits of mantissa, to nearest, halves away from zero, as PTX's
        # ``cvt.rna.tf32.f32`` does; sums and result are fp32.
        WhatIfFormat(
            name="tf32",
            summary="matrix products and convolutions in TF32",
            aliases=("tensorfloat32", "tensor-float-32"),
            activations=_TF32,
            weights=_TF32,
        ),
        # torchao's ``Int8WeightOnlyConfig``: symmetric int8 with a scale per output channel, amax /
        # 127. Activations and results stay in fp32 here, so that the error is that of the weights
        # alone.
        WhatIfFormat(
            name="int8-weights",
            summary="weights of layers in int8",
            aliases=("int8-weight-only", "w8", "w8a16"),
            weights=OperandFormat("int8", "channel"),
            weights_only=True,
        ),
        # Operands in bf16 and a running sum that is rounded to bf16 after every 32 products, the
        # depth of one tile instruction (AMX's ``TDPBF16PS``).
        # ``allow_bf16_reduced_precision_reduction`` permits sums in bf16 on CUDA; this is a
        # pessimistic model of it, since its kernels round the sums of larger parts.
        WhatIfFormat(
            name="bf16-accumulate",
            summary="bf16 with sums in bf16",
            aliases=("bf16-accumulation", "bfloat16-accumulate"),
            activations=_BF16,
            weights=_BF16,
            block=32,
            result="bfloat16",
        ),
    ),
    _problem,
)
"""All formats, in the order of reports; the comments name the source of what each models."""


# -- Output errors that were predicted, for formats in which nothing was run


class WhatIf(Struct, frozen=True, kw_only=True):
    """The output error that a format is predicted to cause; nothing was run in it."""

    format: str
    """A name in :data:`~lowprec_check.schema.what_if.WHAT_IF_FORMATS`."""
    evidence: Literal["predicted"] = "predicted"
    """Always ``predicted``."""
    predicted: float | None = None
    """rel_l2 of the output to first order; ``None`` if it is not known."""
    shares: list[Share] = []
    """The places with the largest shares of the squared error, largest first."""
    note: str | None = None
    """What the prediction leaves out, or why there is none."""
