"""Checkpoints of other trainers: what is guessed of their optimizers, and what resuming makes of a converted one."""

import math

import pytest
import torch

from smalti.checkpoint.conversion.formats import guess_optimizer
from smalti.checkpoint.conversion.hyperparameters import hyperparameters
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import capture, regrouped, restore
from smalti.types import World

ALONE = GlooCommunicator(world=World(), group=None)


def test_another_number_of_parameter_groups_keeps_the_runs_own_settings_and_takes_the_moments(tmp_path):
    model = torch.nn.Linear(2, 2)
    one = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    one.step()
    path = save(tmp_path, Snapshot(step=1, state=capture(model, one)), ALONE).path
    two = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}], lr=0.25)
    target = Snapshot(step=0, state=capture(model, two))
    load(path, target, ALONE)
    restore(model, two, target.state)
    assert [(group["lr"], group["weight_decay"]) for group in two.param_groups] == [(0.25, 0.01), (0.25, 0.0)]
    assert torch.equal(two.state[model.bias]["exp_avg"], one.state[model.bias]["exp_avg"])


def test_what_was_kept_per_parameter_survives_other_groups():
    saved = [{"lr": 1, "values": {"a": {"k": 1}}}, {"lr": 2, "values": {"b": {"k": 2}}}]
    assert regrouped(saved, [{"lr": 3}]) == [{"lr": 3, "values": {"a": {"k": 1}, "b": {"k": 2}}}]


@pytest.mark.parametrize(
    ("moments", "name"),
    [
        ({"exp_avg", "exp_avg_sq", "step"}, "AdamW"),
        ({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}, "AdamW"),
        ({"momentum_buffer"}, "SGD"),
        ({"sum", "step"}, "Adagrad"),
        ({"row_var", "col_var", "step"}, ""),
        (set(), ""),
    ],
)
def test_moments_tell_the_optimizer_or_nothing(moments, name):
    assert guess_optimizer(moments) == name


def test_hyperparameters_are_json_whatever_they_were():
    group = {"lr": torch.tensor(0.5), "eps": math.nan, "betas": (0.9, math.inf), "decay": None, "by": {1}}
    others = {"params": [1], "name": "all", "fused": True}
    assert hyperparameters(group | others) == {"betas": [0.9, "inf"], "by": "{1}", "decay": None, "eps": "nan", "lr": 0.5}
