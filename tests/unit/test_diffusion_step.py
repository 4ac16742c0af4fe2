"""From a micro-batch to its loss: what of the batch and of the family decides its noise levels."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from smalti.config import resolve, schema_of
from smalti.data.buckets import Bucket
from smalti.data.loader import MicroBatch
from smalti.diffusion.step import denoising_loss
from smalti.models.frames import Frame
from smalti.models.weights import materialise
from smalti.plugins import load_plugins
from smalti.testing import TinyFamily

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
        loss(materialise(family.build_model(), family.weights(0), "cpu"), batch(), FullPrecision())
        asked.append(recorder.tokens)
    assert asked == [24, 6]


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
        frames=(Frame(width=WIDTH, height=HEIGHT, left=0, top=0),) * 2,
    )
