"""The keys of datasets that this package reads, and with them every key that a dataset may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from smalti.data import ENTRY_KEYS, CaptionShuffle, Folder, JsonTable


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableKeys(_Keys):
    """The block of a metadata table: the table and its columns."""

    path: str | None = Field(None, description="The table. Default: `metadata.EXTENSION` in the dataset's folder.")
    filename_column: str = Field("filename", description="Path of the image, relative to the dataset's folder.")
    caption_column: str | tuple[str, ...] | dict[str, float] = Field(
        "caption",
        description="The caption: a column, a list of columns, or columns with weights such as"
        ' `{"short": 1, "long": 3}`. A dot reaches into a struct.',
    )
    fallback_caption_column: str | None = Field(None, description="The caption of rows without one.")
    width_column: str | None = Field(
        None,
        description="Width in pixels, after EXIF rotation. Default: `width` if there is one; else the image's header is read.",
    )
    height_column: str | None = Field(None, description="Height in pixels, likewise.")
    aspect_ratio_column: str | None = Field(None, description="Not read: the size of the image has the aspect ratio.")
    identifier_includes_extension: bool | None = Field(
        None,
        description="Whether file names in the table have their extension. Default: decided by the first rows.",
    )


class ImageKeys(_Keys):
    """The columns of files with images."""

    image_column: str | None = Field(None, description="Column of the images. Default: `image`, or the only one with images.")
    caption_column: str | tuple[str, ...] | dict[str, float] | None = Field(
        None,
        description="The caption: a column, a list of columns, or columns with weights. A dot reaches into a struct. Default:"
        " `caption`, `text` or `prompt`, or the only column of texts.",
    )
    fallback_caption_column: str | None = Field(None, description="The caption of rows without one.")


class HubKeys(_Keys):
    """Which dataset of the Hub, and which part of it."""

    dataset_name: str = Field(description="`USER/NAME` on the Hub, or a folder with parquet files or of `save_to_disk`.")
    split: str = Field("train", description="The split.")
    revision: str | None = Field(
        None, description="Branch, tag or commit. Default: `main`, or the Hub's own parquet files where that has none."
    )
    dataset_config: str | None = Field(None, description="Folder of the configuration, where a dataset has several.")


class UrlListKeys(_Keys):
    """The keys of an entry of `type: csv`."""

    csv_file: Folder = Field(description="The list, CSV or TSV. The first line names the columns.")
    csv_cache_dir: Folder = Field(
        description="Folder of the downloaded images. All nodes need it, and nothing in it is deleted."
    )
    csv_url_column: str = Field("url", description="Column of the URLs.")
    csv_caption_column: str | None = Field(
        None, description="Column of the captions. Default: `caption_column` of the `csv` block, else `caption`."
    )
    csv_digest_column: str | None = Field(
        None, description="Column of MD5, SHA-1, SHA-256 or SHA-512 in hexadecimal, with which images are compared."
    )
    csv_downloads: Annotated[int, Field(ge=1, le=256)] = Field(16, description="Number of downloads at the same time.")
    csv_timeout: Annotated[float, Field(gt=0)] = Field(60.0, description="Seconds after which an attempt has failed.")
    csv_max_megabytes: Annotated[float, Field(gt=0)] = Field(100.0, description="Larger files are left out.")
    csv_allow_private_addresses: bool = Field(
        False, description="Also download from addresses of private networks and of this machine."
    )


class WebDatasetKeys(_Keys):
    """The `webdataset` block: which members of a sample are read."""

    image_extension: str | None = Field(
        None, description="Extension of the images, such as `jpg`, where samples have several. Default: the first image."
    )
    caption_extension: str | None = Field(
        None, description="Extension of the captions, such as `txt` or `json`. Default: `txt`, `caption`, `text`, else `json`."
    )
    caption_key: str | tuple[str, ...] = Field(
        ("caption", "text", "prompt"),
        description="Key of the caption in JSON members, or several of which the first is used that is there. A dot reaches"
        " into an object.",
    )


DATASET_KEYS: Mapping[str, Mapping[str, FieldInfo]] = {
    "": ENTRY_KEYS,
    "The `json` block": JsonTable.model_fields,
    "The `caption_shuffle` block": CaptionShuffle.model_fields,
    "The `csv` and `parquet` blocks": TableKeys.model_fields,
    "Columns of parquet files with images": ImageKeys.model_fields,
    "Keys of `type: huggingface`": HubKeys.model_fields,
    "Keys of `type: csv`": UrlListKeys.model_fields,
    "The `webdataset` block": WebDatasetKeys.model_fields,
}
"""By where they stand; "" for those of every entry."""
