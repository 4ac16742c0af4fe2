"""The process of a worker, without Ray."""

import os

import pytest

from smalti_ray.launch.process import take_usual_priority


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
def test_ranks_do_not_keep_the_low_priority_of_rays_workers():
    if (child := os.fork()) == 0:
        os.nice(15)
        take_usual_priority()
        os._exit(os.getpriority(os.PRIO_PROCESS, 0))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
