"""Which rank draws what, how large, and with which weights."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from smalti import UserError
from smalti.checkpoint.async_saver import Saver
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.config.resolution import resolve
from smalti.parallel.gloo import GlooCommunicator
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.optim.ema import Ema
from smalti.training.validation.validation import eval_mode, shares, validation_sizes
from smalti_testing import TinyFamily
from smalti_testing.strategy_subject import open_family


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_every_prompt_is_drawn_and_every_rank_draws_the_same_number_of_equal_batches(count, ranks, batch):
    rows = shares(count, ranks, batch)
    assert {number for row in rows for numbers in row for number in numbers} == set(range(count))
    assert len({tuple(map(len, row)) for row in rows}) == 1


def size(*flags: str) -> str:
    return ",".join(map(str, validation_sizes(resolve(schema_of(load_plugins()), flags, environment={}), 8)))


def test_pictures_are_as_large_as_the_training_pictures_unless_said_otherwise():
    assert size("--resolution=100", "--resolution_type=pixel") == "96x96"


def test_an_area_in_megapixels_gives_a_square_of_that_area():
    assert size("--resolution=0.262144", "--resolution_type=area") == "512x512"


def test_a_size_may_be_given_with_width_and_height():
    assert size("--validation_resolution=512x768") == "512x768"


def test_several_sizes_may_be_given_with_commas():
    assert size("--validation_resolution=64x64,32X48 , 64") == "64x64,32x48"


@pytest.mark.parametrize("text", ["big", "0", "100", "512x", "64x65", "64,", "64x64,32x33"])
def test_a_size_that_cannot_be_drawn_is_refused(text):
    with pytest.raises(UserError, match="validation_resolution"):
        size(f"--validation_resolution={text}")


class Late(GlooCommunicator):
    """Words between the threads that save, of which the first comes late."""

    entered = threading.Event()

    def all_gather_text(self, value):
        self.entered.wait(0.5)
        return super().all_gather_text(value)


def test_averaged_weights_are_not_put_in_place_before_a_checkpoint_has_its_copy_of_the_others(tmp_path):
    subject = open_family("ddp", (), 1, TinyFamily())
    ema = Ema(subject.parallel.state.master_weights(), decay=0.9)
    subject.step(1)
    weights = {name: tensor.clone() for name, tensor in subject.state().model.items()}
    line = Late(world=subject.parallel.world, group=None)
    saver = Saver(write=partial(save, tmp_path), communicator=subject.parallel, background=line)
    run = SimpleNamespace(parallel=subject.parallel, world=subject.parallel.world, model=subject.model, ema=ema, saver=saver)
    saver.begin(Snapshot(step=1, state=subject.state(), trainer={"step": 1}))
    with eval_mode(run):
        line.entered.set()
        saver.wait_for_staging()
        assert any(not torch.equal(tensor, weights[name]) for name, tensor in subject.state().model.items())
    landed = saver.poll(finish=True)
    saver.close()
    saved = {name: tensor for path in (landed.path / "model").glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weights[name]) for name in weights)
