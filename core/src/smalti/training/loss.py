"""From a micro-batch to its loss: what all families and backends have in common.

Shapes: B batch, latents (B, C, h, w).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from smalti.config import Config, DataOptions, ObjectiveOptions, RunOptions
from smalti.data import Bucket, DatasetSpec, MicroBatch, normalised, pass_parts
from smalti.diffusion import (
    Conditioning,
    Distribution,
    Objective,
    RandomColumn,
    RectifiedFlow,
    SampleNoise,
    TimestepSampler,
    Weighting,
    build_objective,
    build_timesteps,
    build_weighting,
)
from smalti.errors import UserError
from smalti.models import ModelFamily, latents_of
from smalti.parallel import Parallel, to_device
from smalti.training.terms import POLICY, Step, Term, Turn, lacks_base


def objective_of(config: Config, family: ModelFamily) -> Objective:
    """What the run trains: the prediction and the noise schedule of the family, or those that the options say.

    The loss is computed with it, evaluations measure it, and `SampleRequest` hands it to the family to sample with.
    """
    options = config[ObjectiveOptions]
    return build_objective(
        options.prediction_type or family.prediction,
        native=family.prediction,
        loss_type=options.loss_type,
        huber_c=options.huber_c,
        huber_schedule=options.huber_schedule,
        beta_schedule=options.beta_schedule or family.beta_schedule,
        rescale_betas_zero_snr=options.rescale_betas_zero_snr,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Losses:
    """Of one micro-batch: `parts`, means over its samples, with a gradient, which add up to its loss.

    `samples` (B,), without one, and `fractions` (B,), in host memory, are what `smalti.types.Visits` has of each.
    """

    parts: Tensor
    samples: Tensor
    fractions: Tensor


@dataclass(frozen=True, kw_only=True)
class DenoisingLoss:
    """Add noise, predict, compare. Random numbers depend on the numbers of samples alone, not on ranks or resumes."""

    family: ModelFamily
    objective: Objective
    timesteps: TimestepSampler
    weighting: Weighting
    noise: SampleNoise
    dropout: float
    unconditional: Conditioning | None = None
    """One row: the conditioning of the empty prompt, if texts were encoded before training."""
    without_adapter: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    """Within it the model is the one without its adapter; None where there is none, or a family cannot do that."""
    terms: Sequence[Term] = ()

    def __post_init__(self) -> None:
        _ = self.turns  # refused in the launcher too

    @property
    def names(self) -> tuple[str, ...]:
        """What the parts of the loss are called, in their order."""
        return ("denoising", *(term.name for term in self.terms if term.adds))

    def needs(self, position: int, datasets: Collection[DatasetSpec]) -> frozenset[str]:
        """See `smalti.data.PlannedPasses`."""
        return frozenset(name for term in self.terms for name in term.passes(position, datasets)) - {POLICY}

    def second_caption(self, name: str, caption: str, dataset: DatasetSpec, number: int) -> str:
        """See `smalti.data.PlannedPasses`."""
        [choose] = [term.second_captions[name] for term in self.terms if name in term.second_captions]
        return choose(caption, dataset, number)

    @property
    def turns(self) -> Sequence[Turn]:
        """How each micro-batch goes through the model, in this order. Raises UserError if two terms differ."""
        found = {term.name: tuple(term.turns) for term in self.terms if tuple(term.turns) != Term.turns}
        if len({*found.values()}) > 1:
            raise UserError(f"terms train the adapter at different strengths: {', '.join(found)}", fix="leave out all but one")
        return next(iter(found.values()), Term.turns)

    def at(self, turn: Turn, model: nn.Module) -> AbstractContextManager[None]:
        """Around forward and backward pass of a turn, because the backward pass may compute parts of the model again."""
        return nullcontext() if turn.strength == 1 else self.family.adapter_strength(model, turn.strength)

    def __call__(self, model: nn.Module, batch: MicroBatch, parallel: Parallel, turn: Turn = Turn()) -> Losses:  # noqa: B008
        """The loss of one micro-batch, with parts called `names`.

        Each rank has to call it, within `at`: the model may be sharded, and all ranks make the passes that `batch.needs` names.
        """
        tokens = self.family.image_tokens(batch.bucket.width, batch.bucket.height)
        fractions = self.timesteps(self.noise.column(batch.numbers, RandomColumn.TIMESTEP), tokens)
        step = self._step(model, batch, parallel, fractions, turn)
        for term in self.terms:
            step = replace(step, targets={**step.targets, "": term.target(step, step.targets[""])})
        errors = step.errors()
        factors: Tensor | None = None
        for term in self.terms:
            if (factor := term.factor(step)) is not None:
                errors, factors = errors * factor, factor if factors is None else factors * factor
        samples = errors.flatten(1).mean(1)
        first = (samples * step.weights).mean()
        for name in sorted(batch.needs):
            if name.startswith(POLICY):  # its backward pass may be collective, whatever terms do on this rank
                first = first + 0.0 * step.predictions[name].float().mean()
        added = [(term.weight, term.loss(step)) for term in self.terms if term.adds]
        return Losses(
            parts=torch.stack([first, *(first.new_zeros(()) if part is None else weight * part for weight, part in added)]),
            samples=samples.detach() if factors is None else samples.detach() / factors.expand_as(errors).flatten(1).mean(1),
            fractions=fractions,
        )

    def _step(self, model: nn.Module, batch: MicroBatch, parallel: Parallel, fractions: Tensor, turn: Turn) -> Step:
        """All forward passes over a micro-batch."""
        noisy, targets, predictions = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        with torch.no_grad():
            latents = self._latents(batch, turn.latents)
            width, height = batch.bucket.width, batch.bucket.height
            noise = self.noise.normal(batch.numbers, latents.shape[1:])
            chance = partial(self.noise.column, batch.numbers)
            t = to_device(self.objective.times(fractions), latents.device)
            dropped = chance(RandomColumn.CAPTION_DROPOUT) < self._dropout(batch)
            texts = {"": self._caption_conditioning(batch, dropped)}
            for name, second in batch.second_captions.items():
                texts[name] = second.conditioning or self.family.encode_captions(second.captions)
            sizes = self.family.encode_size_conditioning(batch.size_conditioning, width, height)
        for name in (*sorted(batch.needs), POLICY):
            chosen = pass_parts(name)
            column = chosen.get("latents", "")
            if column not in noisy:
                clean = self._latents(batch, column) if column else latents
                noisy[column] = self.objective.add_noise(clean, noise, t)
                targets[column] = self.objective.target(clean, noise, t)
            given = texts[chosen.get("caption", "")] | sizes
            made = {} if name.startswith(POLICY) else batch.base
            if (place := (name, column or turn.latents)) not in made:
                with nullcontext() if name.startswith(POLICY) else self._base(model), parallel.autocast():
                    made[place] = self.family.forward(model, noisy[column], self.objective.timesteps(t), given)
            predictions[name] = made[place]
        return Step(
            batch=batch,
            objective=self.objective,
            noise=self.noise,
            t=t,
            weights=self.weighting(t),
            predictions=predictions,
            targets=targets,
            turn=turn,
        )

    @torch.no_grad()
    def _latents(self, batch: MicroBatch, column: str) -> Tensor:
        """Those of the images, or of a column: the column itself, or if it has bytes, which are pixels, what they become."""
        if not column:
            return latents_of(self.family, batch.pixels, batch.latents)
        values = batch.columns[column]
        return self.family.encode_images(normalised(values)) if values.dtype == torch.uint8 else values

    @contextmanager
    def _base(self, model: nn.Module) -> Iterator[None]:
        """Within it the model predicts without its adapter, and without gradients."""
        if self.without_adapter is None:
            message = "a term of the loss needs the model without its adapter, which this run does not have"
            raise UserError(message, fix="train an adapter (--model_type=lora), or leave the term out")
        with torch.no_grad(), self.without_adapter(model):
            yield

    def describe_timesteps(self, buckets: Iterable[Bucket]) -> str:
        """Which noise levels images of these sizes are trained at, in words: "logit-normal(0, 1), shift 3 (...)"."""
        return self.timesteps.describe({self.family.image_tokens(bucket.width, bucket.height) for bucket in buckets})

    def _dropout(self, batch: MicroBatch) -> float | Tensor:
        """The share of visits without a caption: one for all, or for each image where its dataset has another (host memory)."""
        given = [spec.caption_dropout_probability for spec in batch.datasets]
        if all(share is None for share in given):
            return self.dropout
        return torch.tensor([self.dropout if share is None else share for share in given])

    def _caption_conditioning(self, batch: MicroBatch, dropped: Tensor) -> Conditioning:
        """The conditioning of the captions, and of the empty prompt where a caption is `dropped` (in host memory)."""
        if batch.conditioning is None or self.unconditional is None:
            captions = ["" if drop else caption for caption, drop in zip(batch.captions, dropped.tolist(), strict=True)]
            return self.family.encode_captions(captions)
        unconditional, masks = self.unconditional, {"cpu": dropped}
        masks.setdefault(self.noise.device.type, to_device(dropped, self.noise.device))
        return {
            name: torch.where(masks[rows.device.type].view(-1, *[1] * (rows.ndim - 1)), unconditional[name], rows)
            for name, rows in batch.conditioning.items()
        }


def default_distribution(objective: Objective) -> Distribution:
    """How often each noise level is trained unless the user says so.

    Rectified flow: logit-normal, as Stable Diffusion 3 was trained (Esser et al. 2024, section 3.1), and Sana, Lumina Image 2.0
    and Z-Image after it. Denoising diffusion: uniform, as in Ho et al. 2020.
    """
    return "logit_normal" if isinstance(objective, RectifiedFlow) else "uniform"


def denoising_loss(
    config: Config,
    family: ModelFamily,
    device: str,
    unconditional: Conditioning | None = None,
    terms: Sequence[Term] = (),
) -> DenoisingLoss:
    """The loss that the options describe. Raises UserError for options that do not go together.

    `unconditional` is the row of the empty prompt, where batches have theirs; None if texts are encoded in every step. `terms`
    are those of plugins.
    """
    options = config[ObjectiveOptions]
    objective = objective_of(config, family)
    timesteps = build_timesteps(
        distribution=options.timestep_distribution or default_distribution(objective),
        sigmoid_mean=options.flow_sigmoid_mean,
        sigmoid_scale=options.flow_sigmoid_scale,
        shift=options.flow_schedule_shift,
        auto_shift=options.flow_schedule_auto_shift,
        native=family.flow_shift,
    )
    for term in terms:
        timesteps = term.timesteps(timesteps)
    return DenoisingLoss(
        family=family,
        objective=objective,
        timesteps=timesteps,
        weighting=build_weighting(objective, snr_gamma=options.snr_gamma, flow_weighting=options.flow_weighting),
        noise=SampleNoise(config[RunOptions].seed, device),
        dropout=config[DataOptions].caption_dropout_probability,
        unconditional=unconditional,
        without_adapter=None if lacks_base(config, family) else partial(family.adapter_strength, strength=0.0),
        terms=terms,
    )
