"""The time of the forward passes of a step."""

from smalti.training.failures.step_times import ForwardTime


def test_the_forward_passes_of_a_step_count_together_and_each_step_anew():
    timer = ForwardTime("cpu")
    assert timer.end_step() == 0
    for _ in range(2):
        with timer.measured():
            sum(range(20_000))
    assert timer.end_step() > 0
    assert timer.end_step() == 0
