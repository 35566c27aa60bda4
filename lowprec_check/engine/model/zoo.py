"""Loads models of torchvision, timm and transformers by name, with random weights, a fixed seed."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowprec_check.engine.model import torchvision_ops
from lowprec_check.engine.model.inputs import inputs_code, parse_inputs
from lowprec_check.engine.model.streamed_weights import parameters_in, stream_weights, unread_weights
from lowprec_check.engine.model.target import Target, unchecked_target
from lowprec_check.engine.model.user_code import call_user_code
from lowprec_check.errors import UsageError, first_line, message_of, one_line, type_name
from lowprec_check.schema.scanned_model import STREAMED

# -- What the loaders of models by name share


def import_zoo(package: str) -> Any:
    """The package; raises :class:`UsageError` if it is not installed, or cannot be imported."""
    try:
        return importlib.import_module(package)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise UsageError(f"{package} is not installed.", f"pip install {package}") from None
        problem = f"{package} is installed, but its import fails: {one_line(error)}"
        raise UsageError(problem, f"Install a release of {package} for this torch.") from error


def unknown_name(owner: str, noun: str, name: str, names: Sequence[str], hint: str) -> UsageError:
    """The error for a model or option that ``owner`` does not have; it suggests similar names."""
    near = difflib.get_close_matches(name, names, 3) or [other for other in names if name and name in other][:3]
    if near:
        hint = f"Did you mean {', '.join(near)}?"
    return UsageError(f"{owner} has no {noun} {name!r}.", hint)


def zoo_target(name: str, model: nn.Module, make_batch: Callable[[int], Any], code: str, *, asked: bool) -> Target:
    """The target for a model that ``code`` makes; ``asked`` is whether the user gave the inputs."""
    inputs = make_batch(0)
    setup = (f"import {code.partition('.')[0]}", f"model = {code}.eval()", f"inputs = {inputs_code(inputs)}")
    return unchecked_target(
        model, inputs, name=name, make_batch=make_batch, setup=setup, default_inputs=not asked, weights="random"
    )


# -- Loads torchvision models by name, with random weights and a fixed seed


def import_torchvision() -> Any:
    """torchvision, with replacements for compiled ops that do not load; see :func:`import_zoo`."""
    with torchvision_ops.torchvision_works():
        return import_zoo("torchvision")


def load_torchvision(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``torchvision:name``, in eval mode, seed 0."""
    models = import_torchvision().models
    names = models.list_models()
    if name not in names:
        hint = "torchvision.models.list_models() returns all names."
        raise unknown_name("torchvision", "model", name, names, hint)
    is_detector = kind_of(models, name) == "detection"

    def make_batch(index: int) -> Any:
        if not inputs:
            return default_inputs(models, name, seed=index)
        asked = parse_inputs(inputs, seed=index)
        if not is_detector:
            return asked
        # A detector takes a list of images; a batch is several
        batches = [tensor.unbind() if tensor.dim() == 4 else [tensor] for tensor in tree_leaves(asked)]
        return ([image for images in batches for image in images],)

    options: dict[str, Any] = {"weights": None}  # no download, and no slow initialization (up to a minute)
    if "weights_backbone" in models.get_model_builder(name).__annotations__:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    if is_detector and not name.startswith("ssd"):  # it would enlarge its images to at least 800 pixels
        side = max(max(image.shape[-2:]) for image in make_batch(0)[0])
        options |= {"min_size": side, "max_size": side}
    # The same weights in each process that loads the model
    torch.manual_seed(0)
    model = models.get_model(name, **options).eval()
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    code = f"torchvision.models.get_model({name!r}{arguments})"
    return zoo_target(f"torchvision:{name}", model, make_batch, code, asked=bool(inputs))


def kind_of(models: Any, name: str) -> str:
    """``detection``, ``video``, ``segmentation``, or the family of a classifier."""
    return str(models.get_model_builder(name).__module__.split(".")[2])


def default_inputs(models: Any, name: str, *, seed: int = 0) -> Any:
    """Seeded inputs of the usual size for the model: an image, a clip, a pair or list of images."""
    generator = torch.Generator().manual_seed(seed)
    kind = kind_of(models, name)
    if kind == "detection":
        return ([torch.rand(3, 320, 320, generator=generator)],)
    if kind == "video":
        trained = models.get_model_weights(name).DEFAULT
        frames = max(8, trained.meta.get("min_temporal_size", 8))
        return torch.randn(1, 3, frames, *trained.transforms.keywords["crop_size"], generator=generator)
    if kind == "optical_flow":
        pair = torch.rand(2, 1, 3, 128, 128, generator=generator)
        return (pair[0], pair[1])
    side = 299 if name == "inception_v3" else 224
    return torch.randn(1, 3, side, side, generator=generator)


# -- Loads models of timm by name, with random weights and a fixed seed


def load_timm(name: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``timm:name``, in eval mode, seed 0, with an image of usual size."""
    timm = import_zoo("timm")
    if not timm.is_model(name):
        raise unknown_name("timm", "model", name, timm.list_models(), "timm.list_models() returns all names.")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False).eval()

    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (3, 224, 224))
    code = f"timm.create_model({name!r}, pretrained=False)"
    return _target(f"timm:{name}", model, lambda generator: torch.randn(1, *size, generator=generator), inputs, code)


# -- Models of transformers

TOKENS, SAMPLES = 32, 16_000
"""Length of the default inputs: tokens of a text, samples of a sound (one second)."""

_SMALLER = "Make it smaller: transformers:NAME,num_hidden_layers=2,hidden_size=256"


def load_transformers(text: str, inputs: tuple[str, ...] = ()) -> Target:
    """Return the target for ``transformers:NAME,OPTION=VALUE,…``, in eval mode, seed 0.

    NAME is a model type (``bert``), a configuration (``BertConfig``) or a model
    (``BertForMaskedLM``); the options are those of its configuration.
    """
    transformers = import_zoo("transformers")
    name, *options = re.split(r",(?![^\[{]*[\]}])", text)  # not inside a list or mapping
    config_class, model_class = _classes(transformers, name)
    values = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"{option!r} is not an option of a configuration.", _SMALLER)
        values[key] = value
        with contextlib.suppress(ValueError):  # it is a text
            values[key] = json.loads(value)
    try:
        # A configuration accepts any option, so that one with a typing error would have no effect
        default = config_class()
        for option in values:
            if not hasattr(default, option):
                known = list(default.to_dict())
                raise unknown_name(config_class.__name__, "option", option, known, "See its documentation.")
        config = config_class(**values)
    except UsageError:
        raise
    except Exception as error:
        why = f"{type_name(error)}: {' '.join(message_of(error).split())}"
        hint = "See its documentation, or make the model in a Python file, and scan that."
        raise UsageError(f"{config_class.__name__} cannot be made from these options: {why}", hint) from None
    arguments = ", ".join(f"{option}={value!r}" for option, value in values.items())
    config_code = f"transformers.{config_class.__name__}({arguments})"
    if model_class is None:
        model_class = transformers.MODEL_MAPPING.get(config_class, None)
        if model_class is None:
            hint = "Pass the name of a model, such as BertForMaskedLM."
            raise UsageError(f"transformers has no base model for {config_class.__name__}.", hint)
        # The first of several; if there is only one, AutoModel finds it
        model_class = model_class[0] if isinstance(model_class, (list, tuple)) else None
    model, call = _random_model(transformers, model_class, config, f"transformers:{name}")
    draw = functools.partial(inputs_of_config, model, config)
    return _target(f"transformers:{text}", model, draw, inputs, f"{call}({config_code})")


def load_folder(folder: str, inputs: tuple[str, ...] = (), *, stream: bool = False) -> Target:
    """Return the target for ``hf:FOLDER``, with a config.json of transformers and maybe weights.

    They stay in their files with ``stream``, and where they do not fit into memory.
    """
    content = _read_config(folder)
    transformers = import_zoo("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        why = one_line(error)
        hint = "Check its model_type, or install the release of transformers that it was saved with."
        raise UsageError(f"transformers cannot read {folder}/config.json: {why}", hint) from None
    listed, model_class = content.get("architectures"), None
    if isinstance(listed, list) and listed and isinstance(listed[0], str) and listed[0]:
        model_class = _attribute(transformers, listed[0])
    files = sorted(Path(folder).glob("*.safetensors"))
    # All that an index of the weights lists must be there; its faults are left to transformers
    index, shards = Path(folder) / "model.safetensors.index.json", dict[str, Any]()
    if files:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            shards = dict(json.loads(index.read_bytes())["weight_map"])
    for name in sorted({str(name) for name in shards.values()}):
        if not (Path(folder) / name).is_file():
            raise UsageError(f"{folder} has no {name}, which {index.name} lists.", "Copy that file there.")
    has_weights = bool(files) or any(Path(folder).glob("pytorch_model*.bin"))
    if stream and not files:
        raise UsageError(f"{folder} has no weights in .safetensors.", "Save the model again with save_pretrained.")
    notes: list[str] = []
    if has_weights:
        maker: Any = transformers.AutoModel if model_class is None else model_class
        # Without a look into the files if that cannot matter
        in_16_bits, most = sum(file.stat().st_size for file in files) // 2, psutil.virtual_memory().available // _BYTES
        if files and (stream or (in_16_bits > most and parameters_in(files) > most)):
            make = maker.from_config if model_class is None else maker
            with unread_weights():
                model: Any = call_user_code("Making the model without its weights", lambda: make(config))
            stream_weights(model, files, _renaming(model))
            model, notes = model.float().eval(), [STREAMED]
        else:
            try:
                options = {"local_files_only": True, "dtype": torch.float32, "output_loading_info": True}
                model, info = maker.from_pretrained(folder, **options)
            except Exception as error:
                why = one_line(error)
                hint = "Save the model again with save_pretrained, or load it in a Python file, and scan that."
                raise UsageError(f"transformers cannot load the weights in {folder}: {why}", hint) from None
            model, missing = model.eval(), sorted(info["missing_keys"])
            if missing:
                few = f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}"
                notes = [f"{folder} lacks {len(missing)} of the weights ({few}): they are random"]
        code = f"transformers.{maker.__name__}.from_pretrained({folder!r}, dtype=torch.float32)"
    else:
        model, call = _random_model(transformers, model_class, config, f"hf:{folder}")
        code = f"{call}(transformers.AutoConfig.from_pretrained({folder!r}))"
        notes = [f"{folder} has no weights: they are random"]
    target = _target(f"hf:{folder}", model, functools.partial(inputs_of_config, model, config), inputs, code)
    return target._replace(notes=(*target.notes, *notes), weights="loaded" if has_weights else "random")


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """What transformers calls a weight in ``model`` that has another name in the files."""
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        # Weights that it also converts keep their names
        only = [rule for rule in mapping if isinstance(rule, loading.WeightRenaming)]
    except (ImportError, AttributeError):  # before transformers 5, which has fewer of them
        return str
    state = model.state_dict()
    return lambda name: str(loading.rename_source_key(name, only, [], model.base_model_prefix, state)[0])


def _read_config(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        what = "has no config.json" if os.path.isdir(folder) else "is not a folder; nothing is downloaded"
        raise UsageError(f"{folder} {what}.", "Pass the folder that save_pretrained(FOLDER) wrote: hf:FOLDER.")
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"Cannot read {path}: {first_line(message_of(error))}", "Save the model again.") from None
    in_a_file = "Load the model in a Python file, and scan that."
    if not isinstance(content, dict) or "model_type" not in content:
        what = "it has no model_type"
        if isinstance(content, dict) and content.get("_class_name"):
            what = f"it is a configuration of diffusers ({content['_class_name']})"
        raise UsageError(f"{path} is no configuration of transformers: {what}.", in_a_file)
    if content.get("auto_map"):
        raise UsageError(f"{path} names code of its own (auto_map), which is not run.", in_a_file)
    return content


def _classes(transformers: Any, name: str) -> tuple[Any, Any]:
    """The configuration class, and the model class if the name is that of a model."""
    if name in transformers.CONFIG_MAPPING:
        return transformers.CONFIG_MAPPING[name], None
    value = _attribute(transformers, name)
    if isinstance(value, type) and issubclass(value, transformers.PreTrainedConfig):
        return value, None
    config_class = getattr(value, "config_class", None)
    if isinstance(value, type) and issubclass(value, nn.Module) and config_class is not None:
        return config_class, value
    if value is not None:
        raise UsageError(
            f"transformers.{name} is neither a model nor its configuration.",
            "Pass a model type such as bert, a configuration such as BertConfig, or a model such as BertModel.",
        )
    classes = [attribute for attribute in dir(transformers) if attribute.endswith(("Config", "Model", "LM"))]
    hint = "Pass a model type such as bert, or a class such as BertModel."
    raise unknown_name("transformers", "model", name, [*transformers.CONFIG_MAPPING, *classes], hint)


def _attribute(transformers: Any, name: str) -> Any:
    """An attribute, which is imported on first use; ``None`` if there is none."""
    try:
        return getattr(transformers, name, None)
    except Exception as error:
        problem = f"transformers.{name} cannot be imported: {one_line(error)}"
        raise UsageError(problem, "Install what it needs.") from None


_BYTES = 12
"""Of memory for a parameter: its fp32 value, its cast, what a run adds."""


def _random_model(transformers: Any, model_class: Any, config: Any, what: str) -> tuple[nn.Module, str]:
    """A model with random weights that fits into memory, and what makes it, as code."""
    make, name = transformers.AutoModel.from_config, "AutoModel.from_config"
    if model_class is not None:
        make, name = model_class, model_class.__name__
    # Its size, without any memory; some models compute with their weights when they are made
    parameters = 0
    with contextlib.suppress(Exception), torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in make(config).parameters())
    needed, free = _BYTES * parameters, psutil.virtual_memory().available
    if needed > free:
        size, memory = f"{parameters / 1e9:.1f} billion parameters", f"{needed / 2**30:.0f} GiB of memory"
        why = f"a scan needs about {memory}, and {free / 2**30:.0f} GiB are free"
        raise UsageError(f"{what} has {size}: {why}.", _SMALLER)
    torch.manual_seed(0)
    return call_user_code(f"Making {what}", lambda: make(config)).eval(), f"transformers.{name}"


def _target(
    name: str, model: nn.Module, draw: Callable[[torch.Generator], Any], inputs: tuple[str, ...], code: str
) -> Target:
    def make_batch(index: int) -> Any:
        if inputs:
            return parse_inputs(inputs, seed=index)
        return draw(torch.Generator().manual_seed(index))

    return zoo_target(name, model, make_batch, code, asked=bool(inputs))


def with_labels(target: Target) -> Target:
    """For training, the target with tokens as labels, if it is a language model with a loss."""
    tokens = "decoder_input_ids" if "decoder_input_ids" in target.kwargs else "input_ids"
    make_batch, kind = target.make_batch, type(target.model).__name__
    if not kind.endswith(_LANGUAGE_MODELS) or tokens not in target.kwargs or make_batch is None:
        return target

    def labelled(inputs: Any) -> Any:
        return {**inputs, "labels": inputs[tokens]}

    return target._replace(
        kwargs=labelled(target.kwargs),
        make_batch=lambda index: labelled(make_batch(index)),
        setup=(*target.setup, f'inputs["labels"] = inputs["{tokens}"]'),
    )


_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def inputs_of_config(model: nn.Module, config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Random text, image, clip or sound, by the names of ``forward`` and sizes of ``config``."""
    names = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    text, vision = (getattr(config, part, None) or config for part in ("text_config", "vision_config"))
    wanted = {main} | {name for name, parameter in names.items() if parameter.default is parameter.empty}
    if main in ("input_ids", "pixel_values") and hasattr(vision, "image_size"):
        wanted.add("pixel_values")
        if vision is not config:  # a model of images and text
            wanted.add("input_ids")
    if getattr(config, "is_encoder_decoder", False):
        wanted.add("decoder_input_ids")
    inputs: dict[str, Tensor] = {}
    for name in filter(wanted.__contains__, names):
        if name.endswith("input_ids"):
            positions = int(getattr(text, "max_position_embeddings", None) or 0)
            shape = (1, min(TOKENS, positions) if positions > 0 else TOKENS)  # -1: any number
            vocabulary = int(getattr(text, "vocab_size", None) or 100)
            inputs[name] = torch.randint(0, vocabulary, shape, generator=generator)
        elif sizes := _shape(name, vision if name == "pixel_values" else config):
            inputs[name] = torch.randn(sizes, generator=generator)
    if main not in inputs:
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        missing = [name for name in names if name in wanted and name not in inputs]
        needed = [name for name in missing if names[name].kind not in variadic] or [main]
        shapes = " ".join(f"--inputs {name}=SHAPE" for name in needed)
        problem = f"{type(model).__name__} takes {', '.join(map(repr, needed))}, for which there are no default inputs."
        raise UsageError(problem, f"Give the shapes of what it takes, such as 1x32x16: {shapes}")
    return inputs


def _shape(name: str, config: Any) -> tuple[int, ...]:
    """The shape of an input of real numbers, by the configuration; empty for an unknown name."""
    # An image, or a clip if the configuration has a number of frames
    if name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        frames = filter(None, [getattr(config, "num_frames", None)])
        return (1, *frames, getattr(config, "num_channels", 3), height, width)
    # Of a sound: features by time, or time by features if their number has another name
    if name == "input_features":
        for features in ("input_feat_per_channel", "feature_projection_input_dim"):
            if hasattr(config, features):
                return (1, 4 * TOKENS, getattr(config, features))
        return (1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500))
    if name != "input_values":
        return ()
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # a spectrogram
        return (1, config.max_length, config.num_mel_bins)
    channels = filter(None, [getattr(config, "audio_channels", None)])  # a waveform
    return (1, *channels, SAMPLES)
