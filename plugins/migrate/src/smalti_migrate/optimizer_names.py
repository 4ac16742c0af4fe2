"""Optimizers by the names that other trainers have for them, with the settings that the names stand for there.

Names are in lower case with underscores. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from smalti import Problem, Translation


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Another name of one of smalti's optimizers: its `settings` by option, and what is different here in words."""

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)
    difference: str = ""


_ADAM = {"adam_weight_decay": 0.0}
_EPSILON = {"adam_epsilon": 1e-6}
_OPTIMI = {"adam_beta2": 0.99, "adam_epsilon": 1e-6, "adam_weight_decay": 0.0}
_LION = {"adam_beta2": 0.99, "adam_weight_decay": 0.0}
_ADAGRAD = {"adam_epsilon": 1e-10, "adam_weight_decay": 0.0}
_FP32 = "weights and optimizer state are in fp32"
_FP32_STATE = "its state is in fp32, 4 bytes per weight and moment"
_8_BITS = "its state is in 8 bits"
_DECOUPLED, _NO_SDNQ = "weight decay is decoupled", "it has none of SDNQ's settings"
_NO_EXTRAS = "it has no factored moments, no StableAdamW and one estimate for all parameters"
_NOT_PAGED = "its state is not paged to host memory"

_REMARKS: Mapping[str, str] = {
    "prodigy": "is Prodigy as it was published, with no weight decay, bias correction or averaging of weights; "
    "learning_rate=1 is usual"
}
"""What to know about a name that other trainers have for several optimizers."""

ALIASES: Mapping[str, Alias] = {
    # SimpleTuner's
    "adamw_bf16": Alias(name="adamw", settings=_EPSILON, difference=_FP32),
    "torch_adamw": Alias(name="adamw"),
    "torch_adam": Alias(name="adamw", settings=_ADAM, difference=_DECOUPLED),
    "torch_adagrad": Alias(name="adagrad", settings=_ADAGRAD, difference=_DECOUPLED),
    "torch_adafactor": Alias(name="adafactor_scaled", settings=_ADAM),
    "optimi_adamw": Alias(name="adamw", settings=_OPTIMI, difference=_FP32),
    "optimi_adam": Alias(name="adamw", settings=_OPTIMI, difference=f"{_FP32}, weight decay is decoupled"),
    "optimi_lion": Alias(name="lion", settings=_LION, difference=_FP32),
    "optimi_stableadamw": Alias(name="stableadamw", settings=_EPSILON | {"adam_beta2": 0.99}, difference=_FP32),
    "ao_adamw8bit": Alias(name="adamw8bit", settings=_EPSILON, difference="weights are in fp32"),
    "ao_adamw4bit": Alias(name="adamw8bit", settings=_EPSILON, difference=_8_BITS),
    "ao_adamwfp8": Alias(name="adamw8bit", settings=_EPSILON, difference="moments are dynamic 8-bit codes"),
    "bnb_adamw": Alias(name="adamw", settings=_EPSILON, difference=_FP32),
    "bnb_adamw_paged": Alias(name="adamw", settings=_EPSILON, difference=f"{_FP32}; {_NOT_PAGED}"),
    "bnb_adamw8bit": Alias(name="adamw8bit", settings=_EPSILON, difference="weights are in fp32"),
    "bnb_adamw8bit_paged": Alias(name="adamw8bit", settings=_EPSILON, difference=_NOT_PAGED),
    "bnb_adam": Alias(name="adamw", settings=_ADAM, difference=_DECOUPLED),
    "bnb_adam8bit": Alias(name="adamw8bit", settings=_ADAM, difference=_DECOUPLED),
    "bnb_lion": Alias(name="lion", settings=_LION),
    "bnb_lion_paged": Alias(name="lion", settings=_LION, difference=_NOT_PAGED),
    "bnb_lion8bit": Alias(name="lion", settings=_LION, difference=_FP32_STATE),
    "bnb_lion8bit_paged": Alias(name="lion", settings=_LION, difference=f"{_FP32_STATE}; {_NOT_PAGED}"),
    "bnb_adagrad": Alias(name="adagrad", settings=_ADAGRAD, difference=_DECOUPLED),
    "bnb_adagrad8bit": Alias(name="adagrad", settings=_ADAGRAD, difference=_FP32_STATE),
    "sdnq_adamw": Alias(name="adamw8bit", difference=_NO_SDNQ),
    "sdnq_adamw+no_quant": Alias(name="adamw", difference=_NO_SDNQ),
    "sdnq_lion": Alias(name="lion", difference=_FP32_STATE),
    "sdnq_adafactor": Alias(name="adafactor", difference=_NO_SDNQ),
    "sdnq_came": Alias(name="came", difference=_NO_SDNQ),
    **dict.fromkeys(("sdnq_muon", "sdnq_muon+quantized_matmul"), Alias(name="muon", difference=_NO_SDNQ)),
    # kohya's, ai-toolkit's and OneTrainer's
    "adam": Alias(name="adamw", settings=_ADAM, difference=_DECOUPLED),
    **dict.fromkeys(("adam8", "adam8bit", "adam_8bit"), Alias(name="adamw8bit", settings=_ADAM, difference=_DECOUPLED)),
    **dict.fromkeys(("adamw8", "adamw_8bit"), Alias(name="adamw8bit")),
    **dict.fromkeys(("pagedadamw", "pagedadamw32bit"), Alias(name="adamw", difference=_NOT_PAGED)),
    "pagedadamw8bit": Alias(name="adamw8bit", difference=_NOT_PAGED),
    **dict.fromkeys(("lion8bit", "lion_8bit"), Alias(name="lion", difference=_FP32_STATE)),
    "pagedlion8bit": Alias(name="lion", difference=f"{_FP32_STATE}; {_NOT_PAGED}"),
    **dict.fromkeys(("came8bit", "came_8bit"), Alias(name="came", difference=_FP32_STATE)),
    **dict.fromkeys(
        ("adamw_schedulefree+no_kahan", "adamwschedulefree", "schedule_free_adamw"), Alias(name="adamw_schedulefree")
    ),
    **dict.fromkeys(
        ("prodigy_plus_schedule_free", "prodigyplus", "prodigyplusschedulefree"),
        Alias(name="prodigy_schedulefree", settings={"learning_rate": 1.0, "adam_beta2": 0.99}, difference=_NO_EXTRAS),
    ),
    "adagrad_8bit": Alias(name="adagrad", difference=_FP32_STATE),
    "prodigy8bit": Alias(name="prodigy", settings={"learning_rate": 1.0}, difference=_FP32_STATE),
}

_NO_MOMENTUM = "--optimizer=sgd, which has momentum 0.9, with a tenth of the learning rate"
_OWN_RATE = "--optimizer=prodigy, which finds its learning rate too"

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("torch_sgd", "optimi_sgd"), _NO_MOMENTUM),
    **dict.fromkeys(("sgdnesterov", "sgdnesterov8bit"), "--optimizer=sgd, which has momentum 0.9"),
    **dict.fromkeys(
        ("adamw_schedulefree+aggressive", "radamschedulefree", "schedule_free_sgd", "sgdschedulefree"),
        "--optimizer=adamw_schedulefree is the nearest",
    ),
    **dict.fromkeys(
        (
            *("dadaptation", "dadaptadam", "dadaptadampreprint"),
            *("dadaptadagrad", "dadaptadan", "dadaptadanip", "dadaptlion", "dadaptsgd", "dadapt_adam", "dadapt_adan"),
            *("dadapt_ada_grad", "dadapt_lion", "dadapt_sgd", "automagic", "automagic2", "automagic3"),
        ),
        _OWN_RATE,
    ),
    **dict.fromkeys(
        (
            *("torch_radam", "torch_nadam", "torch_adamax", "torch_rmsprop", "torch_sparseadam", "optimi_radam"),
            *("optimi_ranger", "optimi_adan", "bnb_ademamix", "bnb_ademamix_paged", "adabelief", "adopt", "lamb"),
        ),
        "--optimizer=adamw is the nearest",
    ),
    **dict.fromkeys(
        ("ao_adamfp8", "bnb_ademamix8bit", "bnb_ademamix8bit_paged", "ademamix8bit"), "--optimizer=adamw8bit is the nearest"
    ),
    "torch_adadelta": "--optimizer=adagrad is the nearest",
    "torch_asgd": "--optimizer=sgd --use_ema is the nearest",
    "soap": "--optimizer=muon is the nearest",
}
"""Optimizers of other trainers that are not here, each with what to take instead."""


def normalised(name: str) -> str:
    """An optimizer's name as it is registered: in lower case, with underscores."""
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def translate_optimizer(given: Mapping[str, object], registered: Collection[str] = ()) -> Translation:
    """The optimizer that the name in `optimizer` means, and settings that are not given; what is different; a refused name.

    A name that is `registered` is that of an optimizer that is here, whatever other trainers call so.
    """
    name = given.get("optimizer")
    if not isinstance(name, str):
        return Translation()
    wanted, place = normalised(name), f"{name} in optimizer"
    if wanted not in _REMARKS and any(each.rpartition(":")[2] == wanted for each in registered):
        return Translation()
    if (instead := REFUSED.get(wanted)) is not None:
        problem = Problem(
            message=f"the optimizer {name!r} is not supported", where="optimizer", fix=instead, option="optimizer"
        )
        return Translation(problems=[problem])
    if wanted in _REMARKS:
        return Translation(notices=[(place, _REMARKS[wanted])])
    if (alias := ALIASES.get(wanted)) is None:
        return Translation()
    settings = {option: value for option, value in alias.settings.items() if given.get(option) is None}
    values = {option: (place, value) for option, value in settings.items()}
    return Translation(values={"optimizer": (place, alias.name), **values}, notices=[(place, _difference_of(alias, settings))])


def _difference_of(alias: Alias, settings: Mapping[str, float]) -> str:
    shown = ", ".join(f"{option}={value:g}" for option, value in settings.items())
    return "".join(
        (f"is {alias.name} here", f" with {shown}" if shown else "", f"; {alias.difference}" if alias.difference else "")
    )
