"""What is wrong with the options of text encoders and adapters, reported before anything is launched. Imports no torch."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from smalti import Config, Problem, UserError
from smalti.config import LaunchOptions, ModelOptions, OptimizerOptions
from smalti_diffusers.options import TITLES, DiffusersOptions, LoraOptions, pattern_values

_OPTION = "base_model_precision"


def problems(config: Config) -> list[Problem]:
    """All complaints at once."""
    return [*_clip_skip(config), *_without_adapter(config), *_text_encoders(config), *_kind(config), *_quantisation(config)]


def _clip_skip(config: Config) -> list[Problem]:
    """Layers to leave out in a family whose pipeline says which ones count."""
    if not config[DiffusersOptions].clip_skip or config[ModelOptions].model_family in ("sd1x", "sd2x"):
        return []
    message = "clip_skip is for Stable Diffusion 1 and 2; in other families the layer is always the same"
    return [Problem(message=message, where=config.source("clip_skip"), fix="leave --clip_skip out")]


def _without_adapter(config: Config) -> list[Problem]:
    """Files of adapters in a run that trains none."""
    if config[ModelOptions].model_type == "lora":
        return []
    return [
        Problem(
            message=f"--{name} is for adapters, and this run trains the complete model",
            where=config.source(name),
            fix=f"--model_type=lora, or leave --{name} out",
        )
        for name in ("init_lora", "assistant_lora")
        if config.value(name) is not None
    ]


def _text_encoders(config: Config) -> list[Problem]:
    """Options of text encoders in a run that does not train them, or that do not go together."""
    options, found = config[LoraOptions], []
    if options.train_text_encoder and config[ModelOptions].model_type != "lora":
        message = "train_text_encoder trains an adapter of the text encoders, and this run trains the complete model"
        fix = "--model_type=lora, or leave --train_text_encoder out"
        found.append(Problem(message=message, where=config.source("train_text_encoder"), fix=fix))
    rates, stops = ("text_encoder_lr", "text_encoder_2_lr"), ("train_text_encoder_steps", "train_text_encoder_frac")
    given = [name for name in (*rates, *stops) if config.value(name) is not None]
    for name in () if options.train_text_encoder else given:
        message = f"{name} is for the training of text encoders, and this run does not train them"
        fix = f"--train_text_encoder, or leave --{name} out"
        found.append(Problem(message=message, where=config.source(name), fix=fix))
    if set(stops) <= set(given):
        message = f"{stops[0]} and {stops[1]} both say when the text encoders stop learning"
        found.append(Problem(message=message, where=config.source(stops[1]), fix="leave one of them out"))
    if given and given[0] in rates and config[OptimizerOptions].learning_rate == 0:
        message = f"{given[0]} is set, and follows the schedule of a learning_rate of 0"
        found.append(Problem(message=message, where=config.source("learning_rate"), fix="--learning_rate above 0"))
    return found


def _kind(config: Config) -> list[Problem]:
    """Options that the kind of adapter does not have."""
    options = config[LoraOptions]
    if config[ModelOptions].model_type != "lora":
        return []
    found = []
    for option in ("lora_rank_pattern", "lora_alpha_pattern", "lokr_factor_pattern"):
        try:
            pattern_values(option, getattr(options, option))
        except UserError as error:
            found.append(Problem(message=error.message, where=config.source(option), fix=error.fix))
    kind = TITLES[options.lora_kind]
    if options.lora_kind in ("lokr", "loha"):
        lacking = {
            "lora_dropout": (options.lora_dropout > 0, f"{kind} has no dropout"),
            "loraplus_lr_ratio": (options.loraplus_lr_ratio != 1, f"the matrices of a {kind} have one learning rate"),
            "use_rslora": (options.use_rslora, f"the scale of a {kind} is alpha / rank"),
            "assistant_lora": (options.assistant_lora is not None, f"an assistant is not supported beside a {kind}"),
        }
        found += [
            Problem(message=message, where=config.source(option), fix=f"leave --{option} out, or --lora_kind=lora")
            for option, (given, message) in lacking.items()
            if given
        ]
    if options.lora_kind != "lora" and options.tlora_min_rank is not None:
        message = f"the ranks of a {kind} cannot be active at some noise levels alone"
        fix = "leave --tlora_min_rank out, or --lora_kind=lora"
        found.append(Problem(message=message, where=config.source("tlora_min_rank"), fix=fix))
    if options.lora_kind == "dora" and options.base_model_precision != "no_change":
        message = f"DoRA reads the weights in every step, and those in {options.base_model_precision} would be restored for it"
        fix = f"--{_OPTION}=no_change, or --lora_kind=lora"
        found.append(Problem(message=message, where=config.source(_OPTION), fix=fix))
    return found


def _quantisation(config: Config) -> list[Problem]:
    precision = config[LoraOptions].base_model_precision
    if precision == "no_change":
        return []
    where = config.source(_OPTION)
    if config[ModelOptions].model_type != "lora":
        message = f"weights in {precision} have no gradient: beside them only an adapter can be trained"
        return [Problem(message=message, where=where, fix=f"--model_type=lora, or --{_OPTION}=no_change")]
    if precision.endswith("-torchao") and not _has_torchao():
        message = f"{_OPTION}={precision} needs torchao 0.18 or newer, which is not installed"
        return [Problem(message=message, where=where, fix="pip install 'torchao>=0.18'", package="torchao")]
    if precision == "nf4-torchao" and config[LaunchOptions].dynamo_backend is not None:
        message = "torch.compile cannot trace how torchao restores weights in nf4"
        fix = f"--{_OPTION}=int8-torchao, or leave --dynamo_backend out"
        return [Problem(message=message, where=where, fix=fix)]
    return []


def _has_torchao() -> bool:
    """Whether it is there, in a version that has what `quantisation` asks for."""
    if find_spec("torchao") is None:
        return False
    major, minor, *_ = version("torchao").split(".")
    return (int(major), int(minor)) >= (0, 18)
