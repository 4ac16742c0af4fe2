"""Datasets, their rules and the number of steps, from the options. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

from smalti.config import (
    Config,
    DataOptions,
    LaunchOptions,
    ModelOptions,
    RunOptions,
    TrainingOptions,
    expand,
)
from smalti.data.batch_check import BatchShape
from smalti.data.dataset import Dataset
from smalti.data.datasets.parse import DataDefaults, load_backend_config, parse_datasets
from smalti.data.datasets.spec import Catalog, DatasetSpec, catalog_of, unused_caches
from smalti.data.order import Passes
from smalti.data.prepared import DataRules, PreparedData, build_datasets, check_no_overlap, load_datasets, prepare
from smalti.data.scan.build import Progress
from smalti.errors import ConfigError, PreflightError, Problem
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, choose_distributed, create
from smalti.rundir import Phases, RunDirectory
from smalti.system import atomic_write, load_json, read_regular
from smalti.types import ScanEntry

Scan = Callable[[str], Progress]
_SCAN_NOTE = "scan.json"


def dataset_specs(config: Config, catalog: Catalog) -> tuple[DatasetSpec, ...]:
    """Returns the datasets that the options name. Raises ConfigError with every problem at once."""
    options = config[DataOptions]
    entries: list[dict[str, object]]
    if options.data_backend_config is not None:
        where = str(options.data_backend_config)
        entries = expanded(load_backend_config(options.data_backend_config), where)
    elif options.instance_data_dir is not None:
        folder = options.instance_data_dir
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.")
        entries, where = [{"id": name or "dataset", "instance_data_dir": str(folder)}], "instance_data_dir"
    else:
        entries, where = [dict(entry) for entry in options.datasets], "datasets"
    defaults = DataDefaults(**{each.name: getattr(options, each.name) for each in fields(DataDefaults)})
    output = config[RunOptions].output_dir
    placeholders = {"model_family": config[ModelOptions].model_family, "output_dir": str(output) if output else None}
    specs, problems = parse_datasets(
        entries,
        where=where,
        defaults=defaults,
        catalog=catalog,
        placeholders=placeholders,
        dialect=config.schema.dialect,
        option=config.value,
    )
    problems = (*problems, *_unused_prompt(config, specs), *_overlapping_folders(config, specs))
    if problems:
        raise ConfigError(problems)
    most = options.num_eval_images
    return tuple(_limited(spec, most) if spec.dataset_type == "eval" and most is not None else spec for spec in specs)


def _unused_prompt(config: Config, specs: Sequence[DatasetSpec]) -> list[Problem]:
    """A problem if instance_prompt is set and no dataset uses it."""
    if config[DataOptions].instance_prompt is None or not specs or any(spec.uses_instance_prompt for spec in specs):
        return []
    fix = "--caption_strategy=instanceprompt makes it the caption of all images; or set prepend_instance_prompt in the entry"
    return [Problem(message="instance_prompt is set, but no dataset uses it", where="instance_prompt", fix=fix)]


def _overlapping_folders(config: Config, specs: Sequence[DatasetSpec]) -> list[Problem]:
    """Problems for datasets whose folder would contain the run's own images.

    Hidden folders are not searched for images, and a dataset with a table uses only the images in the table.
    """
    if (output := config[RunOptions].output_dir) is None:
        return []
    run, problems = RunDirectory(output.expanduser().resolve()), []
    own = (run.samples, run.checkpoints, run.data, run.control)
    for spec in specs:
        if spec.type != "local" or spec.instance_data_dir is None or spec.metadata_backend != "discovery":
            continue
        folder = spec.instance_data_dir.resolve()
        searched = run.path.is_relative_to(folder) and not any(
            part.startswith(".") for part in run.path.relative_to(folder).parts
        )
        if searched:
            message = f"the output directory {run.path} is inside the folder of the dataset {spec.id!r}, {folder}"
            fix = "choose an --output_dir outside of it: validation images and plots would become training images"
            problems.append(Problem(message=message, where="output_dir", fix=fix))
        elif any(folder.is_relative_to(place) for place in own):
            message = f"the dataset {spec.id!r} is in {folder}, where the run stores its own files"
            problems.append(Problem(message=message, where="output_dir", fix="choose another --output_dir, or move the images"))
    return problems


def _limited(spec: DatasetSpec, most: int) -> DatasetSpec:
    return spec.model_copy(update={"max_num_samples": min(most, spec.max_num_samples or most)})


def expanded(entries: list[dict[str, object]], where: str) -> list[dict[str, object]]:
    """Returns the entries with {env:NAME} replaced. Raises ConfigError for names that are not in the environment."""
    problems: list[Problem] = []
    found = [cast(dict[str, object], expand(entry, os.environ, where, problems)) for entry in entries]
    if problems:
        raise ConfigError(problems)
    return found


def data_rules(config: Config, plugins: Plugins, alignment: int) -> DataRules:
    """Returns the rules for all datasets; `alignment` is the default of the model family.

    Ranks of one context-parallel group count as one.
    """
    options = config[DataOptions]
    passes = [create(each, each.order, config) for each in plugins.gather(HookSpecs.register_caches) if each.order]
    return DataRules(
        seed=config[RunOptions].seed,
        shape=BatchShape(
            train_batch_size=options.train_batch_size,
            ranks=config[LaunchOptions].num_processes // choose_distributed(config, plugins).context,
            accumulation=config[TrainingOptions].gradient_accumulation_steps,
        ),
        alignment=options.aspect_bucket_alignment or alignment,
        error_budget=options.data_error_budget,
        short_buckets=options.short_buckets or ("repeat" if options.allow_dataset_oversubscription else "merge"),
        passes=cast("Passes | None", next(iter(passes), None)),
    )


def scan_data(
    config: Config,
    plugins: Plugins,
    alignment: int,
    directory: Path | None,
    progress: Scan | None = None,
    *,
    attempt: float | None = None,
    build: Callable[..., tuple[Dataset, ...]] = build_datasets,
) -> PreparedData:
    """Scan the datasets and compute the order of samples. Call it in one process: the launcher, or rank 0.

    `directory` stores the indexes, so that the next scan opens only new files; None writes nothing. `attempt` is the time at
    which this attempt of the run began: its ranks then recognize the scan with `was_scanned`. `build` takes the
    place of `build_datasets` in a scan by several processes.
    """
    catalog = catalog_of(plugins)
    specs = dataset_specs(config, catalog)
    rules = data_rules(config, plugins, alignment)
    training = build(specs, catalog, directory, progress)
    _check_shuffled_reads(config, training, rules)
    data = prepare(training, rules, notices=unused_caches(specs), directory=directory)
    held_out = build(specs, catalog, directory, progress, kind="eval")
    if directory is not None and attempt is not None:
        note = {"attempt": attempt, "indexes": _indexes(directory)}
        atomic_write(directory / _SCAN_NOTE, json.dumps(note).encode())
    if not held_out:
        return data
    check_no_overlap(data.datasets, held_out)
    return _with_held_out(data, held_out, rules, directory)


def _check_shuffled_reads(config: Config, datasets: Sequence[Dataset], rules: DataRules) -> None:
    """Raises ConfigError if images would be read one by one, in a shuffled order, from files where each costs many others."""
    if not config[DataOptions].vae_cache_disable:
        return
    fix = "remove vae_cache_disable: images are then encoded in the order of the files; or make a folder: smalti dataset unpack"
    problems = []
    for dataset in datasets:
        if cost := dataset.source.bytes_per_shuffled_image:
            batch = rules.shape.effective
            message = f"each image in a shuffled order costs its row group: {cost / 1e6:.1f} MB, for a batch of {batch}"
            message = f"vae_cache_disable: {message} {cost * batch / 1e9:.1f} GB"
            problems.append(Problem(message=message, where=f"dataset {dataset.spec.id!r}", fix=fix))
    if problems:
        raise ConfigError(problems)


def scan_entry(config: Config, plugins: Plugins, *, engine: bool = False) -> ScanEntry | None:
    """A plugin's scan by all ranks, for a launch of several, or its `engine`, for commands; None where one process scans."""
    return next((each for each in plugins.gather(HookSpecs.configure_scan, config=config) if bool(each.encode) == engine), None)


def ranks_scan(config: Config, plugins: Plugins, directory: Path) -> bool:
    """Whether all ranks will scan the datasets together, rather than the launcher before it starts them.

    The launcher finds mistakes in the data before processes and models are loaded.
    """
    entry = scan_entry(config, plugins)
    return entry is not None and bool(create(entry, entry.wanted, config, plugins, directory))


def check_sources(config: Config, plugins: Plugins) -> None:
    """Find mistakes in the datasets without listing a storage. Raises what opening storages and tables raises."""
    catalog = catalog_of(plugins)
    specs = dataset_specs(config, catalog)
    for spec in (each for each in specs if each.has_images):
        catalog.open_source(spec, catalog.open_storage(spec)).check_table()
        catalog.open_columns(spec, specs)


def scan_progress(phases: Phases) -> Scan:
    """Reports the progress of a scan as a phase."""

    def begin(dataset: str) -> Progress:
        phases.enter("scanning", unit="images")
        return phases.advance

    return begin


def was_scanned(directory: Path, attempt: float) -> bool:
    """Whether the indexes in `directory` are, unchanged, those that this attempt of the run has written."""
    try:
        note: object = load_json(read_regular(directory / _SCAN_NOTE))
    except (OSError, ValueError):
        return False
    return note == {"attempt": attempt, "indexes": _indexes(directory)}


def _indexes(directory: Path) -> dict[str, list[int]]:
    """Size and time of each index."""
    found = {path.name: path.stat() for path in sorted(directory.glob("*.arrow"))}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in found.items()}


def load_data(config: Config, plugins: Plugins, alignment: int, directory: Path) -> PreparedData:
    """Like `scan_data`, from the indexes that another process has written."""
    catalog = catalog_of(plugins)
    specs, rules = dataset_specs(config, catalog), data_rules(config, plugins, alignment)
    data = prepare(load_datasets(specs, catalog, directory), rules, directory=directory)
    held_out = load_datasets(specs, catalog, directory, kind="eval")
    return _with_held_out(data, held_out, rules, directory) if held_out else data


def _with_held_out(data: PreparedData, datasets: tuple[Dataset, ...], rules: DataRules, directory: Path | None) -> PreparedData:
    """Returns the data with held-out images, which need not fill batches."""
    alone = replace(rules, shape=BatchShape(train_batch_size=1, ranks=1, accumulation=1), passes=None)
    held_out = prepare(datasets, alone, directory=directory)
    return replace(data, held_out=held_out, notices=(*data.notices, *held_out.notices))


def total_steps(config: Config, data: PreparedData) -> int:
    """Returns the optimizer steps of the run: as set, or as many as the epochs have batches.

    Raises PreflightError if all datasets end before the run does.
    """
    options, end = config[RunOptions], data.order.end
    if options.max_train_steps is not None:
        if end is not None and options.max_train_steps > end:
            message = f"no dataset is trained on after step {end}, and the run has {options.max_train_steps}"
            raise PreflightError(message, fix=f"--max_train_steps={end}, or remove end_step or end_epoch of a dataset")
        return options.max_train_steps
    assert options.num_train_epochs is not None, "checked with the configuration"
    return data.order.epoch_start(options.num_train_epochs)
