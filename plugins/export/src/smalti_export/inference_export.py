"""From a checkpoint of a run to what inference loads: the run says which family it was, the family what that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from smalti import CheckpointError, Config, UserError
from smalti.checkpoint import (
    CheckpointStore,
    ConversionError,
    ExportRequest,
    FileRecord,
    OwnCheckpoint,
    Usage,
    check_free_space,
    check_new,
    make_folder,
)
from smalti.config import DataOptions, restore
from smalti.models import ModelFamily, without_weights
from smalti.parallel import model_tensors
from smalti.plugins import Plugins, find_family, schema_of
from smalti.rundir import RunDirectory
from smalti.system import parse_json
from smalti_export.folder import NewExport, Precision, Progress, TrainedWeights
from smalti_export.model_card import FILE, model_card, sampled_images


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What came of it. `size` is in bytes, over all files; `usages` say how tools load them."""

    path: Path
    checkpoint: Path
    step: int
    family: str
    averaged: bool
    tensors: int
    size: int
    files: tuple[str, ...]
    usages: tuple[Usage, ...] = ()


def export(
    source: Path,
    target: Path,
    plugins: Plugins,
    *,
    step: int | Literal["best"] | None = None,
    averaged: bool | None = None,
    precision: Precision | None = None,
    pretrained: str | None = None,
    base_pipeline: str | None = None,
    request: ExportRequest = ExportRequest(),  # noqa: B008  # frozen
    known_as: str | None = None,
    report: Callable[[str], None] = lambda sentence: None,
    progress: Progress = lambda done, total: None,
) -> Exported:
    """Make `target`, a folder that must not exist yet, from a run directory or one of its checkpoints.

    A run directory stands for its newest complete checkpoint, for that of `step`, or for the "best" one. `averaged` takes the
    EMA weights; None takes those that validation samples with: the EMA weights if there are any. `precision` is what the
    trained tensors become, None as they are. `pretrained` is the present path of the run's first weights, if they were moved,
    and `base_pipeline` that of the pipeline with the other parts of the model. `known_as` is the name under which tools load
    the export; None is the path. All bytes of the checkpoint are checked first. Raises UserError, and nothing is left.
    """
    check_new(target)
    run = _run_of(source)
    config = _config_of(run, plugins, pretrained_model_name_or_path=pretrained, base_pipeline=base_pipeline)
    family = find_family(config, plugins)
    family.check_export(request)
    path = _checkpoint_of(source, run, step, report)
    checkpoint = OwnCheckpoint(path, verified=True)
    averaged = _averaged(checkpoint, averaged, report)
    trained = TrainedWeights(checkpoint, use_ema=averaged, precision=precision)
    _compare(path, trained, family)

    usages: list[Usage] = []

    def write(folder: Path) -> dict[str, FileRecord]:
        check_free_space(folder, trained.tensors.values())
        adapter = cast(Mapping[str, object] | None, checkpoint.contents.trainer.get("adapter"))
        made = NewExport(folder, trained, adapter, progress, name=target.name, request=request)
        family.export(made)
        usages.extend(_filled(each, known_as or str(target), config) for each in made.usages)
        _describe(made, run, config, family.name, checkpoint.contents.step, averaged, usages)
        return made.finish()

    try:
        records = make_folder(target, write)
    except OSError as error:
        raise ConversionError(f"cannot write {target}: {error}", fix="free space there, or choose another folder") from error
    return Exported(
        path=target,
        checkpoint=path,
        step=checkpoint.contents.step,
        family=family.name,
        averaged=averaged,
        tensors=len(trained.tensors),
        size=sum(record.size for record in records.values()),
        files=tuple(sorted(records)),
        usages=tuple(usages),
    )


def _describe(
    made: NewExport, run: RunDirectory, config: Config, family: str, step: int, averaged: bool, usages: Sequence[Usage]
) -> None:
    """Write the model card, and copy the images in it."""
    images = []
    for number, (prompt, path) in enumerate(sampled_images(run, step)):
        images.append((prompt, f"images/{number}{path.suffix}"))
        made.copy(path, images[-1][1])
    card = model_card(
        made.name,
        config,
        family=family,
        step=step,
        averaged=averaged,
        metadata=made.metadata,
        images=images,
        usages=usages,
    )
    made.write_text(FILE, card)


def _filled(usage: Usage, target: str, config: Config) -> Usage:
    """The usage with the place of the export, and a prompt of the run."""
    given = cast(tuple[str, ...], config.values().get("validation_prompt", ()))  # of the package for validation
    prompts = (*given, config[DataOptions].instance_prompt or "a photo")
    text = usage.text.replace("{path}", target).replace("{prompt}", json.dumps(prompts[0], ensure_ascii=False))
    return replace(usage, text=text)


def _run_of(source: Path) -> RunDirectory:
    """The run directory that was named, or in which the checkpoint lies."""
    found = RunDirectory.containing(source)
    if found is None:
        places = f"{source} or {source.resolve().parent.parent}"
        raise UserError(
            f"nothing says which model {source} belongs to: there is no launch.json in {places}",
            fix="name a run directory, or a checkpoint in the folder `checkpoints` of one",
        )
    return found


def _config_of(run: RunDirectory, plugins: Plugins, **paths: str | None) -> Config:
    """The configuration of the run's last launch, with the `paths` of what has moved.

    Options of plugins that are not installed here do not matter here.
    """
    try:
        launch = parse_json(run.launch_file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run.launch_file} cannot be read: {error}", fix="start the run again; it writes the file again"
        ) from error
    schema, moved = schema_of(plugins), {name: path for name, path in paths.items() if path is not None}
    if unknown := sorted(moved.keys() - schema.options.keys()):
        raise UserError(f"no installed plugin has the option {unknown[0]}", fix=f"leave out --{unknown[0]}")
    values = {**cast(Mapping[str, Mapping[str, object]], launch)["values"], **moved}
    return restore(schema, {name: value for name, value in values.items() if name in schema.options}, {})


def _checkpoint_of(source: Path, run: RunDirectory, step: int | str | None, report: Callable[[str], None]) -> Path:
    """The checkpoint that is meant, checked by digest."""
    store = CheckpointStore(run.checkpoints, report=report)
    is_run = run.path == source
    if not is_run and step is not None:
        raise UserError(f"{source} is one checkpoint, of one step", fix="leave out --step, or name the run directory")
    which = "the newest checkpoint" if step is None else "the best checkpoint" if step == "best" else f"step {step}"
    report(f"checking {which if is_run else source}")
    found = store.resolve(str(source) if not is_run else "latest" if step is None else str(step))
    if found is None:
        raise CheckpointError(f"there is no checkpoint in {run.checkpoints}", fix="let the run save one")
    return found


def _averaged(checkpoint: OwnCheckpoint, averaged: bool | None, report: Callable[[str], None]) -> bool:
    """Whether to export the EMA weights; None means where there are any. Reports the choice where there is one."""
    found = any(name.startswith("ema/") for name in checkpoint.contents.tensors)
    chosen = found if averaged is None else averaged
    if found and chosen:
        report("exporting the EMA weights, which validation samples with; --raw exports the others")
    elif found:
        report("exporting the raw weights; validation samples with the EMA weights, which --ema exports")
    return chosen


def _compare(path: Path, trained: TrainedWeights, family: ModelFamily) -> None:
    """Refuse tensors that are not those of the family's model: a pipeline with them could not be loaded."""
    with without_weights():
        wanted = {name: tuple(tensor.shape) for name, tensor in model_tensors(family.build_model()).items()}
    found = {name: tensor.shape for name, tensor in trained.tensors.items()}
    odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if odd:
        some = ", ".join(f"{name} {list(found.get(name, ()))} for {list(wanted.get(name, ()))}" for name in odd[:3])
        raise CheckpointError(
            f"{path} was made for something else: {len(odd)} tensors are not those of the model, such as {some}",
            fix="give the run the options that it had when it saved this: --pretrained_model_name_or_path if it moved",
        )
