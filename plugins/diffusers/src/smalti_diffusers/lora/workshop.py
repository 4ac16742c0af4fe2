"""What can be done with the file of an adapter without training: read it for a model, merge several, lower ranks, write it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.checkpoint import StoredTensor, check_new, make_folder
from smalti_diffusers.flavours import FLAVOURS, shipped_folder
from smalti_diffusers.lora.formats import chosen_format, write_adapter
from smalti_diffusers.lora.header import AdapterHeader
from smalti_diffusers.lora.kinds import change, factor
from smalti_diffusers.lora.reading import AdapterFile
from smalti_diffusers.lora.shapes import MAGNITUDE, rank_of
from smalti_diffusers.options import TITLES, Kind
from smalti_diffusers.pipeline import PipelineFamily
from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.location import INDEX
from smalti_export.folder import NewExport, TrainedWeights


@dataclass(frozen=True, kw_only=True)
class AdaptedModel:
    """The model that an adapter is for, without weights. `part` is its name in the pipeline."""

    family: str
    part: str
    model: nn.Module
    config: Mapping[str, object]
    source: str


@dataclass(frozen=True, kw_only=True)
class HeldAdapter:
    """An adapter in memory: the tensors of each layer of diffusers in fp32, by what they are; scales are part of them."""

    kind: Kind
    layers: Mapping[str, Mapping[str, Tensor]]
    timed: tuple[int, float] | None = None
    """As in `AdapterHeader`."""

    @property
    def rank(self) -> int:
        """That of most layers; 1 where none has one."""
        ranks = Counter(rank_of({part: tuple(each.shape) for part, each in parts.items()}) for parts in self.layers.values())
        return ranks.most_common(1)[0][0] or 1


def opened(path: Path, model: str | None) -> tuple[AdapterFile, AdaptedModel]:
    """The file, and the model whose layers it has.

    `model` is a pipeline's folder or a family; None tries every published model. Raises UserError if none has these layers.
    """
    header, reasons = AdapterHeader(path), []
    for found in _models(model):
        try:
            return AdapterFile(header, found.family, found.model, found.config), found
        except UserError as error:
            reasons.append(error)
    if model is not None:
        raise reasons[-1]
    raise UserError(
        f"{header.path} has the layers of no model of {', '.join(FLAVOURS)}",
        fix="--model=FOLDER of the pipeline it was made for",
    )


def _models(model: str | None) -> Iterator[AdaptedModel]:
    if model is not None and model not in FLAVOURS:
        folder = Path(model).expanduser()
        if not (folder / INDEX).is_file():
            raise UserError(f"{model} is neither a family nor the folder of a pipeline", fix=f"one of {', '.join(FLAVOURS)}")
        yield described(Components(folder), model)
        return
    for name in FLAVOURS if model is None else (model,):
        for flavour, components in _shipped(name).items():
            yield _described(name, components, f"{name} {flavour}")


def _shipped(family: str) -> dict[str, Components]:
    """The published models of a family, by flavour."""
    folders = {flavour: shipped_folder(repository) for flavour, repository in FLAVOURS[family].items()}
    return {flavour: Components(folder) for flavour, folder in folders.items() if folder is not None}


def _class(family: str) -> type[PipelineFamily]:
    module = import_module(f"smalti_diffusers.families.{family}")
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    return next(each for each in classes if issubclass(each, PipelineFamily))


def pipelines(family: str) -> set[str]:
    """The classes of pipelines of a family."""
    cls = _class(family)
    return {cls.pipeline, *cls.other_pipelines, *cls.former_names}


def described(components: Components, source: str) -> AdaptedModel:
    """The trained part of a pipeline, without weights. Raises UserError for one of no family here."""
    names = [name for name in FLAVOURS if components.pipeline in pipelines(name)]
    if not names:
        raise UserError(f"{source} is a {components.pipeline}, which is of no family here", fix="name another pipeline")
    return _described(names[0], components, source)


def _described(family: str, components: Components, source: str) -> AdaptedModel:
    kind = _class(family)
    part = kind.part
    with torch.device("meta"):
        model = kind.build_adaptable(components)
    return AdaptedModel(family=family, part=part, model=model, config=components.config(part), source=source)


def held(file: AdapterFile) -> HeldAdapter:
    """The whole adapter. Raises UserError for a dora whose lengths are over the norms of a base that is not there."""
    kind, layers = file.header.kind, {}
    if file.header.lengths_of_base:
        raise UserError(
            f"{file.header.path} is a DoRA for ComfyUI, whose lengths are of use with the weights of its base alone",
            fix="export the run with another --format",
        )
    for layer in file.layers:
        if kind in ("lora", "dora"):
            down, up = file.matrices(layer)
            parts = {"lora_A": down, "lora_B": up}
            if kind == "dora":
                ends = (1,) * (up.ndim - 2)
                parts[MAGNITUDE] = file.lengths(layer, torch.empty(0)).view(*ends[:1], -1, *ends)
        else:
            parts, scale = file.parts(layer)
            if kind == "lokr":
                first = factor(parts, 1)
                parts = {"lokr_w1": first, **{part: each for part, each in parts.items() if part.startswith("lokr_w2")}}
            scaled = "lokr_w1" if kind == "lokr" else "hada_w1_a"
            parts[scaled] = parts[scaled] * scale
        layers[layer] = parts
    return HeldAdapter(kind=kind, layers=layers, timed=file.header.timed)


def merged(adapters: Sequence[HeldAdapter], strengths: Sequence[float]) -> HeldAdapter:
    """One LoRA that changes the weights as all of them together do. Its ranks are sums of theirs; nothing is approximated."""
    for adapter in adapters:
        if adapter.kind != "lora":
            raise UserError(
                f"the sum of a {TITLES[adapter.kind]} and another adapter is none of them",
                fix="make a LoRA of it with `smalti adapter resize`, which approximates, or load both in the tool that you use",
            )
    layers = {}
    for layer in sorted({layer for adapter in adapters for layer in adapter.layers}):
        pairs = zip(adapters, strengths, strict=True)
        there = [(adapter.layers[layer], strength) for adapter, strength in pairs if layer in adapter.layers]
        down = torch.cat([parts["lora_A"] for parts, _ in there])
        up = torch.cat([parts["lora_B"] * strength for parts, strength in there], dim=1)
        layers[layer] = {"lora_A": down, "lora_B": up}
    return HeldAdapter(kind="lora", layers=layers)


def resized(adapter: HeldAdapter, rank: int, model: nn.Module) -> tuple[HeldAdapter, float]:
    """A LoRA of at most this rank, the nearest to the change of each weight, and the share of the squared changes that it has.

    Layers of a lower rank stay as they are. Raises UserError for a dora, which is not a sum.
    """
    if adapter.kind == "dora":
        raise UserError("a DoRA also changes lengths of rows, which no LoRA does", fix="train again with a lower --lora_rank")
    layers, kept, total = {}, 0.0, 0.0
    for layer, parts in adapter.layers.items():
        shape = cast(Tensor, model.get_submodule(layer).weight).shape
        values, left, right = _decomposed(parts, shape)
        total += float(values.square().sum())
        kept += float(values[:rank].square().sum())
        if "lora_A" in parts and len(parts["lora_A"]) <= rank:
            layers[layer] = dict(parts)
            continue
        root = values[:rank].sqrt()
        up, down = left[:, :rank] * root, root[:, None] * right[:rank]
        layers[layer] = {
            "lora_A": down.reshape(-1, *shape[1:]),
            "lora_B": up.reshape(*up.shape, *(1,) * (len(shape) - 2)),
        }
    return HeldAdapter(kind="lora", layers=layers), kept / total if total else 1.0


def _decomposed(parts: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values of the change of a weight, largest first, left vectors as columns and right ones as rows."""
    if "lora_A" not in parts:
        left, values, right = torch.linalg.svd(change(parts, 1.0, shape).flatten(1), full_matrices=False)
        return values, left, right
    columns, upper = torch.linalg.qr(parts["lora_B"].flatten(1))
    rows, lower = torch.linalg.qr(parts["lora_A"].flatten(1).T)
    left, values, right = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    return values, columns @ left, right @ rows.T


class _Held:
    """An adapter in memory as `NewExport` reads the tensors of a run."""

    dtype = None

    def __init__(self, adapter: HeldAdapter) -> None:
        self._tensors = {
            f"{layer}.{part}.default": each for layer, parts in adapter.layers.items() for part, each in parts.items()
        }
        self.tensors = {
            name: StoredTensor(dtype="F32", shape=tuple(each.shape), chunks=1) for name, each in self._tensors.items()
        }

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def write(adapter: HeldAdapter, model: AdaptedModel, target: Path, format: str | None) -> list[Path]:
    """Write a new folder with the adapter in a format; returns its files. Raises UserError for what the format cannot carry."""
    check_new(target)
    chosen = chosen_format(model.family, format, adapter.kind)
    if adapter.kind == "dora" and chosen == "comfyui":
        raise UserError(
            "a DoRA for ComfyUI needs the weights of its base, which are not read here",
            fix="`smalti checkpoint export --format=comfyui` of the run, or another --format",
        )
    said: dict[str, object] = {"kind": adapter.kind, "rank": adapter.rank, "alpha": float(adapter.rank)}
    if adapter.timed is not None:
        said["timed"] = dict(zip(("least", "exponent"), adapter.timed, strict=True))
    trained = cast(TrainedWeights, _Held(adapter))

    def fill(folder: Path) -> dict[str, object]:
        made = NewExport(folder, trained, said, lambda done, total: None, name=target.name)
        write_adapter(made, chosen, model.family, model.part, model.model, model.config)
        return dict(made.finish())

    return [target / name for name in make_folder(target, fill)]  # type: ignore[arg-type]
