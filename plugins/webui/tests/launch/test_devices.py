import pytest

from smalti_webui.launch.devices import Devices, local_devices

SCRIPT = """#!/bin/sh
case "$1" in
  --query-gpu=*) printf '0, GPU-aa\\n1, GPU-bb\\n2, GPU-cc\\n3, GPU-dd\\n' ;;
  --query-compute-apps=*) printf 'GPU-bb, 4711\\nGPU-bb, 4712\\n' ;;
esac
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """The driver's program of a node with four GPUs, of which one has two processes. This machine has none."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SCRIPT)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def test_a_device_with_a_process_is_not_free(driver):
    found = local_devices()
    assert (found.gpus, found.busy, found.free()) == ((0, 1, 2, 3), {1}, (0, 2, 3))
    assert found.free(reserved={2}) == (0, 3)


@pytest.mark.parametrize(("visible", "gpus"), [("2,1", (2, 1)), ("GPU-cc", (2,)), ("3,9,1", (3,)), ("", ()), ("-1", ())])
def test_the_devices_of_the_server_are_those_that_it_may_use(driver, monkeypatch, visible, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert local_devices().gpus == gpus


def test_a_driver_that_fails_leaves_nothing_free(driver):
    driver.write_text("#!/bin/sh\nexit 9\n")
    found = local_devices()
    assert "exit status 9" in found.error
    assert found.free() == ()


def test_a_node_without_driver_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_devices() == Devices()
