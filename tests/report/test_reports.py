"""Every report format of one shared result: goldens, conformance to standards, hostile strings."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from cmarkgfm import github_flavored_markdown_to_html
from cmarkgfm.cmark import Options
from conftest import ROOT, Call
from helpers import screen_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from shared_result import budgeted_result, op_calls, run, shared_result
from training_result import training_result

from lowprec_check.analysis.diff import diff_scans
from lowprec_check.errors import UsageError
from lowprec_check.report.blocks import Column, Document, Fold, Row, Say, Table
from lowprec_check.report.foreign_text import visible
from lowprec_check.report.layout import markdown
from lowprec_check.report.registry import FORMATS, format_of, render
from lowprec_check.schema.scan_result import ScanResult

RESULT = shared_result()

NASTY = (
    "<script>alert(1)</script>",
    "a | b || c",
    "line\nbreak\r\nand\ttab",
    "x" * 10_000,
    "😀👩‍💻🏳️‍🌈",
    "\u202egnirts\u200f\u2066",
    "`` ` ``` ~~~",
    "]]> <!-- --> & &amp; \x00\x1b[31m\ufffe",
    "</details></summary>\n\n# heading\n\n| a |\n|---|",
    "@someone closes #12 https://example.org",
    "{{ 7 * 7 }} {% raw %} ${x} %s",
    "",
    "   ",
)
hostile = st.one_of(
    st.sampled_from(NASTY), st.text(max_size=300), st.lists(st.sampled_from(NASTY), max_size=3).map("".join)
)
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


GOLDENS = {
    "text": "report.txt",
    "md": "report.md",
    "sarif": "report.sarif",
    "github": "github.txt",
    "concise": "concise.txt",
}


@pytest.mark.parametrize(("format", "name"), GOLDENS.items())
def test_goldens(format: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, render(RESULT, format))


@pytest.mark.parametrize(("format", "name"), [("text", "budget.txt"), ("md", "budget.md")])
def test_goldens_with_error_budgets(format: str, name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, render(budgeted_result(), format))


def test_every_format_is_found_by_its_suffix() -> None:
    names = {"a.txt": "text", "a.md": "md", "a.html": "html", "a.sarif": "sarif", "a.xml": "junit", "a.json": "json"}
    assert {name: format_of(Path(name)).name for name in names} == names
    assert format_of(Path("A.SARIF.JSON")).name == "sarif"
    with pytest.raises(UsageError, match="Cannot tell the report format"):
        format_of(Path("report.docx"))


def test_json_is_the_result() -> None:
    assert ScanResult.from_json(render(RESULT, "json").encode()) == RESULT


# -- a line per finding


def unescaped(text: str) -> str:
    """What the runner of GitHub Actions shows."""
    for code, character in (("%3A", ":"), ("%2C", ","), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_github_commands_name_file_line_and_code() -> None:
    *commands, verdict = render(RESULT, "github").splitlines()
    found = [
        re.fullmatch(r"::(error|warning|notice) file=([^,:]+),line=(\d+),title=([^,:]+)::(.+)", c) for c in commands
    ]
    assert all(found)
    shown = [match.groups() for match in found if match is not None]
    assert ("error", "net.py", "23", "LP101 missing-kernel") in [one[:4] for one in shown]
    assert "25 % of the values" in next(unescaped(one[4]) for one in shown if one[3] == "LP202 underflow")
    assert {one[0] for one in shown if one[3].startswith("LP304")} == {"notice"}
    assert [one[0] for one in shown] == sorted((one[0] for one in shown), key=["error", "warning", "notice"].index)
    assert verdict == "13 findings: 6 errors, 2 warnings, 5 notes. Use half with 2 of 6 modules in fp32."


@FEW
@given(hostile)
def test_no_string_breaks_a_workflow_command(nasty: str) -> None:
    lines = render(shared_result(nasty), "github").splitlines()
    assert len(lines) == len(render(shared_result(nasty), "concise").splitlines())
    for line in lines[:-1]:
        found = re.fullmatch(r"::(error|warning|notice) file=([^,:]*),line=(\d+),title=([^,:]*)::(.*)", line)
        assert found is not None, line
        assert not re.search("[\x00-\x1f\u202a-\u202e]", unescaped(found[2] + found[4] + found[5]))
    assert not lines[-1].startswith("::")


def matcher() -> re.Pattern[str]:
    """The regular expression of the problem matcher in the documentation."""
    shown = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    [saved] = re.findall(r'(?s)```json\n(\{"problemMatcher".*?)```', shown)
    [pattern] = json.loads(saved)["problemMatcher"][0]["pattern"]
    assert {name: pattern[name] for name in ("file", "line", "code", "severity", "message")} == {
        "file": 1, "line": 2, "code": 3, "severity": 4, "message": 5,
    }  # fmt: skip
    return re.compile(pattern["regexp"])


def test_the_problem_matcher_reads_every_finding() -> None:
    *lines, verdict = render(RESULT, "concise").splitlines()
    found = [matcher().match(line) for line in lines]
    assert all(found)
    assert {match[3] for match in found if match} == {d.code for d in RESULT.diagnostics}
    assert {match[4] for match in found if match} == {"error", "warning", "note"}
    assert lines[0].startswith("net.py:23: LP101 error half: aten.linalg_cholesky_ex.default: ")
    assert matcher().match(verdict) is None


def test_accepted_findings_are_no_lines() -> None:
    accepted = [msgspec.structs.replace(d, accepted=d.severity == "error") for d in RESULT.diagnostics]
    result = msgspec.structs.replace(RESULT, diagnostics=accepted)
    for name in ("github", "concise"):
        shown = render(result, name)
        assert "LP202" in shown
        assert "LP101" not in shown
        assert "6 accepted by the baseline" in shown.splitlines()[-1]


# -- Markdown


def test_markdown_counts_the_findings_that_do_not_fit() -> None:
    first = RESULT.diagnostics[0]
    many = [
        msgspec.structs.replace(first, op=f"aten.op_{i}.default", message="m" * 150, source=f"net.py:{i}")
        for i in range(3000)
    ]
    long = msgspec.structs.replace(RESULT, diagnostics=many)
    shown = render(long, "md")
    assert 30_000 < len(shown) <= markdown.LONGEST
    missing = int(re.search(r"\*([\d,]+) of 3,000 rows are not shown", shown)[1].replace(",", ""))  # type: ignore[index]
    assert missing + shown.count("LP101 missing-kernel") == 3000


def test_markdown_code_can_be_pasted() -> None:
    assert RESULT.recommendation is not None
    assert f"```python\n{RESULT.recommendation.code}\n```" in render(RESULT, "md")


def test_tables_keep_their_columns() -> None:
    for nasty in NASTY:
        shown = re.sub(r"(?s)\n(`{3,})python\n.*?\n\1\n", "", render(budgeted_result(nasty), "md"))
        rows = [line for line in shown.splitlines() if line.startswith("|")]
        widths = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
        assert set(widths) == {3, 6, 7, 8}, nasty


@pytest.mark.parametrize("text", ["a\nb", "a|b", "a`|`b", "\\\\|", "\u202ea"])
def test_a_row_stays_a_row_whatever_its_columns_and_tag_are_called(text: str) -> None:
    shown = markdown.markdown(Document("", [Table([Column(text), Column("b")], [Row([text, text], tag=text)])]))
    rendered = github_flavored_markdown_to_html(shown)
    assert (rendered.count("<th "), rendered.count("<td "), rendered.count("<tr>")) == (2, 2, 2), shown
    assert "\u202e" not in rendered


def html_in(shown: str) -> set[str]:
    """Tags that a Markdown renderer would pass on."""
    tokens = MarkdownIt("commonmark").enable("table").parse(shown)
    inline = [child for token in tokens for child in token.children or []]
    raw = [token.content for token in (*tokens, *inline) if token.type in ("html_block", "html_inline")]
    return {tag for content in raw for tag in re.findall(r"<[^>]*>", content)}


# -- hostile strings


@FEW
@given(hostile)
def test_no_string_breaks_a_format(nasty: str) -> None:
    result = budgeted_result(nasty)
    assert ScanResult.from_json(render(result, "json").encode()) == result
    assert len(ElementTree.fromstring(render(result, "junit")).findall(".//testcase")) == len(result.runs) + 1
    assert json.loads(render(result, "sarif"))["runs"]
    shown = render(result, "md")
    assert len(shown) <= markdown.LONGEST
    assert html_in(shown) <= {"<details>", "<summary>", "</summary>", "</details>"}
    screen = screen_of(result)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", screen + shown)


LINKS = (
    "HTTP://a.example",
    "hTTps://a.example/x_y",
    "www.example.org",
    "ftp://a.example",
    "see mailto:someone@example.org",
    "someone@example.org",
    "someone@.example",
    "someone@-a.example",
    "xmpp:someone@example.org/x",
    "<http://a.example>",
    "<someone@example.org>",
    "[a](http://a.example)",
    "[a][b]\n\n[b]: http://a.example",
    "note[^1]\n\n[^1]: the note",
    "![a](//a.example/b.png)",
    "thanks @someone",
    "closes #12",
    "closes a/b#12",
    "closes GH-12",
    "commit 16c999e8c71134401a78d4d46435517b2271d6ac",
    "commit 16c999e",
)


def links_in(shown: str) -> set[str]:
    """What GitHub turns into links: those that its renderer makes, and mentions and references outside of code."""
    rendered = github_flavored_markdown_to_html(shown, Options.CMARK_OPT_FOOTNOTES | Options.CMARK_OPT_UNSAFE)
    text = re.sub(r"(?s)<(code|pre)\b.*?</\1>|<[^>]*>", " ", rendered)
    references = re.findall(r"@\w+|#\d+|\bGH-\d+|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,40}\b", html.unescape(text))
    return {*re.findall(r'(?:href|src)="([^"]*)"', rendered), *references}


def test_links_are_found() -> None:
    assert not [text for text in LINKS if not links_in(text)]


@pytest.mark.parametrize("text", LINKS)
def test_markdown_makes_no_link_of_foreign_text(text: str) -> None:
    shown = [
        render(budgeted_result(text), "md"),
        render(training_result(text), "md"),
        FORMATS.get("md").render_diff(diff_scans(RESULT, shared_result(text))),
        markdown.markdown(
            Document("", [Fold(text, [Say(text, lead=text)]), Table([Column(text)], [Row([text], tag=text)])])
        ),
    ]
    assert set().union(*map(links_in, shown)) <= links_in(render(RESULT, "md"))


INVISIBLE = [
    character
    # No other plane has any, and asking for each of a million characters takes a second.
    for character in map(chr, (*range(0x20000), *range(0xE0000, 0xE1000)))
    if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp")
    or ("\ud800" <= character <= "\udfff" and ord(character) % 64 == 0)  # of the surrogates, which are all alike
    or character in "\u034f\u115f\u1160\u2800\u3164\ufe0f\uffa0\U000e0100"
]


@pytest.mark.parametrize("name", [name for name in FORMATS.names() if name != "json"])
def test_no_format_has_invisible_characters(name: str) -> None:
    """Directions, joiners, tags, fillers: a reader sees that they are there."""
    assert {"\u061c", "\u202e", "\u200b", "\U000e0041", "\x1b", "\ud800"} <= set(INVISIBLE)
    for start in range(0, len(INVISIBLE), 40):
        text = "a".join(INVISIBLE[start : start + 40])
        shown = render(shared_result(text), name)
        assert set(INVISIBLE) & set(shown) <= {"\n"}
        assert "a" * 10 not in shown
        shown = render(shared_result("".join(INVISIBLE[start : start + 40])), name)
        assert set(INVISIBLE) & set(shown) <= {"\n"}


@pytest.mark.parametrize("text", ["👩\u200d💻", "🏳️\u200d🌈", "❤️", "1️⃣", "👩🏽\u200d🚀", "©️"])
def test_emoji_stay_as_they_are(text: str) -> None:
    assert visible(text) == text
    assert visible(f"a\u200d{text}b\ufe0f") == f"a\\u200d{text}b\\ufe0f"


@FEW
@given(hostile)
def test_no_string_breaks_the_page(nasty: str) -> None:
    page = render(budgeted_result(nasty), "html")
    assert page.count("<script") == page.count("</script>") == 1
    assert "<script>alert" not in page
    assert page.rstrip().endswith("</html>")


@settings(deadline=None)
@given(st.text(max_size=2000))
def test_visible_is_one_line_of_bounded_length(value: str) -> None:
    shown = visible(value, 100)
    assert len(shown.splitlines()) <= 1
    assert shown.isprintable() or not re.search("[\x00-\x1f\u202a-\u202e]", shown)
    if value.isascii() and value.isprintable() and len(value) <= 100:
        assert shown == value


# -- broken files


def corrupt(change: Callable[[dict[str, object]], object]) -> bytes:
    data = json.loads(RESULT.to_json())
    return json.dumps(change(data)).encode()


def short_column(data: dict[str, object]) -> dict[str, object]:
    data["runs"][1]["op_calls"]["module"].pop()  # type: ignore[index]
    return data


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (RESULT.to_json()[:5000], "truncated"),
        (b"", "truncated"),
        (b"\x00\xff", "not a scan result"),
        (b'{"schema":1,"runs":' + b"[" * 100_000, "recursion"),
        (corrupt(lambda d: d | {"schema": 2}), "upgrade lowprec-check"),
        (corrupt(lambda d: d | {"runs": None}), r"\$\.runs"),
        (corrupt(lambda d: d | {"runs": [{"precision": "half"}]}), r"\$\.runs\[0\]"),
        (corrupt(lambda d: d | {"model": {"name": 3}}), r"\$\.model\.name"),
        (corrupt(short_column), r"column 'module' .*\$\.runs\[1\]\.op_calls"),
    ],
    ids=["truncated", "empty", "binary", "deep", "newer", "null", "missing", "type", "columns"],
)
def test_errors_about_broken_files_name_the_key(data: bytes, names: str, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "scan.json"
    path.write_bytes(data)
    done = call("report", str(path))
    assert done.returncode == 2
    assert re.search(names, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_older_file_without_the_new_column_is_read() -> None:
    data = json.loads(RESULT.to_json())
    for saved in data["runs"]:
        del saved["op_calls"]["rms"]
    result = ScanResult.from_json(json.dumps(data).encode())
    assert result.runs[1].op_calls.rms == [None] * 48
    assert render(result, "html")


# -- the command


def test_report_writes_every_format_at_once(tmp_path: Path, call: Call) -> None:
    scan = tmp_path / "scan.json"
    RESULT.save(scan)
    names = ["r.txt", "r.md", "r.html", "r.sarif", "r.xml", "r.json"]
    options = [option for name in names for option in ("-o", str(tmp_path / name))]
    done = call("report", str(scan), *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for name in names:
        written = (tmp_path / name).read_text(encoding="utf-8")
        assert written == render(RESULT, format_of(Path(name)).name), name


def test_report_prints_without_a_file(tmp_path: Path, call: Call) -> None:
    scan = tmp_path / "scan.json"
    RESULT.save(scan)
    assert call("report", str(scan)).stdout == render(RESULT, "text")
    assert call("report", str(scan), "--format", "junit").stdout == render(RESULT, "junit")


@pytest.mark.parametrize(
    "arguments", [["-o", "no/such/folder/x.html"], ["-o", "x.docx"], ["-f", "md", "-o", "a", "-o", "b"]]
)
def test_usage_errors_of_report(arguments: list[str], tmp_path: Path, call: Call) -> None:
    scan = tmp_path / "scan.json"
    RESULT.save(scan)
    done = call("report", str(scan), *arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_user_error(tmp_path: Path, call: Call) -> None:
    RESULT.save(tmp_path / "scan.json")
    done = call("report", str(tmp_path / "scan.json"), "-f", "md", "-o", "/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Cannot write /dev/full: No space left on device.\n")


# -- edge cases


def test_empty_results_render() -> None:
    bare = msgspec.structs.replace(RESULT, runs=[run("fp32")], diagnostics=[], recommendation=None)
    none = msgspec.structs.replace(bare, runs=[])
    for result in (bare, none):
        assert all(render(result, wanted) for wanted in FORMATS.names())


def test_runs_without_measured_errors_render() -> None:
    blank = op_calls(5)
    nothing = msgspec.structs.replace(
        blank, **{name: [None] * 5 for name in ("local_error", "accumulated_error", "input_error", "absmax", "rms")}
    )
    result = msgspec.structs.replace(RESULT, runs=[run("fp32"), run("half", op_calls=nothing)])
    assert all(render(result, wanted) for wanted in FORMATS.names())


def test_report_reads_a_scan_from_stdin() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lowprec_check", "report", "-", "--format", "md"],
        input=RESULT.to_json(),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == render(RESULT, "md")
