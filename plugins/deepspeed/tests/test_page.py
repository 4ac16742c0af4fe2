"""Every command on the page on DeepSpeed is typed, in order; one that would train is only planned."""

import subprocess

import pytest

from support import pages

COMMANDS = [
    line for block in pages.blocks("deepspeed.md") if block.kind == "sh" for line in block.text.replace("\\\n", "").splitlines()
]
CONFIG = """\
model_family = "toy"
resolution = 16
resolution_type = "pixel"
instance_data_dir = "photos"
output_dir = "runs/first"
max_train_steps = 100
allow_dataset_oversubscription = true
"""


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> list[subprocess.CompletedProcess]:
    """What came of each command, one after the other, for a reader with pictures, a configuration and a drive."""
    folder = tmp_path_factory.mktemp("reader")
    pages.photos(folder / "photos")
    (folder / "config.toml").write_text(CONFIG)
    (folder / "scratch").mkdir()
    environment = {**pages.account(folder / "account"), "XDG_CONFIG_HOME": str(folder / "settings"), "SMALTI_WITHOUT": "plots"}

    def run(command: str) -> subprocess.CompletedProcess:
        planned = f"{command} --dry-run" if command.startswith("smalti train ") else command
        return subprocess.run(
            planned.replace("/scratch", str(folder / "scratch")),
            shell=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    return [run(command) for command in COMMANDS]


@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: COMMANDS[number])
def test_a_command_of_the_page_does_what_it_should(typed, number):
    assert typed[number].returncode == 0, typed[number].stdout


def test_the_page_has_commands_to_type():
    assert {command.split()[1] for command in COMMANDS} == {"deepspeed", "train", "cache"}
