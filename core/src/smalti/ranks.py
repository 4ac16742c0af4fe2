"""Words between ranks over gloo: small, on the processor, never waiting for the accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from smalti.types import World


@dataclass(frozen=True, kw_only=True)
class GlooRanks:
    """One rank's end of a gloo group of all ranks; `group` is None in a single process."""

    world: World
    group: dist.ProcessGroup | None

    def agree(self, code: int) -> int:
        if self.group is None:
            return code
        word = torch.tensor(code, dtype=torch.int64)
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self.group)
        return int(word)

    def share(self, value: str) -> Sequence[str]:
        if self.group is None:
            return [value]
        found: list[str] = [""] * self.world.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def barrier(self) -> None:
        self.agree(0)
