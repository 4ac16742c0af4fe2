"""When images are generated, and when the loss on held-out images is measured."""

from types import SimpleNamespace

import pytest

from smalti import RunState
from smalti.config.resolution import resolve
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.periodic import periodic_work

PLUGINS = load_plugins(Selection(only=("validation",)))


def work(name: str, *flags: str):
    config = resolve(schema_of(PLUGINS), flags, environment={})
    return {each.name: each for each in periodic_work(config, PLUGINS)}.get(name)


def states() -> list[RunState]:
    return [RunState(max_steps=10, step=step, position=step, epoch=(step - 1) // 3) for step in range(1, 11)]


def steps_of(name: str, *flags: str, held_out: object = True) -> list[int]:
    """After which of ten steps something is due, when an epoch has three batches."""
    found = work(name, *flags)
    data = SimpleNamespace(held_out=held_out, order=SimpleNamespace(epoch_of=lambda position: position // 3))
    return [state.step for state in states() if found.is_due(SimpleNamespace(state=state, data=data))]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ((), [10]),
        (("--eval_steps_interval=4",), [4, 8, 10]),
        (("--eval_epoch_interval=1",), [3, 6, 9, 10]),
        (("--eval_epoch_interval=2",), [6, 10]),
    ],
)
def test_evaluation_comes_at_its_steps_after_its_epochs_and_at_the_end(flags, steps):
    assert steps_of("evaluation", *flags) == steps


def test_without_anything_held_out_nothing_is_evaluated():
    assert steps_of("evaluation", "--eval_steps_interval=4", held_out=None) == []


def test_images_are_generated_at_the_interval_and_at_the_end():
    assert steps_of("validation", "--validation_prompt=a cat", "--validation_step_interval=4") == [4, 8, 10]


def test_a_request_is_enough_to_generate_them():
    asked = SimpleNamespace(state=RunState(max_steps=10, step=3, validation_requested=True))
    assert work("validation", "--validation_prompt=a cat").is_due(asked)


def test_nothing_is_generated_without_prompts():
    assert work("validation", "--validation_step_interval=5") is None


def test_hook_register_periodic_work_has_images_before_the_loss():
    config = resolve(schema_of(PLUGINS), ["--validation_prompt=a cat"], environment={})
    assert [each.name for each in periodic_work(config, PLUGINS)] == ["validation", "evaluation"]


def test_prompts_are_texts_to_encode_and_ranks_compare_them():
    one, other = (work("validation", f"--validation_prompt={text}", "--validation_negative_prompt=ugly") for text in "ab")
    assert (one.texts, one.negative_texts) == (["a"], ["ugly"])
    assert one.inputs != other.inputs
