"""The readings of smalti-health on the overview, and what ends a run at once."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from smalti import UserError
from smalti.rundir import RunDirectory
from smalti_health.monitor.trace_file import TraceFile
from smalti_health.policy.readings import Device, Reading
from smalti_webui.runs.actions import stop_now
from smalti_webui.runs.gpus import Gpus

RUN = """
import signal, sys, time
from smalti.rundir import RunDirectory, acquire
asked = []
signal.signal(signal.SIGINT, lambda *_: sys.exit(130) if asked else asked.append(1))
with acquire(RunDirectory(sys.argv[1])):
    while True:
        time.sleep(0.05)
"""


def test_the_last_readings_of_each_gpu_are_shown(make_run: Any, client: TestClient) -> None:
    run = make_run("run", condition="running")
    record = run.record()
    trace = TraceFile(run.path, 0, pytest.fail, largest=700)
    devices = [Device(uuid="GPU-a", name="First GPU"), Device(uuid="GPU-b", name="Second <GPU>")]
    gpus = Gpus(run)
    for second in range(40):  # the file is replaced some times meanwhile
        readings = [Reading(uuid=each.uuid, time=1e9 + second, temperature=40 + second // 10, clock=1000) for each in devices]
        trace.append(devices, readings)
        if second % 7 == 0:
            gpus.read()
    trace.close()
    found = gpus.read()
    assert [(gpu.name, gpu.time) for gpu in found] == [(each.name, 1e9 + 39) for each in devices]
    assert found[1].shown == [("Temperature", 43, "°C"), ("Clock", 1000, "MHz")]
    make_run.writers["run"].events.append("health", step=3, uuid="GPU-b", fault="ecc", message="an ECC error", device="cuda:1")
    page = client.get(f"/runs/{record.id}").text
    assert "Second &lt;GPU&gt;" in page
    assert page.index("Second &lt;GPU&gt;") < page.index("an ECC error")
    make_run.writers["run"].close()


def test_stop_now_does_what_a_second_ctrl_c_does(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with subprocess.Popen([sys.executable, "-c", RUN, str(run.path)]) as process:
        try:
            while run.heartbeat() is None:
                assert process.poll() is None
                time.sleep(0.05)
            stop_now(run)
            assert process.wait(20) == 130
        finally:
            process.kill()
    with pytest.raises(UserError, match="no running process to stop"):
        stop_now(run)
