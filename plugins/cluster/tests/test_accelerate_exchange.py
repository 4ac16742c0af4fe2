"""`smalti config import-accelerate` and `export-accelerate`: whole files in both directions."""

import json
import tomllib
from pathlib import Path

import pytest
import yaml

from smalti.config import Schema
from smalti.config.resolution import resolve
from smalti.config.toml import put_into
from smalti.plugins import Selection, load_plugins, schema_of
from smalti_cluster.jobs.accelerate import uncovered
from support.commands import commands

MINIMAL = "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: 'no'\ngpu_ids: 0,1,2,3,4,5,6,7\ndebug: false\n"


@pytest.fixture
def data() -> Path:
    return Path(__file__).parents[3] / "tests" / "data"


@pytest.fixture
def schema() -> Schema:
    return schema_of(load_plugins(Selection(only=("toy", "trackers", "validation"))))


@pytest.fixture
def run(capsys, monkeypatch):
    """run("import-accelerate", ...) -> (exit code, output, errors), with this plugin and the built-in ones."""
    monkeypatch.setenv("SMALTI_PLUGINS", "cluster")
    return commands(capsys, "config")


def test_what_no_option_can_say_is_told_apart_from_what_says_nothing(schema):
    values = {
        "distributed_type": "MULTI_GPU",
        "gpu_ids": "1,2",
        "rdzv_backend": "static",
        "debug": True,
        "tpu_env": [],
        "same_network": False,
        "num_processes": 2,
    }
    assert uncovered(values, schema) == {"gpu_ids": "1,2", "debug": True}
    assert uncovered({**values, "num_machines": 2}, schema)["same_network"] is False


# --- import ---------------------------------------------------------------------------------------------------------


def test_an_import_prints_every_option_with_its_place_and_what_has_no_counterpart(run, write):
    path = write("user.yaml", MINIMAL)
    code, text, _ = run("import-accelerate", path)
    assert (code, tomllib.loads(text)) == (0, {"num_processes": 8, "mixed_precision": "no"})
    assert f"num_processes = 8 # Accelerate YAML (num_processes in {path})" in text
    assert text.startswith(f'# gpu_ids: "0,1,2,3,4,5,6,7" has no option; keep it with accelerate_config = "{path}"\n')


def test_flags_go_before_what_is_imported(run, write):
    text = run("import-accelerate", write("user.yaml", MINIMAL), "--num_processes=4")[1]
    assert tomllib.loads(text)["num_processes"] == 4


def test_settings_from_elsewhere_are_not_imported(run, write, monkeypatch):
    monkeypatch.setenv("SMALTI_SEED", "7")
    assert "seed" not in tomllib.loads(run("import-accelerate", write("user.yaml", MINIMAL))[1])


def test_the_default_file_of_accelerate_goes_before_what_was_imported_from_it_and_that_is_told(run, write, monkeypatch):
    path = write("user.yaml", MINIMAL)
    monkeypatch.setenv("ACCELERATE_CONFIG_PATH", str(path))
    assert 'overrides this one; accelerate_config = "none" ignores it' in run("import-accelerate", path)[1]


def test_an_import_for_machines_has_values_and_notices(run, write):
    told = json.loads(run("import-accelerate", write("user.yaml", MINIMAL), "--json")[1])
    assert (told["values"]["num_processes"]["value"], len(told["notices"])) == (8, 1)


def test_an_import_never_overwrites_unasked(run, write, tmp_path):
    path, target = write("user.yaml", MINIMAL), write("mine.toml", "seed = 3 # lucky\n")
    code, _, told = run("import-accelerate", path, "--to", target)
    assert (code, "mine.toml already exists" in told, target.read_text()) == (2, True, "seed = 3 # lucky\n")
    assert run("import-accelerate", path, f"--to={target}", "--force")[0] == 0
    assert tomllib.loads(target.read_text()) == {"num_processes": 8, "mixed_precision": "no"}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine.toml", "user.yaml"]


def test_an_import_can_be_merged_into_a_file(run, write):
    target = write(
        "mine.toml", "seed = 3 # lucky\nMixed-Precision = 'bf16' # fast\n[launch]\nnum_machines = 1\n[[datasets]]\nid = 'a'\n"
    )
    code, _, told = run("import-accelerate", write("user.yaml", MINIMAL), "--to", target, "--merge")
    assert (code, "gpu_ids" in told) == (0, True)
    assert target.read_text() == (
        'seed = 3 # lucky\nMixed-Precision = "no" # fast\n[launch]\nnum_machines = 1\nnum_processes = 8\n'
        "[[datasets]]\nid = 'a'\n"
    )


def test_options_without_a_section_in_the_file_go_before_its_tables(schema):
    config = resolve(schema, ("--num_processes=2", "--accelerate_config=none"), environment={})
    assert put_into("# mine\n[[datasets]]\nid = 'a'\n", config, ["num_processes"]) == (
        "# mine\nnum_processes = 2\n[[datasets]]\nid = 'a'\n"
    )


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "num_processes: 2\n", "is not an Accelerate configuration"),
        ("a.toml", "seed = 3\n", "is not an Accelerate configuration"),
        ("a.yaml", "- 1\n", "contains a list, not a table"),
        ("a.yaml", "a: [\n", "is not valid YAML"),
        ("a.yaml", "distributed_type: XLA\n", "smalti does not train on TPUs"),
        ("a.json", '{"distributed_type": "NO", "mixed_precision": "fp8"}', ": cannot be 'fp8'"),
    ],
)
def test_what_is_no_accelerate_file_or_cannot_be_used_is_refused(run, write, name, text, told):
    code, _, error = run("import-accelerate", write(name, text))
    assert (code, told in error) == (2, True)


def test_the_package_that_a_file_needs_is_named(run, data):
    code, _, told = run("import-accelerate", data / "accelerate-fsdp1.yaml")
    assert (code, "fsdp_config needs smalti-fsdp2" in told) == (4, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["import-accelerate"], "no Accelerate YAML given"),
        (["import-accelerate", "nowhere.yaml"], "there is no file nowhere.yaml"),
        (["import-accelerate", "a.yaml", "--to"], "Option '--to' requires an argument"),
        (["import-accelerate", "a.yaml", "--to=b.yaml"], "b.yaml does not end in .toml"),
        (["export-accelerate", "--to", "b.toml"], "b.toml does not end in .yaml or .yml"),
        (["export-accelerate", "--use_cpu"], "a launch on CPUs uses no Accelerate YAML"),
        (["export-accelerate", "--num_machines=2", "--num_processes=3"], "num_processes=3 does not divide over"),
    ],
)
def test_words_that_make_no_sense_are_refused(run, words, told):
    code, _, error = run(*words)
    assert (code, told in error) == (2, True)


def test_a_folder_that_is_not_there_is_told(run, write, tmp_path):
    code, _, told = run("import-accelerate", write("user.yaml", MINIMAL), "--to", tmp_path / "no" / "a.toml")
    assert (code, "No such file or directory" in told) == (2, True)


# --- export ---------------------------------------------------------------------------------------------------------


def test_an_export_is_the_users_file_with_the_options_in_it(run, write, tmp_path):
    path, target = write("user.yaml", MINIMAL + "future_key: {a: 1}\n"), tmp_path / "out.yaml"
    code, _, told = run("export-accelerate", "--accelerate_config", path, "--num_processes=4", "--to", target)
    exported = yaml.safe_load(target.read_text())
    assert (code, exported["num_processes"], exported["gpu_ids"]) == (0, 4, "0,1,2,3,4,5,6,7")
    assert "future_key" not in exported, "accelerate launch refuses a key that it does not know"
    assert f"# future_key in {path} has no effect" in target.read_text()
    assert "# num_processes: '4' from --num_processes wins over 8 from num_processes in" in target.read_text()
    assert told == f"smalti: wrote {target}\n"


def test_an_export_needs_no_model_and_no_data(run):
    code, text, _ = run("export-accelerate", "--num_processes=2", "--json")
    assert (code, json.loads(text)["distributed_type"], json.loads(text)["num_processes"]) == (0, "MULTI_GPU", 2)


def test_an_export_never_overwrites_unasked(run, write):
    target = write("out.yaml", "mine: true\n")
    code, _, told = run("export-accelerate", "--to", target)
    assert (code, "already exists" in told, target.read_text()) == (2, True, "mine: true\n")
    assert run("export-accelerate", "--to", target, "--force")[0] == 0
    assert "mine" not in yaml.safe_load(target.read_text())


def test_what_was_exported_is_imported_again(run, write, data, tmp_path):
    target = tmp_path / "out.yaml"
    run("export-accelerate", data / "accelerate-4x8.yaml", "--to", target)
    before, after = (tomllib.loads(run("import-accelerate", path)[1]) for path in (data / "accelerate-4x8.yaml", target))
    assert {**before, "dynamo_backend": None, "dynamo_mode": None} == {**after, "dynamo_backend": None, "dynamo_mode": None}
