"""The contracts of optimizers and of commands refuse what is wrong: one fault at a time, and the check that has to find it."""

import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from smalti_testing import BrokenContract, check_commands
from smalti_testing.commands import COMMAND, CommandSubject
from smalti_testing.optimizers import OPTIMIZER, OptimizerSubject
from support.forked_ranks import forked_processes

FAULTY = Path(__file__).parent / "faulty"

OPTIMIZERS = MappingProxyType(
    {
        "first_group": "it_steps_every_parameter_that_trains_and_no_other",
        "uphill": "its_steps_go_downhill",
        "own_rate": "it_takes_the_learning_rate_of_each_step",
        "one_decay": "it_decays_the_weights_of_the_groups_that_say_so",
        "demanding": "parameters_without_a_gradient_stay",
        "random": "the_same_gradients_make_the_same_steps",
        "objects": "its_state_fits_into_a_checkpoint",
        "counting": "a_resumed_run_goes_on_bit_for_bit",
        "typed": "hyper_parameters_of_the_groups_come_back",
        "normed": "flat_parts_of_parameters_are_stepped_like_the_whole",
        "alone": "sharded_parameters_are_stepped_like_the_whole",
    }
)


@pytest.fixture
def faulty(monkeypatch):
    """The faulty optimizers, on the path as if installed, here and in ranks."""
    monkeypatch.syspath_prepend(FAULTY)
    monkeypatch.setenv("PYTHONPATH", str(FAULTY), prepend=os.pathsep)


@pytest.fixture
def ranks():
    with forked_processes() as pair:
        yield pair


@pytest.mark.parametrize("fault", OPTIMIZERS)
def test_a_faulty_optimizer_is_found(fault, faulty, ranks, tmp_path):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - what the optimizer itself raises counts as well
        OPTIMIZER.run(OPTIMIZERS[fault], OptimizerSubject("faulty_optimizers", fault, folder=tmp_path, ranks=ranks))
    assert OPTIMIZERS[fault] in raised.value.__notes__[-1]


def test_every_check_of_optimizers_has_a_fault_that_it_finds():
    assert set(OPTIMIZERS.values()) == set(OPTIMIZER.checks)


def test_the_optimizer_that_the_faults_are_put_into_has_none(faulty, ranks, tmp_path):
    """How the contract starts ranks itself: the optimizer of tests/e2e/test_plugin_new.py, whose own tests run there."""
    OPTIMIZER.run_all(OptimizerSubject("faulty_optimizers", "sound", folder=tmp_path, ranks=ranks))


COMMANDS = {
    "capital": (
        *("commands_are_registered_under_names_that_can_be_typed", "not in lower case with dashes: Greet"),
        "@click.command('Greet')\ndef greet():\n    'Say it.'",
    ),
    "silent": (
        *("every_command_says_what_it_does", "without a docstring: greet"),
        "@click.command()\ndef greet():\n    pass",
    ),
    "heavy": (
        *("help_is_shown_without_torch", "showing the help has imported torch"),
        "class Late(click.Command):\n    def format_help(self, context, formatter):\n        import torch\n"
        "        super().format_help(context, formatter)\n"
        "@click.command(cls=Late)\ndef greet():\n    'Say it.'",
    ),
    "swallowing": (
        *("what_it_does_not_understand_is_refused_with_exit_code_2", "ends with status 0, not 2"),
        "@click.command(context_settings={'ignore_unknown_options': True})\n@click.argument('words', nargs=-1)\n"
        "def greet(words):\n    'Say it.'\n    print('hello', *words)",
    ),
    "raising": (
        *("what_it_does_not_understand_is_refused_with_exit_code_2", "ends with status 1, not 2"),
        "@click.command(context_settings={'ignore_unknown_options': True})\n@click.argument('words', nargs=-1)\n"
        "def greet(words):\n    'Say it.'\n    int(words[0])",
    ),
}
PLUGIN = """
import click
from smalti import hookimpl

{command}

class Faulty:
    @hookimpl
    def register_commands(self, commands):
        commands.add_command(greet)

plugin = Faulty()
"""


def installed(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch, name: str = "faulty") -> None:
    """A package with this command, on the path of this process and of those that it starts."""
    info = folder / f"smalti_{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: smalti-{name}\nVersion: 1.0\nRequires-Dist: smalti>=0.2,<0.3\n"
    )
    (info / "entry_points.txt").write_text(f"[smalti.plugins]\n{name} = smalti_{name}:plugin\n")
    (folder / f"smalti_{name}.py").write_text(PLUGIN.format(command=command))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.delitem(sys.modules, f"smalti_{name}", raising=False)


@pytest.mark.parametrize("fault", COMMANDS)
def test_a_faulty_command_is_found(fault, tmp_path, monkeypatch):
    check, complaint, command = COMMANDS[fault]
    installed(tmp_path, command, monkeypatch)
    with pytest.raises(BrokenContract, match=complaint) as raised:
        COMMAND.run(check, CommandSubject("faulty"))
    assert check in raised.value.__notes__[-1]


def test_words_of_the_authors_own_have_to_be_refused_too(tmp_path, monkeypatch):
    command = "@click.command()\n@click.argument('name')\ndef greet(name):\n    'Say it.'\n    print('hello', name)"
    installed(tmp_path, command, monkeypatch)
    check_commands("faulty", ["greet"])
    with pytest.raises(BrokenContract, match="smalti greet 5 ends with status 0"):
        check_commands("faulty", ["greet", "5"])


def test_commands_are_checked_without_torch():
    script = (
        "import sys; from smalti_testing import check_commands; check_commands('commands'); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
