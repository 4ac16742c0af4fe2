"""The loss on held-out images, at fixed noise levels and with fixed noise, on all ranks together.

What is measured is the objective's loss without the weights of noise levels, and with the captions as they are: curves of runs
that sample and weight noise levels differently can be compared. A run that trains a range of noise levels alone is measured
within it. Masks and weights of held-out images count as in training; metrics are named after them then, and the loss without
them is measured too.

Shapes: N held-out samples, T noise levels, B samples of a batch, latents (B, C, h, w).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smalti import Config, EvaluationResult, HookSpecs, StopReason
from smalti.config import ObjectiveOptions
from smalti.diffusion import STEPS, Conditioning, SampleNoise, TimestepSampler
from smalti.models import latents_of
from smalti.plugins import notify_each
from smalti.system import load_json
from smalti.training import POLICY, PeriodicWork, Run, Step, attempt, computed, is_due, log_metrics, on_all_ranks
from smalti_validation.eval_mode import eval_mode
from smalti_validation.held_out import HeldOut, HeldOutImages
from smalti_validation.history import Change, History, table_of
from smalti_validation.options import ValidationOptions

if TYPE_CHECKING:
    from smalti.data import DatasetSpec
    from smalti.models import ModelFamily

_log = logging.getLogger(__name__)
_OF_LOSS = ("prediction_type", "loss_type", "huber_c", "huber_schedule", "beta_schedule", "rescale_betas_zero_snr")
"""The options of the objective that an evaluation depends on."""
_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Fractions of the range of noise levels that is trained: the middles of five equal parts."""


@dataclass(frozen=True, kw_only=True)
class ComparedResult(EvaluationResult):
    """The result with its `change` to the last evaluation that clearly improved; None if there was none before.

    `plain` is the loss without the `factors`, by timestep; empty where there are none.
    """

    plain: Mapping[int, float]
    change: Change | None


class Evaluation(PeriodicWork):
    """Measures the loss at the intervals of the options and after the last step, if there are held-out images.

    Keeps the history of the run, saves what is among the best, and ends the run when patience has run out.
    """

    name = "evaluation"

    def __init__(self, config: Config) -> None:
        self.options = config[ValidationOptions]
        self._held_out: HeldOut | None = None
        self._history: History | None = None
        self._named = False

    def check(self, family: ModelFamily, datasets: Sequence[DatasetSpec]) -> list[str]:
        names = ("eval_steps_interval", "eval_epoch_interval", "keep_best", "eval_patience")
        wanted = [name for name in names if getattr(self.options, name)]
        if not wanted or any(spec.dataset_type == "eval" for spec in datasets):
            return []
        return [f"{' and '.join(wanted)} without effect: no dataset has the dataset_type eval"]

    def start(self, run: Run) -> None:
        """Go on with the history. A failure is reported and ends nothing."""
        wanted = self.options.keep_best or self.options.eval_patience
        if wanted and run.data.held_out is not None and run.state.step < run.state.max_steps:
            attempt(run, "reading of earlier evaluations", self._resume)

    def _resume(self, run: Run) -> None:
        """End the run if its patience has run out before; else make up for an evaluation that was due and cut off."""
        step = run.state.step
        known = self._on_main_rank(run, lambda history: [step in history, history.since_reference, history.reference])
        evaluated, since, reference = known
        if self._waited_enough(since):
            run.state.max_steps = step
            if run.world.is_main:
                _log.warning("%s", self._no_improvement(since, reference))
        elif step and not evaluated and self.is_due(run):
            self.run(run)

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
                latent_shape=run.family.latent_shape,
            )
        held_out = self._held_out
        result, losses, counted = measure(run, held_out)
        table = table_of(held_out.numbers[counted], losses[0].numpy())

        def remember(history: History) -> list[object]:
            change = history.compare(table)
            run.ownership.check()
            if not self._named:
                history.name_images(held_out.names)
                self._named = True
            history.add(result.step, result.loss, table, change, keep=self.options.keep_best)
            best = self._is_among_best(run, history, result.loss)
            return [change and asdict(change), history.since_reference, history.reference, best]

        change, since, reference, best = self._on_main_rank(run, remember)
        plain = dict(zip(result.by_timestep, losses[1].mean(0).tolist(), strict=True)) if result.factors else {}
        report(run, ComparedResult(**vars(result), plain=plain, change=change and Change(**change)))
        if run.boundary.final:
            return
        if best and result.step not in (run.saved_step, run.saver.pending_step):
            from smalti.training import save  # which a launcher that checks the run does not need

            save(run, last=False)
        if self._waited_enough(since):
            run.state.request_stop(StopReason.COMPLETED, self._no_improvement(since, reference))

    def _waited_enough(self, evaluations: int) -> bool:
        return 0 < self.options.eval_patience <= evaluations

    def _no_improvement(self, evaluations: int, since: int | None) -> str:
        """Why the run ends, and how it goes on."""
        found = f"eval_loss has not improved in {evaluations} evaluations" + ("" if since is None else f" since step {since}")
        return f"{found}; --eval_patience={evaluations + self.options.eval_patience} continues the run"

    def _is_among_best(self, run: Run, history: History, loss: float) -> bool:
        """Whether fewer checkpoints than are kept are as good."""
        ranked, _ = run.checkpoints.ranked()
        return math.isfinite(loss) and sum(history.loss(entry.step) <= loss for entry in ranked) < self.options.keep_best

    def _on_main_rank(self, run: Run, action: Callable[[History], list[object]]) -> list[Any]:
        """What `action` says on the main rank, which has the history, on every rank; JSON-able. *Collective*.

        Raises AttemptFailed, on every rank.
        """

        def act() -> str:
            if not run.world.is_main:
                return ""
            if self._history is None:
                self._history = History(run.directory, _measured(run), run.state.resumed or 0)
            return json.dumps(action(self._history))

        answer: list[Any] = load_json(run.parallel.all_gather_text(on_all_ranks(run.parallel, act))[0])
        return answer


def _measured(run: Run) -> str:
    """A digest of all that the loss depends on apart from the weights: images, noise, noise levels and objective."""
    assert run.data.held_out is not None
    images = run.data.held_out.identity
    objective = run.config[ObjectiveOptions].model_dump(include=set(_OF_LOSS))
    seed, levels = run.config[ValidationOptions].validation_seed, [*_levels(run).values()]
    parts = [images.order, images.samples, images.settings, seed, levels, objective]
    return sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _levels(run: Run) -> dict[int, float]:
    assert run.data.held_out is not None
    buckets = (content.bucket for content in run.data.held_out.order.buckets)
    return levels_of(run.loss.timesteps, {run.family.image_tokens(bucket.width, bucket.height) for bucket in buckets})


def levels_of(sampler: TimestepSampler, sizes: Collection[int]) -> dict[int, float]:
    """The noise levels to measure, by timestep: fractions of the way to noise, within those that a sampler returns.

    The range is that of images of all these numbers of tokens together. Timesteps are whole, so a narrow range has fewer.
    """
    ends = [sampler(torch.tensor([0.0, 1.0], dtype=torch.float64), tokens).tolist() for tokens in sizes]
    low, high = round(min(low for low, _ in ends), 6), round(max(high for _, high in ends), 6)  # 0 and 1 but for rounding
    return {round(STEPS * level): level for level in (low + (high - low) * part for part in _LEVELS)}


def measure(run: Run, held_out: HeldOut) -> tuple[EvaluationResult, tuple[Tensor, Tensor], Tensor]:
    """Measure the loss on every held-out image. *Collective*.

    Returns also the losses (n, T) of the n images that count, with the factors of the result and without, and (N,) which do.

    Raises AttemptFailed, on every rank.
    """
    begin = time.perf_counter()
    levels = _levels(run)
    with run.phases.during("evaluating"), eval_mode(run) as model:
        table, factors = _losses(run, model, held_out, [*levels.values()])
    counted, count = table[:, -1] > 0, len(levels)
    losses, plain = table[counted, :count], table[counted, count:-1]
    means = losses.mean(0).tolist()
    result = EvaluationResult(
        step=run.state.step,
        loss=sum(means) / len(means),
        by_timestep=dict(zip(levels, means, strict=True)),
        samples=int(table[:, -1].sum()),
        averaged=run.ema is not None,
        seconds=time.perf_counter() - begin,
        factors=factors,
    )
    return result, (losses, plain), counted


def report(run: Run, result: ComparedResult) -> None:
    """Report a result to trackers and observers."""
    metrics, name = dict[str, float](), "/".join(["eval_loss", *(["+".join(result.factors)] if result.factors else [])])
    for measured, levels in (("eval_loss", result.plain), (name, result.by_timestep)):
        if levels:
            metrics[measured] = sum(levels.values()) / len(levels)
            metrics |= {f"{measured}/t={timestep}": loss for timestep, loss in levels.items()}
    if (change := result.change) is not None:
        metrics |= {f"{name}/change": change.loss}
        metrics |= {} if change.interval is None else {f"{name}/change_interval": change.interval}
    log_metrics(run.plugins, run.world, metrics, result.step)
    notify_each(run.plugins, HookSpecs.on_evaluation, run.state, result=result)


def _losses(run: Run, model: nn.Module, held_out: HeldOut, levels: Sequence[float]) -> tuple[Tensor, tuple[str, ...]]:
    """(N, 2 T + 1): the losses of each sample, those without factors, and whether it counts; and the terms with factors.

    *Collective*. In fp64 on the CPU, the same on every rank. Each row is filled by one rank, so that adding up what the ranks
    have rounds nothing.
    """
    world = run.world
    table, factors = torch.zeros(held_out.count, 2 * len(levels) + 1, device=world.device), dict[str, None]()
    speaks = world.rank % world.context == 0  # of the ranks that share samples, one
    noise = SampleNoise(run.config[ValidationOptions].validation_seed, world.device)

    def measure() -> None:
        for batch, counts in held_out.share(world.data_rank, world.data_size):
            images = held_out.read(batch)
            columns, found = _batch_losses(run, model, images, noise, levels)
            factors.update(dict.fromkeys(found))
            if counts and speaks:
                rows = table[batch.place : batch.place + len(batch.samples)]
                rows[:, :-1] = columns
                rows[:, -1] = images.readable.to(world.device)

    computed(run, measure)
    whole = torch.stack(list(run.parallel.gather(table)))
    return whole.sum(0).cpu().double(), tuple(factors)


def _batch_losses(
    run: Run, model: nn.Module, images: HeldOutImages, noise: SampleNoise, levels: Sequence[float]
) -> tuple[Tensor, list[str]]:
    """(B, 2 T), with all factors and without, and the names of the terms that have some."""
    family, objective = run.family, run.loss.objective
    latents, conditioning = _encoded(family, images)
    noise_values = noise.normal(images.numbers, latents.shape[1:])
    columns, plain, factors = [], [], dict[str, Tensor]()
    for level in levels:
        t = objective.times(torch.full((len(latents),), level, device=latents.device))
        noisy = objective.add_noise(latents, noise_values, t)
        with run.parallel.autocast():
            prediction = family.forward(model, noisy, objective.timesteps(t), conditioning)
        target = objective.target(latents, noise_values, t)
        errors = objective.errors(prediction, target, t)
        plain.append(errors.flatten(1).mean(1))
        if images.columns:
            step = Step(
                batch=images.micro_batch,
                objective=objective,
                noise=noise,
                t=t,
                weights=torch.ones_like(t),
                predictions={POLICY: prediction},
                targets={"": target},
            )
            found = ((term.name, term.factor(step)) for term in run.loss.terms)
            factors = {name: factor for name, factor in found if factor is not None}
            for factor in factors.values():
                errors = errors * factor
        columns.append(errors.flatten(1).mean(1))
    return torch.stack(columns + plain, dim=1), [*factors]


def _encoded(family: ModelFamily, images: HeldOutImages) -> tuple[Tensor, Conditioning]:
    """Latents (B, C, h, w) and conditioning of the images: encoded before training, or now."""
    conditioning, bucket = images.conditioning, images.bucket
    if conditioning is None:
        conditioning = family.encode_captions(images.captions)
    latents = latents_of(family, images.pixels, images.latents)
    sizes = family.encode_size_conditioning(images.size_conditioning, bucket.width, bucket.height)
    return latents, conditioning | sizes
