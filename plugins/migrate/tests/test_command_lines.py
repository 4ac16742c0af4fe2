"""Launch scripts as options."""

import shlex

import pytest
from hypothesis import given, strategies as st

from smalti_migrate.command_lines import commands_in

WINDOWS = r"""
@echo off
rem flux_train.py --learning_rate=9
set MODEL=C:\models\flux1-dev.safetensors
call venv\Scripts\activate
accelerate launch --num_cpu_threads_per_process 1 flux_train_network.py ^
  --pretrained_model_name_or_path="%MODEL%" ^
  --optimizer_args "weight_decay=0.1" "betas=0.9,0.99" ^
  --sdpa
"""


def test_a_batch_file():
    (command,) = commands_in(WINDOWS)
    assert (command.script, command.launcher) == ("flux_train_network.py", {"num_cpu_threads_per_process": "1"})
    assert command.options == {
        "pretrained_model_name_or_path": r"C:\models\flux1-dev.safetensors",
        "optimizer_args": ["weight_decay=0.1", "betas=0.9,0.99"],
        "sdpa": True,
    }


@pytest.mark.parametrize("use", ["$OUT", "${OUT}", "%OUT%", "$env:OUT", '"$OUT"'])
def test_variables_are_replaced_and_those_that_are_not_set_are_named(use):
    (command,) = commands_in(f"OUT='a b'\npython train_network.py --output_dir=\"{use.strip(chr(34))}\" --x $MISSING")
    assert (command.options["output_dir"], command.unset) == ("a b", ("MISSING",))


PASTED = """Train with this, as the page says:
accelerate launch --num_processes 2 sdxl_train_network.py
  --network_module=networks.lora
  # --network_dim=128

  --network_dim 32 --learning_rate=1e-4
Then look at the images: --seed=3
"""


def test_options_on_lines_of_their_own_belong_to_the_command_before_them():
    (command,) = commands_in(PASTED)
    assert command.launcher == {"num_processes": "2"}
    assert command.options == {"network_module": "networks.lora", "network_dim": "32", "learning_rate": "1e-4"}


names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
texts = st.text(
    st.characters(codec="ascii", exclude_characters="\\$%\"'`^\r\n", categories=("L", "N", "P", "S", "Zs")), min_size=1
)


@given(st.dictionaries(names, texts.filter(lambda text: not text.startswith("-")), max_size=5))
def test_what_a_shell_would_pass_on_is_what_is_read(options):
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    (command,) = commands_in(f"python flux_train.py {shlex.join(words)}")
    assert command.options == options
