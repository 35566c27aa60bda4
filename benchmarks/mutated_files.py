"""Mutate every kind of file that is read, and see how the command ends.

    pip install lowprec-check[test]
    python benchmarks/mutated_files.py --output reports/mutated-files                # 2,400 files, seed 0
    python benchmarks/mutated_files.py --count 200 --seed 7 --kinds settings,manifest

A mutation changes values, keys, the nesting, or bytes of a file, or gives a file an odd name. Each is read by a command in a fork of
this process, every fiftieth by a process of its own. The command must end within ``--limit`` seconds with exit code 0, 1 or 2, and
print no traceback. Where a command would scan a model, the fork takes a saved scan as its result; a process of its own scans.

Writes OUTPUT.md and OUTPUT.json with every failure; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from report_files import head, made, save

from lowprec_check import Planning, ScanResult, UsageError, apply, find_plan
from lowprec_check.analysis import baseline
from lowprec_check.cli.main import main
from lowprec_check.compat import runner
from lowprec_check.compat.scan_process import Request, ScanOutcome, row_of
from lowprec_check.engine import session
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.engine.model.zoo import import_zoo
from lowprec_check.errors import encodable
from lowprec_check.schema import matrix

ROOT = Path(__file__).resolve().parent.parent
SCANS = ROOT / "reports" / "scans"
MODEL = "import torch\ntorch.manual_seed(0)\nmodel = torch.nn.Linear(3, 2).eval()\ninputs = torch.ones(4, 3)\n"
TEST = "import torch\ndef test_product():\n    torch.ones(2, 2) @ torch.ones(2, 2)\ndef test_fails():\n    raise ValueError('a' * 40)\n"
SETTINGS = """\
[project]
name = "example"

[tool.lowprec-check]
precision = ["half", "amp-bf16"]
tolerance = 0.1
json = "saved.json"

[tool.lowprec-check.scan]
fail-on = "never"
report = ["report.md"]
baseline = "accepted.json"

[tool.lowprec-check.catalog.gaps]
dtype = "bf16"
"""
MANIFEST = """\
# Known failures.

[[known]]
test = "test_model.py::test_fails"
exception = "ValueError"
match = "a+"
torch = ">=2.6"
reason = "a reason"

[[known]]
test = "test_*.py::test_f*"
exception = ["KeyError", "ValueError"]
platform = "linux"
strict = false
reason = "another"
"""
LIST = "model.py --seed 1  # the first\nmodel.py:model -p half\ntorchvision:resnet18,num_classes=3 --budget 2\n"
BERT = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "vocab_size": 20, "max_position_embeddings": 16}  # fmt: skip
SCAN = "scan model.py -q -p half --times off --errors none"
LOADED = "-q -p half --times off --errors none --isolation none"
OWN_PROCESS = 50
"""Each of so many mutations is read by a process of its own."""
PYTEST = "pytest -q -p no:cacheprovider"


class Kind(NamedTuple):
    """A kind of file."""

    file: str
    """The one that is mutated; empty: a name is odd, ``NAME`` in the commands."""
    calls: tuple[str, ...]
    """Commands that read it: one is drawn for each mutation."""
    weight: int = 1
    """Its share of the mutations."""
    scans: bool = False
    """Whether forks scan, since the file is about how a model is loaded."""


REPORTS = tuple(
    f"report saved.json -f {name}" for name in ("text", "md", "html", "sarif", "junit", "github", "concise", "json")
)
KINDS = {
    "saved scan": Kind("saved.json", (*REPORTS, "report saved.json --fail-on note", "report saved.json -o r.md -o r.xml",
                       "diff saved.json scan.json", "diff scan.json saved.json -f html", "diff saved.json saved.json -f json"), 4),
    "saved scan of training": Kind("training.json", ("report training.json", "report training.json -f html",
                                   "report training.json -f md", "diff training.json training0.json"), 2),
    "saved coverage": Kind("coverage.json", ("diff coverage.json coverage0.json", "diff coverage0.json coverage.json -f html",
                           "report coverage.json", f"{PYTEST} --lowprec-coverage half --lowprec-baseline coverage.json"), 2),
    "baseline of scan": Kind("accepted.json", (f"{SCAN} --baseline accepted.json", f"{SCAN} --baseline accepted.json --update-baseline",
                             f"{SCAN} --baseline accepted.json --report r.sarif"), 2),
    "settings": Kind("pyproject.toml", ("explain LP101", "scan model.py -q", "catalog gaps --json", "report scan.json", "env",
                     "plan model.py --budget 0"), 4),
    "manifest": Kind("known.toml", (f"{PYTEST} --lowprec-manifest known.toml",
                     f"{PYTEST} --lowprec-manifest known.toml --lowprec-update-manifest"), 3),
    "list of models": Kind("models.txt", ("compat --from-file models.txt -o out -q",), 1),
    "matrix of models": Kind("out/matrix.json", ("compat model.py -o out -q",), 1),
    "scan in a matrix": Kind("out/scans/model.py.json", ("compat model.py -o out -q",), 1),
    "plan": Kind("plan.json", ("apply plan.json",), 2),
    "weights": Kind("weights.pt", (f"scan model.py --weights weights.pt {LOADED}",), 1, True),
    "configuration": Kind("folder/config.json", (f"scan hf:folder --inputs 1x4:int64 {LOADED}",), 1, True),
    "model": Kind("model.py", (f"scan model.py {LOADED}", "plan model.py -q --budget 0"), 1, True),
    "name of a model": Kind("", (*(f"scan {form} {LOADED}" for form in ("NAME", "NAME.py", "model.py:NAME", "hf:NAME", "timm:NAME", "transformers:NAME",
                            "model.py --weights NAME", "model.py --inputs NAME", "model.py --without-kernel NAME:half")), "plan NAME.py -q"), 1, True),
    "name of a file": Kind("", (*(f"scan model.py -q {option}" for option in ("--json NAME", "--report NAME.md", "--baseline NAME", "--save-plan NAME",
                           "--baseline NAME --update-baseline")), "report NAME", "report scan.json -o NAME -f md", "report scan.json -o NAME/r.md",
                           "diff scan.json NAME", "diff scan.json saved.json -o NAME -f md", "compat NAME.py -o out -q", "compat model.py -o NAME -q",
                           "compat --from-file NAME", "plan model.py -q --save NAME", *(f"{PYTEST} {option}" for option in (
                           "--lowprec-manifest NAME", "--lowprec-coverage half --lowprec-report NAME.json", "--lowprec-manifest NAME --lowprec-update-manifest",
                           "--lowprec-coverage half --lowprec-baseline NAME"))), 3),
    "name in the catalog": Kind("", ("op NAME", "op dot --torch NAME", "explain NAME", "catalog diff NAME 2.8", "env --device NAME", "scan model.py -p NAME"), 1),
}  # fmt: skip


# -- Mutations

NUMBERS = int, float
DEEP = 100_000
ODD_TEXTS = (
    "", " ", "x" * 256, "x" * 5000, "\0", "a\nb", "\x1b[31m", "\u202e", "\u061c", "\U000e0041", "%s{}", "../../x", "/", "-", "~", "é" * 200,
    "😀" * 80, "(a+)+$", "(", "[[:x:]]", "a{1000000}", "*" * 40, "(?P<x>", "a." * 10_000, "a/" * 3000, "::error::x", "<b>", "1e999", "nan", "2.99",
    "LP101", "half", "cpu", "dask://x:1", "aten.mm.default", ">=2,<", "model.py --json x", "'", '"', "#", "$(x)", "\\", "\ud800",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 10**19, -(10**30), 10**400, 1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), [], {}, [[]], [None], {"": ""},
    {"x": {"y": []}}, ["x", 1], [0] * 1000, *ODD_TEXTS,
)  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value, with each of its keys or indices."""
    waiting = [value]
    while waiting:
        container = waiting.pop()
        keys = (
            container if isinstance(container, dict) else range(len(container)) if isinstance(container, list) else ()
        )
        for key in keys:
            yield container, key
            waiting.append(container[key])


def mutated_value(value: Any, drawn: random.Random) -> Any:
    """A JSON value with one to four places changed."""
    value = copy.deepcopy(value)
    for _ in range(drawn.choice((1, 1, 1, 2, 4))):
        found = [*places(value)]
        if not found:
            break
        container, key = drawn.choice(found)
        other, at = drawn.choice(found)
        action = drawn.choice(("alike", "alike", "alike", "set", "remove", "rename", "copy", "swap", "double", "nest"))
        if action in ("set", "alike"):
            alike = [
                odd
                for odd in ODD_VALUES
                if isinstance(odd, NUMBERS if isinstance(container[key], NUMBERS) else type(container[key]))
            ]
            container[key] = copy.deepcopy(drawn.choice((action == "alike" and alike) or ODD_VALUES))
        elif action == "remove":
            del container[key]
        elif action == "rename" and isinstance(container, dict):
            container[drawn.choice(ODD_TEXTS)] = container.pop(key)
        elif action == "copy" and len(str(other[at])) < 100_000:
            container[key] = copy.deepcopy(other[at])
        elif action == "swap" and isinstance(container, list):
            container[key], container[0] = container[0], container[key]
        elif action == "double" and isinstance(container, list):
            container += copy.deepcopy(container[key:][:1000])
        elif action == "nest":
            for _ in range(drawn.choice((1, 3, 300))):
                container[key] = drawn.choice(([container[key]], {"x": container[key]}))
    return value


def mutated_json(data: bytes, drawn: random.Random) -> bytes:
    """A JSON file with values changed, sometimes with something nested too deeply to be read."""
    text = json.dumps(mutated_value(json.loads(data), drawn))
    if drawn.random() < 0.1:
        deep = drawn.choice((500, 5000, DEEP))
        opened, closed = drawn.choice((("[", "]"), ('{"x":', "}")))
        ends = [match.end() for match in re.finditer(r'": |\[', text)]
        at = drawn.choice(ends) if ends else 0
        text = f"{text[:at]}{opened * deep}0{closed * deep}{',' if text[at - 1 : at] == '[' else ''}{text[at:]}"
    if drawn.random() < 0.1:
        text = re.sub(
            r"\d+",
            lambda match: drawn.choice((match[0], match[0], "9" * drawn.choice((19, 400, 5000)))),
            text,
            count=50,
        )
    return text.encode("utf-8", "surrogatepass")


def mutated_lines(data: bytes, drawn: random.Random) -> bytes:
    """A TOML file, or another text, with lines or values changed."""
    lines = data.decode().splitlines()
    for _ in range(drawn.choice((1, 1, 2, 3))):
        at = drawn.randrange(len(lines))
        key, equals, _ = lines[at].partition(" = ")
        action = drawn.choice(("value", "value", "value", "remove", "double", "move", "deep", "word"))
        if action == "value" and equals:
            lines[at] = f"{key} = {drawn.choice((toml_text, repr, json.dumps))(drawn.choice(ODD_VALUES))}"
        elif action == "remove" and len(lines) > 1:
            del lines[at]
        elif action == "double":
            lines.insert(drawn.randrange(len(lines)), lines[at])
        elif action == "move":
            lines.insert(drawn.randrange(len(lines)), lines.pop(at))
        elif action == "deep":
            deep = drawn.choice((100, 5000, DEEP))
            lines.insert(at, drawn.choice((
                f"{key or 'x'} = {'[' * deep}{']' * deep}", f"{key or 'x'} = {'{x=' * deep}0{'}' * deep}", f"[{'a.' * deep}a]", f"{'a.' * deep}a = 1",
                f"[[{'tool.' * deep}x]]",
            )))  # fmt: skip
        elif action == "word":
            lines[at] = re.sub(
                r"[\w.]+", lambda match: drawn.choice((match[0], match[0], drawn.choice(ODD_TEXTS))), lines[at]
            )
    return "\n".join(lines).encode("utf-8", "surrogatepass") + b"\n"


def toml_text(value: Any) -> str:
    """A text in double quotes, which may hold any character."""
    return json.dumps(value if isinstance(value, str) else str(value))


def mutated_bytes(data: bytes, drawn: random.Random) -> bytes:
    """Bytes removed, changed, repeated or added."""
    at, length = drawn.randrange(len(data) + 1), drawn.choice((1, 2, 8, 100, 10_000))
    action = drawn.choice(("truncate", "remove", "flip", "repeat", "insert", "noise", "empty", "encode"))
    if action == "flip":
        return bytes(byte ^ (drawn.random() < 3 / len(data)) << drawn.randrange(8) for byte in data)
    if action == "encode":
        return data.decode("utf-8", "replace").encode(drawn.choice(("utf-16", "utf-8-sig", "utf-32")))
    return {
        "truncate": data[:at],
        "remove": data[:at] + data[at + length :],
        "repeat": data[:at] + data[at : at + length] * drawn.choice((2, 50)) + data[at + length :],
        "insert": data[:at]
        + drawn.choice((b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"[", b'"', b"\\u0000", b"\r", b"1e400"))
        + data[at:],
        "noise": data[:at] + drawn.randbytes(length) + data[at + length :],
        "empty": b"",
    }[action]


def mutated(name: str, data: bytes, drawn: random.Random) -> bytes:
    """A file that differs from ``data``."""
    by_suffix = {".json": mutated_json, ".toml": mutated_lines, ".txt": mutated_lines, ".py": mutated_lines}
    change = by_suffix.get(Path(name).suffix, mutated_bytes)
    return (mutated_bytes if drawn.random() < 0.2 else change)(data, drawn)


def odd_name(drawn: random.Random) -> str:
    """A name of a file that no file has, and that an operating system passes on."""
    text = drawn.choice(ODD_TEXTS).replace("\0", "")
    letters = "".join(
        drawn.choices(
            [*string.ascii_letters, "é", "/", " ", "\n", ":", "=", "\udcff", "\u202e", "😀"],
            k=drawn.choice((3, 60, 300, 5000)),
        )
    )
    return os.fsdecode(os.fsencode(drawn.choice((text.replace("\ud800", "\udc80"), letters))))


# -- Calls


def make_files(folder: Path) -> None:
    """Write the files that are mutated, as the program writes them, and those that commands need beside them."""
    result = ScanResult.load(SCANS / "masked_attention.json")
    (folder / "out" / "scans").mkdir(parents=True)
    (folder / "folder").mkdir()
    for name in ("scan.json", "saved.json", "out/scans/model.py.json"):
        result.save(folder / name)
    for name in ("training.json", "training0.json"):
        shutil.copy(ROOT / "reports" / "training" / "train_classifier.json", folder / name)
    texts = {
        "model.py": MODEL,
        "test_model.py": TEST,
        "pyproject.toml": SETTINGS,
        "known.toml": MANIFEST,
        "models.txt": LIST,
    }
    for name, text in (texts | {"folder/config.json": json.dumps(BERT)}).items():
        (folder / name).write_text(text, encoding="utf-8")
    baseline.save(baseline.baseline_of(result), folder / "accepted.json")
    row = row_of(result, Request("model.py", (), None, "model.py"), 1.0, {})
    matrix.save(matrix.Matrix(rows=[row]), folder / "out" / "matrix.json")
    plan = planning().plan
    assert plan is not None
    plan.save(folder / "plan.json")
    torch.save(torch.nn.Linear(3, 2).state_dict(), folder / "weights.pt")
    options = ["--lowprec-coverage", "half,bfloat16", "--lowprec-report", "coverage.json"]
    subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=folder, check=False, stdout=subprocess.DEVNULL)
    shutil.copy(folder / "coverage.json", folder / "coverage0.json")


@functools.cache
def planning() -> Planning:
    """A plan for the model of :data:`MODEL`, and how it was found."""
    model = torch.nn.Linear(3, 2).eval()
    return find_plan(model, torch.ones(4, 3))


def warm_up(folder: Path) -> None:
    """Import and read what commands need once, for all forks."""
    with torchvision_works():
        _ = import_zoo("transformers").BertModel
    kept, arguments = os.dup(1), sys.argv
    for words in (
        *map(shlex.split, REPORTS),
        ["diff", "scan.json", "saved.json"],
        ["op", "dot"],
        ["catalog", "gaps"],
        ["explain"],
    ):
        os.chdir(folder)
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            call(words)
    sys.argv = arguments
    os.dup2(kept, 1)
    os.close(kept)


def stand_in_for_scans() -> None:
    """Let commands take saved results for those of scans, in this process."""
    saved = ScanResult.load(SCANS / "masked_attention.json")
    session.scan_file = lambda *_: iter([saved])  # type: ignore[assignment]
    session.plan_file = lambda *_: iter([planning()])  # type: ignore[assignment]
    runner.scan_one = lambda request, **_: ScanOutcome(request, saved.to_json(), None, 1.0)


def call(words: list[str]) -> int:
    """Run a command in this process; returns its exit code."""
    if words[0] == "pytest":
        return {4: 2}.get(code := int(pytest.main(words[1:])), code)
    if words[0] == "apply":
        try:
            apply(torch.nn.Linear(3, 2).eval(), words[1])
        except UsageError as error:
            print("error:", error)
            return 2
        return 0
    sys.argv = ["lowprec-check", *words]
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


class Ended(NamedTuple):
    """How a call ended."""

    code: int
    """A signal that killed it is negative."""
    seconds: float
    """Processor time."""


def limited(limit: float) -> None:
    """Kill this process after so many seconds of processor time: the machine may be busy."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))


def end_of(child: int) -> Ended:
    """Wait for a child process, which is killed if it only waits for ten minutes."""
    waited = signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
    signal.alarm(600)
    try:
        _, status, used = os.wait4(child, 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, waited)
    return Ended(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)


def end_of_fork(words: list[str], output: Path, limit: float, *, scans: bool) -> Ended:
    """Run a command in a fork, which writes what it prints to ``output``."""
    child = os.fork()
    if child == 0:
        limited(limit)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = 3
        try:
            sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w")) for number in (1, 2))
            if not scans:
                stand_in_for_scans()
            code = call(words)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return end_of(child)


def end_of_process(words: list[str], output: Path, limit: float) -> Ended:
    """The same of a process of its own, in which nothing stands in for scans."""
    if words[0] == "apply":
        code = "import sys, lowprec_check, torch\ntry: lowprec_check.apply(torch.nn.Linear(3, 2).eval(), sys.argv[1])\n"
        command = [sys.executable, "-c", f"{code}except lowprec_check.UsageError: sys.exit(2)", *words[1:]]
    else:
        command = [sys.executable, "-m", *(["lowprec_check"] if words[0] != "pytest" else []), *words]
    with output.open("wb") as file:
        prepare = functools.partial(limited, limit * 3)
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=prepare)  # noqa: PLW1509
        ended = end_of(process.pid)
        process.returncode = ended.code
    return ended._replace(code=2) if (words[0], ended.code) == ("pytest", 4) else ended


def mutate_and_call(
    name: str, kind: Kind, number: int, options: argparse.Namespace, made_files: Path
) -> dict[str, Any]:
    """Mutate a file, read it, and return how that ended."""
    drawn = random.Random(f"{options.seed} {name} {number}")
    words = shlex.split(drawn.choice(kind.calls))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "work")
        shutil.copytree(made_files, folder)
        if kind.file:
            file = folder / kind.file
            file.write_bytes(mutated(kind.file, file.read_bytes(), drawn))
        else:
            odd = odd_name(drawn)
            words = [word.replace("NAME", odd) for word in words]
        os.chdir(folder)
        own = number % OWN_PROCESS == OWN_PROCESS - 1
        output = Path(temporary, "output")
        if own:
            ended = end_of_process(words, output, options.limit)
        else:
            ended = end_of_fork(words, output, options.limit, scans=kind.scans)
        os.chdir(ROOT)
        text = output.read_text(encoding="utf-8", errors="replace")
        left = [path.name for path in folder.rglob(".lowprec-check-*")]
    found = {
        "kind": name,
        "number": number,
        "call": encodable(shlex.join(words))[:200],
        "code": ended.code,
        "seconds": round(ended.seconds, 2),
        "own": own,
    }
    wrong = ended.code not in (0, 1, 2) or "Traceback" in text or "INTERNALERROR" in text or bool(left)
    return found | ({"wrong": text[-3000:] + "".join(left)} if wrong else {})


# -- The report


def render(data: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    kinds, wrong = data["kinds"], data["wrong"]
    lines = head("Mutated files", data)
    lines += [
        f"{sum(each['files'] for each in kinds):,} mutated files and odd names were given to commands, {sum(each['own'] for each in kinds):,} of "
        f"them to processes of their own (seed {data['seed']}). {len(wrong):,} ended with a traceback or another exit code than 0, 1 and 2, took "
        f"more than {data['limit']:g} s of processor time, or left a half-written file.",
        "",
        "| what is mutated | files | exit 0 | exit 1 | exit 2 | wrong | longest in this process |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for each in kinds:
        bad = sum(one["kind"] == each["kind"] for one in wrong)
        codes = " | ".join(str(each["exits"].get(code, 0)) for code in "012")
        lines.append(f"| {each['kind']} | {each['files']} | {codes} | {bad} | {each['longest']:.1f} s |")
    for each in wrong:
        lines += [
            "",
            f"`{each['call']}` ({each['kind']} {each['number']}, exit {each['code']})",
            "",
            "```",
            each["wrong"],
            "```",
        ]
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Make all calls, of all kinds in turns, until Ctrl+C."""
    chosen = {name: KINDS[name] for name in options.kinds or KINDS}
    share = options.count / sum(kind.weight for kind in chosen.values())
    numbers = [
        (number / kind.weight, name, number)
        for name, kind in chosen.items()
        for number in range(math.ceil(share * kind.weight))
    ]
    calls: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        make_files(Path(folder))
        warm_up(Path(folder))
        for _, name, number in sorted(numbers):
            if options.only in (None, number):
                calls.append(found := mutate_and_call(name, chosen[name], number, options, Path(folder)))
                if "wrong" in found:
                    print(found, file=sys.stderr)
                if len(calls) % 100 == 0:
                    print(f"{len(calls)} of {len(numbers)}", file=sys.stderr)
    return {
        "made": made(note=options.note),
        "seed": options.seed,
        "limit": options.limit,
        "kinds": [totals(name, [each for each in calls if each["kind"] == name]) for name in chosen],
        "wrong": [each for each in calls if "wrong" in each],
    }


def totals(name: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What is saved of the calls of a kind."""
    return {
        "kind": name,
        "files": len(calls),
        "own": sum(each["own"] for each in calls),
        "exits": Counter(str(each["code"]) for each in calls),
        "longest": max((each["seconds"] for each in calls if not each["own"]), default=0),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2400, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=lambda text: text.split(","), help="some of: " + ", ".join(KINDS))
    parser.add_argument(
        "--only", type=int, metavar="N", help="the mutation with this number of each kind, as in the report"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=10,
        help="seconds of processor time for a call; three times as many for a process of its own, which imports torch",
    )
    parser.add_argument("--note", default="", help="what one has to know of the run")
    parser.add_argument("--output", type=Path, help="path of the report without its suffix")
    given = parser.parse_args()
    found = run(given)
    save(given.output, found, render)
    sys.exit(bool(found["wrong"]))
