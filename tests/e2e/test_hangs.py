"""A rank that hangs is named by the others, with stacks where it gives them, and one that has the state saves it."""

import signal
import time

import psutil
import pytest

from smalti import ExitCode
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.rundir import read_events
from smalti_health.hangs.watch import EVERY_SECONDS
from support.processes import living
from support.whole import some

ENDLESS = {"max_train_steps": 100_000, "train_batch_size": 2, "use_ema": True, "checkpoints_total_limit": 2}


def newest(directory):
    return CheckpointStore(directory / "checkpoints").all()[-1]


@pytest.mark.parametrize(("ranks", "victim", "saver", "interval"), some([(2, 1, 0, 0), (3, 0, 1, 1)], (3, 0, 1, 1)))
def test_a_rank_that_hangs_is_named_and_ended_after_the_state_was_saved(tmp_path, start, ranks, victim, saver, interval):
    options = {**ENDLESS, "num_processes": ranks, "process_group_timeout": 10, "checkpoint_step_interval": interval}
    run = start(tmp_path / "run", **options)
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    hanging = run.workers()[victim]
    hanging.send_signal(signal.SIGSTOP)
    code, output = run.wait()
    last = output[output.index("ended with exit code") :]
    entry = newest(run.directory)
    assert code == 9, output
    assert f"rank {victim} (process {hanging.pid} on " in last
    assert "did not answer: it is stopped" in last
    assert f"step {entry.step} from rank {saver} before leaving: {entry.path}" in last or "was saved before" in last
    assert verify(entry.path).ok
    assert not living(family, within=10)


def test_a_hang_is_reported_with_stacks_and_the_rank_that_is_awaited_long_before_the_run_ends(tmp_path, start):
    options = {**ENDLESS, "num_processes": 2, "checkpoint_step_interval": 0}
    run = start(tmp_path / "run", **options, phase_deadlines=["training=6"], on_hang="stop")
    run.wait_for_step(1)
    time.sleep(3 * EVERY_SECONDS)  # until each rank has published its phase, whose deadline counts
    stopped = run.workers()[1]
    stopped.send_signal(signal.SIGSTOP)
    code, output = run.wait()
    [reported] = [line for line in output.splitlines() if "the run hangs" in line]
    [event] = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event.fields.get("hang")]
    report = (tmp_path / "run" / event.text("stacks")).read_text()
    for part in ("rank 0 waits in", "its process is stopped", "gloo:", "rank 1 does not tell its last call"):
        assert part in reported
    for part in (f"rank 1: process {stopped.pid}", "no stacks: the process does not answer", "trainer.py"):
        assert part in report
    assert report.count("most recent call first") > 1
    assert (code, newest(tmp_path / "run").manifest.flags) == (9, ()), output


@pytest.mark.parametrize(
    ("kind", "how", "saver"),
    [("collective", "rank 0 was killed by SIGABRT", 1), ("hang", "the main thread does not come back", 0)],
)
def test_a_plugin_whose_hook_does_not_come_back_is_named(tmp_path, launch, kind, how, saver):
    """On one of two ranks: a collective call of its own, which meets one of the loop's, and one that waits for ever."""
    options = {**ENDLESS, "num_processes": 2, "max_train_steps": 8, "process_group_timeout": 5}
    run = launch(tmp_path / "run", **options, phase_deadlines=["training=5", "first_step=5"], spoil=f"{kind}:0:3")
    last = run.output[run.output.index("ended with exit code 9: ") :]
    assert how in last
    blame = "  rank 0 did not return from hook 'on_step_end' of plugin 'probe' (smalti-probe 1.0)"
    assert f"{blame}\n  fix: update smalti-probe, or disable the plugin with --without probe\n" in last
    assert "dmesg" not in last
    assert f"step 3 from rank {saver}" in last


@pytest.mark.parametrize(
    "limits",
    [{"phase_deadlines": ["training=5"]}, {"phase_deadlines": ["paused=5"], "grace_seconds": 8}],
    ids=["hang", "grace"],
)
def test_a_stop_while_a_rank_hangs_saves_from_another_one(tmp_path, start, limits):
    """Reported already, or before its deadline but after half of the time until the process is killed."""
    options = {**ENDLESS, "num_processes": 2, "checkpoint_step_interval": 0, **limits}
    run = start(tmp_path / "run", **options, probe=True, variables={"PROBE_SPOIL": "hang:1:3"})
    run.wait_for_step(3)
    while "grace_seconds" not in limits and not any(e.fields.get("hang") for e in read_events(run.directory / "events.jsonl")):
        time.sleep(0.2)
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert (code, time.monotonic() - asked < 60) == (9, True), output
    assert "the run was asked to stop" in output
    last = output[output.index("ended with exit code 9: ") :]
    assert "rank 1 did not return from hook 'on_step_end' of plugin 'probe' (smalti-probe 1.0)" in last
    assert "step 3 from rank 0" in last
    assert newest(run.directory).step == 3


@pytest.mark.parametrize("kind", ["sleep", "hang"])
def test_a_stop_while_a_hook_of_a_single_process_hangs_ends_it(tmp_path, start, kind):
    """With a checkpoint, unless it hangs in a library that minds no signal."""
    options = {**ENDLESS, "checkpoint_step_interval": 0, "phase_deadlines": ["training=5"]}
    run = start(tmp_path / "run", **options, probe=True, variables={"PROBE_SPOIL": f"{kind}:0:3"})
    run.wait_for_step(2)
    events = tmp_path / "run" / "events.jsonl"
    while not (hangs := [event for event in read_events(events) if event.fields.get("hang")]):
        time.sleep(0.2)
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert "in hook 'on_step_end' of plugin 'probe' (smalti-probe 1.0)" in hangs[0].text("message")
    assert time.monotonic() - asked < 60
    assert "the run was asked to stop" in output
    if kind == "hang":
        assert code == ExitCode.KILLED, output
        assert "ending now: what was saved before is complete" in output
    else:
        assert (code, newest(run.directory).step) == (ExitCode.FAILED, 3), output
        assert "raised by plugin 'probe' (smalti-probe 1.0) in hook 'on_step_end'" in output


def test_without_the_watch_a_hang_ends_the_run_after_the_time_limit_of_the_process_group(tmp_path, launch):
    options = {**ENDLESS, "num_processes": 2, "max_train_steps": 8, "process_group_timeout": 5, "without": ["plots", "hangs"]}
    run = launch(tmp_path / "run", **options, spoil="hang:0:3")
    last = run.output[run.output.index("ended with exit code 9: ") :]
    assert "the main thread does not come back" in last
    assert "rank 0 did not return from hook 'on_step_end' of plugin 'probe'" in last
    assert "the run hangs" not in run.output
    assert not (tmp_path / "run" / "hangs").exists()
