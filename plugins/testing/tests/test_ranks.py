"""The runner of several processes: what it brings back, and that nothing is left when something goes wrong.

Ranks import this file; torch takes them seconds, and only those in a group need it.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from smalti_testing import RankFailed, two_processes


def add_over_ranks(number):
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(number + dist.get_rank()))
    dist.all_reduce(total)
    return float(total)


def process_id():
    return os.getpid()


def fail_on(rank):
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has had enough")
    dist.barrier()


def sleep_on(rank):
    if environment("RANK") == str(rank):
        time.sleep(600)


def die_on(rank):
    if environment("RANK") == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)


def leave():
    sys.exit(3)


def secret():
    return lambda: None


def environment(name):
    return os.environ[name]


def forked(seconds):
    from support.forked_ranks import forked_processes  # which the processes that import this file do not find

    return forked_processes(seconds=seconds)


@pytest.fixture(scope="module")
def pair():
    """Started again after each failure, and so forked; all else is what `two_processes` does."""
    with forked(seconds=20) as processes:
        yield processes


def test_every_rank_answers_in_order_from_processes_of_which_none_is_left_when_they_are_closed():
    with two_processes(seconds=20) as processes:
        assert processes.run(environment, "RANK") == ["0", "1"]
        assert processes.run(add_over_ranks, 3) == [7.0, 7.0]
        numbers = processes.run(process_id)
        assert processes.run(process_id) == numbers, "started once for many functions"
    assert not any(psutil.pid_exists(number) for number in numbers)


def test_a_failure_names_the_rank_and_has_its_traceback(pair):
    with pytest.raises(RankFailed, match=r"(?s)rank 1:.*in fail_on.*ValueError: rank 1 has had enough"):
        pair.run(fail_on, 1)


def test_after_a_failure_the_next_function_finds_fresh_processes(pair):
    before = pair.run(process_id)
    pair.attempt(leave)
    assert set(pair.run(process_id)).isdisjoint(before)


def test_an_answer_that_cannot_be_sent_is_told(pair):
    assert "cannot be sent" in pair.attempt(secret)[0].error


def test_a_rank_that_hangs_is_told_with_where_it_stands():
    with forked(seconds=2) as hasty:
        results = hasty.attempt(sleep_on, 1)
    assert results[0].error == ""
    assert "in sleep_on" in results[1].error


def test_a_rank_that_dies_is_told_with_its_status():
    with two_processes(group=False, seconds=20) as processes:
        results = processes.attempt(die_on, 0)
    assert "status -9" in results[0].error


def test_nothing_is_left_running_when_whoever_started_it_is_killed(tmp_path):
    script = tmp_path / "starter.py"
    body = f"""
        import sys, time
        from importlib.util import spec_from_file_location, module_from_spec
        spec = spec_from_file_location("given", {str(Path(__file__))!r})
        given = module_from_spec(spec); spec.loader.exec_module(given)
        from smalti_testing import two_processes
        with two_processes(group=False) as pair:
            print(*pair.run(given.process_id), flush=True)
            pair.attempt(given.wait_for_ever)
    """
    script.write_text("\n".join(line[8:] for line in body.splitlines()))
    starter = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    numbers = [int(word) for word in starter.stdout.readline().split()]
    starter.kill()
    starter.communicate()
    deadline = time.monotonic() + 60
    while not all(map(has_ended, numbers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [has_ended(each) for each in numbers] == [True, True]


def has_ended(number):
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_ever():
    time.sleep(600)
