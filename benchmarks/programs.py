"""Whether ``lowprec-check program`` names what is wrong with a program, and nothing if nothing is.

    python benchmarks/programs.py --output programs
    python benchmarks/programs.py --only sdxl,thread --scans healthy,faulty

24 small programs of four kinds, of public libraries with random weights: diffusion, generation, perception, scripts
with models of their own; each healthy, and with one planted fault. ``plain`` is the program without lowprec-check: its
models cast by hand, with inputs and outputs at their borders, in the precision of the fault. A healthy program must be
as in fp32 there, and a faulty one must not be. ``named``: the model that fails, the call, and the op or its module.
``pasted``: the program by hand with each model in the precision that was recommended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared import ROOT, described, head, in_processes, made, parser_of, save
from tabulate import tabulate

HEAD = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_grad_enabled(False)
ids = torch.arange(3, 19)[None]
"""
TEXT = """
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel
from diffusers import AutoencoderKL

size = dict(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
text, t5 = CLIPTextConfig(**size, projection_dim=32), T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2,
    num_heads=4)


def vae(channels=4):
    return AutoencoderKL(block_out_channels=(16, 32), down_block_types=["DownEncoderBlock2D"] * 2, sample_size=16,
        up_block_types=["UpDecoderBlock2D"] * 2, norm_num_groups=4, latent_channels=channels, shift_factor=0.1,
        force_upcast=False).eval()
"""
UNET = """
from diffusers import DDIMScheduler, UNet2DConditionModel


def unet(**settings):
    return UNet2DConditionModel(sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        attention_head_dim=4, down_block_types=["DownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "UpBlock2D"], **settings).eval()
"""
SD = """
from diffusers import StableDiffusionImg2ImgPipeline, StableDiffusionPipeline


def parts():
    return dict(vae=vae(), text_encoder=CLIPTextModel(text).eval(), tokenizer=None, unet=unet(cross_attention_dim=32),
        scheduler=DDIMScheduler(), safety_checker=None, feature_extractor=None)


"""
GENERATE = """
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

size = dict(vocab_size=100, bos_token_id=1, eos_token_id=None, pad_token_id=0)
small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
"""
VISION = """
image = torch.rand(1, 3, 64, 64)
small = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
"""
OWN = """
class Net(nn.Module):
    def __init__(self, scale=1.0, inverts=False):
        super().__init__()
        self.first, self.last, self.scale, self.inverts = nn.Linear(16, 32), nn.Linear(32, 16), scale, inverts
    def forward(self, x):
        hidden = self.first(x) * self.scale
        if self.inverts:
            hidden = hidden @ torch.linalg.inv(torch.eye(32).to(x) * 2)
        return self.last(torch.tanh(hidden / self.scale))
    def encode(self, x):
        return self.last(torch.tanh(self.first(x) * self.scale / self.scale))
x = torch.randn(4, 16)
"""


class Program(NamedTuple):
    """A script in parts."""

    name: str
    made: str
    """What makes its models."""
    run: str
    """Leaves ``result``, a tensor or several."""
    models: str
    """What it calls, as the program reaches it: ``pipe.vae.decode``."""
    fault: str
    """Goes between the two."""
    model: str
    """Which fails then."""
    call: int
    where: str
    """The op that fails, or a module that has it."""
    precision: str = "half"


KINDS = {
    "diffusion": [
        Program(
            "sd", TEXT + UNET + SD + "pipe = StableDiffusionPipeline(**parts())",
            "result = pipe(prompt_embeds=pipe.text_encoder(ids)[0], negative_prompt_embeds=pipe.text_encoder(ids * 0)[0],"
            " num_inference_steps=4, output_type='np').images",
            "pipe.text_encoder pipe.unet pipe.vae.decode",
            "pipe.vae.decoder.conv_in.weight.data.mul_(1e7)", "pipe.vae.decode", 1, "decoder.conv_in",
        ),
        Program(  # SDXL's VAE in fp16: a black image
            "sdxl", TEXT + UNET + """
from diffusers import StableDiffusionXLPipeline
pipe = StableDiffusionXLPipeline(vae=vae(), text_encoder=CLIPTextModel(text).eval(), tokenizer=None, tokenizer_2=None,
    text_encoder_2=CLIPTextModelWithProjection(text).eval(), scheduler=DDIMScheduler(), unet=unet(
    cross_attention_dim=64, addition_embed_type="text_time", addition_time_embed_dim=8, transformer_layers_per_block=1,
    projection_class_embeddings_input_dim=80, use_linear_projection=True), add_watermarker=False)
""", """
second = pipe.text_encoder_2(ids)
both = torch.cat([pipe.text_encoder(ids)[0], second.last_hidden_state], -1)
result = pipe(prompt_embeds=both, pooled_prompt_embeds=second.text_embeds, num_inference_steps=4, guidance_scale=1,
    output_type="np", height=16, width=16).images
""", "pipe.text_encoder pipe.text_encoder_2 pipe.unet pipe.vae.decode",
            "pipe.vae.decoder.up_blocks[1].resnets[0].conv2.weight.data.mul_(1e7)",
            "pipe.vae.decode", 1, "up_blocks.1.resnets.0",
        ),
        Program(  # T5's feed-forward wo in fp16
            "sd3", TEXT + """
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
pipe = StableDiffusion3Pipeline(vae=vae(16), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None,
    text_encoder_3=T5EncoderModel(t5).eval(), tokenizer_3=None, scheduler=FlowMatchEulerDiscreteScheduler(),
    transformer=SD3Transformer2DModel(sample_size=8, patch_size=2, in_channels=16, num_layers=2, attention_head_dim=8,
    num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=32,
    out_channels=16).eval())
""", """
result = pipe(prompt_embeds=pipe.text_encoder_3(ids)[0], pooled_prompt_embeds=torch.ones(1, 32), guidance_scale=0,
    num_inference_steps=4, output_type="np", height=16, width=16).images
""", "pipe.text_encoder_3 pipe.transformer pipe.vae.decode",
            "pipe.text_encoder_3.encoder.block[0].layer[-1].DenseReluDense.wo.weight.data.mul_(1e6)",
            "pipe.text_encoder_3", 1, "DenseReluDense",
        ),
        Program(
            "video", TEXT + """
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel
pipe = LTXPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), text_encoder=T5EncoderModel(t5).eval(), tokenizer=None,
    vae=AutoencoderKLLTXVideo(latent_channels=8, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
    layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=(True, True, False, False),
    decoder_spatio_temporal_scaling=(True, True, False, False), patch_size=1, patch_size_t=1).eval(),
    transformer=LTXVideoTransformer3DModel(in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8,
    cross_attention_dim=32, num_layers=1, caption_channels=32).eval())
""", """
result = pipe(prompt_embeds=pipe.text_encoder(ids)[0], prompt_attention_mask=torch.ones(1, 16), guidance_scale=1,
    num_inference_steps=3, output_type="np", height=32, width=32, num_frames=9).frames
""", "pipe.text_encoder pipe.transformer pipe.vae.decode",
            "pipe.transformer.transformer_blocks[0].ff.net[0].proj.weight.data.mul_(1e6)",
            "pipe.transformer", 1, "transformer_blocks.0.ff",
        ),
        Program(  # an overflow at a late step
            "late-step", """
from diffusers import DDPMScheduler, UNet2DModel
unet = UNet2DModel(sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), norm_num_groups=4,
    down_block_types=["DownBlock2D"] * 2, up_block_types=["UpBlock2D"] * 2, layers_per_block=1).eval()
scheduler, large = DDPMScheduler(), {}
scheduler.set_timesteps(20)
""", """
result = torch.randn(1, 4, 8, 8)
for number, step in enumerate(scheduler.timesteps, 1):
    noise = unet(result * large.get(number, 1.0), step).sample
    result = scheduler.step(noise, step, result).prev_sample
""", "unet", "large[7] = 2e4; unet.conv_in.weight.data.mul_(30)", "unet", 7, "conv_in",
        ),
        Program(
            "img2img", TEXT + UNET + SD + "pipe = StableDiffusionImg2ImgPipeline(**parts())",
            "result = pipe(image=torch.rand(1, 3, 16, 16), prompt_embeds=pipe.text_encoder(ids)[0], guidance_scale=1,"
            " num_inference_steps=4, strength=0.5, output_type='np').images",
            "pipe.text_encoder pipe.vae.encode pipe.unet pipe.vae.decode",
            "pipe.vae.encoder.conv_in.weight.data.mul_(1e7)", "pipe.vae.encode", 1, "encoder.conv_in",
        ),
    ],
    "generation": [
        Program(  # parts from fp32 at a token: bf16 has no difference between two rows of the head
            "greedy", GENERATE + "torch.manual_seed(8); model = GPT2LMHeadModel(GPT2Config(**size, n_embd=32, n_layer=2,"
            " n_head=4, tie_word_embeddings=False, initializer_range=0.3)).eval()",
            "result = model.generate(ids, max_new_tokens=16, do_sample=False)", "model",
            "model.lm_head.weight.data[0] = model.lm_head.weight.data[79] * 0.9995", "model", 9, "", "bfloat16",
        ),
        Program(
            "sampled", GENERATE + "model = LlamaForCausalLM(LlamaConfig(**size, **small)).eval()",
            "result = model.generate(ids, max_new_tokens=12, do_sample=True, top_k=20)", "model",
            "model.model.layers[1].mlp.down_proj.weight.data.mul_(1e8)", "model", 1, "layers.1.mlp",
        ),
        Program(
            "beam", GENERATE + "model = T5ForConditionalGeneration(T5Config(**size, d_model=32, d_kv=8, d_ff=64,"
            " num_layers=2, num_heads=4, decoder_start_token_id=0)).eval()",
            "result = model.generate(ids, max_new_tokens=8, num_beams=3)", "model.encoder model",
            "model.encoder.block[1].layer[-1].DenseReluDense.wo.weight.data.mul_(1e6)", "model.encoder", 1, "wo",
        ),
        Program(
            "cache", GENERATE + "model = LlamaForCausalLM(LlamaConfig(**size, **small)).eval()", """
cache, result = None, ids
for token in (5, 20, 41, 7, 33, 12, 77, 9, 56, 28, 64, 81):
    output = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
    cache, result = output.past_key_values, output.logits
""", "model", "model.model.embed_tokens.weight.data[77] *= 1e7", "model", 7, "embed_tokens",
        ),
        Program(
            "whisper", """
from transformers import WhisperConfig, WhisperForConditionalGeneration
model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=100, d_model=32, encoder_layers=2, decoder_layers=2,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
    max_source_positions=50, max_target_positions=40, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)).eval()
""", "result = model.generate(torch.randn(1, 16, 100), max_new_tokens=8, do_sample=False)",
            "model.model.encoder model", "model.model.encoder.layers[1].fc2.weight.data.mul_(1e9)",
            "model.model.encoder", 1, "layers.1.fc2",
        ),
        Program(
            "state", """
decoder, grow = nn.GRUCell(8, 16).eval(), 1.0
class Readout(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 4)
    def forward(self, state, scale):
        return self.last(state * scale / 64.0)
readout = Readout().eval()
""", """
state, scale, result = torch.zeros(2, 16), 64.0, []
for number in range(20):
    state, scale = decoder(torch.ones(2, 8) * number / 20, state), scale * grow
    result.append(readout(state, scale))
result = torch.stack(result)
""", "decoder readout", "grow = 3.0", "readout", 8, "mul",
        ),
    ],
    "perception": [
        Program(
            "classify-text", """
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, pipeline
words = Tokenizer(WordLevel({word: i for i, word in enumerate("[PAD] [UNK] a cat sat on the mat".split())}, "[UNK]"))
words.pre_tokenizer = Whitespace()
model = BertForSequenceClassification(BertConfig(vocab_size=20, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4)).eval()
classify = pipeline("text-classification", model=model, device="cpu",
    tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"))
""", "result = torch.tensor([each['score'] for each in classify(['a cat sat', 'the mat', 'on the cat'], batch_size=1)])",
            "model", "model.bert.encoder.layer[1].intermediate.dense.weight.data.mul_(1e7)",
            "model", 1, "layer.1.intermediate",
        ),
        Program(
            "classify-image", VISION + """
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline
model = ViTForImageClassification(ViTConfig(**small, image_size=32, patch_size=8, num_labels=5)).eval()
classify = pipeline("image-classification", model=model, device="cpu",
    image_processor=ViTImageProcessor(size={"height": 32, "width": 32}))
class Inverted(nn.Module):
    def forward(self, x):
        return x + torch.fft.irfft(torch.fft.rfft(x, dim=-1), dim=-1)
""", """
from PIL import Image
picture = Image.fromarray((image[0].permute(1, 2, 0) * 255).byte().numpy())
result = torch.tensor([each["score"] for each in classify(picture)])
""", "model", "model.vit.layernorm = nn.Sequential(model.vit.layernorm, Inverted())", "model", 1, "rfft",
        ),
        Program(
            "clip", VISION + """
from transformers import CLIPConfig, CLIPModel
model = CLIPModel(CLIPConfig(text_config=dict(small, vocab_size=100, eos_token_id=18), projection_dim=32,
    vision_config=dict(small, image_size=32, patch_size=8))).eval()
""", """
texts = [F.normalize(model.get_text_features(ids + i).pooler_output, dim=-1) for i in range(4)]
pictures = F.normalize(model.get_image_features(image[:, :, :32, :32]).pooler_output, dim=-1)
result = pictures @ torch.cat(texts).T
""", "model.get_text_features model.get_image_features",
            "model.vision_model.encoder.layers[0].mlp.fc2.weight.data.mul_(1e8)",
            "model.get_image_features", 1, "encoder.layers.0.mlp.fc2",
        ),
        Program(  # nms and what is before it in half
            "detector", VISION + """
from torchvision.models.detection import ssdlite320_mobilenet_v3_large
from torchvision.ops import nms
class Raw(nn.Module):
    def __init__(self, detector, selects=False):
        super().__init__()
        self.detector, self.selects = detector, selects
    def forward(self, image):
        features = list(self.detector.backbone(image).values())
        output = self.detector.head(features)
        if self.selects:
            nms(output["bbox_regression"][0], output["cls_logits"][0, :, 1], 0.5)
        return output
model = Raw(ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)).eval()
""", """
output = model(image)
scores, boxes = output["cls_logits"].softmax(-1)[0, :, 1], output["bbox_regression"][0]
boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:].exp()], 1)
kept = nms(boxes, scores, 0.9)
result = output["cls_logits"]
""", "model", "model.selects = True", "model", 1, "nms",
        ),
        Program(
            "segment", VISION + """
from torchvision.models.segmentation import lraspp_mobilenet_v3_large
model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).eval()
""", "result = F.interpolate(model(image)['out'], size=(16, 16), mode='bilinear')", "model",
            "model.backbone['0'][0].weight.data.mul_(1e6)", "model", 1, "backbone.0.0",
        ),
        Program(
            "depth", VISION + """
from transformers import SegformerConfig, SegformerForSemanticSegmentation
model = SegformerForSemanticSegmentation(SegformerConfig(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
    hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
    decoder_hidden_size=32, num_labels=5)).eval()
""", """
result = []
for size in (32, 48, 64, 40):
    result.append(model(F.interpolate(image, size=(size, size))).logits.flatten())
result = torch.cat(result)
""", "model", """
inner = model.decode_head.classifier.forward
model.decode_head.classifier.forward = lambda x: inner(x * (1e8 if x.shape[-1] == 16 else 1.0))
""", "model", 3, "mul",
        ),
    ],
    "own": [
        Program(
            "three", OWN + "encoder, core, head = Net().eval(), Net().eval(), Net().eval()",
            "result = head(core(encoder(x)) + x)", "encoder core head", "core.scale = 1e6", "core", 1, "mul",
        ),
        Program(
            "feedback", OWN + "model, large = Net().eval(), {}", """
result = x
for number in range(1, 21):
    result = result + 0.1 * model(result * large.get(number, 1.0))
""", "model", "large[7] = 1e5", "model", 7, "cast input",
        ),
        Program(
            "thread", OWN + "first, second = Net().eval(), Net().eval()", """
from concurrent.futures import ThreadPoolExecutor
def work(part):
    with torch.no_grad():
        return second(part)
with ThreadPoolExecutor(1) as pool:
    parts = list(pool.map(work, first(x).split(1)))
result = torch.cat(parts)
""", "first second", "second.scale = 1e6", "second", 1, "mul",
        ),
        Program(
            "twice", OWN + "nets = [Net().eval(), Net().eval()]", "result = nets[1](nets[0](x))", "nets[0] nets[1]",
            "nets[1].inverts = True", "nets[1]", 1, "inv",
        ),
        Program(
            "method", OWN + "model, head = Net().eval(), Net().eval()",
            "result = torch.cat([head(model.encode(x * number)) for number in range(1, 5)])", "model.encode head",
            "model.scale = 1e6", "model.encode", 1, "mul",
        ),
        Program(
            "own-state", """
class Counter(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.register_buffer("position", torch.full((1,), start))
    def forward(self, x):
        self.position = self.position + 1.0
        return self.last(x) + torch.cos(self.position * 0.5)
model = Counter(0.0).eval()
""", "result = torch.stack([model(torch.ones(2, 8) * number) for number in range(12)])", "model",
            "model = Counter(2043.0).eval()", "model", 6, "cos",
        ),
    ],
}
PROGRAMS = [program for programs in KINDS.values() for program in programs]
BY_HAND = """
import copy
from torch.utils._pytree import tree_map

def cast(model, method, dtype, *others):
    weights = [(weight, weight.data) for other in others for weight in other.parameters()]
    model.to(dtype)
    for weight, data in weights:  # of models inside it with a precision of their own
        weight.data = data
    inner = getattr(model, method)
    def called(*args, **kwargs):
        given = tree_map(lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x, (args, kwargs))
        return tree_map(lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x,
            inner(*given[0], **given[1]))
    setattr(model, method, called)
"""
DTYPES = {"half": "torch.float16", "bfloat16": "torch.bfloat16", "fp32": "torch.float32"}


def script_of(program: Program, *, is_faulty: bool, precisions: Mapping[str, str] | None = None) -> str:
    """The script; with ``precisions`` of its models, these are cast by hand."""
    by_hand = ""
    if precisions is not None:
        places = {name: place_of(name) for name in precisions}
        owners = list(dict.fromkeys(owner for owner, _ in places.values()))
        # A model has one precision, whichever of its methods is called
        in_fp32 = {places[name][0] for name, precision in precisions.items() if precision == "fp32"}
        inside = {owner: [other for other in owners if other.startswith(f"{owner}.")] for owner in owners}
        by_hand = BY_HAND + "".join(f"{part} = copy.deepcopy({part})\n" for parts in inside.values() for part in parts)
        for name, (owner, method) in places.items():
            dtype = DTYPES["fp32" if owner in in_fp32 else precisions[name]]
            by_hand += f"cast({', '.join([owner, repr(method), dtype, *inside[owner]])})\n"
    fault = program.fault if is_faulty else ""
    return "\n".join([HEAD, program.made, fault, by_hand, "torch.manual_seed(1)", program.run])


def place_of(name: str) -> tuple[str, str]:
    """The model, and what of it is called."""
    owner, _, method = name.rpartition(".")
    return (owner, method) if method in METHODS else (name, "forward")


METHODS = ("decode", "encode", "get_text_features", "get_image_features")


def result_of(script: str) -> Any:
    """What the script leaves, without lowprec-check."""
    import torch

    space: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(script, "script.py", "exec"), space)
    return torch.as_tensor(space["result"]).double()


def differs(script: str, reference: Any) -> float | str:
    """The relative difference of what two scripts leave, or the exception."""
    import torch

    try:
        result = result_of(script)
    except Exception as error:
        return described(error)
    if result.shape != reference.shape:
        return "other shape"
    distance = float(torch.linalg.vector_norm(result - reference) / torch.linalg.vector_norm(reference).clamp(min=1e-12))
    return distance if distance == distance else "NaN"


def plain(program: Program) -> dict[str, Any]:
    """The program without lowprec-check, healthy and faulty."""
    found: dict[str, Any] = {}
    for is_faulty in (False, True):
        low = {name: program.precision for name in program.models.split()}
        reference = result_of(script_of(program, is_faulty=is_faulty))
        script = script_of(program, is_faulty=is_faulty, precisions=low)
        found["faulty" if is_faulty else "healthy"] = differs(script, reference)
    return found


def is_right(difference: float | str, limit: float = 5e-2) -> bool:
    """Whether a result is as in fp32."""
    return isinstance(difference, float) and difference <= limit


class Answer(NamedTuple):
    """What lowprec-check says of a program."""

    models: list[str]
    """Which fail, or return something else than in fp32."""
    calls: list[int]
    """On which they do."""
    where: list[str]
    """Modules and ops of the findings."""
    parts: str
    """Where the program in the precision parts from fp32."""
    precisions: dict[str, str]
    """Recommended, by model."""
    mixture: float | str
    """The error of the last output with each model as recommended."""


def answer_of(result: Mapping[str, Any], precision: str) -> Answer:
    """What a saved result says."""
    names = {model["key"]: model["name"] for model in result["models"]}
    models, calls, where, precisions = [], [], [], {}
    for model in result["models"]:
        scan = model["scan"] or {"runs": [], "diagnostics": [], "recommendation": None}
        precisions[model["name"]] = (scan["recommendation"] or {"precision": "fp32"})["precision"]
        for run in scan["runs"]:
            if run["precision"] == precision and run["status"] != "ok":
                models.append(model["name"])
                calls.append(model["kept"][run["failed_batch"] or 0])
        placed = [each for each in scan["diagnostics"] if each["module"] or each["op"]]
        found = [each for each in placed if each["severity"] == "error"]
        if model["name"] in models and not found:
            found = [each for each in placed if each["severity"] == "warning"]
        where += [f"{each['module'] or ''} {each['op'] or ''}".strip() for each in found]
    runs = {run["name"]: run for run in result["runs"]}
    parts, limit = "", 5e-2 if precision == "bfloat16" else 1e-2
    low = runs.get(precision) or runs.get("each as recommended") or {"errors": [], "problem": ""}
    for error in low["errors"]:
        if error["error"] is None or error["error"] > limit or error["nonfinite"]:
            parts = f"{names[error['model']]}, call {error['call']}"
            break
    mixed = runs.get("each as recommended")
    mixture: float | str = 0.0
    if mixed is not None:
        mixture = mixed["problem"] or mixed["errors"][-1]["error"]
    return Answer(models, calls, where, parts or low["problem"], precisions, mixture)


def is_named(program: Program, answer: Answer) -> bool:
    """Whether the fault is named: the model, the call, and the op or a module around it."""
    if not program.where:  # no call fails by itself
        return not answer.models and answer.parts == f"{program.model}, call {program.call}"
    is_there = any(program.where in place for place in answer.where)
    at = program.call in answer.calls or answer.parts == f"{program.model}, call {program.call}"
    return set(answer.models) == {program.model} and at and is_there


def scanned(program: Program, *, is_faulty: bool, options: Sequence[str]) -> Answer:
    """What the command says of the script."""
    with tempfile.TemporaryDirectory() as folder:
        script, result = Path(folder) / f"{program.name}.py", Path(folder) / "result.json"
        script.write_text(script_of(program, is_faulty=is_faulty))
        command = ["program", str(script), "-p", program.precision, "--no-plan", "--json", str(result), *options]
        if "none" in options:  # the libraries are imported
            sys.argv[1:] = command
            from lowprec_check.cli.main import main as run

            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
                run()
        else:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            subprocess.run([sys.executable, "-m", "lowprec_check", *command], env=environment, capture_output=True)
        return answer_of(json.loads(result.read_text()), program.precision)


def examined(program: Program, options: Sequence[str], variants: Sequence[bool]) -> dict[str, Any]:
    """A row of the report."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    row: dict[str, Any] = {"program": program.name, "plain": plain(program)}
    for is_faulty in variants:
        answer = scanned(program, is_faulty=is_faulty, options=options)
        script = script_of(program, is_faulty=is_faulty, precisions=answer.precisions)
        by_hand = differs(script, result_of(script_of(program, is_faulty=is_faulty)))
        row["faulty" if is_faulty else "healthy"] = {
            **answer._asdict(),
            "right": is_named(program, answer) if is_faulty else not (answer.models or answer.where or answer.parts),
            "by hand": by_hand,
            "pasted": is_right(by_hand) and is_right(answer.mixture),
        }
    return {**row, "seconds": time.monotonic() - started}


def rendered(data: Mapping[str, Any]) -> str:
    """The report."""
    rows = []
    for row in data["rows"]:
        cells = [row["program"], row["plain"]["healthy"], row["plain"]["faulty"]]
        for name in ("healthy", "faulty"):
            found = row.get(name)
            if found is None:
                cells += ["–"] * 3
                continue
            said = ", ".join(f"{model}, call {call}" for model, call in zip(found["models"], found["calls"]))
            said += f" ({found['where'][0]})" if found["where"] else ""
            cells += ["yes" if found["right"] else "NO", said or found["parts"], "yes" if found["pasted"] else "NO"]
        rows.append(cells)
    names = ["program", "plain", "plain, fault", "healthy", "says", "pasted", "named", "says", "pasted"]
    counts = [
        f"{what}: {sum(row[name][key] for row in data['rows'] if name in row)} of {sum(name in row for row in data['rows'])}"
        for what, name, key in (
            ("healthy ones raise nothing", "healthy", "right"),
            ("faults named", "faulty", "right"),
            ("pasted, healthy", "healthy", "pasted"),
            ("pasted, faulty", "faulty", "pasted"),
        )
    ]
    problems = [f"- {name}: {problem}" for name, problem in data["problems"].items()]
    table = tabulate(rows, names, tablefmt="github")
    return "\n".join([*head("Programs", data), "; ".join(counts) + ".", "", table, "", *problems, ""])


def main() -> None:
    """Read the options, examine the programs in turn, and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", help="names of programs or kinds, with commas between")
    parser.add_argument("--variants", default="healthy,faulty", help="which of the two")
    parser.add_argument("--processes", action="store_true", help="scan by the command in processes of its own")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each program")
    given = parser.parse_args()
    wanted = (given.only or ",".join(KINDS)).split(",")
    programs = [each for kind, of_kind in KINDS.items() for each in of_kind if kind in wanted or each.name in wanted]
    options = [] if given.processes else ["--isolation", "none"]
    from lowprec_check.engine.model.torchvision_ops import torchvision_works

    with torchvision_works():
        import_libraries()
        rows, problems = [], {}
        variants = [name == "faulty" for name in given.variants.split(",")]
        for program, row, problem in in_processes(
            lambda program: examined(program, options, variants), programs, 1, limit=given.limit
        ):
            print(program.name, row or problem, file=sys.stderr, flush=True)
            if row is None:
                problems[program.name] = problem
            else:
                rows.append(row)
    save(given.output, {"made": made(), "rows": rows, "problems": problems}, rendered)


def import_libraries() -> None:
    """Import what most programs use, once for all."""
    import diffusers
    import torchvision.models.detection
    import transformers

    assert diffusers and torchvision and transformers


if __name__ == "__main__":
    main()
