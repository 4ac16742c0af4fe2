"""What a launch says of the devices that it will use, before it uses them."""

import pytest

from smalti.parallel.devices import ImageSize, cpu_notices, describe_devices

SMALL = ImageSize(tokens=256, width=64, height=64)
LARGE = ImageSize(tokens=65_536, width=1024, height=1024)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--use_cpu",), "CPU"),
        (("--use_cpu", "--num_processes=2"), "CPU, 2 processes"),
        (
            ("--use_cpu", "--num_processes=8", "--num_machines=4", "--main_process_ip=h"),
            "CPU, 2 processes on each of 4 machines",
        ),
        ((), "CPU (no GPU found: "),
    ],
)
def test_cpus_are_described_with_the_number_of_processes(configure, flags, said):
    assert describe_devices(configure(*flags), "cpu").startswith(said)


def test_accelerators_that_are_not_here_are_described_as_such(configure):
    assert describe_devices(configure("--num_processes=8"), "npu") == "8 x npu device (not on this machine)"


def test_several_ranks_on_cpus_that_nobody_asked_for_are_told(configure):
    (notice,) = cpu_notices(configure("--num_processes=8"), "cpu", SMALL)
    assert notice.startswith("no GPU found: ")
    assert "8 processes train on the CPU; --use_cpu" in notice
    assert cpu_notices(configure("--num_processes=8", "--use_cpu"), "cpu", SMALL) == []
    assert cpu_notices(configure(), "cpu", SMALL) == []
    assert cpu_notices(configure("--num_processes=8"), "cuda", SMALL) == []


def test_more_tokens_than_a_cpu_can_bear_are_told(configure):
    (notice,) = cpu_notices(configure("--use_cpu"), "cpu", LARGE)
    assert "65,536 tokens per image" in notice
    assert "--resolution" in notice
    assert cpu_notices(configure(), "cuda", LARGE) == []
