"""Checkpoints of any trainer: their contents, and how those of smalti are read.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from smalti.checkpoint.format.manifest import GROUPS, STATE, Manifest, read_manifest
from smalti.checkpoint.format.safetensors_layout import StoredTensor
from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.format.state_file import read_state
from smalti.checkpoint.format.verification import verify
from smalti.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint, except for the values of the tensors.

    `tensors` are named as in smalti's own: "model/PARAMETER", "optimizer/PARAMETER.MOMENT", "ema/PARAMETER". `optimizer` is the
    class of the optimizer, "" if unknown; `param_groups` its hyper-parameters by parameter group. `trainer`, `plugins`,
    `config_digest` and `flags` are those of a checkpoint of smalti. `notices` are messages for the user: what was
    skipped, what was guessed.
    """

    tensors: Mapping[str, StoredTensor]
    step: int
    optimizer: str = ""
    param_groups: list[dict[str, object]] = field(default_factory=list)
    trainer: Mapping[str, object] = field(default_factory=dict)
    model_config: Mapping[str, object] | None = None
    plugins: tuple[str, ...] = ()
    config_digest: str = ""
    flags: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


class Source(Protocol):
    """A checkpoint that is open for reading. Raise CheckpointError for what cannot be read, with the reason."""

    @property
    def contents(self) -> Contents: ...

    def read(self, name: str) -> Iterable[bytes | memoryview]:
        """The bytes of the tensor that `contents` has under this name, row by row, in pieces of any size."""
        ...


class OwnCheckpoint:
    """A checkpoint of smalti; all its bytes are verified first, unless the caller has just done so and passes `verified`."""

    def __init__(self, path: Path, *, verified: bool = False) -> None:
        manifest = read_manifest(path) if verified else _checked(path)
        self._groups = {group: TensorFiles(sorted((path / group).glob("*.safetensors"))) for group in GROUPS}
        state = read_state(path / STATE)
        self.contents = Contents(
            tensors={f"{group}/{name}": each for group, held in self._groups.items() for name, each in held.tensors.items()},
            step=manifest.step,
            optimizer=state.optimizer,
            param_groups=state.param_groups,
            trainer=state.trainer,
            model_config=state.model_config,
            plugins=manifest.plugins,
            config_digest=manifest.config_digest,
            flags=manifest.flags,
        )

    def read(self, name: str) -> Iterable[bytes | memoryview]:
        group, _, tensor = name.partition("/")
        return [self._groups[group].read(tensor)]


def _checked(path: Path) -> Manifest:
    found = verify(path)
    if found.manifest is None or not found.ok:
        raise CheckpointError(f"{path} is damaged: {'; '.join(found.problems[:3])}", fix="choose another checkpoint")
    return found.manifest


def guess_optimizer(state: Collection[str]) -> str:
    """Returns the optimizer with this state; "" if that is ambiguous."""
    names = set(state) - {"step"}
    known = {"AdamW": {"exp_avg", "exp_avg_sq"}, "SGD": {"momentum_buffer"}, "Adagrad": {"sum"}}
    return next((name for name, kept in known.items() if names - {"max_exp_avg_sq"} == kept), "")
