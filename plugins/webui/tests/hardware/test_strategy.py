import json

import pytest

from smalti_webui.hardware.strategy import changes_for, changes_for_plan, mode_of

DEFAULTS = {"fsdp_enable": False, "fsdp_version": 2, "deepspeed_config": None, "gradient_checkpointing": False}
ZERO = '{"zero_optimization": {"stage": 3}}'


def changed(values, changes):
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("values", "mode"),
    [
        ({}, "none"),
        ({"fsdp_enable": True}, "fsdp2"),
        ({"fsdp_enable": "yes"}, "fsdp2"),
        ({"fsdp_enable": "off"}, "none"),
        ({"context_parallel_size": 4}, "fsdp2"),
        ({"context_parallel_size": "1"}, "none"),
        ({"deepspeed_config": ZERO}, "deepspeed"),
        ({"deepspeed_config": json.loads(ZERO)}, "deepspeed"),
        ({"deepspeed_config": "none"}, "none"),
        ({"deepspeed_config": ZERO, "fsdp_enable": True}, "both"),
    ],
)
def test_the_mode_is_what_the_options_ask_for(values, mode):
    assert mode_of(values) == mode


@pytest.mark.parametrize("wanted", ["none", "fsdp2", "deepspeed"])
@pytest.mark.parametrize(
    "before", [{}, {"fsdp_enable": True, "context_parallel_size": 2}, {"deepspeed_config": ZERO, "offload_param_path": "/x"}]
)
def test_a_choice_is_the_only_one_whatever_was_there(before, wanted):
    after = changed(before, changes_for(wanted, before))
    assert mode_of(after) == wanted


def test_settings_of_fsdp_survive_another_choice():
    values = {"fsdp_enable": True, "fsdp_transformer_layer_cls_to_wrap": ["Block"]}
    after = changed(values, changes_for("deepspeed", values))
    assert after["fsdp_transformer_layer_cls_to_wrap"] == ["Block"]
    assert "fsdp_enable" not in after


def test_the_document_of_before_is_taken_again():
    assert changes_for("deepspeed", {}, ZERO) == {"deepspeed_config": ZERO}


def test_a_plan_replaces_the_strategy_that_was_configured():
    values = {"fsdp_enable": True, "fsdp_shard_size": 8, "fsdp_transformer_layer_cls_to_wrap": ["Block"], "seed": 7}
    ddp = {"fsdp_enable": False, "gradient_checkpointing": False, "train_batch_size": 4, "num_processes": 2}
    after = changed(values, changes_for_plan(ddp, values, DEFAULTS))
    assert (mode_of(after), after["train_batch_size"], after["seed"]) == ("none", 4, 7)
    assert not {"fsdp_shard_size", "fsdp_enable", "gradient_checkpointing"} & after.keys()
    zero = {"deepspeed_config": ZERO, **ddp}
    assert mode_of(changed(values, changes_for_plan(zero, values, DEFAULTS))) == "deepspeed"
    fsdp = {"deepspeed_config": None, "fsdp_enable": True, "fsdp_version": 2, "fsdp_shard_size": 2}
    after = changed({"deepspeed_config": ZERO}, changes_for_plan(fsdp, {"deepspeed_config": ZERO}, DEFAULTS))
    assert (mode_of(after), after["fsdp_shard_size"]) == ("fsdp2", 2)
