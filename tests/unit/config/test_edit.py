"""One option set in somebody's configuration file; all else stays as it was written."""

import json

import pytest
import tomlkit
from hypothesis import HealthCheck, example, given, settings, strategies as st

from smalti.config.edit import set_option
from smalti.config.files import read_mapping
from smalti.config.toml import set_values
from smalti.errors import UserError

WORDS = ["a", "b"]


@pytest.fixture
def put(write, schema):
    """put("a.toml", text) -> the text after `report_to` was set to two words."""

    def change(name: str, text: str) -> str:
        path = write(name, text)
        set_option(path, schema, "report_to", WORDS)
        return path.read_bytes().decode()

    return change


EDITS = {
    "TOML, new, before the tables": (
        "a.toml",
        "# x\nseed = 3  # y\n[launch]\n",
        '# x\nseed = 3  # y\nreport_to = ["a", "b"]\n\n[launch]\n',
    ),
    "TOML, words stay words": ("a.toml", 'report-to = "c" # y\nseed = 3\n', 'report-to = "a,b" # y\nseed = 3\n'),
    "TOML, in its section": (
        "a.toml",
        '[trackers]\n# y\ntracker_project_name = "x"\n',
        '[trackers]\n# y\ntracker_project_name = "x"\nreport_to = ["a", "b"]\n',
    ),
    "TOML, empty": ("a.toml", "", 'report_to = ["a", "b"]\n'),
    "TOML of Windows": ("a.toml", "seed = 3\r\n# x\r\n", 'seed = 3\r\n# x\r\nreport_to = ["a", "b"]\r\n'),
    "JSON, new, bare": (
        "a.json",
        '{\n  "seed": 3,\n  "lr": 1e-05\n}\n',
        '{\n  "seed": 3,\n  "lr": 1e-05,\n  "report_to": "a,b"\n}\n',
    ),
    "JSON, new, as flags": ("a.json", '{"--seed": 3}', '{"--seed": 3, "--report_to": "a,b"}'),
    "JSON, an array stays one": ("a.json", '{"report_to" :[ "c" ],"seed":3}', '{"report_to" :["a", "b"],"seed":3}'),
    "JSON, null": ("a.json", '{"REPORT-TO": null}', '{"REPORT-TO": "a,b"}'),
    "JSON, empty": ("a.json", "{ }", '{"report_to": "a,b" }'),
    "JSON, in its section": (
        "a.json",
        '{"trackers": {"tracker_project_name": "x"}, "seed": 3}',
        '{"trackers": {"tracker_project_name": "x", "report_to": "a,b"}, "seed": 3}',
    ),
    "YAML, new": ("a.yaml", "# x\nseed: 3", '# x\nseed: 3\nreport_to: "a,b"\n'),
    "YAML, with a comment": ("a.yml", "report_to: c  # y\nseed: 3\n", 'report_to: "a,b"  # y\nseed: 3\n'),
}


@pytest.mark.parametrize(("name", "before", "after"), EDITS.values(), ids=EDITS)
def test_one_value_changes_and_every_other_byte_stays(put, name, before, after):
    assert put(name, before) == after


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "{seed: 3}\n", 'report_to: "a,b"'),
        ("a.yaml", "report_to:\n  - c\n", 'report_to: ["a", "b"]'),
        ("a.yaml", "seed: 3\n...\n", 'report_to: "a,b"'),
        ("a.yaml", "trackers: {tracker_project_name: x}\n", 'report_to: "a,b", under trackers'),
    ],
)
def test_what_cannot_be_changed_in_one_place_is_refused_with_the_line_to_write(write, schema, name, text, line):
    path = write(name, text)
    with pytest.raises(UserError) as raised:
        set_option(path, schema, "report_to", WORDS)
    assert (raised.value.fix, path.read_text()) == (f"add this to it: {line}", text)


@pytest.mark.parametrize("text", ['{"report_to": "a, b"}', '{"report_to": ["a", "b"]}'])
def test_what_is_said_already_is_not_written(write, schema, text):
    path = write("a.json", text)
    path.chmod(0o400)
    edit = set_option(path, schema, "report_to", WORDS)
    assert (edit.written, path.read_text()) == (False, text)


def test_an_edit_tells_what_was_there(write, schema):
    path = write("a.toml", "seed = 3\n")
    edit = set_option(path, schema, "seed", 4)
    assert (edit.path, edit.key, edit.old, edit.new, edit.written) == (path, "seed", 3, 4, True)


def test_permissions_links_and_byte_order_marks_stay(write, schema, tmp_path):
    path = write("real.json", '\ufeff{"seed": 3}')
    path.chmod(0o640)
    link = tmp_path / "link.json"
    link.symlink_to(path)
    set_option(link, schema, "seed", 4)
    assert (link.is_symlink(), path.stat().st_mode & 0o777) == (True, 0o640)
    assert path.read_bytes() == b'\xef\xbb\xbf{"seed": 4}'


def test_an_accelerate_yaml_takes_what_it_has_a_key_for(write, schema):
    text = "distributed_type: NO\nnum_processes: 1 # one\ndynamo_config: {}\n"
    path = write("a.yaml", text)
    set_option(path, schema, "num_processes", 2)
    assert path.read_text() == text.replace("1 # one", "2 # one")
    with pytest.raises(UserError, match="no place for seed"):
        set_option(path, schema, "seed", 4)


def test_a_file_that_is_not_there_is_not_made(schema, tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        set_option(tmp_path / "a.toml", schema, "seed", 4)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(content={"run": {}}, indent=None, ascii_=True)
@example(content={"--": None}, indent=None, ascii_=True)
@example(content={"--0": None}, indent=None, ascii_=True)
@given(
    content=st.dictionaries(st.text(max_size=8), values, max_size=5),
    indent=st.sampled_from([None, 2, "\t"]),
    ascii_=st.booleans(),
)
def test_any_json_keeps_its_other_values(tmp_path, schema, content, indent, ascii_):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=ascii_), encoding="utf-8")
    set_option(path, schema, "seed", 77)
    section = content.get("run")  # the section of the option, which an object of that name is
    expected = {**content, "run": {**section, "seed": 77}} if isinstance(section, dict) else {**content, "seed": 77}
    assert read_mapping(path) == expected


SET = {
    "a value keeps its place and its comment": (
        'seed = 3  # why\n# next\nlearning-rate = "1e-4"\n',
        {"seed": 4, "learning_rate": "abc"},
        'seed = 4  # why\n# next\nlearning-rate = "abc"\n',
    ),
    "a removed value leaves the comments of others": (
        "# one\nseed = 3\n# two\nuse_ema = true\n",
        {"seed": None},
        "# one\n# two\nuse_ema = true\n",
    ),
    "a new value stands before the tables": ("[[datasets]]\nid = 'a'\n", {"seed": 1}, "seed = 1\n[[datasets]]\nid = 'a'\n"),
    "a table of its section gets a new value": ("[run]\n# x\n", {"seed": 1}, "[run]\n# x\nseed = 1\n"),
    "rows become tables at the end": (
        "seed = 1\n",
        {"datasets": [{"id": "a"}, {"id": "b"}]},
        'seed = 1\n\n[[datasets]]\nid = "a"\n\n[[datasets]]\nid = "b"\n',
    ),
}


@pytest.mark.parametrize("case", SET)
def test_values_are_set_in_a_text(schema, case):
    text, values, expected = SET[case]
    assert set_values(text, schema, values) == expected


def test_rows_that_were_read_keep_their_comments(schema):
    rows = "[[datasets]]\nid='a' # one\n# mid\n[[datasets]]\nid='b'\n"
    assert set_values("seed = 1\n", schema, {"datasets": tomlkit.parse(rows)["datasets"]}) == f"seed = 1\n\n{rows}"
