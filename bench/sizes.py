"""How much each case measures. With `--short` it is the least that runs all of its code, and the ratios say nothing."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
VARIABLE = "BENCH_SHORT"
"""In the environment, for the processes that a case starts."""


def sized(usual: T, *, short: T) -> T:
    return short if os.environ.get(VARIABLE) else usual


WARM_UP = sized(1, short=0)
"""Pairs at the beginning that do not count: they warm caches and make buffers."""
