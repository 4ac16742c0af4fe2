"""The time of the forward passes of a step."""

from smalti.training.failures.step_times import ForwardTime


def test_the_forward_passes_of_a_step_count_together():
    timer = ForwardTime("cpu")
    assert timer.seconds() == 0
    with timer.measured():
        sum(range(20_000))
    first = timer.seconds()
    with timer.measured():
        sum(range(20_000))
    assert timer.seconds() > first > 0
