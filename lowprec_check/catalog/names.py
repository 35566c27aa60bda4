"""Names of operators and dtypes in the spellings that users write."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lowprec_check.catalog.aliases import ALIASES, functions_of, why_unmeasured
from lowprec_check.catalog.records import FORMATS, LOW, SHORT, Dtype, OpRecord
from lowprec_check.errors import UsageError
from lowprec_check.schema.precisions import PRECISIONS, Precision, formats
from lowprec_check.schema.registry import nearest

if TYPE_CHECKING:
    import torch

AnyDtype: TypeAlias = "str | torch.dtype"
AnyDevice: TypeAlias = "str | torch.device"

_DTYPES: dict[str, Dtype] = {
    spelling: dtype for dtype, described in FORMATS.items() for spelling in described.spellings
}
_SPACES = {"linalg", "fft", "special", "masked", "sparse", "signal", "windows", "nn", "ops"}
_PREFIX = re.compile(
    r"^(torch\.ops\.)?aten(::|\.)|^(torch\.)?(nn\.functional|nn\.init|nn|Tensor)\.|^(F|torch)\.(?!ops\.)", re.IGNORECASE
)


def dtype_of(dtype: AnyDtype) -> Dtype:
    """``float16`` for ``half``, ``fp16`` and ``torch.float16``; raises :class:`UsageError` for an unknown dtype."""
    word = str(dtype).strip()
    found = _DTYPES.get(word.lower().removeprefix("torch."))
    if found is not None:
        return found
    precision, near = PRECISIONS.find(word), nearest(word, _DTYPES)
    others = [known for known in formats() if known.name not in FORMATS]
    if any(known.is_called(word) for known in others) or (precision is not None and precision.format in others):
        raise UsageError(f"The catalog has no data for {word}.", "Choose half, bfloat16 or fp32.")
    if precision is not None:
        raise UsageError(
            f"{precision.name} is not a dtype.",
            "Choose half or bfloat16; results under autocast have a column of their own.",
        )
    suggestion = f"Did you mean {SHORT[_DTYPES[near]]}? " if near else ""
    raise UsageError(f"{word!r} is not a dtype in the catalog.", f"{suggestion}Choose half, bfloat16 or fp32.")


def low_dtype_of(dtype: AnyDtype) -> Dtype:
    """``half`` or ``bfloat16`` in any usual spelling; raises :class:`UsageError` for other dtypes and for fp32."""
    low = dtype_of(dtype)
    if low not in LOW:
        raise UsageError("fp32 is the baseline.", "Choose half or bfloat16.")
    return low


def why_not_covered(precision: Precision) -> str | None:
    """Why the catalog does not say what runs in a precision, which another package registers; ``None`` if it does."""
    if precision.kind == "custom":
        return f"{precision.name} changes a model by its own code, and the catalog covers casts and autocast"
    if precision.format.name not in FORMATS:
        return f"the catalog has no data for {precision.format.name}, the dtype of {precision.name}"
    return None


def bare(name: str) -> str:
    """An operator without namespace and parentheses: ``dot`` for ``torch.dot``, ``aten::dot``, ``Tensor.dot``, ``dot()``."""
    name = name.strip().removesuffix("()").removesuffix(".default")
    return _PREFIX.sub("", name)


def function_name(op: str) -> str:
    """The aten name of an operator's function: ``fft_rfft`` for ``torch.fft.rfft``, ``std`` for ``std.unbiased``, ``add`` for ``add_.Tensor``."""
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
    """The operators that ``query`` refers to.

    The first of these that finds any:

    - the operator of exactly that name (``linalg.svd``);
    - operators that the module calls (``LayerNorm``), or whose last part is the name, variants included (``svd``: ``svd``,
      ``linalg.svd``), also without overload, without the underscore of in-place ops (``aten::add_.Tensor``), or by alias (``clip``);
    - operators that dispatch an aten op of that name, in training too (``_linalg_svd``, ``gelu_backward``).

    Raises :class:`UsageError` that suggests similar names if there is none.
    """
    exact = re.sub(r"^F\.", "nn.functional.", query.strip().removeprefix("torch.").removesuffix("()"))
    if exact in records and "." in exact:
        return FoundOps([records[exact]])
    name = bare(query)
    is_module = name[:1].isupper() and not name.isupper()
    searches = (functions_of, _named) if is_module else (_named, functions_of)
    found = next(filter(None, (named(name, records) for named in searches)), [])
    dispatching = [] if found else _dispatching(name, records)
    if not found and not dispatching:
        raise _unknown(query, name, records)
    ordered = sorted(found or dispatching, key=lambda op: (op != exact, len(op)))
    return FoundOps([records[op] for op in ordered], None if found else _without_overload(name))


def _named(name: str, records: Mapping[str, OpRecord]) -> list[str]:
    parts = {op: _last_parts(op) for op in records}
    matches = ([op for op in parts if spelling in parts[op]] for spelling in _spellings(name))
    return next(filter(None, matches), [])


def _dispatching(name: str, records: Mapping[str, OpRecord]) -> list[str]:
    ops = {op: {*record.aten, *record.backward_aten} for op, record in records.items()}
    aten = {
        op: {form.lower() for name in names for form in (name, name.partition(".")[0])} for op, names in ops.items()
    }
    matches = ([op for op in aten if spelling in aten[op]] for spelling in _spellings(name))
    return next(filter(None, matches), [])


def _spellings(name: str) -> Iterator[str]:
    """The name, then without overload, then without the underscore of in-place ops, then its aliases."""
    name = name.lower()
    yield name
    yield (base := _without_overload(name))
    yield (functional := _functional(base))
    yield ALIASES.get(functional, functional)
    own = re.sub(r"^special[._]", "", functional)
    yield ALIASES.get(own, own)


def _without_overload(name: str) -> str:
    head, dot, _ = name.partition(".")
    return name if not dot or head in _SPACES else head


def _functional(name: str) -> str:
    return name if name.endswith("__") else name.removesuffix("_")


def _last_parts(op: str) -> set[str]:
    """Short names of an operator: ``conv2d`` for ``nn.functional.conv2d``, ``std`` for ``std.unbiased``, ``fft_rfft`` for ``fft.rfft``."""
    short = bare(op).lower()
    head, _, tail = short.rpartition(".")
    base = {head} if head and head.rpartition(".")[2] not in _SPACES else set()
    return {op.lower(), short, tail, short.replace(".", "_"), *base}


def _unknown(query: str, name: str, records: Mapping[str, OpRecord]) -> UsageError:
    if why := why_unmeasured(name):
        return UsageError(f"{query} {why[0]}", why[1])
    return UsageError(f"The catalog has no operator {query!r}.", _suggestion(name.lower(), list(records)))


def _suggestion(wanted: str, ops: list[str]) -> str:
    names = {part: op for op in ops for part in _last_parts(op)}
    inside = [op for op in ops if len(wanted) > 2 and wanted in op.lower()]
    near = [names[part] for part in difflib.get_close_matches(wanted, names, n=5, cutoff=0.6)]
    nearest = list(dict.fromkeys(inside + near))[:6]
    return (
        f"Did you mean {', '.join(nearest)}?" if nearest else "`lowprec-check catalog gaps` lists operators with gaps."
    )
