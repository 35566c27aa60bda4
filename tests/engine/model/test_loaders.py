"""All kinds of targets: scripts, packages, loaders, arrays, weights, zoos, wrapped and lazy models; their code."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import re
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EXAMPLES, ROOT, Call, SharedScan
from helpers import run_printed
from torch import nn
from user_files import NET

from lowprec_check import ScanResult, UsageError, scan
from lowprec_check.analysis.snippet import snippet
from lowprec_check.engine.model.load_target import load_target
from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.torchkit.devices import seed_everything
from lowprec_check.torchkit.output_comparison import compare_outputs
from lowprec_check.torchkit.pytree import leaves

Write = Callable[..., Path]

SCRIPT = """
import argparse
def main():
    options = argparse.ArgumentParser()
    options.add_argument("--rate", default=0.1)
    options.parse_args()
    nn.Softmax(0)(torch.ones(3))
    net = Net().eval()
    try:
        output = net({call})
    except Exception:
        raise AssertionError("a handler in the script")
    raise AssertionError("the script goes on")
if __name__ == "__main__":
    main()
"""

LOADER = """
from torch.utils.data import DataLoader, TensorDataset
model = Net().eval()
inputs = DataLoader(TensorDataset(torch.randn(8, 3), torch.arange(8)), batch_size=4)
"""


# -- scripts


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("torch.ones(4, 3)", ["model(inputs)"]),
        ("torch.ones(4, 3), 2.0", ["model(*inputs)"]),
        ("torch.ones(4, 3), scale=2.0", ["model(**inputs)"]),
        ("x=torch.ones(4, 3)", ["model(**inputs)"]),
    ],
)
def test_a_script_is_run_to_its_first_call_of_a_model(here: Path, write: Write, call: str, names: list[str]) -> None:
    write(NET + SCRIPT.format(call=call), "train.py")
    target = load_target("train.py")
    assert [target.form] == names
    assert type(target.model).__name__ == "Net"
    assert target.model(*target.args, **target.kwargs).shape == (4, 2)
    assert target.taken == "called at train.py:19, the first call of a model in the script"


def test_a_script_that_defines_only_its_model_is_run_for_its_inputs(here: Path, write: Write) -> None:
    write(NET + "model = Net()\nif __name__ == '__main__':\n    model(torch.ones(5, 3))", "train.py")
    assert load_target("train.py").args[0].shape == (5, 3)
    assert load_target("train.py", ("2x3",)).args[0].shape == (2, 3)


def test_a_script_that_fails_or_calls_no_model(here: Path, write: Write) -> None:
    write(NET + "if __name__ == '__main__':\n    raise OSError('no data')", "train.py")
    with pytest.raises(UsageError, match=r"OSError at train\.py:11: no data"):
        load_target("train.py")
    write(NET + "if __name__ == '__main__':\n    print('nothing')", "train.py")
    with pytest.raises(UsageError, match="defines no `inputs`"):
        load_target("train.py")


CALLS = {
    "in a handler of everything": "try:\n    Net()(torch.ones(4, 3))\nexcept:\n    raise ValueError('after the call')",
    "in a thread": "import threading\nt = threading.Thread(target=lambda: Net()(torch.ones(4, 3)))\nt.start()\n"
    "t.join()",
    "after one in another process": "import os\npid = os.fork()\nif pid == 0:\n    Net()(torch.ones(1, 3))\n"
    "    os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0\nNet()(torch.ones(4, 3))",
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("call", CALLS)
def test_the_call_of_a_script_is_found(here: Path, write: Write, call: str) -> None:
    write(NET + "if __name__ == '__main__':\n" + textwrap.indent(CALLS[call], "    "), "train.py")
    assert load_target("train.py").args[0].shape == (4, 3)


def test_a_script_that_needs_arguments(here: Path, write: Write) -> None:
    text = "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n"
    with pytest.raises(UsageError, match=r"SystemExit at train\.py:4: 2") as caught:
        load_target(str(write(text, "train.py")))
    assert "Give a script its arguments after --" in (caught.value.hint or "")
    path = write(text + "from torch import nn, ones\nnn.Linear(int(p.parse_args().data), 2)(ones(4, 3))", "wide.py")
    assert load_target(str(path), arguments=("3",)).args[0].shape == (4, 3)


@pytest.mark.parametrize("init", [True, False])
def test_a_script_with_relative_imports(here: Path, write: Write, init: bool) -> None:
    if init:
        write("", "parts/__init__.py")
    write(NET, "parts/net.py")
    main = "from .net import Net, torch\nif __name__ == '__main__':\n    Net()(torch.ones(4, 3))"
    write(main, "parts/train.py")
    assert load_target("parts/train.py").args[0].shape == (4, 3)


def test_a_call_inside_an_installed_package_is_that_of_the_script(here: Path, write: Write) -> None:
    write("def run(model, x):\n    return model(x)\n", "site-packages/helper.py")
    text = "import sys\nsys.path.insert(0, 'site-packages')\nimport helper\n"
    target = load_target(str(write(NET + text + "helper.run(Net(), torch.ones(4, 3))", "train.py")))
    assert target.source == "train.py:13"


@pytest.mark.parametrize(
    ("argument", "shapes"), [("[torch.ones(4, 3)]", [(4, 3)]), ("{'x': torch.ones(4, 3)}", [(4, 3)])]
)
def test_a_script_that_calls_a_model_on_a_container(
    here: Path, write: Write, argument: str, shapes: list[tuple[int, ...]]
) -> None:
    write(
        NET + f"class First(Net):\n    def forward(self, xs, flag=0):\n        return xs\nFirst()({argument})",
        "train.py",
    )
    target = load_target("train.py")
    assert (target.form, len(target.args), target.kwargs) == ("model(*inputs)", 1, {})
    assert [tuple(tensor.shape) for _, tensor in leaves(target.model(*target.args))] == shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "model = torch.compile(Net().eval(), backend='eager', fullgraph=True)\nmodel(torch.ones(4, 3))",
        "with torch.inference_mode():\n    Net().eval()(torch.ones(4, 3))",
    ],
)
def test_a_script_with_an_unusual_model_can_be_scanned(here: Path, write: Write, call: Call, code: str) -> None:
    done = call(
        "scan",
        str(write(NET + code, "train.py")),
        "-p",
        "half,autocast-bf16",
        "--json",
        "-",
        "--times",
        "off",
        "--further-inputs",
        "0",
    )
    assert done.returncode == 0, done.stderr
    assert [run.status for run in ScanResult.from_json(done.stdout.encode()).runs] == ["ok"] * 3


def test_the_call_of_modules_is_as_before_after_a_script(here: Path, write: Write) -> None:
    before, main = nn.Module.__call__, sys.modules["__main__"]
    write(NET + SCRIPT.format(call="torch.ones(4, 3)"), "train.py")
    load_target("train.py")
    assert nn.Module.__call__ is before
    assert sys.modules["__main__"] is main


# -- inputs


def test_a_data_loader_gives_one_batch_without_its_targets(here: Path, write: Write) -> None:
    target = load_target(str(write(NET + LOADER)))
    assert target.args[0].shape == (4, 3)
    assert target.kwargs == {}
    assert "1 of its 2 elements" in target.notes[0]


@pytest.mark.parametrize(
    ("inputs", "kept"),
    [
        ("DataLoader([{'x': torch.ones(3), 'label': 1}], batch_size=1)", ["x"]),
        ("DataLoader([{'x': torch.ones(3), 'scale': 2.0}], batch_size=1)", ["x", "scale"]),
    ],
)
def test_a_batch_with_names_keeps_those_that_forward_accepts(
    here: Path, write: Write, inputs: str, kept: list[str]
) -> None:
    text = f"from torch.utils.data import DataLoader\nmodel = Net().eval()\ninputs = {inputs}"
    assert list(load_target(str(write(NET + text))).kwargs) == kept


LOADED = {
    "with workers": (
        "DataLoader(ones, batch_size=4, num_workers=2, persistent_workers=True)",
        "tuple(next(iter(inputs)))",
    ),
    "an iterator": ("iter(DataLoader(ones, batch_size=4))", "tuple(next(inputs))"),
    "a generator": ("(x for x in [torch.ones(4, 3)])", "next(inputs)"),
    "a dataset": ("ones", "tuple(torch.utils.data.default_collate([inputs[0]]))"),
    "one argument with names": ("DataLoader([{'a': torch.ones(3)}], batch_size=1)", "(next(iter(inputs)),)"),
    "one argument that is a list": ("DataLoader([([torch.ones(3)] * 2, 1)])", "tuple(next(iter(inputs))[:1])"),
}


@pytest.mark.parametrize("kind", LOADED)
def test_a_batch_is_taken_as_the_printed_code_takes_it(here: Path, write: Write, kind: str) -> None:
    inputs, code = LOADED[kind]
    text = f"""{NET}
from torch.utils.data import DataLoader, TensorDataset
class Any(Net):
    def forward(self, x):
        return super().forward(x if isinstance(x, torch.Tensor) else x["a"] if isinstance(x, dict) else x[1])
model, ones = Any().eval(), TensorDataset(torch.ones(8, 3))
inputs = loader = {inputs}"""
    running = {*threading.enumerate(), *multiprocessing.active_children()}
    target = load_target(str(write(text)))
    assert {*threading.enumerate(), *multiprocessing.active_children()} <= running
    assert target.setup[1:] == (f"inputs = {code}",)
    names = run_code(text, "\n".join(target.setup))
    mine, pasted = target.model(*target.args, **target.kwargs), eval(target.form, names)
    assert mine.shape == pasted.shape
    if kind == "with workers":  # a loader that is garbage waits for them, 10 s
        names["loader"]._iterator._shutdown_workers()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("DataLoader([])", "`inputs` is empty"),
        ("TensorDataset(torch.ones(0, 3))", "`inputs` is empty"),
        ("iter(())", "`inputs` is empty"),
        ("DataLoader(Broken(), num_workers=1)", r"FileNotFoundError at mymodel\.py:\d+: image"),
        ("Broken()", r"FileNotFoundError at mymodel\.py:\d+: image"),
        ("DataLoader([object()])", "Taking a batch from `inputs` failed: TypeError"),
        ("numpy.array(['text'])", "A NumPy array in `inputs` cannot become a tensor: can't convert np.ndarray of type"),
        ("[numpy.ones(3, dtype='>f4')]", "cannot become a tensor: given numpy array has byte order"),
    ],
)
def test_inputs_without_a_batch(here: Path, write: Write, inputs: str, message: str) -> None:
    text = f"""{NET}
import numpy
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Broken(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise FileNotFoundError("image")
model = Net().eval()
inputs = {inputs}"""
    with pytest.raises(UsageError, match=message) as caught:
        load_target(str(write(text)))
    assert caught.value.hint or "Taking" in message


@pytest.mark.parametrize("wrap", ["nn.DataParallel", "torch.compile"])
def test_the_targets_of_a_batch_are_left_out_for_a_wrapped_model(here: Path, write: Write, wrap: str) -> None:
    assert len(load_target(str(write(f"{NET}{LOADER}model = {wrap}(model)"))).args) == 1


def test_inputs_that_need_the_number_of_the_batch(here: Path, write: Write) -> None:
    text = f"{NET}model = Net().eval()\ndef inputs(batch):\n    return torch.full((4, 3), float(batch))"
    target = load_target(str(write(text)))
    assert target.args[0].max() == 0
    assert target.batch(2).args[0].max() == 2
    assert run_code(text, "\n".join(target.setup))["inputs"].shape == (4, 3)


def test_a_default_of_the_inputs_is_kept_for_the_first_batch(here: Path, write: Write) -> None:
    target = load_target(str(write(f"{NET}model = Net().eval()\ndef inputs(size=4):\n    return torch.ones(size, 3)")))
    assert target.args[0].shape == (4, 3)


@pytest.mark.parametrize(
    ("argument", "second"),
    [("batch_size=4", 4), ("scale=4.0", 4), ("batch=0", 1), ("seed=4", 1), ("*batch", 1), ("device='cpu'", 4)],
)
def test_an_argument_with_a_default_is_the_number_of_the_batch_only_if_it_counts(
    here: Path, write: Write, argument: str, second: int
) -> None:
    name = argument.lstrip("*").split("=")[0]
    value = f"{name}[0] if {name} else 0" if "*" in argument else f"4 if {name} == 'cpu' else {name}"
    text = f"{NET}model = Net().eval()\ndef inputs({argument}):\n    return ({value}) + 0.5 * torch.rand(4, 3)"
    assert int(load_target(str(write(text))).batch(1).args[0].max()) == second


def test_a_list_or_packed_sequence_is_one_argument_where_forward_takes_one(here: Path, write: Write) -> None:
    pack = "from torch.nn.utils.rnn import pack_sequence\nmodel = nn.GRU(3, 2).eval()\n"
    target = load_target(str(write(f"{NET}{pack}inputs = pack_sequence([torch.ones(4, 3)])")))
    assert target.form == "model(inputs)"
    assert target.model(*target.args)[0].data.shape == (4, 2)
    one = (
        "class One(Net):\n    def forward(self, xs):\n        return super().forward(xs[0] + xs[1])\n"
        "model = One().eval()\n"
    )
    assert load_target(str(write(f"{NET}{one}inputs = [torch.ones(4, 3)] * 2"))).form == "model(inputs)"
    assert (
        load_target(str(write(f"{NET}model = Net().eval()\ninputs = [torch.ones(4, 3), 2.0]"))).form == "model(*inputs)"
    )


@pytest.mark.parametrize(
    "inputs",
    ["numpy.ones((4, 3))", "(numpy.ones((4, 3), dtype='float32'), 2.0)", "{'x': numpy.ones((4, 3)), 'scale': 2.0}"],
)
def test_arrays_become_tensors_in_fp32(here: Path, write: Write, inputs: str) -> None:
    target = load_target(str(write(f"import numpy\n{NET}model = Net().eval()\ninputs = {inputs}")))
    [(_, tensor)] = leaves(target.inputs)
    assert tensor.dtype == torch.float32
    assert "NumPy arrays in `inputs` were converted to tensors" in target.notes[0]


def test_the_api_takes_data_loaders_and_arrays() -> None:
    import numpy

    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8))
    model = nn.Linear(3, 2).eval()
    for inputs in (torch.utils.data.DataLoader(data, batch_size=4), data, numpy.ones((4, 3))):
        result = scan(model, inputs, precisions="half", isolation="none", times="off")
        assert result.run("half").status == "ok"


# -- wrapped and lazy models


def test_the_module_inside_data_parallel_is_scanned(here: Path, write: Write) -> None:
    target = load_target(str(write(NET + "model = nn.DataParallel(Net().eval())\ninputs = torch.ones(4, 3)")))
    assert type(target.model).__name__ == "Net"
    assert target.name == "Net"
    assert "the module inside DataParallel is scanned, on one device" in target.notes


def test_lazy_modules_are_initialized_by_a_call(here: Path, write: Write) -> None:
    lazy = "model = nn.Sequential(nn.LazyLinear(4), nn.ReLU()).eval()\n"
    target = load_target(str(write(f"{NET}{lazy}inputs = torch.ones(2, 7)")))
    assert target.model[0].weight.shape == (4, 7)  # type: ignore[index, union-attr]
    with pytest.raises(UsageError, match="lazy modules, and the call that initializes them failed"):
        load_target(str(write(f"{NET}{lazy}inputs = (torch.ones(2, 7), 3)", "other.py")))


def test_the_api_leaves_a_lazy_model_as_it_is() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    assert scan(model, torch.ones(2, 7), precisions="half", isolation="none", times="off").run("half").status == "ok"
    assert isinstance(model[0], nn.LazyLinear)
    cannot_be_copied = nn.Sequential(nn.LazyConv1d(4, 1), nn.LazyBatchNorm1d()).eval()
    assert (
        scan(cannot_be_copied, torch.ones(2, 3, 5), precisions="half", isolation="none", times="off").run("half").status
        == "ok"
    )


# -- weights


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A state dict of ``Net`` with known values."""
    return {"linear.weight": torch.full((2, 3), 0.5), "linear.bias": torch.zeros(2)}


def saved(found: Any, name: str) -> str:
    """Save ``found`` in the current folder; return its name."""
    if name.endswith(".safetensors"):
        from safetensors.torch import save_file

        save_file(found, name)
    else:
        torch.save(found, name)
    return name


@pytest.mark.parametrize(
    ("name", "around"),
    [
        ("w.pt", lambda state: state),
        ("w.safetensors", lambda state: state),
        ("w.pt", lambda state: {"epoch": 3, "state_dict": state}),
        ("w.pt", lambda state: {f"module.{name}": value for name, value in state.items()}),
        ("w.pt", lambda state: {"model": {f"_orig_mod.{name}": value for name, value in state.items()}}),
        ("w.pt", lambda state: {name: value.half() for name, value in state.items()}),
        ("w.pt", lambda state: {"net": state, "epoch": 3}),
        ("w.pt", lambda state: {f"_orig_mod.module.{name}": value for name, value in state.items()}),
        ("w.pt", lambda state: {"ema": {f"model._orig_mod.{name}": value for name, value in state.items()}}),
    ],
)
def test_weights_are_loaded_also_by_the_printed_code(
    here: Path, write: Write, weights: dict[str, torch.Tensor], name: str, around: Callable[[Any], Any]
) -> None:
    text = NET + "model = Net().eval()\ninputs = torch.ones(1, 3)"
    target = load_target(str(write(text)), weights=saved(around(weights), name))
    assert target.model.linear.weight.unique().tolist() == [0.5]  # type: ignore[operator, union-attr]
    names = run_code(text, "\n".join(target.setup))
    assert names["model"].linear.weight.unique().tolist() == [0.5]


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_a_tied_weight_may_be_saved_once(here: Path, write: Write, name: str, prefix: str) -> None:
    """As ``safetensors.torch.save_model`` does."""
    text = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))

model, inputs = Tied().eval(), torch.tensor([[1, 2]])
"""
    target = load_target(str(write(text)), weights=saved({f"{prefix}embed.weight": torch.full((5, 3), 0.5)}, name))
    assert target.model.head.weight.unique().tolist() == [0.5]  # type: ignore[operator, union-attr]
    names = run_code(text, "\n".join(target.setup))
    assert names["model"].head.weight is names["model"].embed.weight
    assert names["model"].head.weight.unique().tolist() == [0.5]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.ones(2), "holds no state dict"),
        ({"one": {"a": torch.ones(1)}, "two": {"b": torch.ones(1)}}, r"holds several state dicts \(one, two\)"),
        ({"linear.weight": torch.ones(2, 3)}, r"1 of 2 names of the model are missing in the file \(linear.bias\)"),
        (
            {"linear.weight": torch.ones(5, 3), "linear.bias": torch.ones(2)},
            r"tensors have another shape \(linear.weight: \(5, 3\) instead of \(2, 3\)\)",
        ),
        (
            {"linear.weight": torch.ones(2, 3), "linear.bias": torch.ones(2), "head": torch.ones(1)},
            r"1 of 3 names in the file are unknown to the model \(head\)",
        ),
        (nn.Linear(2, 2), r"w\.pt is not a file of weights: it holds an object of torch.nn"),
        (b"garbage", "is not a file of weights"),
    ],
)
def test_weights_that_do_not_fit(here: Path, write: Write, content: Any, message: str) -> None:
    path = write(NET + "model = Net().eval()\ninputs = torch.ones(1, 3)")
    if isinstance(content, bytes):
        Path("w.pt").write_bytes(content)
    else:
        saved(content, "w.pt")
    with pytest.raises(UsageError, match=message):
        load_target(str(path), weights="w.pt")


@pytest.mark.parametrize(("weights", "problem"), [("w.pt", "No such file: w.pt"), (".", ". is a folder")])
def test_weights_that_are_no_file_are_named_before_the_model_is_made(here: Path, weights: str, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{problem}.\n")) as caught:
        TargetSpec("model.py", weights=Path(weights)).check()
    assert caught.value.hint == "Give --weights the path of a saved state dict."


# -- zoos

BERT = "bert,num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=32,vocab_size=50"
WHISPER = (
    "whisper,encoder_layers=1,decoder_layers=1,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=32,decoder_ffn_dim=32,max_source_positions=50,vocab_size=60000"
)
VIT = (
    "ViTForImageClassification,num_hidden_layers=1,hidden_size=32,num_attention_heads=2,"
    "intermediate_size=32,image_size=32"
)
ZOO = [
    "torchvision:resnet18",
    "timm:resnet10t",
    f"transformers:{BERT}",
    f"transformers:{BERT.replace('bert', 'BertForMaskedLM', 1)}",
    f"transformers:{BERT.replace('bert', 'BertConfig', 1)}",
    "transformers:t5,num_layers=1,d_model=32,d_ff=32,num_heads=2,d_kv=16,vocab_size=100",
    f"transformers:{VIT}",
    f"transformers:{WHISPER}",
    f"transformers:{VIT.replace('ViTForImageClassification', 'videomae')},num_frames=4",
    "transformers:swin,embed_dim=24,depths=[1,1],num_heads=[2,2],image_size=32,window_size=4",
    "transformers:funnel,block_sizes=[1,1],d_model=32,n_head=2,d_inner=32,d_head=16,vocab_size=100",
    "transformers:xlnet,n_layer=1,d_model=32,n_head=2,d_inner=32,vocab_size=100",
    "transformers:encodec,num_filters=4,hidden_size=16,codebook_size=8,codebook_dim=16",
    f"transformers:{BERT.replace('bert', 'vilt', 1)},image_size=64",
    "torchvision:s3d",
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", ZOO)
def test_models_by_name(spec: str) -> None:
    inputs = ("1x3x64x64",) if spec in ("torchvision:resnet18", "timm:resnet10t") else ()
    target = load_target(spec, inputs)
    assert not target.model.training
    with torch.no_grad():
        output = target.model(*target.args, **target.kwargs)
        again = load_target(spec, inputs)
        assert compare_outputs(
            [tensor for _, tensor in leaves(output)],
            [tensor for _, tensor in leaves(again.model(*again.args, **again.kwargs))],
        ).distance == pytest.approx(0.0, abs=1e-6)
        with torchvision_works():
            names = run_code("", "\n".join(["import torch", *target.setup]))
        names["output"] = eval(target.form, names)
    shapes = [[tuple(tensor.shape) for _, tensor in leaves(found)] for found in (output, names["output"])]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_a_folder_of_transformers_with_and_without_weights(here: Path) -> None:
    with torchvision_works():
        import transformers

        tiny = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.BertConfig(**tiny, vocab_size=50)
        model = transformers.BertForMaskedLM(config).eval()
        model.save_pretrained("with_weights")
        config.architectures = ["BertForMaskedLM"]
        config.save_pretrained("without")
    target = load_target("hf:with_weights")
    mine, loaded = (found.state_dict()["bert.embeddings.word_embeddings.weight"] for found in (model, target.model))
    assert torch.equal(mine, loaded)
    target = load_target("hf:without")
    assert type(target.model).__name__ == "BertForMaskedLM"
    assert target.notes == ("without has no weights: they are random",)
    config.num_hidden_layers = 2
    config.save_pretrained("with_weights")
    [note] = load_target("hf:with_weights").notes
    assert "with_weights lacks 16 of the weights (bert.encoder.layer.1." in note
    Path("without/model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot load the weights in without: SafetensorError: ") as caught:
        load_target("hf:without")
    assert "\n" not in caught.value.message
    Path("without/model.safetensors").rename("without/model-1-of-2.safetensors")
    Path("without/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2-of-2.safetensors"}}')
    with pytest.raises(UsageError, match=r"without has no model-2-of-2\.safetensors, which model\.safetensors\.index"):
        load_target("hf:without")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"nowhere is not a folder; nothing is downloaded"),
        ("{", r"Cannot read nowhere/config\.json"),
        ('{"_class_name": "UNet2DModel"}', "a configuration of diffusers"),
        ('{"model_type": "bert", "auto_map": {"AutoModel": "own.Model"}}', "names code of its own"),
        ('{"model_type": "nonsense"}', r"transformers cannot read nowhere/config\.json"),
    ],
)
def test_a_folder_that_is_none_of_transformers(here: Path, config: str | None, message: str) -> None:
    if config is not None:
        Path("nowhere").mkdir()
        Path("nowhere/config.json").write_text(config, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_target("hf:nowhere")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transformers:Berd", "transformers has no model 'Berd'"),
        ("transformers:pipeline", "neither a model nor its configuration"),
        ("transformers:bert,hidden=3", "BertConfig has no option 'hidden'"),
        ("transformers:bert,hidden_size", "'hidden_size' is not an option"),
        ("transformers:BertModel,hidden_size=63", "multiple of the number of attention heads"),
        ("transformers:encoder-decoder", "transformers has no base model for EncoderDecoderConfig"),
        ("transformers:BertModel,hidden_size=[1", r"BertConfig cannot be made .* expected int, got str"),
        ("transformers:perceiver,num_blocks=1,num_latents=2,d_latents=8", "PerceiverModel takes 'inputs'"),
        ("transformers:time_series_transformer,prediction_length=8", "'past_values', 'past_time_features', 'past_obs"),
        ("transformers:llama", r"has 6\.\d billion parameters"),
        ("timm:resnet1", "timm has no model 'resnet1'"),
        ("torchvision:resnet81", "torchvision has no model 'resnet81'"),
        ("torchvision:", "'torchvision:' does not name a model"),
    ],
)
def test_names_that_a_zoo_does_not_have(spec: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**34}))
    with pytest.raises(UsageError, match=message) as caught:
        load_target(spec)
    assert caught.value.hint


def test_a_file_that_imports_torchvision_works(here: Path, write: Write) -> None:
    """Also where torchvision's compiled ops do not load, because torch is another build than it was made for."""
    text = "import torch, torchvision\nfrom torchvision.ops import nms\n"
    text += "model = torchvision.models.mobilenet_v3_small(weights=None).eval()\ninputs = torch.ones(1, 3, 32, 32)\n"
    target = load_target(str(write(text)))
    assert target.model(*target.args).shape == (1, 1000)


# -- the printed code


def run_code(text: str, code: str) -> dict[str, Any]:
    """Execute ``code`` behind ``text``, as if it were pasted there."""
    names: dict[str, Any] = {"__name__": "pasted"}
    seed_everything(0)
    exec(compile(text, "mymodel.py", "exec"), names)
    ast.parse(code)
    return run_printed(code, names)


FORMS = {
    "one tensor": ("model = Net().eval()\ninputs = torch.randn(4, 3)", "", (), "x = inputs.half()"),
    "integers": (
        "model = nn.Embedding(5, 3).eval()\ninputs = torch.tensor([1, 2])",
        "",
        (),
        "model.half()\nwith torch.no_grad():",
    ),
    "a tuple": (
        "model = Net().eval()\ninputs = (torch.randn(4, 3), 2.0)",
        "",
        (),
        "x = [inputs[0].half(), *inputs[1:]]",
    ),
    "a dict": (
        "model = Net().eval()\ninputs = {'x': torch.randn(4, 3), 'scale': 2.0}",
        "",
        (),
        'x = {**inputs, "x": inputs["x"].half()}',
    ),
    "nested": (
        "class Sum(nn.Linear):\n    def forward(self, xs):\n        return super().forward(xs[0] + xs[1])\n"
        "model = Sum(3, 2).eval()\ninputs = ([torch.randn(4, 3), torch.randn(4, 3)],)",
        "",
        (),
        "x = tree_map_only(",
    ),
    "functions": (
        "def model():\n    return Net().eval()\ndef inputs():\n    return torch.randn(4, 3)",
        "",
        (),
        "net = model().half()\nx = inputs().half()",
    ),
    "an attribute": ("other = Net().eval()\ninputs = torch.randn(4, 3)", ":other", (), "model = other\n"),
    "a class and shapes": ("", ":Net", ("4x3",), "model = Net().half()\ninputs = torch.randn(4, 3).half()\n"),
    "named shapes": (
        "model = Net().eval()",
        "",
        ("x=4x3",),
        "inputs = {'x': torch.randn(4, 3)}",
    ),
    "several shapes": (
        "class Add(nn.Linear):\n    def forward(self, x, ids, mask):\n        return super().forward(x)[ids] * mask\n"
        "model = Add(3, 2).eval()",
        "",
        ("40x3", "5:int64", "5x2:bool"),
        "inputs = (torch.randn(40, 3), torch.randint(",
    ),
    "a data loader": (LOADER, "", (), "x = next(iter(inputs))[0].half()"),
    "a list as one argument": (
        "class Sum(nn.Linear):\n    def forward(self, xs):\n        return super().forward(xs[0] + xs[1])\n"
        "model = Sum(3, 2).eval()\ninputs = [torch.randn(4, 3), torch.randn(4, 3)]",
        "",
        (),
        "output = model(x)",
    ),
    "arrays of several dtypes": (
        "import numpy\nclass At(nn.Linear):\n    def forward(self, x, ids):\n        return super().forward(x)[ids]\n"
        "model = At(3, 2).eval()\ninputs = {'x': numpy.ones((4, 3))[::-1], 'ids': numpy.array([1, 2])}",
        "",
        (),
        'inputs["ids"] = torch.from_numpy(inputs["ids"])',
    ),
    "a tuple with arrays": (
        "import numpy\nmodel = Net().eval()\ninputs = (numpy.ones((4, 3)), 2.0)",
        "",
        (),
        "x = (torch.from_numpy(inputs[0]).float(), inputs[1])",
    ),
    "nested arrays": (
        "import numpy\nclass At(nn.Linear):\n    def forward(self, x):\n"
        "        return super().forward(x['a'][0])[x['b']]\nmodel = At(3, 2).eval()\n"
        "inputs = ({'a': [numpy.ones((4, 3))], 'b': numpy.array([1, 2])},)",
        "",
        (),
        "x_ = tree_map_only(numpy.ndarray, ",
    ),
    "made in inference mode": (
        "with torch.inference_mode():\n    model = Net().eval()\ninputs = torch.randn(4, 3)",
        "",
        (),
        "net = copy.deepcopy(model)",
    ),
    "an array": ("import numpy\nmodel = Net().eval()\ninputs = numpy.ones((4, 3))", "", (), "torch.from_numpy(inputs)"),
    "data parallel": (
        "model = nn.DataParallel(Net()).eval()\ninputs = torch.randn(4, 3)",
        "",
        (),
        "net = model.module",
    ),
    "lazy": ("model = nn.LazyLinear(2).eval()\ninputs = torch.randn(4, 3)", "", (), "model(inputs)  # initializes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_printed_code_runs_as_printed(here: Path, write: Write, call: Call, form: str) -> None:
    text, attribute, inputs, expected = FORMS[form]
    path = write(NET + text)
    shapes = [option for shape in inputs for option in ("--inputs", shape)]
    result = scan_untimed(call, f"{path}{attribute}", *shapes)
    check_printed_code(result, NET + text, expected=expected)


@pytest.mark.slow
def test_the_printed_code_of_a_package_imports_it(here: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("", "parts/__init__.py")
    write(NET + "inputs = torch.randn(4, 3)\n", "parts/net.py")
    monkeypatch.syspath_prepend(str(here))
    expected = "import torch\nfrom parts.net import Net, inputs\n\nmodel = Net().half()\n"
    target = load_target("parts.net:Net")
    result = scan(target.model, target.args[0], precisions="half", isolation="none", times="off")
    info = __import__("msgspec").structs.replace(result.model, setup=list(target.setup))
    code = snippet(result.run("half").key, info)
    assert code.startswith(expected)
    assert run_code("", code)["output"].dtype == torch.float16


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_printed_code_of_the_examples_gives_the_reported_error(example: Path, shared_scan: SharedScan) -> None:
    scanned = shared_scan(example.relative_to(ROOT))
    check_printed_code(scanned.result, example.read_text(encoding="utf-8"), errors=True)


def scan_untimed(call: Call, *arguments: str) -> ScanResult:
    """Scan with the command, whatever it finds."""
    less = ("--times", "off", "--errors", "none", "--no-plan", "--further-inputs", "0", "--isolation", "none")
    done = call("scan", *arguments, "--json", "-", "--fail-on", "never", "-q", *less)
    assert done.returncode == 0, done.stderr
    return ScanResult.from_json(done.stdout.encode())


def check_printed_code(result: ScanResult, text: str, *, expected: str | None = None, errors: bool = False) -> None:
    """Run the code for every precision that passed; with ``errors``, its output has the reported error."""
    fp32 = run_code(text, snippet(result.run("fp32").key, result.model))["output"]
    passed = [run for run in result.runs if run.is_low and run.base is None and run.status == "ok"]
    assert passed
    for run in passed:
        code = snippet(run.key, result.model)
        with contextlib.redirect_stdout(sys.stderr):
            output = run_code(text, code)["output"]
        if errors:
            tensors = [[tensor for _, tensor in leaves(found)] for found in (output, fp32)]
            assert run.output_error is not None
            assert compare_outputs(*tensors).error.rel_l2 == pytest.approx(run.output_error.rel_l2, rel=0.05)
        if run.precision == "half" and expected is not None:
            assert expected in code
    assert result.recommendation is not None
    run_code(text, result.recommendation.code)
