"""Options in SimpleTuner's spelling: what works, what has no effect, what is refused, and how each is reported."""

import json

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from smalti.config import DataOptions, ObjectiveOptions, RunOptions, Schema
from smalti.config.core_options import GROUPS
from smalti.config.known_packages import PLUGINS
from smalti.config.resolution import resolve
from smalti.config.toml import as_toml
from smalti.errors import ConfigError
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti_migrate.simpletuner.rules import is_neutral
from smalti_migrate.simpletuner.spelling import DEFAULTS
from smalti_migrate.simpletuner.table import KEYS, PREFIXES
from smalti_migrate.simpletuner.translation import translate_reference_options

CORE = Schema(GROUPS)
NOTHING = Schema(())
"""No options: every row of the table speaks."""


def problems(configure, *flags, **sources) -> str:
    with pytest.raises(ConfigError) as raised:
        configure(*flags, **sources)
    return str(raised.value)


@pytest.fixture(scope="module")
def schema() -> Schema:
    """The options of the core, of this package, and of others that share names with SimpleTuner."""
    return schema_of(load_plugins(Selection(only=("cache", "toy", "trackers", "migrate", "validation"))))


@pytest.fixture
def configure(schema):
    """configure("--flag=1", file=PATH, environment={...}) -> Config, as if nothing else were set."""
    return lambda *flags, file=None, environment=None: resolve(schema, flags, file=file, environment=environment or {})


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
        found = translate_reference_options({key: value}, NOTHING)
        assert not found.problems
        if rule.outcome != "same":
            assert (dict(found.values), found.notices, dict(found.rest)) == ({}, (), {})


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first text that hypothesis makes reads its tables of Unicode
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), st.none() | st.booleans() | st.floats(allow_nan=False) | st.text()))
def test_no_key_is_lost_whatever_its_value(values):
    found = translate_reference_options(values, NOTHING)
    spoken = {name for keys, _ in found.notices for name in keys.split(", ")} | {problem.where for problem in found.problems}
    spoken |= {key for key, _ in found.values.values()} | found.rest.keys()
    silent = {key for key in values if key not in spoken}
    assert all(is_neutral(values[key], KEYS[key]) or KEYS[key].convert for key in silent)


def test_no_row_speaks_about_an_option_that_exists_but_those_of_values_that_differ():
    schema, optional = schema_of(load_plugins()), PLUGINS["hub"].options  # a package that most do without
    rows = {key: rule for key, rule in KEYS.items() if key not in optional}
    assert [key for key, rule in rows.items() if (schema.find(key) is None) == (rule.outcome == "same")] == []
    names = {rule.option for rule in KEYS.values() if rule.outcome == "renamed" and " " not in rule.option}
    assert [name for name in names if schema.find(name) is None] == []
    assert [each.option for each in DEFAULTS if each.option not in schema.options] == []


@pytest.mark.parametrize("key", ["network_dim", "unet_lr", "caption_extension", "train_data_dir", "output_name"])
def test_a_name_of_another_meaning_is_not_suggested(from_file, key):
    assert f"unknown option {key}\n    fix: remove it, or search the options by a word" in problems(from_file, {key: 1})


def test_keys_that_are_comments_are_accepted(from_file):
    assert from_file({"_comment": "mine", "// note": 1, "#": None}).changes() == {}


def test_released_gradients_have_another_name():
    schema = schema_of(load_plugins(Selection(only=("migrate", "updates"))))
    found = translate_reference_options({"optimizer_release_gradients": "true"}, schema)
    assert (dict(found.values), found.problems) == ({"release_gradients": ("optimizer_release_gradients", "true")}, [])
    off = translate_reference_options({"optimizer_release_gradients": False}, schema)
    assert not off.values
    assert not off.notices


# --- through the configuration --------------------------------------------------------------------------------------


def test_keys_without_an_effect_are_one_notice_for_each_reason(from_file):
    notices = from_file({"vae_batch_size": 4, "max_workers": 8, "tracker_run_name": "a"}, "--defaults_from=smalti").notices
    assert [notice.replace("\\", "/").partition(" in ")[0] for notice in notices] == [
        "vae_batch_size, max_workers",
        "tracker_run_name",
    ]
    assert "no effect: chosen automatically" in notices[0]


def test_a_flag_of_simpletuner_that_asks_for_what_is_done_anyway_is_accepted_with_a_notice(configure):
    [notice] = configure("--preserve_data_backend_cache").notices
    assert notice.startswith("--preserve_data_backend_cache in command line: no effect: folders are listed at every start")


def test_all_that_is_refused_is_reported_at_once_with_what_to_do(from_file, write):
    told = problems(from_file, {"controlnet": True, "lora_type": "lycoris", "musubi_blocks_to_swap": 8, "colour": 1})
    for text in (
        "controlnet = true: ControlNet is not supported\n    fix: set it to false",
        'lora_type = "lycoris": lycoris_config, the file with its settings, is missing\n    fix: remove it, or set lora_kind',
        "musubi_blocks_to_swap = 8: block swap is not supported",
        "unknown option colour",
    ):
        assert text in told


def test_weights_that_stay_in_host_memory_are_those_of_a_lora():
    values = {"ramtorch": True, "ramtorch_text_encoder": True, "find_unused_parameters": True}
    found = translate_reference_options({**values, "model_type": "lora"}, CORE)
    assert (found.values["stream_base"], found.problems) == (("ramtorch", True), [])
    (problem,) = translate_reference_options({**values, "model_type": "full"}, CORE).problems
    assert "only the frozen weights of a LoRA are streamed" in problem.message


def test_values_that_say_off_are_accepted_from_every_source(configure, write):
    file = write(
        "off.json",
        '{"push_to_hub": false, "--compress-disk-cache": null, "hub_model_id": "", "validation_lycoris_strength": 1}',
    )
    config = configure(
        "--defaults_from=smalti",
        "--controlnet=false",
        "--musubi_blocks_to_swap",
        "0",
        file=file,
        environment={"SMALTI_USE_DORA": "no"},
    )
    assert config.notices == ()
    assert config.changes() == {"defaults_from": "smalti"}


def test_an_unknown_option_that_is_null_is_a_spelling_mistake_all_the_same(from_file):
    assert "unknown option learning_rat\n    fix: did you mean learning_rate?" in problems(from_file, {"learning_rat": None})


# --- other names and other values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "group", "expected"),
    [
        ({"flow_use_beta_schedule": True}, ObjectiveOptions, {"timestep_distribution": "beta"}),
        ({"flow_use_uniform_schedule": "true"}, ObjectiveOptions, {"timestep_distribution": "uniform"}),
        ({"flow_schedule_shift": 0}, ObjectiveOptions, {"flow_schedule_shift": 1}),
        ({"flow_schedule_shift": 0.0, "flow_schedule_auto_shift": True}, ObjectiveOptions, {"flow_schedule_shift": None}),
        ({"snr_gamma": 0}, ObjectiveOptions, {"snr_gamma": None}),
        ({"caption_strategy": "instance_prompt", "instance_prompt": "a"}, DataOptions, {"caption_strategy": "instanceprompt"}),
        ({"num_train_epochs": 0, "max_train_steps": 10}, RunOptions, {"num_train_epochs": None, "max_train_steps": 10}),
        ({"num_train_epochs": 3, "max_train_steps": "0"}, RunOptions, {"num_train_epochs": 3, "max_train_steps": None}),
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


# --- whole files ----------------------------------------------------------------------------------------------------

MARKS = {"lora_type": "standard", "vae_batch_size": 1}
"""Two keys that only SimpleTuner has."""


def test_a_file_with_two_keys_of_simpletuner_gets_its_defaults_and_says_so_once(from_file):
    config = from_file({**MARKS, "max_grad_norm": 0.01, "model_family": "flux", "max_train_steps": 5, "use_ema": True})
    assert (config.value("gradient_checkpointing"), config.value("ema_device"), config.value("train_batch_size")) == (
        True,
        "cpu",
        4,
    )
    assert (config.value("max_grad_norm"), config.value("flow_schedule_shift")) == (0.01, 3.0)
    (notice,) = [notice for notice in config.notices if "SimpleTuner's defaults are used" in notice]
    assert "which has lora_type, vae_batch_size" in notice
    assert 'ema_device = "cpu"' in notice
    assert "--defaults_from=smalti" in notice
    assert config.source("ema_device").startswith("SimpleTuner's default (")


def test_a_file_of_simpletuner_that_names_no_model_starts_from_simpletuners_own(from_file):
    config = from_file({**MARKS, "model_family": "z_image"})
    assert config.value("pretrained_model_name_or_path") == "Tongyi-MAI/Z-Image-Turbo"
    named = from_file({**MARKS, "model_family": "z_image", "model_flavour": "base"})
    assert named.value("pretrained_model_name_or_path") is None
    released = from_file({**MARKS, "model_family": "anima"})
    assert released.value("pretrained_model_name_or_path") == "circlestone-labs/Anima-Base-v1.0-Diffusers"
    told = problems(from_file, {**MARKS, "model_family": "anima", "model_flavour": "preview-3"})
    assert "a preview of Anima, in another layout than base-1.0, is not supported" in told
    second = from_file({**MARKS, "model_family": "sd2x"})
    assert second.value("pretrained_model_name_or_path") == "bghira/pseudo-flex-v2"
    assert second.value("rescale_betas_zero_snr") is True


def test_one_key_of_simpletuner_in_another_file_changes_no_default(from_file, configure, write):
    assert from_file({"vae_batch_size": 1, "model_family": "flux"}).changes() == {"model_family": "flux"}
    sections = write("own.toml", 'vae_batch_size = 1\nlora_type = "standard"\n[training]\nuse_ema = true\n')
    assert configure(file=sections).value("ema_device") == "accelerator"


def test_a_file_of_an_earlier_version_is_not_taken_for_one_of_simpletuner(from_file):
    config = from_file({"dataloader_prefetch": 4, "eval_timesteps": 7, "model_family": "toy"})
    assert config.changes() == {"model_family": "toy"}
    assert any("the loss is always measured at 5 noise levels" in notice for notice in config.notices)


def test_the_option_decides_whose_defaults_are_used(from_file):
    assert from_file(MARKS, "--defaults_from=smalti").value("validation_num_inference_steps") == 25
    assert from_file({}, "--defaults_from=simpletuner").value("validation_num_inference_steps") == 30


@pytest.mark.parametrize(
    ("values", "option", "expected"),
    [
        ({"model_family": "sdxl"}, "flow_schedule_shift", None),
        ({"model_family": "flux", "flow_schedule_auto_shift": True}, "flow_schedule_shift", None),
        ({"model_family": "flux"}, "num_train_epochs", 1),
        ({"model_family": "flux", "max_train_steps": 0, "num_train_epochs": 0}, "num_train_epochs", None),
        ({"model_family": "flux", "max_train_steps": 9, "num_train_epochs": 0}, "num_train_epochs", None),
        ({"model_family": "sd3"}, "pretrained_model_name_or_path", "stabilityai/stable-diffusion-3.5-medium"),
        ({"model_family": "sd3", "model_flavour": "large"}, "pretrained_model_name_or_path", None),
        ({"model_family": "flux2", "model_flavour": "klein-9b"}, "model_flavour", "klein-base-9b"),
        ({"lr_scheduler": "polynomial", "learning_rate": 4e-5}, "lr_end_ratio", pytest.approx(0.01)),
        ({"lr_scheduler": "constant", "learning_rate": 4e-5}, "lr_end_ratio", 0.0),
        ({"model_family": "flux", "snr_gamma": 5}, "snr_gamma", None),
        ({"model_family": "sdxl", "loss_type": "huber"}, "huber_schedule", "snr"),
        ({"model_family": "sdxl"}, "huber_schedule", "constant"),
        ({"model_family": "sdxl", "snr_gamma": 5}, "snr_gamma", 5),
        ({"cache_dir": "downloads"}, "cache_dir", None),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 50}, "lr_cosine_steps", 50),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 50}, "lr_warmup_steps", 0),
        ({"lr_scheduler": "cosine"}, "lr_cosine_steps", 1000),
    ],
)
def test_a_value_means_in_its_file_what_it_means_in_simpletuner(from_file, values, option, expected):
    assert from_file({**MARKS, **values}).value(option) == expected


def test_what_means_something_else_in_the_file_is_reported(from_file):
    values = {
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 9,
        "cache_dir": "a",
        "model_family": "flux",
        "snr_gamma": 5,
    }
    notices = "\n".join(from_file({**MARKS, **values}).notices)
    for text in (
        "lr_cosine_steps = 9 here",
        "it is the folder of downloads",
        "min-SNR weighting is not",
    ):
        assert text in notices


def test_other_files_keep_the_meaning_of_this_trainer(from_file):
    config = from_file({"lr_scheduler": "cosine", "lr_warmup_steps": 9, "cache_dir": "a"})
    assert (config.value("lr_cosine_steps"), config.value("lr_warmup_steps"), str(config.value("cache_dir"))) == (None, 9, "a")


def test_a_run_keeps_the_defaults_of_simpletuner(from_file, configure, tmp_path, write):
    config = from_file({**MARKS, "model_family": "toy", "max_train_steps": 5, "use_ema": True})
    assert config.defaults()["ema_device"] == "cpu"
    assert "ema_device" not in config.given()
    kept = write("kept.toml", as_toml(config, defaults=True))
    assert configure(file=kept).value("ema_device") == "cpu"


def test_a_value_that_is_the_default_here_overrides_a_default_of_simpletuner_for_good(from_file, configure, write):
    config = from_file({**MARKS, "max_grad_norm": 1.0, "model_family": "toy"}, "--caption_dropout_probability=0.1")
    again = configure(file=write("kept.toml", as_toml(config, defaults=True)))
    assert [again.value(name) for name in ("max_grad_norm", "caption_dropout_probability", "train_batch_size")] == [1.0, 0.1, 4]


@pytest.mark.parametrize(
    ("family", "flavour", "expected"),
    [
        ("auraflow", "v0.3", {"model_flavour": "0.3"}),
        ("qwen_image", "v1.0", {"model_flavour": "image"}),
        ("z_image", "base", {"model_flavour": "base"}),
        ("flux", "dev", {"model_flavour": "dev"}),
        ("longcat_image", "final", {"model_flavour": "final"}),
        ("pixart_sigma", "600M-1024", {"model_flavour": "sigma-1024", "model_family": "pixart"}),
        ("sana", "sana1.5-1.6b-1024", {"pretrained_model_name_or_path": "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers"}),
    ],
)
def test_names_of_models_are_those_of_this_trainer(from_file, family, flavour, expected):
    changes = from_file({"model_family": family, "model_flavour": flavour}).changes()
    assert {"model_family": family, **expected} == changes


@pytest.mark.parametrize(
    ("family", "flavour"), [("flux", "kontext"), ("longcat_image", "edit"), ("qwen_image", "edit-v1"), ("sdxl", "refiner-1.0")]
)
def test_models_that_are_trained_in_another_way_are_refused_by_name(from_file, family, flavour):
    told = problems(from_file, {"model_family": family, "model_flavour": flavour})
    assert f'model_flavour = "{flavour}"' in told
    assert "is not supported" in told


@pytest.mark.parametrize("name", ["sine", "cosine_with_restarts"])
def test_schedules_that_are_not_there_are_refused_with_the_nearest(from_file, configure, name):
    assert "the nearest one is cosine" in problems(from_file, {"lr_scheduler": name})
    told = problems(configure, f"--lr_scheduler={name}")
    assert told.count("fix:") == 1, "one mistake is one problem"
    assert "fix: set lr_scheduler to cosine" in told
    assert from_file({"lr_scheduler": "cosine_with_warmup"}).value("lr_scheduler") == "cosine"


def test_prompts_that_simpletuner_brings_are_left_out_with_a_note(from_file, configure):
    found = from_file({**MARKS, "validation_prompt_library": True, "user_prompt_library": "prompts.json"})
    assert str(found.value("validation_prompt_library")) == "prompts.json"
    found = from_file({**MARKS, "validation_prompt_library": "true"})
    assert found.value("validation_prompt_library") is None
    assert any("smalti brings no prompts of its own" in notice for notice in found.notices)
    assert configure("--validation_prompt_library=true").value("validation_prompt_library") is None
    assert not any("no prompts of its own" in note for note in from_file({"validation_prompt_library": False}).notices)


def test_a_resumed_run_says_that_its_defaults_are_those_of_simpletuner(from_file, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "launch.json").write_text(json.dumps({"defaults": {"train_batch_size": 4, "adam_beta1": 0.5}}))
    (run / "events.jsonl").write_text('{"t": 1.0, "type": "step", "step": 1}\n')
    notices = from_file({**MARKS, "output_dir": str(run)}).notices
    assert any("SimpleTuner's defaults are used" in notice and "train_batch_size = 4" in notice for notice in notices)
    assert any(notice.startswith("adam_beta1: 0.5, the default when the run began") for notice in notices)


def test_a_feature_of_which_only_the_beginning_is_known_is_refused_where_it_is_enabled(from_file):
    assert from_file({"twinflow_enabled": False, "twinflow_delta_t": 0.01}, "--defaults_from=smalti").notices != ()
    assert "twinflow_enabled = true: TwinFlow is not supported" in problems(from_file, {"twinflow_enabled": True})


def test_what_is_shown_of_a_file_gives_the_same_configuration(from_file, configure, write):
    values = {
        "model_family": "flux",
        "optimizer_beta2": 0.9,
        "flow_use_beta_schedule": True,
        "max_grad_norm": 1.0,
        "use_ema": True,
    }
    config = from_file({**MARKS, **values, "lr_scheduler": "cosine", "lr_warmup_steps": 5, "report_to": "none"})
    again = configure(file=write("shown.toml", as_toml(config)))
    assert again.values() == config.values()
    assert not any("SimpleTuner" in notice for notice in again.notices)
