"""What a run leaves for inference: a pipeline of diffusers, an adapter in the format of a tool, or both merged."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from smalti import UserError
from smalti_diffusers.lora.formats import chosen_format, write_adapter
from smalti_diffusers.lora.merging import base_tensors, merged_weights
from smalti_diffusers.lora.trained import TrainedAdapter
from smalti_diffusers.sources.location import INDEX, index_of
from smalti_diffusers.sources.single_file import single_file_layout, trained_tensors, write_single_file
from smalti_diffusers.usage import adapter_usages, pipeline_usages, single_file_usages

if TYPE_CHECKING:
    from smalti.checkpoint import Computed, ExportFolder, ExportRequest
    from smalti_diffusers.pipeline import PipelineFamily


def check_request(family: PipelineFamily, request: ExportRequest) -> None:
    """Raises UserError for what this run cannot be exported as."""
    if family.lora is None and (request.merge or request.format not in (None, "diffusers")):
        option = "--merge" if request.merge else f"--format={request.format}"
        raise UserError(
            f"{option} is for adapters, and this run trained the complete model",
            fix=f"leave {option} out; the export is a pipeline of diffusers",
        )
    if request.merge and request.format is not None:
        raise UserError(
            "--merge exports a complete pipeline, and --format is that of a file with the adapter alone",
            fix="leave one of the two out",
        )
    if request.merge and family.lora is not None and family.lora.least is not None:
        raise UserError(
            "a complete model cannot switch ranks of a T-LoRA off where there is much noise",
            fix="leave --merge out: the file of the adapter acts with all ranks, of which the export tells",
        )
    if request.single_file:
        if family.lora is not None and not request.merge:
            raise UserError(
                "--single_file is for complete models, and this run trained an adapter, which is one file already",
                fix="add --merge, or choose the --format of the adapter",
            )
        single_file_layout(family.name)
    if family.lora is not None and not request.merge:
        chosen_format(family.name, request.format, family.lora.kind)


def export_pipeline(family: PipelineFamily, folder: ExportFolder) -> None:
    """Write what `folder.request` says."""
    config, merge = family.components.config(family.part), folder.request.merge
    folder.metadata |= _metadata(family, adapter=family.lora is not None and not merge)
    if family.lora is not None and not merge:
        format = chosen_format(family.name, folder.request.format, family.lora.kind)
        weights = partial(family.base_weights, family.seed)
        write_adapter(folder, format, family.name, family.part, family.meta_model, config, weights)
        folder.usages += adapter_usages(family, format, folder.name)
        return
    tensors = _with_frozen(family, folder)
    if merge:
        base = family.base_weights(family.seed)
        tensors = merged_weights(base, family.meta_model, TrainedAdapter(folder, family.meta_model))
    parts = {} if tensors is None else _by_part(family, tensors)
    if folder.request.single_file:
        trained = parts or {family.part: trained_tensors(folder)}
        write_single_file(folder, family.name, family.components, family.part, trained, family.scheduler_changes())
        folder.usages += single_file_usages(family, folder.name)
        return
    _write_frozen(family, folder)
    for encoder in family.encoders:
        folder.write_model(encoder, family.components.config(encoder), tensors=parts[encoder])
    folder.write_model(family.part, config, tensors=parts.get(family.part))
    folder.usages += pipeline_usages(family)


def _with_frozen(family: PipelineFamily, folder: ExportFolder) -> dict[str, Computed] | None:
    """The trained tensors and those of the base that stay frozen in training; None where all of the model trains."""
    frozen = {name for name, each in family.meta_model.named_parameters() if not each.requires_grad}
    if family.lora is not None or not frozen:
        return None
    return base_tensors(family.base_weights(family.seed), family.meta_model, frozen) | trained_tensors(folder)


def _by_part(family: PipelineFamily, tensors: Mapping[str, Computed]) -> dict[str, dict[str, Computed]]:
    """The tensors of the trained model, by the part of the pipeline that has them, under their names there."""
    parts: dict[str, dict[str, Computed]] = {part: {} for part in (family.part, *family.encoders)}
    for name, tensor in tensors.items():
        first, _, own = name.partition(".")
        part, known_as = (first, own) if first in family.encoders else (family.part, name)
        parts[part][known_as] = tensor
    return parts


def _metadata(family: PipelineFamily, *, adapter: bool) -> dict[str, object]:
    """The head of the model card."""
    return {
        "base_model": family.base_source or family.source,
        "base_model_relation": "adapter" if adapter else "finetune",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["text-to-image", "diffusers", *(["lora"] if adapter else [])],
    }


def _write_frozen(family: PipelineFamily, folder: ExportFolder) -> None:
    """Everything of the pipeline but what was trained."""
    components = family.components
    index = index_of(components.folder) or components.folder / INDEX
    if changed := family.pipeline_changes():
        folder.write_json(index.name, components.index | changed)
    else:
        folder.copy(index, index.name)
    changes = family.scheduler_changes()
    if changes:
        folder.write_json("scheduler/scheduler_config.json", components.config("scheduler") | changes)
    for part in components.parts():
        if part not in (family.part, *family.encoders) and not (part == "scheduler" and changes):
            components.export_part(part, folder)
