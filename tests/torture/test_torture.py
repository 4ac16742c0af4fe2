"""A short torture: a round of the groups that need no ranks (A7), runs (A8, A9) or server. `make torture` has more.

That a killed run resumes and a signal stops it: tests/e2e/test_kill.py, tests/e2e/test_stops.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.whole import some

GROUPS = some(["A1", "A2", "A3", "A4", "A5", "A6", "A10", "C1", "C2", "C3", "C5", "G"], "A3", "A4", "A5", "C1", "C3", "G")


@pytest.fixture(scope="module")
def torture() -> subprocess.CompletedProcess[str]:
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (tests, os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "torture", "--short", "--group", *GROUPS],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_promise_holds(torture):
    assert torture.returncode == 0, torture.stdout + torture.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_a_short_torture_does_harm_in_every_group(torture, group):
    [line] = re.findall(rf"^ *{group}  .*$", torture.stdout, re.MULTILINE)
    assert re.search(r" [1-9]\d* faults ", line), line
