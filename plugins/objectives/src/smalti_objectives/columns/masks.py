"""The column `mask`: how much each place of an image counts in the loss, from a mask file or from the image's opacity.

Shapes: W, H pixels of the scaled image, h, w latent size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from smalti import ConfigError, Problem, UserError
from smalti.data import (
    DECODING_ERRORS,
    BadSampleError,
    Bytes,
    Catalog,
    Column,
    ColumnSample,
    DatasetSpec,
    Framing,
    Storage,
    StorageError,
    TransientStorageError,
    crop,
    open_image,
    reading_threads,
    upright,
)
from smalti_objectives.columns.keys import MaskKeys

_FIELDS = (pa.field("mask", pa.string()), pa.field("mask_size", pa.int64()))
"""In the index: the key of the mask among the masks, "" without one, and the size of that file in bytes."""
_KEPT_BYTES = 64 << 20
"""Memory of a process for masks of one dataset: those of about 4000 images of 1024 pixels."""


def open_mask(spec: DatasetSpec, keys: MaskKeys, catalog: Catalog, specs: Sequence[DatasetSpec]) -> Mask:
    """The column of a dataset. Raises ConfigError for keys that do not go together, and what storages raise."""
    others = [other for other in specs if other.dataset_type == "conditioning" and other.id == keys.conditioning_data]
    problems = [
        Problem(message=message, where=f"dataset {spec.id!r}", fix=fix) for message, fix in _problems(spec, keys, others, specs)
    ]
    if problems:
        raise ConfigError(problems)
    if keys.mask_path is not None:
        folder = spec.model_copy(update={"type": "local", "instance_data_dir": keys.mask_path})
        return Mask(spec, keys, catalog.open_storage(folder))
    place = others[0] if others else spec if keys.mask_suffix else None
    return Mask(spec, keys, None if place is None else catalog.open_storage(place))


def _problems(
    spec: DatasetSpec, keys: MaskKeys, others: Sequence[DatasetSpec], specs: Sequence[DatasetSpec]
) -> Iterator[tuple[str, str]]:
    """What is wrong with the keys of a dataset, and how to fix it. `others` is the entry that `conditioning_data` names."""
    sources = _sources(keys)
    if len(sources) > 1:
        yield f"{' and '.join(sources)} both say where the masks are", "keep one of them"
    if not sources and not keys.alpha_mask:
        given = ", ".join(sorted(keys.model_fields_set))
        yield f"{given}: nothing says where the masks are", "set conditioning_data, mask_path, mask_suffix or alpha_mask"
    if keys.conditioning_data and not others:
        known = ", ".join(other.id for other in specs if other.dataset_type == "conditioning")
        fix = f"give one of {known}" if known else "add an entry of this id with dataset_type: conditioning"
        yield f"conditioning_data: no entry of dataset_type conditioning has the id {keys.conditioning_data!r}", fix
    for other in others:
        own = other.columns.get("mask")
        if not isinstance(own, MaskKeys) or own.conditioning_type is None:
            yield f"conditioning_data: the entry {other.id!r} has no conditioning_type", "set conditioning_type: mask there"
    images = spec.instance_data_dir if spec.type == "local" and spec.metadata_backend == "discovery" else None
    for masks in (keys.mask_path, *(other.instance_data_dir for other in others if other.type == "local")):
        if masks is None or images is None or not masks.is_relative_to(images):
            continue
        if not any(part.startswith(".") for part in masks.relative_to(images).parts):
            message = f"the masks in {masks} would be training images too, because that folder is inside of {images}"
            yield message, "move them to a folder outside of it, or to a hidden one, such as .masks; or use mask_suffix"


def _sources(keys: MaskKeys) -> list[str]:
    return [key for key in ("conditioning_data", "mask_path", "mask_suffix") if getattr(keys, key)]


class Mask(Column):
    """The masks of one dataset, (1, h, w) bytes: 255 where an image counts fully. `masks` is where their files are, if any."""

    def __init__(self, spec: DatasetSpec, keys: MaskKeys, masks: Storage | None) -> None:
        self.fields = _FIELDS if masks is not None else ()
        self._spec = spec
        self._keys = keys
        self._masks = masks
        self._listed: tuple[pa.Array, pa.RecordBatch] | None = None
        self._kept: dict[tuple[int, Framing], Tensor] = {}
        self._free = _KEPT_BYTES

    # --- in a scan --------------------------------------------------------------------------------------------------

    def listed(self, samples: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow.compute as pc

        from smalti.data import stems

        assert self._masks is not None, "it has fields"
        self._listed = self._listed or files_by_name(self._masks, self._keys.mask_suffix)
        names, files = self._listed
        found = pc.index_in(stems(samples.column("key")), value_set=names)
        masks, sizes = pc.fill_null(files.column("key").take(found), ""), pc.fill_null(files.column("size").take(found), 0)
        at, problems = samples.schema.get_field_index("problem"), samples.column("problem")
        if self._keys.mask_required and not self._keys.alpha_mask:
            missing = pc.and_(pc.equal(masks, ""), pc.equal(problems, ""))
            problems = pc.if_else(missing, f"no mask in {self._masks.location}", problems)
        if self._keys.leaves_out_empty:
            problems = self._without_empty(masks, problems)
        samples = samples.set_column(at, samples.schema.field(at), problems)
        for field, values in zip(_FIELDS, (masks, sizes), strict=True):
            samples = samples.append_column(field, values)
        return samples

    def check(self, fields: Iterable[Mapping[str, pa.Array]]) -> Sequence[str]:
        import pyarrow.compute as pc

        assert self._masks is not None, "it has fields"
        counts = [(len(each["mask"]), pc.sum(pc.equal(each["mask"], "")).as_py()) for each in fields]
        total, missing = (sum(numbers) for numbers in zip(*counts, strict=True))
        start = f"dataset {self._spec.id!r}: {missing} of {total} images have no mask in {self._masks.location}"
        if missing == total:
            name = f"NAME{self._keys.mask_suffix}" if self._keys.mask_suffix else "NAME.png"
            raise UserError(start, fix=f"call the mask of the image NAME.jpg {name}; or remove {_sources(self._keys)[0]}")
        if not missing or self._keys.mask_required:
            return ()
        return (f"{start}; {'their opacity is the mask' if self._keys.alpha_mask else 'they are trained as a whole'}",)

    def _without_empty(self, masks: pa.Array, problems: pa.Array) -> pa.Array:
        """The problems of samples with these masks, and those of empty ones. Reads all masks; a broken one is none yet."""
        import pyarrow.compute as pc

        def is_empty(file: str) -> bool:
            assert self._masks is not None, "it has fields"
            try:
                levels = brightness(self._masks.read(file)) if file else None
                return levels is not None and levels.getextrema() == (self._empty, self._empty)
            except TransientStorageError:
                raise
            except (StorageError, BadSampleError):
                return False

        with reading_threads() as pool:
            empty = list(pool.map(is_empty, pc.if_else(pc.equal(problems, ""), masks, "").to_pylist()))
        return pc.if_else(pa.array(empty, pa.bool_()), f"its mask cannot be used: {self._emptiness}", problems)

    @property
    def _empty(self) -> int:
        return 255 if self._keys.mask_invert else 0

    @property
    def _emptiness(self) -> str:
        return f"it is {'white' if self._keys.mask_invert else 'black'} everywhere, and mask_floor is 0"

    # --- in a visit -------------------------------------------------------------------------------------------------

    def neutral(self, framing: Framing) -> Tensor:
        return torch.full((1, *framing.latents[::-1]), 255, dtype=torch.uint8)

    def read(self, sample: ColumnSample, framing: Framing) -> Tensor:
        key = sample.row, framing
        if (mask := self._kept.get(key)) is None:
            try:
                mask = self._made(sample, framing)
            except TransientStorageError:
                raise
            except (StorageError, BadSampleError) as error:
                reason = error.message if isinstance(error, StorageError) else error
                raise BadSampleError(f"its mask cannot be used: {reason}") from error
            # A random crop may be another one in each visit. Two threads may count at once, which is harmless.
            if self._spec.crop_style != "random" and mask.nbytes <= self._free:
                self._free -= mask.nbytes
                self._kept[key] = mask
        return mask

    def _made(self, sample: ColumnSample, framing: Framing) -> Tensor:
        scaled = None
        if self._masks is not None and (file := str(sample.value("mask"))):
            scaled = scaled_mask(self._masks.read(file), sample.size, framing.scaled)
        elif self._keys.alpha_mask:
            scaled = scaled_mask(sample.read(), sample.size, framing.scaled, opacity=True)
        if scaled is not None:
            if self._keys.leaves_out_empty and (scaled == self._empty).all():
                raise BadSampleError(self._emptiness)
            means = block_means(framed(scaled, framing), framing.latents)
            return torch.from_numpy(255 - means if self._keys.mask_invert else means)[None]
        if self._keys.mask_required:
            raise BadSampleError("there is none")
        return self.neutral(framing)


def files_by_name(storage: Storage, ending: str | None) -> tuple[pa.Array, pa.RecordBatch]:
    """All image files of a storage, or those with an ending, and up to the last dot the names of images to which they belong.

    Takes about 100 bytes of memory for each.
    """
    import pyarrow.compute as pc

    from smalti.data import EXTENSIONS, FILES, has_extension, stems, visible

    found = [pa.RecordBatch.from_pylist([], schema=FILES)]
    for files in visible(storage.list_columns()):
        names = files.column("key")
        found.append(files.filter(pc.ends_with(names, ending) if ending else has_extension(names, EXTENSIONS)))
    files = pa.concat_batches(found)
    keys = files.column("key")
    return pc.replace_substring_regex(keys, rf"{re.escape(ending)}$", ".") if ending else stems(keys), files


def scaled_mask(data: bytes, size: tuple[int, int], target: tuple[int, int], *, opacity: bool = False) -> Bytes | None:
    """The brightness (H, W) of an image file, or its `opacity`, upright and scaled to `target`, W and H, by area.

    None for the opacity of an image without any. `size` is that of the image to which the mask belongs. Raises BadSampleError
    for another aspect ratio than that, and for a file that cannot be read.
    """
    if (levels := brightness(data, opacity=opacity)) is None:
        return None
    (width, height), (of_width, of_height) = levels.size, size
    if abs(width * of_height - height * of_width) > of_width + of_height:  # more than rounding
        raise BadSampleError(f"its size is {width}x{height}, not of the aspect ratio of the image, {of_width}x{of_height}")
    return np.asarray(levels.resize(target, Image.Resampling.BOX))


def brightness(data: bytes, *, opacity: bool = False) -> Image.Image | None:
    """An upright image of 8 bits as `scaled_mask` scales it, with its results and errors."""
    with open_image(data) as image:
        if opacity and not image.has_transparency_data:
            return None
        try:
            turned = upright(image)
            return turned.convert("RGBA").getchannel("A") if opacity else _eight_bits(turned).convert("L")
        except DECODING_ERRORS as error:
            raise BadSampleError(f"it is damaged: {error or type(error).__name__}") from error


def _eight_bits(image: Image.Image) -> Image.Image:
    """An image of 16 bits as one of 8, any other as it is."""
    if not image.mode.startswith("I"):
        return image
    levels = np.asarray(image).astype(np.int64).clip(0, 65535)
    return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))


def framed(scaled: Bytes, framing: Framing) -> Bytes:
    """The part of a scaled mask (H, W) that a visit shows. Raises BadSampleError if it is too small for that."""
    seen: Bytes = crop((scaled[:, ::-1] if framing.flipped else scaled)[None], framing.bucket, framing.offset)[0]
    if seen.shape != (framing.bucket.height, framing.bucket.width):
        raise BadSampleError("the size of the image in the table is not that of the file")
    return seen


def block_means(mask: Bytes, size: tuple[int, int]) -> Bytes:
    """(h, w) of a mask of h and w blocks of pixels: the mean of each block, rounded half up. `size` is w and h."""
    across, down = mask.shape[1] // size[0], mask.shape[0] // size[1]
    blocks = mask[: down * size[1], : across * size[0]].reshape(size[1], down, size[0], across)
    sums, count = blocks.sum(axis=(1, 3), dtype=np.int64), across * down
    means: Bytes = ((2 * sums + count) // (2 * count)).astype(np.uint8)
    return means
