"""The code that gives models of a script their precisions: its forms, and where it is pasted."""

from __future__ import annotations

import ast
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from lowprec_check.analysis.snippet import prepare
from lowprec_check.features.programs.program_scan import (
    Assignment,
    Assignments,
    FirstCall,
    PastedCode,
    ProgramScan,
    ScannedModel,
)
from lowprec_check.schema.axes import device_type
from lowprec_check.schema.precisions import FP16, PRECISIONS
from lowprec_check.schema.scan_result import ScanResult

_AT_BORDER = """\
def at_border(model, method, dtype{parameter}):  # cast the inputs, and give {wide} to the caller
    from functools import wraps{imports}
    from torch.utils._pytree import {from_pytree}

    call = getattr(model, method)
    if hasattr(call, "at_border"):
        return
    to_low = lambda t: t.to(dtype) if t.is_floating_point() else t
    to_{wide} = lambda t: t.{widened}() if t.dtype == dtype else t
{low}
    @wraps(call)
    def in_dtype(*args, **kwargs):
{cast}
{returned}

    in_dtype.at_border = True
    setattr(model, method, in_dtype)
"""

_CAST = "        args, kwargs = tree_map_only(torch.Tensor, to_low, (args, kwargs))"
_LOW_UNLESS_NAMED = """
    def low(value, *names):
        return value if {*names} & {*in_fp32} else tree_map_only(torch.Tensor, to_low, value)

    names = [*signature(call).parameters]  # of arguments by position
"""
_CAST_UNLESS_NAMED = """\
        args = [low(value, f"inputs[{i}]", *names[i : i + 1]) for i, value in enumerate(args)]
        kwargs = {name: low(value, name) for name, value in kwargs.items()}"""

_RETURN = "        return tree_map_only(torch.Tensor, to_{wide}, call(*args, **kwargs))"
_GIVEN = "        given = tree_leaves((args, kwargs))\n"
_RETURN_WRITTEN = """\
        output = call(*args, **kwargs)
        for value, copy in zip(given, tree_leaves((args, kwargs))):  # to which the call may write
            if torch.is_tensor(value) and value is not copy and not torch.equal(to_low(value), copy):
                value.copy_(copy)
        return tree_map_only(torch.Tensor, to_{wide}, output)"""

_UNDER_AUTOCAST = """\
def under_autocast(model, method, dtype):  # give {wide} to the caller
    from functools import wraps
    from torch.utils._pytree import tree_map_only

    call = getattr(model, method)
    if hasattr(call, "at_border"):
        return
    to_{wide} = lambda t: t.{widened}() if t.dtype == dtype else t

    @wraps(call)
    def in_dtype(*args, **kwargs):
        with torch.autocast("{device}", dtype=dtype):
            output = call(*args, **kwargs)
        return tree_map_only(torch.Tensor, to_{wide}, output)

    in_dtype.at_border = True
    setattr(model, method, in_dtype)
"""


def why_no_code(program: ProgramScan, assigned: Assignments) -> str:
    """Why no code can be written for a mixture; empty if it can."""
    for model in _cast_models(program.models, assigned):
        place = model.place or FirstCall("")
        if not place.path:
            beside = {other.key for other in program.models if other.place and other.place.line == place.line}
            if place.line and len(beside) > 1:
                several = f"several models are called at {place.line}, not each by a variable of its own"
                return f"There is no code to paste: {several}."
            where = f" at {place.line}" if place.line else ""
            return f"There is no code to paste: no variable of the script reaches {model.name}, called{where}."
        if _file(place, program.target) is None:
            return f"There is no code to paste: {place.line}, where {model.name} is called, is not a file."
    return ""


def forms_of_code(program: ProgramScan, assigned: Assignments) -> Iterator[list[PastedCode]]:
    """The code for a mixture, the shortest first: what a library has for it, then casts of each
    model and of what goes in and comes out.
    """
    for form in _unplaced_forms(program, assigned):
        placed = [_placed(program, code) for code in form]
        if all(placed):
            yield [code for code in placed if code is not None]


def _unplaced_forms(program: ProgramScan, assigned: Assignments) -> Iterator[list[PastedCode]]:
    """The forms, at the lines of calls."""
    models = _cast_models(program.models, assigned)
    places: dict[str, FirstCall] = {}
    for model in models:
        if model.place is not None:
            places.setdefault(model.key, model.place)
    assignments = [assigned[key] for key in places]
    precisions = {each.precision for each in assignments}
    kinds = {PRECISIONS.get(name).kind for name in precisions}
    is_plain = not any(each.keep_fp32 or each.keep_fp32_inputs for each in assignments)
    if len(precisions) == 1 and is_plain and kinds == {"cast"}:
        precision = precisions.pop()
        pasted = _plain_casts(program, places, precision)
        loaded = _loaded_low(program, [*places.values()], precision)
        if loaded and pasted and len(places) == len({model.key for model in program.models}):
            yield [loaded]
        if pasted:
            yield pasted
    elif len(precisions) == 1 and is_plain and kinds == {"autocast"}:
        lines = {model.place.line for model in program.models if model.place is not None}
        if len(lines) == 1 and len(places) == len({model.key for model in program.models}):
            dtype = PRECISIONS.get(precisions.pop()).format.dtype
            text = f'with torch.autocast("{_device(models[0])}", dtype={dtype}):\n'
            yield [PastedCode(lines.pop(), f"import torch\n\n{text}", is_around=True)]
    yield _at_borders(models, assigned)
    others = [model for model in program.models if model not in models]
    if others and all(model.place is not None and model.place.path for model in others):
        # A pipeline may give them the dtype of another model
        yield _at_borders(program.models, assigned)


def _cast_models(models: Sequence[ScannedModel], assigned: Assignments) -> list[ScannedModel]:
    return [model for model in models if assigned[model.key].precision != "fp32"]


def _plain_casts(program: ProgramScan, places: Mapping[str, FirstCall], precision: str) -> list[PastedCode]:
    """Casts of weights alone; none where the program itself would give fp32 to a cast model."""
    if not all(place.takes_low for place in places.values()):
        return []
    dtype = PRECISIONS.get(precision).format.dtype
    others = [model for model in program.models if model.key not in places]
    pipelines = {place.pipeline for place in places.values()}
    pipeline = next(iter(pipelines))
    lines = [f"{place.path}.to({dtype})" for place in places.values()]
    if len(pipelines) == 1 and pipeline:
        lines = [f"{pipeline}.to({dtype})"]
    for model in others:
        place = model.place or FirstCall("")
        # What the pipeline itself does with a VAE in fp16 that needs fp32
        is_vae = place.pipeline == pipeline != "" and model.method == "decode" and "upcast_vae" in place.switches
        if not is_vae or PRECISIONS.get(precision).format != FP16:
            return []
        lines.append(f"{place.path}.register_to_config(force_upcast=True)  # {pipeline} decodes in fp32 then")
    return _pasted({line: place.line for line, place in zip(lines, places.values(), strict=False)}, lines)


def _loaded_low(program: ProgramScan, places: Sequence[FirstCall], precision: str) -> PastedCode | None:
    """``torch_dtype=`` of the call of ``from_pretrained`` that makes a pipeline; ``None`` if none
    does.
    """
    file = _file(places[0], program.target)
    if file is None or any(place.pipeline != places[0].pipeline for place in places):
        return None
    lines = _lines(file)
    made = [
        node
        for node in ast.walk(ast.parse("\n".join(lines)))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == places[0].pipeline
    ]
    if len(made) != 1 or not _imports_torch(lines):
        return None
    calls = [node for node in ast.walk(made[0]) if isinstance(node, ast.Call)]
    call = next((node for node in calls if ast.unparse(node.func).endswith(".from_pretrained")), None)
    if call is None or any(keyword.arg in (None, "torch_dtype", "dtype") for keyword in call.keywords):
        return None
    dtype = ast.parse(PRECISIONS.get(precision).format.dtype, mode="eval").body
    call.keywords.append(ast.keyword("torch_dtype", dtype))
    line = f"{places[0].line.rpartition(':')[0]}:{made[0].lineno}"
    return PastedCode(line, ast.unparse(made[0]), is_instead=True)


def _pasted(line_of: Mapping[str, str], lines: Sequence[str]) -> list[PastedCode]:
    """The lines by the place where each belongs; one without a place follows the one before."""
    by_place: dict[str, list[str]] = {}
    at = ""
    for line in lines:
        at = line_of.get(line, at)
        by_place.setdefault(at, []).append(line)
    return [PastedCode(at, "\n".join(["import torch", "", *each])) for at, each in by_place.items()]


def _device(model: ScannedModel) -> str:
    return device_type(model.scan.runs[0].device) if model.scan is not None else "cpu"


def _at_borders(models: Sequence[ScannedModel], assigned: Assignments) -> list[PastedCode]:
    """Casts of each model where it is called first, and of its inputs and outputs."""
    by_line: dict[str, list[str]] = {}
    helpers: dict[str, dict[str, str]] = {}  # by line and the name of the function
    cast: set[str] = set()
    for model in models:
        assignment, place = assigned[model.key], model.place
        assert place is not None
        lines = by_line.setdefault(place.line, [])
        helper, call = _border(model, assignment, is_written=any(other.writes for other in models))
        # That with the parameter `in_fp32`, which is longer, serves all
        functions, name = helpers.setdefault(place.line, {}), helper.partition("(")[0]
        functions[name] = max(functions.get(name, ""), helper, key=len)
        if model.key not in cast:
            scans = [other.scan for other in models if other.key == model.key and other.scan is not None]
            lines += _weights(scans, assignment, place.path)
            cast.add(model.key)
        lines.append(call)
    return [
        PastedCode(line, "\n".join(["import torch", "", *helpers[line].values(), *lines]))
        for line, lines in by_line.items()
    ]


def _border(model: ScannedModel, assignment: Assignment, *, is_written: bool) -> tuple[str, str]:
    """The function for what goes in and comes out, and its call; ``is_written``: a call may write
    to its inputs.
    """
    precision, place = PRECISIONS.get(assignment.precision), model.place or FirstCall("")
    dtype, method = precision.format.dtype, model.method or "forward"
    output = {"wide": "fp32", "widened": "float"}
    if place.is_double:
        output = {"wide": "fp64", "widened": "double"}
    if precision.kind == "autocast":
        helper = _UNDER_AUTOCAST.format(device=_device(model), **output)
        return helper, f'under_autocast({place.path}, "{method}", {dtype})'
    parts = {"parameter": "", "imports": "", "low": "", "cast": _CAST, "from_pytree": "tree_map_only"}
    names, in_fp32 = assignment.keep_fp32_inputs, ""
    if names:
        in_fp32 = f", in_fp32={names!r}"
        parts |= {"parameter": ", in_fp32=()", "imports": "\n    from inspect import signature"}
        parts |= {"low": _LOW_UNLESS_NAMED, "cast": _CAST_UNLESS_NAMED}
    returned = _RETURN
    if is_written:
        parts |= {"from_pytree": "tree_leaves, tree_map_only", "cast": _GIVEN + parts["cast"]}
        returned = _RETURN_WRITTEN
    helper = _AT_BORDER.format(returned=returned.format(**output), **parts, **output)
    return helper, f'at_border({place.path}, "{method}", {dtype}{in_fp32})'


def _weights(scans: Sequence[ScanResult], assignment: Assignment, path: str) -> list[str]:
    """Lines that cast the weights, but for modules that stay in fp32, as in one of the ``scans`` of
    the methods of a model.
    """
    precision = PRECISIONS.get(assignment.precision)
    if not assignment.keep_fp32:
        return [f"{path}.to({precision.format.dtype})"] if precision.kind == "cast" else []
    runs = ((scan, run) for scan in scans for run in scan.runs)
    scan, run = next(pair for pair in runs if pair[1].base and pair[1].keep_fp32 == assignment.keep_fp32)
    about = msgspec.structs.replace(scan.model, setup=[], names={"model": path})
    code = prepare(run.key._replace(precision=precision.name), about, run.keep_fp32, run.untied)
    casts = [lines for lines in code.body if lines.startswith("def ")]
    return code._replace(imports=[], body=casts).with_lines().split("\n")


# -- The text of a script with the code in it


def patched(program: ProgramScan, pasted: Sequence[PastedCode]) -> dict[str, str]:
    """By the resolved path of a file, its text with the code."""
    texts: dict[str, list[str]] = {}
    # From the last line up, as the others stay where they are
    for code in sorted(pasted, key=_line_number, reverse=True):
        file = _file(FirstCall(code.line), program.target)
        assert file is not None
        lines = texts.setdefault(str(file.resolve()), _lines(file))
        statement = _statement(lines, code)
        assert statement is not None
        start, end, text = statement.lineno - 1, statement.end_lineno, code.text
        margin = lines[start][: len(lines[start]) - len(lines[start].lstrip())]
        if code.is_around:
            lines[start:end] = [f"    {line}" for line in lines[start:end]]
        if code.is_instead:
            lines[start:end] = []
        lines[start:start] = [f"{margin}{line}".rstrip() for line in text.rstrip("\n").split("\n")]
    return {file: "\n".join(lines) for file, lines in texts.items()}


def _placed(program: ProgramScan, code: PastedCode) -> PastedCode | None:
    """The code at the statement before, or around, which it belongs; ``None`` if there is none."""
    file = _file(FirstCall(code.line), program.target)
    if file is None:
        return None
    lines, text = _lines(file), code.text
    statement = _statement(lines, code)
    if statement is None:
        return None
    # In a function, an import would make the name local to all of it
    if _imports_torch(lines):
        text = text.removeprefix("import torch\n").lstrip("\n")
    # Strings over several lines cannot be indented
    is_whole = statement.lineno <= _line_number(code) <= (statement.end_lineno or 0)
    if code.is_instead and statement.lineno != _line_number(code):
        return None
    if code.is_around and (
        not is_whole
        or any(
            isinstance(node, (ast.Constant, ast.JoinedStr)) and node.lineno != node.end_lineno
            for node in ast.walk(statement)
        )
    ):
        return None
    return msgspec.structs.replace(code, line=f"{code.line.rpartition(':')[0]}:{statement.lineno}", text=text)


def _imports_torch(lines: Sequence[str]) -> bool:
    imports = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.Import)]
    return any(alias.name == "torch" and alias.asname is None for node in imports for alias in node.names)


def _line_number(code: PastedCode) -> int:
    return int(code.line.rpartition(":")[2])


def _lines(file: Path) -> list[str]:
    with tokenize.open(file) as source:
        return source.read().split("\n")


def _file(place: FirstCall, target: str) -> Path | None:
    """The file of a line, which is shown relative to the current folder, or by its name alone."""
    name = place.line.rpartition(":")[0]
    files = [Path(name), Path(target).parent / name]
    return next((file for file in files if name and file.is_file()), None)


def _statement(lines: Sequence[str], code: PastedCode) -> ast.stmt | None:
    """The innermost statement with a line that starts a line itself; of one in a loop that makes
    no variable of the code, the loop.
    """
    text = code.text + ("    pass" if code.is_around else "")
    names, line = _names(ast.parse(text)), _line_number(code)
    statement: ast.stmt | None = None
    is_in_loop = False
    node: ast.AST | None = ast.parse("\n".join(lines))
    while node is not None:
        beside = list(ast.iter_child_nodes(node))
        node = next((child for child in beside if _has_line(child, line)), None)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            is_in_loop = False
        if isinstance(node, ast.stmt) and not is_in_loop:
            # The first of several in a line; an `elif` has no place before it
            first = next(each for each in beside if isinstance(each, ast.stmt) and each.lineno == node.lineno)
            start = lines[first.lineno - 1]
            if start.lstrip() == start[first.col_offset :] and not start.lstrip().startswith("elif"):
                statement = first
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor)) and not names & _names(node, ast.Store):
            is_in_loop = True
    return statement


def _names(tree: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The variables in code; those that it sets, with ``ast.Store``."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _has_line(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return any(_has_line(part, line) for part in node.body)
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last
