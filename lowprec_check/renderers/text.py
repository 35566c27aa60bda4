"""The first screen: a verdict per way to run, findings that name a line to change, one thing to do."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lowprec_check.advice import explain_status, short_op, shorten, some, speedup
from lowprec_check.results import Diagnostic, Run, ScanResult

SHOWN_FINDINGS = 12
_STATUS_STYLE = {"ok": "green", "inaccurate": "yellow", "skipped": "dim"}
_SEVERITY_STYLE = {"error": "red", "warning": "yellow", "note": "cyan"}
_GRAVEST_FIRST = {"error": 0, "warning": 1, "note": 2}
_SHORT_PRECISION = {"autocast-fp16": "ac-fp16", "autocast-bf16": "ac-bf16", "bfloat16": "bf16"}


def render(result: ScanResult, *, width: int = 100, color: bool = False, findings: int = SHOWN_FINDINGS) -> str:
    """The screen as text, ``width`` columns wide, with ANSI colours if ``color``; ``findings`` groups at the most."""
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=color, color_system="auto" if color else None, highlight=False
    )
    for line in _head(result):
        console.print(line)
    for note in result.model.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    console.print(_runs_table(result))
    console.print()
    _print_findings(console, result, findings)
    _print_advice(console, result)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _head(result: ScanResult) -> Iterator[Text]:
    model, env = result.model, result.environment
    accelerated = [("bf16", env.get("bf16_accelerated")), ("fp16", env.get("fp16_accelerated"))]
    device = ", ".join(f"{name} {'accelerated' if yes else 'not'}" for name, yes in accelerated if yes is not None)
    inputs = f"input {', '.join(model.inputs[:3])}{', …' if len(model.inputs) > 3 else ''}"
    yield Text(
        " · ".join(["lowprec-check", model.name, f"{_count(model.parameters)} parameters", inputs]), style="bold"
    )
    where = f"{env.get('device')}: {device}" if device else str(env.get("device"))
    yield Text(f"torch {str(env.get('torch')).partition('+')[0]} · {where}", style="dim")


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):.1f} {unit}"
    return str(number)


def _runs_table(result: ScanResult) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("precision", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("error", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    fp32 = next((run for run in result.runs if run.precision == "fp32"), None)
    for run in result.runs:
        reference = run.precision == "fp32"
        table.add_row(
            run.precision if run.base is None else f"plan ({run.base})",
            Text(
                "reference" if reference else run.status,
                style=_STATUS_STYLE.get(run.status, "red") if not reference else "",
            ),
            "–" if reference else _error(run),
            _time(run, result.runs),
            _memory(run, fp32),
            Text(_why(run, result)),
        )
    return table


def _error(run: Run) -> str:
    if run.output_error is None:
        return "–"
    return f"{run.output_error.rel_l2:.1e}" if run.output_error.rel_l2 is not None else "∞"


def _time(run: Run, runs: Sequence[Run]) -> str:
    ratio = speedup(run, runs)
    if ratio is None:
        return "–"
    times = 1 / ratio
    return f"{times:.2f} ×" if times < 10 else f"{times:.0f} ×"


def _memory(run: Run, fp32: Run | None) -> str:
    if fp32 is None or not fp32.peak_memory_bytes or not run.peak_memory_bytes:
        return "–"
    return f"{run.peak_memory_bytes / fp32.peak_memory_bytes:.2f} ×"


def _why(run: Run, result: ScanResult) -> str:
    if run.precision == "fp32":
        latency = f"{run.latency_ms:.1f} ms" if run.latency_ms is not None else ""
        memory = _bytes(run.peak_memory_bytes) if run.peak_memory_bytes else ""
        return ", ".join(part for part in (latency, memory) if part)
    if run.base is not None:
        return f"kept in fp32: {some(run.keep_fp32)}"
    if run.status != "ok":
        return explain_status(run)
    slow = [d for d in result.diagnostics if d.code == "LP106" and d.precision == run.precision]
    return f"slow: {', '.join(short_op(d.op or '') for d in slow[:3])}" if slow else ""


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


# -- findings


class Group(NamedTuple):
    """Findings that say the same of one op."""

    first: Diagnostic
    precisions: list[str]
    modules: list[str]
    sources: list[str]


def group(diagnostics: Sequence[Diagnostic]) -> list[Group]:
    """Findings merged over precisions, modules and lines, the gravest first."""
    merged: dict[tuple[str, str], list[Diagnostic]] = {}
    for diagnostic in diagnostics:
        merged.setdefault((diagnostic.code, diagnostic.op or diagnostic.message), []).append(diagnostic)
    groups = [
        Group(
            members[0],
            list(dict.fromkeys(d.precision for d in members if d.precision)),
            list(dict.fromkeys(d.module for d in members if d.module is not None)),
            list(dict.fromkeys(d.source for d in members if d.source)),
        )
        for members in merged.values()
    ]
    return sorted(groups, key=lambda g: (_GRAVEST_FIRST[g.first.severity], g.first.code))


def _print_findings(console: Console, result: ScanResult, most: int) -> None:
    groups = group(result.diagnostics)
    if not groups:
        console.print("No findings.\n")
        return
    for item in groups[:most]:
        _print_group(console, item)
    console.print(_summary(result, groups[most:]))
    console.print()


def _print_group(console: Console, item: Group) -> None:
    first = item.first
    head = Text()
    head.append(f"{first.code} {first.name}", style=_SEVERITY_STYLE[first.severity])
    head.append("  " + ", ".join(_SHORT_PRECISION.get(p, p) for p in item.precisions), style="dim")
    where = "  ".join(part for part in (_some(item.modules, "model"), first.op or "", _some(item.sources)) if part)
    if where:
        head.append(f"  {where}")
    console.print(head)
    message = shorten(first.message) if first.help is None else f"{shorten(first.message)} → {first.help}"
    console.print(Padding(Text(message, style="dim"), (0, 0, 0, 6)))


def _some(names: Sequence[str], empty: str = "") -> str:
    if not names:
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (names[0] or empty) + more


def _summary(result: ScanResult, left_out: Sequence[Group]) -> Text:
    counts = [(s, sum(d.severity == s for d in result.diagnostics)) for s in ("error", "warning", "note")]
    shown = ", ".join(f"{n} {severity}{'s' if n != 1 else ''}" for severity, n in counts if n)
    more = f" ({len(left_out)} groups not shown: --findings)" if left_out else ""
    code = (left_out or group(result.diagnostics))[0].first.code
    return Text(
        f"{len(result.diagnostics)} findings: {shown}{more} · lowprec-check explain {code} · --json FILE", style="dim"
    )


def _print_advice(console: Console, result: ScanResult) -> None:
    advice = result.recommendation
    if advice is None:
        console.print(Text("No 16-bit way to run this model passed here. Stay in fp32.", style="bold red"))
        for line in _failures(result):
            console.print(Text(f"  {line}"))
        return
    keep = f" with {len(advice.keep_fp32)} modules in fp32" if len(advice.keep_fp32) > 1 else ""
    keep = " with one module in fp32" if len(advice.keep_fp32) == 1 else keep
    console.print(Text.assemble((f"Use {advice.precision}{keep}: ", "bold green"), advice.reason))
    console.print()
    for line in advice.code.splitlines():
        console.print(Text(f"    {line}"), soft_wrap=True)


def _failures(result: ScanResult) -> Iterator[str]:
    for run in result.runs:
        if run.precision != "fp32":
            yield f"{run.precision}: {explain_status(run)}"
