"""A model in one file, in the layout that its tools load: which tensors it has, what each is made of, and writing it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from smalti import UserError
from smalti.checkpoint import DTYPES, Computed
from smalti_diffusers.sources.components import Components, frozen_tensors
from smalti_diffusers.sources.conversion import UNET_PREFIX
from smalti_diffusers.sources.layouts import LAYOUTS, OPEN_CLIP, Table
from smalti_diffusers.sources.model_file import MARKS

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder

_MARKED = re.compile(r"(.*?)(?:#(\d)|([~^@=]))?")
_CLIP = "text_model."


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """What a file of one family holds. `model` and `vae` are prefixes; a file without autoencoder has None there.

    `encoders` are its text encoders, with prefix and table. `parts` are others under their own names, with prefix.
    """

    model: str = ""
    vae: str | None = None
    encoders: Mapping[str, tuple[str, Table]] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)


_SDXL = FileLayout(
    model=UNET_PREFIX,
    vae="first_stage_model.",
    encoders={
        "text_encoder": ("conditioner.embedders.0.transformer.", {}),
        "text_encoder_2": ("conditioner.embedders.1.model.", OPEN_CLIP),
    },
)
_SD1 = FileLayout(
    model=UNET_PREFIX,
    vae="first_stage_model.",
    encoders={"text_encoder": ("cond_stage_model.transformer.", {})},
)
FILE_LAYOUTS: Mapping[str, FileLayout] = {
    "anima": FileLayout(model="net.", parts={"text_conditioner": "net.llm_adapter."}),
    "auraflow": FileLayout(),
    "chroma": FileLayout(),
    "cosmos": FileLayout(model="net."),
    "ernie": FileLayout(),
    "flux": FileLayout(),
    "flux2": FileLayout(),
    "hidream": FileLayout(),
    "krea2": FileLayout(),
    "lumina2": FileLayout(),
    "qwen_image": FileLayout(),
    "qwen_image21": FileLayout(),
    "sd1x": _SD1,
    "sd3": FileLayout(model=UNET_PREFIX, vae="first_stage_model."),
    "sdxl": _SDXL,
    "z_image": FileLayout(),
}
"""By family, as the models were published by their authors and for ComfyUI: the trained model alone, or with other parts."""


def single_file_layout(family: str) -> FileLayout:
    """Raises UserError for a family without a layout here."""
    if family not in FILE_LAYOUTS:
        raise UserError(f"models of {family} are not exported as one file", fix="leave --single_file out")
    return FILE_LAYOUTS[family]


def trained_tensors(folder: ExportFolder) -> dict[str, Computed]:
    """The trained tensors of an export, in their own types."""
    return {
        name: Computed(shape=stored.shape, compute=partial(folder.tensor, name), dtype=DTYPES[stored.dtype])
        for name, stored in folder.tensors.items()
    }


def write_single_file(
    folder: ExportFolder,
    family: str,
    components: Components,
    part: str,
    trained: Mapping[str, Mapping[str, Computed]],
    scheduler: Mapping[str, object],
) -> None:
    """Write the model to one file, with the parts that files of its family have.

    `trained` are the tensors of `part`, and of other parts that were trained, by part. `scheduler` is what this run changed in
    it. The text encoders get the type of the export; the autoencoder keeps its own, since some need more than 16 bits.
    """
    layout = single_file_layout(family)
    found = _named(trained[part], LAYOUTS[str(components.kind(part))](components.config(part)), layout.model)
    if layout.vae is not None:
        table = LAYOUTS[str(components.kind("vae"))](components.config("vae"))
        found |= _named(frozen_tensors(components.weights("vae")), table, layout.vae)
    for encoder, (prefix, table) in layout.encoders.items():
        tensors = trained.get(encoder) or frozen_tensors(components.weights(encoder), fixed=False)
        found |= _named({_of_clip(name): each for name, each in tensors.items() if "position_ids" not in name}, table, prefix)
    for other, prefix in layout.parts.items():
        found |= _named(frozen_tensors(components.weights(other), fixed=False), {}, prefix)
    for mark, (key, value) in MARKS.items():
        if family == "sdxl" and scheduler.get(key) == value:
            found[mark] = Computed(shape=(0,), compute=partial(torch.empty, 0), fixed=True)
    folder.write_computed(f"{folder.name}.safetensors", found, {})


def _of_clip(name: str) -> str:
    """The name in CLIP's checkpoints, which have a layer that newer versions of transformers leave out."""
    return name if name.startswith((_CLIP, "text_projection.")) else _CLIP + name


def _named(tensors: Mapping[str, Computed], table: Table, prefix: str) -> dict[str, Computed]:
    """These tensors under the names of the file."""

    def compute(made: FileTensor, dtype: torch.dtype | None) -> Tensor:
        return made.make(lambda name: tensors[name].compute().to(dtype or torch.float32))

    named = {}
    for made in file_tensors(tensors, table):
        first = tensors[made.parts[0]]
        named[prefix + made.name] = Computed(
            shape=made.shape({name: tensors[name].shape for name in made.parts}),
            compute=partial(compute, made, first.dtype),
            dtype=first.dtype,
            fixed=first.fixed,
        )
    return named


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor of the file: `parts` joined along their first dimension, then changed as `mark` says (see `layouts`)."""

    name: str
    parts: tuple[str, ...]
    mark: str = ""

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Its shape, from those of its parts."""
        first = parts[self.parts[0]]
        shape = (sum(parts[name][0] for name in self.parts), *first[1:]) if first else ()
        if self.mark == "@":
            return shape[::-1]
        if self.mark == "=":
            return (math.prod(shape),)
        return (*shape, 1, 1) if self.mark == "^" and len(shape) == 2 else shape

    def make(self, read: Callable[[str], Tensor]) -> Tensor:
        """The tensor itself. `read` returns one of the parts."""
        tensors = [read(name) for name in self.parts]
        joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        if self.mark == "~":
            return torch.cat(joined.chunk(2)[::-1])
        if self.mark == "@":
            return joined.T.contiguous()
        if self.mark == "=":
            return joined.flatten()
        return joined[:, :, None, None] if self.mark == "^" and joined.ndim == 2 else joined


def file_tensors(names: Iterable[str], table: Table) -> list[FileTensor]:
    """What a file has in place of these tensors."""
    rules = [
        (re.compile(re.escape(ours).replace(r"\{\}", r"(\d+)") + r"(?=\.|$)"), theirs) for ours, theirs in _longest_first(table)
    ]
    joined: dict[str, dict[int, str]] = {}
    marks: dict[str, str] = {}
    for name in names:
        place, number, mark = _renamed(name, rules)
        joined.setdefault(place, {})[number] = name
        marks[place] = mark
    return [
        FileTensor(name=place, parts=tuple(parts[number] for number in sorted(parts)), mark=marks[place])
        for place, parts in joined.items()
    ]


def _longest_first(table: Table) -> Iterator[tuple[str, str]]:
    """Numbers before placeholders: what is said of one block goes before what is said of all."""
    yield from sorted(table.items(), key=lambda rule: (rule[0].count("."), "{}" not in rule[0]), reverse=True)


def _renamed(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> tuple[str, int, str]:
    """The name in the file, which of its parts this tensor is, and the mark."""
    for pattern, theirs in rules:
        if found := pattern.match(name):
            marked = _MARKED.fullmatch(theirs)
            assert marked is not None
            place = marked[1].format(*found.groups()) if "{}" in marked[1] else marked[1]
            return place + name[found.end() :], int(marked[2] or 0), marked[3] or ""
    return name, 0, ""
