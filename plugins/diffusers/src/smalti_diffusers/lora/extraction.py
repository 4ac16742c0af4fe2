"""A LoRA of what a complete training has changed: the singular value decomposition of the change of each weight.

One weight is read at a time, and computed in fp64. Shapes: changes (out, in), of convolutions (out, in * height * width).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smalti import UserError
from smalti_diffusers.lora.adapter import adapted_layers, fits
from smalti_diffusers.lora.encoders import CLIP
from smalti_diffusers.lora.workshop import AdaptedModel, HeldAdapter, described
from smalti_diffusers.sources.components import Components, PartWeights
from smalti_diffusers.sources.model_file import ModelFile
from smalti_diffusers.sources.start import check_family, model_alone, open_beside_base, open_pipeline

_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TINY = 1e-6
"""Singular values below this share of the largest one come from rounding: they get no rank."""


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """An adapter from a complete model. `errors` are those of `error` for all layers whose names differ by numbers alone.

    `left` are the names of changed tensors that no adapter reaches, such as biases and norms, with the norm of their change.
    """

    adapter: HeldAdapter
    error: float
    """The norm of what is missing over the norm of the change, over all layers."""
    errors: dict[str, float]
    left: dict[str, float]


def two_models(full: str, base: str) -> tuple[AdaptedModel, PartWeights, PartWeights]:
    """The model of a pipeline, and the weights of its trained part: those of `full`, and those of `base`, the pipeline.

    `full` is a pipeline, a transformer folder or a single file. Raises UserError where the two do not fit each other.
    """
    place, changed, components = _opened(full, base)
    return place, changed.weights(place.part), components.weights(place.part)


def changed_encoders(full: str, base: str) -> tuple[str, ...]:
    """The text encoders of `full` that are not those of `base`, by their names in the pipeline: the adapter lacks their change.

    They are compared tensor by tensor, in the smaller of both types, until one differs.
    """
    _, changed, components = _opened(full, base)
    own = [part for part in _ENCODERS if components.has(part) and changed.has(part)]
    own = [part for part in own if changed.folder != components.folder or part in changed.replaced]
    return tuple(part for part in own if _differ(changed.weights(part), components.weights(part)))


def _differ(changed: PartWeights, base: PartWeights) -> bool:
    """Newer versions of transformers leave a part of the names out in some classes."""
    names = {name.removeprefix(CLIP): name for name in base.names()}
    for name in changed.names():
        if (there := names.get(name.removeprefix(CLIP))) is None:
            continue
        one, other = changed.get(name), base.get(there)
        kind = min(one.dtype, other.dtype, key=lambda each: each.itemsize)
        if not torch.equal(one.to(kind), other.to(kind)):
            return True
    return False


def _opened(full: str, base: str) -> tuple[AdaptedModel, Components, Components]:
    components = open_pipeline(base, None, None)
    place = described(components, base)
    alone = model_alone(full, place.part, None, None)
    if isinstance(alone, ModelFile):
        check_family(alone, place.family)
    changed = open_pipeline(full, None, None) if alone is None else open_beside_base(alone, place.part, base, None, None)
    _compare(changed, components, place, full)
    return place, changed, components


def _compare(changed: Components, base: Components, place: AdaptedModel, full: str) -> None:
    if changed.kind(place.part) != base.kind(place.part):
        raise UserError(
            f"{full} has a {changed.kind(place.part)}, and {place.source} a {base.kind(place.part)}",
            fix="--base=PIPELINE that the model was trained from",
        )
    ours, theirs = base.weights(place.part), changed.weights(place.part)
    there = set(theirs.names())
    lost = [name for name in ours.names() if name not in there or ours.stored(name).shape != theirs.stored(name).shape]
    if lost:
        raise UserError(
            f"{full} lacks {len(lost)} tensors of {place.source}, or has them in other shapes, such as {lost[0]}",
            fix="name the complete model, and the pipeline that it was trained from as --base",
        )


def extracted(
    place: AdaptedModel,
    full: PartWeights,
    base: PartWeights,
    *,
    rank: int,
    energy: float = 1.0,
    targets: Sequence[str] = (),
    device: str = "cpu",
) -> Extraction:
    """The nearest LoRA of at most this rank to the change of each weight.

    With an `energy` below 1, a layer has the lowest rank that keeps this share of its squared change. `targets` select layers
    as `--lora_targets` does; none selects all. Layers that have not changed get none. Raises UserError if no layer has changed.
    """
    _check_device(device)
    chosen = set(adapted_layers(place.model, targets)) if targets else None
    layers: dict[str, dict[str, Tensor]] = {}
    missing: dict[str, float] = {}
    total: dict[str, float] = {}
    left: dict[str, float] = {}
    for name in sorted(place.model.state_dict().keys() & set(base.names())):
        change = full.get(name).to(device, torch.float64) - base.get(name).to(device, torch.float64)
        size = float(change.square().sum())
        if not size:
            continue
        layer, _, own = name.rpartition(".")
        module = place.model.get_submodule(layer)
        if own != "weight" or not fits(module) or (chosen is not None and layer not in chosen):
            left[name] = size**0.5
            continue
        layers[layer], kept = _decomposed(change, rank, energy)
        kind = re.sub(r"\.\d+(?=\.|$)", "", layer)
        missing[kind] = missing.get(kind, 0.0) + max(0.0, size - kept)
        total[kind] = total.get(kind, 0.0) + size
    if not layers:
        what = f"{len(left)} tensors that no adapter reaches" if left else "nothing"
        raise UserError(
            f"the model differs from {place.source} in {what}", fix="--base=PIPELINE that the model was trained from"
        )
    return Extraction(
        adapter=HeldAdapter(kind="lora", layers=layers),
        error=(sum(missing.values()) / sum(total.values())) ** 0.5,
        errors={kind: (missing[kind] / total[kind]) ** 0.5 for kind in sorted(total)},
        left=left,
    )


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # unknown, not there, or without fp64
        reason = str(error).partition("\n")[0]
        raise UserError(f"{device} cannot compute this: {reason}", fix="--device=cpu, or cuda where there is one") from error


def _decomposed(change: Tensor, rank: int, energy: float) -> tuple[dict[str, Tensor], float]:
    """The matrices of a layer, and the squared norm of their product.

    By the eigenvectors of the smaller product of the change with itself, which takes a fraction of the time of a decomposition
    of the change itself; in fp64, they lose what is below 1e-8 of the largest singular value.
    """
    flat = change.flatten(1)
    wide = flat.shape[0] <= flat.shape[1]
    squares, vectors = torch.linalg.eigh(flat @ flat.T if wide else flat.T @ flat)
    squares, vectors = squares.flip(0).clamp(min=0), vectors.flip(1)
    shares = squares.cumsum(0) / squares.sum()
    most = int((squares > squares[0] * _TINY**2).sum())
    enough = int((shares < energy).sum()) + 1
    width = max(1, min(rank, most, enough))
    root = squares[:width].sqrt().sqrt()
    if wide:
        up = vectors[:, :width] * root
        down = (vectors[:, :width].T @ flat) / root[:, None]
    else:
        down = vectors[:, :width].T * root[:, None]
        up = (flat @ vectors[:, :width]) / root
    ends = (1,) * (change.ndim - 2)
    parts = {"lora_A": down.reshape(width, *change.shape[1:]), "lora_B": up.reshape(*up.shape, *ends)}
    kept = {part: each.to("cpu", torch.float32).contiguous() for part, each in parts.items()}
    return kept, float(squares[:width].sum())
