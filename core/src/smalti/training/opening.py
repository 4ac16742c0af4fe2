"""What building a run begins with: its directory is taken, its data are opened and encoded ahead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from smalti.config import Config, RunOptions, ValidationPrompt
from smalti.data import (
    Encoded,
    PreparedData,
    encode_ahead,
    load_data,
    scan_data_on_all_ranks,
    scan_progress,
    was_scanned,
)
from smalti.models import ModelFamily
from smalti.parallel import Communicator, RankError, run_on_all_ranks, run_on_main_rank
from smalti.plugins import Plugins
from smalti.rundir import Phases, RunDirectory, RunWriter, join
from smalti.training.loss import DenoisingLoss
from smalti.types import DistributedPlan, RankInfo, RunInfo, World


def become_run(config: Config, communicator: Communicator, writer: RunWriter | None, closing: ExitStack) -> RunWriter | None:
    """The run directory in the hands of the main rank, None on others. *Collective*.

    `writer` is it if this process holds it already; what is taken here is left with `closing`.
    """
    taken = [] if writer is None else [writer]

    def take() -> str:
        if communicator.world.is_main and writer is None:
            directory = RunDirectory(cast(Path, config[RunOptions].output_dir))
            taken.append(join(directory, config_digest=config.digest, world_size=communicator.world.size))
            closing.callback(taken[0].close)
            taken[0].events.mask = config.masked
        return ""

    try:
        run_on_all_ranks(communicator, take)
    except RankError as failure:
        raise failure.for_user() from failure
    return taken[0] if taken else None


def open_data(
    config: Config,
    plugins: Plugins,
    family: ModelFamily,
    communicator: Communicator,
    directory: Path,
    writer: RunWriter | None,
    prompts: Sequence[ValidationPrompt],
    phases: Phases,
) -> tuple[PreparedData, Encoded]:
    """The order of samples on this rank, and what of them was encoded ahead. *Collective*.

    Reads the indexes that the launcher wrote just now into `directory`. Where nobody has, all ranks scan them.
    `prompts` are those of validation.
    """
    attempt = writer.record.started if writer is not None else None
    try:
        scanned = run_on_main_rank(communicator, lambda: str(attempt is not None and was_scanned(directory, attempt)))
        if scanned != str(True):
            notices = scan_data_on_all_ranks(
                config, plugins, family.alignment, directory, communicator, scan_progress(phases), attempt=attempt
            )
            for notice in notices:
                print(f"smalti: note: {notice}", file=sys.stderr)
    except RankError as failure:
        raise failure.for_user() from failure
    data = load_data(config, plugins, family.alignment, directory)
    encoded = encode_ahead(config, plugins, family, data, communicator, directory, phases, prompts)
    phases.enter("building")
    return data, encoded


def run_info(
    config: Config,
    plugins: Plugins,
    plan: DistributedPlan,
    world: World,
    family: ModelFamily,
    data: PreparedData,
    loss: DenoisingLoss,
    writer: RunWriter | None,
    phases: Phases,
    **sizes: int,
) -> RunInfo:
    """What observers receive about the run; `sizes` are `parameters` and `trainable`."""
    known = rank_info(config, plugins, plan, world, phases)
    return RunInfo(
        id=known.id,
        directory=known.directory,
        world=world,
        config=config,
        strategy=known.strategy,
        plugins=known.plugins,
        started=known.started,
        phases=known.phases,
        family=family.name,
        **sizes,
        effective_batch=data.order.effective_batch,
        timesteps=loss.describe_timesteps(count.bucket for count in data.counts),
        writer=writer,
    )


def rank_info(config: Config, plugins: Plugins, plan: DistributedPlan, world: World, phases: Phases) -> RankInfo:
    """What observers receive as soon as the ranks are connected, and the main rank has the run directory."""
    directory = RunDirectory(cast(Path, config[RunOptions].output_dir))
    record = directory.record()
    return RankInfo(
        id=record.id if record else "",
        directory=directory.path,
        world=world,
        config=config,
        strategy=plan.title,
        plugins=plugins.versions,
        started=record.started if record else None,
        phases=phases,
    )
