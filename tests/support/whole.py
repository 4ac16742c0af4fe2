"""Which cases of a test `make test` runs. With TEST_CASES=whole, as `make test-whole` sets it, all of them run.

A test with many cases for one promise names those that take each way through the code once:

    @pytest.mark.parametrize("family", some(FAMILIES, "sdxl", "flux"))

A test that takes long for a promise that another test keeps too is left out as a whole, and names that other one:

    @only_whole("tests/e2e/test_kill.py::test_a_killed_run_ends_bit_equal_to_one_that_was_not")
"""

import os
from collections.abc import Iterable
from typing import TypeVar

import pytest

VARIABLE = "TEST_CASES"
"""Not with the prefix of variables that are options: a run that a test starts with this environment would refuse it."""
WHOLE = os.environ.get(VARIABLE) == "whole"
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


def only_whole(keeper: str) -> pytest.MarkDecorator:
    """For a test that `make test` skips: `keeper`, "FILE::TEST" from the root, runs in it and keeps the promise."""
    return pytest.mark.skipif(not WHOLE, reason=f"in `make test-whole`; {keeper} keeps what it protects")
