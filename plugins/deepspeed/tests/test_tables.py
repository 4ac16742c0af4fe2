"""What this package knows of DeepSpeed without importing it, held to DeepSpeed's own."""

import json
from enum import Enum
from inspect import signature
from itertools import product
from pathlib import Path
from typing import get_args

import deepspeed.runtime.config as runtime
import pytest
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from pydantic import BaseModel

from smalti import ConfigError
from smalti.config.resolution import resolve
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti_deepspeed.builder import FIELDS, build, choices_of
from smalti_deepspeed.config import resolved, sized
from smalti_deepspeed.derived_options import ONLY_OF, OTHER_SCHEDULERS, SCHEDULERS
from smalti_deepspeed.keys import DATA_TYPES, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, REMOVED_TOP, REMOVED_ZERO, SHORT, TOP, ZERO
from smalti_deepspeed.optimizers import NAMES, REMOVED


class Asked(dict):
    """A configuration that writes down which keys DeepSpeed looks for."""

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.names: set[str] = set()

    def get(self, key, default=None):
        self.names.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.names.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.names.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_the_keys_at_the_top_are_those_that_deepspeed_looks_for():
    asked = Asked(train_micro_batch_size_per_gpu=1)
    runtime.DeepSpeedConfig(asked)
    assert asked.names - TOP - REMOVED_TOP == set()
    assert TOP - asked.names == {"sequence_parallel_size"}  # looked for only among several ranks


def test_the_keys_of_data_types_are_those_that_deepspeed_looks_for():
    asked = Asked()
    runtime.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "data_types": asked})
    assert asked.names == DATA_TYPES.keys()


def test_what_deepspeed_has_no_more_is_what_it_refuses():
    assert set(runtime._REMOVED_TOP_LEVEL_CONFIG_KEYS) == REMOVED_TOP
    assert set(runtime._REMOVED_ZERO_CONFIG_KEYS) == REMOVED_ZERO


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (DeepSpeedZeroConfig, ZERO),
        (DeepSpeedZeroOffloadParamConfig, OFFLOAD_PARAM),
        (DeepSpeedZeroOffloadOptimizerConfig, OFFLOAD_OPTIMIZER),
    ],
)
def test_the_keys_of_zero_and_what_stands_under_them_are_deepspeeds(model, kinds):
    assert {info.alias or name: kind_of(name, info.annotation) for name, info in model.model_fields.items()} == kinds


def kind_of(name: str, annotation: object) -> str:
    kind = next((each for each in get_args(annotation) if each is not type(None)), annotation)
    if issubclass(kind, Enum):
        return "stage" if name == "stage" else "device"
    if issubclass(kind, BaseModel):
        return "table"
    return {bool: "switch", int: "count", float: "share", Path: "path"}[kind]


def test_names_of_stage_3_without_their_prefix_are_taken_too():
    fields = {name: info.alias for name, info in DeepSpeedZeroConfig.model_fields.items() if info.alias}
    assert fields.items() <= SHORT.items()


def test_the_optimizers_are_deepspeeds():
    assert {name.lower() for name in NAMES if name not in REMOVED} == set(runtime.DEEPSPEED_OPTIMIZERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_has_the_settings_that_deepspeeds_has(name):
    taken = signature(getattr(lr_schedules, name)).parameters
    assert {key for key, owners in ONLY_OF.items() if name in owners} == taken.keys() & ONLY_OF.keys()


def test_the_schedules_are_deepspeeds():
    assert {*SCHEDULERS, *OTHER_SCHEDULERS} == set(lr_schedules.VALID_LR_SCHEDULES)


FREE = {"nvme_path": "/scratch", "learning_rate": "1e-5", "warmup_steps": "5", "gradient_accumulation_steps": "2"}
"""An answer to the builder's questions that have no choices."""


def test_deepspeed_accepts_whatever_can_be_built():
    schema = schema_of(load_plugins(Selection(only=("deepspeed",))))
    asked = [field for field in FIELDS if field.choices]
    built = 0
    for answers in product(*(field.choices for field in asked)):
        texts = dict(zip((field.name for field in asked), answers, strict=True))
        texts |= FREE if "nvme" in answers else {key: text for key, text in FREE.items() if key != "nvme_path"}
        try:
            document = build(choices_of(texts))
        except ConfigError:
            continue  # the builder says what cannot be
        words = ["--accelerate_config=none", "--max_train_steps=9", f"--deepspeed_config={json.dumps(document)}"]
        complete = resolved(resolve(schema, words, environment={}), world_size=1)
        found = runtime.DeepSpeedConfig(sized(complete, 10**6, 10**5))
        assert found.zero_optimization_stage == int(texts["stage"])
        assert found.optimizer_name == texts["optimizer"].lower()
        built += 1
    assert built > 100
