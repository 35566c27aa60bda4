"""The catalog: reading files, lookups by name, differences between versions, reports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Call
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.analysis.rules.registry import diagnose
from lowprec_check.catalog import declared, measured
from lowprec_check.catalog.answers import difference, find_fix, gaps, lookup
from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.known_issues import known_issues
from lowprec_check.catalog.names import bare, dtype_of, find
from lowprec_check.catalog.records import (
    DTYPES,
    LOW,
    MODES,
    Dtype,
    Failure,
    Header,
    OpRecord,
    OpSupport,
    OpTimes,
    State,
)
from lowprec_check.catalog.versioned_file import CatalogError
from lowprec_check.errors import UsageError
from lowprec_check.report.answers import answers_document
from lowprec_check.report.layout.text import text as in_text
from lowprec_check.schema.op_calls import OpCall, to_columns
from lowprec_check.schema.scan_result import Gap, GapKind, ModelInfo, Run, ScanResult
from tools.catalog_files import MeasuredSweep

SHIPPED = sorted((ROOT / "catalog").glob("measured-*.jsonl"))
VERSIONS = [f"2.{minor}" for minor in range(1, 16)]


def record(op: str, state: State, *, at: str | None = None) -> OpRecord:
    """An operator with four samples and this state in half forward."""
    if state == "all":
        return OpRecord(op=op, samples=(4, 4), aten=[op])
    failure = Failure(cells=["float16/forward"], type="RuntimeError", kind="missing-kernel", message="no", at=at)
    counts = [0 if state == "none" else 2, 4, 4, 4]
    return OpRecord(op=op, samples=(4, 4), aten=[op], passed={"float16": counts}, failures=[failure])


def sweep_file(folder: Path, version: str, records: list[OpRecord]) -> Path:
    header = Header(
        device="cpu",
        torch=version,
        capability="avx2",
        hardware="x",
        autocast=["bfloat16", "float16"],
        samples=4,
        ops=len(records),
    )
    return MeasuredSweep(header, records, [OpTimes(op="a", float32_us=[1.0, 2.0])]).save(folder)[0]


def clear_caches() -> None:
    measured.sweeps.cache_clear()
    measured.history.cache_clear()


@pytest.fixture
def catalog_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a catalog of sweeps: ``catalog_of({"2.1.0": [record, …]})``."""

    def make(content: dict[str, list[OpRecord]]) -> None:
        for version, records in content.items():
            sweep_file(tmp_path, version, records)
        monkeypatch.setattr(measured, "data_folder", lambda: tmp_path)
        clear_caches()

    return make


@pytest.fixture(autouse=True)
def _clear_caches() -> Iterator[None]:
    yield
    clear_caches()


# -- files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_complete_and_sorted(path: Path) -> None:
    if path.name.endswith(measured.TIMES):
        assert path.with_name(path.name.replace(measured.TIMES, ".jsonl")).exists()
        return
    for sweep in measured.read_sweeps(path):
        names = list(sweep.records)
        assert names == sorted(names)
        assert len(names) == sweep.header.ops > 600
        assert path.stem == f"measured-{sweep.header.device}-{sweep.header.capability.replace('_', '')}"
        for op, found in sweep.records.items():
            assert op == found.op
            for failure in found.failures:
                assert all(re.fullmatch(r"(float32|float16|bfloat16)/[a-z-]+", cell) for cell in failure.cells)
                assert failure.kind != "other" or not found.samples[0] or failure.cells[0].startswith("float32")
        assert {times.op for times in sweep.times.values()} <= set(names)


def test_data_that_sweeps_share_are_stored_once() -> None:
    """Sixteen sweeps of the CPU, one of CUDA, and declarations for eight releases."""
    assert sum(path.stat().st_size for path in (ROOT / "catalog").iterdir()) < 1_700_000
    for path in SHIPPED:
        lines = [re.sub(rb'^(\["[^"]+",)"[^"]*",', rb"\1", line) for line in path.read_bytes().splitlines()]
        repeated = len(lines) - len(set(lines))
        assert repeated < 0.02 * len(lines), path


def test_the_catalog_has_every_version() -> None:
    plain = [sweep for sweep in measured.sweeps() if sweep.header.device == "cpu" and not sweep.header.extension]
    assert [sweep.release for sweep in plain] == VERSIONS
    assert any(sweep.header.extension == "ipex 2.8.0" for sweep in measured.sweeps())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.rpartition("\n[")[0] + "\n", r": 3 lines follow .* 1 versions and 3 changes: truncated"),
        (lambda text: text[:-40] + "\n", r":5: .*truncated"),
        (
            lambda text: text.replace('"samples":[4,4]', '"samples":[4,4],"extra":1', 1),
            r":3: .*unknown field `extra`",
        ),
        (lambda text: text.replace("[2,4,4,4]", "[9,4,4,4]"), r":4: op 'b': .*float16 passes \[9, 4, 4, 4\]"),
        (lambda text: text.replace('"missing-kernel"', '"what"'), r":4: .*failures"),
        (lambda text: text.replace('"schema":3', '"schema":7'), r":1: schema 7, but"),
        (lambda text: text.replace('"device":"cpu",', ""), r":2: .*device"),
        (lambda text: text.replace('["b"', '["a"'), r":4: op 'a' version '2\.1\.0': duplicate"),
        (lambda text: text.replace('["b",', "["), r":4: does not start with an operator"),
        (
            lambda text: text.replace('["a","2.1.0"', '["a","2.9.0"', 1),
            r":3: op 'a': version '2\.9\.0' is not listed",
        ),
        (lambda text: text.replace("float16/forward", "float16/sideways"), r":4: .*cells"),
        (lambda text: text.replace('"torch":"2.1.0"', '"torch":"new"'), r":2: .*torch"),
        (lambda text: text.replace('"ops":3', '"ops":4'), r": 2\.1\.0 has 3 operators, its header counts 4: edited"),
        (lambda text: "", r":1: "),
        (lambda text: "\x80pickle", r":1: "),
    ],
)
def test_errors_in_files_name_the_line(tmp_path: Path, damage: Callable[[str], str], message: str) -> None:
    path = sweep_file(tmp_path, "2.1.0", [record("a", "all"), record("b", "some"), record("c", "all")])
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text), encoding="latin-1")
    with pytest.raises(CatalogError, match=r"measured-cpu-avx2\.jsonl" + message):
        [dict(sweep.records) for sweep in measured.read_sweeps(path)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.rpartition("\n[")[0] + "\n", r": 1 lines follow .* 1 versions and 1 changes: truncated"),
        (lambda text: text[:-4] + "\n", r":3: .*truncated"),
        (lambda text: text.replace("[1]", "[1,2]"), r":3: op 'a': forward 'float32_us': not a list of 1 sweeps"),
        (lambda text: text.replace('"forward"', '"foreword"'), r":3: .*unknown field `foreword`"),
        (lambda text: text.replace('["a",', "["), r":3: does not start with an operator"),
        (lambda text: text.replace('"schema":3', '"schema":1'), r":1: schema 1, but"),
    ],
)
def test_errors_in_times_name_the_line(tmp_path: Path, damage: Callable[[str], str], message: str) -> None:
    path = sweep_file(tmp_path, "2.1.0", [record("a", "all")])
    times = path.with_name(path.stem + measured.TIMES)
    text = times.read_text()
    assert damage(text) != text
    times.write_text(damage(text))
    with pytest.raises(CatalogError, match=r"measured-cpu-avx2\.times\.jsonl" + message):
        dict(measured.read_sweeps(path)[0].times)


def test_a_smaller_sweep_does_not_replace_a_larger_one(tmp_path: Path) -> None:
    many = [record("a", "all"), record("b", "all")]
    path = sweep_file(tmp_path, "2.1.0", many)
    with pytest.raises(UsageError, match="was not changed"):
        sweep_file(tmp_path, "2.1.0", many[:1])
    assert list(measured.read_sweeps(path)[0].records) == ["a", "b"]
    assert sweep_file(tmp_path, "2.1.0", many) == path
    assert sweep_file(tmp_path, "2.2.0", many[:1]) == path  # a new version may have fewer operators


states = st.lists(st.sampled_from(["all", "some", "none"]), min_size=1, max_size=6)
tables = st.dictionaries(st.sampled_from(["a", "b", "c.d"]), st.sampled_from(["all", "some", "none"]), min_size=1)


@given(
    sweeps=st.dictionaries(
        st.sampled_from(["2.1.0", "2.2.0", "2.9.1", "2.10.0", "2.9.1+ipex", "2.2.0+ipex"]), tables, min_size=1
    ),
    data=st.data(),
)
def test_reading_returns_what_was_saved_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, sweeps: dict[str, dict[str, State]], data: st.DataObject
) -> None:
    folders = [tmp_path_factory.mktemp("c") for _ in range(2)]
    for folder in folders:
        for version in data.draw(st.permutations([*sweeps])):
            of_version(version, sweeps[version]).save(folder)
        of_version(version, sweeps[version]).save(folder)  # again: it replaces itself
    [paths, others] = [sorted(folder.iterdir()) for folder in folders]
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in others]
    found = {sweep.header.build: sweep for sweep in measured.read_sweeps(paths[0])}
    assert len(found) == len(sweeps)
    for version, table in sweeps.items():
        wanted = of_version(version, table)
        sweep = found[wanted.header.build]
        assert sweep.header == wanted.header
        assert list(sweep.records.values()) == wanted.records
        assert list(sweep.times.values()) == wanted.times
        assert {op: sweep.state(op, "float16", "forward") for op in "xabc"} == {op: table.get(op) for op in "xabc"}


def of_version(version: str, table: dict[str, State]) -> MeasuredSweep:
    """A sweep with times that depend on its version; ``2.9.1+ipex`` has the extension."""
    torch, _, extension = version.partition("+")
    header = Header(
        device="cpu",
        torch=torch,
        capability="avx512",
        hardware="x",
        extension=f"{extension} {torch}" if extension else None,
        autocast=["bfloat16", "float16"],
        samples=4,
        ops=len(table),
    )
    records = [record(op, state) for op, state in sorted(table.items())]
    half = [float(torch[2]), None]
    times = [
        OpTimes(op=r.op, float32_us=[3.5, 210.0], slower={"float16": half, "bfloat16": [1.1, 2.0]}) for r in records
    ]
    return MeasuredSweep(header, records, times)


def test_a_new_version_only_adds_its_changes(tmp_path: Path) -> None:
    same = [record("a", "all"), record("b", "some")]
    before = sweep_file(tmp_path, "2.1.0", [*same, record("old", "all")]).read_text().splitlines()
    after = sweep_file(tmp_path, "2.2.0", [record("a", "all"), record("b", "all"), record("new", "all")]).read_text()
    added = [json.loads(line) for line in after.splitlines()[3:] if line not in before]
    assert added == [
        ["b", "2.2.0", {"passed": None, "failures": None}],
        ["new", "2.2.0", {"samples": [4, 4], "aten": ["new"]}],
        ["old", "2.2.0", None],
    ]
    assert set(before[1:]) <= set(after.splitlines())


# -- names


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("dot", "dot"),
        ("aten::dot", "dot"),
        ("torch.dot", "dot"),
        ("aten.dot.default", "dot"),
        ("torch.ops.aten.dot", "dot"),
        ("Tensor.dot", "dot"),
        ("svd", "svd"),
        ("torch.linalg.svd", "linalg.svd"),
        ("F.conv2d", "nn.functional.conv2d"),
        ("torch.nn.functional.conv2d", "nn.functional.conv2d"),
        ("rfft", "fft.rfft"),
        ("std.unbiased", "std.unbiased"),
        ("_cdist_forward", "cdist"),
        ("LayerNorm", "nn.functional.layer_norm"),
        ("torch.nn.BatchNorm2d", "nn.functional.batch_norm"),
        ("nn.Conv2d", "nn.functional.conv2d"),
    ],
)
def test_usual_names_are_found(query: str, first: str) -> None:
    assert find(query, measured.sweep_of("cpu").records)[0].op == first


@pytest.mark.parametrize("query", ["torch.vander", "aten::vander", "torch.cond", "torch.sparse.mm", "sparse.mm"])
def test_a_function_is_not_an_operator_of_similar_name(query: str) -> None:
    with pytest.raises(UsageError, match=f"{query} is not measured") as raised:
        find(query, measured.sweep_of("cpu").records)
    assert "is another operator" in str(raised.value.hint)


def test_a_function_is_not_a_special_method_of_its_name() -> None:
    assert all(found.op != "__rand__" for found in find("torch.rand", measured.sweep_of("cpu").records))


def test_a_short_name_finds_several() -> None:
    found = [found.op for found in find("svd", measured.sweep_of("cpu").records)]
    assert found == ["svd", "linalg.svd"]


def test_an_unknown_name_is_an_error_with_suggestions() -> None:
    with pytest.raises(UsageError) as raised:
        find("sofmax", measured.sweep_of("cpu").records)
    assert "softmax" in str(raised.value.hint)
    with pytest.raises(UsageError, match="dtype"):
        dtype_of("int8")


@given(st.sampled_from(sorted(measured.sweep_of("cpu").records)))
def test_every_operator_is_found_by_its_own_name(op: str) -> None:
    assert find(op, measured.sweep_of("cpu").records)[0].op == op
    assert bare(op)


# -- versions


def oracle_since(past: list[State]) -> int | None:
    """The first index since which all states are ``all``; ``None`` if the last is not."""
    index = None
    for position in reversed(range(len(past))):
        if past[position] != "all":
            break
        index = position
    return index


@given(history=states, at=st.integers(0, 5))
def test_since_and_fixed_in(tmp_path_factory: pytest.TempPathFactory, history: list[State], at: int) -> None:
    at = min(at, len(history) - 1)
    folder = tmp_path_factory.mktemp("c")
    for minor, state in enumerate(history):
        sweep_file(folder, f"2.{minor + 1}.0", [record("a", state)])
    patch = pytest.MonkeyPatch()
    patch.setattr(measured, "data_folder", lambda: folder)
    clear_caches()
    try:
        cell = measured.history("cpu")[at].cell("a", "float16", "forward")
    finally:
        patch.undo()
        clear_caches()
    first = oracle_since(history[: at + 1])
    assert cell.since == (None if first is None else f"2.{first + 1}")
    assert cell.since_oldest == (first == 0)
    later = oracle_since(history)
    fixed = later is not None and later > at and history[at] != "all"
    assert cell.fixed_in == (f"2.{later + 1}" if fixed and later is not None else None)


def test_the_difference_of_two_versions(catalog_of: Callable[..., None]) -> None:
    catalog_of(
        {
            "2.1.2": [record("a", "none"), record("b", "all"), record("c", "all"), record("d", "some")],
            "2.2.0": [record("a", "all"), record("b", "some"), record("c", "all"), record("e", "all")],
        }
    )
    found = difference("2.1", "2.2")
    assert [(change.op, change.before, change.after) for change in found.gained] == [("a", "none", "all")]
    assert [(change.op, change.before, change.after) for change in found.lost] == [("b", "all", "some")]
    assert (found.only_before, found.only_after) == (["d"], ["e"])
    back = difference("2.2", "2.1")
    assert (back.before, [change.op for change in back.gained]) == ("2.2", ["b"])
    with pytest.raises(UsageError, match=r"no measurements of torch 2\.9 on cpu"):
        difference("2.1", "2.9")


def test_gaps_name_the_release_that_fixes_them(catalog_of: Callable[..., None]) -> None:
    catalog_of(
        {
            "2.1.2": [record("a", "none", at="a"), record("b", "some")],
            "2.2.0": [record("a", "all"), record("b", "none")],
        }
    )
    found = gaps("cpu", "float16", "2.1")
    assert [(missing.op, missing.fixed_in) for missing in found.missing] == [("a", "2.2"), ("b", None)]
    assert gaps("cpu", "bfloat16", "2.1").missing == []
    found = find_fix("aten.a.default", device="cpu", dtype="float16", torch="2.1.2+cpu")
    assert str(found) == "supported since torch 2.2"
    assert find_fix("aten.z.default", device="cpu", dtype="float16", torch="2.1.2") is None
    assert find_fix("aten.a.default", device="cuda", dtype="float16", torch="2.1.2") is None


def test_an_operator_that_fails_in_a_later_op_does_not_delay_the_fix(catalog_of: Callable[..., None]) -> None:
    catalog_of(
        {
            "2.1.2": [record("a", "none", at="a"), record("loss", "none", at="a")],
            "2.2.0": [record("a", "all"), record("loss", "none", at="b")],
            "2.3.0": [record("a", "all"), record("loss", "all")],
        }
    )
    found = find_fix("aten.a.default", device="cpu", dtype="float16", torch="2.1.2")
    assert str(found) == "supported since torch 2.2"
    assert AtenCatalog("cpu", "float16", "2.1").of("aten.a.default").fixed_in == "2.2"
    assert {missing.op: missing.fixed_in for missing in gaps("cpu", "float16", "2.1").missing} == {
        "a": "2.2",
        "loss": "2.3",
    }


def test_a_version_with_the_extension_is_separate() -> None:
    found = difference("2.8", "2.8+ipex")
    assert (found.before, found.after) == ("2.8", "2.8+ipex")
    assert gaps("cpu", "float16", "2.8.0+ipex").torch == "2.8+ipex"
    [answer] = lookup("dot", torch="2.8+ipex")
    assert {cell.extension for cell in answer.cells} == {"ipex 2.8.0"}
    with pytest.raises(UsageError, match=r"Measured versions: .*2\.8\+ipex"):
        gaps("cpu", "float16", "2.9+ipex")


def test_dot_on_xpu_moved_from_the_cpu_to_a_kernel() -> None:
    gained = difference("2.8", "2.15", "xpu", "float16").gained
    [dot] = [change for change in gained if change.op == "dot" and "forward" in change.modes]
    assert (dot.before, dot.before_on_cpu, dot.after, dot.after_on_cpu) == ("all", "wholly", "all", None)
    before = gaps("xpu", "float16", "2.8")
    assert "dot" in before.on_cpu
    assert "dot" not in {missing.op for missing in before.missing}
    assert "dot" not in gaps("xpu", "float16", "2.15").on_cpu


def test_errors_above_dispatch_also_occur_on_xpu() -> None:
    missing = {missing.op: missing for missing in gaps("xpu", "float16", "2.11").missing}
    assert (missing["quantile"].at, missing["quantile"].message) == ("quantile", "does not support the dtype")
    assert missing["signal.windows.hann"].at is None  # Python refuses
    assert missing["fft.rfft"].fixed_in == "2.12"
    assert missing["linalg.matrix_norm"].states["forward"] == "some"  # only some norms need singular values
    assert (missing["linalg.svd"].at, missing["linalg.svd"].message) == (
        "_linalg_svd",
        "runs on the CPU, which has no kernel for this dtype",
    )


@pytest.mark.parametrize("release", declared.releases("xpu"))
def test_declarations_for_xpu_are_consistent(release: str) -> None:
    """Half is never better than fp32, backward needs a gradient, and every failure has a reason."""
    sweep, file = measured.at_release("cpu", release), declared.load("xpu", release)
    assert sweep is not None
    seen = 0
    for op, found in sweep.records.items():
        for mode in MODES[:2]:
            wide = file.support(op, "float32", mode)
            for dtype in LOW:
                support = file.support(op, dtype, mode)
                if support is not None:
                    seen += 1
                    assert wide is None or support.rank <= wide.rank, (op, dtype, mode)
                    assert found.samples[MODES.index(mode)]
                    assert (support.failure is None) == (support.state == "all"), (op, dtype, mode)
                    assert (support.on_cpu is None) or support.at
    assert seen > 1000


def test_declarations_for_xpu_agree_with_cuda() -> None:
    """Most claims for XPU copy those for CUDA. The differences from measurements on CUDA were checked by hand."""
    cuda, file = measured.sweep_of("cuda", "2.11"), declared.load("xpu", "2.11")
    better, worse = set(), set()
    for op in cuda.records:
        for dtype in LOW:
            for mode in MODES[:2]:
                support, state = file.support(op, dtype, mode), cuda.state(op, dtype, mode)
                if support is not None and state is not None and support.state != state:
                    (better if OpSupport(state).rank < support.rank else worse).add(op)
    assert better == {"histc", "istft", "stft", "nn.functional.embedding_bag"}
    assert {op.partition(".")[0] for op in worse} == {"fft"}  # refused above dispatch until 2.12


def test_support_on_xpu_uses_the_ops_that_the_release_dispatches() -> None:
    [answer] = lookup("combinations", device="xpu", torch="2.8", dtype="float16")
    [on_all_devices] = [a for a in lookup("combinations", torch="2.8", dtype="float16") if a.op == "combinations"]
    assert answer.cells == [cell for cell in on_all_devices.cells if cell.device == "xpu"]
    assert {cell.state for cell in answer.cells} == {"all"}  # nonzero_static is newer
    assert "cholesky" in difference("2.8", "2.15", "xpu").only_before


def test_the_release_with_a_fix_on_xpu() -> None:
    dot = find_fix("aten.angle.default", device="xpu", dtype="float16", torch="2.8.0+xpu")
    assert str(dot) == "supported since torch 2.14"
    cdist = find_fix("aten._cdist_forward.default", device="xpu", dtype="float16", torch="2.13.0")
    assert str(cdist) == f"no torch release up to {declared.releases('xpu')[-1]} supports it"
    assert find_fix("aten.mm.default", device="xpu", dtype="float16", torch="2.13.0") is None


def test_an_issue_of_half_is_not_shown_for_fp32() -> None:
    def ids(dtype: Dtype) -> set[str]:
        [answer] = lookup("dot", dtype=dtype, torch="2.1")
        return {issue.id for issue in answer.issues}

    assert "ipex-673" in ids("float16")
    assert "ipex-673" not in ids("float32")


def test_lookup_of_dot_in_half() -> None:
    [answer] = lookup("dot", dtype="float16")
    cells = {(cell.device, cell.mode): cell for cell in answer.cells}
    assert cells["cpu", "forward"].state == "all"
    assert cells["cpu", "forward"].evidence == "measured"
    assert not cells["cpu", "forward"].since_oldest
    assert (cells["xpu", "forward"].since, cells["xpu", "forward"].registration) == ("2.11", "native")
    assert cells["xpu", "forward"].evidence == "declared"
    assert cells["xpu", "forward"].links
    assert "ipex-673" in {issue.id for issue in answer.issues}
    [older] = lookup("dot", dtype="float16", device="cpu", torch="2.1")
    assert {cell.state for cell in older.cells} == {"none", None}
    assert older.cells[0].fixed_in is not None


def test_a_cpu_fallback_on_xpu_has_the_support_of_the_cpu() -> None:
    [answer] = lookup("linalg.svd", dtype="float16", device="xpu")
    assert {(cell.state, cell.registration) for cell in answer.cells} == {("none", "fallback")}
    assert [missing.op for missing in gaps("xpu", "float16").missing if missing.op == "linalg.svd"]
    assert declared.releases("xpu")[-1] == gaps("xpu", "float16").torch


# -- use in scans


NO_DOT = "\"dot\" not implemented for 'Half'"


def scanned(run: Run, torch: str = "2.13.0", model: str = "Net") -> ScanResult:
    info = ModelInfo(name=model, parameters=1, inputs=[], modules=1, training=False)
    return ScanResult(tool="t", target="t", model=info, environment={"torch": torch}, runs=[run])


def gap(op: str, message: str, kind: GapKind = "missing-kernel") -> Gap:
    return Gap(op=op, layer="dispatch", kind=kind, module="", source=None, dtypes=["half"], message=message)


def test_a_scan_shows_the_release_with_a_fix() -> None:
    def scan(torch: str, op: str, message: str) -> str:
        run = Run(precision="half", device="cpu", status="error", gaps=[gap(op, message)])
        [found] = diagnose(scanned(run, torch), select=["LP101"])
        return str(found.help)

    dot = scan("2.1.2+cpu", "aten.dot.default", NO_DOT)
    assert re.search(r"; supported since torch 2\.\d+", dot)
    svd = scan("2.13.0", "aten._linalg_svd.default", "\"linalg_svd_cpu\" not implemented for 'Half'")
    assert svd.endswith(f"; no torch release up to {VERSIONS[-1]} supports it")
    assert "torch 2." not in scan("2.13.0", "aten.unheard_of.default", "no")


def test_a_finding_names_only_an_issue_about_it() -> None:
    calls = to_columns([OpCall("aten.addmm.default", time_ms=100.0, reference_ms=1.0)] * 2)
    slow = Run(precision="half", device="cpu", status="ok", op_calls=calls)
    [finding] = diagnose(scanned(slow), select=["LP106"])
    assert finding.url == "https://github.com/pytorch/pytorch/issues/146508"
    assert finding.known is not None
    assert finding.known.link == finding.url
    assert finding.known.repair not in str(finding.help)  # what was reported elsewhere is not this scan's advice
    mixed = gap("aten.addmm.default", "expected m1 and m2 to have the same dtype", "dtype-mismatch")
    [finding] = diagnose(scanned(Run(precision="half", device="cpu", status="error", gaps=[mixed])), select=["LP103"])
    assert finding.url is None
    dot = Run(precision="half", device="xpu", status="error", gaps=[gap("aten.dot.default", NO_DOT)])
    assert "673" in str(diagnose(scanned(dot, "2.1.0"), select=["LP101"])[0].url)
    assert diagnose(scanned(dot, "2.13.0"), select=["LP101"])[0].url is None  # fixed since


# -- the command line


LOOKUPS = [
    ["op", "dot"],
    ["op", "svd", "--dtype", "half", "--device", "xpu", "--torch", "2.8"],
    ["catalog", "diff", "2.8", "2.13", "--device", "cpu"],
    ["catalog", "gaps", "--device", "xpu", "--dtype", "half"],
    ["catalog", "gaps", "--dtype", "bfloat16", "--torch", "2.4"],
]


@pytest.mark.parametrize("command", LOOKUPS, ids=" ".join)
def test_lookups_on_the_command_line(command: list[str], call: Call) -> None:
    done = call(*command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert json.loads(call(*command, "--json").stdout)


def test_wrong_arguments(call: Call) -> None:
    for arguments, message in [
        (["op", "sofmax"], "Did you mean"),
        (["op", "dot", "--dtype", "int8"], "is not a dtype in the catalog"),
        (["op", "dot", "--device", "npu"], "Measured: cpu, cuda; declared: xpu"),
        (["op", "dot", "--device", "xpu", "--torch", "2.1"], "has no declarations"),
        (["catalog", "diff", "2.8+ipex", "2.9", "--device", "xpu"], "has no declarations"),
        (["op", "dot", "--device", "cpu", "--torch", "1.9"], "no measurements of torch 1.9 on cpu"),
        (["catalog", "diff", "2.8", "9.9"], "no measurements of torch 9.9"),
        (["catalog", "diff", "old", "2.8"], "is not a version of torch"),
        (["catalog", "gaps", "--torch", "new"], "is not a version of torch"),
        (["catalog", "gaps", "--dtype", "fp32"], "fp32 is the baseline"),
        (["catalog", "gaps", "--device", "xpu", "--torch", "2.1"], "has no declarations"),
    ]:
        done = call(*arguments)
        assert done.returncode == 2, arguments
        assert message in done.stderr, (arguments, done.stderr)
        assert done.stdout == ""


# -- reports


def test_the_files_have_the_modes_and_dtypes_of_their_headers() -> None:
    for sweep in measured.sweeps():
        for found in sweep.records.values():
            assert set(found.passed) <= set(DTYPES)
            for dtype, counts in found.passed.items():
                assert len(counts) == (4 if dtype in sweep.header.autocast else 2), (found.op, dtype, MODES)


# -- The legend below the table of an operator


def test_three_lines_explain_every_mark_in_the_table_of_an_operator() -> None:
    explained = {
        "since 2": "since 2.2: all samples run",
        "≤": "≤: or earlier",
        " of ": "6 of 10: only these run",
        "–": "–: not known",
        "declared": "declared: read in",
        "…": "ulp: median…largest",
        "×": "speed: largest sample",
    }
    seen = set[str]()
    for name in [*measured.sweep_of("cpu").operators][::4]:
        lines = in_text(answers_document(lookup(name)[:1])).splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith(tuple(explained.values())))
        table, legend = "\n".join(lines[1:first]), lines[first : first + 3]
        assert max(map(len, legend)) <= 100
        for mark, words in explained.items():
            if mark in table.replace("other releases: the newest of each device", ""):
                seen.add(mark)
                assert any(words in line for line in legend), (name, mark, legend)
    assert seen == {*explained}


def test_no_reported_issue_gives_a_speed_that_the_catalog_measures_itself() -> None:
    titles = [issue.title for issue in known_issues()]
    assert len(titles) > 20
    assert not [title for title in titles if re.search(r"\d ?(?:×|times)", title)]
