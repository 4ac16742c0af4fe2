"""From the names of a single file to those of diffusers and transformers, by diffusers' own conversion functions.

A file has the layout of the model's authors, of ComfyUI, which puts a prefix before it, or of diffusers. It may hold the
trained model only, or the autoencoder and text encoders too. The functions run on tensors that are not read yet (`pending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.checkpoint import NAMES, StoredTensor
from smalti_diffusers.sources.model_file import ModelFile
from smalti_diffusers.sources.pending import evaluate, sources

Tensors = Mapping[str, Tensor]
UNET_PREFIX = "model.diffusion_model."
_PREFIXES = (UNET_PREFIX, "diffusion_model.", "model.")
"""Before the names of the trained model: ldm and ComfyUI, trainers, AuraFlow."""
VAE_PREFIXES = ("first_stage_model.", "vae.")
_ENOUGH = 5
"""A prefix counts from more tensors than this on, as in ComfyUI."""


class ConvertedWeights:
    """`Weights` of a model from a single file. Tensors are read one at a time, in the type of the file (fp32 if scaled)."""

    def __init__(self, file: ModelFile, tensors: Tensors) -> None:
        self._file = file
        self._tensors = tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def get(self, name: str) -> Tensor:
        return evaluate(self.pending(name), self._file.read).contiguous()

    def pending(self, name: str) -> Tensor:
        """A tensor without its values, which `pending.evaluate` reads. Raises KeyError for a name that is not there."""
        return self._tensors[name]

    def stored(self, name: str) -> StoredTensor:
        """Type and shape of a tensor, as `get` returns it."""
        tensor = self._tensors[name]
        return StoredTensor(dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), chunks=1)

    def sources(self) -> set[str]:
        """The tensors of the file that these are made of."""
        return {name for tensor in self._tensors.values() for name in sources(tensor)}

    def digest(self) -> str:
        """Tells these weights from others: a sample of the tensors that they are made of, under their names in the file."""
        return self._file.digest(self.sources())

    def __str__(self) -> str:
        return str(self._file)


def tensors_of_model(file: ModelFile) -> dict[str, Tensor]:
    """The tensors of the trained model, without the prefix of their names; all of the file if none has one."""
    for prefix in _PREFIXES:
        found = _below(file.tensors, prefix)
        if len(found) > _ENOUGH:
            return found
    return dict(file.tensors)


def convert_model(file: ModelFile, model: nn.Module, config: Mapping[str, object]) -> ConvertedWeights:
    """The weights of the trained model; `model` has no values, `config` is its configuration.

    Raises UserError if the file lacks a tensor of the model, or has one of another shape.
    """
    found = tensors_of_model(file)
    if not set(model.state_dict()) <= found.keys():
        if type(model).__name__ == "UNet2DConditionModel":
            found = {UNET_PREFIX + name: tensor for name, tensor in found.items()}
        found = _run(_mapping(type(model)), file, model, checkpoint=found, config=config)
    return _checked(file, model, found)


def holds(file: ModelFile, part: str) -> bool:
    """Whether a file has tensors of the autoencoder ("vae") or of a text encoder, by its name in the pipeline."""
    prefixes = VAE_PREFIXES if part == "vae" else tuple(place.prefix for place in _ENCODERS.get(part, ()))
    return any(name.startswith(prefixes) for name in file.tensors)


def convert_vae(file: ModelFile, model: nn.Module, config: Mapping[str, object]) -> ConvertedWeights | None:
    """The weights of the autoencoder; None if the file has none, or none that can be converted for this class."""
    for prefix in VAE_PREFIXES:
        found = _below(file.tensors, prefix)
        if found and _is_convertible(type(model)):
            if not set(model.state_dict()) <= found.keys():
                found = _run(_mapping(type(model)), file, model, checkpoint=found, config=config)
            return _checked(file, model, found)
    return None


def convert_encoder(file: ModelFile, part: str, model: nn.Module) -> ConvertedWeights | None:
    """The weights of a text encoder, by its name in the pipeline; None if the file has none for it."""
    for place in _ENCODERS.get(part, ()):
        if found := _below(file.tensors, place.prefix):
            converted = _run(place.convert, file, model, found, model)
            if not hasattr(model, "text_model"):  # CLIPTextModel has no such layer any more, its checkpoints do
                converted = {name.removeprefix("text_model."): tensor for name, tensor in converted.items()}
            return _checked(file, model, converted)
    return None


# --- text encoders --------------------------------------------------------------------------------------------------


def _open_clip(tensors: Tensors, model: nn.Module) -> Tensors:
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    prefix = "conditioner.embedders.1.model."
    convert = cast("Callable[..., Tensors]", convert_open_clip_checkpoint)
    return convert(model, {prefix + name: each for name, each in tensors.items()}, prefix=prefix)


def _clip_l(tensors: Tensors, model: nn.Module) -> Tensors:
    """Stable Diffusion 3 does not project what this encoder returns; its pipeline in diffusers has the identity for that."""
    width = tensors["text_model.embeddings.position_embedding.weight"].shape[-1]
    return {**tensors, "text_projection.weight": torch.eye(width)}


def _as_it_is(tensors: Tensors, model: nn.Module) -> Tensors:
    return tensors


@dataclass(frozen=True)
class _Place:
    """Where files have a text encoder, and what turns its names, without the prefix, into those of transformers."""

    prefix: str
    convert: Callable[[Tensors, nn.Module], Tensors] = _as_it_is


_ENCODERS: Mapping[str, tuple[_Place, ...]] = {
    "text_encoder": (
        _Place("cond_stage_model.transformer."),
        _Place("conditioner.embedders.0.transformer."),
        _Place("text_encoders.clip_l.transformer.", _clip_l),
        _Place("text_encoders.gemma2_2b.transformer.model."),
        _Place("text_encoders.pile_t5xl.transformer."),
    ),
    "text_encoder_2": (
        _Place("conditioner.embedders.1.model.", _open_clip),
        _Place("text_encoders.clip_g.transformer."),
        _Place("text_encoders.t5xxl.transformer."),
    ),
    "text_encoder_3": (_Place("text_encoders.t5xxl.transformer."),),
    "text_conditioner": (
        _Place("net.llm_adapter."),
        _Place("llm_adapter."),
        _Place(f"{UNET_PREFIX}llm_adapter."),
        _Place("diffusion_model.llm_adapter."),
        _Place("model.llm_adapter."),
    ),
}


# --- conversion -----------------------------------------------------------------------------------------------------


def _mapping(kind: type) -> Callable[..., Tensors]:
    """What diffusers converts the weights of this class with."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    entry = cast(Mapping[str, object], SINGLE_FILE_LOADABLE_CLASSES[kind.__name__])
    return cast("Callable[..., Tensors]", entry["checkpoint_mapping_fn"])


def _is_convertible(kind: type) -> bool:
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    return kind.__name__ in SINGLE_FILE_LOADABLE_CLASSES


def _run(convert: Callable[..., Tensors], file: ModelFile, model: nn.Module, *given: Any, **named: Any) -> dict[str, Tensor]:
    """The tensors that a conversion makes. Those that it expects and does not find are reported."""
    try:
        with torch.no_grad():
            converted = convert(*given, **named)
    except (KeyError, IndexError) as error:
        reason = f"{error} is not in it" if isinstance(error, KeyError) else "it has no blocks of one"
        raise UserError(
            f"{file} has no weights of a {type(model).__name__}: {reason}",
            fix="check --model_family, and that the file holds the whole model and no adapter",
        ) from error
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{file} cannot be converted to a {type(model).__name__}: {error}",
            fix="check --model_family; a model of unusual widths has to be a folder in diffusers' layout",
        ) from error
    return {name: tensor for name, tensor in converted.items() if tensor is not None}


def _checked(file: ModelFile, model: nn.Module, found: Tensors) -> ConvertedWeights:
    """The weights that the model has; others in the file are left alone, as diffusers does."""
    own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # a shared tensor under its first name
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items() if name in own}
    if missing := [name for name in wanted if name not in found]:
        raise UserError(
            f"{file} lacks {len(missing)} tensors of the {type(model).__name__} of the base pipeline, such as "
            f"{', '.join(missing[:3])}",
            fix="check --model_family and --base_pipeline: the pipeline that the file was made from",
        )
    if odd := [name for name, shape in wanted.items() if found[name].shape != shape]:
        name = odd[0]
        raise UserError(
            f"{file} does not fit the base pipeline: {len(odd)} tensors of its {type(model).__name__} have other shapes, "
            f"such as {name} {list(found[name].shape)} for {list(wanted[name])}",
            fix="--base_pipeline=FOLDER or id of the pipeline that the file was made from",
        )
    return ConvertedWeights(file, {name: found[name] for name in wanted})


def _below(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
