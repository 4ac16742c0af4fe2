"""Words between ranks over gloo: small, on the processor, never waiting for the accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from smalti.types import World

_FAREWELL = 0x5A17
"""The tag of a message that nobody sends."""


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

    def hang_up(self) -> None:
        hang_up(self.group)


def hang_up(group: dist.ProcessGroup | None) -> None:
    """Break this rank's connections in a gloo group, for good: whoever waits in it, here or elsewhere, gets an error at once.

    Does nothing to other kinds of groups. `ProcessGroup.abort` has no effect on gloo (torch 2.13); but gloo closes all its
    connections when a message does not come in time.
    """
    if group is None or dist.get_backend(group) != "gloo":
        return
    for other in range(dist.get_world_size(group)):
        if other != dist.get_rank(group):
            with suppress(RuntimeError):  # it runs out of time, or the connection is broken already
                message = dist.irecv(torch.zeros(1), src=other, group=group, tag=_FAREWELL)
                assert message is not None
                message.wait(timedelta(milliseconds=1))


def is_line_error(error: BaseException) -> bool:
    """Whether an exception tells that words between ranks failed, as opposed to this rank's own work.

    torch has a type for that, but passes on gloo's errors as plain ones, which begin with the place in gloo's source or tell of
    its connections.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(
        word in str(error) for word in ("/gloo/", "Application timeout caused pair closure")
    )
