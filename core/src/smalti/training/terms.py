"""The terms of the loss: what plugins add to the denoising loss, and which forward passes they need for it.

`Term.passes` names the passes that there are. All ranks make those that one of them needs, in the same order, because the
parameters of the model may be spread over them.

A micro-batch goes through the model once for each `Turn`, forward and backward, and gradients add up. There is one turn, with
the adapter as it is, unless a term says otherwise.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from smalti.config import Config, ModelOptions
from smalti.data import DatasetSpec, MicroBatch, PreparedData, pass_parts
from smalti.diffusion import Objective, SampleNoise, TimestepSampler
from smalti.models import ModelFamily

POLICY = "policy"
"""The pass that every step makes."""
SecondCaption = Callable[[str, DatasetSpec, int], str]
"""(caption of a visit, entry of its dataset, number of the visit) -> another caption. Called in threads of the loader."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One way of a micro-batch through the model: what the adapter adds is multiplied with `strength` in passes "policy".

    Another strength than 1 needs an adapter that a family can scale (`lacks_base` says what is missing). `latents` names the
    column whose latents all passes have that name none; "" for those of the images.
    """

    strength: float = 1.0
    latents: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What a term gets of the forward passes over one micro-batch, in one turn.

    `predictions` are by pass; `targets`, the raw predictions that have no loss, by the column of the latents, "" for those of
    the turn. `t` (B,) are times of the objective, `weights` (B,) the weights of these noise levels. `noise` has random numbers
    by visit: `noise.column(batch.numbers, smalti.diffusion.RandomColumn.MASK)`.
    """

    batch: MicroBatch
    objective: Objective
    noise: SampleNoise
    t: Tensor
    weights: Tensor
    predictions: Mapping[str, Tensor]
    targets: Mapping[str, Tensor]
    turn: Turn = Turn()

    def errors(self, name: str = POLICY, against: str = "") -> Tensor:
        """(B, C, h, w) in fp32: the loss of each element in a pass, against its target or the prediction of another pass."""
        target = self.predictions[against] if against else self.targets[pass_parts(name).get("latents", "")]
        return self.objective.errors(self.predictions[name], target, self.t)

    def mean(self, errors: Tensor) -> Tensor:
        """The scalar of a term: errors averaged over elements, weighted by noise level, averaged over samples."""
        return (errors.flatten(1).mean(1) * self.weights).mean()


class Term:
    """A part of the loss; inherit from it and write what it needs. `weight` is the factor of its `loss`.

    It has no state: random choices are functions of the visit, so that ranks, micro-batches and resumes change nothing.
    `second_captions` has, by name, the captions of passes "...|caption=NAME": functions of the caption of a visit, the entry of
    its dataset and the number of the visit. Names are unique over all terms.
    """

    name: str
    weight: float = 1.0
    second_captions: Mapping[str, SecondCaption] = MappingProxyType({})
    turns: Sequence[Turn] = (Turn(),)
    """A micro-batch goes forward and backward once for each; the loss is their mean. At most one term has others than that."""

    def check(self, datasets: Sequence[DatasetSpec]) -> Sequence[str]:
        """Notices about settings without effect. Raises UserError or ConfigError for what cannot be done. In the launcher."""
        return ()

    def texts(self, data: PreparedData) -> Iterable[str]:
        """Every text that its second captions may be: encoded before training where texts are. On every rank, the same."""
        return ()

    def passes(self, position: int, datasets: Collection[DatasetSpec]) -> Collection[str]:
        """The passes that it needs beside "policy" for images of these datasets: those of all ranks in one forward pass.

        "policy" is the model that is trained, "base" the model without its adapter and without gradients (`lacks_base` says
        where there is none). "policy|caption=NAME" and "base|caption=NAME" have one of the `second_captions`,
        "policy|latents=COLUMN" and "base|latents=COLUMN" the latents of a column in place of those of the image, with the same
        noise and times. A column of latents is used as it is, one of bytes (B, 3, H, W) is encoded in each step: that takes
        --vae_cache_disable, if the family caches latents. Both can be combined: "base|caption=NAME|latents=COLUMN".

        `position` counts the batches of the run from 0. It is the step, unless steps were skipped. Called in threads.
        """
        return ()

    def timesteps(self, sampler: TimestepSampler) -> TimestepSampler:
        """What noise levels are taken from, in place of `sampler`, which is what the options describe."""
        return sampler

    def target(self, step: Step, target: Tensor) -> Tensor:
        """(B, C, h, w): the raw prediction that the denoising loss wants, in place of `target`. Without gradients."""
        return target

    def factor(self, step: Step) -> Tensor | None:
        """What the errors of the denoising loss are multiplied with, such as (B, 1, h, w); None for 1."""
        return None

    def loss(self, step: Step) -> Tensor | None:
        """A scalar with a gradient, which is added to the denoising loss: a mean over the samples of this rank.

        Written only by terms that add one. None for nothing, as where `step.predictions` has not what the term needs. Makes no
        forward pass and is not collective.
        """
        raise NotImplementedError

    @property
    def adds(self) -> bool:
        """Whether `loss` is written."""
        return type(self).loss is not Term.loss


def lacks_base(config: Config, family: ModelFamily) -> str:
    """Why there is no pass "base" in this run; "" if there is."""
    if config[ModelOptions].model_type != "lora":
        return "all weights are trained, so that model is not there any more"
    return "" if family.scales_adapter else f"the model family {family.name} cannot leave out its adapter"
