"""What a configuration is wanted for: a model, a goal, GPUs and a folder of images. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from smalti import FamilyEntry, UserError, did_you_mean
from smalti.data import EXTENSIONS
from smalti.parallel import DeviceModel, device_models
from smalti_plan.here import named_device

Goal = Literal["lora", "full"]
USUAL_IMAGES = 30
"""Assumed for a folder that is not there yet."""
_SHARE = 0.92
"""Of the size that a card is sold with, what torch reports at least, on the cards of the table."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """`weights` is the Hub id of a flavour; "" for a family without any. `prompt` captions every image; "" if each has its own.

    `images` is how many there are, `counted` whether they were counted in `data`. `example` is the caption of one of them.
    """

    entry: FamilyEntry
    weights: str
    goal: Goal
    device: DeviceModel
    gpus: int
    data: Path
    images: int
    counted: bool = False
    prompt: str = ""
    example: str = ""
    output: Path

    @property
    def is_gated(self) -> bool:
        return self.weights in self.entry.gated

    @property
    def where(self) -> str:
        """The GPUs in words."""
        return f"{self.gpus} x {self.device.title}"


def model_of(text: str, families: Mapping[str, FamilyEntry]) -> tuple[FamilyEntry, str]:
    """A family and the Hub id of its weights for `FAMILY`, `FAMILY/FLAVOUR` or a Hub id. Raises UserError for others."""
    for entry in families.values():
        if text in entry.flavours.values():
            return entry, text
    name, _, flavour = text.partition("/")
    found = families.get(name.lower().replace("-", "_"))
    if found is None:
        near = did_you_mean(name, families, count=3)
        raise UserError(f"the model {text!r} is unknown", fix=f"{near} --model=NAME: {', '.join(families)}".lstrip())
    if flavour and flavour not in found.flavours:
        known = ", ".join(f"{name}/{each}" for each in found.flavours) or name
        raise UserError(f"{found.title} has no flavour {flavour!r}", fix=f"--model=NAME: {known}")
    return found, found.flavours[flavour] if flavour else next(iter(found.flavours.values()), "")


def card_of(text: str) -> DeviceModel:
    """A device by its name in the table, or by its memory, such as 12GB. "detected" is that of this node.

    Of several cards with that memory the smallest one is taken, so that the plan holds on all of them. Raises UserError.
    """
    if size := re.fullmatch(r"(\d+) ?(GB|GiB|G)?", text.strip(), re.IGNORECASE):
        return _card_with(int(size[1]))
    names = {re.sub(r"[^a-z0-9]", "", name): name for name in device_models()}
    plain = re.sub(r"[^a-z0-9]|nvidia|geforce|amd", "", text.lower())
    try:
        return named_device(names.get(plain, text.strip()), 1)
    except UserError as error:
        known = f"--card=NAME: {', '.join(device_models())}; or its memory: --card=12GB"
        raise UserError(error.message, fix=f"{did_you_mean(text, device_models(), count=3)} {known}".lstrip()) from None


def _card_with(gigabytes: int) -> DeviceModel:
    """The smallest card that is sold with this memory, with bf16. One between two sizes computes like the next smaller one."""
    sizes = [(model, int(match[1])) for model in _modern() if (match := re.search(r"(\d+) GB", model.title))]
    same = [model for model, size in sizes if size == gigabytes]
    if same:
        found = min(same, key=lambda model: (model.memory, model.peaks["bf16"]))
        return replace(found, title=f"card of {gigabytes} GB, as small as {found.title}")
    if not gigabytes:
        raise UserError("a card has no memory", fix="--card=12GB")
    smaller = [model for model, size in sizes if size < gigabytes]
    like = max(smaller, key=_memory) if smaller else min((model for model, _ in sizes), key=_memory)
    return replace(like, title=f"card of {gigabytes} GB", memory=int(gigabytes * _SHARE * 2**30))


def _memory(model: DeviceModel) -> int:
    return model.memory


def _modern() -> list[DeviceModel]:
    return [model for model in device_models().values() if model.capability is not None and model.capability >= (8, 0)]


def images_in(folder: Path) -> tuple[int, str]:
    """How many images are below a folder, and the caption beside the first one that has one; "" if none has."""
    count, caption = 0, ""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in EXTENSIONS or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        count += 1
        if not caption and (text := path.with_suffix(".txt")).is_file():
            caption = " ".join(text.read_text(encoding="utf-8", errors="replace").split())
    return count, caption
