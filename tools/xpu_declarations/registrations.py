"""How each aten op is registered on XPU, from the declarations of torch and Intel. `parse` needs PyYAML.

The first rule that applies (docs/declared-xpu.md gives the reasons):

1. a correction (curated, with a link);
2. *native*: a kernel registered for dispatch key `XPU` in torch's or torch-xpu-ops' `native_functions.yaml`, or in a
   `TORCH_LIBRARY_IMPL(aten, XPU)` of torch-xpu-ops;
3. *fallback*: on the fallback list of torch-xpu-ops, which runs the op on the CPU;
4. an op that only calls another op (structured delegate, generated variant) has the registration of that op;
5. *composite*: has a kernel for every backend, composed of other ops;
6. *none*: calling it raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from lowprec_check.catalog.records import Registration

IMPLICIT = "CompositeImplicitAutograd"
COMPOSITE = frozenset({IMPLICIT, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional"})
"""Alias keys whose kernels work on every backend. Those for nested tensors do not work on dense XPU tensors."""


class Native(NamedTuple):
    """One entry of `native_functions.yaml`."""

    keys: frozenset[str]
    """Dispatch keys with their own kernel."""
    delegate: str | None = None
    """The op that a structured variant calls."""
    autogen: tuple[str, ...] = ()
    """Variants that torchgen generates by calling this op."""


class OpRegistration(NamedTuple):
    """How an op is registered on XPU, the source, and the other op that it calls, if any."""

    registration: Registration
    source: str
    via: str | None = None


def parse(text: str) -> dict[str, Native]:
    """The entries of a `native_functions.yaml`, by op name (`add.Tensor`)."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {entry["func"].partition("(")[0]: _native(entry) for entry in yaml.load(text, Loader=loader)}


def _native(entry: Mapping[str, Any]) -> Native:
    """As torchgen reads it: an op without `dispatch` is composite, and no variants of it are generated."""
    delegate = entry.get("structured_delegate")
    if "dispatch" in entry or entry.get("structured") or delegate:
        keys = frozenset(key.strip() for names in entry.get("dispatch") or () for key in names.split(","))
    else:
        keys = frozenset({IMPLICIT})
    variants = (name.strip() for name in entry.get("autogen", "").split(","))
    return Native(keys, delegate, () if IMPLICIT in keys else tuple(name for name in variants if name))


def fallback_list(text: str) -> frozenset[str]:
    """The ops that `XPUFallback.cpp` (or `.template`) runs on the CPU by default."""
    block = re.search(r"fallback_list\s*=\s*\{(.*?)\}", text, re.DOTALL)
    if block is None:
        raise ValueError("no fallback_list found")
    code = re.sub(r"//[^\n]*", "", block.group(1))
    return frozenset(re.findall(r'"([^"]+)"', code))


def library_impls(text: str) -> frozenset[str]:
    """The ops that a C++ file registers in `TORCH_LIBRARY_IMPL(aten, XPU, m)` by name."""
    names: set[str] = set()
    for block in re.findall(r"TORCH_LIBRARY_IMPL\(aten,\s*XPU,\s*m\)\s*\{(.*?)\n\}", text, re.DOTALL):
        found = re.findall(r'm\.impl\(\s*(?:TORCH_SELECTIVE_NAME\()?"(?:aten::)?([\w.]+)"', block)
        names.update(found)
    return frozenset(names)


class Declarations(NamedTuple):
    """All declarations for one release."""

    torch: Mapping[str, Native]
    """From torch's own yaml: every op of the release."""
    intel: Mapping[str, Native]
    """From the yaml of torch-xpu-ops; empty since 2.14, when it was merged into that of torch."""
    library: frozenset[str]
    fallback: frozenset[str]
    corrected: Mapping[str, OpRegistration] = {}


def registrations(declared: Declarations) -> dict[str, OpRegistration]:
    """The registration of every op of the release, generated variants included."""
    base = {name: op for op, native in declared.torch.items() for name in native.autogen}
    return {op: _find(op, declared, base) for op in sorted({*declared.torch, *base})}


def _find(op: str, declared: Declarations, base: Mapping[str, str]) -> OpRegistration:
    native = declared.torch.get(op)
    registered = _registered(op, declared)
    if registered is not None:
        return registered
    called = native.delegate if native is not None else base[op]
    if called is not None:
        found = _find(called, declared, base)
        return OpRegistration(found.registration, found.source, found.via or called)
    composite = native is not None and native.keys & COMPOSITE
    return OpRegistration("composite" if composite else "none", "torch")


def _registered(op: str, declared: Declarations) -> OpRegistration | None:
    """The registration of the op itself."""
    if op in declared.corrected:
        return declared.corrected[op]
    for source, entries in (("torch", declared.torch), ("torch-xpu-ops", declared.intel)):
        if op in entries and "XPU" in entries[op].keys:
            return OpRegistration("native", source)
    if op in declared.library:
        return OpRegistration("native", "library")
    return OpRegistration("fallback", "fallback") if op in declared.fallback else None
