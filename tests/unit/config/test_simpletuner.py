"""Options in SimpleTuner's spelling: what works, what has no effect, what is refused, and how each is reported."""

import json

import pytest
from hypothesis import given, strategies as st

from smalti.config import DataOptions, ObjectiveOptions, RunOptions, Schema, TrackingOptions, translate_reference_options
from smalti.config.core_options import GROUPS
from smalti.config.simpletuner.rules import is_neutral
from smalti.config.simpletuner.table import KEYS, PREFIXES
from smalti.errors import ConfigError

CORE = Schema(GROUPS)


def problems(configure, *flags, **sources) -> str:
    with pytest.raises(ConfigError) as raised:
        configure(*flags, **sources)
    return str(raised.value)


@pytest.fixture
def from_file(configure, write):
    """Resolve a file with these keys."""
    return lambda values, *flags: configure(*flags, file=write("config.json", json.dumps(values)))


# --- the table ------------------------------------------------------------------------------------------------------


def test_every_row_says_why_and_every_refusal_what_to_do():
    for key, rule in {**KEYS, **PREFIXES}.items():
        assert rule.why or rule.outcome in ("renamed", "same"), key
        assert rule.fix or rule.outcome != "refused", key
        assert rule.option or rule.outcome != "renamed", key
        assert key == key.lower(), key


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_value_that_is_off_changes_nothing_and_is_not_reported(key):
    rule = KEYS[key]
    for value in (None, "", *rule.neutral, *(str(each) for each in rule.neutral)):
        found = translate_reference_options({key: value}, CORE)
        assert not found.problems
        if rule.outcome != "same":
            assert (dict(found.values), found.notices, dict(found.rest)) == ({}, (), {})


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), st.none() | st.booleans() | st.floats(allow_nan=False) | st.text()))
def test_no_key_is_lost_whatever_its_value(values):
    found = translate_reference_options(values, CORE)
    spoken = {name for keys, _ in found.notices for name in keys.split(", ")} | {problem.where for problem in found.problems}
    spoken |= {key for key, _ in found.values.values()} | found.rest.keys()
    silent = {key for key in values if key not in spoken}
    assert all(is_neutral(values[key], KEYS[key]) or KEYS[key].convert for key in silent)


# --- through the configuration --------------------------------------------------------------------------------------


def test_keys_without_an_effect_are_one_notice_for_each_reason(from_file):
    notices = from_file({"vae_batch_size": 4, "max_workers": 8, "tracker_run_name": "a"}).notices
    assert [notice.replace("\\", "/").partition(" in ")[0] for notice in notices] == [
        "vae_batch_size, max_workers",
        "tracker_run_name",
    ]
    assert "no effect: it is chosen automatically" in notices[0]


def test_all_that_is_refused_is_reported_at_once_with_what_to_do(from_file, write):
    told = problems(from_file, {"controlnet": True, "lora_type": "lycoris", "musubi_blocks_to_swap": 8, "colour": 1})
    for text in (
        "controlnet = true: ControlNet is not supported\n    fix: set it to false",
        'lora_type = "lycoris": LyCORIS adapters (LoKr, LoHa ...) are not supported\n    fix: set lora_type to standard',
        "musubi_blocks_to_swap = 8: block swap is not supported",
        "unknown option colour",
    ):
        assert text in told


def test_values_that_say_off_are_accepted_from_every_source(configure, write):
    file = write(
        "off.json",
        '{"push_to_hub": false, "--compress-disk-cache": null, "hub_model_id": "", "validation_lycoris_strength": 1}',
    )
    config = configure("--controlnet=false", "--musubi_blocks_to_swap", "0", file=file, environment={"SMALTI_USE_DORA": "no"})
    assert config.notices == () or all("no effect" in notice for notice in config.notices)
    assert config.changes() == {}


def test_an_unknown_option_that_is_null_is_a_spelling_mistake_all_the_same(from_file):
    assert "unknown option learning_rat\n    fix: did you mean learning_rate?" in problems(from_file, {"learning_rat": None})


# --- other names and other values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "group", "expected"),
    [
        ({"flow_use_beta_schedule": True}, ObjectiveOptions, {"timestep_distribution": "beta"}),
        ({"flow_beta_schedule_alpha": 3}, ObjectiveOptions, {"flow_beta_alpha": 3}),
        ({"flow_use_uniform_schedule": "true"}, ObjectiveOptions, {"timestep_distribution": "uniform"}),
        ({"flow_schedule_shift": 0}, ObjectiveOptions, {"flow_schedule_shift": 1}),
        ({"flow_schedule_shift": 0.0, "flow_schedule_auto_shift": True}, ObjectiveOptions, {"flow_schedule_shift": None}),
        ({"snr_gamma": 0}, ObjectiveOptions, {"snr_gamma": None}),
        ({"dataloader_prefetch": True}, DataOptions, {"dataloader_prefetch": 10}),
        ({"dataloader_prefetch": True, "dataloader_prefetch_qlen": 20}, DataOptions, {"dataloader_prefetch": 20}),
        ({"dataloader_prefetch": False, "dataloader_prefetch_qlen": 20}, DataOptions, {"dataloader_prefetch": 4}),
        ({"dataloader_prefetch_qlen": 20}, DataOptions, {"dataloader_prefetch": 20}),
        ({"caption_strategy": "instance_prompt", "instance_prompt": "a"}, DataOptions, {"caption_strategy": "instanceprompt"}),
        ({"num_train_epochs": 0, "max_train_steps": 10}, RunOptions, {"num_train_epochs": None, "max_train_steps": 10}),
        ({"num_train_epochs": 3, "max_train_steps": "0"}, RunOptions, {"num_train_epochs": 3, "max_train_steps": None}),
        ({"report_to": "none"}, TrackingOptions, {"report_to": ()}),
        ({"report_to": "none,tensorboard"}, TrackingOptions, {"report_to": ("tensorboard",)}),
    ],
)
def test_a_value_keeps_its_meaning(from_file, values, group, expected):
    made = from_file(values)[group]
    assert {name: getattr(made, name) for name in expected} == expected


def test_an_end_of_the_rate_becomes_a_share_of_the_peak(from_file):
    assert from_file({"lr_end": "1e-6", "learning_rate": 1e-4}).value("lr_end_ratio") == pytest.approx(0.01)
    assert "a share of learning_rate, which the file does not give" in problems(from_file, {"lr_end": 1e-6})


@given(st.integers(1, 1000), st.floats(0.5, 0.9999))
def test_an_ema_with_an_interval_forgets_as_fast_as_one_without(interval, decay):
    values = {"ema_update_interval": interval, "ema_decay": decay}
    found = translate_reference_options(values, CORE)
    converted = float(str(found.values.get("ema_decay", ("", decay))[1]))
    assert converted**interval == pytest.approx(decay, rel=1e-5)


def test_an_optimizer_configuration_becomes_options_and_the_rest_is_named(from_file):
    config = from_file({"optimizer_config": "weight_decay=0.1,beta2=0.95"})
    assert (config.value("adam_weight_decay"), config.value("adam_beta2")) == (0.1, 0.95)
    assert "d_coef: no such setting" in problems(from_file, {"optimizer_config": "d_coef=2"})


@pytest.mark.parametrize(
    ("name", "backend"), [("native-flash", "flash"), ("cudnn", "cudnn"), ("xformers", "auto"), ("flash-attn-3", "auto")]
)
def test_exact_attention_kernels_become_ours(from_file, name, backend):
    assert from_file({"attention_mechanism": name}).value("sdpa_backend") == backend


def test_approximate_attention_is_refused(from_file):
    assert "an approximation" in problems(from_file, {"attention_mechanism": "sageattention"})


def test_a_flag_that_says_off_overrides_the_file(from_file):
    assert from_file({"snr_gamma": 5}, "--snr_gamma=0").value("snr_gamma") is None
    assert from_file({"report_to": "wandb"}, "--report_to=none").value("report_to") == ()
    assert from_file({"max_train_steps": 5}, "--max_train_steps=0").value("max_train_steps") is None
    assert from_file({"model_flavour": "dev"}, "--model_flavour=").value("model_flavour") is None


def test_an_empty_text_is_not_given_but_for_texts_that_may_be_empty(from_file):
    config = from_file({"dynamo_mode": "", "output_dir": "", "validation_prompt": "", "resume_from_checkpoint": ""})
    assert config.changes() == {"resume_from_checkpoint": "none"}


def test_two_spellings_with_different_values_are_a_contradiction(from_file):
    assert "are the same option with different values" in problems(from_file, {"optimizer_beta1": 0.8, "adam_beta1": 0.9})


def test_the_source_of_a_value_is_the_key_in_the_file(from_file):
    assert "optimizer_beta1 in" in from_file({"optimizer_beta1": 0.8}).source("adam_beta1")
