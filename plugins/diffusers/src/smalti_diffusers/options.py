"""The options that all families of diffusers share. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator

from smalti import OptionGroup, Options, Problem, Translation, UserError, option
from smalti.config import Names

EmptyPrompt = Literal["auto", "zeros", "encoded"]
FrozenType = Literal["auto", "fp32", "bf16"]
Kind = Literal["lora", "dora", "lokr", "loha"]
TITLES: Mapping[Kind, str] = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "loha": "LoHa"}
Init = Literal["kaiming", "gaussian", "orthogonal"]
Precision = Literal["no_change", "int8-torchao", "fp8-torchao", "nf4-torchao", "int8-rowwise", "fp8-rowwise"]

Sampling = Literal["ddim", "ddpm", "euler", "euler-a", "heun", "unipc", "dpm++"]
_CLASSES = {
    "DDIMScheduler": "ddim",
    "DDPMScheduler": "ddpm",
    "EulerDiscreteScheduler": "euler",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "EulerAncestralDiscreteScheduler": "euler-a",
    "HeunDiscreteScheduler": "heun",
    "UniPCMultistepScheduler": "unipc",
    "DPMSolverMultistepScheduler": "dpm++",
}


_OFF = ("false", "0", "no", "off", "f", "n")
"""What an option that is on or off can be called if it is off."""


def _short_name(value: object) -> object:
    """The name of a scheduler for the name of its class in diffusers."""
    return _CLASSES.get(value, value) if isinstance(value, str) else value


class DiffusersOptions(Options):
    revision: str | None = option(None, help="Revision of a Hub model: a branch, a tag or a commit.")
    base_pipeline: str | None = option(
        None,
        help="Pipeline, a folder or Hub id, for the parts that a single file or a transformer folder does not have. "
        "Default: the one published for the model.",
    )
    variant: str | None = option(
        None,
        help="Variant of the weight files, such as fp16 for model.fp16.safetensors. Default: plain names, or the only variant.",
    )
    init_from_config: bool = option(
        False, help="Initialise the trained model at random; read only its configuration.", level="advanced"
    )
    vae_dtype: FrozenType = option(
        "auto", help="Compute dtype of the VAE. auto: what the model family needs.", level="advanced"
    )
    vae_enable_tiling: bool = option(
        False,
        help="Decode validation images in overlapping tiles.",
        level="advanced",
        tradeoff="less memory for large images, slight differences at the edges of tiles",
    )
    vae_enable_slicing: bool = option(
        False, help="Decode validation images one by one.", level="advanced", tradeoff="less memory for batches, slower"
    )
    text_encoder_dtype: FrozenType = option(
        "auto",
        help="Compute dtype of the text encoders. auto: as mixed_precision on an accelerator, fp32 on the CPU.",
        level="advanced",
    )
    tokenizer_max_length: int | None = option(
        None,
        help="Maximum caption length in tokens, where the family lets you choose. Default: set by the model family.",
        level="advanced",
        ge=1,
    )
    validation_noise_scheduler: Annotated[Sampling | None, BeforeValidator(_short_name)] = option(
        None,
        help="Scheduler of validation images, with the noise schedule of the model. Default: that of the pipeline.",
        level="advanced",
    )
    clip_skip: int = option(
        0,
        help="Last layers of the text encoder of Stable Diffusion 1 or 2 to leave out. 1 is what ComfyUI calls -2, A1111 2.",
        level="advanced",
        ge=0,
    )
    sdxl_empty_prompt: EmptyPrompt = option(
        "auto",
        help="Embeddings of dropped captions, and of no negative prompt. auto: as force_zeros_for_empty_prompt of "
        "the pipeline.",
        level="advanced",
        when="model_family == sdxl",
    )
    flux_guidance_value: float = option(
        1.0,
        help="Guidance scale given to a guidance-distilled Flux (FLUX.1-dev, FLUX.2-dev) in training.",
        level="advanced",
        ge=0,
    )
    flux_true_cfg_scale: float = option(
        1.0,
        help="True classifier-free guidance scale in validation images of Flux. 1 disables it.",
        level="advanced",
        when="model_family == flux",
        tradeoff="two passes per step above 1, for models trained with caption dropout",
        ge=1,
    )


class LoraOptions(Options):
    init_lora: Path | None = option(
        None,
        help="Start from the adapter in this file, in any format. Its kind, rank and alpha are those of the run.",
        when="model_type == lora",
    )
    assistant_lora: str | None = option(
        None,
        help="Frozen LoRA that is active in training and off in samples and exports, for distilled models. "
        "A file, or user/repository/file on the Hub.",
        when="model_type == lora",
        aliases=["assistant_lora_path"],
    )
    lora_kind: Kind = option(
        "lora",
        help="Kind of adapter: LoRA, LoKr (Kronecker product), LoHa (Hadamard product), or DoRA (LoRA with a length per row).",
        when="model_type == lora",
        tradeoff="dora computes a norm of each adapted weight in every step, loha a matrix as large as the weight",
    )
    lora_rank: int = option(16, help="Rank of the adapter's matrices.", when="model_type == lora", ge=1)
    lora_alpha: float | None = option(
        None,
        help="Alpha of the adapter, which is scaled by alpha / rank. Default: the rank (scale 1.0).",
        when="model_type == lora",
        gt=0,
    )
    lora_dropout: float = option(
        0.0, help="Dropout probability on the adapter's input in training.", when="model_type == lora", ge=0, lt=1
    )
    lora_targets: Names = option(
        (),
        help="Layers to adapt: name suffixes, classes of modules such as Attention, or regular expressions of name suffixes. "
        "Default: set by the model family.",
        when="model_type == lora",
    )
    lora_exclude: Names = option(
        (), help="Layers not to adapt, named as in lora_targets.", level="advanced", when="model_type == lora"
    )
    train_text_encoder: bool = option(
        False,
        help="Also train an adapter of the text encoders, in their attention and where `lora_targets` matches. For Stable "
        "Diffusion 1, 2 and XL.",
        when="model_type == lora",
        tradeoff="captions are encoded in every step, with gradients, and the encoders stay in memory",
    )
    text_encoder_lr: float | None = option(
        None,
        help="Learning rate of the adapters of the text encoders. Default: that of the run.",
        when="train_text_encoder",
        ge=0,
    )
    text_encoder_2_lr: float | None = option(
        None,
        help="Learning rate of the adapter of the second text encoder. Default: that of the first.",
        level="advanced",
        when="train_text_encoder",
        ge=0,
    )
    train_text_encoder_steps: int | None = option(
        None,
        help="Steps after which the text encoders stop learning; the model learns to the end. Default: those of the run.",
        level="advanced",
        when="train_text_encoder",
        ge=1,
    )
    train_text_encoder_frac: float | None = option(
        None,
        help="The same as a share of the steps of the run.",
        level="advanced",
        when="train_text_encoder",
        gt=0,
        le=1,
    )
    lora_rank_pattern: Names = option(
        (),
        help="Rank of some layers, as NAME=RANK with names as in lora_targets. The first that matches counts.",
        level="advanced",
        when="model_type == lora",
    )
    lora_alpha_pattern: Names = option(
        (), help="Alpha of some layers, as NAME=ALPHA.", level="advanced", when="model_type == lora"
    )
    use_rslora: bool = option(
        False,
        help="Scale the adapter by alpha / sqrt(rank): rank-stabilised LoRA.",
        level="advanced",
        when="model_type == lora",
    )
    lokr_factor: int = option(
        -1,
        help="Size of the smaller factor of a LoKr, where it divides the size of the layer. -1: near the square root.",
        when="lora_kind == lokr",
        ge=-1,
    )
    lokr_factor_pattern: Names = option(
        (), help="Other values of `lokr_factor` for some layers, as NAME=FACTOR.", level="advanced", when="lora_kind == lokr"
    )
    lokr_full: bool = option(
        False, help="Train full matrices as both factors of a LoKr, without rank and alpha.", when="lora_kind == lokr"
    )
    lora_init: Init = option(
        "kaiming",
        help="Initialisation of the first matrix of a LoRA or DoRA; the second is zero. orthogonal: rows at right angles.",
        level="advanced",
        when="model_type == lora",
        aliases=["lora_init_type"],
    )
    tlora_min_rank: int | None = option(
        None,
        help="T-LoRA: this many ranks are active at pure noise, all without noise. Use it with lora_init=orthogonal.",
        level="advanced",
        when="lora_kind == lora",
        tradeoff="learns single images with less overfitting; exported files act at every noise level with all ranks",
        ge=1,
    )
    tlora_alpha: float = option(
        1.0,
        help="Exponent of the share of ranks of a T-LoRA, (1 - noise level). Above 1, fewer are active at medium noise.",
        level="advanced",
        when="lora_kind == lora",
        gt=0,
    )
    loraplus_lr_ratio: float = option(
        1.0,
        help="Learning rate of the second matrix of a LoRA over that of the first (LoRA+). Its authors use 16.",
        level="advanced",
        when="model_type == lora",
        gt=0,
    )
    lora_base_dtype: FrozenType = option(
        "auto",
        help="Dtype of the frozen weights. auto: the compute precision of the run.",
        level="advanced",
        when="model_type == lora",
        tradeoff="bf16 takes half the memory of fp32",
    )
    base_model_precision: Precision = option(
        "no_change",
        help="Quantise the frozen linear layers of the blocks. rowwise also multiplies in 8 bits, and can be sharded.",
        when="model_type == lora",
        tradeoff="8 bits take half the memory of bf16, nf4 a quarter; slower steps with torchao, rounded inputs with rowwise",
    )


def pattern_values(option: str, given: Sequence[str]) -> list[tuple[str, float]]:
    """The pairs in the value of an option of patterns. Raises UserError for one that is not NAME=NUMBER."""
    pairs = []
    for each in given:
        name, _, value = each.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if not name or (number <= 0 and value != "-1"):
            raise UserError(f"{each!r} in --{option} is not NAME=NUMBER", fix=f"--{option}=to_q=8,Attention=16")
        pairs.append((name, number))
    return pairs


def _from_init_lora(given: Mapping[str, object]) -> Translation:
    """Rank and alpha of the file to start from."""
    path = given.get("init_lora")
    if not isinstance(path, str | Path) or not str(path):
        return Translation()
    from smalti_diffusers.lora.header import AdapterHeader

    try:
        header = AdapterHeader(Path(path))
    except UserError as error:
        fix = (
            f"{error.fix}; to resume without the file: leave --init_lora out, and give --lora_rank and --lora_alpha of the run"
        )
        return Translation(problems=[Problem(message=f"--init_lora: {error.message}", fix=fix)])
    notices = []
    if (skipped := header.text_layers) and str(given.get("train_text_encoder", False)).lower() in _OFF:
        left_out = (
            f"the {skipped} layers of text encoders in the file are left out; --train_text_encoder trains those of SD and SDXL"
        )
        notices.append(("text encoders", f"are not used: {left_out}"))
    if unused := header.unused:
        notices.append((unused[0], f"is not used, like {len(unused) - 1} other tensors of the file: they are not of a LoRA"))
    found = {"lora_rank": ("rank", header.rank), "lora_alpha": ("alpha", header.alpha)}
    values: dict[str, tuple[str, object]] = {name: each for name, each in found.items() if each[1] is not None}
    if (header.kind, given.get("lora_kind")) != ("lora", "dora"):
        values["lora_kind"] = ("kind", header.kind)
    if header.timed is not None and given.get("lora_kind") in (None, "lora"):
        values["tlora_min_rank"], values["tlora_alpha"] = (("T-LoRA", each) for each in header.timed)
    if header.kind == "lokr":
        values["lokr_full"] = ("rank", header.rank is None)
        if header.factor is not None:
            values["lokr_factor"] = ("factor", header.factor)
    return Translation(values=values, notices=notices)


GROUPS = (
    OptionGroup(name="diffusers", title="Diffusers families", options=DiffusersOptions),
    OptionGroup(name="lora", title="LoRA", options=LoraOptions, derived=_from_init_lora),
)
