"""Names as people write them: operators, dtypes. Never imports torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from lowprec_check.catalog.records import Dtype, OpRecord
from lowprec_check.errors import UsageError

_DTYPES: dict[str, Dtype] = {
    "half": "float16",
    "fp16": "float16",
    "float16": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
}
_PREFIX = re.compile(
    r"^(torch\.ops\.)?aten(::|\.)|^(torch\.)?(nn\.functional|nn\.init|nn|Tensor)\.|^(F|torch)\.(?!ops\.)", re.IGNORECASE
)


def dtype_of(name: str) -> Dtype:
    """``half``, ``fp16``, ``torch.float16`` are ``float16``; raises :class:`UsageError` for others."""
    found = _DTYPES.get(name.removeprefix("torch.").lower())
    if found is None:
        raise UsageError(f"{name!r} is no dtype of the catalog.", "There are half, bfloat16 and fp32.")
    return found


def bare(name: str) -> str:
    """An operator without namespace and call: ``dot`` for ``torch.dot``, ``aten::dot``, ``Tensor.dot``, ``dot()``."""
    name = name.strip().removesuffix("()").removesuffix(".default")
    return _PREFIX.sub("", name)


def find(query: str, records: Mapping[str, OpRecord]) -> list[OpRecord]:
    """The operators that ``query`` names, the best match first.

    An exact name (``linalg.svd``); else every operator whose last part it is, variants included (``svd``: ``svd``, ``linalg.svd``),
    or else every one that dispatches an aten op of that name (``_linalg_svd``), or that a module is called after
    (``LayerNorm``, ``BatchNorm2d``). Raises :class:`UsageError` with the nearest names where there is none.
    """
    asked = query.strip().removeprefix("torch.").removesuffix("()")
    wanted = bare(query).lower()
    if asked in records and "." in asked:
        return [records[asked]]
    found = (
        [op for op in records if wanted in _last_parts(op)]
        or [op for op, record in records.items() if wanted in _aten_names(record)]
        or _functions_of(wanted, records)
    )
    if not found:
        raise UsageError(f"The catalog knows no operator {query!r}.", _suggestion(wanted, list(records)))
    return [records[op] for op in sorted(found, key=lambda op: (op != asked, len(op)))]


def _last_parts(op: str) -> set[str]:
    """What an operator may be called by: ``nn.functional.conv2d`` is ``conv2d``, ``std.unbiased`` is ``std``, ``std.unbiased``."""
    short = bare(op).lower()
    head, _, tail = short.rpartition(".")
    return {op.lower(), short, tail, *([head] if head and "." not in head and head not in _SPACES else [])}


_SPACES = {"linalg", "fft", "special", "masked", "sparse", "signal", "nn", "ops"}


def _aten_names(record: OpRecord) -> set[str]:
    return {form for name in record.aten for form in (name.lower(), name.partition(".")[0].lower())}


def _functions_of(module: str, ops: Iterable[str]) -> list[str]:
    """The functional forms of a module of ``torch.nn``, ``nn.functional.batch_norm`` for ``batchnorm2d``."""
    functions = {
        op: op.removeprefix("nn.functional.").replace("_", "") for op in ops if op.startswith("nn.functional.")
    }
    exact = [op for op, function in functions.items() if function == module]
    return exact or [op for op, function in functions.items() if function == re.sub(r"\dd$", "", module)]


def _suggestion(wanted: str, ops: list[str]) -> str:
    names = {part: op for op in ops for part in _last_parts(op)}
    inside = [op for op in ops if len(wanted) > 2 and wanted in op.lower()]
    near = [names[part] for part in difflib.get_close_matches(wanted, names, n=5, cutoff=0.6)]
    nearest = list(dict.fromkeys(inside + near))[:6]
    return f"Did you mean {', '.join(nearest)}?" if nearest else "`lowprec-check catalog gaps` lists operators."
