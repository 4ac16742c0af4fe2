"""Options of SimpleTuner that differ from those here by more than their names."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.rules import Convert, is_empty, is_on, plain

_OPTIMIZER_SETTINGS = {
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "adam_weight_decay",
}
_KERNELS = {"native-flash": "flash", "native-efficient": "efficient", "cudnn": "cudnn", "native-math": "math"}
_EXACT = ("xformers", "flash", "flex", "native")
"""Beginnings of the names of attention kernels that compute the same as PyTorch's."""


def schedule_shift(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`flow_schedule_shift`, where 0 means none; a shift by image size overrides it."""
    if plain(value) != 0:
        return {"flow_schedule_shift": value}
    return {} if is_on(values.get("flow_schedule_auto_shift", False)) else {"flow_schedule_shift": 1}


def schedule(value: object, _values: Mapping[str, object]) -> Mapping[str, object]:
    """`lr_scheduler`. The cosine with a warm-up is an older name of the cosine; two schedules are not here."""
    name = plain(value)
    if name in ("sine", "cosine_with_restarts"):
        raise ValueError("this schedule is not supported; the nearest one is cosine")
    return {"lr_scheduler": "cosine" if name == "cosine_with_warmup" else value}


def end_ratio(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`lr_end`, a rate there, as a share of the peak."""
    peak, end = plain(values.get("learning_rate")), plain(value)
    if not isinstance(peak, float) or not isinstance(end, float) or peak <= 0:
        raise ValueError("lr_end is a rate, and lr_end_ratio a share of learning_rate, which the file does not give")
    return {"lr_end_ratio": end / peak}


def ema_decay(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`ema_update_interval` as the decay of an average that is updated in every step and forgets as fast."""
    interval, decay = plain(value), plain(values.get("ema_decay", 0.995))
    if not isinstance(interval, float) or not isinstance(decay, float) or interval < 1 or not 0 < decay < 1:
        raise ValueError("it must be a number of steps")
    return {"ema_decay": round(decay ** (1 / interval), 9)}


def without_interval(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`ema_decay`, unless `ema_update_interval` changes its meaning."""
    interval = values.get("ema_update_interval")
    return {"ema_decay": value} if is_empty(interval) or plain(interval) == 1 else {}


def attention(value: object, _values: Mapping[str, object]) -> Mapping[str, object]:
    """`attention_mechanism`. Kernels of other libraries that are exact become PyTorch's own choice."""
    name = str(value).strip().lower()
    if name in _KERNELS:
        return {"sdpa_backend": _KERNELS[name]}
    if not name.startswith(_EXACT):
        raise ValueError("an approximation, or a kernel that is not known")
    return {"sdpa_backend": "auto"}


def optimizer_settings(value: object, _values: Mapping[str, object]) -> Mapping[str, object]:
    """`optimizer_config`: NAME=VALUE, separated by commas, or a table."""
    settings = value if isinstance(value, Mapping) else dict(_pair(part) for part in str(value).split(",") if part.strip())
    if unknown := sorted(settings.keys() - _OPTIMIZER_SETTINGS.keys()):
        raise ValueError(f"{', '.join(unknown)}: no such setting; supported are {', '.join(_OPTIMIZER_SETTINGS)}")
    return {_OPTIMIZER_SETTINGS[name]: each for name, each in settings.items()}


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.strip().lstrip("-").partition("=")
    if not sign:
        raise ValueError(f"{text.strip()!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def sets(option: str, value: object) -> Convert:
    """A conversion of a switch that, when on, sets an option to this value."""

    def convert(given: object, _values: Mapping[str, object]) -> Mapping[str, object]:
        return {option: value} if is_on(given) else {}

    return convert


def streamed_base(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`ramtorch`, for a LoRA."""
    if is_on(value) and plain(values.get("model_type")) != "lora":
        raise ValueError("only the frozen weights of a LoRA are streamed; fsdp_cpu_offload keeps all weights in host memory")
    return {"stream_base": True} if is_on(value) else {}


def prompt_library(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`validation_prompt_library`, a switch there for prompts that SimpleTuner brings, which are not here."""
    return {} if isinstance(plain(value), bool) else {"validation_prompt_library": value}


def base_model(value: object, values: Mapping[str, object]) -> Mapping[str, object]:
    """`disable_benchmark`, which leaves out the images of the model before training."""
    return {"validation_base_model": not is_on(value)}
