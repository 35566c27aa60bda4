"""What ``lowprec-check env`` shows, as blocks."""

from __future__ import annotations

from typing import Any

from lowprec_check.report.blocks import Document, Pairs
from lowprec_check.schema.precisions import LOW_FORMATS

_ANSWERS = {True: "yes", False: "no", None: "unknown"}


def environment_document(environment: dict[str, Any]) -> Document:
    """Names with their values."""
    features = ", ".join(environment["cpu_features"]) or "none known"
    threads = f"{environment['threads']} of {environment['cores']} cores"
    rows = [
        ("torch", environment["torch"]),
        ("python", environment["python"]),
        ("platform", environment["platform"]),
        ("device", f"{environment['device']} ({environment['device_name']})"),
        *((f"{low.short} accelerated", _ANSWERS[environment[f"{low.short}_accelerated"]]) for low in LOW_FORMATS),
        ("autocast dtype", environment["default_autocast"]),
        ("CPU", f"{environment['cpu_capability']}; {features}; {threads}"),
        ("accelerators", ", ".join(environment["accelerators"]) or "none"),
        ("torchvision", environment["torchvision"] or "not installed"),
        ("Intel extension", _ipex(environment)),
    ]
    return Document("Environment", [Pairs([(name, str(value)) for name, value in rows])])


def _ipex(environment: dict[str, Any]) -> str:
    if environment["ipex"] is None:
        return "not installed"
    verdict = (
        "compatible with this torch" if environment["ipex_fits"] else "not compatible with this torch, do not import it"
    )
    return f"{environment['ipex']}: {verdict}"
