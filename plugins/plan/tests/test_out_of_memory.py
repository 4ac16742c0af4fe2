"""The explanation of an error of memory, for real on the host."""

import pytest
import torch

from smalti import RankInfo, World
from smalti.config import draft
from smalti.plugins import load_plugins, schema_of
from smalti.rundir import Phases
from smalti_plan.out_of_memory import explained


@pytest.fixture
def explanation(tmp_path):
    """What is said of an allocation that the host has no room for, while a run is built, in a phase."""

    def give(phase):
        phases = Phases()
        phases.enter(phase)
        config = draft(schema_of(load_plugins()), ["--use_cpu"])
        info = RankInfo(id="", directory=tmp_path, world=World(), config=config, strategy="", plugins=(), phases=phases)
        with pytest.raises(RuntimeError) as raised:
            torch.empty(10**14)
        return explained(raised.value, info, None)

    return give


def test_the_host_without_room_is_told_with_its_size(explanation):
    said = explanation("building").message
    assert said.startswith("out of memory on cpu: no room for 372529.03 GiB more in the building of the run")
    assert "total of the device" in said


def test_what_is_encoded_before_training_is_named(explanation):
    assert "more in the encoding of images and captions" in explanation("encoding").message
