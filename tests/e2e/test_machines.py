"""Several machines, played by several launchers on this one that share the run directory."""

import signal
import socket

import pytest


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_two_machines_train_one_run_and_a_signal_to_one_stops_both(start, tmp_path, port):
    options = {
        "num_processes": 2,
        "num_machines": 2,
        "main_process_ip": "127.0.0.1",
        "main_process_port": port,
        "use_cpu": True,
        "max_train_steps": 100_000,
    }
    machines = [start(tmp_path / "run", machine_rank=machine, **options) for machine in (1, 0)]
    machines[1].wait_for_step(5)
    machines[0].process.send_signal(signal.SIGTERM)
    ends = [machine.wait() for machine in machines]
    assert [code for code, _ in ends] == [6, 6], ends
    assert all("preempted at step" in output for _, output in ends)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
