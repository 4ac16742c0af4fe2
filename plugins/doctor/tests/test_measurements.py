"""A device that is slower than the others, or than it was, is named with figures."""

import socket
from dataclasses import asdict, replace

from smalti.plugins import CacheFile
from smalti_doctor.measure import Measurement
from smalti_doctor.measurements import describe, measure_node, slower_devices, slower_than_before

H100 = Measurement(
    device="a",
    name="NVIDIA H100 80GB HBM3",
    kind="cuda",
    index=0,
    products={"bf16": 7e14},
    memory=2.9e12,
    to_device=5e10,
    time=0.0,
)


def test_the_slow_one_of_several_is_named():
    slow = replace(H100, products={"bf16": 5.74e14})
    found = slower_devices({"GPU 0": H100, "GPU 1": H100, "GPU 2": replace(H100, memory=2.8e12), "GPU 3": slow})
    assert [(each.level, each.message) for each in found] == [
        (
            "warning",
            "GPU 3 (NVIDIA H100 80GB HBM3) is 18 % slower than the median of 4: bf16 products 574 TFLOP/s, median 700 TFLOP/s",
        )
    ]
    assert slower_devices({"GPU 0": H100, "GPU 1": replace(slow, name="NVIDIA L4")}) == []  # another model is not compared


def test_one_that_was_faster_before_is_named_with_the_day():
    [found] = slower_than_before("GPU 0", replace(H100, to_device=2.5e10), H100)
    assert found.message.startswith("GPU 0 (NVIDIA H100 80GB HBM3) is 50 % slower than on 19")
    assert "copies to the device 25 GB/s, then 50 GB/s" in found.message
    assert list(slower_than_before("GPU 0", replace(H100, to_device=4.6e10), H100)) == []


def test_products_are_compared_with_the_published_peak():
    assert "bf16 products 700 TFLOP/s (71 % of the peak), memory 2.9e+03 GB/s" in describe(H100)


def test_the_devices_of_this_node_and_its_disk_are_measured_and_compared_with_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache, cpu = CacheFile("speed"), f"{socket.gethostname()} cpu"
    earlier = Measurement(device=cpu, name="CPU", kind="cpu", index=0, products={"fp32": 1e6}, memory=1e15)
    cache.put(cpu, asdict(earlier))
    section = measure_node(0, tmp_path, 0.1, cache)
    [device] = section.facts["devices"]
    assert (device["device"], device["products"]["fp32"] > 1e8, device["memory"] > 1e7) == (cpu, True, True)
    assert [each.level for each in section.findings if "slower than on" in each.message] == ["warning"]  # the memory
    assert cache.get(cpu) == asdict(earlier)  # until it is as fast again
    assert cache.get(f"disk {tmp_path}") == section.facts["disk"]
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]  # the file that was written is removed
