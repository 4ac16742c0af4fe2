"""From the sources to one Config: priorities, notices, all problems at once, and the way back to text."""

import json
import tomllib
from pathlib import Path

import pytest

from smalti.config import CheckpointOptions, DataOptions, OptimizerOptions, RunOptions, TrainingOptions
from smalti.config.core_options.retired import RETIRED
from smalti.config.options import OptionGroup, Options, Schema, option
from smalti.config.resolution import resolve, restore
from smalti.config.toml import as_toml
from smalti.errors import ConfigError, ExitCode
from smalti.plugins import Selection, load_plugins, schema_of

ACCELERATE = "distributed_type: 'NO'\nmixed_precision: {}\nnum_processes: 1\n"


class Vault(Options):
    vault_key: str | None = option(None, help="A secret.", secret=True)
    vault_floor: int = option(0, help="A number.")


VAULT = Schema((OptionGroup(name="vault", title="Vault", options=Vault),))


def problems(configure, *flags, **sources) -> str:
    with pytest.raises(ConfigError) as raised:
        configure(*flags, **sources)
    return str(raised.value)


# --- priorities -----------------------------------------------------------------------------------------------------


def test_flags_beat_the_environment_beats_accelerate_beats_the_file_beats_the_default(configure, write):
    accelerate = write("accelerate.yaml", ACCELERATE.format("bf16"))
    file = write("run.toml", f'mixed_precision = "no"\naccelerate_config = "{accelerate}"')
    plain = write("plain.toml", 'mixed_precision = "no"')
    environment = {"SMALTI_MIXED_PRECISION": "no"}
    sources = [
        configure("--mixed_precision=bf16", file=file, environment=environment),
        configure(file=file, environment=environment),
        configure(file=file),
        configure(file=plain),
        configure(),
    ]
    assert [config.source("mixed_precision").partition(" (")[0] for config in sources] == [
        "flag",
        "environment",
        "Accelerate YAML",
        "file",
        "default",
    ]
    assert [config[TrainingOptions].mixed_precision for config in sources] == ["bf16", "no", "bf16", "no", "auto"]


def test_a_notice_says_which_of_two_different_values_won(configure, write):
    file = write("run.json", '{"--seed": 3}')
    config = configure("--seed", "4", file=file, environment={"SMALTI_SEED": "5"})
    assert config.notices == (
        "seed: '4' from --seed wins over '5' from SMALTI_SEED",
        f"seed: '4' from --seed wins over 3 from --seed in {file}",
    )


def test_two_spellings_of_one_value_are_no_difference(configure, write):
    file = write("run.json", '{"seed": 4, "use_ema": "yes", "lr_scheduler": "COSINE", "learning_rate": "1e-3"}')
    config = configure("--seed=4", "--use_ema", "--lr-scheduler=cosine", "--learning_rate=0.001", file=file)
    assert config.notices == ()


def test_a_former_name_works_with_a_notice(configure):
    config = configure("--save_total_limit=3", environment={"SMALTI_CHECKPOINTING_STEPS": "7"})
    assert (config[CheckpointOptions].checkpoints_total_limit, config[CheckpointOptions].checkpoint_step_interval) == (3, 7)
    assert "save_total_limit is called checkpoints_total_limit here" in config.notices
    assert "checkpointing_steps is called checkpoint_step_interval here" in config.notices


RETIRED_VALUES = [(name, row.value) for name, row in RETIRED.items() if row.value is not None]


@pytest.mark.parametrize(("name", "value"), RETIRED_VALUES)
def test_a_retired_option_with_the_value_that_is_always_used_is_accepted(configure, write, name, value):
    file = write("run.json", json.dumps({name: value, f"--{name}": str(value)}))
    config = configure(f"--{name}={value}", file=file, environment={f"SMALTI_{name.upper()}": str(value)})
    assert (config.changes(), config.notices) == ({}, ())


@pytest.mark.parametrize("name", [name for name, row in RETIRED.items() if row.trains_the_same])
def test_an_old_run_with_a_retired_option_that_changes_no_result_still_resumes(configure, write, name):
    file = write("config.toml", f"{name} = 7\n")
    config = configure(f"--{name}=8", file=file, environment={f"SMALTI_{name.upper()}": "9"})
    assert config.problems == ()
    for where in ("command line", f"environment variable SMALTI_{name.upper()}", str(file)):
        [notice] = [text for text in config.notices if text.startswith(f"{where}: {name}=") or f"{where}: --{name}=" in text]
        assert notice.endswith(RETIRED[name].instead)


@pytest.mark.parametrize("name", [name for name, row in RETIRED.items() if not row.trains_the_same])
def test_another_value_of_a_retired_option_is_a_problem_with_its_place_and_what_to_do(configure, write, name):
    fix = RETIRED[name].instead
    for where, given in (
        ("command line", {"flags": (f"--{name}=-7",)}),
        (f"environment variable SMALTI_{name.upper()}", {"flags": (), "environment": {f"SMALTI_{name.upper()}": "-7"}}),
        (str(write("run.json", json.dumps({name: -7}))), {"flags": (), "file": write("run.json", json.dumps({name: -7}))}),
    ):
        found = problems(configure, *given.pop("flags"), **given)
        assert f"{where}: " in found
        assert "there is no such option any more" in found
        assert fix in found


def test_a_retired_option_that_is_null_or_a_default_of_a_run_is_accepted(configure, write):
    defaults = "".join(f"{name} = -7\n" for name in RETIRED)
    config = configure("--allow_tf32", file=write("run.toml", f"[defaults]\n{defaults}"))
    assert config.notices == ()
    assert configure(file=write("run.json", json.dumps(dict.fromkeys(RETIRED)))).notices == ()


def test_no_option_has_the_name_of_a_retired_one():
    options = schema_of(load_plugins(Selection())).options
    assert RETIRED.keys() & options.keys() == set()


def test_the_singular_of_a_list_needs_no_notice(configure):
    assert configure("--validation_prompts=a").notices == ()


def test_an_option_without_effect_is_noticed(configure):
    assert configure("--ema_decay=0.9").notices == ("ema_decay has no effect unless use_ema",)
    assert configure("--ema_decay=0.9", "--use_ema").notices == ()
    assert configure("--lr_power=2").notices == ("lr_power has no effect unless lr_scheduler == polynomial",)


def test_an_option_of_a_choice_that_is_left_to_the_family_may_have_an_effect(configure):
    assert configure("--flow_sigmoid_scale=2").notices == ()
    unless = ("flow_sigmoid_scale has no effect unless timestep_distribution == logit_normal",)
    assert configure("--flow_sigmoid_scale=2", "--timestep_distribution=uniform").notices == unless


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'seed = 7\nuse_ema = true\nvalidation_prompt = ["a, b"]'),
        ("a.toml", '[run]\nseed = 7\n[training]\nuse_ema = "true"\n[validation]\nvalidation_prompt = "a, b"'),
        ("a.json", '{"seed": 7, "use_ema": true, "validation_prompt": ["a, b"]}'),
        ("a.json", '{"--seed": "7", "--use-ema": "True", "--validation_prompt": "a, b", "--adam_epsilon": null}'),
        ("a.json", '{"--seed": 7, "seed": "7", "USE_EMA": "on", "validation_prompts": "a, b"}'),
        ("a.yaml", "seed: 7\nuse_ema: yes\nvalidation_prompt: 'a, b'"),
        ("a.yaml", "seed: '{env:SEED}'\nuse-ema: 1\nvalidation_prompt: ['{env:LETTER}, b']\nadam_epsilon:"),
    ],
)
def test_one_configuration_can_be_written_in_many_ways(configure, write, name, text):
    config = configure(file=write(name, text), environment={"SEED": "7", "LETTER": "a"})
    values = {name: config.value(name) for name in config.changes()}
    assert values == {"seed": 7, "use_ema": True, "validation_prompt": ("a, b",)}


def test_the_text_false_switches_off(configure, write):
    text = '{"use_ema": "false", "gradient_checkpointing": "False", "rescale_betas_zero_snr": "no"}'
    assert configure(file=write("a.json", text)).changes() == {}


def test_both_spellings_of_a_key_with_different_values_are_an_error(configure, write):
    file = write("a.json", '{"--seed": 1, "seed": 2}')
    assert f"--seed in {file} and seed in {file} are the same option with different values" in problems(configure, file=file)


def test_a_name_and_its_former_name_with_different_values_are_an_error_in_the_environment_too(configure):
    environment = {"SMALTI_SAVE_TOTAL_LIMIT": "1", "SMALTI_CHECKPOINTS_TOTAL_LIMIT": "2"}
    assert "SMALTI_SAVE_TOTAL_LIMIT and SMALTI_CHECKPOINTS_TOTAL_LIMIT are the same option" in problems(
        configure, environment=environment
    )


def test_a_number_is_a_fine_text(configure, write):
    file = write("a.toml", "resume_from_checkpoint = 500\nvalidation_resolution = 512")
    assert configure(file=file)[RunOptions].resume_from_checkpoint == "500"


def test_a_misspelled_section_gets_the_nearest_one(configure, write):
    file = write("a.toml", "[trainig]\nuse_ema = true")
    assert "unknown section [trainig]\n    fix: did you mean [training]?" in problems(configure, file=file)


def test_a_placeholder_without_its_variable_is_a_problem(configure, write):
    told = problems(configure, file=write("a.json", '{"model_family": "{env:FAMILY}"}'))
    assert "{env:FAMILY}: this environment variable is not set" in told


# --- problems -------------------------------------------------------------------------------------------------------


def test_all_problems_of_all_sources_are_told_at_once_with_their_places(configure, write):
    file = write("a.toml", 'sede = 1\nlr_scheduler = "cosin"')
    told = problems(configure, "--adam_beta1=2", "--nothing", file=file, environment={"SMALTI_SEED": "x"})
    assert told.splitlines()[0] == "the configuration has 5 problems:"
    for line in (
        "command line: unknown option --nothing",
        f"{file}: unknown option sede",
        "fix: did you mean seed?",
        "SMALTI_SEED: seed cannot be 'x': input should be a valid integer, unable to parse string as an integer",
        "fix: give an integer >= 0",
        "--adam_beta1: cannot be '2': input should be less than 1",
        f"lr_scheduler in {file}: cannot be 'cosin': not a valid choice",
        "did you mean cosine? give one of constant, constant_with_warmup, linear,",
    ):
        assert line in told


def test_problems_exit_with_code_2_and_with_code_4_if_only_packages_are_missing(configure):
    with pytest.raises(ConfigError) as mixed:
        configure("--fsdp_enable", "--nothing")
    with pytest.raises(ConfigError) as missing:
        configure("--fsdp_enable", "--deepspeed_config=x.json")
    assert (mixed.value.exit_code, missing.value.exit_code) == (ExitCode.USAGE, ExitCode.MISSING_PLUGIN)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"seed": true}', "cannot be True: a switch's value"),
        ('{"learning_rate": false}', "cannot be False: a switch's value"),
        ('{"seed": 1.5}', "cannot be 1.5"),
        ('{"use_ema": "maybe"}', "cannot be 'maybe'"),
        ('{"use_ema": 2}', "cannot be 2"),
        ('{"learning_rate": "nan"}', "cannot be 'nan': input should be a finite number"),
        ('{"validation_prompt": ["a", 3, {}]}', "cannot be ['a', 3, {}]: entry 2:"),
        ('{"data_error_budget": "150 %"}', "cannot be '150 %': a share must be below 100 %"),
        ('{"data_error_budget": 1.5}', "a value of 1 or more is a count and must be a whole number"),
        ('{"model_family": ["toy"]}', "cannot be ['toy']"),
        ('{"datasets": ["a"]}', "cannot be ['a']: entry 0:"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(configure, write, text, told):
    assert told in problems(configure, file=write("a.json", text))


@pytest.mark.parametrize(("text", "value"), [("1 %", 0.01), ("2.5%", 0.025), ("0.5", 0.5), ("3", 3.0)])
def test_an_error_budget_is_a_share_a_percentage_or_a_count(configure, text, value):
    assert configure(f"--data_error_budget={text}")[DataOptions].data_error_budget == pytest.approx(value)


def test_a_mistyped_variable_is_refused_and_an_empty_one_counts_as_not_set(configure):
    assert configure(environment={"SMALTI_SEED": ""})[RunOptions].seed == 42
    told = problems(configure, environment={"SMALTI_LEARNIG_RATE": "1"})
    assert "environment variable SMALTI_LEARNIG_RATE: unknown option learnig_rate" in told
    assert "did you mean learning_rate?" in told


def test_none_on_the_command_line_takes_back_what_the_file_says(configure, write):
    file = write("a.toml", "snr_gamma = 5.0\nmax_train_steps = 10")
    config = configure("--snr_gamma=none", "--max_train_steps", "None", file=file)
    assert config.changes() == {}


# --- secrets --------------------------------------------------------------------------------------------------------


def test_a_secret_in_the_open_is_refused_in_a_file(write):
    with pytest.raises(ConfigError, match="vault_key is a secret") as raised:
        resolve(VAULT, file=write("a.toml", 'vault_key = "hunter2"'), environment={})
    assert "{env:VAULT_KEY}" in str(raised.value)


def test_a_secret_is_shown_nowhere(write):
    file = write("a.toml", 'vault_key = "{env:OTHER}"')
    config = resolve(VAULT, file=file, environment={"OTHER": "hunter2", "SMALTI_VAULT_KEY": "hunter3"})
    assert config[Vault].vault_key == "hunter3"
    shown = (
        json.dumps([config.values(), config.flags(), config.notices, dict(config.sources)]) + as_toml(config) + config.digest
    )
    assert "hunter" not in shown
    assert "vault_key: SMALTI_VAULT_KEY wins over" in config.notices[0]


def test_a_secret_reaches_the_workers_by_their_environment(write):
    file = write("a.toml", 'vault_key = "{env:OTHER}"\nvault_floor = 2')
    config = resolve(VAULT, file=file, environment={"OTHER": "hunter2"})
    there = restore(VAULT, config.shared_values(), {}, environment=config.secrets())
    assert there[Vault] == config[Vault]


class Post(Options):
    letter: str | None = option(None, help="A path, or a text with a seal.", secret=lambda value: "seal:" in str(value))


POST = Schema((OptionGroup(name="post", title="Post", options=Post),))


def test_a_value_that_is_a_secret_is_accepted_from_a_file_and_copied_nowhere(write):
    file = write("a.toml", 'letter = "seal:hunter2"')
    config = resolve(POST, file=file, environment={"SMALTI_LETTER": "seal:hunter3"})
    assert config[Post].letter == "seal:hunter3"
    shown = json.dumps([config.values(), config.flags(), config.notices, dict(config.sources)]) + as_toml(config)
    assert "hunter" not in shown
    assert restore(POST, config.shared_values(), {}, environment=config.secrets())[Post] == config[Post]


def test_a_value_that_is_a_secret_is_refused_on_the_command_line():
    with pytest.raises(ConfigError, match="--letter: other users can read secrets") as raised:
        resolve(POST, ("--letter=seal:hunter2",), environment={})
    assert "hunter" not in str(raised.value)


def test_a_value_of_the_same_option_that_is_no_secret_is_handled_as_any_other(write):
    config = resolve(POST, ("--letter=a.txt",), environment={"SMALTI_LETTER": "seal:hunter2"})
    assert (config.values(), config.secrets()) == ({"letter": "a.txt"}, {})
    there = restore(POST, config.shared_values(), {}, environment={"SMALTI_LETTER": "seal:hunter2"})
    assert there[Post].letter == "a.txt"
    written = resolve(POST, file=write("a.toml", 'letter = "{env:SEAL}"'), environment={"SEAL": "seal:hunter2"})
    assert (written.values(), written.secrets()) == ({"letter": "{env:SEAL}"}, {})


# --- the way back ---------------------------------------------------------------------------------------------------


def test_numbers_without_decimals_are_written_without_a_point(configure):
    text = as_toml(configure("--resolution=64", "--learning_rate=0.5", "--max_grad_norm=2.0"))
    lines = {line.partition("#")[0].rstrip() for line in text.splitlines()}
    assert {"resolution = 64", "learning_rate = 0.5", "max_grad_norm = 2"} <= lines


def test_the_toml_of_a_configuration_gives_it_again(configure, write):
    config = configure(
        "--seed=5",
        "--no_flow_schedule_auto_shift",
        '--datasets=[{"id": "a", "caption_filter": null, "json": {"path": "x"}}, {"id": "b"}]',
        "--report_to=tensorboard,wandb",
        "--snr_gamma=5",
        "--tracker_project_name=none",
    )
    text = as_toml(config)
    again = configure(file=write("again.toml", text))
    assert again.digest == configure(*config.flags()).digest
    assert again[DataOptions].datasets == ({"id": "a", "json": {"path": "x"}}, {"id": "b"})
    assert tomllib.loads(text)["report_to"] == ["tensorboard", "wandb"]


def test_workers_get_the_configuration_of_their_launcher(configure, schema):
    config = configure("--seed=5", "--use_ema", "--machine_rank=1")
    there = restore(schema, json.loads(json.dumps(config.shared_values())), {}, environment={})
    assert (there.digest, there[OptimizerOptions], there[TrainingOptions]) == (
        config.digest,
        config[OptimizerOptions],
        config[TrainingOptions],
    )


def test_values_that_this_version_does_not_know_are_a_problem_for_a_worker(schema):
    with pytest.raises(ConfigError, match=r"launch.json: unknown option sede"):
        restore(schema, {"sede": 3}, {}, environment={})


def test_the_machines_of_one_run_have_one_digest(configure):
    assert configure("--machine_rank=0").digest == configure("--machine_rank=3").digest
    assert configure("--seed=0").digest != configure("--seed=1").digest


# --- what the environment has ---------------------------------------------------------------------------------------

SECRET = {"TOKEN": "a-secret-token", "WHO": "bob"}


@pytest.mark.parametrize("source", ["file", "flag", "environment"])
def test_what_the_environment_has_is_used_and_written_nowhere(configure, schema, write, source):
    text = "{env:TOKEN} of {env:WHO}"
    given = {
        "file": {"file": write("a.json", json.dumps({"tracker_project_name": text}))},
        "flag": {},
        "environment": {"environment": {**SECRET, "SMALTI_TRACKER_PROJECT_NAME": text}},
    }[source]
    flags = [f"--tracker_project_name={text}"] if source == "flag" else []
    config = configure(*flags, **{"environment": SECRET, **given})
    assert config.value("tracker_project_name") == "a-secret-token of bob"
    written = json.dumps([config.values(), config.flags(), config.notices, dict(config.sources)]) + as_toml(config)
    assert ("a-secret-token" in written, "{env:TOKEN} of {env:WHO}" in written) == (False, True)
    on_rank = restore(schema, json.loads(json.dumps(config.shared_values())), {}, environment=SECRET)
    assert (on_rank.value("tracker_project_name"), on_rank.digest) == ("a-secret-token of bob", config.digest)


def test_a_rank_without_the_variable_names_it(configure, schema):
    config = configure("--tracker_project_name={env:TOKEN}", environment=SECRET)
    with pytest.raises(ConfigError, match=r"launch\.json: \{env:TOKEN\}: this environment variable is not set"):
        restore(schema, config.shared_values(), {}, environment={})


def test_the_digest_does_not_depend_on_what_the_environment_has(configure):
    flag = "--tracker_project_name={env:TOKEN}"
    digests = {configure(flag, environment={"TOKEN": token}).digest for token in ("one-secret-token", "another-one")}
    assert len(digests) == 1


def test_messages_show_what_was_written(configure, write):
    file = write("a.json", '{"resume_from_checkpoint": "{env:TOKEN}", "tracker_project_name": "{env:TOKEN}"}')
    assert "a-secret-token" not in str(configure("--tracker_project_name=x", file=file, environment=SECRET).notices)
    long = {"TOKEN": "a-secret-token" * 30}
    told = problems(configure, file=file, environment=long)
    assert ("a-secret-token" in told, ": cannot be '{env:TOKEN}'" in told) == (False, True)


def test_what_is_said_is_masked_and_short_words_are_not(configure):
    config = configure("--validation_prompt={env:TOKEN} {env:WHO}", environment=SECRET)
    assert config.masked({"a": ["bob said a-secret-token"], "path": Path("/x/a-secret-token")}) == {
        "a": ["bob said {env:TOKEN}"],
        "path": "/x/{env:TOKEN}",
    }


def test_what_the_file_of_the_datasets_refers_to_is_masked_too(configure, schema, write):
    entries = '[{"id": "a", "type": "s3", "aws_secret_access_key": "{env:TOKEN}"}]'
    config = configure(f"--data_backend_config={write('data.json', entries)}", environment=SECRET)
    on_rank = restore(schema, config.shared_values(), {}, environment=SECRET)
    assert [each.masked("s3 said a-secret-token") for each in (config, on_rank)] == ["s3 said {env:TOKEN}"] * 2


# --- what a run keeps of the version that began it ------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path):
    """begun({...}) -> the directory of a run that has made a step, with this launch.json."""

    def make(launch: dict[str, object]) -> Path:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run/launch.json").write_text(json.dumps(launch))
        (tmp_path / "run/events.jsonl").write_text('{"t": 1.0, "type": "step", "step": 1}\n')
        return tmp_path / "run"

    return make


def test_a_run_keeps_the_defaults_of_the_version_that_began_it(configure, begun):
    run = begun({"defaults": {"validation_batch_size": 7, "seed": 42, "gone": 1, "adam_beta1": 0.5, "allow_tf32": True}})
    config = configure(f"--output_dir={run}", "--adam_beta1=0.6")
    assert [config.value(name) for name in ("validation_batch_size", "seed", "adam_beta1")] == [7, 42, 0.6]
    assert config.notices == ("validation_batch_size: 7, the default when the run began; it is 8 now",)
    assert config.given().keys() == {"output_dir", "adam_beta1"}


def test_a_new_run_has_the_defaults_of_this_version(configure, begun):
    run = begun({"defaults": {"validation_batch_size": 7}})
    (run / "events.jsonl").unlink()
    assert configure(f"--output_dir={run}").value("validation_batch_size") == 8


def test_a_run_of_a_version_that_kept_none_has_the_defaults_of_then(configure, begun):
    """Such a launch.json has all values; where one is not the default of then, it was given."""
    run = begun({"values": {"mixed_precision": "bf16", "timestep_distribution": "mode"}})
    config = configure(f"--output_dir={run}")
    assert config.value("mixed_precision") == "bf16"
    assert config.value("timestep_distribution") is None


@pytest.mark.parametrize("launch", [{"values": {"seed": 42}}, {"defaults": {"seed": 42}}])
def test_a_run_of_a_version_without_an_option_continues_as_that_version_did(configure, begun, write, launch):
    run = begun(launch)
    assert configure(f"--output_dir={run}").value("allow_tf32") is False
    assert configure(f"--output_dir={run}", "--allow_tf32").value("allow_tf32") is True
    assert configure(file=write("kept.toml", "seed = 5\n[defaults]\nseed = 42\n")).value("allow_tf32") is False
    begun({"values" if "values" in launch else "defaults": {"allow_tf32": True}})
    assert configure(f"--output_dir={run}").value("allow_tf32") is True


def test_the_configuration_of_a_run_carries_its_defaults_to_other_directories(configure, begun, write, tmp_path):
    run = begun({"defaults": {"validation_batch_size": 7, "allow_tf32": True}})
    text = as_toml(configure(f"--output_dir={run}", "--seed=5"), defaults=True)
    top, _, defaults = text.partition("[defaults]")
    assert (
        "seed = 5" in top,
        "validation_batch_size" in top,
        "validation_batch_size = 7" in defaults,
        "\nseed =" in defaults,
    ) == (
        1,
        0,
        1,
        0,
    )
    again = configure(f"--output_dir={tmp_path / 'other'}", "--adam_beta1=0.6", file=write("kept.toml", text))
    assert [again.value(name) for name in ("validation_batch_size", "seed", "adam_beta1")] == [7, 5, 0.6]
    assert [notice for notice in again.notices if "adam_beta1" in notice] == []


def test_kept_defaults_of_plugins_that_are_gone_do_no_harm(configure, write):
    file = write("kept.toml", "seed = 5\n[defaults]\nfsdp_enable = false\n")
    assert configure(file=file).value("seed") == 5


def test_it_is_told_where_a_run_does_not_say_its_defaults_any_more(configure, begun):
    run = begun({})
    (run / "launch.json").write_text("{")
    assert "launch.json is damaged" in configure(f"--output_dir={run}").notices[0]
    (run / "launch.json").unlink()
    assert "launch.json is missing, so defaults are those of this version" in configure(f"--output_dir={run}").notices[0]


def test_a_switch_of_another_trainer_that_disables_something_is_answered_with_the_one_to_turn_off(configure, write):
    with pytest.raises(ConfigError, match=r"unknown option --disable-ema\n *fix: --no_use_ema$"):
        configure("--disable-ema")
    with pytest.raises(ConfigError, match=r"unknown option disable_ema\n *fix: set use_ema to false$"):
        configure(file=write("external.toml", "disable_ema = true"))


@pytest.mark.parametrize("text", ['{"a": 1}', '"\x1f', '"\x7f', "\"'", '"\n'])
def test_any_text_can_be_written_as_toml(configure, write, text):
    config = configure(f"--resume_from_checkpoint={text}")
    assert configure(file=write("again.toml", as_toml(config))).values() == config.values()
