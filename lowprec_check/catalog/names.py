"""Names of operators and dtypes in the spellings that users write, aliases and modules included."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lowprec_check.catalog.records import FORMATS, LOW, SHORT, Dtype, OpRecord
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import PRECISIONS, Precision, formats
from lowprec_check.schema.registry import nearest

if TYPE_CHECKING:
    import torch


# -- Aliases of functions, and the functions that the modules of ``torch.nn`` call

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

# The function that a module calls, if it has another name than the module.
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

# Functions that OpInfo does not describe, and another operator with the same name.
_OTHERS = {"sparse.mm": "sparse.mm.reduce", "cond": "linalg.cond", "vander": "linalg.vander"}

_RECURRENT = re.compile(r"^_*(mkldnn_|thnn_fused_|quantized_)?(lstm|gru|rnn)|transformer")
_NOT_IN_OPINFO = re.compile(r"^(fold|lp_?pool(\dd)?|crossmaplrn2d|adaptivelogsoftmaxwithloss)$")
_CONTAINERS = re.compile(r"^((base|data|distributed)?(module|parameter|parallel)\w*|container|sequential|identity)$")


def functions_of(module: str, ops: Iterable[str]) -> list[str]:
    """The functions that a module of ``torch.nn`` calls, variants included."""
    name = re.sub(r"^(lazy|sync)", "", module.lower())
    stem = re.sub(r"\dd$", "", name)
    ops = [op for op in ops if not op.startswith("__")]
    for wanted in (name, stem, name.removesuffix("loss")):
        function = _FUNCTION.get(wanted, wanted).replace("_", "")
        for space in ("nn.functional.", ""):
            spelled = {op: op.removeprefix(space).replace("_", "") for op in ops if op.startswith(space)}
            named = [op for op, own in spelled.items() if function in (own, own.partition(".")[0])]
            if named:
                return named
    return []


def why_unmeasured(name: str) -> tuple[str, str] | None:
    """Why the catalog has no operator of that name, and what to do; ``None`` if unknown."""
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


# -- Names of operators and dtypes in the spellings that users write

AnyDtype: TypeAlias = "str | torch.dtype"
AnyDevice: TypeAlias = "str | torch.device"

_DTYPES: dict[str, Dtype] = {spelling: dtype for dtype in FORMATS for spelling in FORMATS[dtype].spellings}
_SPACES = {"linalg", "fft", "special", "masked", "sparse", "signal", "windows", "nn", "ops"}
_PREFIX = re.compile(
    r"^(torch\.ops\.)?aten(::|\.)|^(torch\.)?(nn\.functional|nn\.init|nn|Tensor)\.|^(F|torch)\.(?!ops\.)", re.IGNORECASE
)


def dtype_of(dtype: AnyDtype) -> Dtype:
    """``float16`` for ``half``, ``fp16`` and ``torch.float16``; else a :class:`UsageError`."""
    word = str(dtype).strip()
    known_dtype = _DTYPES.get(word.lower().removeprefix("torch."))
    if known_dtype is not None:
        return known_dtype
    # A format of another package, a precision that is no dtype, or a typing mistake.
    precision, near = PRECISIONS.find(word), nearest(word, _DTYPES)
    others = [other for other in formats() if other.name not in FORMATS]
    if any(other.is_called(word) for other in others) or (precision is not None and precision.format in others):
        raise UsageError(f"The catalog has no data for {word}.", "Choose half, bfloat16 or fp32.")
    if precision is not None:
        hint = "Choose half or bfloat16; results under autocast have a column of their own."
        raise UsageError(f"{precision.name} is not a dtype.", hint)
    hint = "Choose half, bfloat16 or fp32."
    if near:
        hint = f"Did you mean {SHORT[_DTYPES[near]]}? {hint}"
    raise UsageError(f"{word!r} is not a dtype in the catalog.", hint)


def low_dtype_of(dtype: AnyDtype) -> Dtype:
    """``half`` or ``bfloat16`` in any usual spelling; else a :class:`UsageError`."""
    low = dtype_of(dtype)
    if low not in LOW:
        raise UsageError("fp32 is the baseline.", "Choose half or bfloat16.")
    return low


def why_not_covered(precision: Precision) -> str | None:
    """Why the catalog does not know a precision (of another package); ``None`` if it does."""
    if precision.kind == "custom":
        return f"{precision.name} changes a model by its own code, and the catalog covers casts and autocast"
    if precision.format.name not in FORMATS:
        return f"the catalog has no data for {precision.format.name}, the dtype of {precision.name}"
    return None


def bare(name: str) -> str:
    """``dot`` for ``torch.dot``, ``aten::dot``, ``Tensor.dot`` and ``dot()``."""
    name = name.strip().removesuffix("()").removesuffix(".default")
    return _PREFIX.sub("", name)


def overload_name(op: str) -> str:
    """`add.Tensor` for `aten.add.Tensor` and `torch.ops.aten.add.Tensor`; no `.default`."""
    return re.sub(r"^(torch\.ops\.)?aten(\.|::)", "", op).removesuffix(".default")


def function_name(op: str) -> str:
    """``fft_rfft`` for ``torch.fft.rfft``, ``std`` for ``std.unbiased``, ``add`` for ``add_``."""
    parts = bare(op).split(".")
    spaces = 2 if parts[:2] == ["signal", "windows"] else int(parts[0] in _SPACES)
    return _functional("_".join(parts[: spaces + 1]))


class FoundOps(NamedTuple):
    """The operators that a name refers to."""

    records: list[OpRecord]
    """The best match first."""
    dispatching: str | None = None
    """The aten op of that name, if it is not an operator itself but these operators dispatch it."""


def find(query: str, records: Mapping[str, OpRecord]) -> list[OpRecord]:
    """The operators that :func:`search` finds for ``query``."""
    return search(query, records).records


def search(query: str, records: Mapping[str, OpRecord]) -> FoundOps:
    """The operators that ``query`` refers to, by the first rule that finds any.

    - the operator of exactly that name (``linalg.svd``);
    - operators that the module calls (``LayerNorm``), or whose last part is the name (``svd``),
      also without overload, not in place (``aten::add_.Tensor``), or by alias (``clip``);
    - operators that dispatch an aten op of that name, in training too (``_linalg_svd``).

    Raises :class:`UsageError` that suggests similar names if there is none.
    """
    name = bare(query)
    exact = re.sub(r"^F\.", "nn.functional.", query.strip().removeprefix("torch.").removesuffix("()"))
    # The last part alone means any operator.
    other = _OTHERS.get(name) if re.search(r"[.:]", query) else None
    if other in records and name not in records:
        missing = "is not measured: OpInfo, torch's description of its operators, does not include it."
        raise UsageError(f"{query} {missing}", f"{other} is another operator.")
    if exact in records and "." in exact:
        return FoundOps([records[exact]])
    # As a function, or as a module: the one that the case suggests comes first.
    is_module = name[:1].isupper() and not name.isupper()
    ops = functions_of(name, records) if is_module else []
    ops = ops or _spelled(name, {op: _last_parts(op) for op in records}) or functions_of(name, records)
    dispatching = None
    if not ops:  # as an aten op
        aten_ops = {op: (*record.aten, *record.backward_aten) for op, record in records.items()}
        forms = {
            op: {form.lower() for overload in overloads for form in (overload, overload.partition(".")[0])}
            for op, overloads in aten_ops.items()
        }
        ops, dispatching = _spelled(name, forms), _without_overload(name)
    if not ops:
        why = why_unmeasured(name)
        if why:
            raise UsageError(f"{query} {why[0]}", why[1])
        # What is similar: names that it is part of, or nearly is.
        wanted, parts = name.lower(), {part: op for op in records for part in _last_parts(op)}
        inside = [op for op in records if len(wanted) > 2 and wanted in op.lower()]
        near = [parts[part] for part in difflib.get_close_matches(wanted, parts, n=5, cutoff=0.6)]
        similar = list(dict.fromkeys(inside + near))[:6]
        hint = "`lowprec-check catalog gaps` lists operators with gaps."
        if similar:
            hint = f"Did you mean {', '.join(similar)}?"
        raise UsageError(f"The catalog has no operator {query!r}.", hint)
    # Of several those that dispatch the overload that is named, if any does.
    if name != _without_overload(name):
        ops = [op for op in ops if name in records[op].aten] or ops
    return FoundOps([records[op] for op in sorted(ops, key=lambda op: (op != exact, len(op)))], dispatching)


def _spelled(name: str, forms: Mapping[str, set[str]]) -> list[str]:
    """The operators that have the first spelling of ``name`` that any has among its forms."""
    # The name, then without overload, then not in place, then its aliases.
    name = name.lower()
    base = _without_overload(name)
    functional = _functional(base)
    own = re.sub(r"^special[._]", "", functional)
    spellings = (name, base, functional, ALIASES.get(functional, functional), ALIASES.get(own, own))
    matches = ([op for op in forms if spelling in forms[op]] for spelling in spellings)
    return next(filter(None, matches), [])


def _without_overload(name: str) -> str:
    head, dot, _ = name.partition(".")
    return name if not dot or head in _SPACES else head


def _functional(name: str) -> str:
    if name.endswith("__"):
        return name
    return name.removesuffix("_")


def _last_parts(op: str) -> set[str]:
    """``conv2d`` for ``nn.functional.conv2d``, ``std`` for ``std.unbiased``, ``fft_rfft``."""
    short = bare(op).lower()
    head, _, tail = short.rpartition(".")
    parts = {op.lower(), short, tail, short.replace(".", "_")}
    if head and head.rpartition(".")[2] not in _SPACES:
        parts.add(head)  # ``tail`` is a variant
    return parts
