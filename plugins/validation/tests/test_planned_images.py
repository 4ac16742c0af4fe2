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
from smalti.data.buckets import Bucket
from smalti.errors import problems_in
from smalti.parallel.gloo import GlooCommunicator
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.optim.ema import Ema
from smalti_testing import TinyFamily
from smalti_testing.strategy_subject import open_family
from smalti_validation.eval_mode import eval_mode
from smalti_validation.plan import PlannedImage, batches, check_validation, planned_images
from smalti_validation.prompts import ValidationPrompt, validation_prompts


def prompt(stem: str = "cat", strength: float = 1.0) -> ValidationPrompt:
    return ValidationPrompt(stem=stem, prompt="", shown="", negative_prompt="", seed=1, adapter_strength=strength)


@given(
    st.lists(st.sampled_from([(64, 1.0), (64, 0.5), (96, 1.0)]), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 5)
)
def test_all_images_are_sampled_in_batches_of_one_size_and_strength_and_no_rank_has_more_of_them(kinds, ranks, batch):
    images = [PlannedImage(prompt=prompt(strength=strength), size=Bucket(64, edge), file="") for edge, strength in kinds]
    rows = batches(images, ranks, batch)
    assert {number for row in rows for numbers in row for number in numbers} == set(range(len(kinds)))
    assert len(set(map(len, rows))) == 1
    assert all(len({kinds[number] for number in numbers}) == 1 and len(numbers) <= batch for row in rows for numbers in row)
    # No more rounds than if every size and strength were sampled after the other.
    rounds = sum(-(-kinds.count(kind) // (ranks * batch)) for kind in set(kinds))
    assert len(rows[0]) <= rounds


def configured(*flags: str):
    return resolve(schema_of(load_plugins()), flags, environment={})


def size(*flags: str) -> str:
    config = configured(*flags)
    return ",".join(str(image.size) for image in planned_images(config, [prompt()], 8))


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


def files(*flags: str) -> list[str]:
    config = configured(*flags)
    return [image.file for image in planned_images(config, validation_prompts(config), 8)]


def library(folder, text: str, name: str = "prompts.toml") -> str:
    (folder / name).write_text(text)
    return f"--validation_prompt_library={folder / name}"


def test_files_are_named_by_prompt_and_by_size_where_a_prompt_has_several(tmp_path):
    entries = 'fox = "a fox"\n["red boat"]\nprompt = "a boat"\nresolution = "32x64"\n'
    flags = ("--validation_prompt=A cat!", "--validation_resolution=64,96x64", library(tmp_path, entries))
    assert files(*flags) == ["00-a-cat-64x64.png", "fox-64x64.png", "red-boat.png", "00-a-cat-96x64.png", "fox-96x64.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('cat = "a"\nCAT = "b"', "the same file name, CAT.png"),
        ('grid = "a"', "the contact sheet have the same file name"),
        ('[cat]\nprompt = "a"\nresolution = "64x60"', "cat: this model samples multiples of 8 pixels, which 64x60 is not"),
    ],
)
def test_a_library_whose_images_cannot_be_sampled_or_named_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        files(library(tmp_path, text))


def test_all_that_a_family_cannot_sample_is_said_at_once():
    config = configured("--model_type=lora", "--validation_guidance_rescale=0.7", "--validation_resolution=33x32")
    family = TinyFamily()
    family.alignment, family.no_guidance_rescale = 8, "it has its own way"
    with pytest.raises(UserError) as error:
        check_validation(config, [prompt(strength=0.5)], family)
    told = [problem.message for problem in problems_in(error.value)]
    assert len(told) == 3
    for text, message in zip(("33x32", "0.7: it has its own way", "cannot scale its adapter"), told, strict=True):
        assert text in message


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
