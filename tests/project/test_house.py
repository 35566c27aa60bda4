"""House rules: torch stays in the engine, one name for one thing, no nested conditions, budgets of lines."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "lowprec_check"
FILES = sorted(PACKAGE.rglob("*.py"))
FEATURE_PARTS = {"run", "rules", "statements", "advice", "report", "diff", "command"}
"""The modules of a feature that are found by their names; all but ``run`` import no torch."""
WITH_TORCH = ("core/", "engine/", "features/", "pytest_plugin/fixture/", "torchkit/")


def inside(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


WITHOUT_TORCH = ("engine/backends/", "engine/sweep/kept_sweep.py")
"""In the engine, and still imported by the command line for ``--help`` and for what needs no model."""


def is_without_torch(path: str) -> bool:
    parts = path.removesuffix(".py").split("/")
    is_part = parts[0] == "features" and not FEATURE_PARTS.isdisjoint(parts[2:3]) and parts[2] != "run"
    return is_part or path.startswith(WITHOUT_TORCH) or not path.startswith(WITH_TORCH)


TORCH_FREE = [module_of(path) for path in FILES if path.name != "__main__.py" and is_without_torch(inside(path))]

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = sys.modules.keys() & {"torch", "torchvision", "numpy"}
    assert not heavy, f"{name} imports {', '.join(heavy)}"
"""


def test_only_the_engine_and_the_fixture_import_torch() -> None:
    assert len(TORCH_FREE) > 50
    command = [sys.executable, "-c", IMPORT_EACH, *TORCH_FREE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_import_contracts_know_every_package() -> None:
    contracts = {
        contract["id"]: contract
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
            "contracts"
        ]
    }
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    sources = {source.split(".")[1] for source in contracts["no-torch"]["source_modules"]}
    assert sources >= rooms - {"__init__", "core", "engine", "features", "torchkit"}


# -- Names


def clashes(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def test_a_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(inside(path))
    assert not clashes(places)


VIEWS = ("cli", "report", "schema")
"""``cli/x`` is the command of x, ``report/x`` shows it, ``schema/x`` is what is saved of it: one thing, one name."""


def modules_by_name() -> Iterator[tuple[str, str]]:
    """Each module and each package: its name and where it lies, but for features and their parts."""
    features = PACKAGE / "features"
    for path in FILES:
        named = path.parent if path.name == "__init__.py" else path
        is_part = path.is_relative_to(features) and named.stem in FEATURE_PARTS
        if named != PACKAGE and named.parent != features and not is_part:
            yield named.stem, inside(named.parent)


def is_clash(homes: list[str]) -> bool:
    """Whether modules in these folders share a name and are not views of one thing.

    ``report/text``, ``report/op/text`` and ``report/diff/text`` are one format in three places.
    """
    rooms = [home.split("/")[0] for home in homes]
    views = [room for room in rooms if room in VIEWS and room != "report"]
    return sum(room not in VIEWS for room in rooms) > 1 or len(set(views)) < len(views)


def test_a_module_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for name, home in modules_by_name():
        places[name].append(home)
    assert not {name: homes for name, homes in clashes(places).items() if is_clash(homes)}


@pytest.mark.parametrize(
    ("homes", "clash"),
    [
        (["cli", "report", "schema", "engine"], False),
        (["report", "report/op", "report/diff"], False),
        (["analysis/rules", "pytest_plugin"], True),
        (["core/trace", "engine/model", "report"], True),
        (["schema", "schema/old"], True),
    ],
)
def test_what_counts_as_a_clash(homes: list[str], clash: bool) -> None:
    assert is_clash(homes) == clash


# -- Foreign text


def test_the_text_of_an_exception_is_made_safely() -> None:
    """In code that runs models, ``str(error)`` may raise: :func:`lowprec_check.errors.message_of` does not."""
    files = [path for path in FILES if inside(path).startswith((*WITH_TORCH, "schema/registry"))]
    found = [
        f"{inside(path)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if is_text_of_error(node)
    ]
    assert not found


def is_text_of_error(node: ast.AST) -> bool:
    """Whether it is ``str(error)`` or ``f"{error}"``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        value: ast.AST = node.args[0]
    elif isinstance(node, ast.FormattedValue) and node.format_spec is None:
        value = node.value
    else:
        return False
    return isinstance(value, ast.Name) and value.id == "error"


@pytest.mark.parametrize(
    ("code", "found"), [("str(error)", 1), ("f'{error}'", 1), ("f'{error:.1e}'", 0), ("str(1)", 0)]
)
def test_what_counts_as_the_text_of_an_exception(code: str, found: int) -> None:
    assert sum(map(is_text_of_error, ast.walk(ast.parse(code)))) == found


# -- Style and size


def nested_conditions(tree: ast.AST) -> list[int]:
    """The lines of conditional expressions that hold another one."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.IfExp)
        and any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)
    ]


def test_no_conditional_expression_holds_another() -> None:
    lines = {inside(path): nested_conditions(ast.parse(path.read_text(encoding="utf-8"))) for path in FILES}
    assert not {name: found for name, found in lines.items() if found}


@pytest.mark.parametrize(
    ("code", "lines"), [("a if b else c", []), ("a if b else (c if d else e)", [1]), ("[a if b else c for d in e]", [])]
)
def test_what_counts_as_nested(code: str, lines: list[int]) -> None:
    assert nested_conditions(ast.parse(code)) == lines


BUDGETS = tomllib.loads((ROOT / "tools" / "size_budgets.toml").read_text(encoding="utf-8"))
SLACK = 0.02
"""A budget that is larger than what it is for by more than this share is to be lowered."""


def lines_in(folder: str, pattern: str = "*.py") -> int:
    """The lines of the files of a folder of the package, without those in folders that have a budget of their own."""
    others = [ROOT / other for other in BUDGETS["lines"] if other.startswith(f"{folder}/")]
    paths = (path for path in (ROOT / folder).rglob(pattern) if not any(path.is_relative_to(other) for other in others))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@pytest.mark.parametrize("folder", BUDGETS["lines"])
def test_a_folder_keeps_its_budget_of_lines(folder: str) -> None:
    budget, lines = BUDGETS["lines"][folder], lines_in(folder)
    assert lines <= budget, "delete as much; or raise the budget, with a sentence why"
    assert lines >= (1 - SLACK) * budget - 10, "lower the budget: it may only shrink"


def test_every_folder_has_a_budget() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in PACKAGE.glob("*/__init__.py")}
    folders |= {path.parent.relative_to(ROOT).as_posix() for path in (PACKAGE / "engine").glob("*/__init__.py")}
    assert folders <= BUDGETS["lines"].keys()


def size(name: str) -> int:
    """Bytes of a file, or of all files in a folder."""
    path = ROOT / name
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


@pytest.mark.parametrize("name", BUDGETS["bytes"])
def test_documents_and_reports_keep_their_budget_of_bytes(name: str) -> None:
    assert size(name) <= BUDGETS["bytes"][name], "delete as much; or raise the budget, with a sentence why"
