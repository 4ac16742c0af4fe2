"""A process that is started before it is known whether it will be needed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from smalti.launch.standby import StandbyLauncher
from smalti.system.process import PARENT_VARIABLE
from support.forked_popen import ForkedPopen, run_forked

MODULE = """
import json, os, sys
told = {"words": sys.argv[1:], "mark": os.environ.get("MARK"), "gone": os.environ.get("GONE"), "session": os.getsid(0)}
print(json.dumps({**told, "parent": os.environ["SMALTI_PARENT"]}), file=open(sys.argv[1], "w"))
raise SystemExit(3)
"""


def agent_of(process: psutil.Process) -> psutil.Process:
    """The one among its children, once its command line can be read; any other child may end meanwhile."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for each in process.children():
            with suppress(psutil.Error):
                if "smalti.launch.agent" in each.cmdline():
                    return each
        time.sleep(0.01)
    raise AssertionError(f"{process} has no agent")


@pytest.fixture
def standby(tmp_path, monkeypatch):
    (tmp_path / "a_launcher.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("GONE", "by then")
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    found = StandbyLauncher()
    yield found
    found.close()


def test_what_it_is_told_runs_in_the_environment_that_it_is_told(tmp_path, standby):
    words = ["a_launcher", str(tmp_path / "told.json"), "ä"]
    environment = {"PATH": os.environ["PATH"], "MARK": "\udcff", PARENT_VARIABLE: str(os.getpid())}
    process = standby.start(words, environment)
    assert process.wait(60) == 3
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["words"], told["mark"], told["gone"]) == (words[1:], "\udcff", None)
    assert (told["parent"], told["session"]) == (str(process.pid), process.pid)
    assert standby.start(words, environment) is None, "it was told already"
    standby.close()


def test_one_that_is_not_wanted_is_gone_and_one_that_has_ended_starts_nothing(standby):
    agent = agent_of(psutil.Process())
    standby.close()
    assert not agent.is_running()
    other = StandbyLauncher()
    agent = agent_of(psutil.Process())
    agent.send_signal(signal.SIGUSR1)  # as some schedulers send it to all processes of a job
    psutil.wait_procs([agent], timeout=60)
    assert other.start(["a_launcher"], dict(os.environ)) is None
    other.close()


def test_it_ends_with_a_process_that_is_killed_and_says_nothing():
    code = (
        "import time; from smalti.launch.standby import StandbyLauncher; "
        "held = StandbyLauncher(); print(flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    starter.stdout.readline()
    agent = agent_of(psutil.Process(starter.pid))
    starter.kill()
    psutil.wait_procs([agent], timeout=60)
    assert not agent.is_running()
    assert starter.communicate()[0] == ""


def test_a_launch_that_is_refused_leaves_no_process_and_no_file(tmp_path):
    words = ["--model_family=toy", f"--instance_data_dir={tmp_path}", f"--output_dir={tmp_path / 'run'}", "--num_processes=2"]
    words += ["--max_train_steps=1", "--use_cpu", "--resume_from_checkpoint=step-00000007"]
    marked = {**os.environ, "MARK": str(tmp_path)}
    command = [sys.executable, "-m", "smalti", "train", *words]
    refused = run_forked(command, env=marked)
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert refused.stderr.startswith("smalti: error: "), refused.stderr
    assert not (tmp_path / "run").exists()
    assert [
        each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get("MARK") == str(tmp_path)
    ] == []
