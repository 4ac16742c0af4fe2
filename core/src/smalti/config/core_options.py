"""The core's own options, section by section. Plugins declare theirs in the same way.

Names are the reference trainer's where it has the feature, so that its users' files keep working.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from smalti.config.options import Names, OptionGroup, Options, Tables, Texts, option, path_error
from smalti.errors import Problem

LARGEST_IMAGE = 89_478_485
"""Pixels of an image that is sampled: as many as one may have that is read."""


def _count_or_share(value: object) -> object:
    """Percentages such as "1 %" as a share, 0.01; numbers as they are."""
    if not isinstance(value, str) or not value.rstrip().endswith("%"):
        return value
    share = float(value.rstrip()[:-1]) / 100
    if share >= 1:
        raise ValueError("a share must be below 100 %")
    return share


def _whole_above_one(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("a value of 1 or more is a count and must be a whole number")
    return value


def _names_a_place(value: str | None) -> str | None:
    """A path, a hub id, or a word in place of them."""
    if value is not None and (reason := path_error(value)):
        raise ValueError(reason)
    return value


def _or_none(value: object) -> object:
    """An empty text is how other trainers write "none"."""
    return "none" if value == "" else value


def sizes_in(text: str) -> tuple[tuple[int, int], ...]:
    """Widths and heights from words such as 512 or 512x768,768x512. Raises ValueError for anything else."""
    sizes: dict[tuple[int, int], None] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*[xX]\s*(\d{1,9}))?\s*", word)
        if match is None:
            raise ValueError("write 512, or 512x768 for width and height; separate several with commas")
        width, height = int(match[1]), int(match[2] or match[1])
        if not 0 < width * height <= LARGEST_IMAGE:
            raise ValueError(f"an image has at least one pixel and at most {LARGEST_IMAGE // 1_000_000} million")
        sizes[width, height] = None
    return tuple(sizes)


def _sizes(value: str | None) -> str | None:
    if value is not None:
        sizes_in(value)
    return value


def _backend_name(value: object) -> object:
    """Accelerate writes "NO" for none, and names in capitals."""
    if not isinstance(value, str):
        return value
    return None if value.lower() in ("no", "none", "") else value.lower()


Place = Annotated[str | None, AfterValidator(_names_a_place)]


class RunOptions(Options):
    output_dir: Path | None = option(None, help="Run directory, shared by all nodes. The same command resumes the run in it.")
    seed: int = option(42, help="Seed of weights, data order, noise and timesteps.", ge=0)
    max_train_steps: int | None = option(None, help="Total optimizer steps, across resumes.", ge=1)
    num_train_epochs: int | None = option(None, help="Total epochs, across resumes. Ignored with --max_train_steps.", ge=1)
    resume_from_checkpoint: Annotated[str, BeforeValidator(_or_none), AfterValidator(_names_a_place)] = option(
        "latest",
        help='Checkpoint to resume from: "latest", "none", a step, or the path of a checkpoint or run directory.',
    )
    nonfinite_loss: Literal["stop", "skip"] = option(
        "stop",
        help="What to do when the loss is NaN or infinite on any rank: stop the run, or skip the step.",
        level="advanced",
    )
    max_skipped_steps: int = option(
        10,
        help="Stop after this many skipped steps in a row. Steps are skipped for a non-finite loss or an accelerator fault.",
        level="advanced",
        ge=1,
    )


class ModelOptions(Options):
    model_family: str | None = option(None, help="Model architecture. `smalti plugins` lists the installed families.")
    model_type: Literal["full", "lora"] = option("full", help="Train all weights (full) or a LoRA adapter (lora).")
    model_flavour: str | None = option(
        None, help="Variant of the family, such as a size or a release.", aliases=["model_flavor"]
    )
    pretrained_model_name_or_path: Place = option(
        None,
        help="Weights to start from: a folder in diffusers layout, or a Hugging Face Hub id.",
        aliases=["pretrained_model"],
    )
    gradient_checkpointing: bool = option(
        False, help="Recompute activations in the backward pass.", tradeoff="much less memory, slower steps"
    )


class DataOptions(Options):
    data_backend_config: Path | None = option(None, help="JSON file with the datasets (multidatabackend.json).")
    datasets: Tables = option((), help="Datasets in the configuration file itself, as [[datasets]] tables with the same keys.")
    instance_data_dir: Path | None = option(
        None, help="Folder of images, each with its caption in NAME.txt. Replaces a dataset file for a single dataset."
    )
    caption_strategy: str = option(
        "textfile",
        help="Source of captions: textfile (NAME.txt), filename, instanceprompt, or the metadata backend of the "
        "dataset. A dataset can override it.",
    )
    instance_prompt: str | None = option(
        None, help="Caption of every image, such as 'a photo of zwx cat'. Only with --caption_strategy=instanceprompt."
    )
    train_batch_size: int = option(1, help="Images per rank and micro-batch.", ge=1, le=65_536)
    resolution: float = option(
        1024, help="Size of training images in pixels. In megapixels with --resolution_type=area.", gt=0, le=65_536
    )
    resolution_type: Literal["pixel", "area", "pixel_area"] = option(
        "pixel_area",
        help="Meaning of resolution. pixel: shorter edge, area: megapixels, pixel_area: edge of the square of equal area.",
    )
    crop: bool | None = option(
        None,
        help="Scale images to cover their bucket and crop the rest; --no_crop stretches them. Default: on, unless "
        "a dataset overrides it.",
    )
    crop_style: Literal["center", "random", "corner"] | None = option(
        None, help="Crop position. Default: center, unless a dataset overrides it.", level="advanced"
    )
    crop_aspect: Literal["preserve", "square"] | None = option(
        None,
        help="Aspect ratio of buckets: that of each image, or square. Default: preserve, unless a dataset overrides it.",
        level="advanced",
    )
    aspect_bucket_rounding: int = option(2, help="Decimal places of bucket aspect ratios.", level="expert", ge=0, le=9)
    aspect_bucket_alignment: int | None = option(
        None,
        help="Make bucket widths and heights multiples of this many pixels. Default: set by the model family.",
        level="advanced",
        ge=1,
    )
    allow_dataset_oversubscription: bool = option(
        False, help="Raise the repeats of buckets that hold fewer images than one effective batch.", level="advanced"
    )
    caption_dropout_probability: float = option(
        0.1, help="Share of captions replaced by the empty prompt, for classifier-free guidance.", ge=0, le=1
    )
    dataloader_prefetch: int = option(
        4, help="Number of batches to prefetch.", level="advanced", aliases=["dataloader_prefetch_qlen"], ge=1, le=1_000
    )
    dataset_cache_mb: int = option(
        512, help="Cache this many MiB of decoded images in memory per rank. 0 disables the cache.", level="advanced", ge=0
    )
    vae_cache_disable: bool = option(
        False,
        help="Encode images in every step instead of once before training.",
        level="advanced",
        tradeoff="no disk space and new random crops every time, slower steps and the VAE in memory",
    )
    text_cache_disable: bool = option(
        False,
        help="Encode captions in every step instead of once before training.",
        level="advanced",
        tradeoff="no disk space, slower steps and the text encoders in memory",
    )
    cache_dir: Path | None = option(
        None,
        help="Folder of cached latents and text embeddings, which runs can share. Default: `cache` in the run directory.",
    )
    data_error_budget: Annotated[float, BeforeValidator(_count_or_share), AfterValidator(_whole_above_one)] = option(
        0.01,
        help='Maximum share (0.01 or "1%") or number of unreadable images before the run stops.',
        level="advanced",
        ge=0,
    )
    on_changed_data: Literal["refuse", "continue"] = option(
        "refuse",
        help="What to do on resume when images, captions or crops have changed: refuse, or continue with the new data.",
        level="advanced",
    )


class TrainingOptions(Options):
    gradient_accumulation_steps: int = option(1, help="Micro-batches per optimizer step.", ge=1, le=65_536)
    max_grad_norm: float = option(1.0, help="Clip gradients to this global norm. 0 disables clipping.", ge=0)
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
        "adamw", help="Optimizer: adafactor, adafactor_scaled, adagrad, adamw, muon, sgd, or one from a plugin."
    )
    learning_rate: float = option(1e-4, help="Peak learning rate.", ge=0)
    adam_beta1: float = option(0.9, help="Decay rate of the first moment.", level="advanced", ge=0, lt=1)
    adam_beta2: float = option(0.999, help="Decay rate of the second moment.", level="advanced", ge=0, lt=1)
    adam_epsilon: float = option(1e-8, help="Term added to the denominator for numerical stability.", level="advanced", gt=0)
    adam_weight_decay: float = option(
        0.01, help="Decoupled weight decay, not applied to norms and biases.", level="advanced", ge=0
    )
    lr_scheduler: Literal["constant", "constant_with_warmup", "linear", "cosine", "polynomial", "warmup_stable_decay"] = option(
        "constant_with_warmup", help="Learning rate schedule. Each begins with lr_warmup_steps of linear warm-up."
    )
    lr_warmup_steps: int = option(0, help="Steps of linear warm-up from zero.", ge=0)
    lr_decay_share: float = option(
        0.4,
        help="Share of the run, at its end, over which the learning rate decays.",
        when="lr_scheduler == warmup_stable_decay",
        gt=0,
        le=1,
    )
    lr_end_ratio: float = option(0.0, help="Final learning rate, as a share of the peak.", level="advanced", ge=0, le=1)
    lr_power: float = option(
        1.0, help="Exponent of the polynomial decay.", level="advanced", when="lr_scheduler == polynomial", gt=0
    )


class ObjectiveOptions(Options):
    prediction_type: Literal["epsilon", "v_prediction", "sample", "flow_matching"] | None = option(
        None, help="What the model predicts. Default: set by the model family."
    )
    loss_type: Literal["l2", "huber", "smooth_l1"] = option("l2", help="Loss function.", level="advanced")
    huber_c: float = option(
        0.1, help="Threshold between the quadratic and the linear part of the Huber losses.", level="expert", gt=0
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
    flow_mode_scale: float = option(
        1.29, help="Scale of the mode distribution.", level="expert", when="timestep_distribution == mode", ge=-1, le=1.75
    )
    flow_beta_alpha: float = option(
        2.0, help="Alpha of the beta distribution.", level="expert", when="timestep_distribution == beta", ge=1
    )
    flow_beta_beta: float = option(
        2.0, help="Beta of the beta distribution.", level="expert", when="timestep_distribution == beta", ge=1
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


class ValidationOptions(Options):
    validation_prompt: Texts = option(
        (), help="Prompt of a validation image. Repeat the flag for several.", aliases=["validation_prompts"]
    )
    validation_step_interval: int = option(
        0,
        help="Generate validation images every N steps and at the end. 0: only at the end.",
        aliases=["validation_steps"],
        ge=0,
    )
    validation_seed: int = option(42, help="Seed of the first validation image; the next ones count up.", ge=0)
    validation_resolution: Annotated[str | None, AfterValidator(_sizes)] = option(
        None,
        help="Sizes of validation images, such as 512 or 512x768,768x512. Default: the training resolution.",
    )
    validation_num_inference_steps: int = option(25, help="Denoising steps per validation image.", ge=1, le=1_000)
    validation_guidance: float = option(
        3.0, help="Classifier-free guidance scale of validation images. 1 disables guidance.", ge=0
    )
    validation_batch_size: int = option(8, help="Images to sample or evaluate at once per rank.", level="advanced", ge=1)
    eval_steps_interval: int = option(
        0, help="Measure the loss on eval datasets every N steps and at the end. 0: only at the end.", ge=0
    )
    eval_epoch_interval: int = option(0, help="Also evaluate every N epochs. 0: never.", ge=0)
    eval_timesteps: int = option(
        5, help="Number of equally spaced noise levels per evaluated image.", level="advanced", ge=1, le=500
    )
    num_eval_images: int | None = option(
        None, help="Evaluate on this many images of each eval dataset, always the same ones. Default: all.", ge=1
    )


class CheckpointOptions(Options):
    checkpoint_step_interval: int = option(
        500, help="Save a checkpoint every N steps and at the end. 0: only at the end.", aliases=["checkpointing_steps"], ge=0
    )
    checkpoints_total_limit: int = option(
        5, help="Keep this many verified checkpoints. 0 keeps all.", aliases=["save_total_limit"], ge=0
    )
    checkpoint_async: bool = option(
        True,
        help="Write checkpoints in the background, from a copy in host memory.",
        level="advanced",
        tradeoff="training hardly pauses, pinned host memory for the state of the rank",
    )
    on_save_error: Literal["continue", "stop"] = option(
        "continue",
        help="What to do when a checkpoint cannot be written (disk full, no permission): continue and retry, or stop.",
        level="advanced",
    )


class LaunchOptions(Options):
    num_processes: int = option(1, help="Total number of ranks, over all nodes.", accelerate="num_processes", ge=1, le=65_536)
    num_machines: int = option(1, help="Number of nodes.", accelerate="num_machines", ge=1)
    machine_rank: int = option(0, help="Index of this node, from 0.", accelerate="machine_rank", ge=0)
    main_process_ip: str | None = option(None, help="Address of node 0.", accelerate="main_process_ip")
    main_process_port: int | None = option(
        None,
        help="Port on node 0. Default: a free port on a single node, else 29500.",
        accelerate="main_process_port",
        ge=1,
        le=65535,
    )
    use_cpu: bool = option(False, help="Train on the CPU even if there is an accelerator.", accelerate="use_cpu")
    accelerate_config: Place = option(
        None,
        help='Accelerate YAML to start from. "none" ignores the default one of the user.',
        aliases=["accelerate_config_file"],
    )
    process_group_timeout: int = option(
        600, help="Seconds that a rank waits for a lost one before it gives up.", level="advanced", ge=1, le=31_536_000
    )
    dynamo_backend: Annotated[str | None, BeforeValidator(_backend_name)] = option(
        None,
        help="Compile the model with this torch.compile backend, such as inductor.",
        level="advanced",
        accelerate="dynamo_config.dynamo_backend",
    )
    dynamo_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = option(
        None, help="Mode of torch.compile.", level="expert", when="dynamo_backend", accelerate="dynamo_config.dynamo_mode"
    )
    dynamo_recompile_limit: int = option(
        16,
        help="Number of input shapes compiled per block. Other shapes run uncompiled.",
        level="expert",
        when="dynamo_backend",
        ge=1,
    )


FLAT = ("constant", "constant_with_warmup")
"""Values of lr_scheduler that do not depend on the length of the run."""
ONLY_ON_CUDA = ("efficient", "cudnn")
"""Values of sdpa_backend that are nothing on the CPU."""
_WITH_CUDA_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
"""Values of dynamo_mode that replay CUDA graphs, each with the nearest one that does not."""


def cuda_graph_problem(options: LaunchOptions, reason: str) -> Problem | None:
    """If what is compiled is to replay CUDA graphs, in a run in which that does not work for this `reason`."""
    mode = options.dynamo_mode
    if options.use_cpu or options.dynamo_backend != "inductor" or mode not in _WITH_CUDA_GRAPHS:
        return None
    message = f"--dynamo_mode={mode} replays CUDA graphs, which does not work {reason}"
    return Problem(message=message, where="dynamo_mode", fix=f"--dynamo_mode={_WITH_CUDA_GRAPHS[mode]}")


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


def launch_problems(launch: LaunchOptions) -> list[Problem]:
    """What in these numbers cannot be launched."""
    problems = []
    if launch.num_processes % launch.num_machines:
        message = f"num_processes={launch.num_processes} does not divide over num_machines={launch.num_machines}"
        problems.append(Problem(message=message, fix="num_processes counts the ranks of all nodes"))
    if launch.machine_rank >= launch.num_machines:
        message = f"machine_rank={launch.machine_rank} does not exist with num_machines={launch.num_machines}"
        problems.append(Problem(message=message, fix="nodes are counted from 0"))
    if launch.num_machines > 1 and not launch.main_process_ip:
        problems.append(Problem(message="several nodes need the address of node 0", fix="--main_process_ip=ADDRESS"))
    return problems


class TrackingOptions(Options):
    report_to: Names = option(
        (), help="Trackers in addition to events.jsonl: tensorboard, wandb and others that Accelerate supports."
    )
    tracker_project_name: str = option("smalti", help="Project of the run in the trackers.", level="advanced")
    log_interval: int = option(1, help="Log metrics every N steps.", level="advanced", ge=1)
    device_tflops: float | None = option(
        None,
        help="Dense TFLOP/s of one device in the precision of the run, for mfu. Default: detected for common GPUs.",
        level="advanced",
        gt=0,
    )


class PluginOptions(Options):
    plugins: Names = option((), help="Use only these plugins, in addition to the built-in ones.", aliases=["plugin"])
    without: Names = option((), help='Disable these plugins without importing them. "all" keeps only the built-in ones.')


GROUPS = (
    OptionGroup(name="run", title="Run", options=RunOptions),
    OptionGroup(name="model", title="Model", options=ModelOptions),
    OptionGroup(name="data", title="Data", options=DataOptions),
    OptionGroup(name="training", title="Training", options=TrainingOptions),
    OptionGroup(name="optimizer", title="Optimizer", options=OptimizerOptions),
    OptionGroup(name="objective", title="Objective", options=ObjectiveOptions),
    OptionGroup(name="validation", title="Validation", options=ValidationOptions),
    OptionGroup(name="checkpoints", title="Checkpoints", options=CheckpointOptions),
    OptionGroup(name="launch", title="Launch", options=LaunchOptions),
    OptionGroup(name="tracking", title="Tracking", options=TrackingOptions),
    OptionGroup(name="plugins", title="Plugins", options=PluginOptions),
)
