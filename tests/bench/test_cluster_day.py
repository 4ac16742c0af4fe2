"""The hour on a cluster, rehearsed under a real SLURM: two nodes on this machine, with two ranks each."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from forked_day import BENCH, PATHS

from support.nodes import Cluster
from support.slurm import Slurm, slurm_forbidden
from support.whole import WHOLE

CHECKS = ("nodes-nccl", "nodes-hsdp", "nodes-save", "nodes-elastic")
"""Those of memory and scaling take minutes here, and do what that of HSDP does."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the report of a job says of each check; and the folder of the job."""
    if not WHOLE:
        pytest.skip("takes minutes: make test-gpu-day")
    if reason := slurm_forbidden():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster-day")
    shutil.copytree(BENCH, folder / "bench")
    (folder / "tests").symlink_to(PATHS[0])
    (folder / "plugins").symlink_to(BENCH.parent / "plugins")
    script = folder / "bench/cluster-day.sbatch"
    text = re.sub("#SBATCH --(gpus-per-node|mem)=.*\n", "", script.read_text())  # there are none, and little memory
    script.write_text(text.replace('"$@"', f"--rehearse --per_node=2 --only {' '.join(CHECKS)} nodes-flux-32"))
    with Cluster(3) as cluster:
        slurm = Slurm(cluster)
        exports = f"--export=ALL,PYTHON={sys.executable},OMP_NUM_THREADS=1,PYTHONPATH={PATHS[1]}"
        job = slurm.submit(script, exports, folder=folder)
        slurm.wait(lambda: slurm.job(job)["JobState"] in ENDED, f"job {job} does not end", seconds=570)
    reports = list((folder / "build/cluster-day").glob("*-rehearsal-*.json"))
    output = next(folder.glob("cluster-day-*.log")).read_text()
    assert reports, output
    return json.loads(reports[0].read_text())["checks"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_on_two_nodes(results, name):
    assert results[name]["problems"] == []
    assert results[name]["status"] == "passed"


def test_what_needs_more_nodes_is_left_out(results):
    assert results["nodes-flux-32"]["problems"] == ["needs 16 nodes"]
