"""Optimizers by name, and who gets weight decay."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smalti import OptimizerEntry, UserError
from smalti.builtin.core import OPTIMIZERS
from smalti.config.resolution import resolve
from smalti.errors import MissingPlugin
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_optimizer
from smalti.plugins.schema import schema_of
from smalti.training.optim.optimizers import AdamW, build_registered, matrices, parameter_groups
from smalti_optimizers.decoupled import sgd


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def config(*flags: str):
    return resolve(schema_of(load_plugins()), flags, environment={})


def test_matrices_decay_and_vectors_do_not():
    net = model()
    groups = parameter_groups(net, 0.1, matrices(net))
    names = [[name for name, _ in group["params"]] for group in groups]
    assert names == [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_frozen_parameters_are_left_to_themselves():
    net = model()
    net[0].requires_grad_(False)
    assert "0.weight" not in [name for group in parameter_groups(net, 0.1, matrices(net)) for name, _ in group["params"]]


@pytest.mark.parametrize("entry", OPTIMIZERS, ids=lambda entry: entry.name)
def test_every_optimizer_on_offer_lowers_a_loss(entry: OptimizerEntry):
    net, settings = model(), config(f"--optimizer={entry.name}", "--learning_rate=0.01")
    optimizer = build_registered(parameter_groups(net, 0.01, matrices(net)), settings, OPTIMIZERS)
    inputs, target = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    for _ in range(30):
        loss = (net(inputs) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_of_sharded_parameters_adamw_steps_its_own_part_and_keeps_moments_as_they_are_spread(tmp_path):
    """Bit for bit what torch makes of them as DTensors. Decay of other optimizers shrinks its own part, too."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        mesh, gradient = init_device_mesh("cpu", (1,)), torch.randn(3, 4)
        both = [nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])) for _ in range(2)]
        optimizers = AdamW([{"params": both[:1]}], lr=0.1), torch.optim.AdamW(both[1:], lr=0.1, fused=True)
        for parameter, optimizer in zip(both, optimizers, strict=True):
            parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
            optimizer.step()
        ours, torchs = ({"value": each, **optimizer.state[each]} for each, optimizer in zip(both, optimizers, strict=True))
        assert {name: type(value) for name, value in ours.items()} == {name: type(value) for name, value in torchs.items()}
        assert all(torch.equal(local(value), local(torchs[name])) for name, value in ours.items())

        weight = nn.Parameter(distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)]))
        decayed = sgd([{"params": [weight], "weight_decay": 1.0}], lr=0.5, weight_decay=0.0)
        weight.grad = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(0)])
        decayed.step()
        assert torch.equal(weight.to_local(), torch.full((3, 4), 0.5))
    finally:
        dist.destroy_process_group()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


DECAYING = [entry for entry in OPTIMIZERS if "weight_decay" in entry.accepts]


@pytest.mark.parametrize("entry", DECAYING, ids=lambda entry: entry.name)
def test_weights_without_a_gradient_shrink_by_the_rate_times_the_decay(entry: OptimizerEntry):
    """Decoupled decay: 1 - rate x decay a step, nothing of it in the moments, whatever the optimizer divides by."""
    weight = nn.Parameter(torch.ones(2, 2))
    groups = [{"params": [("weight", weight)], "weight_decay": 1.0}]
    optimizer = build_registered(groups, config(f"--optimizer={entry.name}", "--learning_rate=1e-3"), OPTIMIZERS)
    for _ in range(2):
        weight.grad = torch.zeros(2, 2)
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.999**2), rtol=1e-6, atol=0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1.0]


def test_the_help_names_every_optimizer_on_offer():
    told = schema_of(load_plugins()).options["optimizer"].help
    assert [entry.name for entry in OPTIMIZERS if entry.name not in told] == []


def test_an_unknown_optimizer_is_answered_with_the_nearest_name():
    with pytest.raises(UserError, match="Unknown optimizer 'adamv'") as caught:
        find_optimizer("adamv", OPTIMIZERS)
    assert caught.value.fix.startswith("did you mean adamw? known: adamw")


def test_an_optimizer_of_a_package_that_is_not_installed_is_answered_with_the_package(monkeypatch):
    monkeypatch.setattr("smalti.config.known_packages.installed", lambda name: False)
    with pytest.raises(MissingPlugin, match="Unknown optimizer 'AdamW8bit'") as caught:
        find_optimizer("AdamW8bit", OPTIMIZERS)
    assert caught.value.fix == f"pip install {Path(__file__).parents[3] / 'plugins/optimizers'}"


def test_names_may_have_dashes_and_any_case():
    assert find_optimizer("AdamW", OPTIMIZERS).name == "adamw"
