"""Muon and Adafactor, which treat matrices otherwise than vectors."""

import pytest
import torch
from torch import nn

from smalti import CheckpointError
from smalti.config import resolve
from smalti.plugins import load_plugins, schema_of
from smalti.training import build_registered, matrices, parameter_groups
from smalti_optimizers.adafactor import FixedRateAdafactor
from smalti_optimizers.plugin import plugin

OPTIMIZERS = plugin.register_optimizers()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def config(*flags: str):
    return resolve(schema_of(load_plugins()), flags, environment={})


def test_muon_steps_matrices_and_leaves_vectors_to_adamw():
    net = model()
    optimizer = build_registered(parameter_groups(net, 0.0, matrices(net)), config("--optimizer=muon"), OPTIMIZERS)
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    moments = {name: set(optimizer.state[parameter]) for name, parameter in net.named_parameters()}
    assert moments["0.weight"] == {"momentum_buffer"}
    assert moments["0.bias"] == {"step", "exp_avg", "exp_avg_sq"}


SHAPES = {"matrix": (5, 3), "vector": (7,), "convolution": (4, 3, 2, 2)}


def test_adafactor_steps_as_that_of_transformers_does_at_a_fixed_rate():
    transformers = pytest.importorskip("transformers")
    first = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    ours, theirs = ({name: nn.Parameter(value.clone()) for name, value in first.items()} for _ in range(2))
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    pairs = (
        (ours, FixedRateAdafactor([{"params": list(ours.values())}], **settings)),
        (theirs, transformers.Adafactor(theirs.values(), scale_parameter=False, relative_step=False, **settings)),
    )
    for step in range(20):
        for weights, optimizer in pairs:
            random = torch.Generator().manual_seed(step)
            for weight in weights.values():
                weight.grad = torch.randn(weight.shape, generator=random) * 10 ** (step % 5 - 3)
            optimizer.step()
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-6)


def test_adafactor_trains_the_zeros_that_an_adapter_begins_with():
    """By about the rate in each step; with the rate scaled by the size of the weight, by a thousandth of it."""
    rate, steps, sizes = 1e-4, 100, []
    for name in ("adafactor", "adafactor_scaled"):
        weight, random = nn.Parameter(torch.zeros(16, 4)), torch.Generator().manual_seed(0)
        groups = [{"params": [("lora_B", weight)], "weight_decay": 0.0}]
        optimizer = build_registered(groups, config(f"--optimizer={name}", f"--learning_rate={rate}"), OPTIMIZERS)
        for _ in range(steps):
            weight.grad = 1 + 0.1 * torch.randn(16, 4, generator=random)
            optimizer.step()
        sizes.append(weight.detach().square().mean().sqrt().item() / (rate * steps))
    assert 1 / 3 < sizes[0] < 3
    assert sizes[1] < 0.01


def test_moments_of_torchs_adafactor_are_not_continued_with_other_steps():
    fixed, scaled = (
        build_registered(parameter_groups(net := model(), 0.0, matrices(net)), config(f"--optimizer={name}"), OPTIMIZERS)
        for name in ("adafactor", "adafactor_scaled")
    )
    with pytest.raises(CheckpointError, match="scaled the learning rate") as caught:
        fixed.check_saved("Adafactor")
    assert "--optimizer=adafactor_scaled" in caught.value.fix
    fixed.check_saved(type(fixed).__name__)
    assert not hasattr(scaled, "check_saved")
