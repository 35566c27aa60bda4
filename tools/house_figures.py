"""Prints how large the house is: modules, the longest chain of imports, lengths of files and functions.

``python tools/house_figures.py [CHECKOUT]``; imports inside functions count, those for type checkers do not.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grimp


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """The length in lines and the name of each function and method."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            yield node.end_lineno - node.lineno + 1, f"{path.stem}.{node.name}"


def longest_chain(imports: Callable[[str], set[str]], modules: list[str]) -> list[str]:
    """The longest chain of modules, each of which imports the next; a cycle is cut where it closes."""
    open_modules: set[str] = set()

    @functools.cache
    def below(module: str) -> tuple[str, ...]:
        open_modules.add(module)
        found = max((below(other) for other in sorted(imports(module) - open_modules)), key=len, default=())
        open_modules.discard(module)
        return (module, *found)

    return list(max(map(below, modules), key=len))


def main() -> None:
    """Print the figures of a checkout, by default this one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parent.parent)
    checkout = parser.parse_args().checkout.resolve()
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)
    sys.setrecursionlimit(10_000)
    files = sorted((checkout / "lowprec_check").rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    packages = {path.parent for path in files}
    graph = grimp.build_graph("lowprec_check", exclude_type_checking_imports=True, cache_dir=None)
    modules = sorted(graph.modules)
    chain = longest_chain(graph.find_modules_directly_imported_by, modules)
    lengths = sorted(length for path in files for length in functions(path))
    longest_file = max(lines, key=lambda path: lines[path])
    flat = [path for path in files if path.parent.name == "lowprec_check"]
    print(f"{len(files)} files in {len(packages)} packages, {sum(lines.values())} lines; {len(flat)} at the top level")
    print(
        f"file: median {statistics.median(lines.values()):.0f} lines, longest {lines[longest_file]} ({longest_file.name})"
    )
    sizes = [length for length, _ in lengths]
    over = sum(size > 60 for size in sizes)
    print(f"function: {len(sizes)}, median {statistics.median(sizes):.0f} lines, longest {lengths[-1]}, {over} over 60")
    print(f"longest import chain: {len(chain)} modules\n    " + "\n    ".join(chain))


if __name__ == "__main__":
    main()
