"""Known issues: reading the file, and matching issues with findings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.analysis.rules.registry import rules
from lowprec_check.catalog import declared
from lowprec_check.catalog.answers import lookup
from lowprec_check.catalog.known_issues import KnownIssue, known_issues, matching
from lowprec_check.catalog.measured import sweep_of
from lowprec_check.catalog.names import function_name
from lowprec_check.errors import UsageError
from lowprec_check.report.answers import answers_document
from lowprec_check.report.layout.text import text as in_text

# The threads that the catalog must have.
THREADS = {
    "intel/intel-extension-for-pytorch": [673, 860],
    "pytorch/pytorch": [125544, 99710, 107663, 191796, 95365, 132715, 146508, 148078, 48245, 96292, 126488],
    "intel/torch-xpu-ops": [499, 506, 2599, 1338, 4751, 4900, 2615, 1887, 1742],
    "huggingface/transformers": [5651, 35332],
    "vladmandic/sdnext": [1858],
}

ENTRY = """
[[issue]]
id = "x"
title = "t"
link = "https://x.y/z"
symptom = "s"
workaround = "w"
checked = true
thread = "t"
"""


def ids(**criteria: str) -> list[str]:
    return [issue.id for issue in matching(**criteria)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("repository", "number"), [(name, number) for name in THREADS for number in THREADS[name]])
def test_every_thread_has_an_entry(repository: str, number: int) -> None:
    url = f"https://github.com/{repository}/issues/{number}"
    assert any(url in (issue.link, *issue.more) for issue in known_issues())


def test_codes_and_ops_of_entries_exist() -> None:
    names = {op.partition(".")[0] for release in declared.releases("xpu") for op in declared.load("xpu", release).ops}
    for issue in known_issues():
        assert set(issue.codes) <= rules().keys(), issue.id
        assert set(issue.ops) <= names, issue.id
        assert issue.checked or "Not found" in issue.thread


@pytest.mark.parametrize(
    ("torch", "first"),
    [("2.4.1", "ipex-673"), ("2.5.0", "xpu-dot-fallback"), ("2.10.0+xpu", "xpu-dot-fallback"), ("2.11.0", None)],
)
def test_versions(torch: str, first: str | None) -> None:
    found = ids(op="aten.dot.default", device="xpu", dtype="half", torch=torch)
    assert found[:1] == ([first] if first else [])


NO_DOT = "\"dot\" not implemented for 'Half'"
NO_CHOLESKY = "\"cholesky_cpu\" not implemented for 'Half'"
NO_HALF = "Unsupported dtype Half"


@pytest.mark.parametrize(
    ("first", "criteria"),
    [
        ("ipex-673", {"op": "aten::dot", "model": "Whitening", "message": NO_DOT, "device": "xpu:0"}),
        ("torch-xpu-ops-2615", {"op": "aten.fft_rfft.default", "device": "xpu", "code": "LP102", "message": NO_HALF}),
        ("torch-xpu-ops-2615", {"op": "torch.fft.rfft", "device": "xpu", "code": "LP102", "message": NO_HALF}),
        ("pytorch-70664", {"op": "aten._fft_r2c", "device": "cuda", "dtype": "half"}),
        ("pytorch-48245", {"op": "aten.cholesky", "device": "cpu", "code": "LP101", "message": NO_CHOLESKY}),
        ("transformers-5651", {"model": "T5ForConditionalGeneration", "code": "LP201", "dtype": "half"}),
        ("transformers-35332", {"op": "aten.masked_fill_.Scalar", "code": "LP204"}),
        ("pytorch-146508", {"op": "aten.addmm.default", "code": "LP106", "device": "cpu", "dtype": "half"}),
        ("pytorch-126488", {"code": "LP105", "device": "xpu", "op": "aten.linalg_eig.default"}),
        ("pytorch-74739", {"message": "Attempting to unscale FP16 gradients."}),
    ],
)  # fmt: skip
def test_a_finding_matches_its_issue(first: str, criteria: dict[str, str]) -> None:
    assert ids(**criteria)[0] == first


def test_issues_about_an_op_are_found_without_reading_the_others() -> None:
    for op in {function_name(op) for issue in known_issues() for op in issue.ops} | {"do", "special", "xpu"}:
        about = {issue.id for issue in known_issues() if op in map(function_name, issue.ops)}
        assert set(ids(op=op)) == about
        assert about <= {issue.id for issue in known_issues(naming=op)} != {issue.id for issue in known_issues()}


def test_contradicted_issues_are_not_found() -> None:
    assert "ipex-673" not in ids(op="aten.dot.default", device="cpu")
    assert "ipex-673" not in ids(op="aten.dot.default", device="xpu", dtype="bfloat16")
    assert "ipex-673" not in ids(op="aten.dot.default", device="xpu", message="something else")
    assert "transformers-5651" not in ids(model="resnet50", code="LP201")
    assert "torch-xpu-ops-499" not in ids(op="aten.mm.default", code="LP103")
    assert ids(op="aten.add.Tensor") == []
    assert set(ids()) == {issue.id for issue in known_issues()}
    assert "ipex-673" in ids(device="xpu")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "op": st.sampled_from(["aten.dot.default", "aten.mm.default", "fft_rfft"]),
            "model": st.sampled_from(["T5Model", "Net"]),
            "device": st.sampled_from(["cpu", "xpu", "cuda"]),
            "dtype": st.sampled_from(["half", "bfloat16"]),
            "way": st.sampled_from(["cast", "autocast"]),
            "torch": st.sampled_from(["2.3.1", "2.10", "2.15.0+cu132"]),
            "code": st.sampled_from(sorted(rules())),
        },
    )
)
def test_matches_satisfy_all_criteria(criteria: dict[str, str]) -> None:
    for issue in matching(**criteria):  # type: ignore[arg-type]
        assert issue.devices == [] or criteria.get("device", issue.devices[0]) in issue.devices
        assert issue.dtypes == [] or criteria.get("dtype", issue.dtypes[0]) in issue.dtypes
        assert issue.ways == [] or criteria.get("way", issue.ways[0]) in issue.ways
        assert issue.codes == [] or criteria.get("code", issue.codes[0]) in issue.codes
        assert issue.in_torch(criteria["torch"]) if "torch" in criteria else True
        if issue.ops and not issue.models and "op" in criteria:
            assert declared.overload_name(criteria["op"]) in issue.ops


@pytest.mark.parametrize(
    ("op", "issue"),
    [
        ("fft.rfft", "torch-xpu-ops-2615"),
        ("fft.rfft", "pytorch-70664"),
        ("fft.hfft", "pytorch-70664"),
        ("special.erfcx", "torch-xpu-ops-1338"),
        ("special.ndtri", "torch-xpu-ops-1338"),
        ("F.conv2d", "pytorch-146508"),
        ("matmul", "pytorch-146508"),
        ("linalg.inv_ex", "torch-xpu-ops-1887"),
        ("linalg.inv", "torch-xpu-ops-1887"),
        ("linalg.pinv.hermitian", "torch-xpu-ops-1902"),
        ("linalg.qr", "pytorch-99710"),
        ("F.grid_sample", "pytorch-132715"),
    ],
)
def test_an_operator_shows_the_issues_about_it(op: str, issue: str) -> None:
    shown = {issue.id: answer for answer in lookup(op) for issue in answer.issues}
    assert issue in shown
    devices = next(known.devices for known in known_issues() if known.id == issue)
    assert f"reported for {', '.join(devices)}: " in in_text(answers_document([shown[issue]]))


def test_an_operator_does_not_show_issues_of_similar_names() -> None:
    assert lookup("linalg.polar")[0].issues == []
    assert lookup("full")[0].issues != []
    assert lookup("cumsum")[0].issues == []


def test_every_issue_about_an_operator_is_shown() -> None:
    records = sweep_of("cpu").records
    described = {function_name(op) for op in records}
    pairs = [(issue, op) for issue in known_issues() for op in {function_name(op) for op in issue.ops} & described]
    assert len(pairs) > 20
    for issue, op in pairs:
        assert any(issue in answer.issues for answer in lookup(op)), (issue.id, op)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('symptom = "s"', "the key 'symptom' is missing"),
        ('checked = true\nseen = "no"', "seen"),
        ('devices = ["tpu"]', r"'tpu' is not a device: choose from cpu, cuda, xpu, mps"),
        ('codes = ["101"]', "'101' is not a diagnostic code"),
        ('message = "("', "not a regular expression"),
        ('since = "new"', "'new' is not a version"),
        ('more = ["see there"]', "'see there' is not an https link"),
        ('workaround = "w"', "needs a fix or a workaround"),
    ],
)
def test_errors_name_file_entry_and_key(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "known_issues.toml"
    text = ENTRY.replace(f"{change}\n", "") if f"{change}\n" in ENTRY else ENTRY + f"{change}\n"
    if "checked" in change:
        text = ENTRY.replace("checked = true", change)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"known_issues\.toml: entry 'x': .*{message}"):
        known_issues(path)


def test_errors_in_the_structure_of_the_file(tmp_path: Path) -> None:
    for name, text, message in (
        ("twice", ENTRY * 2, "duplicate entry 'x'"),
        ("other", "[[isue]]\n", "unknown key 'isue'"),
        ("table", ENTRY.replace("[[issue]]", "[issue]"), "not an array of tables"),
        ("cut", ENTRY.replace('title = "t"', "title ="), "line 4"),
        ("nameless", ENTRY.replace('id = "x"\n', ""), "entry issue 1: the key 'id' is missing"),
    ):
        path = tmp_path / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=rf"{name}\.toml: .*{message}"):
            known_issues(path)


def test_the_file_has_only_keys_of_the_struct() -> None:
    text = (ROOT / "catalog" / "known_issues.toml").read_text(encoding="utf-8")
    assert text.count("[[issue]]") == len(known_issues())
    assert set(re.findall(r"^(\w+) =", text, re.MULTILINE)) <= set(KnownIssue.__struct_fields__)
