"""Which cases of a test `make test` runs. With SMALTI_TEST=whole, as `make test-whole` sets it, all of them run.

A test with many cases for one promise names those that take each way through the code once:

    @pytest.mark.parametrize("family", some(FAMILIES, "sdxl", "flux"))
"""

import os
from collections.abc import Iterable
from typing import TypeVar

WHOLE = os.environ.get("SMALTI_TEST") == "whole"
"""For what no test with cases can say; see tests/meta/test_whole.py."""
Case = TypeVar("Case")


def some(cases: Iterable[Case], *kept: Case, whole: bool = WHOLE) -> list[Case]:
    """The cases among `kept` in the order of `cases`, or all of them.

    Raises ValueError if none is kept, or one that is no case: a promise always has a test.
    """
    every = list(cases)
    if not kept:
        raise ValueError(f"cases to keep: one or more of {every}")
    if unknown := [each for each in kept if each not in every]:
        raise ValueError(f"{unknown} to keep, which are none of {every}")
    return every if whole else [each for each in every if each in kept]
