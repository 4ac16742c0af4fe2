"""The complete DeepSpeed configuration of a run. Imports no torch, no DeepSpeed."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from smalti import Config
from smalti.config import DataOptions, OptimizerOptions, RunOptions, TrainingOptions
from smalti.parallel import in_bf16
from smalti_deepspeed.derived_options import SCHEDULERS, named
from smalti_deepspeed.keys import ACCELERATES, OTHERWISE, SHORT, SWITCHED_OFF
from smalti_deepspeed.optimizers import deepspeed_name, normalised, optimizer_settings
from smalti_deepspeed.options import DeepSpeedOptions
from smalti_deepspeed.parsing import Document, is_open, place, read, section
from smalti_deepspeed.validate import unknown_settings

BUCKET = 2**25
"""Elements in a bucket of gradients or gathered parameters: large enough for full bandwidth, 64 MiB in bf16."""
SMALL = 2**24
"""Elements that stage 3 gathers ahead of their use."""
PERSISTENT = 100_000
"""Parameters below this many elements stay whole in stage 3: DeepSpeed's own value."""
_GRAIN = 1024
"""Buffers hold a multiple of this many elements, because swapped tensors are padded to it."""


def given(config: Config) -> Document:
    """The user's own configuration, as it was written. The run must be DeepSpeed's."""
    return read(config[DeepSpeedOptions].deepspeed_config)


def resolved(config: Config, *, world_size: int) -> dict[str, object]:
    """Everything that DeepSpeed has to know about this run, for a configuration that was checked.

    The user's own settings, with what smalti's options say put in, and nothing left at "auto" but sizes that follow from the
    model, which `sized` puts in. The `scheduler` is there for whoever reads it; the rate is moved by smalti's own schedule, the
    same function of the step, so that it must not reach `deepspeed.initialize`.
    """
    document = {key: value for key, value in copy.deepcopy(given(config)).items() if value is not None}
    micro, steps = config[DataOptions].train_batch_size, config[TrainingOptions].gradient_accumulation_steps
    document |= {
        "train_batch_size": micro * steps * world_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        # A norm: elements are clamped by the engine.
        "gradient_clipping": config[TrainingOptions].max_grad_norm
        if config[TrainingOptions].grad_clip_method == "norm"
        else 0.0,
    }
    for key in ("bfloat16", "fp16", "optimizer", "scheduler", *ACCELERATES, *OTHERWISE):
        document.pop(key, None)
    precision = section(given(config), "bfloat16") | section(given(config), "bf16")
    for key in unknown_settings(document):
        del document[key]
    document["bf16"] = {**precision, "enabled": in_bf16(config)}
    document["zero_optimization"] = zero_settings(config)
    if (optimizer := _optimizer(config)) is not None:
        document["optimizer"] = optimizer
    else:
        # One of smalti's: `--optimizer` asked for it by name, so that DeepSpeed's caution has been heard.
        document["zero_allow_untested_optimizer"] = True
    if (scheduler := _scheduler(config)) is not None:
        document["scheduler"] = scheduler
    return document


def sized(document: Mapping[str, object], parameters: int, largest: int, *, world_size: int = 1) -> dict[str, object]:
    """The same with every size that is missing or "auto" fitted to the model.

    `parameters` counts the elements that train, `largest` those of the largest parameter. DeepSpeed's own sizes are for models
    of many billions: its buckets alone, 5e8 elements and two of each, take more memory than a small model.
    """
    zero = section(document, "zero_optimization")
    bucket = max(1, min(parameters, max(largest, BUCKET)))
    sizes = {"reduce_bucket_size": bucket}
    if zero.get("stage") == 3:
        sizes |= {
            "stage3_prefetch_bucket_size": max(1, min(parameters, max(largest, SMALL))),
            "stage3_param_persistence_threshold": min(PERSISTENT, largest),
        }
    else:
        sizes["allgather_bucket_size"] = bucket
    filled = {**zero, **{key: value for key, value in sizes.items() if is_open(zero.get(key))}}
    offload = section(zero, "offload_param")
    if offload.get("device") == "nvme":
        filled["offload_param"] = {**offload, **_buffers(offload, largest, world_size)}
    return _closed({**document, "zero_optimization": filled})


def _closed(values: Mapping[str, object]) -> dict[str, object]:
    """Without what is still "auto": DeepSpeed then takes its own default."""
    kept = {key: value for key, value in values.items() if value != "auto"}
    return {key: _closed(value) if isinstance(value, dict) else value for key, value in kept.items()}


def offload_folders(document: Mapping[str, object]) -> list[str]:
    """The NVMe folders that a resolved document swaps into, each once."""
    zero = section(document, "zero_optimization")
    sections = (section(zero, key) for key in ("offload_param", "offload_optimizer"))
    return list(
        dict.fromkeys(
            str(each["nvme_path"]) for each in sections if each.get("device") == "nvme" and not is_open(each.get("nvme_path"))
        )
    )


def _buffers(offload: Mapping[str, object], largest: int, world_size: int) -> dict[str, object]:
    """Each buffer takes a rank's part of one parameter; so many that reading, use and writing overlap."""
    part = -(-largest // world_size)
    sizes = {"buffer_size": -(-part // _GRAIN) * _GRAIN, "buffer_count": 5}
    return {key: value for key, value in sizes.items() if is_open(offload.get(key))}


def zero_settings(config: Config) -> dict[str, object]:
    """The `zero_optimization` of a run. Needs no torch, unlike the whole, whose precision may be that of a device."""
    zero = {SHORT.get(key, key): value for key, value in section(given(config), "zero_optimization").items()}
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, False) is True and new not in zero:
            zero[new] = {"device": "cpu"}
    if zero.get("stage") != 3:
        zero.pop("offload_param", None)
    zero |= dict.fromkeys(zero.keys() & SWITCHED_OFF.keys(), False)
    path = config[DeepSpeedOptions].offload_param_path
    for key in ("offload_param", "offload_optimizer"):
        offload = section(zero, key)
        named = path if is_open(offload.get("nvme_path")) else offload["nvme_path"]
        if offload.get("device") == "nvme" and named is not None:
            zero[key] = {**offload, "nvme_path": str(place(str(named)))}
    return zero


def _optimizer(config: Config) -> dict[str, object] | None:
    """None for an optimizer of smalti's that DeepSpeed has not."""
    options = config[OptimizerOptions]
    if (name := deepspeed_name(options.optimizer)) is None:
        return None
    asked = named(given(config).get("optimizer"))
    replaced = asked is not None and normalised(asked)[1]  # its settings are not those of what takes its place
    extra = {} if replaced else section(given(config), "optimizer", "params")
    extra = {key: value for key, value in extra.items() if not is_open(value)}
    own: dict[str, object] = {
        "lr": options.learning_rate,
        "betas": [options.adam_beta1, options.adam_beta2],
        "eps": options.adam_epsilon,
        "weight_decay": options.adam_weight_decay,
    }
    params = {key: own[key] for key in optimizer_settings(name)}
    return {"type": name, "params": {**extra, **params}}


def _scheduler(config: Config) -> dict[str, object] | None:
    """None for a schedule of smalti's that DeepSpeed has not, or whose end is not known in steps."""
    options, total = config[OptimizerOptions], config[RunOptions].max_train_steps
    wanted = "constant_with_warmup" if options.lr_scheduler == "constant" else options.lr_scheduler
    name = next((name for name, own in SCHEDULERS.items() if own == wanted), None)
    if name is None or (name != "WarmupLR" and total is None):
        return None
    params: dict[str, object] = {"warmup_num_steps": max(1, options.lr_warmup_steps), "warmup_type": "linear"}
    if name == "WarmupCosineLR":
        params |= {"warmup_min_ratio": 0.0, "cos_min_ratio": options.lr_end_ratio}
    else:
        params |= {"warmup_min_lr": 0.0, "warmup_max_lr": options.learning_rate}
    if name != "WarmupLR":
        params["total_num_steps"] = total
    return {"type": name, "params": params}
