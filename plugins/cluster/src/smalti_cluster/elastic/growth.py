"""Growing back: a group that trains on fewer nodes than it could is stopped, saved and formed again with those that wait.

Importing this module imports no torch.
"""

from __future__ import annotations

import threading
from pathlib import Path

from smalti import RunState, StepBoundary, StopReason
from smalti_cluster.elastic.messages import GENERATION_FILE, Place, growth
from smalti_cluster.elastic.waiting import SteadyNodes

_LOOK_SECONDS = 3.0
_STEADY_SECONDS = 30.0
"""A node has to wait for this long without a pause, unless the group grows after a shorter time."""


class Growth:
    """On the main rank. A thread looks for nodes that wait, once the generation has trained for `--grow_after`."""

    def __init__(self, place: Place, after: int) -> None:
        self._used, self._sizes, self._after = place.generation.used, place.sizes, after
        self._steady = SteadyNodes(Path(place.directory, GENERATION_FILE).parent, min(_STEADY_SECONDS, after))
        self._joining: list[int] = []
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="smalti-growth", daemon=True).start()

    @classmethod
    def of_process(cls) -> Growth | None:
        """For the group of this process; None if it has all nodes that it can use, or if it does not grow."""
        place = Place.of_process()
        if place is None or place.grow_after is None or place.generation.used >= max(place.sizes, default=0):
            return None
        return cls(place, place.grow_after)

    def close(self) -> None:
        self._closed.set()

    def check(self, state: RunState, boundary: StepBoundary) -> None:
        """Ask all ranks to stop at this boundary if nodes wait that can take part. Every other reason to stop is stronger."""
        joining = self._joining
        if joining and boundary.agreed is StopReason.NONE is state.stop_reason and state.step < state.max_steps:
            state.request_stop(StopReason.REQUESTED, growth(state.step, joining))

    def _watch(self) -> None:
        if self._closed.wait(max(0.0, self._after - _STEADY_SECONDS)):
            return
        while not self._closed.wait(_LOOK_SECONDS):
            waiting = self._steady.look()
            larger = max((size for size in self._sizes if size <= self._used + len(waiting)), default=0) > self._used
            self._joining = waiting if larger else []
