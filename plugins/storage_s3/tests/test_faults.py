"""The client with faults between it and the store: a fixed spread of all cases. `make torture` plays every one."""

import pytest

from smalti_testing import seaweed
from torture.object_store import all_cases, play_all

CASES = all_cases()
SPREAD = [case for number, case in enumerate(CASES) if number % 6 == 0 or case.fault.startswith("flip")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with seaweed(tmp_path_factory.mktemp("store")) as store:
        return {case.name: wrong for case, wrong in play_all(SPREAD, store, seed=1)}


@pytest.mark.parametrize("name", [case.name for case in SPREAD])
def test_a_fault_gives_exact_bytes_or_an_error_that_says_why(outcomes, name):
    assert outcomes[name] == ""


def test_the_cases_are_every_fault_at_every_operation_with_both_libraries():
    assert len(CASES) >= 200
    assert {case.operation for case in SPREAD} == {case.operation for case in CASES}
    assert {case.fault for case in SPREAD} == {case.fault for case in CASES}
    assert {case.fast for case in SPREAD} == {True, False}
