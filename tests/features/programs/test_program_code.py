"""The code to paste for a mixture: it is executed in the script, against the script's own objects."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from program_parts import PARTS
from shared_result import shared_result

from lowprec_check.engine.model.target_spec import TargetSpec
from lowprec_check.engine.model.torchvision_ops import torchvision_works
from lowprec_check.errors import UsageError
from lowprec_check.features.programs.program_code import forms_of_code, patched, why_no_code
from lowprec_check.features.programs.program_file import _run_cast, _watched
from lowprec_check.features.programs.program_scan import Assignment, PastedCode, ProgramRun, ProgramScan, VariableError
from lowprec_check.features.programs.variables import VariableComparison, check_variables
from lowprec_check.schema.options import ScanOptions

OPTIONS = ScanOptions()


class Tried:
    """A script, and the program again with code in it, or with casts from outside."""

    def __init__(self, path: Path, body: str, compare: tuple[str, ...] = ()) -> None:
        path.write_text(textwrap.dedent(body))
        self.path, self.spec, self.compare = path, TargetSpec(str(path)), compare
        self.seen: ProgramScan = _watched(compare, {}, self.spec, OPTIONS).seen()
        self.methods = {(model.key, model.method): model.name for model in self.seen.models}
        self._run({}, {})

    def _run(self, assigned: Mapping[str, Assignment], texts: Mapping[str, str]) -> ProgramRun:
        ended = _run_cast(assigned, self.methods, self.compare, self.path.parent, texts, (1, None), self.spec, OPTIONS)
        untimed = [msgspec.structs.replace(error, seconds=0.0) for error in ended.run.errors]
        return msgspec.structs.replace(ended.run, errors=untimed)

    def assigned(self, precision: str, **others: str) -> dict[str, Assignment]:
        """All models in a precision, but for some, by the names of their classes."""
        keys = [model.key for model in self.seen.models]
        return {key: Assignment(others.get(key.partition("#")[0], precision)) for key in keys}

    def outside(self, assigned: Mapping[str, Assignment]) -> ProgramRun:
        """With casts by hooks, which the code has to equal."""
        return self._run(assigned, {})

    def forms(self, assigned: Mapping[str, Assignment]) -> list[list[PastedCode]]:
        """The forms of the code."""
        assert why_no_code(self.seen, assigned) == ""
        return list(forms_of_code(self.seen, assigned))

    def pasted(self, form: list[PastedCode], keys: Mapping[str, Assignment]) -> ProgramRun:
        """With the code in the script."""
        return self._run(keys, patched(self.seen, form))


MAIN = """
    def main():
        pipe = Pipe(scale=3e4)
        for seed in range(2):
            x = pipe(torch.arange(14).reshape(2, 7))
        return x

    if __name__ == "__main__":
        image = (main() * 60 + 128).clamp(0, 255).to(torch.uint8).numpy()
        text = "a cat"
"""


@pytest.mark.parametrize("vae", ["fp32", "bfloat16", "autocast-bf16"])
def test_the_code_at_the_borders_does_as_casts_from_outside(tmp_path: Path, vae: str) -> None:
    tried = Tried(tmp_path / "infer.py", PARTS + textwrap.dedent(MAIN), ("image", "text"))
    assigned = tried.assigned("half", Vae=vae)
    form, *_ = tried.forms(assigned)
    # Before the loop in which the pipeline is called, by the variable of the function
    assert [code.line for code in form] == ["infer.py:43"]
    assert "pipe.unet.to(torch.float16)" in form[0].text
    outside, pasted = tried.outside(assigned), tried.pasted(form, assigned)
    assert pasted.problem == ""
    assert [each.error for each in pasted.errors] == pytest.approx([each.error for each in outside.errors], rel=1e-2)
    assert pasted.weight_bytes == outside.weight_bytes
    image, text = pasted.variables
    assert image == outside.variables[0]
    assert image.error is not None
    assert image.error < 1e-2
    if vae != "fp32":  # with it, no pixel differs
        assert image.psnr is not None
        assert image.psnr > 40
    assert (text.name, text.error) == ("text", 0)


def test_a_black_picture_is_called_black(tmp_path: Path) -> None:
    body = """
        vae = Vae(3e7).eval()
        with torch.no_grad():
            x = vae.decode(torch.ones(2, 16))
        image = x.clamp(0, 1).mul(255).to(torch.uint8)
    """
    tried = Tried(tmp_path / "infer.py", PARTS + textwrap.dedent(body), ("image",))
    run = tried.outside(tried.assigned("half"))
    assert run.variables[0].is_black
    with pytest.raises(UsageError, match="no variable lost"):
        Tried(tmp_path / "infer.py", PARTS + textwrap.dedent(body), ("lost",))


def test_a_variable_of_a_program_that_ended_early_is_not_there(tmp_path: Path) -> None:
    for saves, variables in ((True, {"text": "a cat"}), (False, dict[str, str]())):
        comparison = VariableComparison(["text", "later"], tmp_path, saves=saves)
        comparison.read(functools.partial(dict, variables))
    # That fp32 did not leave the other one is said once, by a note
    assert [(each.name, each.error, each.note) for each in comparison.errors] == [
        ("text", None, "it is not there at the end")
    ]
    with pytest.raises(UsageError, match="no variable later"):
        check_variables(["later"], {}, was_stopped=False)
    check_variables(["later"], {}, was_stopped=True)


def test_variables_are_compared_where_the_calls_end_that_fp32_makes(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import torch\nnet, n = torch.nn.Linear(2, 2), 0\nwhile True:\n    n += 1\n    net(torch.ones(1, 2))\n"
    )
    models = {("Linear#0", ""): "net"}
    for assigned in ({}, {"Linear#0": Assignment("half")}):
        run = _run_cast(assigned, models, ["n"], tmp_path, {}, (5, 5), TargetSpec(str(script)), OPTIONS).run
    assert run.variables == [VariableError("n", 0.0)]
    assert len(run.errors) == 5


def test_a_script_that_keeps_results_cannot_run_again(tmp_path: Path) -> None:
    script = tmp_path / "kept.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n")
    models = {("Linear#0", ""): "first", ("Linear#1", ""): "second"}
    run = _run_cast({}, models, (), tmp_path, {}, (2, None), TargetSpec(str(script)), OPTIONS).run
    assert run.problem == "it calls only 1 of its 2 models then, as if it kept results of the run before"


def test_a_program_that_takes_too_long_is_no_fault_of_a_model(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time, torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\ntime.sleep(100)\n")
    options = ScanOptions(budget=0.1)
    run = _run_cast({}, {("Linear#0", ""): "net"}, (), tmp_path, {}, (1, None), TargetSpec(str(script)), options).run
    assert run.is_late
    assert run.problem == "it did not end within 0.4 s"


def test_a_model_in_fp32_takes_what_the_program_casts_to_the_dtype_of_another(tmp_path: Path) -> None:
    """As a pipeline does with images for a VAE."""
    body = """
        import torch
        class A(torch.nn.Linear): ...
        class B(torch.nn.Linear): ...
        a, b = A(4, 4), B(4, 4)
        with torch.no_grad():
            y = b(a(torch.ones(2, 4)).to(a.weight.dtype))
    """
    tried = Tried(tmp_path / "infer.py", body)
    assigned = tried.assigned("half", B="fp32")
    outside = tried.outside(assigned)
    assert outside.problem == ""
    assert all(error.error is not None and error.error < 1e-2 for error in outside.errors)
    alone, both = tried.forms(assigned)
    assert "mat1 and mat2" in tried.pasted(alone, assigned).problem
    assert tried.pasted(both, assigned).errors == outside.errors


def test_a_text_that_is_another_is_not_the_result(tmp_path: Path) -> None:
    body = "import torch\nnet = torch.nn.Linear(2, 2)\ntext = str(net(torch.ones(1, 2) / 3).tolist())\n"
    tried = Tried(tmp_path / "infer.py", body, ("text",))
    assigned = tried.assigned("half")
    run = msgspec.structs.replace(tried.outside(assigned), precisions=["half"])
    assert run.variables[0].note == "another text"
    assert not run.passes
    assert msgspec.structs.replace(run, variables=[]).passes


def test_a_script_in_16_bits_is_no_reference_in_fp32(tmp_path: Path) -> None:
    body = "import torch\nnet = torch.nn.Linear(4, 4).bfloat16()\nnet(torch.rand(2, 4).bfloat16())\n"
    (note,) = Tried(tmp_path / "infer.py", body).seen.notes
    assert note.startswith("net has weights in 16 bits or fewer in the script: runs of the program are compared with")


def test_a_model_that_no_variable_reaches_has_no_code(tmp_path: Path) -> None:
    body = """
        from torch import nn
        import torch
        print(nn.Linear(2, 2)(torch.ones(1, 2)))
    """
    tried = Tried(tmp_path / "infer.py", body)
    why = why_no_code(tried.seen, tried.assigned("half"))
    assert why == "There is no code to paste: no variable of the script reaches Linear, called at infer.py:4."


LOOP = """
    import torch
    nets = {"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)}
    x = torch.rand(2, 4)
    for net in nets.values():
        x = net(x)
"""


def test_models_that_a_variable_stands_for_in_turns_have_ways_of_their_own(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "infer.py", LOOP)
    assert [model.name for model in tried.seen.models] == ["nets['a']", "nets['b']"]
    assigned = {"Linear#0": Assignment("half"), "Linear#1": Assignment("fp32")}
    form, *_ = tried.forms(assigned)
    assert [(code.line, "nets['b']" in code.text) for code in form] == [("infer.py:5", False)]
    run, outside = tried.pasted(form, assigned), tried.outside(assigned)
    assert run.problem == ""
    assert run.errors == outside.errors
    assert run.weight_bytes == outside.weight_bytes


def test_a_variable_that_is_bound_again_names_the_model_at_its_line(tmp_path: Path) -> None:
    body = """
        import torch
        net = torch.nn.Linear(4, 4)
        x = net(torch.rand(2, 4))
        net = torch.nn.Linear(4, 4)
        x = net(x)
    """
    tried = Tried(tmp_path / "infer.py", body)
    assert [model.name for model in tried.seen.models] == ["net at infer.py:4", "net at infer.py:6"]
    assigned = tried.assigned("bfloat16")
    form, *_ = tried.forms(assigned)
    assert [code.line for code in form] == ["infer.py:4", "infer.py:6"]
    assert tried.pasted(form, assigned).errors == tried.outside(assigned).errors
    # In a loop no line has only one of them
    looped = "import torch\nfor _ in range(2):\n    net = torch.nn.Linear(4, 4)\n    net(torch.rand(2, 4))\n"
    tried = Tried(tmp_path / "infer.py", looped)
    assert "several models are called at infer.py:4, not each by a variable of its own" in why_no_code(
        tried.seen, tried.assigned("half")
    )


def test_a_function_gets_no_import_that_its_file_has(tmp_path: Path) -> None:
    body = """
        {imports}
        def main():
            x = {name}.rand(2, 4)
            net = {name}.nn.Linear(4, 4)
            return net(x)
        main()
    """
    for imports, name, has_import in (("import torch, os", "torch", False), ("import torch as t", "t", True)):
        tried = Tried(tmp_path / "infer.py", body.format(imports=imports, name=name))
        assigned = tried.assigned("bfloat16")
        form, *_ = tried.forms(assigned)
        assert form[0].text.startswith("import torch\n") == has_import
        assert tried.pasted(form, assigned).errors == tried.outside(assigned).errors


def test_modules_and_inputs_that_stay_in_fp32_do(tmp_path: Path) -> None:
    body = """
        import torch
        from torch import nn
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            def forward(self, x, scale):
                return self.last(self.first(x)) * (scale / 1e6).to(x.dtype)
        app = {"net": Net()}
        y = app["net"](torch.rand(2, 4), scale=torch.tensor(2e6))
    """
    tried = Tried(tmp_path / "infer.py", body)
    plan = next(run for run in shared_result().runs if run.base)
    scan = msgspec.structs.replace(shared_result(), runs=[msgspec.structs.replace(plan, keep_fp32=["last"], untied=[])])
    models = [msgspec.structs.replace(model, scan=scan) for model in tried.seen.models]
    tried.seen = msgspec.structs.replace(tried.seen, models=models)
    assigned = {"Net#0": Assignment("half", ["last"], ["scale"])}
    form, *_ = tried.forms(assigned)
    assert "cast_except(app['net'], [\"last\"])" in form[0].text
    run, outside = tried.pasted(form, assigned), tried.outside(assigned)
    assert run.problem == ""
    assert run.errors == outside.errors
    assert run.errors[0].error is not None
    assert 0 < run.errors[0].error < 1e-2
    assert run.weight_bytes == outside.weight_bytes


def test_one_function_serves_models_with_and_without_inputs_in_fp32(tmp_path: Path) -> None:
    body = """
        import torch
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.last = torch.nn.Linear(4, 4)
            def forward(self, x, scale):
                return self.last(x) * (scale / 1e6).to(x.dtype)
        first, heads = Net(), torch.nn.ModuleDict({"class": Net()})
        def main():
            x = first(torch.rand(2, 4), scale=torch.tensor(2e6))
            return heads["class"](x, torch.tensor(2e6))
        main()
    """
    tried = Tried(tmp_path / "infer.py", body)
    assert tried.seen.models[1].name == "heads.get_submodule('class')"
    # A scan names an argument by its place if all come so, else by its parameter
    for name in ("scale", "inputs[1]"):
        assigned = {"Net#0": Assignment("half", [], ["scale"]), "Net#1": Assignment("half", [], [name])}
        form, *_ = tried.forms(assigned)
        run, outside = tried.pasted(form, assigned), tried.outside(assigned)
        assert run.problem == ""
        assert run.errors == outside.errors
        assert all(each.error is not None and each.error < 1e-2 for each in run.errors)
    assigned["Net#1"] = Assignment("half")
    form, *_ = tried.forms(assigned)
    assert [code.text.count("def at_border") for code in form] == [1]
    run = tried.pasted(form, assigned)
    assert run.errors == tried.outside(assigned).errors
    assert run.errors[-1].nonfinite


def test_modules_in_fp32_are_those_of_the_method_whose_scan_found_them(tmp_path: Path) -> None:
    body = """
        import torch
        class Vae(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            def encode(self, x):
                return self.first(x)
            def decode(self, x):
                return self.last(x.to(self.last.weight.dtype))
        vae = Vae()
        y = vae.decode(vae.encode(torch.rand(2, 4)))
    """
    tried = Tried(tmp_path / "infer.py", body)
    assert [model.name for model in tried.seen.models] == ["vae.encode", "vae.decode"]
    plan = msgspec.structs.replace(next(run for run in shared_result().runs if run.base), keep_fp32=["last"], untied=[])
    scans = [msgspec.structs.replace(shared_result(), runs=runs) for runs in ([], [plan])]
    models = [msgspec.structs.replace(model, scan=scan) for model, scan in zip(tried.seen.models, scans, strict=True)]
    tried.seen = msgspec.structs.replace(tried.seen, models=models)
    assigned = {"Vae#0": Assignment("half", ["last"])}
    form, *_ = tried.forms(assigned)
    run, outside = tried.pasted(form, assigned), tried.outside(assigned)
    assert run.problem == ""
    assert run.errors == outside.errors
    assert run.weight_bytes == outside.weight_bytes


def test_a_thread_reaches_a_model_by_a_variable_of_its_file(tmp_path: Path) -> None:
    body = """
        import threading, torch
        net = torch.nn.Linear(4, 4)
        def work():
            net(torch.rand(2, 4))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    tried = Tried(tmp_path / "infer.py", body)
    assigned = tried.assigned("bfloat16")
    form, *_ = tried.forms(assigned)
    assert [code.line for code in form] == ["infer.py:5"]
    assert tried.pasted(form, assigned).errors == tried.outside(assigned).errors


def test_code_without_effect_is_no_code(tmp_path: Path) -> None:
    tried = Tried(tmp_path / "infer.py", "import torch\nnet = torch.nn.Linear(4, 4)\nnet(torch.rand(2, 4))\n")
    run = tried.pasted([PastedCode("infer.py:3", "net.float()")], tried.assigned("half"))
    assert run.problem == "it has no effect on Linear#0"


@pytest.mark.parametrize(
    ("script", "line", "expected"),
    [
        ("for x in y:\n    net(x)\n", 2, "CODE\nfor x in y:\n    net(x)\n"),
        ("for x in y:\n    net = f()\n    net(x)\n", 3, "for x in y:\n    net = f()\n    CODE\n    net(x)\n"),
        ("a = 1; net(\n    x\n)\n", 2, "CODE\na = 1; net(\n    x\n)\n"),
        ("if a:\n    b()\nelif net(x):\n    c()\n", 3, "CODE\nif a:\n    b()\nelif net(x):\n    c()\n"),
        ("def f():\n    with a:\n        net(x)\n", 3, "def f():\n    with a:\n        CODE\n        net(x)\n"),
        ("try:\n    pass\nexcept E:\n    net(x)\n", 4, "try:\n    pass\nexcept E:\n    CODE\n    net(x)\n"),
        ("match a:\n    case 1:\n        net(x)\n", 3, "match a:\n    case 1:\n        CODE\n        net(x)\n"),
    ],
)
def test_code_comes_before_the_statement_that_calls(tmp_path: Path, script: str, line: int, expected: str) -> None:
    path = tmp_path / "infer.py"
    path.write_text(script)
    seen = ProgramScan(tool="", target=str(path), models=[])
    texts = patched(seen, [PastedCode(f"infer.py:{line}", "net.half()")])
    assert texts == {str(path): expected.replace("CODE", "net.half()")}


# -- Programs of libraries, with random weights

DIFFUSION = """
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, {kind}, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel
    torch.manual_seed(0)
    blocks = dict(block_out_channels=(4, 8), layers_per_block=1, norm_num_groups=2)
    unet = UNet2DConditionModel(
        **blocks, sample_size=8, cross_attention_dim=32, attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        {more}
    )
    vae = AutoencoderKL(
        **blocks, latent_channels=4, sample_size=16,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    )
    text = CLIPTextModel(CLIPTextConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=1000,
        pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )).eval()
"""
SD = (
    DIFFUSION.format(kind="StableDiffusionPipeline", more="")
    + """
    pipe = StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=None, unet=unet, scheduler=DDIMScheduler(), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )
    with torch.no_grad():
        embeds, negative = (text(torch.randint(3, 900, (1, 8)))[0] for _ in range(2))
        image = pipe(
            prompt_embeds=embeds, negative_prompt_embeds=negative, num_inference_steps=2, output_type="pil"
        ).images[0]
"""
)
SDXL = (
    DIFFUSION.format(
        kind="StableDiffusionXLPipeline",
        more='addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,',
    )
    + """
    pipe = StableDiffusionXLPipeline(
        vae=vae, text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None, unet=unet,
        scheduler=DDIMScheduler(), force_zeros_for_empty_prompt=False, add_watermarker=False,
    )
    pipe.vae.register_to_config(force_upcast=False)
    embeds, pooled = torch.randn(2, 1, 8, 32), torch.randn(2, 1, 32)
    image = pipe(
        prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], pooled_prompt_embeds=pooled[0],
        negative_pooled_prompt_embeds=pooled[1], num_inference_steps=2, output_type="pil",
    ).images[0]
"""
)


def checked(run: ProgramRun, limit: float) -> None:
    """The picture of a run."""
    (image,) = run.variables
    assert run.problem == ""
    assert image.error is not None
    assert 0 < image.error < limit
    assert image.psnr is not None


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pipeline_of_diffusers_is_cast_as_a_whole(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    tried = Tried(tmp_path / "infer.py", SD, ("image",))
    assert [model.name for model in tried.seen.models] == ["pipe.text_encoder", "pipe.unet", "pipe.vae.decode"]
    assigned = tried.assigned("bfloat16")
    whole, _ = tried.forms(assigned)
    assert [code.text for code in whole] == ["pipe.to(torch.bfloat16)"]
    checked(tried.pasted(whole, assigned), 5e-2)
    # The VAE in fp32: it gets what the UNet returned, in fp32
    mixture = tried.assigned("half", AutoencoderKL="fp32")
    borders, *_ = tried.forms(mixture)
    checked(tried.pasted(borders, mixture), 1e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pipeline_that_is_loaded_gets_its_dtype_there(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    # It is saved, then loaded by the script
    making, _, using = textwrap.dedent(SD).partition("with torch.no_grad():\n")
    loading = """
pipe = StableDiffusionPipeline.from_pretrained(
    FOLDER, tokenizer=None, feature_extractor=None, image_encoder=None, safety_checker=None,  # not saved
).to("cpu")
"""
    folder = str(tmp_path / "saved")
    with torchvision_works():
        exec(f"{making}\npipe.save_pretrained({folder!r})", {"__name__": "saved"})
    body = (
        "import torch\nfrom diffusers import StableDiffusionPipeline\n"
        + loading.replace("FOLDER", repr(folder))
        + "torch.manual_seed(0)\n"
        "text = pipe.text_encoder\nwith torch.no_grad():\n" + using
    )
    tried = Tried(tmp_path / "infer.py", body, ("image",))
    assigned = tried.assigned("bfloat16")
    loaded, whole, _ = tried.forms(assigned)
    assert [(code.line, code.is_instead) for code in loaded] == [("infer.py:4", True)]
    assert "safety_checker=None, torch_dtype=torch.bfloat16).to('cpu')" in loaded[0].text
    assert whole[0].text == "pipe.to(torch.bfloat16)"
    checked(tried.pasted(loaded, assigned), 5e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # upcast_vae, which the pipeline itself calls, is deprecated
def test_a_pipeline_with_a_switch_for_its_vae_gets_it(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    tried = Tried(tmp_path / "infer.py", SDXL, ("image",))
    mixture = tried.assigned("half", AutoencoderKL="fp32")
    switched, *_ = tried.forms(mixture)
    (code,) = switched
    assert "pipe.to(torch.float16)\npipe.vae.register_to_config(force_upcast=True)" in code.text
    checked(tried.pasted(switched, mixture), 1e-2)


GENERATE = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=128,
    )).eval()
    ids = torch.randint(0, 200, (1, 7))
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
"""


@pytest.mark.parametrize(
    ("precision", "text", "is_around"),
    [
        ("bfloat16", "model.to(torch.bfloat16)", False),
        ("autocast-bf16", 'with torch.autocast("cpu", dtype=torch.bfloat16):\n', True),
    ],
)
def test_generate_runs_in_16_bits(tmp_path: Path, precision: str, text: str, is_around: bool) -> None:
    pytest.importorskip("transformers")
    tried = Tried(tmp_path / "infer.py", GENERATE, ("out",))
    assigned = tried.assigned(precision)
    forms = tried.forms(assigned)
    assert forms[0] == [PastedCode("infer.py:11", text, is_around=is_around)]
    for form in forms:
        run = tried.pasted(form, assigned)
        assert run.problem == ""
        assert run.errors[0].error is not None
        assert 0 < run.errors[0].error < 5e-2


def test_an_encoder_and_the_model_around_it_are_cast_at_their_borders(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    body = """
        import torch
        from transformers import WhisperConfig, WhisperForConditionalGeneration
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(WhisperConfig(
            vocab_size=200, num_mel_bins=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=50,
            max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            suppress_tokens=None, begin_suppress_tokens=None,
        )).eval()
        with torch.no_grad():
            out = model.generate(torch.randn(1, 16, 100), max_new_tokens=4)
    """
    tried = Tried(tmp_path / "infer.py", body, ("out",))
    assigned = tried.assigned("bfloat16")
    run = tried.pasted(tried.forms(assigned)[-1], assigned)
    assert run.problem == ""
    outside = tried.outside(assigned)
    assert [each.error for each in run.errors] == pytest.approx([each.error for each in outside.errors], rel=0.1)
