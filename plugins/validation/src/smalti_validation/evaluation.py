"""The loss on held-out images, at fixed noise levels and with fixed noise, on all ranks together.

What is measured is the objective's loss without the weights of noise levels, and with the captions as they are: curves of runs
that sample and weight noise levels differently can be compared.

Shapes: N held-out samples, T noise levels, B samples of a batch, latents (B, C, h, w).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from smalti import Config, EvaluationResult, HookSpecs
from smalti.diffusion import STEPS, Conditioning, SampleNoise
from smalti.models import latents_of
from smalti.plugins import notify_each
from smalti.training import PeriodicWork, Run, computed, is_due, log_metrics
from smalti_validation.eval_mode import eval_mode
from smalti_validation.held_out import HeldOut, HeldOutImages
from smalti_validation.options import ValidationOptions

if TYPE_CHECKING:
    from smalti.data import DatasetSpec
    from smalti.models import ModelFamily

_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Fractions of the way to noise: the middles of five equal parts."""


class Evaluation(PeriodicWork):
    """Measures the loss at the intervals of the options and after the last step, if there are held-out images."""

    name = "evaluation"

    def __init__(self, config: Config) -> None:
        self.options = config[ValidationOptions]
        self._held_out: HeldOut | None = None

    def check(self, family: ModelFamily, datasets: Sequence[DatasetSpec]) -> list[str]:
        wanted = [name for name in ("eval_steps_interval", "eval_epoch_interval") if getattr(self.options, name)]
        if not wanted or any(spec.dataset_type == "eval" for spec in datasets):
            return []
        return [f"{' and '.join(wanted)} without effect: no dataset has the dataset_type eval"]

    def is_due(self, run: Run) -> bool:
        state, epochs, epoch_of = run.state, self.options.eval_epoch_interval, run.data.order.epoch_of
        if run.data.held_out is None:
            return False
        if is_due(state, self.options.eval_steps_interval) or state.step == state.max_steps:
            return True
        return epochs > 0 and not state.skipped and epoch_of(state.position) // epochs > state.epoch // epochs

    def run(self, run: Run) -> None:
        assert run.data.held_out is not None, "evaluation needs held-out images"
        if self._held_out is None:
            self._held_out = HeldOut(
                run.data.held_out,
                batch=self.options.validation_batch_size,
                device=run.world.device,
                latents=run.encoded.held_out,
                texts=run.encoded.texts,
            )
        evaluate(run, self._held_out)


def evaluate(run: Run, held_out: HeldOut) -> None:
    """Measure the loss on every held-out image, and report it to trackers and observers. *Collective*.

    Raises AttemptFailed, on every rank.
    """
    begin = time.perf_counter()
    with run.phases.during("evaluating"), eval_mode(run) as model:
        table = _losses(run, model, held_out)
    counted = table[table[:, -1] > 0, :-1]
    means = counted.mean(0).tolist()
    result = EvaluationResult(
        step=run.state.step,
        loss=sum(means) / len(means),
        by_timestep={round(STEPS * level): mean for level, mean in zip(_LEVELS, means, strict=True)},
        samples=len(counted),
        averaged=run.ema is not None,
        seconds=time.perf_counter() - begin,
    )
    by_timestep = {f"eval_loss/t={timestep}": loss for timestep, loss in result.by_timestep.items()}
    log_metrics(run.plugins, run.world, {"eval_loss": result.loss, **by_timestep}, result.step)
    notify_each(run.plugins, HookSpecs.on_evaluation, run.state, result=result)


def _losses(run: Run, model: nn.Module, held_out: HeldOut) -> Tensor:
    """(N, T + 1), fp64 on the CPU, the same on every rank: each sample's losses, and whether it counts. *Collective*.

    Each row is filled by one rank, so that adding up what the ranks have rounds nothing.
    """
    world = run.world
    table = torch.zeros(held_out.count, len(_LEVELS) + 1, device=world.device)
    speaks = world.rank % world.context == 0  # of the ranks that share samples, one
    noise = SampleNoise(run.config[ValidationOptions].validation_seed, world.device)

    def measure() -> None:
        for batch, counts in held_out.share(world.data_rank, world.data_size):
            images = held_out.read(batch)
            columns = _batch_losses(run, model, images, noise)
            if counts and speaks:
                rows = table[batch.place : batch.place + len(batch.samples)]
                rows[:, :-1] = columns
                rows[:, -1] = images.readable.to(world.device)

    computed(run, measure)
    whole = torch.stack(list(run.parallel.gather(table)))
    return whole.sum(0).cpu().double()


def _batch_losses(run: Run, model: nn.Module, images: HeldOutImages, noise: SampleNoise) -> Tensor:
    """(B, T)."""
    family, objective = run.family, run.loss.objective
    latents, conditioning = _encoded(family, images)
    noise_values = noise.normal(images.numbers, latents.shape[1:])
    columns = []
    for level in _LEVELS:
        t = objective.times(torch.full((len(latents),), level, device=latents.device))
        noisy = objective.add_noise(latents, noise_values, t)
        with run.parallel.autocast():
            prediction = family.forward(model, noisy, objective.timesteps(t), conditioning)
        columns.append(objective.compare(prediction, objective.target(latents, noise_values, t), t))
    return torch.stack(columns, dim=1)


def _encoded(family: ModelFamily, images: HeldOutImages) -> tuple[Tensor, Conditioning]:
    """Latents (B, C, h, w) and conditioning of the images: encoded before training, or now."""
    conditioning, bucket = images.conditioning, images.bucket
    if conditioning is None:
        conditioning = family.encode_captions(images.captions)
    latents = latents_of(family, images.pixels, images.latents)
    sizes = family.encode_size_conditioning(images.size_conditioning, bucket.width, bucket.height)
    return latents, conditioning | sizes
