"""DeepSpeed's optimizers, and what each is called in smalti. Imports no torch, no DeepSpeed."""

from __future__ import annotations

from smalti import OptimizerEntry

NAMES = (
    *("AdamW", "Adam", "Adagrad", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
    *("MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon"),
)
"""Every optimizer that DeepSpeed has or had, as it spells them."""
REMOVED = {"OneBitAdam": "Adam", "OneBitLamb": "Lamb", "ZeroOneAdam": "Adam"}
"""Those that DeepSpeed 0.19 has no more, and the nearest that trains."""
FROM_MUP = {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "sgd"}
"""Those of the package `mup`, and what each computes without base shapes: one of DeepSpeed's, or an `--optimizer`."""
USABLE = tuple(name for name in NAMES if name not in {**REMOVED, **FROM_MUP})
ON_CPU = frozenset(("AdamW", "Adam", "Adagrad", "Lion"))
"""Those that run where the optimizer's state is offloaded."""
FALLBACK = "AdamW"
MUON_NOTICE = (
    "is --optimizer=muon: its steps have the size of AdamW's, so that one lr serves all weights; DeepSpeed's own are "
    "smaller by 0.2 times the root of the number of columns of a matrix"
)
"""What whoever brings a configuration with DeepSpeed's Muon has to know."""

_SHARED = {"AdamW": "adamw", "Adagrad": "adagrad", "Muon": "muon"}
_OWN = {name: _SHARED.get(name, f"deepspeed_{name.lower()}") for name in NAMES}


def refusal(name: str) -> tuple[str, str] | None:
    """Why one of DeepSpeed's names cannot be used, and what to write; None if it can.

    Base shapes are those of a narrower model that was tuned and from which first weights are scaled (Yang et al. 2022).
    """
    if name in REMOVED:
        return f"DeepSpeed has {name} no more (0.19)", _in_json(REMOVED[name])
    if name in FROM_MUP:
        reason = "needs a model with the base shapes of mup, which no model family has"
        known = FROM_MUP[name] if FROM_MUP[name] in NAMES else FROM_MUP[name].upper()
        return f"{name} {reason}; without them it would step as {known}", _in_json(FROM_MUP[name])
    return None


def nearest(name: str) -> str:
    """The `--optimizer` to take in place of one that `refusal` refuses."""
    instead = {**REMOVED, **FROM_MUP}[name]
    return _OWN.get(instead, instead)


def _in_json(name: str) -> str:
    return f'"type": "{name}"' if name in NAMES else f"leave optimizer out of the JSON, and --optimizer={name}"


def misplaced(name: str | None, stage: object, *, offloaded: bool, flag: bool = False) -> tuple[str, str] | None:
    """Why an optimizer cannot step in this stage of ZeRO, or offloaded, and what to write: in the JSON, or with `flag` as one.

    None if it can. The name None is that of one of smalti's own optimizers.
    """
    if name == "Muon" and stage != 3:
        reason = "DeepSpeed (0.19) has Muon's momentum in no checkpoint below stage 3 of ZeRO"
        return reason, f'"stage": 3, or {"--optimizer=adamw" if flag else _in_json("AdamW")}'
    if offloaded and name not in ON_CPU:
        names = ", ".join(sorted(_OWN[each] if flag else each for each in ON_CPU))
        names = f"--optimizer=NAME with one of {names}" if flag else f"one of {names}"
        reason = "its updates need whole matrices" if name == "Muon" else "it has no form for processors"
        return f"{name or 'it'} cannot be offloaded: {reason}", f"{names}; or offload_optimizer with device none"
    return None


def needs_accelerator(name: str | None, *, offloaded: bool) -> str:
    """Why one of DeepSpeed's optimizers cannot step in host memory, "" if it can. `offloaded`: its state is kept there."""
    if name == "Lamb":
        return "DeepSpeed's Lamb runs on accelerators only"
    if name == "Lion" and not offloaded:
        return "DeepSpeed's Lion runs on accelerators only, or with its state offloaded to cpu"
    return ""


def optimizer_settings(name: str) -> tuple[str, ...]:
    """Which of smalti's own settings one of DeepSpeed's optimizers takes, by DeepSpeed's names."""
    if name == "MuSGD":
        return ("lr", "weight_decay")
    if name == "Lion":
        return ("lr", "betas", "weight_decay")
    return ("lr", "eps", "weight_decay") if name == "Adagrad" else ("lr", "betas", "eps", "weight_decay")


ENTRIES = tuple(
    OptimizerEntry(
        name=_OWN[name],
        title=f"DeepSpeed's {name}",
        factory="smalti_deepspeed.placeholder_optimizer:placeholder",
        accepts=tuple(key for key in optimizer_settings(name) if key != "lr"),
    )
    for name in USABLE
    if name not in _SHARED
)
"""What `--optimizer` gets from this package. They train under DeepSpeed only."""


def normalised(name: str) -> tuple[str, str]:
    """DeepSpeed's spelling of an optimizer's name, and what to say about it: "" unless another one takes its place."""
    word = name.strip().lower().replace("-", "").replace("_", "").replace(" ", "")
    for known in NAMES:
        if word == known.lower():
            return known, ""
    return FALLBACK, f"names {name!r}, which DeepSpeed does not know: {FALLBACK} takes its place, without settings of its own"


def smalti_name(name: str) -> str:
    """The `--optimizer` that is DeepSpeed's `name`."""
    return _OWN[name]


def deepspeed_name(optimizer: str) -> str | None:
    """DeepSpeed's name of an `--optimizer`; None for one that is not DeepSpeed's."""
    word = optimizer.strip().lower().replace("-", "_")
    return next((name for name, own in _OWN.items() if own == word), None)
