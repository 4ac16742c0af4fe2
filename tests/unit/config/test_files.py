"""Reading TOML, JSON and YAML: one table comes out, or one error with the place."""

import os

import pytest

from smalti.config.files import expand, read_mapping
from smalti.errors import Problem, UserError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'seed = 3\nwords = ["a"]'),
        ("a.json", '{"seed": 3, "words": ["a"]}'),
        ("a.yaml", "seed: 3\nwords: [a]"),
        ("a.YML", "seed: 3\nwords:\n- a\n"),
        ("a.json", '\ufeff{"seed": 3, "words": ["a"]}'),
    ],
)
def test_the_ending_says_how_a_file_is_read(write, name, text):
    assert read_mapping(write(name, text)) == {"seed": 3, "words": ["a"]}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.toml", "seed = ", "is not valid TOML: Invalid value (at end of document)"),
        ("a.toml", "seed = 1\nseed = 2", "Cannot overwrite a value"),
        (
            "a.toml",
            "seed = 1\noptimizer = adamw # fast",
            'optimizer = adamw # fast\n  fix: text needs quotes: optimizer = "adamw"',
        ),
        ("a.toml", "output_dir = /runs/a", 'text needs quotes: output_dir = "/runs/a"'),
        ("a.toml", "a = 1\nb = [1,, 2]", ": b = [1,, 2]\n  fix: fix the syntax error"),
        ("a.json", '{"seed": 1,\n "x" 2}', "is not valid JSON: Expecting ':' delimiter at line 2, column 6"),
        ("a.json", '{"seed": 1, "seed": 2}', "the key 'seed' occurs twice"),
        ("a.json", '{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
        ("a.json", '{"seed": NaN}', "NaN is not valid in JSON"),
        ("a.json", "[1]", "contains a list, not a table"),
        ("a.json", "", "is not valid JSON"),
        ("a.yaml", "seed: [", "is not valid YAML"),
        ("a.yaml", "seed: 1\nseed: 2", "the key 'seed' occurs twice"),
        ("a.yaml", "a: {b: 1, b: 2}", "the key 'b' occurs twice"),
        ("a.yaml", "- 1", "contains a list, not a table"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("a.toml", "seed = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
        ("a.yaml", "seed: " + "9" * 5000, "is not valid YAML: Exceeds the limit"),
        ("a.yaml", "seed: &all {same: *all}", "found unconstructable recursive node"),
        ("a.yaml", "seed: &all [*all]", "found unconstructable recursive node"),
        ("a.toml", "seed = " + "[" * 100_000, "is not valid TOML: nested too deeply"),
        ("a.json", "[" * 100_000, "is not valid JSON: nested too deeply"),
        ("a.yaml", "[" * 5000, "is not valid YAML: nested too deeply"),
        ("a.ini", "seed = 1", "unknown kind of configuration file '.ini'"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_with_the_place(write, name, text, told):
    with pytest.raises(UserError) as raised:
        read_mapping(write(name, text))
    assert told in str(raised.value)
    assert "fix:" in str(raised.value)


def test_an_empty_toml_or_yaml_file_holds_nothing(write):
    assert (read_mapping(write("a.toml", "")), read_mapping(write("a.yaml", "# nothing"))) == ({}, {})


def test_yaml_may_merge_a_mapping_and_override_it(write):
    text = "base: &base {a: 1, b: 2}\nmine: {<<: *base, a: 3}\n"
    assert read_mapping(write("a.yaml", text))["mine"] == {"a": 3, "b": 2}


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_told_apart(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for path, told in {"no.toml": "there is no file", ".": "is a folder", "binary.toml": "cannot read"}.items():
        with pytest.raises(UserError, match=told):
            read_mapping(tmp_path / path)


def test_a_pipe_and_a_device_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    for name in ("pipe.toml", "zero.toml"):
        with pytest.raises(UserError, match=rf"cannot read .*{name}: .*not a regular file"):
            read_mapping(tmp_path / name)


def test_placeholders_are_replaced_at_any_depth():
    problems: list[Problem] = []
    value = expand({"a": ["{env:HOST}/x", {"b": "{env:HOST}{env:HOST}"}], "c": 3}, {"HOST": "h"}, "a", problems)
    assert (value, problems) == ({"a": ["h/x", {"b": "hh"}], "c": 3}, [])


def test_a_placeholder_for_a_variable_that_is_not_set_is_a_problem():
    problems: list[Problem] = []
    expand("{env:NOT_SET}", {}, "key in file", problems)
    assert str(problems[0]) == "key in file: {env:NOT_SET}: this environment variable is not set\n    fix: export NOT_SET=..."
