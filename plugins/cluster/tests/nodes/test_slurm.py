"""What `smalti launch slurm` writes, under a real SLURM: a job that is preempted is queued again, and resumes on both nodes."""

import pytest

from support.nodes import Cluster
from support.slurm import Slurm, SlurmRun, slurm_forbidden


@pytest.fixture
def slurm():
    if reason := slurm_forbidden():
        pytest.skip(reason)
    with Cluster(3) as cluster:
        yield Slurm(cluster)


def test_a_preempted_job_is_queued_again_and_resumes_on_both_nodes(slurm):
    run = SlurmRun(slurm, nodes=2)
    first = run.wait_for_step(3)
    assert "this is node 1 of 2, and node 0 is node0 (SLURM job" in run.output
    slurm.run("scancel", "--signal=USR1", str(run.job))
    run.wait_for_restart()
    assert run.ended_with() == 6
    slurm.start_now(run.job)
    assert run.wait_for_step(first + 1) > first
    run.ask_to_stop()
    run.wait_for_state("FAILED")
    assert slurm.job(run.job)["ExitCode"] == "7:0", run.output
