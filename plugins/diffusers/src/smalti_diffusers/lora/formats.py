"""The files in which an adapter leaves smalti, for diffusers, peft, ComfyUI and kohya's tools.

A reader multiplies lora_B @ lora_A by alpha / rank. diffusers reads alpha from the metadata of a file. ComfyUI does not, and
takes it to be the rank. So in files with the names of diffusers and peft, the factor is folded into lora_B and alpha is the
rank: every reader is right. Kohya's format has a tensor `.alpha` for each layer, which all its readers apply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.checkpoint import Computed
from smalti_diffusers.lora.header import METADATA, TRAINED_ALPHA
from smalti_diffusers.sources.layouts import LAYOUTS
from smalti_diffusers.sources.single_file import file_tensors

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder

FILE = "pytorch_lora_weights.safetensors"
"""What `load_lora_weights` of a pipeline looks for."""
Format = Literal["diffusers", "peft", "comfyui", "kohya"]
FORMATS: tuple[Format, ...] = get_args(Format)


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What reads adapters of a family, apart from peft.

    `comfyui` is whose names ComfyUI knows, None if it knows none. `original` is whether kohya's tools have the names of the
    model's authors, rather than those of diffusers.
    """

    diffusers: bool = True
    comfyui: Literal["diffusers", "kohya"] | None
    kohya: bool
    original: bool = True
    module: str = "networks.lora"
    """The trainer's module in kohya's metadata."""


TOOLS: Mapping[str, Tools] = {
    "auraflow": Tools(comfyui="diffusers", kohya=False),
    "flux": Tools(comfyui="diffusers", kohya=True, module="networks.lora_flux"),
    "flux2": Tools(comfyui="diffusers", kohya=True, module="networks.lora_flux_2"),
    "lumina2": Tools(comfyui="kohya", kohya=True, module="networks.lora_lumina"),
    "pixart": Tools(diffusers=False, comfyui="diffusers", kohya=False),
    "qwen_image": Tools(comfyui="diffusers", kohya=True, module="networks.lora_qwen_image"),
    "sana": Tools(comfyui=None, kohya=False),
    "sd3": Tools(comfyui="diffusers", kohya=True, module="networks.lora_sd3"),
    "sdxl": Tools(comfyui="kohya", kohya=True),
    "z_image": Tools(comfyui="diffusers", kohya=True, original=False, module="networks.lora_zimage"),
}
"""By family. ComfyUI as of 2026, sd-scripts for flux, lumina2, sd3 and sdxl, musubi-tuner for flux2, qwen_image and z_image."""
_PEFT_ONLY = Tools(diffusers=False, comfyui=None, kohya=False)


def chosen_format(family: str, format: str | None) -> Format:
    """The format to write; None stands for that of diffusers, or of peft where diffusers loads no adapters.

    Raises UserError for a format that no tool reads for this family.
    """
    tools = TOOLS.get(family, _PEFT_ONLY)
    if format is None:
        return "diffusers" if tools.diffusers else "peft"
    known = {"diffusers": tools.diffusers, "peft": True, "comfyui": tools.comfyui is not None, "kohya": tools.kohya}
    if known.get(format):
        return cast(Format, format)
    reasons = {
        "diffusers": f"the pipeline of {family} in diffusers has no load_lora_weights",
        "comfyui": f"ComfyUI has no names for adapters of {family}",
        "kohya": f"kohya's tools have no adapters of {family}",
    }
    others = " or ".join(f"--format={each}" for each in FORMATS if known[each])
    reason = reasons.get(format, f"smalti writes no adapters in the format {format}")
    raise UserError(reason, fix=f"{others}, or --merge for the complete model")


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """An adapted layer of diffusers, with the names of its two matrices in the checkpoint."""

    name: str
    down: str
    up: str
    rank: int


class TrainedAdapter:
    """The adapter in a checkpoint, and the model around it, which may be on the meta device."""

    def __init__(self, folder: ExportFolder, model: nn.Module) -> None:
        assert folder.adapter is not None, "the checkpoint of an adapter says what it is"
        self._folder = folder
        self.rank = cast(int, folder.adapter["rank"])
        self.alpha = cast(float, folder.adapter["alpha"])
        self.model = model
        self.sizes = {name: module.weight.shape[0] for name, module in model.named_modules() if has_weight(module)}
        """Outputs of every layer of the model."""
        names = {name.partition(".lora_")[0]: name for name in folder.tensors if ".lora_A." in name}
        self.layers = {
            layer: AdaptedLayer(
                name=layer, down=down, up=down.replace(".lora_A.", ".lora_B."), rank=folder.tensors[down].shape[0]
            )
            for layer, down in names.items()
        }

    def down(self, layer: AdaptedLayer) -> Computed:
        """(rank, in), or (rank, in, height, width) of a convolution."""
        return self._computed(layer.down, lambda tensor: tensor)

    def up(self, layer: AdaptedLayer, *, fold: bool = False) -> Computed:
        """(out, rank), or (out, rank, 1, 1) of a convolution. With `fold`, times alpha / rank."""
        scale = self.alpha / self.rank if fold else 1.0
        return self._computed(layer.up, lambda tensor: tensor if scale == 1 else tensor * scale)

    def _computed(self, name: str, change: Callable[[Tensor], Tensor]) -> Computed:
        return Computed(shape=self._folder.tensors[name].shape, compute=lambda: change(self._folder.tensor(name)))


def has_weight(module: nn.Module) -> bool:
    """Whether a module has a weight that an adapter could change."""
    return isinstance(getattr(module, "weight", None), Tensor)


def write_adapter(
    folder: ExportFolder, format: Format, family: str, part: str, model: nn.Module, config: Mapping[str, object]
) -> None:
    """Write the adapter of this part of a pipeline. `config` is that of the model.

    Raises UserError for a layer that has no name in this format.
    """
    adapter = TrainedAdapter(folder, model)
    tools = TOOLS.get(family, _PEFT_ONLY)
    notes = {TRAINED_ALPHA: str(adapter.alpha)}
    if format == "kohya" or (format == "comfyui" and tools.comfyui == "kohya"):
        folder.write_computed(f"{folder.name}.safetensors", *_kohya(adapter, family, config))
    elif format == "peft":
        folder.write_computed("adapter_model.safetensors", dict(_named(adapter, "base_model.model.")), notes)
        folder.write_json("adapter_config.json", _peft_config(adapter))
    else:
        name = FILE if format == "diffusers" else f"{folder.name}.safetensors"
        settings = {"r": adapter.rank, "lora_alpha": adapter.rank, "target_modules": sorted(adapter.layers)}
        notes[METADATA] = json.dumps({f"{part}.{key}": value for key, value in settings.items()}, sort_keys=True)
        folder.write_computed(name, dict(_named(adapter, f"{part}.")), notes)


def _named(adapter: TrainedAdapter, prefix: str) -> Iterator[tuple[str, Computed]]:
    for name, layer in sorted(adapter.layers.items()):
        yield f"{prefix}{name}.lora_A.weight", adapter.down(layer)
        yield f"{prefix}{name}.lora_B.weight", adapter.up(layer, fold=True)


def _peft_config(adapter: TrainedAdapter) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "target_modules": sorted(adapter.layers),
    }


# --- kohya's format -------------------------------------------------------------------------------------------------


def original_layers(model: nn.Module, config: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """The layers of the original model -> the layers of diffusers in them: query, key and value can be one layer there.

    Layers whose rows are in another order there are left out.
    """
    weights = (f"{name}.weight" for name, module in model.named_modules() if has_weight(module))
    table = LAYOUTS[type(model).__name__](config) if type(model).__name__ in LAYOUTS else {}
    return {
        each.name.removesuffix(".weight"): tuple(part.removesuffix(".weight") for part in each.parts)
        for each in file_tensors(weights, table)
        if not each.mark
    }


def kohya_name(layer: str) -> str:
    return "lora_unet_" + layer.replace(".", "_")


def _kohya(adapter: TrainedAdapter, family: str, config: Mapping[str, object]) -> tuple[dict[str, Computed], Mapping[str, str]]:
    """The tensors and the metadata of kohya's format."""
    tensors: dict[str, Computed] = {}
    written: set[str] = set()
    own_names = {layer: (layer,) for layer in adapter.layers}
    layers = original_layers(adapter.model, config) if TOOLS[family].original else own_names
    for original, members in layers.items():
        adapted = [adapter.layers[each] for each in members if each in adapter.layers]
        if not adapted:
            continue
        written.update(each.name for each in adapted)
        rank = sum(each.rank for each in adapted)
        down, up = _joined(adapter, members, adapted)
        name = kohya_name(original)
        tensors[f"{name}.lora_down.weight"] = down
        tensors[f"{name}.lora_up.weight"] = up
        # The rank of joined layers is the sum of theirs, and alpha / rank has to stay what it was.
        tensors[f"{name}.alpha"] = _constant(adapter.alpha * rank / adapter.rank)
    if lost := sorted(adapter.layers.keys() - written):
        raise UserError(
            f"the format of kohya's tools has no name for {', '.join(lost[:3])}" + (" and others" if len(lost) > 3 else ""),
            fix="--format=diffusers or --format=peft; or train without these layers (--lora_targets)",
        )
    metadata = {
        "ss_network_module": TOOLS[family].module,
        "ss_network_dim": str(adapter.rank),
        "ss_network_alpha": str(adapter.alpha),
    }
    return dict(sorted(tensors.items())), metadata


def _joined(adapter: TrainedAdapter, members: tuple[str, ...], adapted: list[AdaptedLayer]) -> tuple[Computed, Computed]:
    """The two matrices of one original layer. Of several members, lora_up is block-diagonal: nothing is approximated."""
    downs = [adapter.down(each) for each in adapted]
    ups = {each.name: adapter.up(each) for each in adapted}
    if len(members) == 1:
        return downs[0], ups[members[0]]
    rank = sum(each.rank for each in adapted)
    rows = sum(adapter.sizes[each] for each in members)

    def up() -> Tensor:
        joined = torch.zeros(rows, rank)
        row = column = 0
        for member in members:
            size = adapter.sizes[member]
            if member in ups:
                block = ups[member].compute()
                joined[row : row + size, column : column + block.shape[1]] = block
                column += block.shape[1]
            row += size
        return joined

    down = Computed(shape=(rank, *downs[0].shape[1:]), compute=lambda: torch.cat([each.compute() for each in downs]))
    return down, Computed(shape=(rows, rank), compute=up)


def _constant(value: float) -> Computed:
    return Computed(shape=(), compute=lambda: torch.tensor(value), fixed=True)
