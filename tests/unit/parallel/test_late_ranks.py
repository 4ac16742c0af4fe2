"""How long ranks wait for one that comes late to a collective call: 1 s, and for a rank that works as long as that takes."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch.distributed as dist

from smalti.parallel import GlooCommunicator, RankWork, describe_phases, describe_work, run_on_all_ranks
from smalti.parallel.late_ranks import Presence
from smalti.rundir import Phases
from smalti.types import World
from support.forked_ranks import forked_processes

TIMEOUT = 1.0
LATE = 3 * TIMEOUT
NEVER = 120.0


@contextmanager
def connected() -> Iterator[GlooCommunicator]:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    presence = Presence(world.rank, world.size, TIMEOUT)
    presence.start()
    yield GlooCommunicator(world=world, group=dist.group.WORLD, presence=presence)
    presence.close()


def exchange() -> tuple[int, list[list[str]]]:
    """The largest of 3 and 5, and texts of other lengths from each rank."""
    with connected() as ranks:
        rank = ranks.world.rank
        return ranks.all_reduce_max(3 + 2 * rank), [list(ranks.all_gather_text("é" * (rank + more))) for more in (0, 1, 3)]


def come_late(seconds: float, work: RankWork | None = None) -> str:
    """Rank 0 works alone before a call that all make. Returns how the call ended."""
    describe_work(lambda: work or RankWork(doing="encoding 1/9 images", idle=NEVER))
    with connected() as ranks:
        if ranks.world.is_main:
            time.sleep(seconds)
        return end_of(ranks)


def come_late_from_a_phase(steps: int) -> str:
    """Rank 0 is in a phase for `LATE` seconds before a call that all make, with so many steps of progress."""
    phases = Phases()
    phases.enter("encoding", total=9, unit="images")
    describe_phases(phases)
    with connected() as ranks:
        for _ in range(steps if ranks.world.is_main else 0):
            time.sleep(LATE / steps)
            if steps > 1:
                phases.note_progress()
        return end_of(ranks)


def end_of(ranks: GlooCommunicator) -> str:
    try:
        ranks.barrier()
    except (dist.DistError, RuntimeError) as error:
        return str(error)
    return "all came"


def stop_rank_1() -> str:
    """Rank 1 is stopped in the middle of its work; it does not have the store."""
    describe_work(lambda: RankWork(doing="encoding 1/9 images"))
    with connected() as ranks:
        pid = int(ranks.all_gather_text(str(os.getpid()))[1])
        if not ranks.world.is_main:
            time.sleep(TIMEOUT)
            return ""
        time.sleep(TIMEOUT / 2)
        os.kill(pid, signal.SIGSTOP)
        end = end_of(ranks)
        os.kill(pid, signal.SIGCONT)
        return end


def wait_for_each_other() -> str:
    """Each rank waits in a call of its own group, for which no other rank comes."""
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    with connected() as ranks:
        return end_of(replace(ranks, group=groups[ranks.world.rank]))


@pytest.fixture
def pair():
    with forked_processes() as processes:
        yield processes


def test_values_and_texts_of_any_length_are_exchanged(pair):
    assert pair.run(exchange) == [(5, [["", "é"], ["é", "éé"], ["ééé", "éééé"]])] * 2


def test_a_rank_that_works_for_longer_than_the_timeout_is_waited_for(pair):
    assert pair.run(come_late, LATE) == ["all came"] * 2


def test_a_rank_without_progress_is_waited_for_until_the_deadline_of_its_phase(pair):
    before = RankWork(doing="validating", idle=LATE, limit=2 * LATE)
    assert pair.run(come_late, LATE, before) == ["all came"] * 2
    after = RankWork(doing="validating", idle=2 * LATE, limit=LATE)
    ends = pair.run(come_late, LATE, after)
    assert ends[1] == "rank 0 has made no progress for 6 s (validating)"
    assert "closed" in ends[0], "it finds the connections broken, and does not wait"


def test_a_rank_in_a_phase_is_waited_for_as_long_as_it_makes_progress(pair):
    assert pair.run(come_late_from_a_phase, 10) == ["all came"] * 2
    assert "rank 0 has made no progress for" in pair.run(come_late_from_a_phase, 1)[1]


def test_a_rank_that_shows_no_sign_of_life_is_given_up(pair):
    assert pair.run(stop_rank_1)[0] == "rank 1 has shown no sign of life for 1 s (last: encoding 1/9 images)"


def test_ranks_whose_messages_do_not_arrive_do_not_wait_for_ever(pair):
    ends = pair.run(wait_for_each_other)
    assert "all ranks wait for each other: their messages do not arrive" in ends


def save_slowly(seconds: float) -> list[str]:
    """Rank 0 takes longer to write its part, in the thread that saves, while its loop waits for nobody."""
    describe_work(lambda: RankWork(doing="training", idle=NEVER, limit=0))
    describe_work(lambda: RankWork(doing="saving"), "saving")
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    presence = Presence(world.rank, world.size, TIMEOUT, "saving")
    presence.start()
    ranks = GlooCommunicator(world=world, group=dist.new_group(backend="gloo"), presence=presence)
    with ThreadPoolExecutor(1) as saving:
        answers = saving.submit(run_on_all_ranks, ranks, lambda: write_part(world, seconds)).result()
    presence.close()
    return answers


def write_part(world: World, seconds: float) -> str:
    if world.is_main:
        time.sleep(seconds)
    return f"part {world.rank}"


def test_a_rank_that_saves_for_longer_is_waited_for_by_the_threads_that_save(pair):
    assert pair.run(save_slowly, LATE) == [["part 0", "part 1"]] * 2
