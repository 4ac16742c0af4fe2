"""How much of their devices steps make use of: counted from the model's work, never at the cost of a run."""

import logging

import pytest

from smalti.training.metrics import Memory, Utilisation, known_peak, peak_of
from smalti.types import StepResult, World
from smalti_testing.tiny import TinyFamily


def step(samples: int = 8, seconds: float = 0.5, waited: float = 0.0) -> StepResult:
    return StepResult(step=1, loss=1.0, grad_norm=1.0, learning_rate=0.1, samples=samples, seconds=seconds, data_seconds=waited)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_the_peak_of_a_common_device_is_known_by_its_name(name, teraflops):
    assert known_peak(name, "bf16") == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A1000", ""]
)
def test_a_device_that_is_only_called_alike_is_not_taken_for_one_that_is_known(name):
    assert known_peak(name, "bf16") is None


def test_products_that_are_not_in_bf16_have_peaks_of_their_own():
    peaks = [known_peak("NVIDIA A100-SXM4-80GB", products) for products in ("bf16", "tf32", "fp32")]
    assert peaks == [312e12, 156e12, 19.5e12]


def test_the_cpu_has_no_peak():
    assert peak_of(World(rank=0, size=2), "bf16") is None


@pytest.mark.parametrize(("trained", "passes"), [(1.0, 3.0), (0.01, 2.01)])
def test_a_step_counts_forward_and_backward_of_what_trains(trained, passes):
    family = TinyFamily()
    utilisation = Utilisation(family=family, trained=trained, peak=1e9)
    expected = 8 * family.flops_per_sample(16, 8) * passes / 0.8 / 1e9
    assert utilisation.of(step(seconds=0.5, waited=0.3), 16, 8) == pytest.approx(expected)


class Counting(TinyFamily):
    asked = 0

    def flops_per_sample(self, width: int, height: int) -> int:
        self.asked += 1
        return 1000


def test_a_size_of_pictures_is_counted_once():
    family = Counting()
    utilisation = Utilisation(family=family, trained=1.0, peak=1e9)
    for width in (8, 16, 8, 16):
        utilisation.of(step(), width, 8)
    assert family.asked == 2


class Failing(TinyFamily):
    def flops_per_sample(self, width: int, height: int) -> int:
        raise NotImplementedError("not on the meta device")


def test_a_family_that_cannot_count_its_work_is_told_of_once_and_ends_nothing(caplog):
    utilisation = Utilisation(family=Failing(), trained=1.0, peak=1e9)
    with caplog.at_level(logging.WARNING):
        assert [utilisation.of(step(), 8, 8) for _ in range(3)] == [None] * 3
    assert [record.message for record in caplog.records] == [
        "no model FLOPs utilisation: tiny cannot count its work: not on the meta device"
    ]


def test_on_the_cpu_the_memory_is_that_of_the_process():
    memory = Memory("cpu")
    before = memory.peak_mb()
    held = bytearray(64 << 20)
    after = memory.peak_mb()
    assert before is not None
    assert after is not None
    assert 0 < before <= after
    assert len(held) < after * 2**20
