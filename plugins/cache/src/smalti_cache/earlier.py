"""Caches of earlier versions: parts in safetensors with one tensor per name, under keys made of one text each.

Their entries are used: a reference to each is added to the store under its present key, and the parts stay as they are.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smalti.data import Bucket, PreparedData, StorageError
from smalti.system import load_json
from smalti_cache.entries import Form, StoredPart
from smalti_cache.keys import Key, Keys
from smalti_cache.pack import PackIndex

Reader = Callable[[str, int, int], bytes]

_LATENTS_RECIPE = 2
_TEXT_RECIPE = 1


def earlier_text_key(text: str, *, negative: bool) -> str:
    return _key(_TEXT_RECIPE, text, *(["negative"] if negative else []))


def earlier_latents_key(data: PreparedData, position: int, row: int, bucket: Bucket, *, flipped: bool) -> str:
    dataset, crop_settings = data.datasets[position], data.crop_settings[position]
    cropped = (
        [crop_settings.crop_style, dataset.spec.id if crop_settings.crop_style == "random" else ""]
        if crop_settings.crop
        else []
    )
    size = dataset.index.size(row)
    scaled = crop_settings.resized(*size, bucket)
    if crop_settings.maximum_image_size and scaled != replace(crop_settings, maximum_image_size=0).resized(*size, bucket):
        cropped += map(str, scaled)
    if flipped:
        cropped.append("flipped")
    name, etag = dataset.index.key(row), dataset.index.etag(row)
    return _key(_LATENTS_RECIPE, dataset.storage.location, name, etag, bucket.width, bucket.height, *cropped)


class EarlierParts:
    """The entries of parts, by their keys. Reads the headers of all parts, and holds about 250 bytes per entry.

    `read` reads from a file: its name, the first byte, how many. A part that cannot be read counts as absent.
    """

    def __init__(self, parts: Iterable[str], read: Reader) -> None:
        self._places: dict[str, tuple[str, int, Form]] = {}
        self._forms: dict[Form, Form] = {}
        for name in sorted(parts):
            try:
                self._open(name, read)
            except (StorageError, ValueError, KeyError, TypeError, struct.error):
                continue  # its entries are made again

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def references(self, keys: Sequence[tuple[Key, str]]) -> PackIndex:
        """Returns references to entries: the present key and the earlier key of each."""
        places = [self._places[earlier] for _, earlier in keys]
        files = tuple(dict.fromkeys(file for file, _, _ in places))
        forms = tuple(dict.fromkeys(form for _, _, form in places))
        file_numbers = {file: number for number, file in enumerate(files)}
        form_numbers = {form: number for number, form in enumerate(forms)}
        now = Keys.of([key for key, _ in keys])
        columns: dict[str, NDArray[Any]] = {
            "high": now.high,
            "low": now.low,
            "offset": np.array([start for _, start, _ in places], dtype=np.uint64),
            "length": np.array([form.size for _, _, form in places], dtype=np.uint32),
            "crc": np.zeros(len(places), dtype=np.uint32),
            "form": np.array([form_numbers[form] for _, _, form in places], dtype=np.uint32),
            "file": np.array([file_numbers[file] for file, _, _ in places], dtype=np.uint32),
        }
        return PackIndex(columns=columns, forms=forms, files=files)

    def _open(self, name: str, read: Reader) -> None:
        (length,) = struct.unpack("<Q", read(name, 0, 8))
        header = load_json(read(name, 8, length))
        grouped: dict[str, tuple[int, list[StoredPart]]] = {}
        for full, tensor in header.items():
            if full == "__metadata__":
                continue
            key, _, part = full.partition("/")
            shape = tuple(tensor["shape"])
            _, parts = grouped.setdefault(key, (tensor["data_offsets"][0], []))
            parts.append(StoredPart(part, tensor["dtype"], shape, shape[0] if shape else 1))
        for key, (start, parts) in grouped.items():
            form = Form(tuple(parts), checked=False)
            self._places[key] = name, 8 + length + start, self._forms.setdefault(form, form)


def _key(*parts: object) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
