"""Options of a training step: precision, EMA, optimizer and objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from smalti.config.options import Options, Translation, option
from smalti.errors import Problem

FLAT = ("constant", "constant_with_warmup")
"""Values of lr_scheduler that do not depend on the length of the run."""
SETTINGS: Mapping[str, Mapping[str, float]] = {
    "lion": {"adam_beta2": 0.99},
    "stableadamw": {"adam_beta2": 0.99, "adam_epsilon": 1e-6},
    "prodigy": {"learning_rate": 1.0},
    "prodigy_schedulefree": {"learning_rate": 1.0, "adam_beta2": 0.99},
}
"""Defaults of single optimizers where they differ from those of the options."""


class TrainingOptions(Options):
    gradient_accumulation_steps: int = option(1, help="Micro-batches per optimizer step.", ge=1, le=65_536)
    max_grad_norm: float = option(
        1.0,
        help="Clip gradients to this global norm; with --grad_clip_method=value, each element to this absolute value. "
        "0 disables clipping.",
        ge=0,
    )
    grad_clip_method: Literal["norm", "value"] = option(
        "norm", help="What --max_grad_norm limits: the global norm of the gradients, or the absolute value of each element."
    )
    mixed_precision: Literal["auto", "no", "bf16"] = option(
        "auto",
        help="Compute precision; weights and optimizer state stay in fp32. auto: bf16 where the device has it "
        "natively, else fp32.",
        accelerate="mixed_precision",
    )
    allow_tf32: bool = option(
        True,
        help="Compute fp32 matrix products and convolutions of the trained model in TF32 on CUDA devices that can. "
        "Only with --mixed_precision=no.",
        level="advanced",
        tradeoff="several times faster; products have 10 bits of mantissa, bf16 has 7, fp32 23",
    )
    channels_last: bool | None = option(
        None,
        help="Use the channels-last memory format for convolutions. Default: on for U-Nets on CUDA devices.",
        level="advanced",
    )
    sdpa_backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = option(
        "auto",
        help="Kernel of scaled_dot_product_attention in the trained model. efficient and cudnn need a CUDA device.",
        level="advanced",
    )
    use_ema: bool = option(False, help="Keep an exponential moving average (EMA) of the weights in fp32.")
    ema_decay: float = option(0.995, help="Decay of the EMA, warmed up from (1+step)/(10+step).", when="use_ema", ge=0, lt=1)
    ema_device: Literal["accelerator", "cpu"] = option(
        "accelerator",
        help="Device that holds the EMA.",
        level="advanced",
        when="use_ema",
        tradeoff="cpu uses no accelerator memory, copies the weights to the host during the next step",
    )


class OptimizerOptions(Options):
    optimizer: str = option(
        "adamw", help="Optimizer: adamw, or one from a package, such as adamw8bit. All are in docs/optimizers.md."
    )
    learning_rate: float = option(
        1e-4, help="Peak learning rate. Default: 0.0001, with prodigy or prodigy_schedulefree 1.", ge=0
    )
    adam_beta1: float = option(0.9, help="Decay rate of the first moment.", level="advanced", ge=0, lt=1)
    adam_beta2: float = option(
        0.999,
        help="Decay rate of the second moment; of the momentum for lion. "
        "Default: 0.999, with lion, prodigy_schedulefree and stableadamw 0.99.",
        level="advanced",
        ge=0,
        lt=1,
    )
    adam_epsilon: float = option(
        1e-8,
        help="Term added to the denominator for numerical stability. Default: 1e-8, with stableadamw 1e-6.",
        level="advanced",
        gt=0,
    )
    adam_weight_decay: float = option(
        0.01, help="Decoupled weight decay, not applied to norms and biases.", level="advanced", ge=0
    )
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine", "polynomial", "warmup_stable_decay"] = option(
        "constant_with_warmup", help="Learning rate schedule. Each begins with lr_warmup_steps of linear warm-up."
    )
    lr_warmup_steps: int = option(0, help="Steps of linear warm-up from zero.", ge=0)
    lr_cosine_steps: int | None = option(
        None,
        help="Steps in which the cosine falls from the peak; it rises again in as many. Default: it falls once, until the end.",
        level="advanced",
        when="lr_scheduler == cosine",
        ge=1,
    )
    lr_decay_share: float = option(
        0.4,
        help="Share of the run, at its end, over which the learning rate decays.",
        level="advanced",
        when="lr_scheduler == warmup_stable_decay",
        gt=0,
        le=1,
    )
    lr_end_ratio: float = option(0.0, help="Final learning rate, as a share of the peak.", level="advanced", ge=0, le=1)
    lr_power: float = option(
        1.0, help="Exponent of the polynomial decay.", level="advanced", when="lr_scheduler == polynomial", gt=0
    )


def implied_settings(given: Mapping[str, object]) -> Translation:
    """The settings that the optimizer has by default, where they are not given."""
    name = given.get("optimizer")
    settings = SETTINGS.get(name.rpartition(":")[2].strip().lower().replace("-", "_"), {}) if isinstance(name, str) else {}
    return Translation(values={option: (str(name), value) for option, value in settings.items() if given.get(option) is None})


class ObjectiveOptions(Options):
    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow_matching"] | None = option(
        None, help="What the model predicts. Default: set by the model family."
    )
    loss_type: Literal["l2", "huber", "smooth_l1"] = option("l2", help="Loss function.", level="advanced")
    huber_c: float = option(
        0.1, help="Threshold between the quadratic and the linear part of the Huber losses.", level="expert", gt=0
    )
    huber_schedule: Literal["constant", "snr", "exponential"] = option(
        "constant",
        help="Threshold by noise level: huber_c at all of them, or from 1 without noise down to huber_c.",
        level="expert",
    )
    snr_gamma: float | None = option(
        None,
        help="Gamma of min-SNR weighting for epsilon and v_prediction; 5 is the published value. Default: no weighting.",
        level="advanced",
        ge=0,
    )
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] | None = option(
        None, help="Noise schedule of DDPM. Default: set by the model family.", level="expert"
    )
    rescale_betas_zero_snr: bool = option(
        False, help="Rescale the DDPM schedule so that its last step is pure noise.", level="advanced"
    )
    timestep_distribution: Literal["uniform", "logit_normal", "mode", "beta"] | None = option(
        None,
        help="Timestep sampling distribution. Default: logit_normal for rectified flow, uniform for DDPM.",
        level="advanced",
    )
    flow_sigmoid_mean: float = option(
        0.0, help="Mean of the logit-normal distribution.", level="expert", when="timestep_distribution == logit_normal"
    )
    flow_sigmoid_scale: float = option(
        1.0,
        help="Standard deviation of the logit-normal distribution.",
        level="expert",
        when="timestep_distribution == logit_normal",
        gt=0,
    )
    flow_schedule_shift: float | None = option(
        None,
        help="Timestep shift; raise it for larger images, 1 disables it. Default: set by the model family.",
        level="advanced",
        gt=0,
    )
    flow_schedule_auto_shift: bool = option(
        False, help="Compute the shift from the image size, instead of --flow_schedule_shift.", level="advanced"
    )
    flow_weighting: Literal["none", "sigma_sqrt", "cosmap"] = option(
        "none", help="Loss weighting over noise levels, for flow matching.", level="expert"
    )


def warm_up_problem(options: OptimizerOptions, steps: int) -> Problem | None:
    """A rate that is to fall from its peak in a run that ends before it has risen."""
    warmup, shape = options.lr_warmup_steps, options.lr_scheduler
    if warmup < steps or not warmup or shape in FLAT:
        return None
    message = f"lr_warmup_steps={warmup}, and the run has {steps} steps: the {shape} schedule would end before its peak"
    fix = f"--lr_warmup_steps={steps // 10}; or --lr_scheduler=constant_with_warmup for the first steps of a longer run"
    return Problem(message=message, where="lr_warmup_steps", fix=fix)


def warm_up_notice(options: OptimizerOptions, steps: int) -> str:
    """What a rate that stays at its peak does not reach in this run; empty if it does."""
    warmup = options.lr_warmup_steps
    if warmup < steps or not warmup or options.lr_scheduler not in FLAT:
        return ""
    share = steps / (warmup + 1)
    return f"the learning rate rises to {share:.2g} of learning_rate: lr_warmup_steps={warmup}, and the run has {steps} steps"
