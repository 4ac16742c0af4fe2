"""Whether what a checkpoint says makes sense, once its bytes are known to be those that were written.

Digests tell damage from what was written. They say nothing of a file that was edited and signed anew, or of weights that were
not finite when they were saved. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.checkpoint.format.manifest import GROUPS, STATE, Manifest
from smalti.checkpoint.format.safetensors_layout import Chunk, StoredTensor, read_layout, stored_tensors
from smalti.checkpoint.format.statefile import State, read_state
from smalti.errors import CheckpointError

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_EXPONENT_OF_BF16 = np.uint16(0x7F80)
_AT_ONCE = 2**20
"""Numbers that are looked at together, so that they stay in the processor's cache."""
STATEFUL_OPTIMIZERS = frozenset(
    ("AdamW", "Adam", "SGD", "Adagrad", "Adafactor", "FixedRateAdafactor", "Joined", "DeepSpeedCPUAdam", "FusedAdam")
)
"""Optimizers that keep moments, the same ones for all parameters with as many dimensions. Others keep the same for parameters
of the same shape."""


def inconsistencies(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """What in state.json and in the headers of tensors cannot be, by file or folder. Reads no tensors."""
    try:
        state = read_state(checkpoint / STATE)
    except CheckpointError as error:
        return {STATE: error.message.removeprefix(f"{STATE} ")}
    if state.step != manifest.step:
        return {STATE: f"is of step {state.step}, the manifest of step {manifest.step}"}
    found: dict[str, str] = {}
    stored: dict[str, dict[str, StoredTensor]] = {}
    for group in GROUPS:
        try:
            stored[group] = stored_tensors(checkpoint / group)
        except CheckpointError as error:
            found[group] = f"cannot be put together: {error.message}"
    if found:
        return found
    if problem := next(_inconsistent_optimizer_state(state, stored["model"], stored["optimizer"]), ""):
        found["optimizer"] = problem
    return found


def _inconsistent_optimizer_state(
    state: State, model: Mapping[str, StoredTensor], optimizer: Mapping[str, StoredTensor]
) -> Iterator[str]:
    """Moments of no parameter, and parameters of which some moments are missing."""
    moments: dict[str, set[str]] = {}
    for key in optimizer:
        name, _, moment = key.rpartition(".")
        if name not in model:
            yield f"has {key}, and the model has no {name or key}"
            return
        moments.setdefault(name, set()).add(moment)
    alike: dict[object, tuple[str, set[str]]] = {}
    for name, found in moments.items():
        shape = model[name].shape
        other, usual = alike.setdefault(len(shape) if state.optimizer in STATEFUL_OPTIMIZERS else shape, (name, found))
        if found != usual:
            different = ", ".join(sorted(found ^ usual))
            yield f"has {different} for one of {other} and {name} and not for the other"


def why_not_resumable(checkpoint: Path) -> str:
    """Why no run can go on from this checkpoint, whatever its options; "" if one can."""
    try:
        trainer = read_state(checkpoint / STATE).trainer
    except CheckpointError as error:
        return error.message
    place = ("step", "position", "epoch", "samples") if "position" in trainer else ("step",)
    missing = [f"trainer.{name}" for name in place if name not in trainer]
    return f"{STATE} does not tell where the run was: {', '.join(missing)} {_are(missing)} missing" if missing else ""


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def find_non_finite(path: Path) -> str:
    """The first tensor in a safetensors file that has numbers which are not finite, and how many; "" if none has.

    -inf is let pass in weights: masks are made of it. Reads the whole file.
    """
    moments = path.parent.name == "optimizer"
    for name, (chunk, position) in read_layout(path).items():
        if count := _count(path, chunk, position, lowest=moments):
            return f"{name} ({count} of {max(1, _size(chunk))} numbers)"
    return ""


def _size(chunk: Chunk) -> int:
    return int(np.prod(chunk.shape, dtype=np.int64))


def _count(path: Path, chunk: Chunk, position: int, *, lowest: bool) -> int:
    """How many numbers are NaN or infinite, with -inf only if the `lowest` counts too."""
    kind = np.uint16 if chunk.dtype == "BF16" else _FLOATS.get(chunk.dtype)
    if kind is None or not _size(chunk):
        return 0
    numbers = np.memmap(path, dtype=kind, mode="r", offset=position, shape=(_size(chunk),))
    parts = (numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE))
    return sum((_count_non_finite_bf16 if chunk.dtype == "BF16" else _count_non_finite)(part, lowest=lowest) for part in parts)


def _count_non_finite_bf16(numbers: NDArray[np.uint16], *, lowest: bool) -> int:
    """numpy does not know bf16, which is the upper half of fp32; a number is not finite if all bits of its exponent are set."""
    if (numbers & _EXPONENT_OF_BF16).max() < _EXPONENT_OF_BF16:
        return 0
    return _count_non_finite((numbers.astype(np.uint32) << 16).view(np.float32), lowest=lowest)


def _count_non_finite(numbers: NDArray[np.floating[Any]], *, lowest: bool) -> int:
    with np.errstate(all="ignore"):
        if np.isfinite(np.add.reduce(numbers)):
            return 0  # whatever is not finite spreads to the sum
    non_finite = ~np.isfinite(numbers)
    return int(non_finite.sum()) if lowest else int((non_finite & ~np.isneginf(numbers)).sum())
