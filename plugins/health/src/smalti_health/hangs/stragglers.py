"""Ranks that are steadily slower than the others, which all ranks wait for in each step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

SLOW = 0.75
"""A rank is slow in a window if the median of all ranks is below this part of its own time."""
WINDOWS = 3
"""The number of slow windows in a row after which a rank is reported."""


class Stragglers:
    """Scores ranks by windows of time. A rank is reported once, and again only after a window in which it was not slow."""

    def __init__(self) -> None:
        self._slow: defaultdict[int, int] = defaultdict(int)

    def update(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Add a window: the median time of a forward pass on each rank. Returns new stragglers with their scores."""
        known = {rank: each for rank, each in seconds.items() if each > 0}
        if len(known) < 2:
            return {}
        # With two ranks the median is between them: the faster one is the measure.
        usual = min(known.values()) if len(known) == 2 else median(known.values())
        found = {}
        for rank, each in known.items():
            self._slow[rank] = self._slow[rank] + 1 if usual / each < SLOW else 0
            if self._slow[rank] == WINDOWS:
                found[rank] = usual / each
        return found
