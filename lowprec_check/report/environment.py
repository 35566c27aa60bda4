"""``lowprec-check env`` as text."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

_ANSWERS = {True: "yes", False: "no", None: "unknown"}


def render(environment: dict[str, Any]) -> str:
    """A table with two columns: name and value."""
    features = ", ".join(environment["cpu_features"]) or "none known"
    threads = f"{environment['threads']} of {environment['cores']} cores"
    rows = [
        ("torch", environment["torch"]),
        ("python", environment["python"]),
        ("platform", environment["platform"]),
        ("device", f"{environment['device']} ({environment['device_name']})"),
        ("bf16 accelerated", _ANSWERS[environment["bf16_accelerated"]]),
        ("fp16 accelerated", _ANSWERS[environment["fp16_accelerated"]]),
        ("autocast dtype", environment["default_autocast"]),
        ("CPU", f"{environment['cpu_capability']}; {features}; {threads}"),
        ("accelerators", ", ".join(environment["accelerators"]) or "none"),
        ("torchvision", environment["torchvision"] or "not installed"),
        ("Intel extension", _ipex(environment)),
    ]
    return str(tabulate(rows, tablefmt="plain"))


def _ipex(environment: dict[str, Any]) -> str:
    if environment["ipex"] is None:
        return "not installed"
    verdict = (
        "compatible with this torch" if environment["ipex_fits"] else "not compatible with this torch, do not import it"
    )
    return f"{environment['ipex']}: {verdict}"
