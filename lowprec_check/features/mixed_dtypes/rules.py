"""LP103: what the dtypes are that meet in an op, where they come from, and the cast that passes."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.rules.kernels import from_gaps
from lowprec_check.analysis.rules.registry import Finding, rule
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.findings import WRITES_INTO, MixedCall, MixedInput
from lowprec_check.schema.scan_result import Gap, Run, ScanResult
from lowprec_check.schema.statements import Sentence, chained, fill, say, say_if, short_op


@rule("LP103", "dtype-mismatch", "error")
def dtype_mismatch(result: ScanResult) -> Iterator[Finding]:
    """One op gets floating-point inputs of different dtypes.

    Observed: the op failed as called and succeeded when all its floating-point inputs had the same
    dtype. The scan follows where these dtypes come from, and runs the model again with a cast at
    this op: what is written into a tensor, or meets a weight, gets the dtype of that; else all
    inputs are cast to 16 bits, or to fp32. The advice is the cast with which the output passed.

    Usual causes: a tensor created in `forward` with the default dtype; a tensor attribute that is
    not registered as a buffer, so `model.half()` does not cast it; an op that always returns fp32;
    the `backward` of a `torch.autograd.Function`, which runs without autocast on what its `forward`
    saved under it.

    What to do: create the tensor with the dtype of the data, register it as a buffer, or cast it at
    this line. Decorate `forward` of a `torch.autograd.Function` with `torch.amp.custom_fwd`
    (`device_type="cpu"` and `cast_inputs=torch.float32`) and `backward` with `torch.amp.custom_bwd`
    (`device_type="cpu"`); without `cast_inputs`, both run under autocast.

        # before
        y = torch.ones(8, 8) @ x
        # after
        y = torch.ones(8, 8, dtype=x.dtype, device=x.device) @ x
    """

    def advice(gap: Gap, run: Run) -> str:
        call = _mixed_call(gap, run)
        if call is None or run.mixed_dtypes is None:
            return "use one dtype: create the tensor with dtype=x.dtype, or cast it here"
        if run.mixed_dtypes.status != "ok":
            return ""
        return _cast_at(call)

    def observed(gap: Gap, run: Run) -> Sentence | None:
        call, tried = _mixed_call(gap, run), run.mixed_dtypes
        if call is None or tried is None:
            return None
        cast = "with what it gets cast to one dtype"
        if len(tried.calls) > 1:
            cast = "with casts at all such ops"
        # of several such ops, which are cast together, the first says what that gives
        passes = say_if(
            call is tried.calls[0] and tried.status == "ok" and tried.rel_l2 is not None,
            f"{cast}, the output passes, error {{error:error}}",
            error=tried.rel_l2,
        )
        return chained(_disabled_around(call, run), *(_origin_of(t, call) for t in _one_of_each_dtype(call)), passes)

    yield from from_gaps(result, "dtype-mismatch", advice, observed)


def _mixed_call(gap: Gap, run: Run) -> MixedCall | None:
    """The trial of a cast where ``gap`` is."""
    if run.mixed_dtypes is None or gap.phase != "forward":
        return None
    return next((call for call in run.mixed_dtypes.calls if call.place == gap.place), None)


def _disabled_around(call: MixedCall, run: Run) -> Sentence | None:
    """The region of autocast around ``call`` that torch disabled."""
    region = call.disabled_autocast
    if region is None:
        return None
    device = region.device
    if run.evidence == "predicted" and device == "cpu":  # that of the tensors in a stand-in
        device = device_type(run.device)
    what = f'torch.autocast("{device}", dtype={region.dtype}){fill(" at {}", region.source)}'
    words = "it is inside {region:text}, which torch disables: {warning:text}"
    return say(words, region=what, warning=region.warning.removesuffix("."))


def _one_of_each_dtype(call: MixedCall) -> list[MixedInput]:
    """One input for each dtype, with a known origin if there is one; a bias last."""
    by_dtype: dict[str, MixedInput] = {}
    for tensor in sorted(call.inputs, key=lambda tensor: (tensor.origin.kind == "unknown", _may_be_bias(tensor))):
        by_dtype.setdefault(tensor.dtype, tensor)
    return sorted(by_dtype.values(), key=call.inputs.index)


def _may_be_bias(tensor: MixedInput) -> bool:
    return tensor.argument in ("self", "bias")


_ORIGINS = {
    "autocast": "autocast computed it in {}",
    "parameter": "from the parameter {}",
    "buffer": "from the buffer {}",
    "attribute": "from {}, which is no parameter and no buffer",
    "input": "from the input {}",
    "made": "made by {}",
    "cast": "made by {}",
    "op": "the result of {}",
}


def _origin_of(tensor: MixedInput, call: MixedCall) -> Sentence:
    """``values is bfloat16: autocast computed it in linear at net.py:11``."""
    origin, why = tensor.origin, ""
    name = origin.name
    if origin.kind in ("parameter", "buffer", "attribute") and call.module:  # alike in all such modules
        name = name.removeprefix(f"{call.module}.")
    if origin.kind == "input" and name.isdigit():
        name = f"number {int(name) + 1}"
    elif origin.kind == "cast":
        name = "a cast"
    if origin.kind in _ORIGINS:
        why = f": {_ORIGINS[origin.kind].format(name)}{fill(' at {}', origin.source)}"
    return say("{argument:text} is {dtype:text}{why:text}", argument=tensor.argument, dtype=tensor.dtype, why=why)


def _cast_at(call: MixedCall) -> str:
    """The cast that the trial of ``call`` made, to write there."""
    cast = [tensor.argument for tensor in call.inputs if tensor.is_cast]
    others = [tensor for tensor in call.inputs if not tensor.is_cast]
    op, first = short_op(call.op), call.inputs[0]
    if op == "index_put_":
        return "cast what is assigned to the dtype of the tensor: out[index] = value.to(out.dtype)"
    if others and first is others[0] and op.removesuffix("_").removeprefix("torch.Tensor.") in WRITES_INTO:
        return f"cast what is written to the dtype of the tensor: out.{op}(…, {cast[0]}.to(out.dtype))"
    names = " and ".join(cast)
    if not others or others[0].dtype == "float32":
        return f"cast {names} here with .float()"
    other = min(others, key=_may_be_bias).argument
    if " " in other:
        return f"cast {names} here with .to(x.dtype), where x is {other}"
    return f"cast {names} here with .to({other}.dtype)"
