"""Runs that are rehearsed and then measured."""

from collections.abc import Sequence

COMMON = {
    "model_family": "toy",
    "toy_width": 64,
    "toy_depth": 3,
    "toy_heads": 4,
    "resolution": 32,
    "resolution_type": "pixel",
    "mixed_precision": "no",
    "learning_rate": 1e-3,
    "train_batch_size": 1,
    "max_train_steps": 10,
    "validation_prompt": "a circle",
    "without": "plots",
}


def as_words(values: dict[str, object], flags: Sequence[str] = ()) -> list[str]:
    return [*(f"--{name}={value}" for name, value in values.items()), *(f"--{flag}" for flag in flags)]
