"""The formats that linear layers are quantized to: one table, from which rows, code and help are
made.

Each row of it is a configuration of torchao, as code, by the device whose kernels it uses. Where a
device lacks these kernels, values are quantized and dequantized instead (``emulation``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NEWEST = "0.18.0"
"""The torchao for torch 2.11 and later. 0.16 and 0.17 fail in ``convert_pt2e`` on torch 2.13."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A way to quantize the weights of linear layers, and what they multiply."""

    name: str
    weights: str
    """How weights are stored: ``int8 per output channel``."""
    activations: str = "as they are"
    """How the inputs of a layer are rounded in each call."""
    aliases: tuple[str, ...] = ()
    config: str
    """The configuration of torchao, as code, for every device without one of its own."""
    configs: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Those of devices with one of their own, by type; and with ``emulated`` that which computes
    without kernels, where torchao has one."""
    imports: tuple[str, ...]
    """Lines that import what the configuration names."""
    emulation: str | None = None
    """The function of ``emulation`` that rounds values to it, where torchao has no such
    configuration."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Types of devices with kernels."""
    capability: tuple[int, int] = (8, 0)
    """The least compute capability of an NVIDIA GPU with kernels."""
    precisions: tuple[str, ...] = ("bfloat16",)
    """What the rest of the model may run in."""
    multiple_of: tuple[int, int] = (1, 1)
    """What ``in_features`` and ``out_features`` of a layer must be multiples of; other layers are
    left alone."""
    misread: tuple[int, int] | None = None
    """The shape of weights whose one scale the kernels of torchao take for that of a block."""
    contiguous: bool = False
    """Whether torchao refuses inputs of a layer that are not contiguous, such as ``x[:, 0]``."""
    smooths: bool = False
    """Whether outliers of the activations are moved into the weights first, on calibration data."""
    freezes: bool = False
    """Whether the compiler takes the weights for constants on the CPU."""
    torchao: str | None = NEWEST
    """The release that it was made for; ``None``: any that fits the installed torch."""

    @property
    def summary(self) -> str:
        """One line for ``--help``."""
        text = f"torchao: linear layers with weights in {self.weights}"
        if self.activations != "as they are":
            text += f", activations in {self.activations}"
        return text

    def config_on(self, device: str, *, emulated: bool) -> str:
        """The code of the configuration for a type of device."""
        return self.configs.get("emulated" if emulated else device, self.config)

    def needs(self) -> str:
        """What has its kernels."""
        gpu = f"an NVIDIA GPU of compute capability {'.'.join(map(str, self.capability))} or later"
        if "cpu" in self.devices:
            return f"{self.name} needs a CPU, or {gpu}"
        return f"{self.name} needs {gpu}"

    @property
    def can_be_emulated(self) -> bool:
        """Whether a device without its kernels can compute its values."""
        return self.emulation is not None or "emulated" in self.configs

    @property
    def is_passed_by(self) -> bool:
        """Whether the fast path of ``nn.TransformerEncoder`` would read a layer's weight past what
        is in its place.
        """
        return self.smooths or self.can_be_emulated


_INT8_DYNAMIC = "Int8DynamicActivationInt8WeightConfig()"
_FP8 = "Float8DynamicActivationFloat8WeightConfig"
_FP4 = "torch.float4_e2m1fn_x2"
_MX = (
    "from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig",
    "from torchao.quantization.quantize_.common import KernelPreference",
)
_EITHER = ("fp32", "bfloat16")

FORMATS = (
    Format(
        name="int8-weight-only",
        weights="int8 per output channel",
        aliases=("int8-weights", "w8a16"),
        config="Int8WeightOnlyConfig()",
        imports=("from torchao.quantization import Int8WeightOnlyConfig",),
        precisions=_EITHER,
        torchao=None,
        # in fp32, constants would be what the weights in int8 stand for, in fp32
        freezes=False,
    ),
    Format(
        name="int8-dynamic",
        weights="int8 per output channel",
        activations="int8 per row",
        aliases=("dynamic", "w8a8"),
        config=_INT8_DYNAMIC,
        imports=("from torchao.quantization import Int8DynamicActivationInt8WeightConfig",),
        precisions=_EITHER,
        torchao=None,
        freezes=True,
    ),
    Format(
        name="int8-smoothquant",
        weights="int8 per output channel, after SmoothQuant",
        activations="int8 per row",
        aliases=("smoothquant", "smooth-quant"),
        config=_INT8_DYNAMIC,
        imports=(
            "from torchao.prototype.smoothquant import SmoothQuantConfig, SmoothQuantObservedLinear",
            "from torchao.quantization import Int8DynamicActivationInt8WeightConfig",
        ),
        precisions=_EITHER,
        smooths=True,
        freezes=True,
    ),
    Format(
        name="fp8-weight-only",
        weights="fp8 (e4m3) per output channel",
        aliases=("fp8-weights",),
        config="Float8WeightOnlyConfig()",
        imports=("from torchao.quantization import Float8WeightOnlyConfig",),
        precisions=_EITHER,
    ),
    Format(
        name="fp8-dynamic",
        weights="fp8 (e4m3) per output channel",
        activations="fp8 per row",
        aliases=("fp8", "fp8-dynamic-row"),
        config=f"{_FP8}(granularity=PerRow())",
        imports=(f"from torchao.quantization import {_FP8}, PerRow",),
        emulation="fp8_by_row",
        devices=("cuda",),
        capability=(8, 9),
        multiple_of=(16, 16),
    ),
    Format(
        name="fp8-dynamic-tensor",
        weights="fp8 (e4m3) per tensor",
        activations="fp8 per tensor",
        config=f"{_FP8}(granularity=PerTensor())",
        imports=(f"from torchao.quantization import {_FP8}, PerTensor",),
        emulation="fp8_by_tensor",
        devices=("cuda",),
        capability=(8, 9),
        multiple_of=(16, 16),
        misread=(128, 128),
    ),
    Format(
        name="int4-weight-only",
        weights="int4 per group of 128 inputs",
        aliases=("int4", "int4-weights", "w4a16"),
        config='Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")',
        configs={"cpu": "PrototypeInt4WeightOnlyConfig()"},
        imports=(
            "from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig",
            "from torchao.quantization import Int4WeightOnlyConfig",
        ),
        multiple_of=(128, 16),
    ),
    Format(
        name="mxfp8",
        weights="fp8 (e4m3) per block of 32",
        activations="the same",
        config="MXDynamicActivationMXWeightConfig()",
        configs={"emulated": "MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED)"},
        imports=_MX,
        devices=("cuda",),
        capability=(10, 0),
        contiguous=True,
        multiple_of=(32, 32),
    ),
    Format(
        name="mxfp4",
        weights="fp4 (e2m1) per block of 32",
        activations="the same",
        config=f"MXDynamicActivationMXWeightConfig(activation_dtype={_FP4}, weight_dtype={_FP4})",
        configs={
            "emulated": f"MXDynamicActivationMXWeightConfig(activation_dtype={_FP4}, weight_dtype={_FP4}, "
            "kernel_preference=KernelPreference.EMULATED)"
        },
        imports=_MX,
        devices=("cuda",),
        capability=(10, 0),
        contiguous=True,
        multiple_of=(32, 32),
    ),
    Format(
        name="nvfp4",
        weights="fp4 (e2m1) per block of 16, and per tensor",
        activations="the same",
        config="NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)",
        imports=("from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig",),
        emulation="nvfp4",
        devices=("cuda",),
        capability=(10, 0),
        contiguous=True,
        multiple_of=(16, 16),
    ),
)
"""All formats of linear layers, by bits."""
