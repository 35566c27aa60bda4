"""Whether an aten op supports half and bfloat16 on XPU: one answer from several sources.

For each op and dtype, the first rule that applies (docs/declared-xpu.md gives the reasons):

1. a correction (curated, with a link);
2. *no* if the dispatch macro of the kernel does not include the dtype (`kernels.py`), for ops with their own kernel;
3. *yes* if OpInfo, or torch-xpu-ops' additions to it, claims the dtype for a function that is this op or dispatches it;
4. *no* if OpInfo does not claim the dtype for a function that is this op or whose only computing op is this one, and
   would not with CUDA hardware either;
5. the result of 3 and 4 for another variant: first one that calls the same kernel (`add_` and `add.out`), then one with
   the same name (`huber_loss` and `huber_loss.out`).

If none applies, the answer is unknown, `None`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from tools.xpu_declarations.kernels import op_names
from tools.xpu_declarations.registrations import OpRegistration

DTYPES = ("half", "bfloat16")
PLUMBING = frozenset(
    {
        *(
            "_conj",
            "_neg_view",
            "_reshape_alias",
            "_to_copy",
            "_unsafe_view",
            "alias",
            "as_strided",
            "clone",
            "constant_pad_nd",
        ),
        *(
            "copy_",
            "detach",
            "expand",
            "lift_fresh",
            "permute",
            "resolve_conj",
            "select",
            "slice",
            "split",
            "squeeze",
            "t",
        ),
        *("transpose", "unbind", "unsqueeze", "view"),
        *(
            "arange",
            "empty",
            "empty_like",
            "eye",
            "fill_",
            "full",
            "full_like",
            "new_empty",
            "new_empty_strided",
            "new_zeros",
        ),
        *("ones", "ones_like", "scalar_tensor", "zero_", "zeros", "zeros_like"),
    }
)
"""Base names of ops that move or create values: they support every dtype."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of a file that `claims.py` writes."""

    aten: str
    forward: list[str]
    backward: list[str]
    on_cuda: list[str]
    """The forward dtypes that OpInfo would claim on a machine with CUDA hardware."""
    forward_ops: dict[str, list[str]] = {}
    backward_ops: dict[str, list[str]] = {}


class Claims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that `claims.py` writes."""

    torch: str
    commit: str
    claims: dict[str, Claim]


class DtypeAnswer(NamedTuple):
    """Whether a dtype is supported, and the source."""

    supported: bool | None
    source: str | None = None


Answers = dict[str, DtypeAnswer]


def base_of(op: str) -> str:
    """`add` for `add.Tensor`."""
    return op.partition(".")[0]


def additions(text: str) -> dict[str, frozenset[str]]:
    """The forward dtypes that `xpu_test_utils.py` of torch-xpu-ops adds to those of OpInfo, by OpInfo name."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_ops_dtype_different_cuda_support":
            return dict(_added(node.value))
    return {}


def _added(table: ast.expr) -> Iterator[tuple[str, frozenset[str]]]:
    names = {"torch.float16": "half", "torch.half": "half", "torch.bfloat16": "bfloat16"}
    for name, passes in zip(table.keys, table.values, strict=True):  # type: ignore[attr-defined]
        for key, dtypes in zip(passes.keys, passes.values, strict=True):
            if ast.literal_eval(key) == "forward":
                found = (names.get(ast.unparse(element)) for element in dtypes.elts)
                yield ast.literal_eval(name), frozenset(dtype for dtype in found if dtype)


class Evidence(NamedTuple):
    """All data about dtypes for one release."""

    claims: Mapping[str, Claim]
    added: Mapping[str, frozenset[str]]
    unsupported: Mapping[str, frozenset[str]]
    """By kernel tag, from `kernels.unsupported`."""
    corrected: Mapping[tuple[str, str], DtypeAnswer] = {}
    """By op and dtype."""


def answers(found: Mapping[str, OpRegistration], evidence: Evidence, dtype: str) -> Answers:
    """The answer for each op of `found`, in one dtype."""
    yes, no = _claimed(found, evidence, dtype)
    refused = {
        op: f"kernel:{tag}" for tag, dtypes in evidence.unsupported.items() if dtype in dtypes for op in op_names(tag)
    }
    kernel: Answers = {}
    name: Answers = {}
    for op, answer in [*no.items(), *yes.items()]:  # a yes takes precedence over a no of another variant
        kernel[found[op].via or op] = name[base_of(op)] = answer
    result = {}
    for op, registered in found.items():
        if (op, dtype) in evidence.corrected:
            result[op] = evidence.corrected[op, dtype]
        elif registered.registration == "native" and base_of(registered.via or op) in refused:
            result[op] = DtypeAnswer(False, refused[base_of(registered.via or op)])
        else:
            variant = kernel.get(registered.via or op) or name.get(base_of(op))
            result[op] = yes.get(op) or no.get(op) or variant or DtypeAnswer(None)
    return result


def _claimed(found: Mapping[str, OpRegistration], evidence: Evidence, dtype: str) -> tuple[Answers, Answers]:
    """The ops that support the dtype, and those that do not, according to OpInfo and the additions to it."""
    by_base: dict[str, list[str]] = {}
    for op in found:
        by_base.setdefault(base_of(op), []).append(op)
    yes: Answers = {}
    no: Answers = {}
    for name, claim in sorted(evidence.claims.items()):
        own = [op for base in (claim.aten, f"{claim.aten}_") for op in by_base.get(base, ())]
        added = dtype in evidence.added.get(name, ())
        source = f"tests:{name}" if added else f"opinfo:{name}"
        widest = claim.forward_ops.get("float32", [])
        if added or dtype in claim.forward:
            seen = {*own, *(claim.forward_ops.get(dtype) or widest)}
            _note(yes, seen & found.keys(), DtypeAnswer(True, source))
        elif "float32" in claim.forward and dtype not in claim.on_cuda:
            alone = [op for op in widest if base_of(op) not in PLUMBING]
            _note(no, {*own, *(alone if len(alone) == 1 else ())} & found.keys(), DtypeAnswer(False, source))
        if dtype in claim.backward:
            _note(yes, set(claim.backward_ops.get(dtype, ())) & found.keys(), DtypeAnswer(True, source))
    return yes, no


def _note(answers: Answers, ops: set[str], answer: DtypeAnswer) -> None:
    """Keep the first answer, but prefer that of the function with the name of the op."""
    for op in ops:
        if op not in answers or (answer.source or "").partition(":")[2] == base_of(op):
            answers[op] = answer
