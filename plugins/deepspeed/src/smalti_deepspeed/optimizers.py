"""DeepSpeed's optimizers, and what each is called in smalti. Imports no torch, no DeepSpeed."""

from __future__ import annotations

from smalti import OptimizerEntry

NAMES = (
    *("AdamW", "Adam", "Adagrad", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
    *("MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon"),
)
"""Every optimizer that DeepSpeed has or had, as it spells them."""
REMOVED = {"OneBitAdam": "Adam", "OneBitLamb": "Lamb", "ZeroOneAdam": "Adam"}
"""Those that DeepSpeed 0.19 has no more, and what to take instead."""
FROM_MUP = {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "AdamW"}
"""Those of the package `mup`, and what to take instead."""
FAILING = {"Muon": "AdamW"}
"""Those that DeepSpeed 0.19 has and that do not train diffusion models, and what to take instead."""
USABLE = tuple(name for name in NAMES if name not in {**REMOVED, **FROM_MUP, **FAILING})
ON_CPU = frozenset(("AdamW", "Adam", "Adagrad", "Lion"))
"""Those that run where the optimizer's state is offloaded."""
FALLBACK = "AdamW"

_SHARED = {"AdamW": "adamw", "Adagrad": "adagrad", "Muon": "muon"}
_OWN = {name: _SHARED.get(name, f"deepspeed_{name.lower()}") for name in NAMES}


def refusal(name: str) -> tuple[str, str] | None:
    """Why one of DeepSpeed's names cannot be used, and what to write; None if it can."""
    if name in REMOVED:
        return f"DeepSpeed has {name} no more (0.19)", f'"type": "{REMOVED[name]}"'
    if name in FROM_MUP:
        return f"{name} needs a model with the base shapes of mup, which no model family has", f'"type": "{FROM_MUP[name]}"'
    if name in FAILING:
        reason = "it fails at the weights of convolutions, and below stage 3 its momentum is not in checkpoints"
        return f"DeepSpeed's {name} (0.19) cannot be used: {reason}", f'"type": "{FAILING[name]}"'
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
