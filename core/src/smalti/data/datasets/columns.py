"""Columns of batches: what a dataset has for each image beside the image and its captions, such as a mask or a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from smalti.data.buckets import Bucket
    from smalti.data.dataset import Sample
    from smalti.data.scan.index import DatasetIndex


class ColumnKeys(BaseModel):
    """The keys that the entry of a dataset may have for a column. Inherit from it; the description of a field documents it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @property
    def endings(self) -> tuple[str, ...]:
        """How the names of files end that lie beside the images for the column: they are no images."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """How a visit sees an image: scaled (`CropSettings.resized`), then mirrored if `flipped`, then cropped to the `bucket`.

    `offset` is left and top of the crop, in pixels; `latents` are width and height of the image's latents.
    """

    bucket: Bucket
    offset: tuple[int, int]
    flipped: bool
    latents: tuple[int, int]


class Column:
    """A column of one dataset. Inherit from it; `read` and `neutral` are required. Made by the factory of a `ColumnEntry`.

    A tensor is what batches have for one image, on the CPU: of the same shape and type for all images of a bucket.
    """

    fields: Sequence[pa.Field] = ()
    """What `listed` adds to the index: texts or numbers, without nulls. With such fields, files are compared in each scan."""

    def listed(self, samples: pa.RecordBatch) -> pa.RecordBatch:
        """Some samples that the source lists (`LISTED`), with the `fields`. A text in `problem` makes a sample unusable.

        Called in a scan, for all samples in order.
        """
        return samples

    def check(self, index: DatasetIndex) -> Sequence[str]:
        """Notices for the user about the column, after a scan. Raises UserError if the dataset cannot be used."""
        return ()

    def read(self, sample: Sample, framing: Framing) -> Tensor:
        """The value of an image; `sample.dataset.index.value` has what the index has. Called by several threads at once.

        It must not depend on anything but the arguments: any rank may call it, and a resumed run again. Raises BadSampleError
        if the image cannot be used, and TransientStorageError.
        """
        raise NotImplementedError

    def neutral(self, framing: Framing) -> Tensor:
        """The value of an image that has none, such as one of another dataset."""
        raise NotImplementedError
