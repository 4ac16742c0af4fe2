"""Groups whose learning rate is a multiple of that of the run: under every optimizer, over a schedule, and resumed."""

import copy

import pytest
import torch
from torch import nn

from smalti import OptimizerEntry
from smalti.builtin.core import OPTIMIZERS as CORE
from smalti.config import OptimizerOptions, resolve
from smalti.parallel import capture, regrouped, restore
from smalti.plugins import load_plugins, schema_of
from smalti.training import build_registered, matrices, parameter_groups
from smalti.training.optim.lr_schedule import build_scheduler
from smalti_memory.updates.building import build
from smalti_optimizers.plugin import plugin

EVERYONE = [*plugin.register_optimizers(), *CORE]
SHARED = ("prodigy", "prodigy_schedulefree")
"""Optimizers that estimate one rate for all parameters."""
COUNTED = ("d", "d_numerator", "steps", "weight_sum", "largest_rate")
"""What optimizers keep in their groups from the first step on."""
RATIO, STEPS = 4.0, 12


class Pair(nn.Module):
    """Two matrices and a vector; those named in `names` train. `unit` is that of the matrix `b`."""

    def __init__(self, names="abc", unit=1.0):
        super().__init__()
        random, self.unit = torch.Generator().manual_seed(0), unit
        for name, shape in {"a": (6, 4), "b": (5, 6), "c": (5,)}.items():
            value = torch.randn(shape, generator=random)
            setattr(self, name, nn.Parameter(value / unit if name == "b" else value, requires_grad=name in names))

    def loss(self, step):
        """Of which the gradient of each depends on itself alone, so that they can be trained apart."""
        goals = {name: torch.full_like(each, (step + 1) / 10) for name, each in self.named_parameters()}
        scaled = {name: each * self.unit if name == "b" else each for name, each in self.named_parameters()}
        return sum((scaled[name] - goals[name]).square().sum() for name in goals)


def config(name, rate=0.01):
    words = [f"--optimizer={name}", f"--learning_rate={rate}", "--adam_epsilon=1e-15", "--lr_warmup_steps=3"]
    return resolve(schema_of(load_plugins()), words, environment={})


def prepared(model, name, ratio=1.0, rate=0.01, step=0):
    settings = config(name, rate)
    decay = 0.0 if name in SHARED else 0.1  # of a weight in another unit it would be another one
    groups = parameter_groups(model, decay, matrices(model), lambda each: ratio if each == "b" else 1.0)
    optimizer = build_registered(groups, settings, EVERYONE)
    return optimizer, build_scheduler(optimizer, settings[OptimizerOptions], STEPS, step)


def train(model, optimizer, scheduler, steps):
    for step in steps:
        model.loss(step).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def rate_of(name):
    return 1.0 if name in SHARED else 0.01


@pytest.mark.parametrize("entry", EVERYONE, ids=lambda entry: entry.name)
def test_a_matrix_with_a_ratio_is_trained_as_alone_at_that_rate(entry: OptimizerEntry):
    """Where all parameters share an estimate: as in a unit that is as many times as large, at the rate of all."""
    both, rate = Pair(), rate_of(entry.name)
    steps = range(80 if entry.name in SHARED else STEPS)
    train(both, *prepared(both, entry.name, RATIO, rate), steps)
    if entry.name in SHARED:
        apart = Pair(unit=RATIO)
        train(apart, *prepared(apart, entry.name, rate=rate), steps)
        expected = {"a": apart.a, "b": apart.b * RATIO, "c": apart.c}
        assert float((both.b - Pair().b).detach().abs().max()) > 1e-2
    else:
        parts = {names: Pair(names) for names in ("ac", "b")}
        for names, part in parts.items():
            train(part, *prepared(part, entry.name, rate=rate * RATIO if names == "b" else rate), steps)
        expected = {"a": parts["ac"].a, "b": parts["b"].b, "c": parts["ac"].c}
    for name, parameter in both.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)


def test_a_hand_written_loop_of_adamw_is_the_same():
    model, hand = Pair(), Pair()
    train(model, *prepared(model, "adamw", RATIO), range(STEPS))
    loop = torch.optim.AdamW(
        [
            {"params": [hand.a], "weight_decay": 0.1},
            {"params": [hand.c], "weight_decay": 0.0},
            {"params": [hand.b], "weight_decay": 0.1, "ratio": RATIO},
        ],
        eps=1e-15,
    )
    for step in range(STEPS):
        hand.loss(step).backward()
        for group in loop.param_groups:
            group["lr"] = 0.01 * group.get("ratio", 1.0) * min(1.0, (step + 1) / 4)
        loop.step()
        loop.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, hand.get_parameter(name), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "prodigy", "muon", "adamw_schedulefree"])
def test_a_resumed_run_takes_its_ratio_from_its_options(name):
    """The same one goes on to the bit; another one counts from then on, and so does none, in other groups."""
    whole = Pair()
    optimizer, scheduler = prepared(whole, name, RATIO, rate_of(name))
    train(whole, optimizer, scheduler, range(6))
    ended = {}
    for ratio in (RATIO, 2.0, 1.0):
        model = Pair()
        again, _ = prepared(model, name, ratio, rate_of(name))
        saved = copy.deepcopy(capture(whole, optimizer))
        saved.param_groups = regrouped(saved.param_groups, capture(model, again).param_groups)
        configured = [{key: value for key, value in group.items() if key != "params"} for group in again.param_groups]
        restore(model, again, saved)
        for group, values in zip(again.param_groups, configured, strict=True):
            group.update(values)
        counted = {key: value for key, value in optimizer.param_groups[0].items() if key in COUNTED}
        assert all(counted.items() <= group.items() for group in again.param_groups)
        train(model, again, build_scheduler(again, config(name, rate_of(name))[OptimizerOptions], STEPS, 6), range(6, STEPS))
        ended[ratio] = model.b.detach()
    train(whole, optimizer, scheduler, range(6, STEPS))
    assert torch.equal(ended[RATIO], whole.b)
    assert len({float(each.sum()) for each in ended.values()}) == 3


def test_steps_in_the_backward_pass_have_it_too():
    model, plain = Pair(), Pair()
    train(plain, *prepared(plain, "adamw", RATIO), range(STEPS))
    words = ["--learning_rate=0.01", "--adam_epsilon=1e-15", "--lr_warmup_steps=3", "--release_gradients", "--max_grad_norm=0"]
    settings = resolve(schema_of(load_plugins()), words, environment={})
    groups = parameter_groups(model, 0.1, matrices(model), lambda each: RATIO if each == "b" else 1.0)
    optimizer = build(groups, settings, EVERYONE)
    train(model, optimizer, build_scheduler(optimizer, settings[OptimizerOptions], STEPS, 0), range(STEPS))
    assert all(torch.equal(each, plain.get_parameter(name)) for name, each in model.named_parameters())
