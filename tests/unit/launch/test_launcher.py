"""Running workers: real processes stand for the launcher, so that signals, ends and verdicts are the real ones."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from smalti.errors import ExitCode, PreflightError
from smalti.launch.launcher import LaunchResult, run_workers, summarize_exits
from smalti.launch.plan import LaunchPlan
from smalti.rundir.directory import RunDirectory
from smalti.rundir.writer import prepare
from smalti.system import kill_tree
from smalti.system.exit_reports import ExitReport, UnreturnedHook, preallocate, read_exit_reports
from smalti.system.process import Process
from smalti.types import DistributedPlan
from support.processes import lives, send_signal

DDP = DistributedPlan(name="ddp", title="DDP", parallel="smalti.training.ddp_parallel:DdpParallel", fallback=True)
LEAVE_WORD = """
import json, os, pathlib, time
def leave(rank, code, message):
    word = {"rank": rank, "exit_code": code, "message": message, "time": time.time()}
    (pathlib.Path(os.environ["SMALTI_OUTCOME_DIR"]) / f"rank-{rank}.json").write_text(json.dumps(word))
"""


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    prepare(found)
    return found


def plan(code: str, ranks: int = 1, **more) -> LaunchPlan:
    command = (sys.executable, "-c", LEAVE_WORD + textwrap.dedent(code))
    return LaunchPlan(launcher="elastic", distributed=DDP, command=command, ranks=range(ranks), **more)


def run(wanted: LaunchPlan, directory: RunDirectory) -> LaunchResult:
    ended = run_workers(wanted, directory, [])
    return ended.code, ended.message


def end(rank: int, code: int, at: float, message: str = "so") -> ExitReport:
    return ExitReport(rank=rank, exit_code=code, message=message, time=at)


# --- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED])
def test_what_all_ranks_agreed_on_is_the_verdict(code):
    assert summarize_exits([end(0, code, 1, "stopped"), end(1, code, 2)], 0, range(2)) == (code, "stopped")


@pytest.mark.parametrize(
    "code", [code for code in ExitCode if code not in (0, ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.INTERRUPTED)]
)
def test_the_earliest_failure_is_the_cause(code):
    ends = [end(2, ExitCode.DONE, 0), end(1, code, 1, "broken"), end(0, ExitCode.FAILED, 2, "lost a neighbour")]
    assert summarize_exits(ends, 1, range(3)) == (code, "rank 1: broken")


def test_a_rank_that_aborts_while_it_is_being_ended_is_not_the_cause():
    code, message = summarize_exits([end(1, ExitCode.FAILED, 1, "broken")], 1, range(2), {0: "SIGABRT"})
    assert (code, message.partition(";")[0]) == (ExitCode.FAILED, "rank 1: broken")


def test_a_rank_that_was_killed_is_named_beside_what_the_others_say():
    code, message = summarize_exits([end(0, ExitCode.FAILED, 1, "connection closed by peer")], 1, range(3))
    assert code == ExitCode.FAILED
    assert (
        message == "rank 0: connection closed by peer; ranks 1, 2 ended without reporting why, as when killed (out of memory?)"
    )


def test_a_rank_that_a_signal_killed_is_the_cause_of_what_the_others_say():
    told = replace(end(0, ExitCode.KILLED, 1, "rank 1 is gone"), secondary=True)
    code, message = summarize_exits([told], 1, range(2), {1: "SIGKILL"})
    assert code == ExitCode.KILLED
    assert message == "rank 1 was killed by SIGKILL (the system does that when memory runs out); rank 0: rank 1 is gone"


def test_the_rank_that_saved_tells_what_happened_and_where_it_saved():
    first = replace(end(1, ExitCode.KILLED, 1, "rank 2 is gone"), secondary=True)
    saver = replace(end(0, ExitCode.KILLED, 2, "rank 2 hung"), secondary=True, saved="saved step 3", killed_ranks=(2,))
    late = replace(end(3, ExitCode.KILLED, 3, "rank 2 is gone"), secondary=True)
    assert summarize_exits([first, saver, late], 1, range(4), {2: "SIGKILL"}) == (
        ExitCode.KILLED,
        "rank 0: rank 2 hung\n  saved step 3",
    )


def test_what_another_rank_saved_stands_beside_the_failure_and_its_code():
    saver = replace(end(0, ExitCode.FAILED, 2, "rank 1 failed"), secondary=True, saved="saved step 3")
    code, message = summarize_exits([end(1, ExitCode.GPU_FAULT, 1, "a fault"), saver], 1, range(2))
    assert (code, message) == (ExitCode.GPU_FAULT, "rank 1: a fault\n  saved step 3")


def test_a_rank_that_the_launcher_killed_after_a_failure_with_a_code_of_its_own_is_not_the_cause():
    ends = [end(1, ExitCode.GPU_FAULT, 1, "a fault")]
    assert summarize_exits(ends, 1, range(2), {0: "SIGTERM"})[1] == "rank 1: a fault"


def test_a_rank_that_was_ended_because_another_one_was_killed_is_not_named():
    assert (
        summarize_exits([], 1, range(2), {0: "SIGKILL", 1: "SIGTERM"})[1]
        == "rank 0 was killed by SIGKILL (the system does that when memory runs out)"
    )


def test_the_hooks_that_ranks_did_not_come_back_from_are_named_where_no_rank_failed_by_itself():
    hooks = {
        0: UnreturnedHook(hook="hook 'on_step_end' of plugin 'x' (x 1.0)", fix="update x"),
        1: UnreturnedHook(hook="hook 'y'"),
    }
    lost = replace(end(1, ExitCode.KILLED, 1, "rank 0 is gone\n  fix: see dmesg"), secondary=True, saved="saved step 3")
    assert summarize_exits([lost], 1, range(2), {0: "SIGABRT"}, {0: hooks[0]})[1].splitlines() == [
        "rank 0 was killed by SIGABRT; rank 1: rank 0 is gone",
        "  rank 0 did not return from hook 'on_step_end' of plugin 'x' (x 1.0)",
        "  fix: update x",
        "  saved step 3",
    ]
    assert summarize_exits([], 1, range(2), {0: "SIGABRT", 1: "SIGTERM"}, hooks)[1].count("did not return") == 1
    assert (
        "did not return" not in summarize_exits([end(1, ExitCode.FAILED, 1, "broken")], 1, range(2), {0: "SIGABRT"}, hooks)[1]
    )


def test_only_silence_is_a_failure():
    assert summarize_exits([], 137, range(4, 5)) == (
        ExitCode.KILLED,
        "rank 4 ended without reporting why, as when killed (out of memory?) (launcher status 137)",
    )


def test_a_launcher_that_fails_after_good_ends_is_a_failure():
    assert summarize_exits([end(0, 0, 1)], 1, range(1))[0] == ExitCode.FAILED


def test_a_launcher_that_was_told_to_stop_as_its_ranks_were_is_no_failure():
    assert summarize_exits([end(0, ExitCode.PREEMPTED, 1, "preempted at step 3")], 128 + signal.SIGTERM, range(1)) == (
        ExitCode.PREEMPTED,
        "preempted at step 3",
    )


def test_a_rank_that_has_no_word_for_the_stop_of_its_launcher_is_a_failure():
    code, message = summarize_exits([end(0, ExitCode.PREEMPTED, 1)], 128 + signal.SIGTERM, range(2))
    assert code == ExitCode.KILLED
    assert message.startswith("the process that starts the ranks was stopped by SIGTERM; rank 1 ended without reporting why")


# --- processes ------------------------------------------------------------------------------------------------------


def test_the_words_of_the_ranks_become_the_verdict(directory):
    code = "leave(0, 0, 'trained 5 steps'); leave(1, 0, 'trained 5 steps')"
    assert run(plan(code, ranks=2), directory) == (ExitCode.DONE, "trained 5 steps")


def test_a_failing_rank_gives_its_own_exit_code(directory):
    code = "leave(0, 2, 'this node has other plugins'); raise SystemExit(1)"
    assert run(plan(code), directory) == (ExitCode.USAGE, "rank 0: this node has other plugins")


def test_a_worker_that_is_killed_is_told_of(directory):
    code, message = run(plan("os.kill(os.getpid(), 9)"), directory)
    assert code == ExitCode.KILLED
    assert message.startswith("the process that starts the ranks was killed by SIGKILL; rank 0 ended without reporting why")


def test_room_for_the_words_is_there_from_the_start(directory):
    code = """
    kept = sorted(pathlib.Path(os.environ['SMALTI_OUTCOME_DIR']).iterdir())
    sizes = [len(path.read_bytes()) for path in kept if path.name != 'owner.json']
    leave(0, 0, ' '.join(map(str, sizes)))"""
    assert run(plan(code), directory) == (ExitCode.DONE, "256 16384 16384")


def test_the_first_word_counts(directory):
    code = "from smalti.system import write_exit_report as write; write(0, 'first, and longer'); write(1, 'second')"
    assert run(plan(code), directory) == (ExitCode.DONE, "first, and longer")


def test_a_word_that_cannot_be_left_is_no_reason_to_fail(directory):
    code = (
        "os.environ['SMALTI_OUTCOME_DIR'] += '/gone'\nfrom smalti.system import write_exit_report\nwrite_exit_report(0, 'done')"
    )
    assert run(plan(code), directory)[1].endswith("(launcher status 0)")


def test_no_room_for_temporary_files_is_told_before_anything_starts(directory, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(PreflightError, match="cannot create temporary files in"):
        run(plan("leave(0, 0, 'ran')"), directory)


def test_a_word_that_was_cut_off_counts_as_none(directory):
    code = "(pathlib.Path(os.environ['SMALTI_OUTCOME_DIR']) / 'rank-0.json').write_text('{\"rank\"'); raise SystemExit(1)"
    assert "rank 0 ended without reporting why" in run(plan(code), directory)[1]


def test_environment_and_secrets_reach_the_workers(directory):
    code = "leave(0, 0, os.environ['OMP_NUM_THREADS'] + os.environ['SMALTI_KEY'])"
    found = plan(code, environment={"OMP_NUM_THREADS": "7"}, secrets={"SMALTI_KEY": "-hunter" + "2"})
    assert run(found, directory) == (ExitCode.DONE, "7-hunter2")
    assert "-hunter2" not in json.dumps(found.as_json()) + repr(found)


AGENT = """
import signal, sys, time
from smalti.launch import agent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

rank = '''
import os, pathlib, signal, sys, time
from smalti.system.liveness import note_progress
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready = pathlib.Path(os.environ["SMALTI_OUTCOME_DIR"])
if os.environ["RANK"] == "5":
    while len(list(ready.glob("ready-*"))) < 2:
        time.sleep(0.05)
    sys.exit(1)
(ready / ("ready-" + os.environ["RANK"])).touch()
begun = time.monotonic()
while os.environ["RANK"] == "4" or time.monotonic() - begun < 8:
    time.sleep(0.2)
    if os.environ["RANK"] == "3":
        note_progress()
'''
if __name__ == "__main__":
    agent.LOST_SECONDS = 4.0
    agent.extend_kill_timeout()
    envs = {local: {"RANK": str(3 + local)} for local in range(3)}
    ranks = start_processes("rank", sys.executable, {local: ("-c", rank) for local in envs}, envs, DefaultLogsSpecs())
    while ranks.wait(0) is None:
        time.sleep(0.01)
    handlers = ranks.subprocess_handlers
    ranks.close()
    print([handlers[local].proc.returncode for local in range(3)])
"""


def test_a_rank_that_gets_on_with_its_save_has_all_the_time_and_one_that_does_not_is_killed(tmp_path):
    """One of three has failed; the first saves for longer than the second may do nothing."""
    preallocate(tmp_path, range(3, 6))
    environment = {**os.environ, "SMALTI_OUTCOME_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", AGENT], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == f"[0, -{signal.SIGKILL:d}, 1]", done.stderr
    [word] = read_exit_reports(tmp_path)
    assert (word.rank, word.secondary) == (4, True)
    assert word.message == "made no progress for 4 s after another rank failed, and was killed"


# --- signals --------------------------------------------------------------------------------------------------------

HOST = """
import json, pathlib, sys
import smalti.system.signals
from smalti.launch.plan import LaunchPlan
from smalti.rundir.directory import RunDirectory
from smalti.types import DistributedPlan
from smalti.launch.launcher import received_signals, run_workers

ddp = DistributedPlan(name="ddp", title="DDP", parallel="x:y", fallback=True)
plan = LaunchPlan(launcher="elastic", distributed=ddp, command=(sys.executable, sys.argv[1]))
smalti.system.signals.REPEAT_SECONDS = float(sys.argv[3])
with received_signals() as received:
    ended = run_workers(plan, RunDirectory(sys.argv[2]), received)
print(json.dumps((ended.code, ended.message)))
"""
LIVING = """
import signal, subprocess, sys, time
from smalti.rundir.writer import acquire
from smalti.rundir.directory import RunDirectory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[0] + ".child").write_text(str(child.pid))
asked = ["something"] if OBEYS != "later" else []
run = acquire(RunDirectory(pathlib.Path(sys.argv[0]).parent / "run"))
run.begin_training()
pathlib.Path(sys.argv[0] + ".ready").touch()
while True:
    time.sleep(0.02)
    for request in run.take_requests() if OBEYS else ():
        if not asked:
            asked.append(request)
            run.acknowledge(request, accepted=False, message="too young")
            continue
        run.acknowledge(request, message="stopping")
        leave(0, 130 if request.details["reason"] == "interrupted" else 6, "stopped at step 3")
        child.kill()
        run.close()
        raise SystemExit(0)
"""
YOUNG = """
pathlib.Path(__file__ + ".ready").touch()
time.sleep(600)
"""


class Host:
    """A process that runs workers, to be signalled like `smalti train`."""

    def __init__(self, folder: Path, worker: str, repeat: float) -> None:
        prepare(RunDirectory(folder / "run"))
        self.worker = folder / "worker.py"
        self.worker.write_text(LEAVE_WORD + worker)
        command = [sys.executable, "-c", HOST, str(self.worker), str(folder / "run"), str(repeat)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        while not Path(f"{self.worker}.ready").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def child_lives(self) -> bool:
        return lives(int(Path(f"{self.worker}.child").read_text()))

    def verdict(self) -> tuple[int, str]:
        out, self.error = self.process.communicate(timeout=60)
        assert out, self.error
        code, message = json.loads(out)
        return code, message


@pytest.fixture
def host(tmp_path):
    hosts = []

    def start(worker: str, repeat: float = 60) -> Host:
        hosts.append(Host(tmp_path, worker, repeat))
        hosts[-1].wait_until_ready()
        return hosts[-1]

    yield start
    for each in hosts:
        if each.process.poll() is None:
            kill_tree(each.process.pid)
            each.process.communicate()


STOPS = [(signal.SIGINT, 130), (signal.SIGTERM, 6), (signal.SIGUSR1, 6), (signal.SIGUSR2, 6)]


@pytest.mark.parametrize(("number", "code"), STOPS)
def test_the_first_signal_asks_the_run_to_stop(host, number, code):
    running = host(LIVING.replace("OBEYS", "True"))
    running.process.send_signal(number)
    assert running.verdict() == (code, "stopped at step 3")
    assert "smalti: finishing this step, then saving; press Ctrl-C again to end now" in running.error


def test_a_run_that_was_too_young_to_obey_is_asked_again(host):
    running = host(LIVING.replace("OBEYS", "'later'"))
    running.process.send_signal(signal.SIGINT)
    assert running.verdict() == (130, "stopped at step 3")


ORPHANED = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[0] + ".child").write_text(str(child.pid))
pathlib.Path(sys.argv[0] + ".ready").touch()
time.sleep(600)
"""


def test_a_signal_ends_what_a_killed_launcher_has_left_behind(host):
    running = host(ORPHANED)
    [starter] = psutil.Process(running.process.pid).children()
    starter.kill()
    time.sleep(0.3)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.verdict() == (6, "stopped before the first step; nothing was changed")
    assert "waiting for the ranks to save and exit" in running.error
    assert not running.child_lives()


@pytest.mark.parametrize(("second", "repeat", "code"), [(signal.SIGINT, 60, 130), (signal.SIGTERM, 0, 9)])
def test_the_second_signal_ends_every_process_at_once_with_the_code_of_what_is_not_saved(host, second, repeat, code):
    running = host(LIVING.replace("OBEYS", "False"), repeat)
    assert running.child_lives()
    running.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert running.process.poll() is None
    running.process.send_signal(second)
    told = f"ended at once by {second.name}; what was saved before is complete, later steps are lost"
    assert running.verdict() == (code, told)
    assert not running.child_lives()


def test_a_signal_that_is_sent_again_at_once_is_the_same_one(host):
    running = host(LIVING.replace("OBEYS", "False"))
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        running.process.send_signal(number)
        time.sleep(0.2)
    assert running.process.poll() is None
    assert running.child_lives()


@pytest.mark.parametrize(("number", "code"), STOPS[:3])
def test_before_the_run_has_begun_one_signal_is_enough(host, number, code):
    running = host(YOUNG)
    running.process.send_signal(number)
    assert running.verdict() == (code, "stopped before the first step; nothing was changed")


def test_the_folder_of_a_killed_launch_goes_with_a_later_one_and_nothing_else_does(host, directory, tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", f"{place}")
    monkeypatch.setattr("tempfile.tempdir", f"{place}")
    running = host(ORPHANED)
    [folder] = place.iterdir()
    family = psutil.Process(running.process.pid).children(recursive=True)
    running.process.kill()
    running.process.wait()
    marker = (folder / "owner.json").read_text()
    done = plan("leave(0, 0, 'done')")
    run(done, directory)
    used = folder.exists()
    send_signal(signal.SIGKILL, family)
    psutil.wait_procs(family, timeout=60)
    running.process.communicate()

    (place / "smalti-unmarked").mkdir()
    (place / "smalti-file").write_text(marker)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/owner.json").write_text(marker)
    (place / "smalti-link").symlink_to(tmp_path / "elsewhere")
    (place / "smalti-living").mkdir()
    (place / "smalti-living/owner.json").write_text(json.dumps(asdict(Process.current())))
    run(done, directory)
    assert used
    assert sorted(path.name for path in place.iterdir()) == ["smalti-file", "smalti-link", "smalti-living", "smalti-unmarked"]
    assert (tmp_path / "elsewhere/owner.json").exists()


def test_end_tree_ends_processes_that_lead_sessions_of_their_own(tmp_path):
    code = "import subprocess, sys, time\np = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
    code += "start_new_session=True)\nprint(p.pid, flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        kill_tree(process.pid)
        child.wait(10)
    assert (process.returncode, child.is_running()) == (-signal.SIGKILL, False)


def test_end_tree_of_a_process_that_is_gone_does_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    kill_tree(process.pid)
    assert not psutil.pid_exists(process.pid) or os.getpid() != process.pid
