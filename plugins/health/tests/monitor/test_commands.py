"""`smalti health` and its commands."""

import json
import time

import pytest
from click.testing import CliRunner

from smalti import UserError
from smalti_health import CircuitFault, circuit_state, read_circuits
from smalti_health.circuits import close_circuit, open_circuit
from smalti_health.cli.commands import health
from smalti_health.policy.readings import Device, Reading
from smalti_health.policy.trace import Encoder


@pytest.fixture
def call():
    def run(*arguments: object):
        return CliRunner().invoke(health, [str(each) for each in arguments])

    return run


@pytest.fixture
def run_dir(tmp_path):
    """A run with a trace of two GPUs over twelve minutes, of which one is hot."""
    devices = [Device(uuid="GPU-a", index=0, slowdown=92), Device(uuid="GPU-b", index=1, slowdown=92)]
    encoder = Encoder(devices)
    readings = [
        Reading(uuid=device.uuid, time=1.7e9 + 10 * number, temperature=60 if device.index else 90)
        for number in range(72)
        for device in devices
    ]
    lines = [*encoder.head(), *map(encoder.line, readings)]
    (tmp_path / "health.node-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path


def test_all_gpus_are_read_once(loaded, call):
    loaded.set("count 2", "temp.1 71", "remap_pending.1 1")
    done = call()
    assert done.exit_code == 0
    assert [line.split()[:1] + line.split()[-1:] for line in done.output.splitlines()[1:2]] == [["0", "ok"]]
    assert "warn    a row of memory will be remapped" in done.output


def test_a_gpu_that_would_stop_a_run_is_exit_code_1(loaded, call):
    loaded.set("count 2", "recovery.1 2")
    done = call("--json")
    assert done.exit_code == 1
    first, second = json.loads(done.output)
    assert (first["decisions"], second["index"]) == ([], 1)
    assert [(each["kind"], each["action"]) for each in second["decisions"]] == [("recovery_action", "stop_now")]


def test_without_a_driver_it_says_what_is_missing(loaded, call):
    loaded.set("error.Init 9")
    done = call()
    assert "no GPU can be read: NVML: Driver Not Loaded" in str(done.exception)


def test_a_replay_has_no_decision_with_the_thresholds_of_the_run(call, run_dir):
    done = call("replay", run_dir)
    assert (done.exit_code, done.output) == (0, "144 readings, 0 decisions\n")


def test_a_replay_with_other_thresholds_decides_otherwise(call, run_dir):
    done = call("replay", run_dir, "--gpu_health_temperature_margin=5", "--json")
    found = json.loads(done.output)
    assert found["readings"] == 144
    assert [(each["gpu"], each["kind"], each["decision"]) for each in found["decisions"]] == [
        (0, "thermal", "warn"),
        (0, "thermal", "stop_saved"),
    ]
    table = call("replay", run_dir / "health.node-0.jsonl", "--gpu_health_temperature_margin=5").output
    assert "stop_saved" in table
    assert table.endswith("144 readings, 2 decisions\n")


def test_a_file_that_is_no_trace_is_refused(call, tmp_path):
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert "is not a trace" in str(call("replay", tmp_path / "other.jsonl").exception)
    assert "has no trace" in str(call("replay", tmp_path).exception)


def test_the_state_of_the_circuit_is_read_from_python_and_by_the_command_alike(call, tmp_path):
    assert (circuit_state(tmp_path).state, circuit_state(tmp_path).faults) == ("closed", ())
    for node, second in ((1, 20.0), (0, 10.0)):
        open_circuit(tmp_path, node, CircuitFault(kind="ecc", time=second, step=7, host=f"gpu-{node}", rank=8 * node))
    found = circuit_state(str(tmp_path))
    assert (found.state, [fault.host for fault in found.faults]) == ("open", ["gpu-0", "gpu-1"])
    shown = json.loads(call("show", tmp_path, "--json").output)
    assert [(each["node"], each["state"]) for each in shown] == [(node, each.state) for node, each in found.nodes.items()]
    close_circuit(tmp_path, 1)
    assert circuit_state(tmp_path).state == "open"
    close_circuit(tmp_path, 0)
    assert (circuit_state(tmp_path).state, len(circuit_state(tmp_path).faults)) == ("closed", 2)


def test_the_circuit_of_a_run_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(UserError, match="there is no run directory"):
        circuit_state(tmp_path / "no-run")


def test_circuits_are_shown_and_reset(call, tmp_path):
    assert call("show", tmp_path).output == "no fault of a GPU has ended this run\n"
    for node in (0, 2):
        fault = CircuitFault(kind="ecc", time=time.time(), step=7, host="gpu-17", rank=node, message="1 error")
        open_circuit(tmp_path, node, fault)
    done = call("show", tmp_path, "--json")
    assert [(each["node"], each["state"], each["faults"][0]["kind"]) for each in json.loads(done.output)] == [
        (0, "open", "ecc"),
        (2, "open", "ecc"),
    ]
    assert "gpu-17" in call("show", tmp_path).output
    assert call("reset", tmp_path).output == "reset on 2 nodes\n"
    assert {circuit.state for circuit in read_circuits(tmp_path).values()} == {"closed"}
