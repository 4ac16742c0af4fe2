"""`smalti config check`: every problem of a configuration before a launch."""

import json

import pytest

from support.commands import commands


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    return commands(capsys)


@pytest.fixture
def write(tmp_path):
    """write(name, text) -> the path of a new file."""

    def file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return file


def test_a_checked_configuration_has_every_problem_at_its_option(run, write):
    file = write("run.toml", "sede = 5\ntrain_batch_size = 0\nuse_cpu = true\nplugins = ['toy']\nmodel_family = 'toy'")
    code, out, _ = run("config", "check", str(file), "--json")
    found = {(each["option"], each["where"]) for each in json.loads(out)["problems"]}
    assert (code, found >= {("seed", str(file)), ("train_batch_size", f"train_batch_size in {file}")}) == (2, True), out


def test_a_checked_configuration_without_problems_is_named_as_such(run, write, tmp_path):
    (tmp_path / "images").mkdir()
    data = f"instance_data_dir = '{tmp_path / 'images'}'\noutput_dir = '{tmp_path / 'run'}'\nema_decay = 0.9"
    file = write("run.toml", f"max_train_steps = 4\nuse_cpu = true\nplugins = ['toy']\nmodel_family = 'toy'\n{data}")
    code, out, errors = run("config", "check", str(file))
    assert (code, out, "ema_decay has no effect unless use_ema" in errors) == (0, "no problem found\n", True), errors
    assert not (tmp_path / "run").exists()
