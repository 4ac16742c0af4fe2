"""Whether a checkpoint belongs to the run that the options describe: effective batch, seed, data. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from smalti.config import Config, DataOptions, LaunchOptions, RunOptions, TrainingOptions
from smalti.data import Identity, PreparedData, Settings, Version, changes, first_digest
from smalti.errors import CheckpointError
from smalti.rundir import RunDirectory

_SEEN = {
    *("crop", "crop_style", "maximum_image_size", "target_downsample_size", "flip_probability", "caption_weights"),
    *("caption_prefix", "caption_suffix", "trigger_word", "caption_shuffle", "caption_tag_dropout_rate", "caption_filter_list"),
}
"""Settings that change what is trained on even where the order of samples stays."""


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A checkpoint that may be resumed from. `changes` says what is different in the data, in words; the user accepts it.

    `settings` are those that would undo a part of it. `reordered`: samples come in another order than before, so that the place
    in it means nothing any more. `version` is that of the run's order, None if it is what a new run would have.
    """

    changes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    reordered: bool = False
    version: Version | None = None
    notices: tuple[str, ...] = ()


def check_resumable(trainer: Mapping[str, object], config: Config, data: PreparedData, source: Path) -> Resumption:
    """Compare what the checkpoint at `source` says in its `trainer` with this run. The same answer on every rank.

    What it does not say, as one of another trainer, is not compared. Raises CheckpointError for everything that would make the
    run another one, unless that is in the data and `--on_changed_data=continue` accepts it.
    """
    batch, seed = _batch(trainer, config, data), _seed(trainer, config)
    problems = [problem for problem in (batch, seed) if problem]
    # How often the samples of small buckets are repeated may depend on the effective batch, and so does the order.
    found = _data(trainer, data, RunDirectory(source.parent.parent).data, same_batch=batch is None)
    if found.changes and config[DataOptions].on_changed_data == "refuse":
        when = " from the next epoch on" if found.reordered else ""
        back = [f"set {', '.join(dict.fromkeys(found.settings))}"] if found.settings else []
        back += ["put the data back"] if len(found.changes) > len(found.settings) else []
        fix = f"{' and '.join(back)}, or --on_changed_data=continue to train on what is there now{when}"
        problems.append((f"the data have changed: {'; '.join(found.changes)}", fix))
    if problems:
        raise CheckpointError(
            f"{source} belongs to another run than the options describe: {'; '.join(message for message, _ in problems)}",
            fix="; ".join([*(fix for _, fix in problems), "or start a new run in another --output_dir"]),
        )
    return found


def noise_level_notices(trainer: Mapping[str, object], timesteps: str) -> list[str]:
    """What to say of the noise levels, in words `timesteps`: a resumed run may train at others, but not unseen."""
    was = trainer.get("timesteps", timesteps)
    return [] if was == timesteps else [f"timesteps were {was}, are now {timesteps}"]


def _batch(trainer: Mapping[str, object], config: Config, data: PreparedData) -> tuple[str, str] | None:
    now = data.order.effective_batch
    was = cast(int, trainer.get("effective_batch", now))
    if was == now:
        return None
    batch, accumulation = config[DataOptions].train_batch_size, config[TrainingOptions].gradient_accumulation_steps
    ranks = now // (batch * accumulation)
    ways = []
    if was % (ranks * batch) == 0:
        ways.append(f"--gradient_accumulation_steps={was // (ranks * batch)}")
    if was % (ranks * accumulation) == 0:
        ways.append(f"--train_batch_size={was // (ranks * accumulation)}")
    if was % (batch * accumulation) == 0 and config[LaunchOptions].num_machines == 1:
        processes = config[LaunchOptions].num_processes // ranks  # several share the samples of one
        ways.append(f"--num_processes={was // (batch * accumulation) * processes}")
    if not ways and was % ranks == 0:
        ways.append(f"--train_batch_size=1 --gradient_accumulation_steps={was // ranks}")
    counted = f"{ranks} rank{'s' if ranks > 1 else ''} x {batch} x {accumulation}"
    return (
        f"the effective batch was {was}, is now {now} ({counted})",
        " or ".join(ways) if ways else f"choose a number of ranks that divides {was}",
    )


def _seed(trainer: Mapping[str, object], config: Config) -> tuple[str, str] | None:
    now = config[RunOptions].seed
    was = trainer.get("seed", now)
    return None if was == now else (f"the seed was {was}, is now {now}", f"--seed={was}")


def _data(trainer: Mapping[str, object], data: PreparedData, directory: Path, *, same_batch: bool) -> Resumption:
    match trainer.get("data"):
        case None:
            return Resumption()
        case str(digest):
            return _since_first_digest(digest, trainer, data) if same_batch else Resumption()
        case values:
            try:
                return _since(Identity.read(values), data, directory, same_batch=same_batch)
            except ValueError as error:
                raise CheckpointError(f"the state of the checkpoint is malformed: {error}") from error


def _since_first_digest(digest: str, trainer: Mapping[str, object], data: PreparedData) -> Resumption:
    """Of a checkpoint that holds one digest of everything, seed and effective batch in it."""
    seed = cast(int, trainer.get("seed", data.order.seed))
    if first_digest(data.indexes, data.order, seed=seed) != digest:
        change = "images were added, removed, renamed or resized, or other buckets or repeats were set"
        changes = (f"{change} (the checkpoint is of an earlier version and does not say what)",)
        return Resumption(changes=changes, reordered=True)
    # Then images were stretched to their buckets unless a dataset said otherwise, and the buckets were the same.
    cropped = [one.spec.id for one in data.datasets if one.spec.crop and "crop" not in one.spec.model_fields_set]
    changed = tuple(f"crop of dataset {name} was false, as earlier versions had it by default, is now true" for name in cropped)
    note = "contents and captions of images are not compared, as the checkpoint is of an earlier version; later ones keep them"
    version: Version | None = None if data.order.version == 1 else 1
    return Resumption(changes=changed, settings=("crop=false",) * len(changed), version=version, notices=(note,))


def _since(then: Identity, data: PreparedData, directory: Path, *, same_batch: bool) -> Resumption:
    earlier = then.version is None
    now = Identity.earlier(data.indexes, data.order, data.settings) if earlier else data.identity
    reordered = then.order != now.order
    settings = _settings(then.settings, now.settings, reordered=reordered)
    changed = [message for message, _ in settings]
    if then.samples != now.samples:
        found = changes(then, data.indexes, directory)
        unknown = ["images or captions changed; which ones is not recorded here"]
        changed += unknown if found is None else found or ["what belongs to images, such as masks, changed"]
    if reordered and same_batch and not changed:
        changed.append("samples come in another order")
    version = then.version or 1
    return Resumption(
        changes=tuple(changed),
        settings=tuple(setting for _, setting in settings),
        reordered=reordered,
        version=None if reordered or version == data.order.version else version,
    )


def _settings(then: Settings, now: Settings, *, reordered: bool) -> list[tuple[str, str]]:
    """Settings that differ, in words, and each as it was. Where the order is the same, only what is seen of them matters."""
    return [
        (
            f"{name} of dataset {dataset} was {_shown(was)}, is now {_shown(value)}",
            f"{name}={_shown(was)}" if was is not None else f"no {name}",
        )
        for dataset in sorted(then.keys() & now.keys())
        for name in dict.fromkeys((*then[dataset], *now[dataset]))
        if (was := then[dataset].get(name)) != (value := now[dataset].get(name)) and (reordered or name in _SEEN)
    ]


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
