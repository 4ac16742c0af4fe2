"""What the groups save, and what must be true of a store at any time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.parallel.state import PortableState
from smalti.types import World


@dataclass
class Report:
    """What one round did: how many faults it injected, and where something that was promised did not hold."""

    faults: int = 0
    broken: list[str] = field(default_factory=list)

    def expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.broken.append(otherwise)


class SingleRank:
    """The only rank."""

    world = World()

    def all_reduce_max(self, code: int) -> int:
        return code

    def all_gather_text(self, value: str) -> list[str]:
        return [value]


ALONE = SingleRank()


def snapshot(step: int, size: int = 1000, flags: tuple[str, ...] = ()) -> Snapshot:
    """A state of which every number tells its step; about 20 `size` bytes."""
    model = {"a": torch.full((size,), float(step)), "b": torch.full((7,), float(step))}
    moments = {"a": {"exp_avg": torch.full((size,), float(step)), "step": torch.tensor(float(step))}}
    state = PortableState(model=model, optimizer_state=moments, param_groups=[{"lr": 0.1}], optimizer="AdamW")
    ema = {"a": torch.full((size,), float(step))}
    return Snapshot(step=step, state=state, ema=ema, trainer={"step": step}, flags=flags)


def found(root: Path, size: int = 1000) -> int | None:
    """The step that a run which starts now goes on from; None if there is none. -1 if its contents are of another step."""
    path = CheckpointStore(root).latest()
    if path is None:
        return None
    target = snapshot(0, size)
    step = int(str(load(path, target, ALONE, verified=True).trainer["step"]))
    return step if all(bool((tensor == step).all()) for tensor in target.tensors().values()) else -1


def leftovers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith((".partial", ".removed")))
