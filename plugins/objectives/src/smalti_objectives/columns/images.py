"""Columns of images: for each image another one, such as a worse one, from a folder with files of the same names.

Shapes: H, W pixels of the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from smalti import Config, Problem, UserError
from smalti.config import DataOptions
from smalti.data import (
    BadSampleError,
    Catalog,
    Column,
    ColumnSample,
    DatasetSpec,
    Framing,
    Storage,
    StorageError,
    TransientStorageError,
    decode,
)
from smalti.models import ModelFamily
from smalti_objectives.columns.keys import CounterpartKeys, RejectedKeys
from smalti_objectives.columns.masks import files_by_name, framed


def open_rejected(spec: DatasetSpec, keys: RejectedKeys, catalog: Catalog, specs: Sequence[DatasetSpec]) -> OtherImages:
    """The column `rejected` of a dataset."""
    return _open("rejected", keys.rejected_path, spec, catalog)


def open_counterpart(spec: DatasetSpec, keys: CounterpartKeys, catalog: Catalog, specs: Sequence[DatasetSpec]) -> OtherImages:
    """The column `slider_counterpart` of a dataset."""
    return _open("slider_counterpart", keys.slider_counterpart_path, spec, catalog)


def check_encoder(config: Config, family: ModelFamily) -> Problem | None:
    """What is wrong if a run cannot encode such images, as latents of the images themselves are cached."""
    if not family.cacheable or config[DataOptions].vae_cache_disable:
        return None
    message = "the other image of each pair is encoded in every step, and with a cache of latents the autoencoder is put away"
    return Problem(message=message, where="vae_cache_disable", fix="--vae_cache_disable", option="vae_cache_disable")


def _open(name: str, path: Path, spec: DatasetSpec, catalog: Catalog) -> OtherImages:
    images = spec.instance_data_dir if spec.type == "local" and spec.metadata_backend == "discovery" else None
    if images is not None and path.is_relative_to(images):
        message = f"dataset {spec.id!r}: the images in {path} would be training images too, because that folder is in {images}"
        raise UserError(message, fix="move them to a folder outside of it")
    folder = spec.model_copy(update={"type": "local", "instance_data_dir": path})
    return OtherImages(name, spec, catalog.open_storage(folder))


class OtherImages(Column):
    """(3, H, W) bytes, framed like the image itself. An image without another one cannot be used."""

    def __init__(self, name: str, spec: DatasetSpec, storage: Storage) -> None:
        self.fields = (pa.field(name, pa.string()), pa.field(f"{name}_size", pa.int64()))
        self._name = name
        self._spec = spec
        self._storage = storage
        self._listed: tuple[pa.Array, pa.RecordBatch] | None = None

    def listed(self, samples: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow.compute as pc

        from smalti.data import stems

        self._listed = self._listed or files_by_name(self._storage, None)
        names, files = self._listed
        found = pc.index_in(stems(samples.column("key")), value_set=names)
        at, problems = samples.schema.get_field_index("problem"), samples.column("problem")
        missing = pc.and_(pc.is_null(found), pc.equal(problems, ""))
        problems = pc.if_else(missing, f"no image of the same name in {self._storage.location}", problems)
        samples = samples.set_column(at, samples.schema.field(at), problems)
        for field, name, nothing in zip(self.fields, ("key", "size"), ("", 0), strict=True):
            samples = samples.append_column(field, pc.fill_null(files.column(name).take(found), nothing))
        return samples

    def check(self, fields: Iterable[Mapping[str, pa.Array]]) -> Sequence[str]:
        import pyarrow.compute as pc

        if not any(pc.any(pc.not_equal(each[self._name], "")).as_py() for each in fields):
            message = f"dataset {self._spec.id!r}: none of its images has one of the same name in {self._storage.location}"
            raise UserError(message, fix="call the other image of NAME.jpg NAME.jpg or NAME.png, in the same subfolder")
        return ()

    def neutral(self, framing: Framing) -> Tensor:
        return torch.full((3, framing.bucket.height, framing.bucket.width), 255, dtype=torch.uint8)

    def read(self, sample: ColumnSample, framing: Framing) -> Tensor:
        try:
            data = self._storage.read(str(sample.value(self._name)))
            scaled = decode(data, partial(_scaled, sample.size, framing.scaled))
        except TransientStorageError:
            raise
        except (StorageError, BadSampleError) as error:
            reason = error.message if isinstance(error, StorageError) else error
            raise BadSampleError(f"its image in {self._storage.location} cannot be used: {reason}") from error
        return torch.stack([torch.from_numpy(framed(colour, framing).copy()) for colour in scaled])


def _scaled(size: tuple[int, int], target: tuple[int, int], width: int, height: int) -> tuple[int, int]:
    """The size that the image itself is scaled to. Raises BadSampleError for another aspect ratio than that of `size`."""
    if abs(width * size[1] - height * size[0]) > size[0] + size[1]:  # more than rounding
        raise BadSampleError(f"its size is {width}x{height}, not of the aspect ratio of the image, {size[0]}x{size[1]}")
    return target
