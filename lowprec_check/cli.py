"""The command line: parse, call, render, exit code. No logic of its own; torch is imported when a model is."""

from __future__ import annotations

import contextlib
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lowprec_check.errors import UsageError

if TYPE_CHECKING:
    from lowprec_check.results import ScanResult

FOUND, WRONG_CALL, TOOL_FAILED = 1, 2, 3
"""Exit codes besides 0."""

app = typer.Typer(
    name="lowprec-check",
    help="Tells what happens to a PyTorch model in fp16 and bf16: does it run, is it right, is it worth it, what to do.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FailOn = Literal["no-way", "error", "warning", "note", "never"]


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        print(f"lowprec-check {version('lowprec-check')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def scan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="mymodel.py, mymodel.py:make_model, package.module:attr or torchvision:resnet50."
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--inputs", help="Shape of an input where the file gives none: 1x3x224x224, ids=1x128:int64."),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(
            "--precision", "-p", help="bfloat16, autocast-bf16, half, autocast-fp16; repeatable, all by default."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, xpu or mps; by default the accelerator at hand, else cpu.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds for each part of a run; by default 20, or ten fp32 forwards if more."),
    ] = None,
    errors: Annotated[
        Literal["both", "accumulated", "none"],
        typer.Option(help="What to compute per op: local and accumulated error, or less, faster."),
    ] = "both",
    reference: Annotated[Literal["fp32", "fp64"], typer.Option(help="What each op is compared with.")] = "fp32",
    tolerance: Annotated[
        float | None, typer.Option(min=0.0, help="On the output's rel_l2; by default 1e-2 for fp16, 5e-2 for bf16.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every run.")] = 0,
    without_kernel: Annotated[
        list[str] | None,
        typer.Option("--without-kernel", help="Withhold a kernel, as if torch had none: aten.dot:half; repeatable."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Save everything found; - for stdout.")] = None,
    select: Annotated[
        list[str] | None, typer.Option(help="Only findings whose code begins so: LP1; repeatable.")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="No findings whose code begins so; repeatable.")] = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="Exit 1 if no way passes (no-way), or on findings of that severity or graver.")
    ] = "no-way",
    findings: Annotated[int, typer.Option(min=0, help="Groups of findings on the screen.")] = 12,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run a model in fp32, half, bfloat16 and under autocast; say what runs, what is right, what is fast, what to do."""
    _check_writable(json)
    _check_codes([*(select or []), *(ignore or [])])
    with _progress(target, quiet) as on_progress:
        from lowprec_check.load import load_and_scan

        result = load_and_scan(
            target,
            tuple(inputs or ()),
            precisions=precision,
            device=device,
            budget=budget,
            errors=errors,
            reference=reference,
            tolerance=tolerance,
            seed=seed,
            without_kernel=tuple(without_kernel or ()),
            select=select or (),
            ignore=ignore or (),
            on_progress=on_progress,
        )
    _report(result, json, findings)
    raise typer.Exit(FOUND if _fails(result, fail_on) else 0)


@app.command()
def env(
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, xpu or mps.")] = None,
) -> None:
    """Say what this machine has and accelerates."""
    from lowprec_check.environment import environment

    found = environment(device)
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    from lowprec_check.renderers.environment import render

    print(render(found))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="LP101, or its name; all without it.")] = None,
) -> None:
    """Print the manual page of a diagnostic code."""
    from lowprec_check.rules import RULES

    if code is None:
        for _, rule in sorted(RULES.items()):
            print(f"{rule.code}  {rule.name:<28}{rule.severity:<9}{rule.summary}")
        return
    found = RULES.get(code.upper()) or next((rule for rule in RULES.values() if rule.name == code.lower()), None)
    if found is None:
        raise UsageError(f"There is no diagnostic {code!r}.", f"There are: {', '.join(sorted(RULES))}.")
    print(f"{found.code} {found.name} ({found.severity})\n\n{found.manual}")


# -- parts of the commands


def _check_writable(path: Path | None) -> None:
    """Before the work, not after."""
    if path is None or str(path) == "-":
        return
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise UsageError(
            f"Cannot write {path}: {error.strerror}.", "Give --json a path in a folder that exists."
        ) from None


def _check_codes(prefixes: list[str]) -> None:
    from lowprec_check.rules import RULES

    for prefix in prefixes:
        if not any(code.startswith(prefix) for code in RULES):
            raise UsageError(f"No diagnostic code begins with {prefix!r}.", "lowprec-check explain lists them.")


@contextlib.contextmanager
def _progress(target: str, quiet: bool) -> Iterator[Any]:
    """A status line on stderr while work is going on; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(f"loading {target}") as status:

        def on_progress(run: str, doing: str) -> None:
            status.update(f"{run} · {doing}"[: console.width - 4])

        yield on_progress


def _report(result: ScanResult, json: Path | None, findings: int) -> None:
    if json is not None and str(json) == "-":
        sys.stdout.write(result.to_json().decode())
        return
    if json is not None:
        result.save(json)
    from lowprec_check.renderers.text import render

    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 40)).columns if terminal else 100
    sys.stdout.write(render(result, width=width, color=terminal, findings=findings))


def _fails(result: ScanResult, fail_on: FailOn) -> bool:
    from lowprec_check.rules import SEVERITIES

    if fail_on == "never":
        return False
    if result.recommendation is None:
        return True
    if fail_on == "no-way":
        return False
    failing = SEVERITIES[SEVERITIES.index(fail_on) :]
    return any(diagnostic.severity in failing for diagnostic in result.diagnostics)


def main() -> None:
    """Entry point: exit 0, 1 (findings), 2 (the call or the user's file is wrong), 3 (the tool failed)."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's, at import; nothing here needs it
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UsageError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(error.hint, file=sys.stderr)
        sys.exit(WRONG_CALL)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # what the parser says of a wrong call
            error.show()
            sys.exit(error.exit_code)
        import traceback

        traceback.print_exc()
        print("lowprec-check itself failed; please report this with the lines above.", file=sys.stderr)
        sys.exit(TOOL_FAILED)
