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
from smalti_diffusers.lora.shapes import MAGNITUDE, common_factor, factors_of, rank_of
from smalti_diffusers.options import TITLES, Kind

METADATA = "lora_adapter_metadata"
"""Where diffusers keeps rank and alpha."""
TRAINED_ALPHA = "smalti_lora_alpha"
"""Metadata with the alpha of the run, where it is folded into lora_B."""
TIMED = "smalti_tlora"
"""Metadata of a T-LoRA: "LEAST EXPONENT", which no other reader follows."""
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
_LYCORIS = re.compile(r"(?P<layer>.+)\.(?P<part>lokr_w[12](?:_[ab])?|hada_w[12]_[ab])(?:\.default)?(?:\.weight)?")
_LENGTHS = re.compile(r"(?P<layer>.+)\.(?:dora_scale|lora_magnitude_vector(?:\.default)?(?:\.weight)?)")
_UNSUPPORTED = {
    "oft_": "an OFT",
    "lokr_t2": "a LoKr with a Tucker decomposition",
    "hada_t1": "a LoHa with a Tucker decomposition",
}
LENGTHS = "smalti_dora_scale"
"""Metadata that says what the lengths of a dora are for."""
LENGTHS_OF_BASE = "over the norms of the base"
"""As ComfyUI takes them. In other files they are over the norms of the changed weight."""
_SHOWN = 200
"""Letters of a path that are shown, if it is none that a file can have."""
_TEXT = re.compile(r"(lora_te|text_encoder|lora_prior_te)")
_JOINED = ("qkv", "linear1", "kv_linear")
"""Ends of layers that are several in diffusers, where the rank can be the sum of theirs."""
_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e"}


@dataclass(frozen=True, kw_only=True)
class StoredMatrices:
    """The tensors of one layer, by what they are, such as lora_A; and alpha / rank where the file says alpha.

    The rank is None of a lokr of two full matrices.
    """

    parts: Mapping[str, str]
    rank: int | None
    scale: float | None

    @property
    def down(self) -> str:
        return self.parts["lora_A"]

    @property
    def up(self) -> str:
        return self.parts["lora_B"]


class AdapterHeader:
    """A LoRA in a safetensors file, by the file's own names of layers. Raises UserError for anything else."""

    def __init__(self, path: Path) -> None:
        self.path = _file(path)
        try:
            self._tensors = read_layout(self.path)
        except CheckpointError as error:
            raise UserError(f"{self.path} {error.message}", fix=_AGAIN) from error
        self._metadata = _metadata(self.path)
        for mark, method in _UNSUPPORTED.items():
            if any(mark in name for name in self._tensors):
                raise UserError(f"{self.path} is {method}, which is not supported", fix=_AGAIN)
        self.layers = dict(self._layers())
        """Of the trained part of the pipeline; those of text encoders are `encoder_layers`."""
        if not self.layers:
            raise UserError(f"{self.path} has no layers of a LoRA: of {len(self._tensors)} tensors, none is one", fix=_AGAIN)
        self.kind = self._kind(self.layers)

    @cached_property
    def encoder_layers(self) -> dict[str, StoredMatrices]:
        """The layers of text encoders. Raises UserError if they are of another kind than those of the model."""
        found = dict(self._layers(of_encoders=True))
        self._kind(self.layers | found)
        return found

    def layer(self, name: str) -> StoredMatrices:
        """A layer of the model or of a text encoder."""
        return self.layers[name] if name in self.layers else self.encoder_layers[name]

    @property
    def text_layers(self) -> int:
        """How many layers of text encoders there are."""
        return sum(1 for name in self._tensors if _TEXT.match(name) and name.endswith((*_PAIRS, ".lokr_w1", ".hada_w1_a")))

    @property
    def unused(self) -> list[str]:
        """Tensors that are part of no LoRA, such as changes of biases and norms."""
        used = {name for layer in self.layers.values() for name in layer.parts.values()}
        return [name for name in self._tensors if name not in used and not name.endswith(".alpha") and not _TEXT.match(name)]

    @cached_property
    def rank(self) -> int | None:
        """That of most layers; None if none has one."""
        plain = [each.rank for name, each in self.layers.items() if each.rank is not None and not name.endswith(_JOINED)]
        if plain:
            return Counter(plain).most_common(1)[0][0]
        joined, noted = next(iter(self.layers.values())).rank, self._metadata.get("ss_network_dim", "")
        return int(noted) if noted.isdecimal() and joined is not None else joined

    @cached_property
    def alpha(self) -> float | None:
        """Alpha for this rank: that of the run that made the file, if it says so; the rank if layers differ."""
        if self.rank is None:
            return None
        if (noted := self._metadata.get(TRAINED_ALPHA)) is not None:
            try:
                return float(noted)
            except ValueError:
                raise UserError(
                    f"{self.path} has the alpha {noted!r} in its metadata, which is not a number", fix=_AGAIN
                ) from None
        scales = {round(self.scale(name), 6) for name, layer in self.layers.items() if layer.rank is not None}
        return scales.pop() * self.rank if len(scales) == 1 else float(self.rank)

    @cached_property
    def factor(self) -> int | None:
        """The factor of a lokr; None where layers have several."""
        return common_factor({factors_of(self.shapes(name)) for name in self.layers})

    @property
    def lengths_of_base(self) -> bool:
        """Whether the lengths of a dora are over those of the base's rows, rather than those of the changed weight."""
        return self._metadata.get(LENGTHS) == LENGTHS_OF_BASE

    @property
    def timed(self) -> tuple[int, float] | None:
        """The least active ranks and the exponent of a T-LoRA that smalti wrote; None of any other file."""
        least, _, exponent = self._metadata.get(TIMED, "").partition(" ")
        return (int(least), float(exponent)) if least else None

    def scale(self, name: str) -> float:
        """What the product of the matrices of a layer is multiplied with: alpha / rank."""
        layer = self.layer(name)
        if layer.scale is not None:
            return layer.scale
        alpha = self._setting(name, "alpha_pattern", "lora_alpha", "alpha")
        rank = layer.rank or self._setting(name, "rank_pattern", "r")
        if alpha is None or rank is None:
            return 1.0
        return alpha / (math.sqrt(rank) if self._settings_of(name).get("use_rslora") else rank)

    def _setting(self, layer: str, pattern: str, *names: str) -> float | None:
        """What the settings say of a layer, by pattern or for all."""
        settings = self._settings_of(layer)
        own = cast(Mapping[str, float], settings.get(pattern) or {})
        default = next((settings[name] for name in names if name in settings), None)
        return next(
            (value for key, value in own.items() if re.fullmatch(rf"(.*\.)?({key.removeprefix('^')})", layer)),
            cast("float | None", default),
        )

    def shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of a layer, by what they are."""
        return {part: self.shape(name) for part, name in self.layer(layer).parts.items()}

    def shape(self, tensor: str) -> tuple[int, ...]:
        return self._tensors[tensor][0].shape

    def _settings_of(self, layer: str) -> Mapping[str, object]:
        """Rank, alpha and so on, of the model or of the text encoder that has this layer."""
        return self._settings.get(layer.partition(".")[0] if _TEXT.match(layer) else "", {})

    @cached_property
    def _settings(self) -> dict[str, dict[str, object]]:
        """From the metadata of diffusers or peft's file, by the names of text encoders; those of the model are under ""."""
        config = self.path.with_name(_PEFT_CONFIG)
        in_file = METADATA in self._metadata
        if not in_file and not config.is_file():
            return {}
        try:
            found = load_json(self._metadata[METADATA] if in_file else read_regular(config))
            if not in_file:
                return {"": dict(found)}
            settings: dict[str, dict[str, object]] = {}
            for name, value in found.items():
                part, _, own = name.partition(".")
                settings.setdefault(part if _TEXT.match(part) else "", {})[own] = value
            return settings
        except (ValueError, TypeError, AttributeError) as error:
            place = f"the metadata of {self.path}" if in_file else str(config)
            raise UserError(f"{place} cannot be read: {error}", fix="download the file again") from error

    def _layers(self, *, of_encoders: bool = False) -> Iterator[tuple[str, StoredMatrices]]:
        lengths: dict[str, str] = {}
        others: dict[str, dict[str, str]] = {}
        tensors = [name for name in self._tensors if bool(_TEXT.match(name)) == of_encoders]
        for name in tensors:
            if found := _LENGTHS.fullmatch(name):
                lengths[found["layer"]] = name
            elif found := _LYCORIS.fullmatch(name):
                others.setdefault(found["layer"], {})[found["part"]] = name
        for name in tensors:
            end = next((each for each in _PAIRS if name.endswith(each)), None)
            if end is None:
                continue
            layer = name.removesuffix(end)
            up = layer + _PAIRS[end]
            if up not in self._tensors:
                raise UserError(f"{self.path} has {name} without {up}", fix="download the file again; it is incomplete")
            more = {MAGNITUDE: lengths[layer]} if layer in lengths else {}
            yield layer, self._stored(layer, {"lora_A": name, "lora_B": up, **more})
        for layer, parts in others.items():
            self._check_whole(layer, parts)
            if layer in lengths:
                raise UserError(f"{self.path} has {lengths[layer]} beside a product, which is not supported", fix=_AGAIN)
            yield layer, self._stored(layer, parts)

    def _stored(self, layer: str, parts: Mapping[str, str]) -> StoredMatrices:
        rank, alpha = rank_of({part: self.shape(name) for part, name in parts.items()}), self._scalar(f"{layer}.alpha")
        if "lora_A" not in parts and rank is None:  # two full matrices, which every reader takes without alpha, but peft
            return StoredMatrices(parts=parts, rank=None, scale=None if "alpha" in self._settings_of(layer) else 1.0)
        return StoredMatrices(parts=parts, rank=rank, scale=alpha / rank if alpha is not None and rank else None)

    def _check_whole(self, layer: str, parts: Mapping[str, str]) -> None:
        """Raises UserError if parts of a lokr or loha are missing."""
        if any(part.startswith("hada_") for part in parts):
            whole = len(parts) == 4
        else:
            whole = all(each in parts or {f"{each}_a", f"{each}_b"} <= parts.keys() for each in ("lokr_w1", "lokr_w2"))
        if not whole:
            held = ", ".join(sorted(parts))
            raise UserError(f"{self.path} has of {layer} only {held}", fix="download the file again; it is incomplete")

    def _kind(self, layers: Mapping[str, StoredMatrices]) -> Kind:
        """The kind of these layers. Raises UserError if they are of several."""
        kinds: set[Kind] = set()
        for layer in layers.values():
            first = next(iter(layer.parts))
            plain: Kind = "dora" if MAGNITUDE in layer.parts else "lora"
            kinds.add("lokr" if first.startswith("lokr_") else "loha" if first.startswith("hada_") else plain)
        if len(kinds) > 1:
            named = " and ".join(sorted(TITLES[kind] for kind in kinds))
            raise UserError(f"{self.path} has layers of {named}, and a run trains one kind of adapter", fix=_AGAIN)
        return kinds.pop()

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
