"""`smalti deepspeed` and `smalti cache` with the folders of DeepSpeed, and the functions behind them that a page calls too."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from smalti import ConfigError, UserError
from smalti.config.resolution import resolve
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.schema import schema_of
from smalti_deepspeed.builder import FIELDS, Choices, build, choices_of
from smalti_deepspeed.templates import apply_template, save_template, template, templates
from support.commands import commands

SCHEMA = schema_of(load_plugins(Selection(only=("deepspeed",))))
ZERO2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("SMALTI_PLUGINS", "deepspeed,cache")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def run(capsys):
    """run(*words) -> (exit code, stdout, stderr) of `smalti WORDS`."""
    return commands(capsys)


@pytest.fixture
def written(tmp_path):
    """written(content, name) -> the path of a new file."""

    def write(content: object, name: str = "zero.json") -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


# --- build ----------------------------------------------------------------------------------------------------------

CHOICES = (
    Choices(),
    Choices(stage=1, optimizer="Lamb", scheduler="WarmupLR", warmup_steps=5),
    Choices(stage=2, offload_optimizer="cpu", learning_rate=1e-5, gradient_clipping=0.5, gradient_accumulation_steps=4),
    Choices(stage=3, offload_optimizer="nvme", offload_param="nvme", nvme_path="/scratch", scheduler="WarmupCosineLR"),
    Choices(stage=3, offload_param="cpu", scheduler="WarmupDecayLR", optimizer="Lion"),
)


@pytest.mark.parametrize("choices", CHOICES)
def test_what_is_built_is_a_configuration_of_a_run(choices):
    config = resolve(
        SCHEMA,
        ["--accelerate_config=none", "--max_train_steps=9", f"--deepspeed_config={json.dumps(build(choices))}"],
        environment={},
    )
    wanted = {"lr_warmup_steps": choices.warmup_steps, "max_grad_norm": choices.gradient_clipping}
    assert {name: config.value(name) for name, value in wanted.items() if value is not None} == {
        name: value for name, value in wanted.items() if value is not None
    }
    assert config.notices == ()


def test_every_choice_is_a_field_and_every_default_is_read_back():
    assert [field.name for field in FIELDS] == list(Choices.__dataclass_fields__)
    assert choices_of({field.name: field.default for field in FIELDS}) == Choices()


@pytest.mark.parametrize(
    ("choices", "place"),
    [
        (Choices(stage=2, offload_param="cpu"), "offload_param"),
        (Choices(nvme_path="/scratch"), "nvme_path"),
        (Choices(optimizer="Lamb", offload_optimizer="cpu"), "offload_optimizer"),
        (Choices(gradient_accumulation_steps=0), "gradient_accumulation_steps"),
    ],
)
def test_choices_that_make_no_sense_are_refused(choices, place):
    with pytest.raises(ConfigError) as raised:
        build(choices)
    assert [problem.where for problem in raised.value.problems] == [place]


def test_flags_make_json_on_the_screen_or_in_a_new_file(run, tmp_path):
    flags = ("--stage=3", "--offload_param=CPU", "--optimizer=adamw", "--learning_rate=1e-5")
    code, reported, _ = run("deepspeed", "build", *flags)
    document = json.loads(reported)
    assert (code, document["optimizer"]["type"], document["optimizer"]["params"]["lr"]) == (0, "AdamW", 1e-5)
    file = tmp_path / "new.json"
    assert run("deepspeed", "build", *flags, "--to", file)[:2] == (0, "")
    assert json.loads(file.read_text()) == document
    code, _, complaint = run("deepspeed", "build", "--stage=1", "--to", file)
    assert (code, "already exists" in complaint, json.loads(file.read_text())) == (2, True, document)
    assert run("deepspeed", "build", "--stage=1", "--to", file, "--force")[0] == 0
    assert json.loads(file.read_text())["zero_optimization"] == {"stage": 1}


def test_flags_that_cannot_be_are_told_all_at_once(run):
    code, _, reported = run("deepspeed", "build", "--stage=4", "--optimizer=Lamp", "--gradient_clipping=much")
    assert code == 2
    for each in ("stage cannot be '4'", "did you mean Lamb?", "gradient_clipping cannot be 'much'"):
        assert each in reported


@pytest.mark.parametrize("flag", ["--learning_rate=nan", "--gradient_clipping=inf", "--warmup_steps=5"])
def test_what_is_built_is_json_and_holds_all_that_was_chosen(run, flag):
    code, reported, complaint = run("deepspeed", "build", flag)
    assert (code, reported, flag.strip("-").partition("=")[0] in complaint) == (2, "", True)


def test_on_a_terminal_it_asks(tmp_path):
    screen, keyboard = pty.openpty()
    os.write(screen, "\n".join(["3", "cpu", "gpu", "none", "", "2e-5", *[""] * 4, ""]).encode() + b"\n")
    command = [sys.executable, "-m", "smalti", "deepspeed", "build"]
    done = subprocess.run(command, stdin=keyboard, capture_output=True, text=True, timeout=60)
    os.close(screen)
    os.close(keyboard)
    document = json.loads(done.stdout)
    assert document["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert document["optimizer"]["params"]["lr"] == 2e-5
    assert "offload_param cannot be 'gpu'" in done.stderr


# --- check ----------------------------------------------------------------------------------------------------------


def test_a_sound_file_is_told_to_be_sound_with_what_it_means(run, written):
    file = written({**ZERO2, "gradient_clipping": 0.5, "optimizer": {"type": "cpuadam"}})
    code, reported, _ = run("deepspeed", "check", file, "--json")
    report = json.loads(reported)
    assert (code, report["valid"], report["problems"]) == (0, True, [])
    assert report["options"]["max_grad_norm"] == {"value": 0.5, "key": "gradient_clipping"}
    assert ["cpuadam" in notice and "AdamW" in notice for notice in report["notices"]] == [True]


def test_a_syntax_error_is_told_with_line_and_column(run, written):
    file = written('{"bf16": {}\n "zero_optimization": {}}')
    code, reported, _ = run("deepspeed", "check", file)
    assert (code, f"{file}:2:2: this is not JSON" in reported) == (2, True)


def test_a_misspelt_key_is_told_with_the_nearest(run, written):
    code, reported, _ = run("deepspeed", "check", written({**ZERO2, "gradient_clip": 1}), "--json")
    (problem,) = json.loads(reported)["problems"]
    assert (code, problem["where"], problem["fix"]) == (2, "gradient_clip", "did you mean gradient_clipping?")


def test_a_value_that_no_run_could_have_is_told(run, written):
    file = written({**ZERO2, "gradient_clipping": -1, "gradient_accumulation_steps": "four"})
    code, reported, _ = run("deepspeed", "check", file, "--json")
    assert (code, [each["where"] for each in json.loads(reported)["problems"]]) == (
        2,
        ["gradient_accumulation_steps", "gradient_clipping"],
    )


def test_standard_input_may_begin_with_a_mark_of_its_encoding_and_may_be_closed():
    words = [sys.executable, "-m", "smalti", "deepspeed", "check", "-"]
    text = json.dumps(ZERO2).encode("utf-8-sig")
    assert subprocess.run(words, input=text, capture_output=True, timeout=60).returncode == 0
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *words], capture_output=True, text=True, timeout=60)
    assert (closed.returncode, "standard input is closed" in closed.stderr) == (2, True)


def test_an_optimizer_that_cannot_train_is_told_with_another_one(run, written):
    code, reported, _ = run("deepspeed", "check", written({**ZERO2, "optimizer": {"type": "OneBitAdam"}}), "--json")
    (problem,) = json.loads(reported)["problems"]
    assert (code, problem["where"], problem["fix"]) == (2, "optimizer.type", '"type": "Adam"')


def test_with_a_run_contradictions_are_told_and_else_the_whole_configuration(run, written):
    file, config = (
        written({**ZERO2, "gradient_accumulation_steps": 4}),
        written("gradient_accumulation_steps = 2\n", "config.toml"),
    )
    code, reported, _ = run("deepspeed", "check", file, config)
    assert (code, ": is 2, and" in reported, "says 4" in reported) == (2, True, True)
    code, reported, _ = run("deepspeed", "check", file, "--num_processes=8", "--json")
    assert (code, json.loads(reported)["complete"]["train_batch_size"]) == (0, 32)


# --- templates ------------------------------------------------------------------------------------------------------


def test_a_template_is_kept_listed_shown_and_removed(run, written, tmp_path):
    file = written({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}})
    assert run("deepspeed", "templates", "save", "big-model", file)[0] == 0
    listed = json.loads(run("deepspeed", "templates", "ls", "--json")[1])
    assert listed["folder"] == str(tmp_path / "settings" / "smalti" / "deepspeed")
    assert [(each["name"], each["summary"]) for each in listed["templates"]] == [("big-model", "ZeRO 3, parameters on cpu")]
    assert json.loads(run("deepspeed", "templates", "show", "big-model")[1]) == json.loads(file.read_text())
    assert run("deepspeed", "templates", "rm", "big-model")[0] == 0
    assert templates() == []


def test_a_user_without_a_home_is_told_so(run, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is where nobody is known
    code, _, reported = run("deepspeed", "templates", "ls")
    assert (code, "set HOME or XDG_CONFIG_HOME" in reported) == (2, True)


def test_a_template_is_not_replaced_by_surprise(run, written):
    save_template("mine", ZERO2)
    other = written({"zero_optimization": {"stage": 1}})
    code, _, reported = run("deepspeed", "templates", "save", "mine", other)
    assert (code, "already" in reported, template("mine").document) == (2, True, ZERO2)
    assert run("deepspeed", "templates", "save", "mine", other, "--force")[0] == 0
    assert template("mine").document == {"zero_optimization": {"stage": 1}}


@pytest.mark.parametrize("name", ["../escape", "", "a/b", ".hidden", "x" * 65, "a.json"])
def test_a_name_that_could_leave_the_folder_is_refused(name):
    with pytest.raises(UserError, match="cannot be the name of a template"):
        save_template(name, ZERO2)


def test_what_is_no_sound_configuration_is_not_kept(run, written):
    code, _, reported = run("deepspeed", "templates", "save", "bad", written({"zero_optimization": {"stage": 5}}))
    assert (code, "zero_optimization.stage: cannot be 5" in reported, templates()) == (2, True, [])


def test_a_broken_template_is_listed_as_such_and_can_be_removed(run):
    save_template("mine", ZERO2).path.write_text("{")
    (found,) = templates()
    assert "this is not JSON" in found.summary
    assert run("deepspeed", "templates", "rm", "mine")[0] == 0


def test_a_template_that_is_not_there_is_told_with_the_nearest(run):
    save_template("zero-two", ZERO2)
    code, _, reported = run("deepspeed", "templates", "show", "zerotwo")
    assert (code, "did you mean zero-two?" in reported) == (2, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", "# the rate\nlearning_rate = 1e-3 # mine\n"),
        ("c.toml", 'deepspeed_config = "old.json" # mine\nlearning_rate = 1e-3\n'),
        ("c.json", '{"--learning_rate":   1e-3\n}\n'),
        ("c.json", '{"--learning_rate": 1e-3, "--deepspeed_config": {"zero_optimization": {"stage": 1}}}\n'),
        ("c.yaml", "# the rate\nlearning_rate: 0.001 # mine\n"),
    ],
)
def test_a_template_goes_into_a_configuration_file_which_keeps_the_rest(written, name, text):
    document = build(Choices(stage=3, offload_optimizer="cpu", optimizer="AdamW"))
    save_template("big", document)
    file = written(text, name)
    assert apply_template("big", file, SCHEMA).written
    config = resolve(SCHEMA, ["--accelerate_config=none"], file=file, environment={})
    assert json.loads(str(config.value("deepspeed_config"))) == document
    assert config.value("learning_rate") == 1e-3
    assert file.read_text().count("mine") == text.count("mine")
    assert not apply_template("big", file, SCHEMA).written


def test_a_template_does_not_go_into_an_accelerate_yaml(run, written):
    save_template("big", ZERO2)
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n"
    file = written(text, "a.yaml")
    assert run("deepspeed", "templates", "apply", "big", file)[0] == 2
    assert file.read_text() == text


# --- the cache ------------------------------------------------------------------------------------------------------


def test_the_folder_on_the_drive_is_cleared_by_hand(run, tmp_path, written):
    drive = tmp_path / "drive"
    (drive / "zero_stage_3").mkdir(parents=True)
    (drive / "zero_stage_3" / "0.swp").write_bytes(b"x" * 7)
    (drive / "mine").mkdir()
    config = written(f'offload_param_path = "{drive}"\n', "config.toml")
    listed = json.loads(run("cache", "ls", config, "--json")[1])["caches"]
    assert ("deepspeed-offload", str(drive), 7) in [(each["name"], each["place"], each["bytes"]) for each in listed]
    code, reported, _ = run("cache", "clear", "deepspeed-offload", f"--offload_param_path={drive}", "--json")
    assert (code, json.loads(reported)) == (0, {"cache": "deepspeed-offload", "place": str(drive), "count": 1, "bytes": 7})
    assert sorted(path.name for path in drive.iterdir() if path.is_dir()) == ["mine"]


def test_a_configuration_of_a_run_is_not_taken_for_one_of_deepspeed(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"deepspeed_config": ZERO2}))
    code, out, _ = run("deepspeed", "check", tmp_path / "config.json")
    assert code == 2
    assert f"smalti train {tmp_path / 'config.json'} --dry-run checks both" in out
    assert "1 problem" in out
