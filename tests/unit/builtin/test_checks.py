"""Other launchers around `smalti train`, which starts its ranks itself."""

import sys

import pytest

from smalti.builtin.checks import rank_launcher
from support.commands import commands
from support.forked_popen import run_forked
from support.whole import some

ONE_A_NODE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
SRUN = {"SLURM_JOB_ID": "3042", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("environment", [{}, SRUN, ONE_A_NODE, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "master-0"}])
def test_one_process_on_a_node_is_no_rank(environment):
    assert rank_launcher(environment) is None


def test_ranks_of_deepspeeds_launcher_are_found():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert rank_launcher(environment) == ("another launcher", "2")


LAUNCHERS = [
    ("torchrun", ("torch.distributed.run", "--nproc-per-node=2"), "2"),
    ("accelerate launch", ("accelerate.commands.launch", "--cpu", "--num_processes=2"), "N"),
]


@pytest.mark.parametrize(("launcher", "words", "ranks"), some(LAUNCHERS, LAUNCHERS[0]))
def test_a_launcher_around_the_run_is_refused(tmp_path, launcher, words, ranks):
    """Without the package for several nodes, which not everybody has."""
    options = ["--model_family=toy", "--data_backend_config=toy", f"--output_dir={tmp_path / 'run'}", "--without=cluster"]
    command = [sys.executable, "-m", *words, "-m", "smalti", "train", *options, "--max_train_steps=1"]
    said = run_forked(command, timeout=120)
    assert said.returncode != 0
    assert f"{launcher} has started this process as a rank, and smalti starts its ranks itself" in said.stderr
    assert f"smalti train --num_processes={ranks}" in said.stderr
    assert not (tmp_path / "run").exists()


def test_a_rank_of_another_launcher_exits_with_2(capsys, tmp_path, monkeypatch):
    for name, value in {**ONE_A_NODE, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    options = ("--model_family=toy", "--data_backend_config=toy", f"--output_dir={tmp_path / 'run'}", "--max_train_steps=1")
    code, _, said = commands(capsys, "train")(*options, "--without=cluster", "--dry-run")
    assert code == 2
    assert "fix: without torchrun: smalti train --num_processes=2" in said
