"""From a micro-batch to its loss: what of the batch and of the family decides its noise levels."""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch

from smalti.config.resolution import resolve
from smalti.data.buckets import Bucket
from smalti.data.loader import MicroBatch
from smalti.diffusion.timesteps import LogitNormal, Uniform
from smalti.models.size_conditioning import SizeConditioning
from smalti.models.weights import materialise
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.loss import denoising_loss
from smalti_testing import TinyFamily

WIDTH, HEIGHT = 12, 8


class Coarse(TinyFamily):
    """A token of its model is a square of 4 x 4 pixels, two of its alignment on each edge."""

    def image_tokens(self, width: int, height: int) -> int:
        return width * height // 16


class FullPrecision:
    autocast = nullcontext


@dataclass
class Recorder:
    """A timestep sampler that notes for how many tokens it was asked."""

    tokens: int = 0

    def __call__(self, u: torch.Tensor, tokens: int) -> torch.Tensor:
        self.tokens = tokens
        return u


def test_times_are_asked_for_by_the_tokens_of_the_familys_images() -> None:
    asked = []
    for family in (TinyFamily(), Coarse()):
        loss = replace(denoising_loss(config(), family, "cpu"), timesteps=(recorder := Recorder()))  # type: ignore[arg-type]
        loss(model_of(family), batch(), FullPrecision())
        asked.append(recorder.tokens)
    assert asked == [24, 6]


@pytest.mark.parametrize(
    ("flags", "quantile"),
    [
        ((), LogitNormal(mean=0.0, std=1.0)),
        (("--prediction_type=sample",), LogitNormal()),
        (("--prediction_type=epsilon",), Uniform()),
        (("--prediction_type=v_prediction",), Uniform()),
        (("--timestep_distribution=uniform",), Uniform()),
        (("--flow_sigmoid_scale=1.5", "--flow_sigmoid_mean=0.5"), LogitNormal(mean=0.5, std=1.5)),
        (("--prediction_type=epsilon", "--timestep_distribution=logit_normal"), LogitNormal()),
    ],
)
def test_flows_train_the_middle_most_and_ddpm_all_noise_levels_unless_the_options_say_so(flags, quantile) -> None:
    assert denoising_loss(config(*flags), TinyFamily(), "cpu").timesteps.quantile == quantile


def test_a_dataset_can_drop_captions_more_often_than_the_option_says() -> None:
    class Listening(TinyFamily):
        texts: list[str]

        def encode_captions(self, captions):
            self.texts = list(captions)
            return super().encode_captions(captions)

    texts = {}
    for shares in ((), (1.0, 0.0), (None, 0.0), (0.0, None)):
        for option in (0, 1):
            family = Listening()
            loss = denoising_loss(config(f"--caption_dropout_probability={option}"), family, "cpu")
            loss(model_of(family), replace(batch(), caption_dropout=shares), FullPrecision())
            texts[shares, option] = family.texts

    assert (texts[(), 0], texts[(), 1]) == (["a", "b"], ["", ""])
    assert texts[(1.0, 0.0), 0] == texts[(1.0, 0.0), 1] == ["", "b"]
    assert texts[(None, 0.0), 1] == ["", "b"]
    assert texts[(0.0, None), 1] == ["a", ""]


def test_regularisation_data_is_trained_towards_the_model_without_the_adapter() -> None:
    family = TinyFamily()
    model = model_of(family)
    loss = denoising_loss(config(), family, "cpu")

    def of(regularisation: tuple[bool, bool], *, without=halved, any_rank: bool = True) -> torch.Tensor:
        chosen = replace(batch(), regularisation=regularisation, has_regularisation=any_rank)
        return replace(loss, without_adapter=without)(model, chosen, FullPrecision())

    ordinary, first, second, both = (of(each) for each in ((False, False), (True, False), (False, True), (True, True)))
    torch.testing.assert_close(first + second, ordinary + both)
    assert of((True, True), without=lambda _: nullcontext()) == 0, "the same model predicts the same"
    assert 0 < both != ordinary
    assert of((False, False), any_rank=False) == ordinary, "another rank's regularisation data changes nothing here"
    both.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@contextmanager
def halved(model):
    """A model whose weights are half as large stands for that without the adapter."""
    with torch.no_grad():
        kept = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.mul_(0.5)
        yield
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)


def model_of(family: TinyFamily):
    return materialise(family.build_model(), family.weights(0), "cpu")


def config(*flags: str):
    return resolve(schema_of(load_plugins()), flags, environment={})


def batch() -> MicroBatch:
    return MicroBatch(
        bucket=Bucket(WIDTH, HEIGHT),
        pixels=torch.zeros(2, 3, HEIGHT, WIDTH),
        latents=None,
        captions=("a", "b"),
        conditioning=None,
        numbers=(1, 2),
        keys=("a", "b"),
        size_conditioning=(SizeConditioning(width=WIDTH, height=HEIGHT, left=0, top=0),) * 2,
    )
