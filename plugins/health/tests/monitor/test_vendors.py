"""A package of another vendor's GPUs, outside of this repository, beside a broken one."""

import json

import pytest
from click.testing import CliRunner

from smalti_health import Absent
from smalti_health.cli.commands import health
from smalti_health.monitor.drivers import GROUP, open_driver
from smalti_health.monitor.requests import device_request

SOURCE = """
import time

from smalti_health import Absent, Device, DeviceRequest, Driver, GpuReader, Reading


class Gpu(GpuReader):
    def __init__(self, uuid: str) -> None:
        super().__init__()
        self.uuid = uuid

    def describe(self) -> Device:
        return Device(uuid=self.uuid, index=int(self.uuid[-1]), name="Pebble 7", slowdown=95)

    def read(self) -> Reading:
        self.begin("temperature")
        temperature = 50 + int(self.uuid[-1])
        self.end()
        return Reading(uuid=self.uuid, time=time.time(), temperature=temperature, ecc_uncorrected=0)


class Pebbles:
    vendor = "Pebble"

    def find(self, request: DeviceRequest) -> str | None:
        return self.all()[request.ordinal]

    def all(self) -> list[str]:
        return ["pebble-0", "pebble-1"]

    def gpu(self, uuid: str) -> Gpu:
        return Gpu(uuid)

    def watch(self, uuid: str) -> object:
        raise Absent("pebbles have no events")

    def wait(self, events: object, seconds: float) -> int | None:
        return None


def open_pebbles() -> Driver:
    return Pebbles()


def absent() -> Driver:
    raise Absent("no pebble here")
"""


@pytest.fixture
def package(tmp_path, monkeypatch, loaded):
    """Installs the package with these entry points, on a machine whose NVML is not loaded."""
    loaded.set("error.Init 9")

    def install(**entries: str) -> None:
        (tmp_path / "outside_pebbles.py").write_text(SOURCE)
        folder = tmp_path / "outside_pebbles-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-pebbles\nVersion: 1.0\n")
        lines = (f"{name} = outside_pebbles:{place}\n" for name, place in entries.items())
        (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{''.join(lines)}")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_package_adds_a_vendor_and_a_broken_one_beside_it_costs_nothing(package):
    package(aged="nowhere", pebble="open_pebbles")
    done = CliRunner().invoke(health, ["--json"])
    assert done.exit_code == 0, done.exception
    found = json.loads(done.output)
    assert [(each["name"], each["uuid"], each["temperature_celsius"]) for each in found] == [
        ("Pebble 7", "pebble-0", 50),
        ("Pebble 7", "pebble-1", 51),
    ]
    request = device_request(3, "xpu:1")
    assert request is not None
    assert open_driver().find(request) == "pebble-1"


def test_where_no_vendor_has_a_gpu_each_says_why(package):
    package(aged="nowhere", pebble="absent")
    with pytest.raises(Absent, match=r"NVML: .+; AMD SMI: .+; aged: AttributeError: .+'nowhere'; pebble: no pebble here"):
        open_driver()
