"""What some scans have beside their runs, as blocks: quantized layers, predictions of ``--what-if``, distributed policies."""

from __future__ import annotations

from collections.abc import Iterator

from lowprec_check.analysis.run_summary import label
from lowprec_check.report.blocks import Block, Column, ErrorOf, Heading, Row, Say, Table
from lowprec_check.schema.measures import MATTERS, LayerError
from lowprec_check.schema.scan_result import ScanResult
from lowprec_check.schema.statements import Sentence, chained, counted, plain, say
from lowprec_check.schema.training_policies import PolicyGradient
from lowprec_check.schema.what_if import WhatIf

_LAYERS = 5
"""Layers of a quantized run that a table names."""
_NAMED = 3
"""Modules that a prediction names."""


def extra_blocks(result: ScanResult) -> Iterator[Block]:
    """The sections that a result has; none for most."""
    yield from _layers(result)
    yield from _what_if(result)
    yield from _policies(result)


def _layers(result: ScanResult) -> Iterator[Block]:
    columns = [
        Column("run", "run"),
        Column("layer", "module"),
        Column("op", "op"),
        Column("by itself", "error", "Relative L2 error of the layer on the inputs that it gets in fp32."),
        Column("with those before it", "error", "Relative L2 error of the layer in the quantized model."),
    ]
    rows, left_out = [], 0
    for run in result.runs:
        worst = sorted(run.layer_errors, key=_layer_error, reverse=True)
        left_out += len(worst[_LAYERS:])
        for found in worst[:_LAYERS]:
            rows.append(Row([label(run), found.module, found.op, found.local, found.accumulated], module=found.module))
    if rows:
        yield Heading("Quantized layers with the largest errors", anchor="layers")
        yield Table(columns, rows, "quantized layers", headings=2, left_out=left_out)


def _layer_error(found: LayerError) -> float:
    return found.local if found.local is not None else found.accumulated or 0.0


def _what_if(result: ScanResult) -> Iterator[Block]:
    if not result.what_if:
        return
    columns = [
        Column("format"),
        Column("evidence"),
        Column("output error", "error", "Relative L2 error that is predicted."),
        Column(
            "why",
            "sentence",
            "The modules with the largest shares of the squared error, and what the prediction leaves out.",
        ),
    ]
    notes = {entry.note for entry in result.what_if}
    shared = notes.pop() if len(notes) == 1 and len(result.what_if) > 1 else None
    rows = []
    for entry in result.what_if:
        error = None if entry.predicted is None else ErrorOf(entry.predicted, None, f"≈ {entry.predicted:.1e}")
        note = plain(entry.note) if entry.note and not shared else None
        rows.append(Row([entry.format, entry.evidence, error, chained(_causes(entry), note).text]))
    yield Heading("What if: formats that were not run", anchor="what-if")
    yield Table(columns, rows, "predicted output errors")
    hint = "Predicted from fp32: matrix products and convolutions are emulated, and none of these formats was run."
    yield Say(f"{hint} For all formats: {shared}." if shared else hint, role="hint")


def _causes(entry: WhatIf) -> Sentence | None:
    """``24 % from fc, 4 % from conv1``."""
    totals: dict[str, float] = {}
    for place in entry.shares:
        totals[place.module] = totals.get(place.module, 0.0) + place.share
    largest = sorted(totals.items(), key=lambda item: -item[1])[:_NAMED]
    named = [
        say("{share:share} from {module:module}", share=share, module=name)
        for name, share in largest
        if share >= MATTERS
    ]
    return chained(*named, between=", ") if named else None


def _policies(result: ScanResult) -> Iterator[Block]:
    if not result.policies:
        return
    columns = [
        Column("policy", "code"),
        Column("computes in"),
        Column("reduced", "text", "The micro-batches after which ranks would sum their gradients."),
        Column("gradient error", "error", "Relative L2 error of the gradient of all parameters against plain fp32."),
        Column("why", "sentence"),
    ]
    when = {"once": "after the last", "each time": "after each"}
    rows = [
        Row(
            [
                found.policy,
                found.computes_in,
                when.get(found.reduced, found.reduced),
                _policy_error(found),
                _policy(found),
            ]
        )
        for found in result.policies
    ]
    number = counted(result.policies[0].micro_batches, "micro-batch")
    yield Heading(f"Distributed policies: gradients accumulated over {number}", anchor="policies")
    yield Table(columns, rows, "distributed policies")
    made = next((f" Micro-batches: {found.batches}." for found in result.policies if found.batches), "")
    yield Say(f"Measured on one CPU rank; the sum over more ranks adds to the error.{made}", role="hint")


def _policy_error(found: PolicyGradient) -> ErrorOf | None:
    if found.gradient_error is None and found.status != "nonfinite":
        return None
    return ErrorOf(found.gradient_error, None, "NaN or Inf" if found.gradient_error is None else "")


def _policy(found: PolicyGradient) -> str | None:
    parts = [] if found.status in ("ok", "nonfinite", "error") else [plain(found.status)]
    if found.exception is not None:
        place = " ".join(filter(None, (found.exception.module, found.exception.source)))
        parts.append(plain(f"{found.exception.text} ({place})" if place else found.exception.text))
    if found.reason:
        parts.append(plain(found.reason))
    if found.worst_parameter is not None and found.worst_error is not None:
        words = "most in {parameter:text}: {error:error}"
        parts.append(say(words, parameter=found.worst_parameter, error=found.worst_error))
    for share, what in ((found.underflow, "underflow"), (found.overflow, "overflow")):
        if share:
            parts.append(say(f"{{share:share}} of the elements {what}", share=share))
    return chained(*parts).text if parts else None
