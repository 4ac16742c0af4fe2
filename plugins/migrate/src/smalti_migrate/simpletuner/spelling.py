"""Whether a file is SimpleTuner's, what values mean only in such a file, and SimpleTuner's defaults, which hold for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from smalti.config import Given, Schema
from smalti_migrate.simpletuner.flavours import BASE_MODELS, LORA_TARGETS, OTHER_MODELS
from smalti_migrate.simpletuner.rules import is_empty, is_on, plain
from smalti_migrate.simpletuner.translation import translate_reference_options

ENOUGH = 2
"""Keys that only SimpleTuner has, from which on a file is SimpleTuner's. One may have been copied into another file."""
_DDPM = ("sdxl", "pixart", "pixart_sigma", "sd1x", "sd2x", "kolors", "deepfloyd", "stable_cascade")
"""SimpleTuner's families that are not trained with flow matching."""
_COSINE = 1000
"""Steps of a cosine there, where lr_warmup_steps gives none."""
_LOWEST_RATE = 4e-7
"""SimpleTuner's default of both learning_rate and lr_end."""


def reference_keys(content: Mapping[str, object], schema: Schema) -> tuple[str, ...]:
    """The keys by which a file is recognised as SimpleTuner's; none if it is not.

    Such a file has no tables named like sections here, and at least two keys that SimpleTuner has and smalti has not.
    """
    sections = {group.name for group in schema.groups}
    if any(isinstance(value, dict) and key in sections for key, value in content.items()):
        return ()
    markers = translate_reference_options(content, schema).markers
    return markers if len(markers) >= ENOUGH else ()


# --- values -------------------------------------------------------------------------------------------------------


def with_reference_meaning(layer: Mapping[str, Given], notices: list[str]) -> dict[str, Given]:
    """The values of SimpleTuner's file. Some options have the same name in both, and another meaning."""
    found = dict(layer)
    for change in (_cosine, _cache, _snr, _flavour):
        if notice := change(found):
            notices.append(notice)
    return found


def _cosine(layer: dict[str, Given]) -> str:
    """There, lr_warmup_steps is how long a cosine takes to fall. It rises again in as many steps."""
    scheduler = layer.get("lr_scheduler")
    if scheduler is None or plain(scheduler.value) != "cosine":
        return ""
    warmup = layer.pop("lr_warmup_steps", None)
    steps = warmup.value if warmup is not None and plain(warmup.value) not in (0.0, None) else _COSINE
    place = (warmup or scheduler).place
    layer["lr_cosine_steps"] = Given(value=steps, spelling="lr_cosine_steps", place=place)
    why = "SimpleTuner's cosine falls in these steps and rises again, without a warm-up"
    return f"{place}: lr_cosine_steps = {steps} here: {why}"


def _cache(layer: dict[str, Given]) -> str:
    """There, cache_dir is for downloads."""
    given = layer.get("cache_dir")
    if given is None or not given.place.lstrip("-").replace("-", "_").startswith("cache_dir in "):
        return ""
    del layer["cache_dir"]
    return f"{given.place}: no effect: it is the folder of downloads there; HF_HOME in the environment is that of the Hub"


def _snr(layer: dict[str, Given]) -> str:
    given, family = layer.get("snr_gamma"), layer.get("model_family")
    if given is None or family is None or _is_ddpm(family.value):
        return ""
    del layer["snr_gamma"]
    return f"{given.place}: no effect: min-SNR weighting is not for flow matching"


def _flavour(layer: dict[str, Given]) -> str:
    given, family = layer.get("model_flavour"), layer.get("model_family")
    if given is None or family is None:
        return ""
    other = OTHER_MODELS.get((str(plain(family.value)), str(plain(given.value))))
    if other is None:
        return ""
    layer["model_flavour"] = replace(given, value=other)
    return f'{given.place}: "{given.value}" is "{other}" here: SimpleTuner has another model of this name'


def _is_ddpm(family: object) -> bool:
    return str(family).strip().lower().replace("-", "_") in _DDPM


# --- defaults -----------------------------------------------------------------------------------------------------

Values = Mapping[str, object]


@dataclass(frozen=True)
class ReferenceDefault:
    """A default of SimpleTuner that differs from the one here. `shown` and `when` say it in the documentation.

    `value` computes it from the values that are given; None if the default here holds.
    """

    option: str
    shown: str
    value: Callable[[Values], object]
    when: str = ""


def _always(option: str, value: object) -> ReferenceDefault:
    return ReferenceDefault(option, f"`{json.dumps(value)}`", lambda _values: value)


def _shift(values: Values) -> object:
    family = values.get("model_family")
    unshifted = family is None or _is_ddpm(family) or family == "cosmos"  # whose noise levels are EDM's
    return None if unshifted or is_on(values.get("flow_schedule_auto_shift", False)) else 3.0


def _epochs(values: Values) -> object:
    lengths = (values.get("max_train_steps"), values.get("num_train_epochs"))
    return 1 if all(is_empty(each) or plain(each) == 0 for each in lengths) else None


def _end_ratio(values: Values) -> object:
    rate = plain(values.get("learning_rate", _LOWEST_RATE))
    falls = plain(values.get("lr_scheduler")) in ("cosine", "polynomial")
    return min(1.0, _LOWEST_RATE / rate) if falls and isinstance(rate, float) and rate > 0 else None


def _base_model(values: Values) -> object:
    given = [values.get(name) for name in ("model_flavour", "pretrained_model_name_or_path")]
    return BASE_MODELS.get(str(plain(values.get("model_family")))) if all(map(is_empty, given)) else None


def _power(values: Values) -> object:
    return 0.8 if plain(values.get("lr_scheduler")) == "polynomial" else None


def _ema_device(values: Values) -> object:
    return "cpu" if is_on(values.get("use_ema", False)) else None


def _lora_dropout(values: Values) -> object:
    return 0.1 if plain(values.get("model_type")) == "lora" else None


def _huber_schedule(values: Values) -> object:
    return "snr" if plain(values.get("loss_type")) in ("huber", "smooth_l1") else None


def _zero_snr(values: Values) -> object:
    return True if plain(values.get("model_family")) == "sd2x" else None


def _lora_targets(values: Values) -> object:
    if plain(values.get("model_type")) != "lora":
        return None
    return list(LORA_TARGETS.get(str(plain(values.get("model_family"))), LORA_TARGETS[""]))


DEFAULTS = (
    ReferenceDefault("num_train_epochs", "`1`", _epochs, when="no length is given"),
    ReferenceDefault(
        "pretrained_model_name_or_path", "its own for the family", _base_model, when="neither a model nor a flavour is given"
    ),
    _always("train_batch_size", 4),
    _always("learning_rate", _LOWEST_RATE),
    ReferenceDefault("lr_end_ratio", "`4e-7` / `learning_rate`", _end_ratio, when="`lr_scheduler` is `cosine` or `polynomial`"),
    ReferenceDefault("lr_power", "`0.8`", _power, when="`lr_scheduler` is `polynomial`"),
    _always("grad_clip_method", "value"),
    _always("max_grad_norm", 2.0),
    _always("gradient_checkpointing", True),
    _always("caption_dropout_probability", 0.0),
    _always("caption_strategy", "filename"),
    _always("aspect_bucket_alignment", 64),
    ReferenceDefault("flow_schedule_shift", "`3.0`", _shift, when="flow matching without `flow_schedule_auto_shift`"),
    ReferenceDefault("rescale_betas_zero_snr", "`true`", _zero_snr, when="`model_family` is `sd2x`"),
    ReferenceDefault("lora_targets", "attention layers", _lora_targets, when="`model_type` is `lora`"),
    ReferenceDefault("lora_dropout", "`0.1`", _lora_dropout, when="`model_type` is `lora`"),
    ReferenceDefault("ema_device", '`"cpu"`', _ema_device, when="`use_ema` is on"),
    ReferenceDefault("huber_schedule", '`"snr"`', _huber_schedule, when="`loss_type` is not `l2`"),
    _always("num_eval_images", 4),
    _always("validation_step_interval", 100),
    _always("validation_num_inference_steps", 30),
    _always("validation_guidance", 7.5),
    _always("validation_base_model", True),
    _always("validation_negative_prompt", "blurry, cropped, ugly"),
)


def reference_defaults(values: Values, schema: Schema) -> dict[str, object]:
    """SimpleTuner's defaults by option, where they differ from those here, for a file that gives these values."""
    found = {each.option: each.value(values) for each in DEFAULTS if each.option in schema.options}
    return {name: value for name, value in found.items() if value is not None}
