"""The hooks that fire while a run is built and while it runs: a third-party plugin hears them at the right time."""

import pytest


@pytest.fixture(scope="module")
def run(tmp_path_factory, train):
    root = tmp_path_factory.mktemp("hooks")
    return train(
        root / "run",
        max_train_steps=6,
        train_batch_size=4,
        checkpoint_step_interval=2,
        validation_step_interval=3,
        validation_prompt=["circle number 1", "circle number 2"],
        without=[],
    )


def order(run) -> list[str]:
    return [call["hook"] for call in run.all_calls()]


def test_hook_check_config_comes_before_anything_is_built(run):
    assert order(run)[0] == "check_config"


def test_hook_detect_blocks_sees_a_model_without_weights(run):
    assert run.calls("detect_blocks")[0]["devices"] == ["meta"]


def test_hook_wrap_model_gets_the_detected_blocks(run):
    assert len(run.calls("wrap_model")[0]["blocks"]) == 2


def test_a_backend_that_was_not_chosen_is_not_asked_to_wrap(run):
    assert not run.calls("wrap_model of a backend that was not chosen")


def test_hook_build_optimizer_gets_the_registry(run):
    assert "adamw" in run.calls("build_optimizer")[0]["registry"]


def test_hook_on_train_start_and_hook_on_train_end_are_a_pair(run):
    assert (run.calls("on_train_start")[0]["step"], run.calls("on_train_end")[0]["reason"]) == (0, "COMPLETED")


def test_hook_on_rank_start_comes_before_the_data_are_read_and_hook_on_rank_end_after_everything(run):
    assert (run.calls("on_rank_start")[0]["max_steps"], order(run)[-2]) == (0, "on_rank_end")
    assert order(run).index("on_rank_start") < order(run).index("detect_blocks")
    assert run.calls("on_rank_end") == [
        {"hook": "on_rank_end", "rank": 0, "process": run.calls("on_rank_end")[0]["process"], "step": 6, "error": None}
    ]


def test_hook_notices_before_launch_and_hook_on_launch_end_are_called_in_the_launcher(run):
    assert order(run).index("check_config") < order(run).index("notices_before_launch") < order(run).index("on_rank_start")
    assert (order(run)[-1], run.calls("on_launch_end")[0]["code"]) == ("on_launch_end", 0)


def test_hook_on_phase_follows_a_run_through_its_phases(run):
    phases = [call["phase"] for call in run.calls("on_phase")]
    assert phases[:2] == ["scanning", "building"] or phases[:3] == ["scanning", "encoding", "building"]
    assert phases[-3:] == ["training", "validating", "training"]
    assert "saving" in phases


def test_hook_on_step_end_fires_once_a_step(run):
    assert [call["step"] for call in run.calls("on_step_end")] == [1, 2, 3, 4, 5, 6]


def test_hook_on_step_boundary_knows_what_is_due(run):
    assert [(call["step"], call["saves"], call["validates"]) for call in run.calls("on_step_boundary")] == [
        (step, step % 2 == 0, step % 3 == 0) for step in range(1, 7)
    ]


def test_hook_log_metrics_has_the_numbers_of_a_step(run):
    assert {"loss", "grad_norm", "learning_rate", "samples_per_second"} <= set(run.calls("log_metrics")[0]["names"])


def test_hook_on_validation_comes_at_its_interval_and_at_the_end(run):
    assert [(call["step"], call["images"]) for call in run.calls("on_validation")] == [(3, 2), (6, 2)]


def test_hook_save_checkpoint_may_decline_and_hook_on_checkpoint_sees_it_whole(run):
    assert [call["step"] for call in run.calls("save_checkpoint")] == [2, 4, 6]
    assert all(call["visible"] for call in run.calls("on_checkpoint"))


def test_a_run_draws_its_losses_in_the_end(run):
    assert (run.directory / "loss.png").is_file()


def test_each_validation_has_a_contact_sheet_which_the_console_and_the_events_name(run):
    for event in run.events("sample"):
        sheet = run.directory / "samples" / f"{event['step']:08d}" / "grid.png"
        assert sheet.is_file()
        assert run.directory / event["overview"] == sheet
        assert f"2 images of step {event['step']}: {sheet}\n" in run.output


def test_hook_on_checkpoint_failed_tells_why_nothing_was_saved(tmp_path, train):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file where the folder should be")
    run = train(tmp_path / "run", max_train_steps=4, train_batch_size=4, checkpoint_step_interval=2)
    assert run.code == 1
    assert [call["step"] for call in run.calls("on_checkpoint_failed")][-1] == 4
    assert str(tmp_path / "run" / "checkpoints") in run.calls("on_checkpoint_failed")[0]["error"]


def test_hook_on_gpu_fault_is_asked_and_the_worst_answer_wins(tmp_path, train):
    worst = {"PROBE_FAULT": "STOP_UNSAVED"}
    fault = train(tmp_path / "fault", max_train_steps=6, train_batch_size=4, spoil="fault:0:3", variables=worst)
    assert fault.calls("on_gpu_fault")[0]["kind"] == "cuda_error"
    assert (fault.code, fault.calls("on_train_end")[0]["reason"]) == (5, "FAULT_UNSAVED")


def test_hook_on_error_hears_of_the_exception_that_ends_a_run(tmp_path, train):
    broken = train(tmp_path / "error", max_train_steps=6, train_batch_size=4, spoil="error:0:3")
    assert (broken.code, broken.calls("on_error")[0]["error"]) == (1, "RuntimeError")
    assert broken.calls("on_train_end")[0]["reason"] is None


def test_a_tracker_that_fails_is_switched_off_with_one_message(tmp_path, train):
    run = train(tmp_path / "tracker", max_train_steps=4, train_batch_size=4, tracker="broken")
    assert run.code == 0
    assert run.output.count("the tracker's server is down") == 1
    assert len(run.calls("log_metrics")) == 1


def test_tensorboard_gets_the_losses(tmp_path, train):
    run = train(tmp_path / "board", max_train_steps=3, train_batch_size=4, report_to="tensorboard")
    assert run.code == 0, run.output
    assert list((run.directory / "trackers").rglob("events.out.tfevents.*"))
