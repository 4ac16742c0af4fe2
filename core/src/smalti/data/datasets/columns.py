"""Columns of batches: what a dataset has for each image beside the image and its captions, such as a mask or a weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from smalti.data.buckets import Bucket


class ColumnKeys(BaseModel):
    """The keys that the entry of a dataset may have for a column. Inherit from it; the description of a field documents it.

    The context of validators is a function that returns the value of an option of the run by its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def endings(self) -> tuple[str, ...]:
        """How the names of files end that lie beside the images for the column: they are no images."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """How a visit sees an image: scaled, then mirrored if `flipped`, then cropped to the `bucket`.

    `scaled` are width and height after the first step, `offset` is left and top of the crop, in pixels; `latents` are width and
    height of the image's latents. For files of images, `smalti.data.decode` makes the first step, `smalti.data.crop` the last.
    """

    bucket: Bucket
    scaled: tuple[int, int]
    offset: tuple[int, int]
    flipped: bool
    latents: tuple[int, int]


class ColumnSample(Protocol):
    """The image for which a column is read.

    `key` is its name in the dataset, `row` its place in the index, `size` its width and height in pixels.
    """

    @property
    def key(self) -> str: ...
    @property
    def row(self) -> int: ...
    @property
    def size(self) -> tuple[int, int]: ...
    def value(self, field: str) -> object:
        """What the index has in one of the `Column.fields`."""
        ...

    def read(self) -> bytes:
        """The file of the image. Raises a StorageError, or BadSampleError for an image in a damaged archive."""
        ...


class Column:
    """A column of one dataset. Inherit from it; `read` and `neutral` are required. Made by the factory of a `ColumnEntry`.

    A tensor is what batches have for one image, on the CPU: of the same shape and type for all images of a bucket. Bytes
    (3, H, W) are another image, of which forward passes can use the latents (`smalti.training.Term.passes`).
    """

    fields: Sequence[pa.Field] = ()
    """What `listed` adds to the index: texts or numbers, without nulls. With such fields, files are compared in each scan."""

    def listed(self, samples: pa.RecordBatch) -> pa.RecordBatch:
        """Some samples that the source lists (`LISTED`), with the `fields`. A text in `problem` makes a sample unusable.

        Called in a scan, for all samples in order.
        """
        return samples

    def check(self, fields: Iterable[Mapping[str, pa.Array]]) -> Sequence[str]:
        """Notices for the user after a scan, from the `fields` of all samples. Raises UserError for a dataset without use."""
        return ()

    def read(self, sample: ColumnSample, framing: Framing) -> Tensor:
        """The value of an image. Called by several threads at once.

        It must not depend on anything but the arguments: any rank may call it, and a resumed run again. Raises BadSampleError
        if the image cannot be used, and TransientStorageError.
        """
        raise NotImplementedError

    def neutral(self, framing: Framing) -> Tensor:
        """The value of an image that has none, such as one of another dataset."""
        raise NotImplementedError
