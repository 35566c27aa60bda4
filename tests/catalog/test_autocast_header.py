"""The autocast policies of CUDA and XPU: torch's header, the stored releases, and what torch registers."""

from __future__ import annotations

import contextlib
import itertools
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from lowprec_check.catalog.predictable import (
    DEVICE_OPS,
    DEVICES,
    FILE,
    CastPolicy,
    HeaderPolicy,
    ReadHeader,
    installed_policies,
    policies_of,
    read_releases,
    releases,
)
from lowprec_check.catalog.versions import release_of
from lowprec_check.errors import UsageError
from tools.autocast_header import (
    HEADER,
    LISTS,
    POLICIES,
    WITH_POLICY,
    AutocastHeaderError,
    parse_header,
)
from tools.autocast_policies import all_changes, check, encode, read_headers, save

TEXT = (Path(torch.__file__).parent / HEADER).read_text(encoding="utf-8")
PARSED = parse_header(TEXT)
LINES = TEXT.splitlines(keepends=True)
STORED = ROOT / "catalog" / FILE
LIST_NAMES = (*LISTS, WITH_POLICY)


def list_lines(name: str) -> range:
    """The line numbers of the entries of a list, without its first line."""
    first = next(number for number, line in enumerate(LINES) if line.startswith(f"#define {name}("))
    end = first
    while LINES[end].rstrip().endswith("\\"):
        end += 1
    return range(first + 1, end + 1)


ENTRY_LINES = [number for name in LISTS for number in list_lines(name)]
LIST_LINES = [number for name in LIST_NAMES for number in (list_lines(name)[0] - 1, *list_lines(name))]


def op_in(line: str) -> str:
    found = re.fullmatch(r"\s*_\((\w+)(?:, (\w+))?\)\s*\\?\s*", line)
    assert found is not None, line
    return ".".join(filter(None, found.groups()))


def registered(device: str) -> list[str]:
    return torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")


@pytest.mark.parametrize("device", DEVICES)
def test_the_catalog_has_what_the_installed_torch_registers(device: str) -> None:
    policies = installed_policies(device, torch.__version__, registered(device))
    ops = {op.removeprefix("aten::") for op in registered(device) if op.startswith("aten::")}
    absent = {entry.op for entry in DEVICE_OPS if entry.needs_device_build and device in entry.devices} - ops
    assert policies.keys() == ops | absent
    assert policies == policies_of(device, torch.__version__)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "change", [lambda ops: [op for op in ops if op != "aten::mm"], lambda ops: [*ops, "aten::new_op"]]
)
def test_a_registration_that_the_catalog_does_not_have_is_an_error(
    device: str, change: Callable[[list[str]], list[str]]
) -> None:
    known = [f"aten::{op}" for op in policies_of(device, torch.__version__)]
    policies = installed_policies(device, torch.__version__, [*known, "torchvision::nms"])
    assert policies == policies_of(device, torch.__version__)
    with pytest.raises(UsageError, match="registers other ops"):
        installed_policies(device, torch.__version__, change(known))


def test_the_stored_policies_of_the_installed_release_are_those_of_its_header() -> None:
    assert releases()[release_of(torch.__version__)].policies == PARSED


def test_every_list_is_read() -> None:
    assert {PARSED[op] for op in PARSED} == set(get_args(HeaderPolicy)) == set(POLICIES.values())
    for name, policy in LISTS.items():
        assert [op for op in PARSED if PARSED[op] == policy] == [op_in(LINES[number]) for number in list_lines(name)]


@given(st.sampled_from(ENTRY_LINES))
def test_an_entry_less_is_an_op_less(number: int) -> None:
    line, op = LINES[number], op_in(LINES[number])
    blank = re.sub(r"_\(.*\)", "", line)
    found = parse_header("".join([*LINES[:number], blank, *LINES[number + 1 :]]))
    assert found == {other: policy for other, policy in PARSED.items() if other != op}


@given(st.sampled_from(ENTRY_LINES), st.sampled_from(ENTRY_LINES))
def test_an_op_that_is_listed_twice_is_an_error(number: int, copied: int) -> None:
    entry = re.search(r"_\(.*\)", LINES[copied])
    assert entry is not None
    line = LINES[number].replace("_(", f"{entry[0]} _(", 1)
    with pytest.raises(AutocastHeaderError, match=f"{re.escape(op_in(LINES[copied]))} is listed twice"):
        parse_header("".join([*LINES[:number], line, *LINES[number + 1 :]]))


@given(st.sampled_from(LIST_LINES), st.integers(0, 200), st.sampled_from('(),_;#"\\/*x0.:<> \n'), st.booleans())
def test_a_garbled_line_is_an_error_or_renames_one_op(number: int, at: int, character: str, insert: bool) -> None:
    """A compiler would accept a wrong name as well until it looks for the op: no parser can know it."""
    line = LINES[number]
    at %= len(line.rstrip("\n"))
    garbled = line[:at] + character + line[at + (not insert) :]
    with contextlib.suppress(AutocastHeaderError):
        found = parse_header("".join([*LINES[:number], garbled, *LINES[number + 1 :]]))
        gone, new = PARSED.keys() - found.keys(), found.keys() - PARSED.keys()
        assert len(new) <= len(gone) <= 1
        assert all(found[op] == PARSED[op] for op in PARSED.keys() & found.keys())
        if gone:
            [op] = gone
            assert all(part in "".join(LINES[number - 1 : number + 1]) for part in op.split(".")), "another line's op"
            assert [found[other] for other in new] in ([], [PARSED[op]])


@given(st.sampled_from(LIST_LINES))
def test_a_missing_line_is_an_error_or_an_op_less(number: int) -> None:
    with contextlib.suppress(AutocastHeaderError):
        found = parse_header("".join([*LINES[:number], *LINES[number + 1 :]]))
        assert number in ENTRY_LINES
        op = op_in(LINES[number])
        assert found == {other: policy for other, policy in PARSED.items() if other != op}


@pytest.mark.parametrize("name", LIST_NAMES)
def test_a_list_that_ends_too_early_is_an_error(name: str) -> None:
    lines = list_lines(name)
    for number in range(lines[0] - 1, lines[-1]):
        line = LINES[number].rstrip().removesuffix("\\") + "\n"
        with pytest.raises(AutocastHeaderError, match=r"ends too early|not understood"):
            parse_header("".join([*LINES[:number], line, *LINES[number + 1 :]]))


def changed(pattern: str, replacement: str) -> str:
    text, count = re.subn(pattern, replacement, TEXT, count=1, flags=re.DOTALL | re.MULTILINE)
    assert count == 1
    return text


ENUM = r"(enum class CastPolicy[^{]*\{)"
GUARD = r"(#define AT_FORALL_PROMOTE\(_\).*?_\(scatter_add\))"
BROKEN: dict[str, tuple[str, str, str]] = {
    "a policy more": (ENUM, r"\1 fp64,", r"CastPolicy differ from the known ones: fp64"),
    "a policy less": (r"^  promote,", "", r"CastPolicy differ from the known ones: promote"),
    "no policies": (r"enum class CastPolicy", "enum class Policies", "0 definitions of CastPolicy"),
    "another policy": (r"fp32_append_dtype\)", "fp32)", f"{WITH_POLICY} has an entry"),
    "an unknown policy": (r"fp32_append_dtype\)", "fp64_append_dtype)", f"{WITH_POLICY} has an entry"),
    "an op of another name": (r'"norm\.Scalar"', '"dist.Scalar"', f"{WITH_POLICY} has an entry"),
    "an overload with another dtype": (r"std::optional<Scalar>&, ScalarType\)", "std::optional<Scalar>&)", WITH_POLICY),
    "an unknown list": (GUARD, r"#define AT_FORALL_FP64(_) _(inverse)\n\1", "unknown list AT_FORALL_FP64"),
    "a list in a list": (
        r"_\(scatter_add\)",
        r"_(scatter_add) AT_FORALL_MORE(_)",
        "unknown list|not understood|unknown way",
    ),
    "a known list in a list": (r"_\(scatter_add\)", r"AT_FORALL_FP32(_)", "AT_FORALL_PROMOTE has an entry"),
    "a list twice": (GUARD, r"\1\n#define AT_FORALL_PROMOTE(_) _(inverse)", "defined twice"),
    "a list undefined": (GUARD, r"\1\n#undef AT_FORALL_PROMOTE", "AT_FORALL_PROMOTE is used in an unknown way"),
    "a list without parameter": (r"AT_FORALL_PROMOTE\(_\)", "AT_FORALL_PROMOTE", "unknown way"),
    "a condition": (GUARD, r"#ifdef USE_CUDA\n\1\n#endif", "AT_FORALL_PROMOTE depends on a condition: ifdef USE_CUDA"),
    "the other branch": (GUARD, r"#if X\n#else\n\1\n#endif", "AT_FORALL_PROMOTE depends on a condition: else"),
    "an open condition": (r"\A", "#if X\n", "depends on a condition: X"),
    "a condition that does not end": (r"\Z", "\n#if X\n", "the condition X does not end"),
    "an end without a condition": (r"\A", "#endif\n", "#endif without #if"),
    "an empty list": (r"(#define AT_FORALL_PROMOTE\(_\)).*?_\(scatter_add\)", r"\1", "AT_FORALL_PROMOTE is empty"),
    "three names": (
        r"_\(pow, Scalar\)",
        "_(pow, Scalar, out)",
        "AT_FORALL_FP32 has an entry that is not understood: pow",
    ),
    "another macro": (r"_\(pow, Scalar\)", "KERNEL(pow, Scalar)", "AT_FORALL_FP32 has an entry"),
    "an open parenthesis": (r"_\(scatter_add\)", "_(scatter_add", "AT_FORALL_PROMOTE has an entry"),
    "a comment without end": (GUARD, r"\1\n/* the rest", "a comment does not end"),
    "nothing": (r"\A.*\Z", "", "0 definitions of CastPolicy"),
} | {name: (rf"#define {name}\(_\)", "#define OTHER(_)", f"the list {name} is missing") for name in LIST_NAMES}


@pytest.mark.parametrize(("pattern", "replacement", "message"), BROKEN.values(), ids=BROKEN)
def test_a_header_that_is_not_understood_is_an_error(pattern: str, replacement: str, message: str) -> None:
    with pytest.raises(AutocastHeaderError, match=message) as error:
        parse_header(changed(pattern, replacement))
    assert error.value.hint is not None


def test_comments_and_layout_do_not_matter() -> None:
    assert parse_header(TEXT.replace("\n", "\r\n")) == PARSED
    assert parse_header(changed(r"_\(scatter_add\)", "_ ( scatter_add ) // the last one, of AT_FORALL_X")) == PARSED
    assert parse_header(changed(r"_\(addcmul\)", "/* not _(inverse) */ _(addcmul)")) == PARSED
    assert (
        parse_header(
            changed(r"(PROMOTE)\(_\)(.*?)_\(addcdiv\)", r"\1(X)\2_(addcdiv)").replace("PROMOTE(X)", "PROMOTE(_)")
        )
        == PARSED
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("release", ["2.6", "2.7", "2.8", "2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15"])
def test_every_supported_release_has_policies(device: str, release: str) -> None:
    policies = policies_of(device, f"{release}.0+cpu")
    known: dict[str, CastPolicy] = {
        "mm": "lower",
        "conv2d": "lower",
        "_convolution.deprecated": "lower",
        "scaled_dot_product_attention": "lower",
        "layer_norm": "fp32",
        "pow.Tensor_Scalar": "fp32",
        "softmax.int": "fp32-set-dtype",
        "norm.Scalar": "fp32-append-dtype",
        "dot": "promote",
        "index_put": "promote",
        "binary_cross_entropy": "banned",
    }
    assert known.items() <= policies.items()
    assert "batch_norm" not in policies
    own = {op for op in policies if op not in releases()[release].policies}
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"} if device == "cuda" else set()
    since = {"linalg_matrix_sqrth"} if device == "cuda" and release in ("2.14", "2.15") else set()
    assert own == {"binary_cross_entropy"} | cudnn | since


def test_the_releases_differ_as_their_headers_do() -> None:
    known = [(release, header.policies) for release, header in releases().items()]
    differences = {
        (later, op): (before.get(op), after.get(op))
        for (_, before), (later, after) in itertools.pairwise(known)
        for op in {**before, **after}
        if before.get(op) != after.get(op)
    }
    assert differences == {
        ("2.12", "rms_norm"): (None, "fp32"),
        ("2.13", "prod.dim_Dimname"): ("fp32-set-dtype", None),
        ("2.13", "softmax.Dimname"): ("fp32-set-dtype", None),
        ("2.13", "log_softmax.Dimname"): ("fp32-set-dtype", None),
        ("2.13", "cumprod.dimname"): ("fp32-set-dtype", None),
        ("2.13", "cumsum.dimname"): ("fp32-set-dtype", None),
        ("2.13", "sum.dim_DimnameList"): ("fp32-set-dtype", None),
        ("2.13", "norm.names_ScalarOpt_dim"): ("fp32-append-dtype", None),
    }


@pytest.mark.parametrize("version", ["2.5", "2.16", "3.0", "2.8+ipex"])
def test_an_unknown_release_is_an_error(version: str) -> None:
    with pytest.raises(UsageError, match=rf"no autocast policies for torch {re.escape(version)}") as error:
        policies_of("xpu", version)
    assert error.value.hint == f"Releases with policies: {', '.join(releases())}."


def test_an_unknown_device_is_an_error() -> None:
    assert policies_of("cuda:1", "2.8") == policies_of("cuda", "2.8")
    for device in ("cpu", "mps"):
        with pytest.raises(UsageError, match=f"no autocast policies for {device}"):
            policies_of(device, "2.8")


def test_an_op_in_the_header_that_a_device_registers_itself_is_an_error(tmp_path: Path) -> None:
    header = tmp_path / "autocast_mode.h"
    header.write_text(changed(r"_\(dot\)", "_(dot) _(_cudnn_rnn)"), encoding="utf-8")
    with pytest.raises(AutocastHeaderError, match="cuda registers itself: _cudnn_rnn"):
        read_headers([f"2.15.0={header}"])


POLICY = st.sampled_from(sorted(POLICIES.values()))
TABLES = st.lists(
    st.dictionaries(st.sampled_from(["a", "b.x", "c", "d"]), POLICY).map(
        lambda ops: {**dict(zip("vwxyz", POLICIES.values(), strict=True)), **ops}
    ),
    min_size=1,
    max_size=4,
)


@given(TABLES, st.randoms(use_true_random=False))
def test_releases_are_read_as_they_were_stored(tables: list[dict[str, HeaderPolicy]], random: Random) -> None:
    """Whatever the order in which they are added."""
    headers = {f"2.{number}": ReadHeader(f"2.{number}.1", table) for number, table in enumerate(tables, 6)}
    order = random.sample(sorted(headers), len(headers))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE
        path.write_text(encode(all_changes(headers.values())), encoding="utf-8")
        assert read_releases(path) == headers
        whole = path.read_bytes()
        path.unlink()
        for release in order:
            save(path, {release: headers[release]})
        assert path.read_bytes() == whole


def test_the_tool_adds_releases(tmp_path: Path) -> None:
    """A header of a release in the file replaces it; the others are kept."""
    header, path = tmp_path / "autocast_mode.h", tmp_path / FILE
    header.write_text(changed(r"_\(scatter_add\)", "_(scatter_add) _(inverse)"), encoding="utf-8")
    path.write_bytes(STORED.read_bytes())
    save(path, read_headers([f"2.99.1={header}"]))
    added = read_releases(path)
    assert added == {**releases(), "2.99": ReadHeader("2.99.1", {**PARSED, "inverse": "promote"})}
    newest, old = list(releases().items())[-1]
    save(path, {"2.99": ReadHeader("2.99.2", old.policies)})
    assert path.read_text(encoding="utf-8").rpartition("[[release]]")[2] == '\ntorch = "2.99"\nbuild = "2.99.2"\n'
    save(path, {newest: old})
    assert read_releases(path) == {**releases(), "2.99": ReadHeader("2.99.2", old.policies)}


def test_wrong_arguments_of_the_tool_are_errors(tmp_path: Path) -> None:
    header = tmp_path / "autocast_mode.h"
    header.write_text(TEXT, encoding="utf-8")
    assert read_headers([f"2.5.1={header}"]) == {"2.5": ReadHeader("2.5.1", PARSED)}
    with pytest.raises(UsageError, match=r"Two headers are for torch 2\.5"):
        read_headers([f"2.5.0={header}", f"2.5.1={header}"])
    with pytest.raises(UsageError, match=r"No such file"):
        read_headers([f"2.5.0={header}.other"])
    with pytest.raises(UsageError, match="is not a version of torch"):
        read_headers([str(header)])


EDITS: dict[str, tuple[str, str, str]] = {
    "twice": ('"matmul",', '"matmul", "matmul",', "release 2.6: duplicate op matmul"),
    "under two policies": ("promote = [", 'promote = ["mm",', "release 2.6: duplicate op mm"),
    "already": ('"rms_norm"', '"rms_norm", "layer_norm"', "release 2.12: layer_norm is fp32 already"),
    "removed": (
        '"prod.dim_Dimname",\n    "softmax.Dimname"',
        '"prod.other"',
        "release 2.13: removes prod.other",
    ),
    "not sorted": (
        'torch = "2.7"\nbuild = "2.7.1"',
        'torch = "2.6"\nbuild = "2.6.1"',
        "release 2.6: duplicate or not sorted",
    ),
    "another build": ('build = "2.7.1"', 'build = "2.8.1"', "release 2.7: build 2.8.1 is not of this release"),
    "an unknown policy": ("promote = [", "promotes = [", "promotes"),
    "no build": ('build = "2.7.1"', "", "build"),
}


@pytest.mark.parametrize(("before", "after", "message"), EDITS.values(), ids=EDITS)
def test_a_wrong_file_is_an_error(tmp_path: Path, before: str, after: str, message: str) -> None:
    text = STORED.read_text(encoding="utf-8")
    head, found, tail = text.rpartition(before)
    assert found
    (tmp_path / FILE).write_text(head + after + tail, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        check(tmp_path / FILE)


def test_a_file_without_a_policy_or_without_releases_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_text('[[release]]\ntorch = "2.6"\nbuild = "2.6.0"\nlower = ["mm"]\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r"release 2\.6: no op is fp32"):
        check(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="no releases"):
        check(path)


def test_the_file_of_the_catalog_is_right() -> None:
    assert check(STORED) == releases()


def test_each_device_op_names_its_source() -> None:
    assert len({entry.op for entry in DEVICE_OPS}) == len(DEVICE_OPS)
    for entry in DEVICE_OPS:
        assert entry.source.startswith("aten/src/ATen/")
        assert set(entry.devices) <= set(DEVICES)
        assert entry.policy in {*POLICIES.values(), "fp16", "banned"}
        assert entry.since in releases()
