"""Every case of `make bench` runs to its end, as small as it can be. Its ratios say nothing then."""

import json
import math
import os
import shutil
import sys
import warnings
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from accelerate.state import AcceleratorState

from smalti.parallel import native_bf16
from support.forked_ranks import forked_processes
from support.nodes import forked_commands
from support.whole import some

BENCH = Path(__file__).parents[2] / "bench"


@contextmanager
def importable():
    """The modules of bench/, whose names are short ones, for this long."""
    with patch.object(sys, "path", [str(BENCH), *(each for each in sys.path if each != str(BENCH))]):
        yield
    for name in [name for name, each in sys.modules.items() if str(getattr(each, "__file__", "")).startswith(str(BENCH))]:
        del sys.modules[name]


with importable():
    from run import CASES

ON_A_SERVER = ("data_s3", "data_cache")
ON_RANKS = ("shard", "zero", "ranking", "plan")
"""They fork ranks, from the same process as other tests do only if this process asks for it."""
OF_THIS_MACHINE = {
    "first_step": "",
    "step": "",
    "sdxl": "",
    "save": "start to first step",
    "shard": "step under",
    "data_cache": "share of a step",
}
"""Results of steps in the precision that smalti chooses here, by a part of their names."""


LIGHT = ("save", "zero", "headers", "data_s3", "web")
"""Of each kind: on ranks, on a server, with runs that it launches, and with pages."""
LAUNCHING = ("first_step", "save", "detect")
"""They start `python -m smalti`, here as a fork of their process."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    with patch.dict(os.environ, DEMO=str(tmp_path_factory.mktemp("demo"))):
        yield


@pytest.fixture(scope="module")
def process(demo):
    """One process for all other cases, with imports done."""
    with forked_processes(ranks=1, group=False, imports=["diffusers"]) as running:
        yield running


@pytest.fixture(scope="module")
def launching(demo):
    with forked_processes(ranks=1, group=False, imports=["diffusers", *forked_commands.HEAVY[:-1]]) as running:
        running.run(forked_commands.start_children_from_fork)
        yield running


def measured(case: str) -> list[dict[str, object]]:
    with importable(), patch.dict(os.environ), warnings.catch_warnings():
        warnings.simplefilter("default")
        import run

        AcceleratorState._reset_state(reset_partial_state=True)  # each case is a process of its own in `make bench`
        with redirect_stdout(StringIO()) as output:
            run.main(["--short", case])
    return [json.loads(line) for line in output.getvalue().splitlines() if line.startswith("{")]


@pytest.mark.parametrize("case", some(CASES, *LIGHT))
def test_a_case_runs(request, case):
    if case in ON_A_SERVER and shutil.which("weed", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("needs SeaweedFS")
    process = request.getfixturevalue("launching" if case in LAUNCHING else "process")
    results = measured(case) if case in ON_RANKS else process.run(measured, case)[0]
    assert results
    assert [each for each in results if not math.isfinite(each["ratio"])] == []
    if case in OF_THIS_MACHINE:
        steps = [each["precision"] for each in results if OF_THIS_MACHINE[case] in each["name"]]
        assert set(steps) == {"bf16" if native_bf16("cpu").native else "fp32"}
