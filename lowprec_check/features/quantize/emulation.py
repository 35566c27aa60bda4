"""Formats whose kernels a device lacks: values are quantized and dequantized by torchao, products
are computed in fp32. These functions are printed to paste, so each is whole by itself.
"""

from __future__ import annotations


def fp8_by_row(values):
    """``values`` as fp8 with a scale for each row has them."""
    import torch
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.workflows import Float8Tensor

    return Float8Tensor.from_hp(values, torch.float8_e4m3fn, PerRow()).dequantize(torch.float32)


def fp8_by_tensor(values):
    """``values`` as fp8 with one scale has them."""
    import torch
    from torchao.quantization import PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor

    return Float8Tensor.from_hp(values, torch.float8_e4m3fn, PerTensor()).dequantize(torch.float32)


def nvfp4(values):
    """``values`` as fp4 with a scale for each block of 16, and one for all, has them."""
    import torch
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    rows = values.reshape(-1, values.shape[-1]).contiguous()
    quantized = NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=per_tensor_amax_to_scale(rows.abs().max()))
    return quantized.dequantize(torch.float32).reshape(values.shape)


def emulate(model, rounded, filter_fn):
    """Let linear layers of ``model`` compute on values that are ``rounded``, in fp32."""
    import torch

    for name, module in model.named_modules():
        # its own forward may do more, and others may read its weight and the dtype of that
        if filter_fn(module, name) and getattr(module.forward, "__func__", None) is torch.nn.Linear.forward:
            weight = rounded(module.weight.detach())
            bias = module.bias.detach().float() if module.bias is not None else None

            def forward(input, weight=weight, bias=bias):
                return torch.nn.functional.linear(rounded(input), weight, bias).to(input.dtype)

            module.forward = forward
