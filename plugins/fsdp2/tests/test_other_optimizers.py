"""What is known of the optimizer in a checkpoint of another trainer."""

import math

import pytest
import torch

from smalti_fsdp2.other_optimizers import guess_optimizer, hyperparameters


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
