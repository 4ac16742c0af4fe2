"""Optimizers by name, and who gets weight decay."""

import pytest
import torch
from torch import nn

from smalti import OptimizerEntry, UserError
from smalti.config import resolve, schema_of
from smalti.defaults.core import OPTIMIZERS
from smalti.optimizers import build_registered, matrices, parameter_groups
from smalti.plugins import load_plugins
from smalti.strategy import find_optimizer


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


def test_muon_steps_matrices_and_leaves_vectors_to_adamw():
    net = model()
    optimizer = build_registered(parameter_groups(net, 0.0, matrices(net)), config("--optimizer=muon"), OPTIMIZERS)
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    moments = {name: set(optimizer.state[parameter]) for name, parameter in net.named_parameters()}
    assert moments["0.weight"] == {"momentum_buffer"}
    assert moments["0.bias"] == {"step", "exp_avg", "exp_avg_sq"}


def test_an_unknown_optimizer_is_answered_with_the_nearest_name():
    with pytest.raises(UserError, match="Unknown optimizer 'adamv'") as caught:
        find_optimizer("adamv", OPTIMIZERS)
    assert caught.value.fix == "did you mean adamw? known: adafactor, adagrad, adamw, muon, sgd"


def test_names_may_have_dashes_and_any_case():
    assert find_optimizer("AdamW", OPTIMIZERS).name == "adamw"
