"""A fault of the accelerator, as an exception in a step or as a report from beside it: each action does what it says."""

import json

import pytest

from smalti.checkpoint.format.manifest import SUSPECT
from smalti.checkpoint.format.store import CheckpointStore
from smalti_health.circuit_file import read_circuit
from smalti_health.circuits import reset_circuit
from support.whole import some

OPTIONS = {"max_train_steps": 6, "train_batch_size": 4}


def answered(train, directory, answer, *, spoil="fault:0:3", **options):
    return train(directory, **{**OPTIONS, **options}, spoil=spoil, variables={"PROBE_FAULT": answer})


def saved(run) -> list[int]:
    return [entry.step for entry in CheckpointStore(run.directory / "checkpoints").all()]


ANSWERS = [("CONTINUE", 0, [6]), ("CHECKPOINT", 0, [2, 6]), ("STOP_SAVED", 5, [2]), ("STOP_UNSAVED", 5, [])]


@pytest.mark.parametrize(("answer", "code", "steps"), some(ANSWERS, ANSWERS[1], ANSWERS[3]))
def test_hook_on_gpu_fault_decides_whether_a_run_goes_on_and_what_it_saves(tmp_path, train, answer, code, steps):
    run = answered(train, tmp_path / "run", answer)
    assert (run.code, saved(run)) == (code, steps), run.output
    assert "an illegal memory access was encountered" in run.output


def test_the_batch_of_a_step_that_was_left_out_is_not_trained_on_later(tmp_path, train):
    run = answered(train, tmp_path / "run", "CONTINUE")
    states = [json.loads(path.read_text()) for path in (run.directory / "checkpoints").glob("*/state.json")]
    assert [(state["trainer"]["step"], state["trainer"]["position"]) for state in states] == [(6, 7)]


def test_a_device_that_does_not_recover_ends_the_run_although_the_plugins_would_go_on(tmp_path, train):
    run = answered(train, tmp_path / "run", "CHECKPOINT", spoil="faults:0:3")
    assert run.code == 5
    assert len(run.calls("on_gpu_fault")) == 10
    assert "10 steps in a row were skipped" in run.output


def test_a_plugin_that_fails_over_a_fault_does_not_hide_it(tmp_path, train):
    run = train(tmp_path / "run", **OPTIONS, spoil="fault:0:3", variables={"PROBE_RAISE": "on_gpu_fault"})
    assert (run.code, run.events("state")[-1]["exit_code"]) == (5, 5)
    assert "an illegal memory access was encountered" in run.events("state")[-1]["message"]


# --- reported faults, on which the ranks agree ------------------------------------------------------------------------


def reported(train, directory, answer, *, ranks=2, spoil="report:1:3", **variables):
    words = {"PROBE_FAULT": answer, **variables} if answer else variables
    return train(directory, **{**OPTIONS, "train_batch_size": 2}, num_processes=ranks, spoil=spoil, variables=words)


AGREED = [
    ("CONTINUE", 0, [6], ()),
    ("CHECKPOINT", 0, [3, 6], ()),
    ("STOP_SAVED", 5, [3], ()),
    ("STOP_SUSPECT", 5, [3], (SUSPECT,)),
    ("STOP_UNSAVED", 5, [3], (SUSPECT,)),
]


@pytest.mark.parametrize(("answer", "code", "steps", "flags"), some(AGREED, AGREED[1], AGREED[3], AGREED[4]))
def test_ranks_agree_on_a_reported_fault_and_end_at_the_same_step(tmp_path, train, answer, code, steps, flags):
    run = reported(train, tmp_path / "run", answer)
    ends = {call["rank"]: call["step"] for call in run.calls("on_rank_end")}
    assert (run.code, saved(run)) == (code, steps), run.output
    assert ends == dict.fromkeys(range(2), 6 if code == 0 else 3)
    assert CheckpointStore(run.directory / "checkpoints").all()[-1].manifest.flags == flags
    assert [call["rank"] for call in run.calls("on_gpu_fault")] == [1]


def test_after_a_fault_that_forbids_saving_a_rank_without_it_saves(tmp_path, train):
    run = reported(train, tmp_path / "run", "STOP_UNSAVED", spoil="report:0:3")
    assert "saved step 3 from rank 1" in run.events("state")[-1]["message"]


@pytest.mark.parametrize(("variables", "flags"), [({}, ()), ({"PROBE_MEMORY": "1"}, (SUSPECT,))])
def test_without_another_opinion_only_a_fault_of_memory_makes_the_checkpoint_suspect(tmp_path, train, variables, flags):
    run = reported(train, tmp_path / "run", "", ranks=1, spoil="report:0:3", **variables)
    assert (run.code, CheckpointStore(run.directory / "checkpoints").all()[-1].manifest.flags) == (5, flags)


def test_a_fault_is_one_line_of_json_on_the_console_and_an_event(tmp_path, train):
    run = reported(train, tmp_path / "run", "STOP_SAVED")
    [line] = [line for line in run.output.splitlines() if line.startswith("smalti: fault ")]
    [event] = run.events("health")
    told = json.loads(line.removeprefix("smalti: fault "))
    assert (told["fault"], told["action"], told["rank"], told["step"]) == ("ecc", "stop_saved", 1, 3)
    assert (event["fault"], event["uuid"], event["reading"]["ecc_errors_double"]) == ("ecc", "GPU-probe", 1)


def test_hook_on_fault_tells_the_rank_with_the_fault_what_follows(tmp_path, train):
    calls = reported(train, tmp_path / "run", "STOP_SAVED").calls("on_fault")
    assert [(call["rank"], call["kind"], call["action"]) for call in calls] == [(1, "ecc", "STOP_SAVED")]


def test_a_fault_before_the_loop_ends_the_run_with_nothing_to_save(tmp_path, train):
    run = reported(train, tmp_path / "run", "STOP_SAVED", ranks=1, spoil="report:0:0")
    assert (run.code, saved(run)) == (5, []), run.output
    assert "there is nothing to save yet" in run.events("state")[-1]["message"]


def test_a_run_that_ends_with_the_same_fault_three_times_without_progress_is_refused_until_the_reset(tmp_path, train):
    codes = [reported(train, tmp_path / "run", "STOP_UNSAVED", ranks=1, spoil="report:0:2").code for _ in range(3)]
    refused = train(tmp_path / "run", **OPTIONS)
    circuit = read_circuit(tmp_path / "run", 0)
    assert (codes, refused.code, circuit.state) == ([5, 5, 5], 10, "open"), refused.output
    assert [(fault.kind, fault.resumed, fault.step, fault.uuid) for fault in circuit.faults] == [("ecc", 0, 2, "GPU-probe")] * 3
    assert "smalti health reset" in refused.output
    reset_circuit(tmp_path / "run", 0)
    assert train(tmp_path / "run", **OPTIONS).code == 0


def test_a_run_that_gets_further_between_faults_is_started_again_and_its_circuit_closes(tmp_path, train):
    for step in (1, 2, 3):
        assert reported(train, tmp_path / "run", "STOP_SAVED", ranks=1, spoil=f"report:0:{step}").code == 5
    assert train(tmp_path / "run", **{**OPTIONS, "train_batch_size": 2}).code == 0
    assert (read_circuit(tmp_path / "run", 0).state, len(read_circuit(tmp_path / "run", 0).faults)) == ("closed", 3)


def test_a_resume_passes_over_a_suspect_checkpoint(tmp_path, train):
    options = {**OPTIONS, "train_batch_size": 2}
    train(tmp_path / "run", **{**options, "max_train_steps": 1})
    assert reported(train, tmp_path / "run", "STOP_SUSPECT", ranks=1, spoil="report:0:3").code == 5
    again = train(tmp_path / "run", **options)
    assert [call["step"] for call in again.calls("on_train_start")][-1] == 1
    assert "--resume_from_checkpoint=3" in again.output
