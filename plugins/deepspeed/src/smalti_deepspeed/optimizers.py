"""DeepSpeed's optimizers, and what each is called in smalti. Imports no torch, no DeepSpeed."""

from __future__ import annotations

from smalti import OptimizerEntry

NAMES = (
    *("AdamW", "Adam", "Adagrad", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam"),
    *("MuAdam", "MuAdamW", "MuSGD", "Lion", "Muon"),
)
"""Every optimizer that DeepSpeed has or had, as it spells them."""
REMOVED = frozenset(("OneBitAdam", "OneBitLamb", "ZeroOneAdam"))
"""Those that DeepSpeed 0.19 has no more."""
FROM_MUP = frozenset(("MuAdam", "MuAdamW", "MuSGD"))
"""Those that need the package `mup`."""
ON_CPU = frozenset(("AdamW", "Adam", "Adagrad", "Lion"))
"""Those that run where the optimizer's state is offloaded."""
FALLBACK = "AdamW"

_SHARED = {"AdamW": "adamw", "Adagrad": "adagrad", "Muon": "muon"}
_OWN = {name: _SHARED.get(name, f"deepspeed_{name.lower()}") for name in NAMES}


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
        factory="smalti_deepspeed.ownoptimizers:stand_in",
        accepts=tuple(key for key in optimizer_settings(name) if key != "lr"),
    )
    for name in NAMES
    if name not in _SHARED and name not in REMOVED
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
