"""Optimizers of torch, with weight decay that does not go through the gradient."""

from __future__ import annotations

import torch

from smalti.training import decouple_decay


def sgd(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    return decouple_decay(torch.optim.SGD(groups, momentum=0.9, **settings))  # type: ignore[arg-type]


def adagrad(groups: list[dict[str, object]], **settings: object) -> torch.optim.Optimizer:
    return decouple_decay(torch.optim.Adagrad(groups, **settings))  # type: ignore[arg-type]
