"""What all ranks do between steps: what is agreed on, and when."""

from types import SimpleNamespace

import pytest

from smalti import RunState, StopReason
from smalti.config import CheckpointOptions
from smalti.training.periodic import is_due
from smalti.training.run import PeriodicWork
from smalti.training.trainer import agree


class Work(PeriodicWork):
    def __init__(self, name: str, *, due: bool) -> None:
        self.name, self.due = name, due

    def is_due(self, run) -> bool:
        return self.due


def agreed(*due: bool, interval: int = 0, pauses: bool = False, others: int = 0, **state):
    """What a rank does whose own work is due as said, where the largest number of the other ranks is `others`."""
    numbers = []

    def all_reduce_max(number: int) -> int:
        numbers.append(number)
        return max(number, others)

    run = SimpleNamespace(
        state=RunState(max_steps=9, step=4, **state),
        queued=None,
        batches=SimpleNamespace(budget_exhausted=None),
        settle=lambda: 0.0,
        periodic=[Work(f"work {place}", due=each) for place, each in enumerate(due)],
        config={CheckpointOptions: SimpleNamespace(checkpoint_step_interval=interval)},
        saver=SimpleNamespace(is_pending=False),
        plugins=SimpleNamespace(notify=lambda hook, **arguments: None),
        disk_space=SimpleNamespace(pauses=lambda state, is_main: pauses),
        world=SimpleNamespace(is_main=True),
        parallel=SimpleNamespace(all_reduce_max=all_reduce_max, all_gather_text=lambda text: [text]),
    )
    actions = agree(run)
    assert len(numbers) == 1
    return actions, numbers[0]


def test_a_step_that_was_left_out_is_not_counted_again():
    assert is_due(RunState(max_steps=10, step=4), 4)
    assert not is_due(RunState(max_steps=10, step=4, skipped=1), 4)
    assert not is_due(RunState(max_steps=10, step=4), 0)


@pytest.mark.parametrize("due", [(), (True,), (False, True), (True, False, True), (False,) * 5])
@pytest.mark.parametrize("saves", [False, True])
def test_one_number_says_which_work_is_due_and_whether_to_save(due, saves):
    actions, _ = agreed(*due, interval=2 * saves)
    assert [work.name for work in actions.work] == [f"work {place}" for place, each in enumerate(due) if each]
    assert (actions.save, actions.paused, actions.outcome) == (saves, False, None)


def test_a_request_is_enough_to_save():
    assert agreed(save_requested=True)[0].save


def test_what_another_rank_is_for_is_done_here_too():
    _, number = agreed(False, True, save_requested=True)
    actions, _ = agreed(False, True, others=number)
    assert ([work.name for work in actions.work], actions.save) == (["work 1"], True)


def test_while_the_run_is_paused_nothing_is_due():
    actions, _ = agreed(True, pauses=True, interval=2)
    assert (actions.paused, actions.work, actions.save) == (True, (), False)


def test_the_last_step_has_its_work_and_a_stop_has_none():
    completed, _ = agreed(True, stop_reason=StopReason.COMPLETED)
    stopped, _ = agreed(True, stop_reason=StopReason.REQUESTED)
    assert ([len(each.work) for each in (completed, stopped)], stopped.save) == ([1, 0], True)
