"""state.json: everything in a checkpoint that is not a tensor.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from smalti.errors import CheckpointError
from smalti.system import parse_json, read_regular

T = TypeVar("T")

_LARGEST = 2**53
"""The largest count: up to here JSON readers are exact."""
_LONGEST = 60
"""Characters of a wrong value that are shown."""
_COUNTS = {"step": 0, "position": 0, "epoch": 0, "samples": 0, "effective_batch": 1}
"""Counts of the trainer, and their minimum."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The contents of state.json.

    `optimizer` is the optimizer's class, `param_groups` its hyper-parameters by parameter group, `trainer` the state of the
    trainer. `model_config` is the config of the model, as in diffusers or transformers; None for other models.
    """

    step: int
    optimizer: str = ""
    param_groups: list[dict[str, object]] = field(default_factory=list)
    trainer: Mapping[str, object] = field(default_factory=dict)
    model_config: Mapping[str, object] | None = None

    def encode(self) -> bytes:
        """Returns the contents of the file. Raises ValueError for NaN and infinities, which JSON cannot hold."""
        body: dict[str, object] = {
            "step": self.step,
            "optimizer": {"name": self.optimizer, "settings": self.param_groups},
            "trainer": dict(self.trainer),
        }
        if self.model_config is not None:
            body["model_config"] = self.model_config
        return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_state(path: Path) -> State:
    """Parses a state.json. Raises CheckpointError, with the field, for anything that `State.encode` does not write."""
    return decode_state(read_regular(path), path.name)


def decode_state(data: bytes, name: str) -> State:
    """As `read_state`, of the contents of a file with this name."""
    try:
        body = parse_json(data)
    except ValueError as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    if not isinstance(body, dict):
        raise CheckpointError(f"{name} is malformed: it is not an object")
    fields = _Fields(name)
    optimizer, trainer = fields.table(body, "optimizer"), fields.table(body, "trainer")
    state = State(
        step=fields.count(body, "step"),
        optimizer=fields.of(optimizer, "name", str, "optimizer."),
        param_groups=fields.of(optimizer, "settings", list, "optimizer."),
        trainer=trainer,
        model_config=None if body.get("model_config") is None else fields.table(body, "model_config"),
    )
    for number, group in enumerate(state.param_groups):
        fields.check_param_group(group, f"optimizer.settings[{number}]")
    for name in trainer.keys() & _COUNTS:
        fields.count(trainer, name, "trainer.", least=_COUNTS[name])
    if trainer.get("step", state.step) != state.step:
        raise fields.wrong("trainer.step", f"is {trainer['step']} in a checkpoint of step {state.step}")
    if "order_beginning" in trainer:
        beginning = fields.table(trainer, "order_beginning")
        if beginning.keys() != {"position", "epoch"}:
            raise fields.wrong("trainer.order_beginning", "has other fields than position and epoch")
        for name in beginning:
            fields.count(beginning, name, "trainer.order_beginning.")
    for name, kind in (("data_changes", list), ("made_with", dict)):
        if not isinstance(trainer.get(name, kind()), kind):
            raise fields.wrong(f"trainer.{name}", f"cannot be {_shown(trainer[name])}")
    return state


@dataclass(frozen=True)
class _Fields:
    """Reads fields of the file, and raises errors with their names."""

    file: str

    def wrong(self, field: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file} is malformed: {field} {what}")

    def of(self, table: Mapping[str, object], name: str, kind: type[T], inside: str = "") -> T:
        if name not in table:
            raise self.wrong(f"{inside}{name}", "is missing")
        value = table[name]
        if type(value) is not kind:
            raise self.wrong(f"{inside}{name}", f"cannot be {_shown(value)}")
        return value

    def table(self, table: Mapping[str, object], name: str) -> dict[str, object]:
        return self.of(table, name, dict)

    def count(self, table: Mapping[str, object], name: str, inside: str = "", *, least: int = 0) -> int:
        value = self.of(table, name, int, inside)
        if not least <= value <= _LARGEST:
            raise self.wrong(f"{inside}{name}", f"cannot be {_shown(value)}")
        return value

    def check_param_group(self, group: object, field: str) -> None:
        """One group of hyper-parameters: numbers, strings and lists of them; under "values", those of single parameters."""
        if not isinstance(group, dict):
            raise self.wrong(field, f"cannot be {_shown(group)}")
        if "params" in group:
            raise self.wrong(field, "has the key params, which is never written")
        values = group.get("values", {})
        if not isinstance(values, dict) or not all(isinstance(kept, dict) for kept in values.values()):
            raise self.wrong(f"{field}.values", f"cannot be {_shown(values)}")


def _shown(value: object) -> str:
    """A value as JSON, truncated."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
