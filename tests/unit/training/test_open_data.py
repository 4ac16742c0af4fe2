"""Ranks whose launcher has scanned nothing, without the package with which all ranks scan."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch.distributed as dist

from smalti.config import resolve
from smalti.errors import UserError
from smalti.parallel import GlooCommunicator
from smalti.plugins import Selection, find_family, load_plugins, schema_of
from smalti.rundir import Phases, RunDirectory
from smalti.training.build_run import open_data
from smalti.training.run import Context
from smalti.types import World
from support.forked_ranks import forked_processes
from support.images import images_in


def images_of_a_rank(folder: Path, output: Path) -> tuple[int, str]:
    """How many images this rank trains on, or the error."""
    plugins = load_plugins(Selection(only=("toy",)))
    flags = (f"--instance_data_dir={folder}", f"--output_dir={output}", "--model_family=toy", "--resolution=32")
    config = resolve(schema_of(plugins), (*flags, "--resolution_type=pixel", "--max_train_steps=1"), environment={})
    context = SimpleNamespace(
        config=config,
        plugins=plugins,
        parallel=GlooCommunicator(world=World(rank=dist.get_rank(), size=2), group=dist.group.WORLD),
        phases=Phases(),
        directory=RunDirectory(output),
        writer=None,
        periodic=(),
    )
    try:
        data, _ = open_data(cast(Context, context), find_family(config, plugins))
    except UserError as error:
        return 0, f"{type(error).__name__}: {error.message}"
    return sum(len(dataset.index) for dataset in data.datasets), ""


def test_the_main_rank_scans_and_all_ranks_read(tmp_path):
    images_in(tmp_path / "images", 6)
    with forked_processes() as ranks:
        assert ranks.run(images_of_a_rank, tmp_path / "images", tmp_path / "run") == [(6, ""), (6, "")]
        empty = ranks.run(images_of_a_rank, tmp_path / "nothing", tmp_path / "other")
    told = f"{tmp_path / 'nothing'} is not a folder"
    assert empty == [(0, f"UserError: {told}"), (0, f"UserError: rank 0: {told}")]
