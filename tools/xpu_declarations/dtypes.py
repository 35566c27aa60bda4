"""Which of half and bfloat16 an aten op takes on XPU: one answer of several sources, by a fixed order.

The rule, per op and dtype, the first that speaks (docs/declared-xpu.md says why):

1. a correction (curated, with a link);
2. *no* where the kernel's dispatch macro leaves the dtype out (`kernels.py`), for ops with a kernel of their own;
3. *yes* where OpInfo, or torch-xpu-ops' additions to it, claims a function that is this op or dispatches it;
4. *no* where OpInfo does not claim a function that is this op or computes with nothing but it, and not for want of CUDA
   hardware either;
5. what 3 and 4 say of another variant: first of one that hands on to the same kernel (`add_` and `add.out`), then of one with
   the same name (`huber_loss` and `huber_loss.out`).

Where none speaks the answer is unknown, `None`.
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
"""Base names of ops that move or make values: a dtype does not fail for their sake."""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of what `claims.py` writes."""

    aten: str
    forward: list[str]
    backward: list[str]
    on_cuda: list[str]
    """The forward dtypes that it would claim on a machine with CUDA hardware."""
    forward_ops: dict[str, list[str]] = {}
    backward_ops: dict[str, list[str]] = {}


class Claims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that `claims.py` wrote."""

    torch: str
    commit: str
    claims: dict[str, Claim]


class DtypeAnswer(NamedTuple):
    """Whether a dtype is taken, and which source says so."""

    takes: bool | None
    source: str | None = None


Answers = dict[str, DtypeAnswer]


def base_of(op: str) -> str:
    """`add.Tensor` is `add`."""
    return op.partition(".")[0]


def additions(text: str) -> dict[str, frozenset[str]]:
    """What torch-xpu-ops' `xpu_test_utils.py` adds to OpInfo's forward dtypes for XPU, by OpInfo name."""
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
    """All that is read about dtypes for one release."""

    claims: Mapping[str, Claim]
    added: Mapping[str, frozenset[str]]
    left_out: Mapping[str, frozenset[str]]
    """By kernel tag, from `kernels.left_out`."""
    corrected: Mapping[tuple[str, str], DtypeAnswer] = {}
    """By op and dtype."""


def answers(found: Mapping[str, OpRegistration], evidence: Evidence, dtype: str) -> Answers:
    """The answer for each op of `found`, in one dtype."""
    yes, no = _claimed(found, evidence, dtype)
    refused = {
        op: f"kernel:{tag}" for tag, dtypes in evidence.left_out.items() if dtype in dtypes for op in op_names(tag)
    }
    kernel: Answers = {}
    name: Answers = {}
    for op, answer in [*no.items(), *yes.items()]:  # a yes overrules a no of another variant
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
    """What OpInfo and its additions say: the ops that take the dtype, and those that do not."""
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
    """Keep the first answer, and the one of the function named like the op before all."""
    for op in ops:
        if op not in answers or (answer.source or "").partition(":")[2] == base_of(op):
            answers[op] = answer
