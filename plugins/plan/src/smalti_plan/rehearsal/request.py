"""What the process of a rehearsal is asked for, as JSON. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from smalti.config import Config
from smalti.parallel import in_bf16
from smalti.system import load_json
from smalti_plan.records import Candidate

_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Request:
    """One way to train a configuration, on one rank of a cluster.

    `values` are all options. `device` is the name that torch has for the devices, `kind` their kind, `memory` their bytes.
    `width` and `height` are pixels; 0 takes the largest bucket of the datasets. `local` is the number of ranks on a node.
    `extension`: CUDA devices may come from the compiled extension.
    """

    values: Mapping[str, object]
    accelerate: Mapping[str, object] = field(default_factory=dict)
    candidate: Candidate
    device: str
    kind: str
    memory: int = 0
    ranks: int = 1
    rank: int = 0
    local: int = 8
    width: int = 0
    height: int = 0
    extension: bool = True

    def overrides(self, directory: Path) -> dict[str, object]:
        """The options that the candidate and the rehearsal itself set. Nothing of the user's is read or written."""
        return {
            **self.candidate.options,
            "train_batch_size": self.candidate.micro_batch,
            "gradient_accumulation_steps": self.candidate.accumulation,
            "num_processes": self.ranks,
            "num_machines": -(-self.ranks // self.local),
            "machine_rank": 0,
            "use_cpu": self.kind == "cpu",
            "output_dir": str(directory / "run"),
            "max_train_steps": _STEPS,
            "num_train_epochs": None,
            "resume_from_checkpoint": None,
        }

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Request:
        candidate = Candidate(**cast(dict[str, object], values["candidate"]))  # type: ignore[arg-type]
        return cls(**{**values, "candidate": candidate})  # type: ignore[arg-type]


def values_for(config: Config, kind: str) -> dict[str, object]:
    """All options of a configuration as JSON has them, with the precision that devices of this kind take by default."""
    values = {**config.values(), "plugins": config.value("plugins"), "without": config.value("without")}
    values["mixed_precision"] = "bf16" if in_bf16(config, kind) else "no"  # not what this processor would take
    return cast(dict[str, object], load_json(json.dumps(values, default=str)))
