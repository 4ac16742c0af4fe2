"""The client with faults between it and the store: a fixed spread of all cases. `make torture` plays every one."""

from random import Random

import pytest

from smalti_testing import seaweed
from torture.object_store import all_cases, play_all
from torture.store_failures import racing_writers, refused_requests, stopping_server

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


def test_wrong_keys_and_clocks_and_missing_permissions_are_tried_once(tmp_path):
    assert refused_requests(Random(1), tmp_path).broken == []


def test_one_of_several_writers_wins_and_the_probe_says_where_not(tmp_path):
    assert racing_writers(Random(1), tmp_path, races=6).broken == []


def test_what_a_killed_server_acknowledged_is_there_and_the_writers_go_on(tmp_path):
    assert stopping_server(Random(1), tmp_path, rounds=1).broken == []
