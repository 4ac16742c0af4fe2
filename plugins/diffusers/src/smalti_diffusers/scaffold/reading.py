"""Fields of a family for a published pipeline, read from its configurations and from the code of its classes in diffusers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, getsource
from typing import cast

import torch
from torch import nn

from smalti import UserError
from smalti.diffusion import ConstantShift
from smalti.models import repeated_classes
from smalti_diffusers.families.transformer import JOINT_ATTENTION
from smalti_diffusers.flowshift import scheduler_shift
from smalti_diffusers.scaffold.calls import PipelineCode
from smalti_diffusers.sources.components import Components, class_of

_WIDTHS = ("caption_channels", "cap_feat_dim", "joint_attention_dim", "text_embed_dim", "cross_attention_dim")
"""Keys of a model's configuration that have the width of text tokens; the first one that it has counts."""
_POOLED = ("pooled_projection_dim", "pooled_embed_dim", "text_emb_dim")
_LATENTS, _TIME, _GUIDANCE = "hidden_states", "timestep", "guidance"
_SETTINGS = ("return_dict", "attention_kwargs", "joint_attention_kwargs", "cross_attention_kwargs")
"""Arguments of models that a family leaves at their defaults."""
_IDS = {"txt_ids", "img_ids"}
_READS_VALUES = re.compile(r"[\w.()=]+\.(?:tolist|item|nonzero)\(\)")
"""Code that waits for the values of a tensor."""
_AUTOENCODERS: Mapping[str, str | None] = {
    "AutoencoderKL": None,
    "AutoencoderDC": None,
    "AutoencoderTiny": None,
    "AutoencoderKLQwenImage": "VideoAutoencoder",
    "AutoencoderKLWan": "VideoAutoencoder",
    "AutoencoderKLFlux2": "PatchAutoencoder",
}
"""By the class in diffusers, that of `families.autoencoders`; None is the default of a family."""


class Code(str):
    """A value that is written as it is: a name or an expression, and no text."""


@dataclass(kw_only=True)
class Reading:
    """Of one pipeline. `base` is the class that the family inherits from."""

    pipeline: str
    base: str
    facts: list[str] = field(default_factory=list)
    """A line for each part."""
    fields: dict[str, object] = field(default_factory=dict)
    """Values of class attributes."""
    positions: bool = False
    """Whether the model is given the positions of tokens that Flux's is."""
    unread: dict[str, str] = field(default_factory=dict)
    """By the field, what has to be filled in."""


def read_pipeline(components: Components) -> Reading:
    """Raises UserError for a pipeline without a transformer or U-Net, or with classes that are not installed."""
    part = next((each for each in ("transformer", "unet") if components.has(each)), None)
    if part is None:
        raise UserError(
            f"{components.folder} is a {components.pipeline} without a transformer or U-Net",
            fix="name a pipeline that has one of them, or leave out --from-pipeline",
        )
    pipeline, model = _class(components.pipeline), _class(str(components.kind(part)))
    if part == "unet":
        found = _unet(components)
    else:
        code = PipelineCode(pipeline, part, model)
        found = Reading(pipeline=components.pipeline, base="TransformerFamily")
        with torch.device("meta"):
            _model(found, components.build(part))
        _latents(found, code, components)
        _arguments(found, code, components)
        _encoding(found, code)
    found.facts += [_fact(components, each) for each in components.parts()]
    return found


def _class(name: str) -> type:
    try:
        return class_of("diffusers", name)
    except AttributeError:
        raise UserError(f"the installed diffusers has no class {name}", fix="pip install -U diffusers") from None


def _fact(components: Components, part: str) -> str:
    """A part: its class, and what a run reads from its configuration."""
    kind, text = components.kind(part), ""
    if part == "scheduler":
        config = components.config(part)
        flow = "FlowMatch" in str(kind) or config.get("prediction_type") == "flow_prediction"
        shift = scheduler_shift(config) if flow else None
        moved = f"shift {shift.value}" if isinstance(shift, ConstantShift) else "shift by the size of the image"
        text = f", rectified flow, {moved}" if flow else f", {config.get('prediction_type', 'epsilon')}"
    elif part == "vae":
        config = components.config(part)
        known = ("scaling_factor", "shift_factor", "latent_channels", "z_dim")
        text = "".join(f", {key} {config[key]}" for key in known if config.get(key) is not None)
    elif part == "transformer":
        config = components.config(part)
        text = "".join(f", {key} {config[key]}" for key in ("patch_size", "in_channels", "guidance_embeds") if key in config)
    return f"{part}: {kind}{text}"


# --- transformers -----------------------------------------------------------------------------------------------------


def _model(found: Reading, model: nn.Module) -> None:
    """Repeated blocks, and the layers of attention that an adapter is for."""
    blocks = tuple(getattr(model, "_repeated_blocks", None) or sorted(repeated_classes(model)))
    if not blocks:  # a model of one block of each kind
        lists = (module for module in model.children() if isinstance(module, nn.ModuleList))
        blocks = tuple(dict.fromkeys(type(child).__name__ for each in lists for child in each))
    if blocks:
        found.fields["blocks"] = blocks
    else:
        found.unread["blocks"] = "the classes of the repeated blocks, such as ('Block',)"
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if any(name.endswith(f".{JOINT_ATTENTION[-1]}") for name in layers):
        found.fields["targets"] = Code("JOINT_ATTENTION")
    elif not any(name.endswith(".to_q") for name in layers):
        found.unread["targets"] = "the layers that an adapter is for, by the ends of their names"
    for kind in dict.fromkeys(type(module) for module in model.modules() if type(module).__module__.startswith("diffusers.")):
        if read := _READS_VALUES.search(getsource(kind.forward)):
            found.unread["build_base"] = (
                f"{kind.__name__} reads values, `{read[0]}`, which tensors have not where operations are counted: write the "
                "method, with a hook that gives this module what it reads, as the family lumina2 of smalti-diffusers does"
            )


def _latents(found: Reading, code: PipelineCode, components: Components) -> None:
    """The form of the latents in the model, and the kind of autoencoder."""
    pack, config = code.source("_pack_latents"), components.config(code.part)
    if pack:
        squares = "* 4" in pack
        found.fields["tokens"], found.fields["patch"] = Code("PACKED" if squares else "FLAT"), 2 if squares else 1
    elif ".unbind(" in code.source("__call__"):
        found.fields["tokens"] = Code("FRAMES")
    if config.get("out_channels") == 2 * cast(int, config.get("in_channels", 0)):
        found.unread["outputs"] = "the model's output has twice the channels of latents: write the method `outputs`"
    if "patch" not in found.fields and not isinstance(config.get("patch_size"), int):
        found.unread["patch"] = "latent pixels on the edge of a token"
    kind = components.kind("vae")
    if kind is None:
        found.unread["autoencoder"] = "the pipeline has none: write the methods that encode images and decode latents"
    elif kind not in _AUTOENCODERS:
        found.unread["autoencoder"] = (
            f"a class for {kind}, which inherits from smalti_diffusers.families.autoencoders.Autoencoder"
        )
    elif (own := _AUTOENCODERS[kind]) is not None:
        found.fields["autoencoder"] = Code(own)


def _arguments(found: Reading, code: PipelineCode, components: Components) -> None:
    """What the model is called with: time, guidance, captions, positions, and what nothing here knows."""
    given = {name: value for name, value in code.arguments.items() if name not in _SETTINGS}
    for name in (_LATENTS, _TIME):
        if given.pop(name, None) is None:
            found.unread[name] = f"the model has no argument {name}: write the method `inputs`"
    time = code.time(_TIME)
    if time is None:
        computed = "".join(f"; `{each}` in the pipeline" for each in code.operations(_TIME))
        found.unread["time"] = f"what the model gets for the time, or the method `model_time`{computed}"
    else:
        found.fields["time"] = time
    if code.sign < 0:
        found.fields["sign"] = -1
    if given.pop(_GUIDANCE, None) is not None:
        found.fields["guided"] = True
    zeros = re.search(r"text_ids = torch\.zeros\(", code.source("encode_prompt"))
    if given.keys() >= _IDS and found.fields.get("tokens") == "PACKED" and zeros and code.source("_prepare_latent_image_ids"):
        found.positions = True
        given = {name: value for name, value in given.items() if name not in _IDS}
    captions: dict[str, Code] = {}
    for name, value in given.items():
        variable = next((each for each in code.names(value) if each in code.encoded), None)
        if variable is None or name in _IDS:
            found.unread[name] = (
                f"the model's argument {name}, `{code.text(value)}` in the pipeline: return it from `more_inputs`"
            )
        else:
            _caption(captions, found, code, name, variable, components)
    unused = [each for each in code.encoded if "mask" in each and each in code.defaults("__call__")]
    if unused and "mask" not in captions:  # the pipeline wants it with the tokens, and its model does not take it
        place = code.encoded.index(unused[0])
        captions["mask"] = Code(f'Mask(returned={place}, model=None, pipeline="{unused[0]}")')
    found.fields["captions"] = {name: captions[name] for name in sorted(captions, key=lambda name: name != "tokens")}
    if "tokens" not in captions:
        found.unread["captions"] = "the tokens of a caption as `TokenRows`"


def _caption(
    captions: dict[str, Code], found: Reading, code: PipelineCode, argument: str, variable: str, components: Components
) -> None:
    """One tensor that `encode_prompt` returns, as the field `captions` describes it."""
    more = {"returned": code.encoded.index(variable), "model": argument, "pipeline": variable}
    kind, name, defaults = "TokenRows", "tokens", {"returned": 0, "model": "encoder_hidden_states", "pipeline": "prompt_embeds"}
    widths: tuple[str, ...] = _WIDTHS
    if "mask" in argument or "mask" in variable:
        kind, name, widths = "Mask", "mask", ()
        defaults = {"returned": 1, "model": "encoder_attention_mask", "pipeline": "prompt_attention_mask"}
    elif "pool" in argument or "pool" in variable:
        kind, name, widths = "PooledRow", "pooled", _POOLED
        defaults = {"returned": 0, "model": "pooled_projections", "pipeline": "pooled_prompt_embeds"}
    elif "tokens" in captions:
        name = variable
    texts = [f"{key}={value!r}" for key, value in more.items() if value != defaults[key]]
    if name == "tokens" and "dim=-2" in code.source("encode_prompt"):  # tokens of CLIP and of another encoder in one sequence
        texts.append("more=77")
    if widths:
        config = components.config(code.part)
        width = next((key for key in (*widths, *_same_width(config, components)) if isinstance(config.get(key), int)), "")
        if not width:
            found.unread[f"width of {name}"] = "the key of the model's configuration that has the width of this tensor"
        if kind != "PooledRow" or width != _POOLED[0]:
            texts.append(f"width={width!r}")
    captions[name] = Code(f"{kind}({', '.join(texts)})".replace("'", '"'))


def _same_width(config: Mapping[str, object], components: Components) -> Iterator[str]:
    """The keys of the model's configuration with the width of a text encoder."""
    encoders = [components.config(each) for each in components.parts() if each.startswith("text_encoder")]
    encoders += [cast(dict[str, object], each["text_config"]) for each in encoders if "text_config" in each]
    widths = {each[key] for each in encoders for key in ("hidden_size", "d_model") if isinstance(each.get(key), int)}
    yield from (key for key, value in config.items() if type(value) is int and value in widths)


def _encoding(found: Reading, code: PipelineCode) -> None:
    """Arguments of `encode_prompt` and of the pipeline, and the length of captions."""
    encode, call = code.defaults("encode_prompt"), code.defaults("__call__")
    if "max_sequence_length" not in encode:
        found.unread["encode_captions"] = "`encode_prompt` has no max_sequence_length: write the method `encode_captions`"
    length = call.get("max_sequence_length", encode.get("max_sequence_length"))
    if isinstance(length, int):
        found.fields["max_length"] = length
    else:
        found.unread["max_length"] = "tokens of a caption"
    arguments: dict[str, object] = {
        name: None for name, default in encode.items() if default is Parameter.empty and name.startswith("prompt_")
    }
    arguments |= dict.fromkeys((name for name in ("do_classifier_free_guidance", "clean_caption") if name in encode), False)
    sampling: dict[str, object] = {"negative_prompt": None} if isinstance(call.get("negative_prompt"), str) else {}
    sampling |= dict.fromkeys((name for name in ("clean_caption", "use_resolution_binning") if name in call), False)
    for name, value in (("encode_arguments", arguments), ("sample_arguments", sampling)):
        if value:
            found.fields[name] = value


# --- U-Nets -----------------------------------------------------------------------------------------------------------


def _unet(components: Components) -> Reading:
    """Of Stable Diffusion XL or 1: by the encoders and by what the U-Net is conditioned on."""
    config = components.config("unet")
    added, encoders = config.get("addition_embed_type"), [components.kind(each) for each in ("text_encoder", "text_encoder_2")]
    base = {
        ("text_time", "CLIPTextModel", "CLIPTextModelWithProjection"): "Sdxl",
        (None, "CLIPTextModel", None): "StableDiffusion1",
    }.get((added, *encoders))  # type: ignore[arg-type]
    if base is None:
        raise UserError(
            f"the U-Net of {components.folder} is conditioned otherwise than that of Stable Diffusion 1 or XL: "
            f"addition_embed_type {added}, text encoders {', '.join(map(str, encoders))}",
            fix="leave out --from-pipeline, and write a family that inherits from smalti_diffusers' UNetFamily",
        )
    return Reading(pipeline=components.pipeline, base=base)
