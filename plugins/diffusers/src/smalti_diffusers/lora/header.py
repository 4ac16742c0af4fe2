"""What the header of an adapter's file says: its layers, ranks, alphas. Importing this module imports no torch."""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from smalti import CheckpointError, UserError
from smalti.checkpoint import read_layout
from smalti.system import load_json, open_regular, read_regular

METADATA = "lora_adapter_metadata"
"""Where diffusers keeps rank and alpha."""
TRAINED_ALPHA = "smalti_lora_alpha"
"""Metadata with the alpha of the run, where it is folded into lora_B."""
_PEFT_CONFIG = "adapter_config.json"
_AGAIN = (
    "name a .safetensors file with a LoRA, as kohya's tools, ComfyUI, diffusers, peft or `smalti checkpoint export` write it"
)
_PAIRS = {
    ".lora_A.default.weight": ".lora_B.default.weight",
    ".lora_A.weight": ".lora_B.weight",
    ".lora_down.weight": ".lora_up.weight",
    ".lora.down.weight": ".lora.up.weight",
    "_lora.down.weight": "_lora.up.weight",
    ".lora_linear_layer.down.weight": ".lora_linear_layer.up.weight",
}
"""How names of the first matrix of a layer end -> how those of the second end."""
_OTHER_METHODS = {"hada_w": "LoHa", "lokr_w": "LoKr", "dora_scale": "DoRA", "lora_magnitude_vector": "DoRA", "oft_": "OFT"}
_SHOWN = 200
"""Letters of a path that are shown, if it is none that a file can have."""
_TEXT = re.compile(r"(lora_te|text_encoder|lora_prior_te)")
_JOINED = ("qkv", "linear1", "kv_linear")
"""Ends of layers that are several in diffusers, where the rank can be the sum of theirs."""
_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e"}


@dataclass(frozen=True, kw_only=True)
class StoredMatrices:
    """The tensors of one layer: names of lora_A and lora_B, the rank, and alpha / rank where the file says alpha."""

    down: str
    up: str
    rank: int
    scale: float | None


class AdapterHeader:
    """A LoRA in a safetensors file, by the file's own names of layers. Raises UserError for anything else."""

    def __init__(self, path: Path) -> None:
        self.path = _file(path)
        try:
            self._tensors = read_layout(self.path)
        except CheckpointError as error:
            raise UserError(f"{self.path} {error.message}", fix=_AGAIN) from error
        self._metadata = _metadata(self.path)
        for mark, method in _OTHER_METHODS.items():
            if any(mark in name for name in self._tensors):
                raise UserError(f"{self.path} is a {method}, and only LoRA is supported", fix=_AGAIN)
        if self._settings.get("use_dora"):
            raise UserError(f"{self.path} is a DoRA, and only LoRA is supported", fix=_AGAIN)
        self.layers = dict(self._layers())
        """Of the trained part of the pipeline; those of text encoders are left out."""
        if not self.layers:
            raise UserError(f"{self.path} has no layers of a LoRA: of {len(self._tensors)} tensors, none is one", fix=_AGAIN)

    @property
    def text_layers(self) -> int:
        """How many layers of text encoders there are."""
        return sum(1 for name in self._tensors if _TEXT.match(name) and name.endswith(tuple(_PAIRS)))

    @property
    def unused(self) -> list[str]:
        """Tensors that are part of no LoRA, such as changes of biases and norms."""
        used = {name for layer in self.layers.values() for name in (layer.down, layer.up)}
        return [name for name in self._tensors if name not in used and not name.endswith(".alpha") and not _TEXT.match(name)]

    @cached_property
    def rank(self) -> int:
        """That of most layers."""
        plain = [each.rank for name, each in self.layers.items() if not name.endswith(_JOINED)]
        if plain:
            return Counter(plain).most_common(1)[0][0]
        noted = self._metadata.get("ss_network_dim", "")
        return int(noted) if noted.isdecimal() else next(iter(self.layers.values())).rank

    @cached_property
    def alpha(self) -> float:
        """Alpha for this rank: that of the run that made the file, if it says so; the rank if layers differ."""
        if TRAINED_ALPHA in self._metadata:
            return float(self._metadata[TRAINED_ALPHA])
        scales = {round(self.scale(name), 6) for name in self.layers}
        return scales.pop() * self.rank if len(scales) == 1 else float(self.rank)

    def scale(self, name: str) -> float:
        """What lora_B @ lora_A of a layer is multiplied with: alpha / rank."""
        layer = self.layers[name]
        if layer.scale is not None:
            return layer.scale
        alphas = cast(Mapping[str, float], self._settings.get("alpha_pattern") or {})
        default = self._settings.get("lora_alpha")
        alpha = next((value for key, value in alphas.items() if re.fullmatch(rf"(.*\.)?{key}", name)), default)
        if alpha is None:
            return 1.0
        return cast(float, alpha) / (math.sqrt(layer.rank) if self._settings.get("use_rslora") else layer.rank)

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._tensors[tensor][0].shape

    @cached_property
    def _settings(self) -> Mapping[str, object]:
        """Rank, alpha and so on, from the metadata of diffusers or peft's file."""
        config = self.path.with_name(_PEFT_CONFIG)
        in_file = METADATA in self._metadata
        if not in_file and not config.is_file():
            return {}
        try:
            found = load_json(self._metadata[METADATA] if in_file else read_regular(config))
            if not in_file:
                return dict(found)
            return {name.partition(".")[2]: value for name, value in found.items() if not _TEXT.match(name)}
        except (ValueError, TypeError, AttributeError) as error:
            place = f"the metadata of {self.path}" if in_file else str(config)
            raise UserError(f"{place} cannot be read: {error}", fix="download the file again") from error

    def _layers(self) -> Iterator[tuple[str, StoredMatrices]]:
        for name in self._tensors:
            end = next((each for each in _PAIRS if name.endswith(each)), None)
            if end is None or _TEXT.match(name):
                continue
            layer = name.removesuffix(end)
            up = layer + _PAIRS[end]
            if up not in self._tensors:
                raise UserError(f"{self.path} has {name} without {up}", fix="download the file again; it is incomplete")
            rank = self.shape(name)[0]
            alpha = self._scalar(f"{layer}.alpha")
            yield layer, StoredMatrices(down=name, up=up, rank=rank, scale=alpha / rank if alpha is not None else None)

    def _scalar(self, name: str) -> float | None:
        """The value of a tensor with one number; None if there is no such tensor."""
        if name not in self._tensors:
            return None
        chunk, position = self._tensors[name]
        if math.prod(chunk.shape) != 1 or chunk.dtype not in (*_FORMATS, "BF16"):
            raise UserError(f"{self.path} has {name} that is not one number", fix=_AGAIN)
        with self.path.open("rb") as file:
            file.seek(position)
            data = file.read(chunk.size)
        value = struct.unpack("<f", b"\0\0" + data) if chunk.dtype == "BF16" else struct.unpack(_FORMATS[chunk.dtype], data)
        return float(value[0])


def _file(path: Path) -> Path:
    """The file itself, or the only safetensors file of a folder."""
    path = path.expanduser()
    try:
        path.stat()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", fix=_AGAIN) from None
    except (OSError, ValueError) as error:  # no name that a file can have, or a folder that may not be entered
        raise UserError(f"{str(path)[:_SHOWN]} cannot be opened: {error.args[-1]}", fix=_AGAIN) from None
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UserError(f"{path} is not a safetensors file; files of other types can contain code", fix=_AGAIN)
        return path
    if not path.is_dir():
        raise UserError(f"{path} is neither a file nor a folder", fix=_AGAIN)
    files = sorted(path.glob("*.safetensors"))
    if len(files) != 1:
        named = ", ".join(file.name for file in files[:3]) or "no .safetensors file"
        raise UserError(f"{path} holds {named}", fix="name one .safetensors file")
    return files[0]


def _metadata(path: Path) -> dict[str, str]:
    """The metadata of a valid file."""
    with open_regular(path) as file:
        (length,) = struct.unpack("<Q", file.read(8))
        found = load_json(file.read(length)).get("__metadata__") or {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
