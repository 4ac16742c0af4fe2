"""Hyper-parameters of optimizers in checkpoints of other trainers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

_OTHERS = frozenset(("params", "param_names", "name", "foreach", "fused", "capturable", "differentiable"))
"""Keys of a parameter group that are not hyper-parameters: its name and parameters, and the choice of an implementation."""


def hyperparameters(group: Mapping[str, object]) -> dict[str, object]:
    """The hyper-parameters of a parameter group, sorted, in JSON's types. Values that JSON does not have become text."""
    return {key: _as_json(value) for key, value in sorted(group.items()) if key not in _OTHERS}


def _as_json(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return _as_json(value.item())
        case list() | tuple():
            return [_as_json(item) for item in value]
    return str(value)
