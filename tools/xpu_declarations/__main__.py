"""Writes a release to `catalog/declared-xpu.jsonl` from public sources; docs/declared-xpu.md shows the commands.

python -m tools.xpu_declarations --wheel torch-2.13.0-….whl --claims claims.json --intel torch-xpu-ops
"""

from __future__ import annotations

import argparse
import re
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from lowprec_check.catalog.declared import DeclaredRow, DeclaredVersion, Source, read_declared
from lowprec_check.catalog.versioned_file import data_folder
from lowprec_check.catalog.versions import release_of
from lowprec_check.errors import UsageError
from tools.catalog_files import encode
from tools.xpu_declarations import dtypes, kernels, registrations
from tools.xpu_declarations.corrections import Corrections

YAML = "torchgen/packaged/ATen/native/native_functions.yaml"
INTEL_YAML = "yaml/native/native_functions.yaml"
NATIVE = "src/ATen/native/xpu"


class Clone:
    """One commit of a clone of intel/torch-xpu-ops."""

    home = "https://github.com/intel/torch-xpu-ops"

    def __init__(self, path: Path, ref: str) -> None:
        self.path = path
        self.ref = ref
        self.commit, self.date = self._git("log", "-1", "--format=%H %cs", ref, "--").split()
        self.files = frozenset(self._git("ls-tree", "-r", "--name-only", self.commit).splitlines())

    def read(self, file: str) -> str:
        """The text of a file at the commit."""
        return self._git("show", f"{self.commit}:{file}")

    def url(self, file: str) -> str:
        """The URL of the file on GitHub."""
        return f"{self.home}/blob/{self.commit}/{file}"

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.path), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(
                f"git in {self.path}: {done.stderr.strip()}",
                "Set --intel to a clone of intel/torch-xpu-ops that has this commit.",
            )
        return done.stdout


def intel_sources(clone: Clone, note: str | None) -> tuple[dict[str, str], dict[str, Source]]:
    """The texts of the files read from torch-xpu-ops, and the sources, by key."""
    fallback = next(
        name for name in (f"{NATIVE}/XPUFallback.cpp", f"{NATIVE}/XPUFallback.template") if name in clone.files
    )
    files = {
        "fallback": (fallback, "the ops that torch-xpu-ops sends to the CPU"),
        "library": (f"{NATIVE}/Resize.cpp", "ops that torch-xpu-ops registers in C++"),
        "tests": ("test/xpu/xpu_test_utils.py", "what torch-xpu-ops' tests add to OpInfo"),
    }
    if INTEL_YAML in clone.files:
        files["torch-xpu-ops"] = (INTEL_YAML, "native_functions.yaml of torch-xpu-ops")
    sources = {key: Source(what, clone.url(file), clone.commit, note) for key, (file, what) in files.items()}
    code = f"{clone.home}/tree/{clone.commit}/{NATIVE}/sycl"
    sources["kernel"] = Source("dispatch macros in the kernels of torch-xpu-ops", code, clone.commit, note)
    return {key: clone.read(file) for key, (file, _) in files.items()}, sources


def torch_sources(wheel: Path, claims: dtypes.Claims) -> tuple[str, dict[str, Source]]:
    """The yaml of torch, and the sources from torch, by key."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(YAML).decode()
        version = archive.read("torch/version.py").decode()
    found = dict(re.findall(r"^(__version__|git_version) = '([^'+]*)", version, re.MULTILINE))
    if found["git_version"] != claims.commit:
        raise UsageError(
            f"The claims are for torch {claims.torch} ({claims.commit}), but {wheel} is {found['__version__']} "
            f"({found['git_version']}).",
            "Use a wheel and claims of the same build.",
        )
    blob = f"https://github.com/pytorch/pytorch/blob/{claims.commit}"
    of = f"of torch {found['__version__']}"
    opinfo = f"{blob}/torch/testing/_internal/common_methods_invocations.py"
    return text, {
        "torch": Source(
            f"native_functions.yaml {of}", f"{blob}/aten/src/ATen/native/native_functions.yaml", claims.commit
        ),
        "opinfo": Source(f'OpInfo {of}, supported_dtypes("xpu")', opinfo, claims.commit),
    }


def build(
    wheel: Path, claims_path: Path, intel: Path, ref: str | None
) -> tuple[str, dict[str, Source], dict[str, DeclaredRow]]:
    """The release, its sources by key, and its rows by op."""
    claims = msgspec.json.decode(claims_path.read_bytes(), type=dtypes.Claims)
    release = release_of(claims.torch)
    clone = Clone(intel, ref or f"release/{release}")
    note = f"{ref} of {clone.date} stands in for release/{release}" if ref else None
    yaml, sources = torch_sources(wheel, claims)
    texts, intel_described = intel_sources(clone, note)
    corrections = Corrections(data_folder() / "declared-xpu-corrections.toml", release)

    torch_ops = registrations.parse(yaml)
    all_ops = {*torch_ops, *(name for native in torch_ops.values() for name in native.autogen)}
    found = registrations.registrations(
        registrations.Declarations(
            torch_ops,
            registrations.parse(texts["torch-xpu-ops"]) if "torch-xpu-ops" in texts else {},
            registrations.library_impls(texts["library"]),
            registrations.fallback_list(texts["fallback"]),
            corrections.registrations(all_ops),
        )
    )
    code = (
        clone.read(file)
        for file in sorted(clone.files)
        if file.startswith("src/ATen") and file.endswith((".cpp", ".h"))
    )
    evidence = dtypes.Evidence(
        claims.claims, dtypes.additions(texts["tests"]), kernels.unsupported(code), corrections.dtypes(all_ops)
    )
    supported = {dtype: dtypes.answers(found, evidence, dtype) for dtype in dtypes.DTYPES}
    return release, sources | intel_described | corrections.sources(), rows(found, supported)


def rows(
    found: dict[str, registrations.OpRegistration], supported: dict[str, dtypes.Answers]
) -> dict[str, DeclaredRow]:
    """The row of each op."""
    result = {}
    for op, registered in found.items():
        half, bfloat16 = supported["half"][op], supported["bfloat16"][op]
        result[op] = DeclaredRow(*registered, half.supported, bfloat16.supported, half.source, bfloat16.source)
    return result


def save(path: Path, release: str, sources: dict[str, Source], table: dict[str, DeclaredRow]) -> None:
    """Write a release to the file of the device; earlier declarations for it are replaced."""
    tables: list[tuple[DeclaredVersion, Mapping[str, DeclaredRow]]] = [(DeclaredVersion(release, sources), table)]
    if path.exists():
        file = read_declared(path)
        tables += [(version, file.table(i)) for i, version in enumerate(file.versions) if version.torch != release]
    path.write_bytes(encode(tables))


def main() -> None:
    """Parse the arguments, build the release, write it."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.xpu_declarations", description=(__doc__ or "").partition(";")[0]
    )
    parser.add_argument("--wheel", type=Path, required=True, help="a wheel of torch, any platform")
    parser.add_argument("--claims", type=Path, required=True, help="the file that claims.py wrote with the same torch")
    parser.add_argument("--intel", type=Path, required=True, help="a clone of intel/torch-xpu-ops")
    parser.add_argument("--ref", help="branch or commit of the clone to read; default: release/X.Y")
    options = parser.parse_args()
    path = data_folder() / "declared-xpu.jsonl"
    try:
        release, sources, table = build(options.wheel, options.claims, options.intel, options.ref)
        save(path, release, sources, table)
    except UsageError as error:
        parser.error(str(error))
    print(f"{path}: {len(table)} ops of torch {release}")


if __name__ == "__main__":
    main()
