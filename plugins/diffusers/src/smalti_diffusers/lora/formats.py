"""The files in which an adapter leaves smalti, for diffusers, peft, ComfyUI and kohya's tools.

A reader multiplies lora_B @ lora_A by alpha / rank. diffusers reads alpha from the metadata of a file. ComfyUI does not, and
takes it to be the rank. So in files with the names of diffusers and peft, the factor is folded into lora_B and alpha is the
rank: every reader is right. Kohya's format has a tensor `.alpha` for each layer, which all its readers apply. So have LoKr and
LoHa but for peft and diffusers: their other readers take it from there, and of a LoKr of two full matrices ignore it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.checkpoint import Computed
from smalti.models import Weights
from smalti_diffusers.lora.encoders import CLIP, encoder_of, kohya_name as kohya_name_in_encoder
from smalti_diffusers.lora.header import LENGTHS, LENGTHS_OF_BASE, METADATA, TIMED, TRAINED_ALPHA
from smalti_diffusers.lora.kinds import by_row, change, row_norms
from smalti_diffusers.lora.shapes import MAGNITUDE, common_factor, factors_of
from smalti_diffusers.lora.trained import AdaptedLayer, TrainedAdapter, has_weight
from smalti_diffusers.options import TITLES, Kind
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
    "anima": Tools(comfyui="kohya", kohya=True, module="networks.lora_anima"),
    "auraflow": Tools(comfyui="diffusers", kohya=False),
    "bria": Tools(diffusers=False, comfyui=None, kohya=False),
    "chroma": Tools(comfyui="diffusers", kohya=True, module="networks.lora_flux"),
    "cosmos": Tools(diffusers=False, comfyui="kohya", kohya=False),
    "ernie": Tools(comfyui="kohya", kohya=False, original=False),
    "flux": Tools(comfyui="diffusers", kohya=True, module="networks.lora_flux"),
    "flux2": Tools(comfyui="diffusers", kohya=True, module="networks.lora_flux_2"),
    "hidream": Tools(comfyui="diffusers", kohya=False),
    "ideogram": Tools(comfyui="kohya", kohya=True, module="networks.lora_ideogram4"),
    "krea2": Tools(comfyui="diffusers", kohya=True, module="networks.lora_krea2"),
    "longcat_image": Tools(diffusers=False, comfyui=None, kohya=False),
    "lumina2": Tools(comfyui="kohya", kohya=True, module="networks.lora_lumina"),
    "ovis_image": Tools(diffusers=False, comfyui=None, kohya=False),
    "pixart": Tools(diffusers=False, comfyui="diffusers", kohya=False),
    "qwen_image": Tools(comfyui="diffusers", kohya=True, module="networks.lora_qwen_image"),
    "qwen_image21": Tools(comfyui="diffusers", kohya=False, original=False),
    "sana": Tools(comfyui=None, kohya=False),
    "sd1x": Tools(comfyui="kohya", kohya=True, original=False),
    "sd2x": Tools(comfyui="kohya", kohya=True, original=False),
    "sd3": Tools(comfyui="diffusers", kohya=True, module="networks.lora_sd3"),
    "sdxl": Tools(comfyui="kohya", kohya=True),
    "z_image": Tools(comfyui="diffusers", kohya=True, original=False, module="networks.lora_zimage"),
}
"""By family. ComfyUI as of 2026, musubi-tuner for flux2, ideogram, krea2, qwen_image and z_image, sd-scripts for the others."""
_LOKR_IN_DIFFUSERS = ("flux2", "z_image")
"""Families of which diffusers loads LoKr."""
_PEFT_ONLY = Tools(diffusers=False, comfyui=None, kohya=False)


def chosen_format(family: str, format: str | None, kind: Kind = "lora") -> Format:
    """The format to write; None stands for that of diffusers, or of peft where diffusers loads no such adapters.

    Raises UserError for a format that no tool reads for this family and kind of adapter.
    """
    tools = TOOLS.get(family, _PEFT_ONLY)
    in_diffusers = tools.diffusers and (kind in ("lora", "dora") or (kind == "lokr" and family in _LOKR_IN_DIFFUSERS))
    if format is None:
        return "diffusers" if in_diffusers else "peft"
    known = {"diffusers": in_diffusers, "peft": True, "comfyui": tools.comfyui is not None, "kohya": tools.kohya}
    if known.get(format):
        return cast(Format, format)
    reasons = {
        "diffusers": f"diffusers loads no {TITLES[kind]} into the pipeline of {family}"
        if tools.diffusers
        else f"the pipeline of {family} in diffusers has no load_lora_weights",
        "comfyui": f"ComfyUI has no names for adapters of {family}",
        "kohya": f"kohya's tools have no adapters of {family}",
    }
    others = " or ".join(f"--format={each}" for each in FORMATS if known[each])
    reason = reasons.get(format, f"smalti writes no adapters in the format {format}")
    raise UserError(reason, fix=f"{others}, or --merge for the complete model")


def write_adapter(
    folder: ExportFolder,
    format: Format,
    family: str,
    part: str,
    model: nn.Module,
    config: Mapping[str, object],
    base: Callable[[], Weights] | None = None,
) -> None:
    """Write the adapter of this part of a pipeline. `config` is that of the model; `base` gives its weights, for a dora.

    Raises UserError for what this format cannot carry.
    """
    adapter = TrainedAdapter(folder, model)
    tools = TOOLS.get(family, _PEFT_ONLY)
    timed = {TIMED: "{least} {exponent}".format_map(adapter.timed)} if adapter.timed else {}
    notes = {TRAINED_ALPHA: str(adapter.scale * adapter.rank)} | timed
    if format == "kohya" or (format == "comfyui" and tools.comfyui == "kohya"):
        tensors, notes = _kohya(adapter, family, config, for_comfyui=format == "comfyui", base=base)
        folder.write_computed(f"{folder.name}.safetensors", tensors, notes | timed)
    elif format == "peft":
        if encoders := sorted(filter(None, {encoder_of(layer) for layer in adapter.layers})):
            raise UserError(
                f"peft's format is that of one model, and this adapter also changes {' and '.join(encoders)}",
                fix=f"--format=diffusers{' or kohya' if tools.kohya else ''}, or --merge for the complete model",
            )
        folder.write_computed("adapter_model.safetensors", dict(_named(adapter, "base_model.model.")), notes)
        folder.write_json("adapter_config.json", peft_config(adapter))
    elif format == "comfyui":
        tensors = dict(_named_for_comfyui(adapter, f"{part}.", base))
        folder.write_computed(f"{folder.name}.safetensors", tensors, notes | _described(adapter, part, format))
    else:
        folder.write_computed(FILE, dict(_named(adapter, f"{part}.")), notes | _described(adapter, part, format))


def _described(adapter: TrainedAdapter, part: str, format: Format) -> dict[str, str]:
    """Metadata of files with the names of diffusers, which reads settings from there; those of a lokr it finds by itself."""
    if adapter.kind == "dora" and format == "comfyui":
        return {LENGTHS: LENGTHS_OF_BASE}
    if format == "comfyui" and adapter.kind in ("lokr", "loha"):
        return {}
    settings: dict[str, object] = {}
    for encoder in sorted({encoder_of(layer) for layer in adapter.layers}, key=str):
        config = peft_config(adapter, encoder)
        settings |= {f"{encoder or part}.{key}": value for key, value in config.items() if key != "peft_type"}
    if adapter.kind == "lokr":
        return {}
    return {METADATA: json.dumps(settings, sort_keys=True)}


def _named(adapter: TrainedAdapter, prefix: str) -> Iterator[tuple[str, Computed]]:
    """With the names of peft, scales multiplied into one matrix."""
    for name, layer in sorted(adapter.layers.items()):
        for part in layer.parts:
            factor = layer.scale if part in ("lora_B", "lokr_w1", "hada_w1_a") else 1.0
            ending = ".weight" if part in ("lora_A", "lora_B") else ""
            yield f"{'' if encoder_of(name) else prefix}{name}.{part}{ending}", adapter.part(layer, part, factor)


def _named_for_comfyui(
    adapter: TrainedAdapter, prefix: str, base: Callable[[], Weights] | None
) -> Iterator[tuple[str, Computed]]:
    """With the names of diffusers; lokr and loha have their scale as `.alpha`, a dora the lengths that ComfyUI wants."""
    if adapter.kind in ("lokr", "loha"):
        for name, layer in sorted(adapter.layers.items()):
            yield from _with_alpha(adapter, layer, f"{prefix}{name}")
        return
    for name, tensor in _named(adapter, prefix):
        if not name.endswith(MAGNITUDE):
            yield name, tensor
    if adapter.kind == "dora":
        assert base is not None, "the lengths need the weights of the base"
        weights = base()
        for name, layer in sorted(adapter.layers.items()):
            yield f"{prefix}{name}.dora_scale", lengths(adapter, [layer], (name,), weights, for_comfyui=True)


def _with_alpha(adapter: TrainedAdapter, layer: AdaptedLayer, name: str) -> Iterator[tuple[str, Computed]]:
    """The tensors of a lokr or loha as LyCORIS and ComfyUI name them. Of two full matrices readers take no alpha."""
    for part in layer.parts:
        yield f"{name}.{part}", adapter.part(layer, part)
    if layer.rank is not None:
        yield f"{name}.alpha", _constant(layer.scale * layer.rank)


def peft_config(adapter: TrainedAdapter, encoder: str | None = None) -> dict[str, object]:
    """What peft rebuilds the layers of the model, or of a text encoder, from; alpha is the rank everywhere.

    Raises UserError for a lokr with several factors.
    """
    layers = {name: layer for name, layer in adapter.layers.items() if encoder_of(name) == encoder}
    # Of an encoder the ends of the names, which begin otherwise in other versions of transformers.
    called = {name: name.removeprefix(f"{encoder}.").removeprefix(CLIP) for name in layers}
    ranks = {name: layer.rank for name, layer in layers.items()}
    found: dict[str, object] = {"r": adapter.rank, "target_modules": sorted(called.values())}
    if adapter.kind == "lokr":
        shapes = {name: {part: adapter.shape(layer, part) for part in layer.parts} for name, layer in layers.items()}
        factor = common_factor([factors_of(each) for each in shapes.values()])
        if factor is None:
            raise UserError(
                "the layers are divided by several factors (lokr_factor_pattern), and peft and diffusers know one",
                fix="--format=comfyui or kohya where the family has it, or --merge for the complete model",
            )
        ranks = {name: rank or max(shapes[name]["lokr_w2"][:2]) for name, rank in ranks.items()}
        found |= {"decompose_factor": factor, "decompose_both": False}
    start = "" if encoder else "^"
    own = {f"{start}{re.escape(called[name])}$": rank for name, rank in ranks.items() if rank != adapter.rank}
    if own:
        found |= {"rank_pattern": own, "alpha_pattern": own}
    kinds = {"lokr": "LOKR", "loha": "LOHA"}
    if adapter.kind == "dora":
        found["use_dora"] = True
    alpha = "alpha" if adapter.kind in kinds else "lora_alpha"
    return {"peft_type": kinds.get(adapter.kind, "LORA"), alpha: adapter.rank, **found}


def lengths(
    adapter: TrainedAdapter,
    adapted: Sequence[AdaptedLayer],
    members: Sequence[str],
    base: Weights | None,
    *,
    for_comfyui: bool,
) -> Computed:
    """`dora_scale` (out, 1, ...) of one layer of the file, of which these layers of diffusers are the rows.

    Kohya's tools bring the rows of W + dW to these lengths. ComfyUI multiplies W + dW by them over the lengths of rows of W.
    """
    layers = {each.name: each for each in adapted}
    dimensions = cast(Tensor, adapter.model.get_submodule(members[0]).weight).ndim

    def compute() -> Tensor:
        found = []
        for member in members:
            layer = layers.get(member)
            if not for_comfyui and layer is not None:
                found.append(adapter.tensors(layer)[MAGNITUDE].flatten())
                continue
            if base is None:
                raise UserError(
                    f"the lengths of {member} need the weights of its base", fix="--format=diffusers or --format=peft"
                )
            weight = base.get(f"{member}.weight").double()
            norms = row_norms(weight)
            if layer is not None:
                parts = {part: each.double() for part, each in adapter.tensors(layer).items()}
                changes = change(parts, layer.scale, weight.shape)
                norms = norms * parts[MAGNITUDE].flatten() / row_norms(weight + changes)
            found.append(norms)
        return by_row(torch.cat(found), dimensions).float().contiguous()

    rows = sum(adapter.sizes[each] for each in members)
    return Computed(shape=(rows, *(1,) * (dimensions - 1)), compute=compute)


# --- kohya's format -------------------------------------------------------------------------------------------------


def original_layers(model: nn.Module, config: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """The layers of the original model -> the layers of diffusers in them: query, key and value can be one layer there.

    Layers whose rows are in another order there are left out.
    """
    weights = (f"{name}.weight" for name, module in model.named_modules() if has_weight(module))
    known = next((each.__name__ for each in type(model).__mro__ if each.__name__ in LAYOUTS), None)
    table = LAYOUTS[known](config) if known is not None else {}
    return {
        each.name.removesuffix(".weight"): tuple(part.removesuffix(".weight") for part in each.parts)
        for each in file_tensors(weights, table)
        if not each.mark
    }


def kohya_name(layer: str, *, alone: bool = False) -> str:
    """Of a layer of a model that holds one text encoder, if it is `alone`, or two or none."""
    if encoder_of(layer):
        return kohya_name_in_encoder(layer, alone=alone)
    return "lora_unet_" + layer.replace(".", "_")


def _kohya(
    adapter: TrainedAdapter,
    family: str,
    config: Mapping[str, object],
    *,
    for_comfyui: bool,
    base: Callable[[], Weights] | None,
) -> tuple[dict[str, Computed], dict[str, str]]:
    """The tensors and the metadata of kohya's format."""
    tensors: dict[str, Computed] = {}
    written: set[str] = set()
    weights = base() if base is not None and adapter.kind == "dora" else None
    own_names = {layer: (layer,) for layer in adapter.layers}
    layers = original_layers(adapter.model, config) if TOOLS[family].original else own_names
    for original, members in layers.items():
        adapted = [adapter.layers[each] for each in members if each in adapter.layers]
        if not adapted:
            continue
        written.update(each.name for each in adapted)
        name = kohya_name(original, alone=not hasattr(adapter.model, "text_encoder_2"))
        if adapter.kind in ("lokr", "loha"):
            if len(members) > 1:
                raise UserError(
                    f"in the original model {', '.join(members)} are one layer, {original}, and the {TITLES[adapter.kind]} of "
                    "several layers is none of the joined one",
                    fix=_other_names(family),
                )
            tensors |= _with_alpha(adapter, adapted[0], name)
            continue
        rank = sum(each.width for each in adapted)
        down, up = _joined(adapter, members, adapted)
        tensors[f"{name}.lora_down.weight"] = down
        tensors[f"{name}.lora_up.weight"] = up
        # The rank of joined layers is the sum of theirs, and the scale has to stay what it was.
        tensors[f"{name}.alpha"] = _constant(adapted[0].scale * rank)
        if adapter.kind == "dora":
            tensors[f"{name}.dora_scale"] = lengths(adapter, adapted, members, weights, for_comfyui=for_comfyui)
    if lost := sorted(adapter.layers.keys() - written):
        raise UserError(
            f"the format of kohya's tools has no name for {', '.join(lost[:3])}" + (" and others" if len(lost) > 3 else ""),
            fix="--format=diffusers or --format=peft; or train without these layers (--lora_targets)",
        )
    metadata = {
        "ss_network_module": f"networks.{adapter.kind}" if adapter.kind in ("lokr", "loha") else TOOLS[family].module,
        "ss_network_dim": str(adapter.rank),
        "ss_network_alpha": str(adapter.scale * adapter.rank),
    }
    if adapter.kind == "dora" and for_comfyui:
        metadata[LENGTHS] = LENGTHS_OF_BASE
    return dict(sorted(tensors.items())), metadata


def _other_names(family: str) -> str:
    """The way out where the names of the original model are of no use."""
    comfyui = "--format=comfyui, " if TOOLS[family].comfyui == "diffusers" else ""
    return f"{comfyui}--format=peft, or --merge for the complete model"


def _joined(adapter: TrainedAdapter, members: tuple[str, ...], adapted: list[AdaptedLayer]) -> tuple[Computed, Computed]:
    """The two matrices of one original layer, at the scale of the first of `adapted`.

    Of several members, lora_up is block-diagonal: nothing is approximated.
    """
    downs = [adapter.down(each) for each in adapted]
    ups = {each.name: adapter.part(each, "lora_B", each.scale / adapted[0].scale) for each in adapted}
    if len(members) == 1:
        return downs[0], ups[members[0]]
    rank = sum(each.width for each in adapted)
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
