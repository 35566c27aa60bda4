"""The options of a scan as they are saved, and the words for them."""

from __future__ import annotations

# -- The ways to name a target, for help and messages

FORMS = "mymodel.py, mymodel.py:make_model, package.module:attr, torchvision:NAME, timm:NAME, transformers:NAME or hf:FOLDER"


# -- What the keys of ``environment`` and ``options`` in a saved result mean: those have no class of their own

ENVIRONMENT = {
    "torch": "The version of torch.",
    "python": "The version of Python.",
    "platform": "The operating system and the processor's architecture.",
    "device": "The device of the runs: `cpu`, `cuda:0`.",
    "device_name": "Its name.",
    "default_autocast": "The dtype that autocast uses on it by default.",
    "cpu_capability": "The instruction set that torch uses on the CPU.",
    "cpu_features": "Instructions of the CPU that matter to low precision.",
    "fp16_accelerated": "Whether the device computes matrix products in fp16; `null` if torch cannot tell.",
    "bf16_accelerated": "Whether the device computes matrix products in bf16; `null` if torch cannot tell.",
    "threads": "Threads that torch uses in an op.",
    "cores": "Processor cores of the machine.",
    "accelerators": "The accelerators of the machine, in words.",
    "torchvision": "The version of torchvision; `null` if it is not installed.",
    "timm": "The version of timm; `null` if it is not installed.",
    "transformers": "The version of transformers; `null` if it is not installed.",
    "ipex": "The version of Intel's extension; `null` if it is not installed.",
    "ipex_fits": "Whether Intel's extension fits this torch; `null` if it is not installed.",
}

OPTIONS = {
    "isolation": "How runs are kept apart: `fork`, `spawn`, `shared` or `none`.",
    "precisions": "The precisions that were run.",
    "backends": "The backends that were run.",
    "memory_formats": "The memory formats that were run.",
    "select": "Prefixes of the codes to report; empty for all.",
    "ignore": "Prefixes of the codes not to report.",
    "budget": "Seconds for each part of a run; `null` for the default.",
    "errors": "Which errors were computed for each op: `both`, `accumulated` or `none`.",
    "budget_error": "Whether to find out which ops the output error comes from: `auto`, `on` or `off`.",
    "reference": "The dtype of the reference for the errors of each op: `fp32` or `fp64`.",
    "tolerance": "The tolerance that was asked for; `null` for that of each precision.",
    "seed": "The random seed of every run.",
    "batches": "Number of batches that were run.",
    "times": "Whether times were compared: `on` or `off`.",
    "predict": "Whether the runs were predicted although the device is here.",
    "torch_version": "The release of torch to predict for; `null` for the installed one.",
    "scenario": "The scenario of the times in `timing`: `offline` or `realtime`; `null` without one.",
    "what_if": "The formats whose output error was predicted.",
    "prefer": "What the recommendation is to gain: `speed`, `memory` or `accuracy`.",
    "steps": "Steps of training in each run; 0 if only the forward pass was run.",
    "without_kernel": "Kernels that were treated as missing.",
    "fail_on": "The scan's `--fail-on`, which decides what fails in JUnit; missing in a result of the Python API.",
    "baseline": "`true` if the scan had a baseline, with which findings that rest on times do not fail.",
}
