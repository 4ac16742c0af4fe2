"""The page on operations: its table of exit codes is that of the code, its job script runs and decides as the table says."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from smalti import errors
from smalti.errors import ExitCode
from support import pages

PAGE = (pages.DOCS / "operations.md").read_text(encoding="utf-8")
[SCRIPT] = [block for block in pages.blocks("operations.md") if block.kind == "bash"]
_STAND_INS = {
    "srun": """while [ "$1" != bash ]; do shift; done
        for ((SLURM_NODEID = 0; SLURM_NODEID < SLURM_NNODES; SLURM_NODEID++)); do export SLURM_NODEID; "$@" || exit; done""",
    "scontrol": """case $1 in show) echo "$3" | tr , '\\n' ;; *) echo "$@" >> asked ;; esac""",
}
"""For a scheduler: one node after the other, and what is asked of the controller is written down."""


def code_rows() -> list[str]:
    """The table as the docstrings of `ExitCode` have it."""
    [kind] = [node for node in ast.parse(inspect.getsource(errors)).body if getattr(node, "name", "") == "ExitCode"]
    told = [node.value.value for node in kind.body[1:] if isinstance(node, ast.Expr)]
    rows = []
    for code, text in zip(ExitCode, told, strict=True):
        meaning, saved, again = (line.strip().rstrip(".") for line in re.split(r"\n *(?:Saved|Again):", text.strip()))
        rows.append(f"| {int(code)} | {meaning} | {saved} | {again} |")
    return rows


def test_the_table_of_exit_codes_is_that_of_the_code():
    assert [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)] == code_rows()


@pytest.fixture
def cluster(tmp_path):
    """A folder in which the job script lies, with a scheduler's commands; the environment to run it in."""
    (tmp_path / "train.sbatch").write_text(SCRIPT.text)
    for name, body in _STAND_INS.items():
        command(tmp_path, name, body)
    job = {"SLURM_JOB_ID": "41007", "SLURM_JOB_NODELIST": "gpu-1,gpu-2", "SLURM_NNODES": "2"}
    return tmp_path, {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def command(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def submitted(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    words = ["bash", "train.sbatch"]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_job_script_says_to_each_node_what_it_can_launch(cluster):
    folder, environment = cluster
    pages.photos(folder / "photos")
    (folder / "config.toml").write_text(
        'model_family = "toy"\ninstance_data_dir = "photos"\nresolution = 32\noutput_dir = "run"\n'
        "max_train_steps = 4\nallow_dataset_oversubscription = true"
    )
    command(folder, "smalti", f'exec {sys.executable} -m smalti "$@" --use_cpu --dry-run')
    done = submitted(folder, environment)
    launched = re.findall(
        r"--nproc-per-node=8 --nnodes=2 --node-rank=(\d) --master-addr=gpu-1 --master-port=29507 ", done.stdout
    )
    assert (done.returncode, launched) == (0, ["0", "1"]), done.stdout + done.stderr


@pytest.mark.parametrize("code", [*ExitCode, 137])
def test_the_job_script_queues_a_job_again_exactly_when_the_table_says_so(cluster, code):
    folder, environment = cluster
    command(folder, "smalti", f"exit {int(code)}")
    done = [submitted(folder, {**environment, "SLURM_RESTART_COUNT": count}).returncode for count in ("3", "30")]
    asked = (folder / "asked").read_text().splitlines() if (folder / "asked").exists() else []
    again, held = "requeue 41007", "requeuehold 41007"
    expected = {5: [held, held], 6: [again, again], 75: [again, again], 9: [again], 137: [again]}
    assert (asked, done) == (expected.get(int(code), []), [int(code)] * 2)
    row = next(row for row in code_rows() if row.startswith(f"| {9 if code == 137 else int(code)} |"))
    assert row.split("|")[4].strip().startswith("yes") == bool(asked)


def test_the_job_script_is_what_a_scheduler_takes():
    checked = subprocess.run(["bash", "-n"], input=SCRIPT.text, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr, SCRIPT.text.startswith("#!/bin/bash\n")) == (0, "", True)
    options = re.findall(r"^#SBATCH --([a-z-]+)", SCRIPT.text, flags=re.MULTILINE)
    assert (len(options), len(set(options))) == (SCRIPT.text.count("#SBATCH"), SCRIPT.text.count("#SBATCH"))
