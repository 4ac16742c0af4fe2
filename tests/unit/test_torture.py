"""A short torture: a round of every group that starts no training run. `make torture` has the long form."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

GROUPS = ("A1", "A2", "A3", "A4", "A5", "A6", "A10", "G")


@pytest.mark.parametrize("groups", [GROUPS[:3], GROUPS[3:]], ids=" ".join)
def test_every_promise_holds(groups):
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "torture", "--seconds", "4", "--group", *groups],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
