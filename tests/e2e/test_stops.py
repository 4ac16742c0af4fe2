"""A run is watched, asked and stopped from outside: by signals and through its run directory."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from smalti.checkpoint.format.store import CheckpointStore
from smalti.rundir.directory import RunDirectory
from smalti_plots.goodput import read_goodput
from support.forked_popen import run_forked
from support.processes import commands, living, send_signal
from support.whole import some

ENDLESS = {"max_train_steps": 100_000, "train_batch_size": 4, "validation_prompt": "circle number 1"}


def smalti(*words: object) -> subprocess.CompletedProcess:
    return run_forked([sys.executable, "-m", "smalti", *map(str, words)])


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_the_first_interrupt_finishes_the_step_and_saves_and_no_second_run_comes_between(tmp_path, start, train, ranks):
    run = start(tmp_path / "run", **ENDLESS, num_processes=ranks)
    run.wait_for_step(3)
    second = train(tmp_path / "run", **ENDLESS)
    assert (second.code, "in use" in second.output) == (75, True), second.output
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 130, output
    verified = smalti("checkpoint", "verify", tmp_path / "run", "--json")
    assert verified.returncode == 0, verified.stdout


def test_a_process_that_is_pre_empted_before_its_run_stands_says_so_by_its_code(tmp_path, train):
    ended = train(tmp_path / "run", max_train_steps=2, train_batch_size=4, spoil="terminate:0:0")
    assert ended.code == 6, ended.output


@pytest.mark.parametrize(("ranks", "number"), some([(1, signal.SIGUSR2), (2, signal.SIGTERM)], (1, signal.SIGUSR2)))
def test_a_launch_that_is_pre_empted_while_it_looks_at_the_data_says_so_by_its_code(tmp_path, start, pictures, ranks, number):
    data = shutil.copytree(pictures, tmp_path / "data")
    caption = next(data.glob("*.txt"))
    caption.unlink()
    os.mkfifo(caption)
    run = start(tmp_path / "run", **ENDLESS, num_processes=ranks, instance_data_dir=data)
    with caption.open("w"):  # waits for the thread that reads it; that one then waits for the end of the file
        run.process.send_signal(number)
    code, output = run.wait()
    assert (code, "run the same command to start again" in output) == (6, True), output


def test_what_a_library_would_do_at_the_very_end_of_a_process_cannot_make_a_run_a_failed_one(tmp_path, launch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)")
    path = {"PYTHONPATH": str(tmp_path / "site")}
    ended = launch(
        tmp_path / "run", max_train_steps=2, train_batch_size=4, num_processes=2, probe=False, variables=path, executed=True
    )
    assert (ended.code, "smalti: done: trained 2 steps" in ended.output) == (0, True), ended.output
    assert "--max_train_steps=4" in ended.output
    assert f"  time         {read_goodput(RunDirectory(tmp_path / 'run'))}" in ended.output


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_a_run_whose_terminal_is_closed_saves_and_leaves(tmp_path, start, ranks):
    ours, theirs = os.openpty()
    run = start(tmp_path / "run", **ENDLESS, num_processes=ranks, terminal=theirs)
    os.close(theirs)
    run.wait_for_step(3)
    os.close(ours)
    code, _ = run.wait()
    saved = CheckpointStore(tmp_path / "run/checkpoints").latest()
    assert (code, saved is not None) == (6, True)


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_a_run_whose_words_nobody_reads_any_more_trains_to_its_end(tmp_path, start, ranks):
    run = start(tmp_path / "run", max_train_steps=20, train_batch_size=4, num_processes=ranks, checkpoint_step_interval=2)
    run.process.stdout.readline()
    run.process.stdout.close()
    assert run.process.wait(120) == 0
    assert CheckpointStore(tmp_path / "run/checkpoints").latest().name == "step-00000020"


def test_the_second_interrupt_ends_every_process_at_once(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    send_signal(signal.SIGSTOP, family)  # so that the first signal cannot be obeyed
    run.process.send_signal(signal.SIGINT)
    assert any("press Ctrl-C again" in line for line in run.process.stdout)
    run.process.send_signal(signal.SIGINT)
    code, _ = run.wait()
    assert code == 130
    assert not living(family, within=10)


def test_many_signals_within_moments_are_one_stop_that_saves(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS)
    run.wait_for_step(3)
    for number in range(150):
        run.process.send_signal((signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)[number % 3])
        time.sleep(0.002)
    code, output = run.wait()
    latest = CheckpointStore(tmp_path / "run/checkpoints").latest()
    assert (code, latest is not None) == (6, True), output
    assert "ended with exit code 6: preempted at step" in output


@pytest.mark.parametrize("ranks", some([1, 2], 2))
def test_a_run_that_is_killed_while_it_draws_for_long_resumes_from_that_step(tmp_path, start, train, ranks):
    """It saves that step first, though it is not yet time."""
    prompts = [f"circle number {number}" for number in range(40)]
    slow = {"validation_prompt": prompts, "validation_step_interval": 3, "validation_num_inference_steps": 1000}
    run = start(tmp_path / "run", **ENDLESS | slow, checkpoint_step_interval=1000, num_processes=ranks)
    saved, deadline = CheckpointStore(tmp_path / "run/checkpoints"), time.monotonic() + 90
    while saved.latest() is None:
        assert run.process.poll() is None, run.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for each in [*psutil.Process(run.process.pid).children(recursive=True), run.process]:
        each.kill()
    _, output = run.wait()
    assert (saved.latest().name, "step      4/" in output) == ("step-00000003", False), output
    assert not list((tmp_path / "run/samples").glob("*/*.png"))
    resumed = train(tmp_path / "run", **ENDLESS | {"max_train_steps": 5, "num_processes": ranks})
    assert (resumed.code, "step-00000003 at step 3" in resumed.output) == (0, True), resumed.output


def test_another_shell_can_watch_save_draw_and_stop(tmp_path, start):
    directory = tmp_path / "run"
    run = start(directory, **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    saved, drawn = smalti("run", "save", directory), smalti("run", "sample", directory)
    listed = smalti("run", "ls", tmp_path, "--json")
    stopped = smalti("run", "stop", directory)
    code, output = run.wait()
    assert (saved.returncode, drawn.returncode, stopped.returncode, code) == (0, 0, 0, 7), output + saved.stderr
    assert len(list((directory / "checkpoints").glob("step-*"))) >= 2
    assert list((directory / "samples").glob("*/00-*.png"))
    assert "running" in json.dumps(json.loads(listed.stdout))
    *_, last = re.findall(r"^step +(\d+)/\d+  loss (\S+) .* (\S+) samples/s", output, flags=re.MULTILINE)
    row = smalti("run", "ls", tmp_path).stdout.splitlines()[1].split()
    assert (row[2].partition("/")[0], row[3], row[4]) == last
    assert re.search(r"smalti: ended with exit code 7: stopped on request at step \d+ of 100000\n", output), output
    assert "run the same command again" in output
    assert "train longer" not in output


def test_a_rank_that_is_killed_is_named_with_the_signal_and_nothing_is_left_running(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    os.kill(run.workers()[1].pid, signal.SIGKILL)
    code, output = run.wait()
    last = next(line for line in output.splitlines() if "ended with exit code" in line)
    assert code == 9, output
    assert "rank 1 was killed by SIGKILL" in last
    assert "saved step" in output.partition(last)[2]
    assert not living(family, within=10)


def test_a_run_whose_launcher_is_killed_saves_and_leaves(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.process.kill()
    psutil.wait_procs(family, timeout=60)
    assert not living(family, within=10)
    assert CheckpointStore(tmp_path / "run/checkpoints").latest() is not None


def test_ranks_are_waited_for_when_the_process_that_started_them_is_killed(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    family = psutil.Process(run.process.pid).children(recursive=True)
    next(each for each, words in commands(family) if "smalti.launch.agent" in words).kill()
    code, output = run.wait()
    assert code == 9, output
    assert "the process that starts the ranks was killed by SIGKILL; preempted at step" in output
    assert not living(family, within=10)
    assert CheckpointStore(tmp_path / "run/checkpoints").latest() is not None


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGUSR1], signal.SIGTERM))
def test_a_signal_to_every_process_of_a_run_is_one_agreed_stop(tmp_path, start, number):
    run = start(tmp_path / "run", **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    parent = psutil.Process(run.process.pid)
    send_signal(number, (parent, *parent.children(recursive=True)))
    code, output = run.wait()
    latest = CheckpointStore(tmp_path / "run/checkpoints").latest()
    assert code == 6, output
    assert f"ended with exit code 6: preempted at step {int(latest.name.removeprefix('step-'))}" in output


def test_a_run_that_cannot_be_asked_because_its_directory_is_gone_obeys_a_signal(tmp_path, start):
    run = start(tmp_path / "run", **ENDLESS, num_processes=2)
    run.wait_for_step(3)
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert (code, "interrupted at step" in output) == (130, True), output
    assert CheckpointStore(tmp_path / "run/checkpoints").latest() is not None
