"""What ranks publish beside the process group: their progress, and their status once one is lost.

It is in the store of the rendezvous. Every call returns within seconds, whatever has failed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from smalti.errors import ExitCode
from smalti.system import read_lost_peers

T = TypeVar("T")

_STORE_SECONDS = 5.0
_STATUSES = "smalti/statuses"
"""Where the statuses are in the store of the process group."""
_ALARM = "lost"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank posts about itself once the process group is broken.

    `state_consistent`: its state is that of the last step boundary. `failure` is its own failure in one line, with its exit
    `code`; "" if it has only detected that of another rank. `suspect`: its accelerator has failed in a way after which plugins
    want nothing saved.
    """

    state_consistent: bool = False
    failure: str = ""
    code: int = ExitCode.FAILED
    suspect: bool = False


class ProgressBoard:
    """One text per rank. Every call returns within seconds, whatever has failed; what fails has no effect.

    For one thread, which waits for no other on a connection of its own (`create`, `clone`).
    """

    def __init__(self, store: Store, rank: int, prefix: str = "smalti/progress") -> None:
        self._shared = store
        self._store = PrefixStore(prefix, store)
        self._statuses = PrefixStore(_STATUSES, store)
        self._rank = rank

    @classmethod
    def create(cls, rank: int, prefix: str = "smalti/progress") -> ProgressBoard | None:
        """A board of this process group, of several by `prefix`; None for a single process. Not collective."""
        if not dist.is_initialized() or dist.group.WORLD is None:
            return None
        return cls(dist.group.WORLD.get_group_store().clone(), rank, prefix)  # type: ignore[attr-defined]

    @property
    def lost(self) -> bool:
        """Whether the node with the store is lost: then nothing is asked of it."""
        return 0 in read_lost_peers().nodes

    def publish(self, text: str) -> None:
        self._ask(lambda: self._store.set(str(self._rank), text))

    def read(self, size: int) -> dict[int, str]:
        """The texts of `size` ranks, as far as they have published one: one request if all have."""

        def look() -> dict[int, str]:
            names = [str(rank) for rank in range(size)]
            if not self._store.check(names):
                names = [name for name in names if self._store.check([name])]
            with suppress(ValueError):
                return {int(name): text.decode() for name, text in zip(names, self._store.multi_get(names), strict=True)}
            return {}

        return self._ask(look) or {}

    def alarm(self) -> None:
        """Tell all ranks that one is lost; they break off what they wait for, and save where they can."""
        self._ask(lambda: self._statuses.set(_ALARM, "1"))

    def _ask(self, action: Callable[[], T]) -> T | None:
        """What `action` returns; None if the store does not respond in time. By itself a call to it can block for very long."""
        found: list[T] = []

        def attempt() -> None:
            with suppress(dist.DistError):
                found.append(action())

        if self.lost:
            return None
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        return found[0] if found else None


class StatusBoard(ProgressBoard):
    """Where ranks post their statuses once one is lost."""

    def __init__(self, store: Store, rank: int) -> None:
        super().__init__(store, rank, _STATUSES)

    def clone(self) -> StatusBoard:
        """The same board over a second connection, so that a thread that waits on the first one does not block it."""
        return StatusBoard(self._shared.clone(), self._rank)  # type: ignore[attr-defined]

    def post(self, status: RankStatus) -> None:
        """Post the status of this rank; only the first one counts. No rank sees it if the node that hosts the store is lost."""
        self._ask(lambda: self._store.compare_set(str(self._rank), "", json.dumps(asdict(status))))
        self.alarm()

    def alarmed(self) -> bool | None:
        """Whether any rank has reported that one is lost; None if the store does not respond."""
        return self._ask(lambda: self._statuses.check([_ALARM]))

    def posted(self, size: int) -> dict[int, RankStatus]:
        """The statuses that `size` ranks have posted, by rank; empty if the store does not respond."""
        return {rank: RankStatus(**json.loads(text)) for rank, text in self.read(size).items()}
