"""Several machines, played by several launchers on this one that share the run directory; and one without a name."""

import signal
import socket
import subprocess
import sys

import psutil
import pytest

from support.processes import send_signal
from support.whole import only_whole


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def options(port) -> dict:
    return {
        "num_processes": 2,
        "num_machines": 2,
        "main_process_ip": "127.0.0.1",
        "main_process_port": port,
        "use_cpu": True,
        "max_train_steps": 100_000,
    }


def test_two_machines_train_one_run_and_a_signal_to_one_stops_both(start, tmp_path, options):
    machines = [start(tmp_path / "run", machine_rank=machine, **options) for machine in (1, 0)]
    machines[1].wait_for_step(5)
    machines[0].process.send_signal(signal.SIGTERM)
    ends = [machine.wait() for machine in machines]
    assert [code for code, _ in ends] == [6, 6], ends
    assert all("preempted at step" in output for _, output in ends)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


@only_whole(
    "plugins/cluster/tests/nodes/test_runs.py::test_sigterm_to_all_processes_of_a_node_stops_all_nodes_with_the_code_of_a_preemption"
)
def test_a_signal_to_all_processes_of_one_machine_stops_both(start, tmp_path, options):
    """As a scheduler sends it: torch's agent of that machine gets it too, and leaves without the other agent."""
    machines = [start(tmp_path / "run", machine_rank=machine, **options) for machine in (1, 0)]
    machines[1].wait_for_step(2)
    process = psutil.Process(machines[0].process.pid)
    send_signal(signal.SIGTERM, (process, *process.children(recursive=True)))
    ends = [machine.wait() for machine in machines]
    assert [code for code, _ in ends] == [6, 6], ends
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))


def test_machines_with_other_options_both_say_which(start, tmp_path, options):
    machines = [start(tmp_path / "run", machine_rank=machine, seed=machine, **options) for machine in (1, 0)]
    ends = [machine.wait() for machine in machines]
    assert [code for code, _ in ends] == [2, 2], ends
    assert all("seed is 1 on node 1" in output and "0 on node 0" in output for _, output in ends), ends


BARE = """
import fcntl, os, socket, struct, sys
socket.sethostname("bare-container")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
    fcntl.ioctl(line, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Gives this machine a name that nobody knows, and no network but the loopback, then becomes the command in its arguments."""


@pytest.fixture(scope="module")
def bare() -> list[str]:
    """What to put before a command to run it as in a container whose own host name has no address."""
    for rights in ([], ["--map-root-user"]):
        prefix = ["unshare", *rights, "--uts", "--net", sys.executable, "-c", BARE]
        if subprocess.run([*prefix, sys.executable, "-c", ""], stderr=subprocess.DEVNULL).returncode == 0:
            return prefix
    pytest.skip("needs the right to make namespaces")


def test_two_ranks_start_on_a_machine_whose_name_does_not_resolve(bare, tmp_path, launch):
    run = launch(tmp_path / "run", before=bare, probe=False, num_processes=2, use_cpu=True, max_train_steps=2)
    assert (run.code, len(run.losses)) == (0, 2), run.output
    assert "Unable to resolve hostname" not in run.output
