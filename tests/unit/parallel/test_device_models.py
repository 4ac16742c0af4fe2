"""The table of device models: what every entry has to have, and which device is which."""

import re

import pytest

from smalti.parallel import device_model_of, device_models


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti-16g"),
        ("NVIDIA GeForce RTX 5070", "rtx5070"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx5070ti"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("AMD Instinct MI300X VF", "mi300x"),
    ],
)
def test_a_device_is_found_by_the_name_that_torch_gives(name, model):
    assert device_model_of(name) is device_models()[model]


def test_every_entry_is_plausible():
    """A number in the wrong unit would be off by a factor of eight or a thousand."""
    for name, model in device_models().items():
        assert re.fullmatch(r"[a-z0-9-]+", name)
        stated = int(re.search(r"(\d+) GB", model.title)[1])
        assert 0.87 * stated < model.memory / 2**30 < stated, name
        assert model.peaks["bf16"] >= model.peaks["tf32"] >= model.peaks["fp32"] > 5e12, name
        assert 2e11 < model.memory_bandwidth < 1e13, name
        assert model.network_bandwidth <= model.host_bandwidth <= model.link_bandwidth < model.memory_bandwidth, name
