"""Declarations: the rules that merge the sources, the file for XPU, reading it, and a second declared device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.catalog import declared
from lowprec_check.catalog.answers import difference, find_fix, gaps, lookup
from lowprec_check.catalog.aten import AtenCatalog
from lowprec_check.catalog.declared import DeclaredRow, Source, read_declared
from lowprec_check.catalog.known_issues import matching
from lowprec_check.catalog.versioned_file import read_tables
from lowprec_check.errors import UsageError
from lowprec_check.pytest_plugin.op_support import support_of
from lowprec_check.report.answers import answers_document, gaps_document
from lowprec_check.report.layout.markdown import markdown
from lowprec_check.report.layout.text import text as in_text
from lowprec_check.schema.axes import DEVICES, Device
from lowprec_check.schema.base import encode
from tools.catalog_report import catalog_document
from tools.catalog_report import releases as reported
from tools.xpu_declarations import claims, dtypes, kernels, registrations
from tools.xpu_declarations.__main__ import rows, save
from tools.xpu_declarations.corrections import Correction, Corrections
from tools.xpu_declarations.dtypes import Claim, DtypeAnswer, Evidence
from tools.xpu_declarations.registrations import Declarations, Native, OpRegistration

YAML = """
- func: add.Tensor(Tensor self, Tensor other) -> Tensor
  structured_delegate: add.out
  dispatch:
    SparseCPU: add_sparse
- func: add.out(Tensor self, Tensor other, *, Tensor(a!) out) -> Tensor(a!)
  structured: True
  dispatch:
    CPU, CUDA, XPU: add_out
- func: svd.U(Tensor A, *, Tensor(a!) U) -> Tensor(a!)
  structured: True
  dispatch:
    CPU, CUDA: svd_out
- func: svd(Tensor A) -> Tensor
  structured_delegate: svd.U
- func: dot(Tensor self, Tensor tensor) -> Tensor
  dispatch:
    CPU: dot
  autogen: dot.out, dot_other
- func: inv(Tensor A) -> Tensor
- func: relu(Tensor self) -> Tensor
  dispatch:
    CompositeExplicitAutograd: relu
    MPS: relu_mps
  autogen: relu.out
- func: mkldnn_linear(Tensor self) -> Tensor
  dispatch:
    MkldnnCPU: mkldnn_linear
- func: nested_only(Tensor self) -> Tensor
  dispatch: {}
- func: prelu(Tensor self) -> Tensor
  autogen: prelu.out
- func: copy_from(Tensor self) -> Tensor
  dispatch:
    MPS: copy_mps
"""


def found(**other: object) -> dict[str, OpRegistration]:
    """The registrations of YAML, with further sources."""
    given_ = {"intel": {}, "library": frozenset(), "fallback": frozenset()} | other
    return registrations.registrations(Declarations(registrations.parse(YAML), **given_))  # type: ignore[arg-type]


def test_the_rule_for_registrations() -> None:
    intel = {"dot": Native(frozenset({"XPU"})), "svd.U": Native(frozenset({"CUDA", "SparseXPU"}))}
    assert found(intel=intel, fallback=frozenset({"svd.U"}), library=frozenset({"copy_from"})) == {
        "add.Tensor": OpRegistration("native", "torch", "add.out"),
        "add.out": OpRegistration("native", "torch"),
        "copy_from": OpRegistration("native", "library"),
        "dot": OpRegistration("native", "torch-xpu-ops"),
        "dot.out": OpRegistration("native", "torch-xpu-ops", "dot"),
        "dot_other": OpRegistration("native", "torch-xpu-ops", "dot"),
        "inv": OpRegistration("composite", "torch"),
        "mkldnn_linear": OpRegistration("none", "torch"),
        "nested_only": OpRegistration("none", "torch"),
        "prelu": OpRegistration("composite", "torch"),
        "relu": OpRegistration("composite", "torch"),
        "relu.out": OpRegistration("composite", "torch", "relu"),
        "svd": OpRegistration("fallback", "fallback", "svd.U"),
        "svd.U": OpRegistration("fallback", "fallback"),
    }


def test_precedence_of_corrections_kernels_and_fallbacks() -> None:
    both = found(intel={"svd.U": Native(frozenset({"XPU"}))}, fallback=frozenset({"svd.U"}))
    assert both["svd"] == OpRegistration("native", "torch-xpu-ops", "svd.U")
    corrected = found(fallback=frozenset({"svd.U"}), corrected={"svd.U": OpRegistration("none", "correction/x")})
    assert corrected["svd"] == OpRegistration("none", "correction/x", "svd.U")
    assert found()["dot.out"] == OpRegistration("none", "torch", "dot")


def test_lists_in_cpp_code() -> None:
    code = 'std::vector<std::string> fallback_list = {\n    "a.out",\n    // "gone",\n    "b",\n  };'
    assert registrations.fallback_list(code) == {"a.out", "b"}
    with pytest.raises(ValueError, match="fallback_list"):
        registrations.fallback_list("nothing here")
    code = (
        'TORCH_LIBRARY_IMPL(aten, XPU, m) {\n  m.impl(\n      TORCH_SELECTIVE_NAME("aten::x.out"), TORCH_FN(x));\n'
        '  m.impl("y", f);\n}\nTORCH_LIBRARY_IMPL(quantized, XPU, m) {\n  m.impl("z", f);\n}\n'
    )
    assert registrations.library_impls(code) == {"x.out", "y"}


FLOATING = 'void a() {\n  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "cdist_xpu", [&] { f<scalar_t>(); });\n}\n'
BOTH = (
    "void b() {\n  AT_DISPATCH_FLOATING_TYPES_AND2(\n"
    '      kHalf, at::ScalarType::BFloat16, t, "dot_xpu", [&]() { g((int)1); });\n}\n'
)
ONE = 'void c() {\n  AT_DISPATCH_FLOATING_TYPES_AND(at::ScalarType::BFloat16, t, "back_xpu", [&] {});\n}\n'
V2 = (
    'void d() {\n  AT_DISPATCH_V2(t, "new_xpu", AT_WRAP([&]() { h(); }), AT_EXPAND(AT_FLOATING_TYPES), kHalf);\n'
    '  AT_DISPATCH_V2(t, "newer_xpu", AT_WRAP([&]() { h(); }), AT_EXPAND(AT_ALL_TYPES), kHalf, kBFloat16);\n}\n'
)
COMPLEX = 'void e() {\n  AT_DISPATCH_COMPLEX_TYPES(t, "conj_xpu", [&] {});\n}\n'
BRANCH = 'void s() {\n  if (t == kHalf) return half_sum();\n  AT_DISPATCH_FLOATING_TYPES(t, "sum_xpu", [&] {});\n}\n'
TWICE = (
    'void w() {\n  AT_DISPATCH_FLOATING_TYPES(t, "two_xpu", [&] {});\n'
    '  AT_DISPATCH_FLOATING_TYPES_AND2(kHalf, kBFloat16, t, "two_xpu", [&] {});\n}\n'
)


def test_dtypes_that_kernels_do_not_support() -> None:
    assert kernels.unsupported([FLOATING + BOTH + ONE + V2 + COMPLEX, BRANCH, TWICE]) == {
        "cdist_xpu": {"half", "bfloat16"},
        "back_xpu": {"half"},
        "new_xpu": {"bfloat16"},
    }
    # A macro that is not understood makes its tag inconclusive, also in another file.
    switch = 'AT_DISPATCH_SWITCH(t, "cdist_xpu", AT_DISPATCH_CASE(kHalf, [&] {}))'
    assert kernels.unsupported([FLOATING, switch]) == {}
    assert {"_cdist_forward", "special_cdist"} < kernels.op_names("cdist_xpu")
    assert kernels.op_names("softmax") == frozenset()


WIDE, HALF = ["float32"], ["float32", "half"]
CLAIMS = {
    "add": Claim("add", HALF, WIDE, HALF, {"float32": ["add.Tensor"], "half": ["add.Tensor"]}),
    "linalg.svd": Claim("linalg_svd", WIDE, WIDE, WIDE, {"float32": ["svd", "view"]}),
    "cov": Claim("cov", WIDE, [], WIDE, {"float32": ["dot", "relu"]}),
    "elu": Claim("elu", HALF, ["half"], HALF, {"half": ["relu"]}, {"half": ["mkldnn_linear"]}),
    "fft": Claim("fft", HALF, [], HALF, {"float32": ["dot", "empty"], "half": []}),
    "inv": Claim("inv", WIDE, [], HALF),
}


def test_the_rule_for_dtypes() -> None:
    registered = found(intel={"dot": Native(frozenset({"XPU"}))}, fallback=frozenset({"svd.U"}))
    half = dtypes.answers(registered, Evidence(CLAIMS, {}, {}), "half")
    assert half["add.Tensor"] == half["add.out"] == DtypeAnswer(True, "opinfo:add")
    assert half["svd"] == half["svd.U"] == DtypeAnswer(False, "opinfo:linalg.svd")
    assert half["dot"] == DtypeAnswer(True, "opinfo:fft")  # refused above dispatch on the CPU, so traced in float32
    assert half["relu"] == DtypeAnswer(True, "opinfo:elu")
    assert half["mkldnn_linear"] == DtypeAnswer(True, "opinfo:elu")
    assert half["inv"] == DtypeAnswer(None)  # missing only because there is no CUDA hardware
    bfloat16 = dtypes.answers(registered, Evidence(CLAIMS, {"add": frozenset({"bfloat16"})}, {}), "bfloat16")
    assert bfloat16["add.Tensor"] == DtypeAnswer(True, "tests:add")
    assert bfloat16["dot"] == DtypeAnswer(False, "opinfo:fft")  # not from `cov`, which computes with two ops
    assert bfloat16["relu"] == DtypeAnswer(None)
    assert bfloat16["inv"] == DtypeAnswer(False, "opinfo:inv")


def test_kernels_and_corrections_take_precedence_over_claims() -> None:
    registered = found(fallback=frozenset({"svd.U"}))
    unsupported = {"add_xpu": frozenset({"half"}), "svd_xpu": frozenset({"half"})}
    half = dtypes.answers(registered, Evidence(CLAIMS, {}, unsupported), "half")
    assert half["add.Tensor"] == half["add.out"] == DtypeAnswer(False, "kernel:add_xpu")
    assert half["svd"] == DtypeAnswer(False, "opinfo:linalg.svd")  # it does not have its own kernel
    corrected = {("add.out", "half"): DtypeAnswer(True, "correction/y")}
    half = dtypes.answers(registered, Evidence(CLAIMS, {}, unsupported, corrected), "half")
    assert half["add.out"] == DtypeAnswer(True, "correction/y")
    assert half["add.Tensor"] == DtypeAnswer(False, "kernel:add_xpu")


def test_dtypes_that_tests_of_intel_add() -> None:
    text = (
        "import torch\nother = {}\n_ops_dtype_different_cuda_support = {\n"
        '    "histc": {"forward": {torch.bfloat16, torch.float16}},\n'
        '    "stft": {"forward": {torch.float16, torch.complex32}, "backward": {torch.bfloat16}},\n}\n'
    )
    assert dtypes.additions(text) == {"histc": {"half", "bfloat16"}, "stft": {"half"}}
    assert dtypes.additions("x = 1") == {}


def test_corrections(tmp_path: Path) -> None:
    entry = '[[correction]]\nid = "x"\nops = ["fft_*"]\nsince = "2.9"\nuntil = "2.10"\n{}\nwhy = "so"\nlink = "https://x.y/z"\n'
    path = tmp_path / "corrections.toml"
    path.write_text(entry.format("half = false"))
    assert Corrections(path, "2.11").dtypes({"fft_fft"}) == {}
    assert Corrections(path, "2.10").dtypes({"fft_fft", "add"}) == {
        ("fft_fft", "half"): DtypeAnswer(False, "correction/x")
    }
    with pytest.raises(UsageError, match=r"this release has no op fft_\*"):
        Corrections(path, "2.9").dtypes({"add"})
    for wrong, message in (
        ("", "has no effect"),
        ("half = 1", "bool"),
        ('registration = "maybe"', "maybe"),
        ("haf = true", "haf"),
    ):
        path.write_text(entry.format(wrong))
        with pytest.raises(UsageError, match=rf"corrections.toml: entry 'x': .*{message}"):
            Corrections(path, "2.10")
    curated = read_tables(ROOT / "catalog" / "declared-xpu-corrections.toml", "correction", Correction)
    assert len({entry.id for entry in curated}) == len(curated) > 3


ROWS = st.builds(
    OpRegistration,
    st.sampled_from(["native", "fallback", "composite", "none"]),
    st.sampled_from(["torch", "fallback"]),
    st.sampled_from([None, "add.out"]),
)
ANSWERS = st.one_of(
    st.just(DtypeAnswer(None)), st.builds(DtypeAnswer, st.booleans(), st.sampled_from(["opinfo:x", "kernel:y_xpu"]))
)


TABLES = st.dictionaries(st.sampled_from(["add.Tensor", "add.out", "dot"]), st.tuples(ROWS, ANSWERS, ANSWERS))
SOURCES = {key: Source("what", "https://x.y", None, "a note") for key in ("torch", "fallback")}


def rows_of(table: dict[str, tuple[OpRegistration, DtypeAnswer, DtypeAnswer]]) -> dict[str, DeclaredRow]:
    registered = {op: row for op, (row, _, _) in table.items()}
    taken = {
        "half": {op: half for op, (_, half, _) in table.items()},
        "bfloat16": {op: b for op, (_, _, b) in table.items()},
    }
    return rows(registered, taken)


@given(releases=st.dictionaries(st.sampled_from(["2.8", "2.9", "2.10", "2.11"]), TABLES, min_size=1), data=st.data())
def test_reading_returns_what_was_written_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    releases: dict[str, dict[str, tuple[OpRegistration, DtypeAnswer, DtypeAnswer]]],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("d")
    for path in (folder / "a.jsonl", folder / "b.jsonl"):
        for release in data.draw(st.permutations([*releases, *releases])):  # each twice: replaced by itself
            save(path, release, SOURCES, rows_of(releases[release]))
    assert (folder / "a.jsonl").read_bytes() == (folder / "b.jsonl").read_bytes()
    file = read_declared(folder / "a.jsonl")
    assert sorted(version.torch for version in file.versions) == sorted(releases)
    for index, version in enumerate(file.versions):
        table = releases[version.torch]
        assert version.sources == SOURCES
        assert dict(file.table(index)) == rows_of(table)
        for op, (row, half, b) in table.items():
            assert file.table(index)[op] == DeclaredRow(*row, half.supported, b.supported, half.source, b.source)


def test_a_new_release_only_adds_lines(tmp_path: Path) -> None:
    path = tmp_path / "declared-xpu.jsonl"
    row = DeclaredRow("native", "torch")
    save(path, "2.8", SOURCES, {"add": row, "dot": DeclaredRow("fallback", "fallback"), "old": row})
    before = path.read_text().splitlines()
    save(path, "2.9", SOURCES, {"add": row, "dot": row})
    after = path.read_text().splitlines()
    assert set(before[1:]) <= set(after)
    assert [line for line in after[1:] if line not in before and "sources" not in line] == [
        '["dot","2.9",["native","torch"]]',
        '["old","2.9",null]',
    ]


def test_errors_name_file_line_and_op(tmp_path: Path) -> None:
    good = (ROOT / "catalog" / "declared-xpu.jsonl").read_text(encoding="utf-8")
    path = tmp_path / "declared-xpu.jsonl"
    dot = next(line for line in good.splitlines() if line.startswith('["dot","2.11"'))
    number = good.splitlines().index(dot) + 1
    errors = {
        rf":{number}: op 'dot': Invalid enum value 'natve'": good.replace(
            '["dot","2.11",["native"', '["dot","2.11",["natve"'
        ),
        rf":{number}: op 'dot': .*bool": good.replace(dot, '["dot","2.11",["native","torch",null,1]]'),
        rf":{number}: op 'dot': .*length": good.replace(
            dot, '["dot","2.11",["native","torch",null,true,true,"a:b","a:b",8]]'
        ),
        rf":{number}: op 'dot': unknown source 'hearsay'": good.replace(dot, '["dot","2.11",["native","hearsay"]]'),
        rf":{number}: op 'dot': version '9.9' is not listed at the top": good.replace(dot, dot.replace("2.11", "9.9")),
        rf":{number}: op 'dot' version '2.8': duplicate": good.replace(dot, dot.replace("2.11", "2.8")),
        rf":{number}: does not start with an operator": good.replace(dot, "[1]"),
        rf":{number}: .*malformed": good.replace(dot, "nonsense"),
        ":1: schema 1, but": good.replace('"schema":3', '"schema":1'),
        ":1: .*extra": good.replace('"schema":3', '"schema":3,"extra":0'),
        ":2: .*urk": good.replace('"url"', '"urk"', 1),
        ".*truncated": good[: len(good) // 2],
    }
    for message, text in errors.items():
        assert text != good
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=rf"declared-xpu\.jsonl{message}"):
            dict(read_declared(path).table(declared.releases("xpu").index("2.13")))


def test_names_and_releases() -> None:
    for name in ("aten.dot.default", "aten::dot", "torch.ops.aten.dot.default", "dot"):
        assert declared.overload_name(name) == "dot"
    assert declared.overload_name("aten::add.Tensor") == "add.Tensor"
    assert declared.load("xpu", "2.13.0+cpu") is declared.load("xpu", "2.13.0+cpu")
    assert declared.load("xpu", "2.13.0+cpu").torch == "2.13"
    assert declared.releases("xpu") == tuple(f"2.{minor}" for minor in range(8, 16))
    with pytest.raises(UsageError, match=r"torch 2\.7") as error:
        declared.load("xpu", "2.7.1")
    assert "2.8, 2.9" in (error.value.hint or "")
    with pytest.raises(UsageError, match="is not a version"):
        declared.load("xpu", "nightly")
    assert declared.load("xpu", "2.13").row("aten.no_such_op") is None


# Checked by hand in the sources of each release: op, first native release, supports half, supports bfloat16 (in 2.13).
KNOWN = [
    ("dot", "2.11", True, True),
    ("vdot", "2.11", True, True),
    ("linalg_inv_ex", "2.9", False, False),
    ("geqrf", "2.15", False, False),
    ("_linalg_svd", None, False, False),
    ("linalg_solve_triangular", "2.12", False, False),
    ("grid_sampler_3d", "2.8", True, True),
    ("_cdist_forward", "2.8", False, False),
    ("histc", "2.8", True, True),
    ("special_erfcx", "2.8", False, False),
    ("angle", "2.8", False, False),
    ("_fft_r2c", "2.8", True, False),
    ("convolution_overrideable", "2.8", None, None),
    ("addmm", "2.8", True, True),
    ("addbmm", "2.8", True, None),
    ("native_layer_norm_backward", "2.8", True, True),
]


@pytest.mark.parametrize(("op", "since", "half", "bfloat16"), KNOWN, ids=str)
def test_rows_checked_by_hand(op: str, since: str | None, half: bool | None, bfloat16: bool | None) -> None:
    history = declared.history("xpu", op)
    assert next((dated.torch for dated in history if dated.row and dated.row.registration == "native"), None) == since
    for dated in history:
        if dated.row is not None and since is not None and dated.row.registration != "native":
            assert dated.row.registration == "fallback"
    row = declared.load("xpu", "2.13").row(op)
    assert row is not None
    assert (row.supports("half"), row.supports("bfloat16")) == (half, bfloat16)
    evidence = declared.load("xpu", "2.13").evidence(row)
    assert evidence
    assert all(url.startswith("https://github.com/") for url in evidence)


@pytest.mark.parametrize("release", declared.releases("xpu"))
def test_releases_are_complete_and_sorted(release: str) -> None:
    known = declared.load("xpu", release)
    assert list(known.ops) == sorted(known.ops)
    assert len(known.ops) > 3000
    assert any(row.via for row in known.ops.values())
    for op, row in known.ops.items():
        if row.via is not None:
            called = known.ops[row.via]
            assert (called.registration, called.source, called.via) == (row.registration, row.source, None), op
        for supported, source in ((row.half, row.half_source), (row.bfloat16, row.bfloat16_source)):
            assert (supported is None) == (source is None), op
            assert source is None or source.partition(":")[0] in known.sources, op


class Sample:
    def __init__(self, dtype: torch.dtype, requires_grad: bool) -> None:
        self.input = torch.eye(3, dtype=dtype, requires_grad=requires_grad)
        self.args = ()
        self.kwargs: dict[str, object] = {}


class Op:
    """The parts of an OpInfo that `claims.py` uses, for a function without a half kernel on the CPU."""

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
        return [Sample(dtype, requires_grad)]

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        out = torch.empty(0, dtype=matrix.dtype)
        return torch.linalg.inv(matrix) + (torch.linalg.inv(matrix.detach(), out=out) + out).sum()


def test_aten_ops_of_a_claim() -> None:
    forward = claims.dispatched_ops(Op(), torch.float16, backward=False)
    assert {"linalg_inv_ex", "linalg_inv_ex.inverse", "add.Tensor", "sum"} <= set(forward)
    assert "linalg_inv_ex" not in claims.dispatched_ops(Op(), torch.bfloat16, backward=True)
    assert "mm" in claims.dispatched_ops(Op(), torch.bfloat16, backward=True)
    assert claims.dispatched_ops(object(), torch.float16, backward=False) == []


def test_the_collector_computes_missing_kernels_in_float32() -> None:
    matrix = torch.tensor([[2.0, 0.0], [0.0, 4.0]], dtype=torch.bfloat16)
    with claims.OpCollector(torch.bfloat16) as mode:
        inverse = torch.linalg.inv(matrix)
        out = torch.empty(2, 2, dtype=torch.bfloat16)
        torch.linalg.inv(matrix, out=out)
    expected = torch.tensor([[0.5, 0.0], [0.0, 0.25]], dtype=torch.bfloat16)
    assert inverse.dtype is torch.bfloat16
    assert torch.equal(inverse, expected)
    assert torch.equal(out, expected)
    assert "linalg_inv_ex" in mode.names
    with pytest.raises(RuntimeError, match="singular"), claims.OpCollector(torch.bfloat16):
        torch.linalg.inv(torch.zeros(2, 2, dtype=torch.bfloat16))


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A second declared device: its Device and its file, a copy of the one for XPU."""
    text = (ROOT / "catalog" / "declared-xpu.jsonl").read_text(encoding="utf-8")
    (tmp_path / "declared-xpu.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "declared-npu.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr(declared, "data_folder", lambda: tmp_path)
    monkeypatch.setitem(DEVICES._items, "npu", Device(name="npu", catalog="declared"))
    caches = (declared._file, declared.releases, declared.load)
    for cached in caches:
        cached.cache_clear()
    yield "npu"
    for cached in caches:
        cached.cache_clear()


def as_xpu(answer: Any) -> str:
    """An answer about npu as JSON, with npu renamed."""
    return encode(answer).decode().replace("npu", "xpu")


@pytest.mark.usefixtures("npu")
def test_a_second_declared_device_needs_only_its_entry_and_its_file() -> None:
    for op in ("dot", "linalg.svd", "fft.rfft"):
        [on_npu], [on_xpu] = lookup(op, device="npu"), lookup(op, device="xpu")
        assert on_npu.cells
        assert as_xpu(on_npu.cells) == encode(on_xpu.cells).decode()
        assert {cell.device for cell in lookup(op)[0].cells} == {"cpu", "cuda", "xpu", "npu"}
    assert lookup("dot", torch="2.1")[0].elsewhere.keys() == {"cuda", "xpu", "npu"}
    assert as_xpu(gaps("npu:0", "half", "2.11")) == encode(gaps("xpu", "half", "2.11")).decode()
    assert as_xpu(difference("2.8", "2.11", "npu")) == encode(difference("2.8", "2.11", "xpu")).decode()
    fixes = [find_fix("aten.angle.default", device=device, dtype="half", torch="2.8.0") for device in ("npu", "xpu")]
    assert fixes[0]
    assert fixes[0] == fixes[1]
    for op in ("aten.dot.default", "aten._linalg_svd.default", "aten._cdist_forward.default"):
        on_npu, on_xpu = (AtenCatalog(device, "float16", "2.13.0").of(op) for device in ("npu", "xpu"))
        assert as_xpu(on_npu) == encode(on_xpu).decode()
    assert support_of("dot", "float16", "npu").evidence == "declared"
    assert matching(op="dot", device="npu") == []


@pytest.mark.usefixtures("npu")
def test_reports_show_a_second_declared_device() -> None:
    for shown in (
        in_text(answers_document(lookup("dot", device="npu"))),
        in_text(gaps_document(gaps("npu", "half", "2.8"))),
    ):
        assert "npu" in shown
        assert "xpu" not in shown
    assert "npu: declared only for torch 2.8 to 2.15" in in_text(answers_document(lookup("dot", torch="2.1")))
    labels = {device: [one.torch for one in reported() if one.device == device] for device in ("npu", "xpu")}
    assert labels["npu"] == labels["xpu"] == list(declared.releases("npu"))
    document = markdown(catalog_document(), 10**9, "all")
    assert re.search(r"^\| linalg.svd +\| half +\| npu .*\| 2.15: ", document, re.M)
    for title in ("Missing on {}", "Gained and lost by version on {}"):
        [on_npu, on_xpu] = (
            document.partition(f"## {title.format(device)}")[2].replace("npu", "xpu") for device in ("npu", "xpu")
        )
        assert on_npu.partition("\n###")[0] == on_xpu.partition("\n###")[0]
        assert on_npu


def test_worst() -> None:
    known = declared.load("xpu", "2.10")
    assert known.worst([]) == "native"
    assert known.worst(["aten.mm.default", "aten.relu.default"]) == "native"
    assert known.worst(["aten.mm.default", "aten.dot.default"]) == "fallback"
    assert known.worst(["aten.mm.default", "mine.op.default", "aten.dot.default"]) == "none"


def test_composite_ops_agree_with_the_dispatcher_of_the_installed_torch() -> None:
    """The dispatcher of any build knows which ops an XPU tensor can use through kernels for every backend."""
    release = declared.release_of(torch.__version__)
    if release not in declared.releases("xpu"):
        pytest.skip(f"no declarations for torch {release}")
    known = declared.load("xpu", release)
    names = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    assert set(known.ops) <= names
    assert {row.registration for row in known.ops.values()} >= {"composite", "none"}
    for op, row in known.ops.items():
        has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{op}", "XPU")
        if row.registration == "composite":
            assert has_kernel, op
        elif row.registration == "none" and row.via is None:
            assert not has_kernel, op


def test_a_backward_pass_is_not_refused_for_a_check_that_the_device_passes() -> None:
    """On a CPU ``torch.fft`` refuses bfloat16 before any formula of the backward pass runs."""
    states = {
        torch: [declared.load("xpu", torch).support("fft.rfft", "bfloat16", mode) for mode in ("forward", "backward")]
        for torch in ("2.13", "2.15")
    }
    assert {torch: [found.state for found in its if found] for torch, its in states.items()} == {
        "2.13": ["none", "none"],
        "2.15": ["all", "all"],
    }
