"""state.json: everything in a checkpoint that is no tensor.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smalti.errors import CheckpointError
from smalti.files import parse_json


@dataclass(frozen=True, kw_only=True)
class State:
    """What state.json says. All of it is JSON-able.

    `optimizer` is the optimizer's class, `settings` its hyper-parameters by parameter group, `trainer` what the trainer gave.
    `model_config` is what diffusers or transformers call the config of the model; None for models of neither.
    """

    step: int
    optimizer: str = ""
    settings: list[dict[str, object]] = field(default_factory=list)
    trainer: Mapping[str, object] = field(default_factory=dict)
    model_config: Mapping[str, object] | None = None

    def encode(self) -> bytes:
        """The contents of the file. Raises ValueError for NaN and infinities, which are not JSON."""
        body: dict[str, object] = {
            "step": self.step,
            "optimizer": {"name": self.optimizer, "settings": self.settings},
            "trainer": dict(self.trainer),
        }
        if self.model_config is not None:
            body["model_config"] = self.model_config
        return json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def read_state(path: Path) -> State:
    """What a state.json says. Raises CheckpointError for anything that `State.encode` does not write."""
    try:
        body = parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path.name} is damaged: {error}") from error
    match body:
        case {
            "step": int(step),
            "optimizer": {"name": str(name), "settings": list(settings)},
            "trainer": dict(trainer),
            **rest,
        } if all(isinstance(group, dict) for group in settings):
            config = rest.get("model_config")
            if config is None or isinstance(config, dict):
                return State(step=step, optimizer=name, settings=settings, trainer=trainer, model_config=config)
    raise CheckpointError(f"{path.name} is malformed")
