"""Compare what two checkouts of this project find in the same models: ``python benchmarks/compare_scans.py OLD NEW``.

OLD and NEW are folders of checkouts. Each of ``SCANS`` is scanned with both, each scan in a process of its own, and the
two saved JSONs are compared key by key. Times are not compared with fp32 (``--times off``). Exit code 1 if anything
differs that is not expected (``REMOVED``, ``ADDED``).

Not compared, because it depends on time: the keys in ``TIMES``, findings that rest on measured times, and the
milliseconds in texts. Which ops are emulated because they were slow depends on it too: where the two differ in that,
both scan again, at most ``ATTEMPTS`` times in all. The order of findings is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TRAINING = {"train_classifier": "2", "train_gan": "2", "train_language_model": "3"}
TORCHVISION = "alexnet convnext_tiny densenet121 efficientnet_b0 mnasnet0_5 mobilenet_v3_small regnet_x_400mf "
TORCHVISION += "regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t vgg11_bn "
TORCHVISION += "lraspp_mobilenet_v3_large"
TRANSFORMERS = "bert roberta llama vit deit electra albert beit bert-generation big_bird camembert convbert "
TRANSFORMERS += "data2vec-text ernie layoutlm longformer megatron-bert mpnet mra nystromformer olmo phi rembert "
TRANSFORMERS += "roc_bert splinter vit_mae xlm-roberta yoso"
TINY = "num_hidden_layers=2,hidden_size=64,num_attention_heads=4,intermediate_size=128"
SCANS: dict[str, tuple[str, ...]] = {
    **{
        path.stem: (
            f"examples/{path.name}",
            *(("--train", "--steps", TRAINING[path.stem]) if path.stem in TRAINING else ()),
        )
        for path in sorted((ROOT / "examples").glob("*.py"))
        if path.stem != "cifar_resnet50"  # it trains its model first, for minutes
    },
    **{name: (f"torchvision:{name}", "--inputs", "1x3x64x64") for name in TORCHVISION.split()},
    **{name: (f"transformers:{name},{TINY}",) for name in TRANSFORMERS.split()},
    "without_dot": ("examples/spade_decoder.py", "--without-kernel", "aten.dot:half"),
    "mobilenet_v2": ("torchvision:mobilenet_v2", "--inputs", "1x3x64x64", "--memory-format", "channels_last"),
    "gpt2": ("transformers:gpt2,n_layer=2,n_embd=64,n_head=4", "-p", "bf16,autocast-bf16"),
    "jit": ("examples/masked_attention.py", "--backend", "eager,jit", "-p", "bf16,autocast-bf16"),
    "spawned": ("examples/whitening.py", "--isolation", "spawn"),
    "planned": ("examples/t5_feed_forward.py", "--plan", "--errors", "accumulated"),
    "xpu": ("examples/spade_decoder.py", "--device", "xpu", "--torch", "2.8"),
}
"""The target and options of each scan, by name; ``--device`` is added where it is not given."""

TIMES = {"latency_ms", "latency", "time_ms", "reference_ms", "speedup", "seconds", "setup_seconds"}
TIMES |= {"timing_conditions", "tool", "process_memory_bytes", "peak_memory_bytes", "one_call_ratio"}
TIMES |= {"measured"}  # as many shares of modules are tried as there is time for
MEASURED = re.compile(r"\d[\d.,]*(?: – \d[\d.,]*)?(?= (?:ms|s|times slower|times as (?:fast|long))\b)")
ATTEMPTS = 4

REMOVED = {"*.disproof": "no report shows it"}
"""Pattern of a key's path that only OLD has: the reason."""

ADDED: dict[str, tuple[Any, str]] = {"runs.*.time_was_over": (False, "it was read from the reason")}
"""Pattern of a key's path that only NEW has: its value (``...``: any), and the reason."""

MISSING = "(missing)"


def scan(checkout: Path, arguments: Sequence[str], saved: Path) -> Any:
    """Scan with the code of ``checkout``; the JSON that it saved. Raises ``CalledProcessError`` if it fails."""
    command = [sys.executable, "-m", "lowprec_check", "--no-settings", "scan", *arguments, "-q"]
    command += ["--times", "off", "--fail-on", "never", "--json", str(saved)]
    if "further_inputs" in (checkout / "lowprec_check/schema/options.py").read_text(encoding="utf-8"):
        command += ["--further-inputs", "0"]  # how many are tried depends on the time
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, check=True)
    return json.loads(saved.read_text(encoding="utf-8"))


def scan_both(checkouts: list[Path], arguments: Sequence[str]) -> tuple[list[dict[str, Any]], list[float]]:
    """Scan with each, again where their slow kernels differ; the results and the seconds of the last scans."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ATTEMPTS):
            results, seconds = [], []
            for checkout in checkouts:
                start = time.monotonic()
                results.append(scan(checkout, arguments, Path(folder) / "scan.json"))
                seconds.append(time.monotonic() - start)
            emulated = [{name_of(run): sorted(run["emulated"]) for run in result["runs"]} for result in results]
            if emulated[0] == emulated[1]:
                break
    return results, seconds


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """``result`` without what depends on time, its runs and findings by name."""
    found: dict[str, Any] = without_times(result)
    found["runs"] = {name_of(run): run for run in found["runs"]}
    found["diagnostics"] = dict(findings(found["diagnostics"]))
    return found


def findings(diagnostics: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The findings by place; of several at one place, the messages tell which is which."""
    seen: Counter[str] = Counter()
    for finding in sorted(diagnostics, key=lambda finding: str(finding["message"])):
        place = "/".join(str(finding[key]) for key in ("code", "precision", "module", "op", "source"))
        if not finding["timed"]:
            yield f"{place}#{seen[place]}", finding
        seen[place] += 1


def without_times(value: Any) -> Any:
    """``value`` without the keys of :data:`TIMES`, its texts without measured times."""
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [without_times(inner) for inner in value]
    return MEASURED.sub("N", value) if isinstance(value, str) else value


def name_of(run: dict[str, Any]) -> str:
    """What identifies a run."""
    return "/".join(filter(None, [run["precision"], run["backend"], run["device"], run["memory_format"], run["base"]]))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value with its path."""
    if not value or not isinstance(value, dict | list):
        yield path, value
        return
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Every unexpected difference as a line; those of one column of numbers as one."""
    before, after = dict(leaves(comparable(old))), dict(leaves(comparable(new)))
    columns: dict[str, list[str]] = defaultdict(list)
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path, MISSING), after.get(path, MISSING)
        removed = now is MISSING and any(fnmatchcase(path, pattern) for pattern in REMOVED)
        matches = (value in (..., now) for key, (value, _) in ADDED.items() if fnmatchcase(path, key))
        added = was is MISSING and any(matches)
        if was != now and not removed and not added:
            line = path.rpartition("#")[0] or re.sub(r"\.\d+(?=\.|$)", "", path)
            columns[line].append(f"{path}: {was!r} → {now!r}")
    return [found[0] + (f"  (and {len(found) - 1} more there)" if found[1:] else "") for found in columns.values()]


def main() -> int:
    """Scan everything twice and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", choices=SCANS, action="append", help="These scans only; repeatable.")
    parser.add_argument("--device", default="cpu", help="Device to scan on.")
    given = parser.parse_args()
    checkouts = [given.old.resolve(), given.new.resolve()]
    unexpected = 0
    for name in given.only or SCANS:
        arguments = SCANS[name] if "--device" in SCANS[name] else (*SCANS[name], "--device", given.device)
        try:
            results, seconds = scan_both(checkouts, arguments)
        except subprocess.CalledProcessError as error:
            unexpected += 1
            print(f"{name:28} failed: {error}", flush=True)
            continue
        found = differences(*results)
        unexpected += len(found)
        how = f"{len(found)} differences" if found else f"equal: {len(list(leaves(comparable(results[1]))))} values"
        print(f"{name:28} {how}; {seconds[0]:.1f} s and {seconds[1]:.1f} s", *found, sep="\n    ", flush=True)
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
