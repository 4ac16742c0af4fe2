"""One dataset as the user describes it: an entry of multidatabackend.json, or a [[datasets]] table.

The catalog has the registered storages and metadata backends by name. Their modules are imported when they are first used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from smalti.data.datasets.caption_filters import checked_filters, filter_lines
from smalti.data.datasets.columns import Column, ColumnKeys
from smalti.data.datasets.crop_values import CropAspect, CropStyle, ResolutionType
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, create, named
from smalti.types import ColumnEntry, MetadataEntry, StorageEntry

if TYPE_CHECKING:
    from smalti.data.datasets.sources import MetadataSource
    from smalti.data.storage.protocol import Storage


TYPES_WITH_IMAGES = ("image", "eval")
"""Values of `dataset_type` for entries that have images."""
CACHE_TYPES = ("text_embeds", "image_embeds")
"""Values of `dataset_type` for entries that configure a cache."""


def absolute_path(path: Path) -> Path:
    """Returns the path with ~ replaced, from the current directory. Raises ValueError for the home of nobody, and for NUL."""
    if "\0" in str(path):
        raise ValueError("give a path without the character NUL")
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:
        raise ValueError("give a path without ~: there is no such home folder") from error


def _checked_folder(text: str) -> str:
    absolute_path(Path(text))
    return text


def _lowered(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _crop_style(value: object) -> object:
    value = _lowered(value)
    return "center" if value == "centre" else value


def _switched(value: object) -> object:
    """A block from a switch, or from a table that spells it `enabled`. An empty table asks for nothing."""
    if isinstance(value, Mapping):
        return {"enable" if key == "enabled" else key: each for key, each in value.items()} or None
    return {"enable": value} if isinstance(value, bool) or str(value).lower() in ("true", "false") else value or None


def _aspects(value: object) -> object:
    """Aspect ratios with their weights, from numbers and tables."""
    if not isinstance(value, list | tuple):
        return value
    return [
        [_aspect_of(each), each.get("weight", 1.0)]
        if isinstance(each, Mapping)
        else each
        if isinstance(each, tuple)
        else [each, 1]
        for each in value
    ]


def _aspect_of(table: Mapping[str, object]) -> object:
    """The key has three names in SimpleTuner."""
    return next((table[key] for key in ("aspect", "aspect_ratio", "aspect_bucket") if key in table), None)


_LONGEST_ID = 200  # a file name has at most 255 bytes


def file_name_of(dataset: str) -> str:
    """Returns the id of a dataset as the beginning of file names; "" if nothing is left of it."""
    return re.sub(r"[^\w.-]+", "-", dataset).lstrip("-.")


def _checked_extension(value: str) -> str:
    if not re.fullmatch(r"\.\w+", value):
        raise ValueError('give the extension of text files, such as ".txt"')
    return value


def _checked_id(value: str) -> str:
    if not 0 < len(file_name_of(value).encode()) <= _LONGEST_ID:
        raise ValueError(f"an id has letters or digits, and at most {_LONGEST_ID} bytes")
    return value


Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Word = Annotated[str, BeforeValidator(_lowered)]
Folder = Annotated[Path, AfterValidator(absolute_path)]
FolderText = Annotated[str, AfterValidator(_checked_folder)]
"""A folder that is a key of remote storages too, so it stays a text."""


def _key(default: Any = ..., *, help: str, **checks: Any) -> Any:
    """Declare one key. `help` is its entry in the reference of dataset keys, in Markdown."""
    return Field(default, description=help, **checks)


class JsonTable(BaseModel):
    """The `json` block: a JSON-lines table with one image per line."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Folder | None = _key(None, help="The table. Default: `metadata.jsonl` in the dataset's folder.")
    filename_column: str = _key("filename", help="Path of the image, relative to the dataset's folder.")
    caption_column: str | Annotated[tuple[str, ...] | dict[str, float], Field(min_length=1)] = _key(
        "caption",
        help="The caption, or a list of captions: a column, a list of columns, or columns with weights such as"
        ' `{"short": 1, "long": 3}`.',
    )
    fallback_caption_column: str | None = _key(None, help="The caption of lines without one.")
    width_column: str = _key(
        "width",
        help="Width in pixels, after EXIF rotation. A line may leave it out; the width is then read from the image's header.",
    )
    height_column: str = _key("height", help="Height in pixels, likewise.")
    identifier_includes_extension: bool = _key(
        True,
        help="With `false` the names in the table have no extension. Lines without an image are then left out and listed, as in"
        " other tables.",
    )

    @property
    def caption_columns(self) -> tuple[str, ...]:
        return (self.caption_column,) if isinstance(self.caption_column, str) else tuple(self.caption_column)


class CaptionShuffle(BaseModel):
    """The `caption_shuffle` block: how variants of a caption are made of its tags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable: bool = _key(True, help="Shuffle the tags. With `false` the other keys apply to `caption_tag_dropout_rate` alone.")
    count: int | None = _key(
        None,
        ge=1,
        help="Number of variants of each caption, of which a visit draws one. All are encoded before training. Default: 4,"
        " or a new one at each visit with `--text_cache_disable`.",
    )
    seed: int = _key(0, help="Another number gives other variants. They do not depend on the seed of the run.")
    split_on: str = _key("comma", min_length=1, help="What separates tags: `comma`, `space`, `semicolon`, `period`, or a text.")
    position_start: int = _key(0, ge=0, help="The first tags, as many as this, keep their places; kohya's `keep_tokens`.")
    include_original: bool = _key(False, help="Let the caption itself be one more variant.")


class DatasetSpec(BaseModel):
    """One dataset, checked and complete. Sizes are in the unit of `resolution`."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    id: Annotated[str, AfterValidator(_checked_id)] = _key(
        help="Unique name of the dataset. Files of the run are named after it, with a dash for characters such as spaces.",
    )
    type: str = _key(
        "local",
        help="The storage. `local`: a folder. `aws`: S3. `huggingface`: a dataset of the Hugging Face Hub."
        " `csv`: a list of URLs, which are downloaded.",
    )
    dataset_type: Literal["image", "eval", "conditioning", "text_embeds", "image_embeds"] = _key(
        "image",
        help="`image`: trained on. `eval`: the evaluation loss is measured on it. `conditioning`: belongs to the images of"
        " datasets that name it as `conditioning_data`. `text_embeds`, `image_embeds`: no images; the entry configures where a"
        " cache is stored.",
    )

    instance_data_dir: Folder | None = _key(
        None, help="The folder of images. Subfolders are read too; hidden files and folders are not."
    )
    metadata_backend: Word = _key(
        "discovery",
        help="Where names, sizes and captions come from. `discovery`: the folder itself. `json`: a JSON-lines table."
        " `csv`: a CSV or TSV table. `parquet`: parquet tables, or parquet files of images."
        " `webdataset`: tar files of images with their captions.",
    )
    json_table: JsonTable = _key(
        JsonTable(), alias="json", help="Describes the table, see below. Only with `metadata_backend: json`."
    )

    caption_strategy: Word = _key(
        "textfile",
        help="`textfile`: `NAME.txt` beside the image. `filename`: the name of the file, underscores read as spaces."
        " `instanceprompt`: `instance_prompt` for all images. `json`, `csv`, `parquet`: the caption column of the table."
        " `webdataset`: the text file of the sample. Default: the option `caption_strategy`; with a table, the table.",
    )
    caption_extension: Annotated[Word, AfterValidator(_checked_extension)] = _key(
        ".txt", help="Extension of the text files of `textfile`, such as kohya's `.caption`."
    )
    disable_multiline_split: bool = _key(
        False,
        help="Take a text file of several lines as one caption. Otherwise each line is a caption; each visit draws one.",
    )
    instance_prompt: str | None = _key(
        None, help="The caption of all images, or their common beginning, such as `a photo of zwx cat`."
    )
    prepend_instance_prompt: bool = _key(False, help="Put `instance_prompt` in front of every caption.")
    instance_prompt_fallback: bool = _key(
        False,
        help="Use `instance_prompt` for images without a text file, as kohya's trainer does. Without it they are left out.",
    )
    only_instance_prompt: bool = _key(False, help="Use `instance_prompt` alone, whatever the caption strategy finds.")

    caption_weights: tuple[Weight, ...] = _key(
        (),
        help="How likely each caption of an image is, in the order of its columns or lines, such as `[3, 1]`. Captions beyond"
        " the list are not used. Default: all alike.",
    )
    caption_prefix: str = _key("", help="Put this in front of every caption, after its tags are shuffled.")
    caption_suffix: str = _key("", help="Put this behind every caption, after its tags are shuffled.")
    trigger_word: str = _key(
        "",
        help="Put this word in front of captions that do not have it. It replaces `[trigger]` in a caption, as in ai-toolkit.",
    )
    caption_shuffle: Annotated[CaptionShuffle | None, BeforeValidator(_switched)] = _key(
        None, help="Shuffle the tags of captions. `true`, or a table, see below."
    )
    caption_tag_dropout_rate: float = _key(
        0.0, ge=0, le=1, help="Leave out this share of the tags, apart from those that `caption_shuffle` keeps in place."
    )
    caption_dropout_probability: float | None = _key(
        None, ge=0, le=1, help="Share of visits with the empty prompt instead of the caption. Default: the option."
    )
    caption_filter_list: Annotated[tuple[str, ...], BeforeValidator(filter_lines), AfterValidator(checked_filters)] = _key(
        (),
        help="Regular expressions whose matches are removed from captions; `s/PATTERN/TEXT/` replaces them. A list, or a file"
        " of lines or JSON. That of the `text_embeds` entry of a dataset applies too.",
    )

    resolution: float = _key(
        1024.0,
        gt=0,
        help="Size of the training images: pixels, or megapixels with `resolution_type: area`. A list such as `[512, 1024]`"
        " makes a dataset of each, `ID@512` and `ID@1024`. Default: the option.",
    )
    resolution_type: Annotated[ResolutionType, BeforeValidator(_lowered)] = _key(
        "pixel_area",
        help="What `resolution` measures. `pixel_area`: the edge of a square of equal area. `pixel`: the shorter edge. `area`:"
        " megapixels. Default: the option.",
    )
    crop: bool = _key(
        True,
        help="Scale the image until it covers its bucket, and crop the rest. `false` stretches it to the bucket. `crop: true`"
        " with neither `crop_style` nor `crop_aspect` means a square at a random place, as in SimpleTuner.",
    )
    crop_style: Annotated[CropStyle, BeforeValidator(_crop_style)] = _key(
        "center",
        help="Which part is kept. `corner` is the top left. `random` is drawn once per image where latents are cached.",
    )
    crop_aspect: Annotated[CropAspect, BeforeValidator(_lowered)] = _key(
        "preserve",
        help="`preserve`: buckets near the image's own aspect ratio. `square`: one square bucket. `closest`: the nearest of"
        " `crop_aspect_buckets`. `random`: any of them, always the same one for an image.",
    )
    crop_aspect_buckets: Annotated[tuple[tuple[Positive, Weight], ...], BeforeValidator(_aspects)] = _key(
        (),
        help="Aspect ratios, width / height, such as `[1.0, 1.5, 0.67]`. `random` takes one with a weight more often:"
        ' `[{"aspect": 1.0, "weight": 2}, 1.5]`.',
    )
    max_upscale_threshold: float | None = _key(
        None,
        ge=0,
        help="With `closest` and `random`: aspect ratios for which an image would be enlarged by more than this share are not"
        " considered, and images for which there is none are left out. 0.2 allows 20 %.",
    )
    flip_probability: float = _key(
        0.0,
        ge=0,
        le=1,
        help="Share of visits in which the image is mirrored, left to right. Cached latents are then of both variants. Not for"
        " images with text, or captions that say left or right.",
    )
    minimum_image_size: float = _key(
        0.0,
        ge=0,
        help="Leave out smaller images. In the unit of `resolution`; 0 keeps all. With `pixel`, the shorter edge counts."
        " Default: the option.",
    )
    maximum_image_size: float = _key(
        0.0,
        ge=0,
        help="Images larger than this are scaled to `target_downsample_size` before they are cropped, so that a large image is"
        " cropped to a part of it. In the unit of `resolution`; 0 scales every image to cover its bucket. Default: the option.",
    )
    target_downsample_size: float = _key(
        0.0,
        ge=0,
        help="Size of images above `maximum_image_size` before they are cropped; never smaller than their bucket, and never"
        " enlarged for it. Default: the option.",
    )
    minimum_aspect_ratio: float = _key(0.0, ge=0, help="Leave out images whose width / height is smaller; 0 keeps all.")
    maximum_aspect_ratio: float = _key(0.0, ge=0, help="Leave out images whose width / height is larger; 0 keeps all.")

    is_regularisation_data: bool = _key(
        False,
        help="Train an adapter to change nothing on these images: the target is the prediction of the model without the"
        " adapter, instead of the image. Costs another forward pass for batches with such images. Only with"
        " `model_type: lora`.",
    )
    repeats: int = _key(
        0,
        ge=0,
        help="How often an image is seen in an epoch **in addition** to the first time: 9 means ten times, kohya's `10_`.",
    )
    probability: float = _key(
        1.0,
        ge=0.001,
        le=1,
        help="How often an image is seen in proportion to those of other datasets: 0.5 is half as often. Counts beside"
        " `repeats`; the highest probability of all datasets counts as 1.",
    )
    start_epoch: int | None = _key(
        None, ge=0, help="First epoch in which the dataset is trained on; 0 and 1 are the first of the run."
    )
    start_step: int | None = _key(
        None,
        ge=0,
        help="First step in which the dataset is trained on; 0 and 1 are the first of the run. A new epoch begins there.",
    )
    end_epoch: int | None = _key(None, ge=0, help="Last epoch in which the dataset is trained on; 0 sets no limit.")
    end_step: int | None = _key(
        None, ge=0, help="Last step in which the dataset is trained on; 0 sets no limit. A new epoch begins after it."
    )
    max_num_samples: int | None = _key(
        None, ge=1, help="Use only this many images. The choice depends on `id` alone, so it stays the same. Default: all."
    )

    cache_dir_vae: FolderText | None = _key(
        None, help="Folder for the latents of this dataset. Default: the option `cache_dir`, else `cache` in the run directory."
    )
    image_embeds: str | None = _key(None, help="Id of the `image_embeds` entry of this dataset.")
    text_embeds: str | None = _key(
        None, help="Id of the `text_embeds` entry of this dataset, where its texts are cached. Default: the default one."
    )
    default: bool = _key(False, help="Mark the `text_embeds` entry that holds the texts of datasets that name none.")
    cache_dir: FolderText | None = _key(None, help="Folder for the encoded texts. Only in a `text_embeds` entry.")

    preserve_data_backend_cache: bool = _key(
        False,
        help="Has no effect: an unchanged listing keeps the index, and nothing is deleted; the listing itself is what finds"
        " changed files.",
    )

    storage_options: Mapping[str, object] = Field(default={}, repr=False)
    """The storage's own keys (`StorageEntry.keys`), which it checks itself. Never printed: they may hold secrets."""
    metadata_options: Mapping[str, object] = {}
    """The block with the name of the metadata backend ("parquet": {...}), which that backend checks itself."""
    columns: Mapping[str, ColumnKeys] = {}
    """Its keys for columns (`ColumnEntry.keys`), by the name of the column, where it has some."""
    notices: tuple[str, ...] = ()
    """Messages about keys that have no effect."""
    entry: str = ""
    """The id of the entry, if it has several resolutions. Its datasets have the same images, so they are scanned once."""

    @property
    def file_name(self) -> str:
        """The beginning of the names of the dataset's files."""
        return file_name_of(self.id)

    @property
    def column_endings(self) -> tuple[str, ...]:
        """How the names of files end that are no images, but belong to columns."""
        return tuple(ending for keys in self.columns.values() for ending in keys.endings)

    @property
    def has_images(self) -> bool:
        return self.dataset_type in TYPES_WITH_IMAGES

    @property
    def uses_instance_prompt(self) -> bool:
        """Whether `instance_prompt` is in the captions."""
        strategy = self.caption_strategy == "instanceprompt"
        others = self.prepend_instance_prompt or self.only_instance_prompt or self.instance_prompt_fallback
        return self.has_images and (strategy or others)


ENTRY_KEYS = {
    info.alias or name: info
    for name, info in DatasetSpec.model_fields.items()
    if name not in ("storage_options", "metadata_options", "columns", "notices", "entry")
}
"""The keys of an entry: every field but those that `parse_datasets` fills in."""


def texts_entry(specs: Sequence[DatasetSpec]) -> DatasetSpec | None:
    """Returns the text_embeds entry where all texts are cached: the default one, or the only one; None if it says nowhere."""
    entries = [spec for spec in specs if spec.dataset_type == "text_embeds"]
    chosen = [spec for spec in entries if spec.default] or (entries if len(entries) == 1 else [])
    return chosen[0] if chosen and (chosen[0].cache_dir is not None or chosen[0].type != "local") else None


def own_texts_entry(spec: DatasetSpec, specs: Sequence[DatasetSpec]) -> DatasetSpec | None:
    """Returns the text_embeds entry that an image dataset names, if it says where; its texts are cached there."""
    named = [other for other in specs if other.dataset_type == "text_embeds" and other.id == spec.text_embeds]
    return next((other for other in named if other.cache_dir is not None or other.type != "local"), None)


def latents_entry(spec: DatasetSpec, specs: Sequence[DatasetSpec]) -> DatasetSpec | None:
    """Returns the image_embeds entry that an image dataset names, in whose storage its latents are cached."""
    return next((other for other in specs if other.dataset_type == "image_embeds" and other.id == spec.image_embeds), None)


def unused_caches(specs: Sequence[DatasetSpec]) -> tuple[str, ...]:
    """Returns a notice about entries for caches that have no effect, if there are any."""
    used = [texts_entry(specs), *(find(spec, specs) for spec in specs for find in (latents_entry, own_texts_entry))]
    named = [spec.id for spec in specs if spec.dataset_type in CACHE_TYPES and spec.type != "local" and spec not in used]
    named += [spec.id for spec in specs if spec.dataset_type == "text_embeds" and spec.type == "local" and spec not in used]
    if not named:
        return ()
    why = "texts are cached where the default text_embeds entry says, or that of the dataset's text_embeds, if it has a place,"
    why = f"{why} and latents where image_embeds says"
    return (f"without effect: {', '.join(sorted(named))}; {why}",)


E = TypeVar("E", StorageEntry, MetadataEntry, ColumnEntry)

BUILT_IN_STORAGES = (StorageEntry(name="local", title="A folder", factory="smalti.data.storage.local:open_local"),)
BUILT_IN_METADATA = (
    MetadataEntry(name="discovery", title="The images themselves", factory="smalti.data.sources.discovery:Discovery"),
)


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """The entries by name."""

    storages: Mapping[str, StorageEntry] = field(default_factory=lambda: _by_name(BUILT_IN_STORAGES))
    metadata: Mapping[str, MetadataEntry] = field(default_factory=lambda: _by_name(BUILT_IN_METADATA))
    columns: Mapping[str, ColumnEntry] = field(default_factory=dict)

    @classmethod
    def of(
        cls, storages: Iterable[StorageEntry], metadata: Iterable[MetadataEntry], columns: Iterable[ColumnEntry] = ()
    ) -> Catalog:
        """Returns the catalog of what plugins registered; the built-in entries are not added automatically."""
        return cls(storages=_by_name(storages), metadata=_by_name(metadata), columns=_by_name(columns))

    @property
    def tables(self) -> frozenset[str]:
        """The metadata backends that read a table, which may hold captions too."""
        return frozenset(self.metadata) - {"discovery"}

    def open_storage(self, spec: DatasetSpec) -> Storage:
        """The storage of a dataset. Raises what its factory raises, such as MissingFileError for a missing folder."""
        entry = self.storages[spec.type]
        return cast("Storage", create(entry, entry.factory, spec))

    def open_source(self, spec: DatasetSpec, storage: Storage) -> MetadataSource:
        """The metadata source of a dataset: names, sizes and captions of its samples."""
        entry = self.metadata[spec.metadata_backend]
        return cast("MetadataSource", create(entry, entry.factory, spec, storage))

    @cached_property
    def column_keys(self) -> Mapping[str, type[ColumnKeys]]:
        """The keys that an entry may have for each column."""
        return {name: cast("type[ColumnKeys]", named(entry, entry.keys)) for name, entry in self.columns.items()}

    def open_columns(self, spec: DatasetSpec, specs: Sequence[DatasetSpec]) -> dict[str, Column]:
        """The columns of a dataset, one of `specs`, by name. Raises what their factories raise, such as UserError."""
        entries = [self.columns[name] for name in spec.columns]
        return {
            each.name: cast("Column", create(each, each.factory, spec, spec.columns[each.name], self, specs))
            for each in entries
        }


def _by_name(entries: Iterable[E]) -> dict[str, E]:
    return {entry.name: entry for entry in entries}


def catalog_of(plugins: Plugins) -> Catalog:
    """The storages, metadata backends and columns of all active plugins."""
    return Catalog.of(
        plugins.gather(HookSpecs.register_storage),
        plugins.gather(HookSpecs.register_metadata_backends),
        plugins.gather(HookSpecs.register_columns),
    )
