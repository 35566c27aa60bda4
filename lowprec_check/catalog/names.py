"""Names as people write them: operators, dtypes. Never imports torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from lowprec_check.catalog.aliases import ALIASES, functions_of, why_unmeasured
from lowprec_check.catalog.records import FORMATS, LOW, Dtype, OpRecord
from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    import torch

AnyDtype: TypeAlias = "str | torch.dtype"
AnyDevice: TypeAlias = "str | torch.device"

_DTYPES: dict[str, Dtype] = {
    spelling: dtype for dtype, described in FORMATS.items() for spelling in (dtype, described.short, *described.aliases)
}
_SPACES = {"linalg", "fft", "special", "masked", "sparse", "signal", "windows", "nn", "ops"}
_PREFIX = re.compile(
    r"^(torch\.ops\.)?aten(::|\.)|^(torch\.)?(nn\.functional|nn\.init|nn|Tensor)\.|^(F|torch)\.(?!ops\.)", re.IGNORECASE
)


def dtype_of(dtype: AnyDtype) -> Dtype:
    """``half``, ``fp16``, ``torch.float16`` are ``float16``; raises :class:`UsageError` for others."""
    found = _DTYPES.get(str(dtype).strip().lower().removeprefix("torch."))
    if found is None:
        raise UsageError(f"{str(dtype)!r} is no dtype of the catalog.", "There are half, bfloat16 and fp32.")
    return found


def low_dtype_of(dtype: AnyDtype) -> Dtype:
    """``half`` or ``bfloat16`` in any usual spelling; raises :class:`UsageError` for others, fp32 among them."""
    low = dtype_of(dtype)
    if low not in LOW:
        raise UsageError("What a lower precision can is told beside what fp32 can.", "Give --dtype half or bfloat16.")
    return low


def bare(name: str) -> str:
    """An operator without namespace and call: ``dot`` for ``torch.dot``, ``aten::dot``, ``Tensor.dot``, ``dot()``."""
    name = name.strip().removesuffix("()").removesuffix(".default")
    return _PREFIX.sub("", name)


def function_name(op: str) -> str:
    """The function of an operator, as aten calls it: ``fft_rfft`` for ``torch.fft.rfft``, ``std`` for ``std.unbiased``, ``add`` for ``add_.Tensor``."""
    parts = bare(op).split(".")
    spaces = 2 if parts[:2] == ["signal", "windows"] else int(parts[0] in _SPACES)
    return _functional("_".join(parts[: spaces + 1]))


class FoundOps(NamedTuple):
    """The operators that a name stands for."""

    records: list[OpRecord]
    """The best match first."""
    dispatching: str | None = None
    """The aten op of that name, where it is no operator itself, and these dispatch it."""


def find(query: str, records: Mapping[str, OpRecord]) -> list[OpRecord]:
    """The operators that ``query`` names, as :func:`search` finds them."""
    return search(query, records).records


def search(query: str, records: Mapping[str, OpRecord]) -> FoundOps:
    """The operators that ``query`` names.

    An exact name (``linalg.svd``); else every operator that the module calls (``LayerNorm``), or whose last part it is, variants
    included (``svd``: ``svd``, ``linalg.svd``), if need be without overload and the mark of what works in place
    (``aten::add_.Tensor``), or by its other name (``clip``); or else every one that dispatches an aten op of that name, in training too
    (``_linalg_svd``, ``gelu_backward``). Raises :class:`UsageError` with the nearest names where there is none.
    """
    asked = re.sub(r"^F\.", "nn.functional.", query.strip().removeprefix("torch.").removesuffix("()"))
    if asked in records and "." in asked:
        return FoundOps([records[asked]])
    name = bare(query)
    is_module = name[:1].isupper() and not name.isupper()
    searches = (functions_of, _named) if is_module else (_named, functions_of)
    found = next(filter(None, (named(name, records) for named in searches)), [])
    dispatching = [] if found else _dispatching(name, records)
    if not found and not dispatching:
        raise _unknown(query, name, records)
    ordered = sorted(found or dispatching, key=lambda op: (op != asked, len(op)))
    return FoundOps([records[op] for op in ordered], None if found else _without_overload(name))


def _named(name: str, records: Mapping[str, OpRecord]) -> list[str]:
    parts = {op: _last_parts(op) for op in records}
    tried = ([op for op in parts if spelling in parts[op]] for spelling in _spellings(name))
    return next(filter(None, tried), [])


def _dispatching(name: str, records: Mapping[str, OpRecord]) -> list[str]:
    ops = {op: {*record.aten, *record.backward_aten} for op, record in records.items()}
    aten = {
        op: {form.lower() for name in names for form in (name, name.partition(".")[0])} for op, names in ops.items()
    }
    tried = ([op for op in aten if spelling in aten[op]] for spelling in _spellings(name))
    return next(filter(None, tried), [])


def _spellings(name: str) -> Iterator[str]:
    """The name, then without overload, then without the mark of what works in place, then what is another name for it."""
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
    """What an operator may be called by: ``nn.functional.conv2d`` is ``conv2d``, ``std.unbiased`` is ``std``, ``fft.rfft`` is ``fft_rfft``."""
    short = bare(op).lower()
    head, _, tail = short.rpartition(".")
    base = {head} if head and head.rpartition(".")[2] not in _SPACES else set()
    return {op.lower(), short, tail, short.replace(".", "_"), *base}


def _unknown(query: str, name: str, records: Mapping[str, OpRecord]) -> UsageError:
    if why := why_unmeasured(name):
        return UsageError(f"{query} {why[0]}", why[1])
    return UsageError(f"The catalog knows no operator {query!r}.", _suggestion(name.lower(), list(records)))


def _suggestion(wanted: str, ops: list[str]) -> str:
    names = {part: op for op in ops for part in _last_parts(op)}
    inside = [op for op in ops if len(wanted) > 2 and wanted in op.lower()]
    near = [names[part] for part in difflib.get_close_matches(wanted, names, n=5, cutoff=0.6)]
    nearest = list(dict.fromkeys(inside + near))[:6]
    return f"Did you mean {', '.join(nearest)}?" if nearest else "`lowprec-check catalog gaps` lists operators."
