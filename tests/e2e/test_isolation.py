"""Validation and observers that fail: it is reported, and takes no step, no outcome and no other error with it."""

import pytest

from smalti.checkpoint.format.store import CheckpointStore
from support.whole import some

OPTIONS = {
    "max_train_steps": 8,
    "train_batch_size": 2,
    "checkpoint_step_interval": 4,
    "validation_step_interval": 4,
    "validation_prompt": ["circle number 1", "circle number 2"],
    "validation_num_inference_steps": 2,
    "use_ema": True,
}


def saved(run) -> list[int]:
    return [entry.step for entry in CheckpointStore(run.directory / "checkpoints").all()]


def warnings(run) -> list[str]:
    return [event["message"] for event in run.events("warning")]


def last_state(run) -> str:
    return run.events("state")[-1]["state"]


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_a_validation_that_fails_is_reported_and_tried_again_at_the_next_interval(tmp_path, train, ranks):
    options = {**OPTIONS, "num_processes": ranks, "train_batch_size": 4 // ranks}
    run = train(tmp_path / "run", **options, spoil=f"sample:{ranks - 1}:4")
    assert run.code == 0, run.output
    assert len(run.losses) == 8
    assert saved(run) == [4, 8]
    assert {call["step"] for call in run.calls("on_validation")} == {8}
    assert warnings(run) == [f"validation of step 4 failed: {'rank 1: ' if ranks > 1 else ''}RuntimeError: spoiled"]
    assert run.output.count("Traceback") == 1
    assert last_state(run) == "finished"


def test_the_last_validation_takes_neither_the_state_nor_the_outcome_with_it(tmp_path, train):
    run = train(tmp_path / "run", **OPTIONS, spoil="sample:0:8")
    assert run.code == 0, run.output
    assert saved(run) == [4, 8]
    assert "done: trained 8 steps; validation of step 8 failed: RuntimeError: spoiled" in run.output


def test_pictures_and_a_plot_that_cannot_be_written_are_a_line_each(tmp_path, train):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/samples").write_text("a file where the folder should be")
    (tmp_path / "run/loss.png").mkdir()
    run = train(tmp_path / "run", **OPTIONS, without=[])
    assert run.code == 0, run.output
    assert saved(run) == [4, 8]
    assert "Traceback" not in run.output
    assert sum("validation of step" in line and "samples" in line for line in warnings(run)) == 2
    [line] = [line for line in run.output.splitlines() if "plugin 'plots'" in line]
    assert "failed in hook 'on_train_end'" in line


def test_the_ranks_of_a_sharded_run_keep_the_outcome_when_one_fails_in_the_last_validation(tmp_path, launch):
    options = {**OPTIONS, "num_processes": 2, "validation_step_interval": 0, "fsdp_enable": True}
    run = launch(tmp_path / "run", **options, spoil="sample:1:8")
    assert run.code == 0, run.output
    assert saved(run) == [4, 8]
    assert "done: trained 8 steps; the last validation or evaluation failed" in run.output


ISOLATED = ("notices_before_launch", "on_validation", "on_checkpoint", "on_train_end", "on_launch_end")


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory, train):
    """A run on whose observers nobody can rely."""
    place = tmp_path_factory.mktemp("spoiled")
    return train(place / "run", **OPTIONS, variables={"PROBE_RAISE": ",".join((*ISOLATED, "on_warning"))})


def test_hook_on_warning_hears_of_an_observer_that_fails_and_the_run_goes_on(spoiled):
    assert spoiled.code == 0, spoiled.output
    assert len(spoiled.losses) == 8
    told = [call["message"] for call in spoiled.calls("on_warning")]
    assert any(text.startswith("plugin 'probe' (smalti-probe 1.0) failed in hook 'on_validation'") for text in told), told


def test_the_built_in_observers_hear_of_everything_whatever_others_do(spoiled):
    assert [event["step"] for event in spoiled.events("checkpoint")] == [4, 8]
    assert [event["step"] for event in spoiled.events("sample")] == [4, 8]
    assert last_state(spoiled) == "finished"


def test_a_plugin_that_fails_before_or_after_the_ranks_is_named(spoiled):
    for hook in ("notices_before_launch", "on_launch_end"):
        assert f"plugin 'probe' (smalti-probe 1.0) failed in hook '{hook}'" in spoiled.output


@pytest.mark.parametrize("without", [["plots"], ["plots", "plan"]])
def test_hook_explain_error_of_a_plugin_that_fails_takes_neither_the_state_nor_the_words_of_others(tmp_path, train, without):
    variables = {"PROBE_RAISE": "explain_error"}
    run = train(tmp_path / "run", **OPTIONS, without=without, spoil="memory:0:4", variables=variables)
    assert (run.code, saved(run)) == (1, [3]), run.output
    said = "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    if "plan" not in without:
        said = "out of memory on cpu: no room for 2.00 GiB more in the forward pass"
    assert f"smalti: error: {said}" in run.output
    assert any("failed in hook 'explain_error'" in text for text in warnings(run))
    assert run.calls("explain_error") == [
        {**run.calls("explain_error")[0], "error": "OutOfMemoryError", "built": True},
    ]


def test_what_an_observer_raised_is_shown_with_its_traceback(spoiled):
    assert "RuntimeError: spoiled on_train_end" in spoiled.output
    assert "raised by plugin 'probe'" in spoiled.output
    assert spoiled.output.count("Traceback") >= len(ISOLATED)


def test_an_exception_in_the_first_step_stays_the_error_of_the_run(tmp_path, train):
    run = train(tmp_path / "run", **OPTIONS, without=[], variables={"PROBE_RAISE": "on_step_end,on_train_end"})
    assert run.code == 1
    last = run.output[run.output.rindex("smalti: error:") :]
    assert "RuntimeError: spoiled on_step_end" in last
    assert "raised by plugin 'probe' (smalti-probe 1.0) in hook 'on_step_end'" in last
    assert "after that: RuntimeError: spoiled on_train_end" in last
    assert "nothing to plot" not in run.output
    assert "Traceback" in run.output
    assert (last_state(run), run.events("error")[0]["message"]) == ("failed", "spoiled on_step_end")


def test_an_observer_that_cannot_start_ends_the_run_and_the_others_are_told_of_the_end(tmp_path, train):
    run = train(tmp_path / "run", **OPTIONS, variables={"PROBE_RAISE": "on_train_start"})
    assert run.code == 1
    assert "in hook 'on_train_start'" in run.output
    assert not run.calls("on_train_end")
    assert (last_state(run), run.events("error")[0]["message"]) == ("failed", "spoiled on_train_start")


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_an_exit_in_a_hook_ends_the_run_as_an_exception_does(tmp_path, train, launch, ranks):
    options = {"max_train_steps": 4, "train_batch_size": 4 // ranks, "num_processes": ranks}
    run = (train if ranks == 1 else launch)(tmp_path / "run", **options, variables={"PROBE_EXIT": "on_checkpoint,on_step_end"})
    assert run.code == 1, run.output
    assert "the hook 'on_step_end' of plugin 'probe' (smalti-probe 1.0) called sys.exit(0)" in run.output
    assert saved(run) == [1]
    assert (last_state(run), run.events("state")[-1]["exit_code"]) == ("failed", 1)
    assert any("failed in hook 'on_checkpoint'" in text and "sys.exit(0)" in text for text in warnings(run))


def test_an_exit_while_the_configuration_is_checked_is_an_error_of_the_plugin(tmp_path, train):
    run = train(tmp_path / "run", max_train_steps=1, train_batch_size=4, variables={"PROBE_EXIT": "check_config"})
    assert run.code == 1, run.output
    assert "the hook 'check_config' of plugin 'probe' (smalti-probe 1.0) called sys.exit(0)" in run.output
