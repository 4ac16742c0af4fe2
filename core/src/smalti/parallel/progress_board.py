"""Where ranks publish their progress, beside the process group: in the store of the rendezvous."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from smalti.parallel.failure_detection import STATUS_PREFIX, StatusBoard, within_deadline


class ProgressBoard:
    """One text per rank. Every call returns within seconds, whatever has failed; what fails has no effect.

    For one thread: it has a connection of its own.
    """

    def __init__(self, store: Store, rank: int, prefix: str = "smalti/progress") -> None:
        self._statuses = StatusBoard(PrefixStore(STATUS_PREFIX, store), rank)
        self._store = PrefixStore(prefix, store)
        self._rank = rank

    @classmethod
    def create(cls, rank: int, prefix: str = "smalti/progress") -> ProgressBoard | None:
        """A board of this process group, of several by `prefix`; None for a single process. Not collective."""
        if not dist.is_initialized() or dist.group.WORLD is None:
            return None
        return cls(dist.group.WORLD.get_group_store().clone(), rank, prefix)  # type: ignore[attr-defined]

    def publish(self, text: str) -> None:
        within_deadline(lambda: self._store.set(str(self._rank), text))

    def read(self, size: int) -> dict[int, str]:
        """The texts of `size` ranks, as far as they have published one: one request if all have."""

        def look() -> dict[int, str]:
            names = [str(rank) for rank in range(size)]
            if not self._store.check(names):
                names = [name for name in names if self._store.check([name])]
            with suppress(ValueError):
                return {int(name): text.decode() for name, text in zip(names, self._store.multi_get(names), strict=True)}
            return {}

        return within_deadline(look) or {}

    def alarm(self) -> None:
        """Tell all ranks that one is lost; they break off what they wait for, and save where they can."""
        self._statuses.alarm()
