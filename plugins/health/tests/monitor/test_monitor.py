"""The process, its channel and its ranks. Each test has a run of its own name."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from smalti import FaultAction, GpuFault, RunState
from smalti_health.monitor.channel import Channel, address
from smalti_health.monitor.nvml import Nvml
from smalti_health.monitor.process import Setup
from smalti_health.monitor.rank import Watch
from smalti_health.monitor.requests import DeviceRequest, device_request
from smalti_health.policy.limits import Limits
from smalti_health.policy.trace import read_trace

SECONDS = 20.0
"""At most; what is waited for comes within a second on an idle machine."""


@pytest.fixture
def watch(tmp_path):
    """Starts a watch for rank 0, and for others on request; returns the state to which faults are reported."""
    watches: list[Watch] = []
    run = uuid.uuid4().hex

    def start(state: RunState, *, rank: int = 0, device: str = "cuda:0", timeout: float = 0.5, port: int = 0) -> Watch:
        setup = Setup(
            run=run,
            node=0,
            first=0,
            port="1",
            directory=str(tmp_path),
            interval=0.1,
            timeout=timeout,
            metrics_port=port,
            limits=Limits(),
        )
        request = device_request(rank, device)
        assert request is not None
        watches.append(Watch(setup, request, device, state.report_fault, starts=rank == 0))
        watches[-1].start()
        return watches[-1]

    yield start
    for each in watches:
        each.stop()


def wait_for(condition) -> None:
    until = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def faults_of(state: RunState, count: int = 1) -> list[GpuFault]:
    found: list[GpuFault] = []
    until = time.monotonic() + SECONDS
    while len(found) < count and time.monotonic() < until:
        found += state.take_faults()
        time.sleep(0.01)
    return found


def readings(folder: Path) -> int:
    path = folder / "health.node-0.jsonl"
    return len(read_trace((path,)).readings) if path.exists() else 0


def test_a_fault_is_reported_on_the_rank_that_uses_the_gpu(fake, watch, tmp_path):
    fake.set("count 2")
    first, second = RunState(max_steps=1), RunState(max_steps=1)
    watch(first)
    watch(second, rank=1, device="cuda:1")
    wait_for(lambda: len(read_trace(tmp_path.glob("health.node-0.jsonl")).devices) == 2)
    fake.set("count 2", "xid.1 79", "temp.1 71")
    [fault] = faults_of(second)
    assert (fault.kind, fault.rank, fault.device, fault.severity, fault.memory) == ("xid", 1, "cuda:1", "critical", False)
    assert (fault.reading["xid"], fault.reading["index"], fault.reading["temperature_celsius"]) == (79, 1, 71)
    assert not first.has_faults


def test_a_driver_that_hangs_is_a_warning_and_the_other_gpu_is_still_watched(fake, watch, tmp_path):
    fake.set("count 2")
    first, second = RunState(max_steps=1), RunState(max_steps=1)
    watch(first)
    watch(second, rank=1, device="cuda:1")
    wait_for(lambda: len(read_trace(tmp_path.glob("health.node-0.jsonl")).devices) == 2)
    fake.set("count 2", "hang.Temperature.0 1")
    [warning] = faults_of(first)
    assert (warning.kind, warning.severity, "Temperature" in warning.message) == ("monitor", "warning", True)
    fake.set("count 2", "hang.Temperature.0 1", "ecc_uncorrected_volatile.1 1")
    [fault] = faults_of(second)
    assert (fault.kind, fault.memory) == ("ecc", True)
    fake.set("count 2", "hang.Temperature.0 1", "ecc_uncorrected_volatile.1 1", "xid.0 48")
    assert [each.kind for each in faults_of(first)] == ["xid"]  # XIDs come through all the same


def test_a_driver_that_hangs_from_the_start_is_a_warning(fake, watch):
    fake.set("count 1", "hang.Init 1")
    state = RunState(max_steps=1)
    watch(state)
    [warning] = faults_of(state)
    assert (warning.kind, warning.severity) == ("monitor", "warning")
    assert "does not answer" in warning.message


def test_a_driver_that_hangs_while_a_gpu_is_found_is_one_warning(fake, watch):
    fake.set("count 1", "hang.UUID 1")
    state = RunState(max_steps=1)
    watching = watch(state)
    [warning] = faults_of(state)
    assert (warning.severity, "does not find the GPU" in warning.message) == ("warning", True)
    threads = len(list(Path(f"/proc/{watching._process.pid}/task").iterdir()))
    time.sleep(1.2)  # it is asked for twice in this time
    assert len(list(Path(f"/proc/{watching._process.pid}/task").iterdir())) == threads
    assert not state.has_faults


def test_a_monitor_that_dies_is_started_again_and_knows_the_ranks(fake, watch, tmp_path):
    state = RunState(max_steps=1)
    watching = watch(state)
    wait_for(lambda: readings(tmp_path) > 2)
    watching._process.kill()
    watching._process.wait()
    [warning] = faults_of(state)
    assert (warning.kind, warning.severity, "started again" in warning.message) == ("monitor", "warning", True)
    before = readings(tmp_path)
    wait_for(lambda: readings(tmp_path) > before)
    fake.set("count 1", "lost.0 1")
    assert [each.kind for each in faults_of(state)] == ["lost"]


@pytest.mark.parametrize("lines", [("count 1", "error.Init 9"), ("count 0",)])
def test_where_no_gpu_can_be_read_it_is_said_once(fake, watch, lines, caplog):
    fake.set(*lines)
    state = RunState(max_steps=1)
    with caplog.at_level(logging.INFO):
        watching = watch(state)
        wait_for(lambda: not watching._thread.is_alive())
    assert len([each for each in caplog.records if "is not watched" in each.message]) == 1
    assert not state.has_faults


def test_the_monitor_ends_with_its_parent(fake, tmp_path):
    script = (
        "import sys, time\n"
        "from smalti_health.monitor.rank import Watch\n"
        "from smalti_health.monitor.process import Setup\n"
        "from smalti_health.monitor.requests import DeviceRequest\n"
        "from smalti_health.policy.limits import Limits\n"
        f"setup = Setup(run={uuid.uuid4().hex!r}, node=0, first=0, port='', directory={str(tmp_path)!r}, interval=0.1,\n"
        "    timeout=1.0, metrics_port=0, limits=Limits())\n"
        "watch = Watch(setup, DeviceRequest(rank=0, ordinal=0), 'cuda:0', print, starts=True)\n"
        "watch.start()\n"
        "print(watch._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_for(lambda: readings(tmp_path) > 0)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_messages_of_nobody_are_ignored(tmp_path):
    own = address(uuid.uuid4().hex, 0, "", "rank-0")
    channel, other = Channel(own), Channel(own + b"-other")
    other._socket.sendto(b"no json", own)
    assert channel.receive(1.0) is None
    other._socket.sendto(b"[1]", own)
    assert channel.receive(1.0) is None
    assert other.send(own, {"state": "watching"})
    assert channel.receive(1.0) == {"state": "watching"}
    assert not other.send(own + b"-nobody", {})
    channel.close()
    other.close()


def test_a_user_of_another_id_is_ignored(monkeypatch):
    own = address(uuid.uuid4().hex, 0, "", "rank-0")
    channel = Channel(own)
    channel.send(own, {"state": "watching"})
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert channel.receive(1.0) is None
    channel.close()


@pytest.mark.parametrize(
    ("visible", "device", "index"),
    [
        (None, "cuda:1", 1),
        ("2,0", "cuda:0", 2),
        ("2,0", "cuda:1", 0),
        ("GPU-00000002", "cuda:0", 2),
        ("GPU-00000003-fake-4000-8000-000000000000,GPU-00000001-fake", "cuda:1", 1),
        ("MIG-00000002-1", "cuda:0", 2),
        ("0", "cuda:1", None),
        ("GPU-0000000", "cuda:0", None),
        ("", "cuda:0", None),
    ],
)
def test_a_gpu_is_found_as_cuda_finds_it(loaded, visible, device, index):
    loaded.set("count 4")
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    request = device_request(0, device, environment)
    assert request is not None
    found = Nvml().find(request)
    assert found == (None if index is None else f"GPU-{index:08d}-fake-4000-8000-000000000000")


def test_what_torch_knows_of_the_device_comes_first(loaded):
    loaded.set("count 4")
    request = DeviceRequest(rank=0, ordinal=0, visible="0", uuid="00000003-fake-4000-8000-000000000000")
    assert Nvml().find(request) == "GPU-00000003-fake-4000-8000-000000000000"


def test_a_cpu_has_no_gpu():
    assert device_request(0, "cpu") is None


def test_readings_are_served_to_prometheus(fake, watch, tmp_path):
    from socket import socket
    from urllib.request import urlopen

    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fake.set("count 1", "temp.0 66")
    watch(RunState(max_steps=1), port=port)
    wait_for(lambda: readings(tmp_path) > 1)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert (
        'smalti_gpu_temperature_celsius{index="0",name="Fake H200",uuid="GPU-00000000-fake-4000-8000-000000000000"} 66.0'
        in text
    )


def test_the_trace_is_bounded(tmp_path):
    from smalti_health.monitor.trace_file import TraceFile
    from smalti_health.policy.readings import Device, Reading

    complaints: list[str] = []
    trace = TraceFile(tmp_path, 0, complaints.append, largest=4000)
    devices = (Device(uuid="a"), Device(uuid="b"))
    for number in range(300):
        trace.append(devices, [Reading(uuid=each.uuid, time=float(number), temperature=number % 7) for each in devices])
    trace.close()
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["health.node-0.1.jsonl", "health.node-0.jsonl"]
    assert max(each.stat().st_size for each in files) < 4500
    found = read_trace(files).readings
    assert found[-1] == Reading(uuid="b", time=299.0, temperature=299 % 7)
    assert [each.time for each in found] == sorted(each.time for each in found)
    assert complaints == []


def test_a_trace_that_cannot_be_written_is_a_complaint(tmp_path):
    from smalti_health.monitor.trace_file import TraceFile
    from smalti_health.policy.readings import Device, Reading

    complaints: list[str] = []
    trace = TraceFile(tmp_path / "missing", 0, complaints.append)
    for number in range(3):
        trace.append((Device(uuid="a"),), [Reading(uuid="a", time=float(number))])
    assert len(complaints) == 1


@pytest.mark.parametrize(
    ("decision", "stops", "expected"),
    [
        ("warn", True, FaultAction.CONTINUE),
        ("stop_saved", True, FaultAction.STOP_SAVED),
        ("stop_suspect", True, FaultAction.STOP_SUSPECT),
        ("stop_now", True, FaultAction.STOP_UNSAVED),
        ("stop_now", False, FaultAction.CONTINUE),
        (None, True, None),
    ],
)
def test_decisions_become_actions(decision, stops, expected):
    from smalti_health.plugin import Health

    plugin = Health()
    plugin._stops = stops
    reading = {} if decision is None else {"decision": decision}
    assert plugin.on_gpu_fault(GpuFault(kind="ecc", message="", device="cuda:0", rank=0, reading=reading)) is expected


def test_json_of_a_setup_is_read_as_it_was_written():
    limits = Limits(ecc_errors=2)
    place = {"run": "r", "node": 1, "first": 8, "port": "2", "directory": "/d"}
    setup = Setup(**place, interval=5.0, timeout=1.0, metrics_port=0, limits=limits)
    assert Setup.parse(setup.line().decode()) == setup
    assert json.loads(setup.line())["limits"]["ecc_errors"] == 2
