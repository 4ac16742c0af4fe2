"""Saves beside training: what is written is the state at the boundary, one at a time, and failures come back to the loop."""

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smalti.checkpoint.async_saver import Saver
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.staging import Staging
from smalti.checkpoint.writer import SaveError, save
from smalti.parallel.state import PortableState, capture
from smalti.types import Checkpoint, World


class SingleRank:
    world = World()

    def all_reduce_max(self, code):
        return code

    def all_gather_text(self, value):
        return [value]

    def abort(self):
        pass


class OfTwo(SingleRank):
    """One of two ranks in threads of this process."""

    def __init__(self, rank, messages, barrier):
        self.world = World(rank=rank, size=2)
        self._messages, self._barrier = messages, barrier

    def all_gather_text(self, value):
        self._messages[self.world.rank] = value
        self._barrier.wait(10)
        found = list(self._messages)
        self._barrier.wait(10)
        return found


def snapshot(step, **tensors):
    return Snapshot(step=step, state=PortableState(model=tensors))


@pytest.fixture
def saver(tmp_path):
    one = Saver(
        write=partial(save, tmp_path),
        communicator=SingleRank(),
        background=SingleRank(),
    )
    yield one
    one.close()


@pytest.fixture
def held(tmp_path):
    """A saver whose writing waits for `go`."""
    go, calls = threading.Event(), []

    def write(state, communicator):
        calls.append(state)
        go.wait(30)
        return save(tmp_path, state, communicator)

    one = Saver(write=write, communicator=SingleRank(), background=SingleRank())
    one.go, one.calls = go, calls
    yield one
    go.set()
    one.close()


def saved(path, *names):
    target = snapshot(0, **{name: torch.zeros(3) for name in names})
    load(path, target, SingleRank())
    return {name: tensor.tolist() for name, tensor in target.state.model.items()}


def test_what_is_written_is_the_state_at_the_boundary(held):
    weight = torch.ones(3)
    held.begin(snapshot(1, w=weight))
    held.wait_for_staging()
    weight.fill_(2)
    held.go.set()
    assert saved(held.poll(finish=True).path, "w") == {"w": [1, 1, 1]}


def test_a_buffer_may_change_before_the_release(held):
    statistics = torch.ones(3)
    held.begin(snapshot(1, w=torch.ones(3), b=statistics), changing=["b"])
    statistics.fill_(2)
    held.go.set()
    assert saved(held.poll(finish=True).path, "w", "b")["b"] == [1, 1, 1]


def test_training_goes_on_while_the_save_is_written(held):
    held.begin(snapshot(1, w=torch.ones(3)))
    held.wait_for_staging()
    assert held.poll() is None


def test_a_save_that_is_done_is_told_once(saver):
    saver.begin(snapshot(1, w=torch.ones(3)))
    told = [saver.poll(finish=True), saver.poll()]
    assert (told[0].step, told[1]) == (1, None)


def test_with_at_once_the_live_tensors_are_written_before_begin_returns(held):
    weight = torch.ones(3)
    held.go.set()
    held.begin(snapshot(1, w=weight), blocking=True)
    assert held.calls[0].state.model["w"] is weight


def test_host_memory_is_used_again_for_the_next_save(held):
    held.go.set()
    for step in (1, 2):
        held.begin(snapshot(step, w=torch.full((3,), float(step))))
        held.poll(finish=True)
    first, second = (call.state.model["w"] for call in held.calls)
    assert first.data_ptr() == second.data_ptr()


def test_a_tensor_of_another_size_gets_another_buffer(saver):
    for step in (1, 2):
        saver.begin(snapshot(step, w=torch.ones(step * 3)))
        done = saver.poll(finish=True)
    assert done.step == 2


def test_a_save_that_the_system_refuses_comes_back_as_a_value(tmp_path):
    def write(state, communicator):
        raise SaveError("no room", errno=errno.ENOSPC)

    one = Saver(write=write, communicator=SingleRank(), background=SingleRank())
    one.begin(snapshot(1, w=torch.ones(3)))
    assert one.poll(finish=True).errno == errno.ENOSPC
    one.close()


def test_a_defect_in_a_save_is_raised_in_the_loop(saver):
    saver.begin(replace(snapshot(1, w=torch.ones(3)), trainer={"loss": float("nan")}))
    with pytest.raises(ValueError, match="JSON compliant"):
        saver.poll(finish=True)


def test_a_failed_copy_lets_the_loop_go_on_to_hear_of_it(saver):
    saver.begin(snapshot(1, w=torch.ones(3, device="meta")))
    saver.wait_for_staging()
    with pytest.raises(NotImplementedError):
        saver.poll(finish=True)


def test_a_save_that_ends_well_here_and_badly_elsewhere_has_failed():
    class FailedElsewhere(SingleRank):
        def all_reduce_max(self, code):
            return max(code, 1)

    done = Checkpoint(step=1, path=None, size=0, seconds=0)
    one = Saver(write=lambda state, communicator: done, communicator=FailedElsewhere(), background=SingleRank())
    one.begin(snapshot(1, w=torch.ones(3)))
    assert "another rank" in one.poll(finish=True).message
    one.close()


def test_a_line_that_breaks_is_told_before_the_state_changes():
    class Broken(SingleRank):
        def all_gather_text(self, value):
            raise dist.DistNetworkError("gone")

    one = Saver(write=lambda state, communicator: None, communicator=SingleRank(), background=Broken())
    one.begin(snapshot(1, w=torch.ones(3)))
    with pytest.raises(dist.DistNetworkError):
        one.wait_for_staging()
    one.close()


def test_a_line_that_broke_is_told_without_asking_anybody():
    class Deaf(SingleRank):
        def all_reduce_max(self, code):
            raise AssertionError("asked")

    def write(state, communicator):
        raise dist.DistNetworkError("gone")

    one = Saver(write=write, communicator=Deaf(), background=SingleRank())
    one.begin(snapshot(1, w=torch.ones(3)))
    with pytest.raises(dist.DistNetworkError):
        one.poll(finish=True)
    one.close()


# --- the copy -------------------------------------------------------------------------------------------------------


def test_the_copy_has_moments_and_averages_under_their_names():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    live = Snapshot(step=1, state=capture(model, optimizer), ema={"weight": torch.ones(2, 3)}, trainer={"a": 1})
    copy = Staging("cpu").copy(live, SingleRank())
    assert copy.tensors().keys() == live.tensors().keys()
    assert all(torch.equal(copy.tensors()[name], tensor) for name, tensor in live.tensors().items())
    assert all(copy.tensors()[name].data_ptr() != tensor.data_ptr() for name, tensor in live.tensors().items())


def test_a_rank_copies_only_what_it_writes():
    names = {str(number): torch.ones(3) for number in range(4)}
    messages, barrier = ["", ""], threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        copies = [pool.submit(Staging("cpu").copy, snapshot(1, **names), OfTwo(rank, messages, barrier)) for rank in range(2)]
    for copy in copies:
        devices = sorted(tensor.device.type for tensor in copy.result().state.model.values())
        assert devices == ["cpu", "cpu", "meta", "meta"]
