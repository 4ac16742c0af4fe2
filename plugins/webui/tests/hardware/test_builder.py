import asyncio
import json
import os

import pytest
from click.testing import CliRunner

from smalti.cli.entry import smalti as command_line
from smalti_webui.hardware import builder
from smalti_webui.hardware.json_places import line_in, line_of

TEXT = """{
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "cpu",
      "pin_memory": true}
  },
  "gradient_clipping": 1.0
}
"""


def printed(*flags):
    done = CliRunner().invoke(command_line, ["deepspeed", "build", *flags])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("zero_optimization", 2),
        ("zero_optimization.stage", 3),
        ("zero_optimization.offload_param.pin_memory", 5),
        ("zero_optimization.offload_param.missing", 4),
        ("gradient_clipping", 7),
        ("optimizer", None),
        ("", None),
    ],
)
def test_the_line_of_a_key(key, line):
    assert line_of(TEXT, key) == line


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": }', '{"a" 1}'])
def test_a_text_that_is_not_an_object_has_no_lines(text):
    assert line_of(text, "a") is None


def test_the_line_of_a_syntax_error():
    assert line_in("-:12:36: this is not JSON: Expecting property name") == 12
    assert line_in("cannot be 7") is None


ANSWERS = [
    {"stage": "1"},
    {"stage": "2", "offload_optimizer": "cpu"},
    {"stage": "3", "offload_optimizer": "nvme", "offload_param": "nvme", "nvme_path": "/scratch"},
    {"stage": "2", "optimizer": "Lion", "learning_rate": "0.0002", "scheduler": "WarmupCosineLR", "warmup_steps": "100"},
    {"stage": "3", "gradient_accumulation_steps": "4", "gradient_clipping": "0.5"},
]


@pytest.mark.parametrize("answers", ANSWERS)
def test_the_form_can_be_read_back_from_the_json(answers):
    document = json.loads(printed(*(f"--{name}={value}" for name, value in answers.items())))
    assert builder.answers_of(document) == answers


def test_the_fields_are_those_of_the_command_line():
    fields = {each.name: each for each in builder.form_fields()}
    assert list(fields) == list(builder._PLACES)
    assert fields["stage"].choices == ("1", "2", "3")
    assert "Lion" in fields["optimizer"].choices
    assert fields["learning_rate"].choices == ()


def test_what_was_written_by_hand_remains_when_the_form_changes():
    base, made = {"zero": {"stage": 2}, "clip": "auto"}, {"zero": {"stage": 3, "offload": {}}, "clip": "auto"}
    edited = {"zero": {"stage": 2, "bucket": 5}, "clip": "auto", "fp16": {"enabled": False}}
    wanted = {"zero": {"stage": 3, "offload": {}, "bucket": 5}, "clip": "auto", "fp16": {"enabled": False}}
    assert builder.merged(base, edited, made) == wanted


def test_what_was_removed_by_hand_stays_removed():
    assert builder.merged({"a": 1, "b": 2}, {"a": 1}, {"a": 3, "b": 2}) == {"a": 3}


def test_the_form_gives_what_the_command_line_prints():
    answers = {"stage": "3", "offload_param": "cpu", "optimizer": "AdamW"}
    built = asyncio.run(builder.from_form({**answers, "nvme_path": " ", "saved": "x"}))
    assert built.text == printed(*(f"--{name}={value}" for name, value in answers.items()))
    assert (built.problems, built.options["optimizer"]["value"]) == ((), "adamw")


def test_a_form_that_contradicts_itself_says_so_in_the_words_of_the_command_line():
    built = asyncio.run(builder.from_form({"stage": "2", "offload_param": "cpu"}, "{}"))
    assert built.text == "{}"
    (problem,) = built.problems
    assert (problem.where, problem.fix) == ("offload_param", "stage 3, or none")
    assert problem.message == "parameters are offloaded in stage 3 only, not in stage 2"


def test_a_syntax_error_has_its_line():
    broken = asyncio.run(builder.from_text(TEXT.replace("1.0", "1.0,")))
    assert [each.line for each in broken.problems] == [8]
    assert broken.answers is None


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    """Templates of the user who runs the tests are neither read nor changed."""
    monkeypatch.setenv("XDG_CONFIG_HOME", os.fspath(tmp_path))
