"""Splitting a command line into configuration file, plugins and flags."""

import pytest

from smalti.cli.arguments import CommandLine, pop_flag
from smalti.config import DataOptions, RunOptions
from smalti.errors import UserError


@pytest.mark.parametrize(
    "words", [("{file}", "--seed=5"), ("--seed=5", "--config", "{file}"), ("--config={file}", "--seed", "5")]
)
def test_the_configuration_file_is_the_first_word_or_follows_config(write, words):
    file = write("run.toml", "use_ema = true")
    command_line = CommandLine.parse([word.format(file=file) for word in words])
    assert command_line.file == file
    assert command_line.config().changes() == {"seed": 5, "use_ema": True}


def test_a_flag_may_take_a_file_as_its_value_at_the_end(write):
    config = CommandLine.parse(["--data_backend_config", "data.json"]).config()
    assert str(config[DataOptions].data_backend_config) == "data.json"


@pytest.mark.parametrize("words", [["a.toml", "--config", "b.toml"], ["--config=a.toml", "--config=b.toml"]])
def test_two_configuration_files_are_refused(words):
    with pytest.raises(UserError, match=r"two configuration files are given: a\.toml and b\.toml"):
        CommandLine.parse(words)


@pytest.mark.parametrize("words", [["--config"], ["--config", "--seed=1"], ["--config="]])
def test_config_needs_a_file(words):
    with pytest.raises(UserError, match="--config needs a file"):
        CommandLine.parse(words)


def test_a_file_in_the_wrong_place_is_told_where_it_belongs(write):
    file = write("run.toml", "")
    with pytest.raises(UserError, match="put the configuration file first"):
        CommandLine.parse(["--use_ema", str(file)]).config()


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text("seed = 7")
    assert CommandLine.parse(["~/run.toml"]).config()[RunOptions].seed == 7


def test_plugins_are_selected_before_options_are_read():
    command_line = CommandLine.parse(["--without", "toy", "--without=plots", "--seed=3"])
    assert [name for name, info in command_line.plugins.infos.items() if info.state == "blocked"] == ["plots", "toy"]
    assert "toy_width" not in command_line.schema.options
    assert command_line.config().value("without") == ("toy", "plots")


@pytest.mark.parametrize("spelling", ["--dry-run", "--dry_run"])
def test_a_switch_of_the_command_itself_is_taken_out_of_the_words(spelling):
    words = ["a", spelling, "b"]
    assert (pop_flag(words, "--dry-run"), words) == (True, ["a", "b"])


NODES = ("--num_machines=2", "--num_processes=2", "--main_process_ip=head")


def test_each_node_has_a_command(write):
    file = write("my run.toml", "seed = 1")
    command_line = CommandLine.parse([str(file), *NODES, "--machine-rank", "1", "--use_cpu", "--without=plots"])
    shared = f"smalti train '{file}' {' '.join(NODES)} --use_cpu --without=plots"
    assert command_line.of_nodes(command_line.config()) == [f"{shared} --machine_rank=0", f"{shared} --machine_rank=1"]


def test_the_command_of_a_node_has_what_the_environment_said_here(monkeypatch):
    monkeypatch.setenv("SMALTI_MAIN_PROCESS_IP", "head")
    command_line = CommandLine.parse(["--accelerate_config=none", *NODES[:2]])
    [first, _] = command_line.of_nodes(command_line.config())
    assert first.endswith("--num_machines=2 --num_processes=2 --main_process_ip=head --machine_rank=0")


def test_nodes_of_a_scheduler_have_the_same_command(monkeypatch):
    for name, value in {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "head"}.items():
        monkeypatch.setenv(name, value)
    command_line = CommandLine.parse(["--accelerate_config=none", "--seed=3"])
    assert command_line.of_nodes(command_line.config()) == ["smalti train --accelerate_config=none --seed=3"] * 2


def test_one_node_has_no_commands_of_nodes():
    command_line = CommandLine.parse(["--accelerate_config=none", "--num_processes=2"])
    assert command_line.of_nodes(command_line.config()) == []
