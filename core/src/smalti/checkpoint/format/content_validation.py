"""Validates the contents of a checkpoint, after its digests have matched.

Digests detect damage. They do not detect a file that was edited along with its digest, or weights that were not finite when
they were saved. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.checkpoint.format.manifest import GROUPS, STATE, Manifest
from smalti.checkpoint.format.safetensors_layout import Chunk, StoredTensor, read_layout, stored_tensors
from smalti.checkpoint.format.state_file import State, read_state
from smalti.errors import CheckpointError

_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_EXPONENT_OF_BF16 = np.uint16(0x7F80)
_AT_ONCE = 2**20
"""Numbers that are checked together, so that they stay in the cache of the CPU."""
STATEFUL_OPTIMIZERS = frozenset(
    (
        *("AdamW", "Adam", "SGD", "Adagrad", "Adafactor", "FixedRateAdafactor", "Joined", "StableAdamW", "Lion", "Prodigy"),
        *("DeepSpeedCPUAdam", "FusedAdam"),
    )
)
"""Optimizers whose state has the same names for all parameters with as many dimensions. For others only parameters of the same
shape are compared."""


def inconsistencies(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Returns what is inconsistent in state.json and in the headers of tensors, by file or folder. Reads no tensors."""
    return find_inconsistencies(
        manifest, lambda: read_state(checkpoint / STATE), lambda group: stored_tensors(checkpoint / group)
    )


def find_inconsistencies(
    manifest: Manifest, read: Callable[[], State], tensors: Callable[[str], Mapping[str, StoredTensor]]
) -> dict[str, str]:
    """As `inconsistencies`, of a checkpoint whose state `read` returns, and `tensors` the tensors of a group."""
    try:
        state = read()
    except CheckpointError as error:
        return {STATE: error.message.removeprefix(f"{STATE} ")}
    if state.step != manifest.step:
        return {STATE: f"is of step {state.step}, but the manifest is of step {manifest.step}"}
    found: dict[str, str] = {}
    stored: dict[str, Mapping[str, StoredTensor]] = {}
    for group in GROUPS:
        try:
            stored[group] = tensors(group)
        except CheckpointError as error:
            found[group] = f"cannot be assembled: {error.message}"
    if found:
        return found
    if problem := next(_inconsistent_optimizer_state(state, stored["model"], stored["optimizer"]), ""):
        found["optimizer"] = problem
    return found


def _inconsistent_optimizer_state(
    state: State, model: Mapping[str, StoredTensor], optimizer: Mapping[str, StoredTensor]
) -> Iterator[str]:
    """Yields optimizer state without a parameter, and parameters of which some optimizer state is missing."""
    optimizer_state: dict[str, set[str]] = {}
    for key in optimizer:
        name, _, own_key = key.rpartition(".")
        if name not in model:
            yield f"has {key}, but the model has no {name or key}"
            return
        optimizer_state.setdefault(name, set()).add(own_key)
    same_kind: dict[object, tuple[str, set[str]]] = {}
    for name, found in optimizer_state.items():
        shape = model[name].shape
        other, expected = same_kind.setdefault(len(shape) if state.optimizer in STATEFUL_OPTIMIZERS else shape, (name, found))
        if found != expected:
            different = ", ".join(sorted(found ^ expected))
            yield f"has {different} for only one of {other} and {name}"


def why_not_resumable(checkpoint: Path) -> str:
    """Returns why no run can resume from this checkpoint, with any options; "" if one can."""
    try:
        trainer = read_state(checkpoint / STATE).trainer
    except CheckpointError as error:
        return error.message
    place = ("step", "position", "epoch", "samples") if "position" in trainer else ("step",)
    missing = [f"trainer.{name}" for name in place if name not in trainer]
    return f"{STATE} has no training position: {', '.join(missing)} {_are(missing)} missing" if missing else ""


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def find_non_finite(path: Path) -> str:
    """Returns the first tensor in a safetensors file with numbers that are not finite, and how many; "" if there is none.

    -inf is accepted in weights, where masks use it. Reads the whole file.
    """
    optimizer_state = path.parent.name == "optimizer"
    for name, (chunk, position) in read_layout(path).items():
        if count := _count(path, chunk, position, lowest=optimizer_state):
            return f"{name} ({count} of {max(1, _size(chunk))} numbers)"
    return ""


def _size(chunk: Chunk) -> int:
    return int(np.prod(chunk.shape, dtype=np.int64))


def _count(path: Path, chunk: Chunk, position: int, *, lowest: bool) -> int:
    """Counts numbers that are NaN or infinite; -inf only with `lowest`."""
    kind = np.uint16 if chunk.dtype == "BF16" else _FLOATS.get(chunk.dtype)
    if kind is None or not _size(chunk):
        return 0
    numbers = np.memmap(path, dtype=kind, mode="r", offset=position, shape=(_size(chunk),))
    parts = (numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE))
    return sum((_count_non_finite_bf16 if chunk.dtype == "BF16" else _count_non_finite)(part, lowest=lowest) for part in parts)


def _count_non_finite_bf16(numbers: NDArray[np.uint16], *, lowest: bool) -> int:
    """numpy has no bf16, which is the upper half of fp32; a number is not finite if all bits of its exponent are set."""
    if (numbers & _EXPONENT_OF_BF16).max() < _EXPONENT_OF_BF16:
        return 0
    return _count_non_finite((numbers.astype(np.uint32) << 16).view(np.float32), lowest=lowest)


def _count_non_finite(numbers: NDArray[np.floating[Any]], *, lowest: bool) -> int:
    with np.errstate(all="ignore"):
        if np.isfinite(np.add.reduce(numbers)):
            return 0  # a number that is not finite makes the sum so
    non_finite = ~np.isfinite(numbers)
    return int(non_finite.sum()) if lowest else int((non_finite & ~np.isneginf(numbers)).sum())
