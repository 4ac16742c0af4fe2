"""Options of the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

from smalti.config.options import Options, Tables, option


def _count_or_share(value: object) -> object:
    """Percentages such as "1 %" as a share, 0.01; numbers as they are."""
    if not isinstance(value, str) or not value.rstrip().endswith("%"):
        return value
    share = float(value.rstrip()[:-1]) / 100
    if share >= 1:
        raise ValueError("a share must be below 100 %")
    return share


def _whole_above_one(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("a value of 1 or more is a count and must be a whole number")
    return value


class DataOptions(Options):
    data_backend_config: Path | None = option(None, help="JSON file with the datasets (multidatabackend.json).")
    datasets: Tables = option((), help="Datasets in the configuration file itself, as [[datasets]] tables with the same keys.")
    instance_data_dir: Path | None = option(
        None, help="Folder of images, each with its caption in NAME.txt. Replaces a dataset file for a single dataset."
    )
    caption_strategy: str = option(
        "textfile",
        help="Source of captions: textfile (NAME.txt), filename, instanceprompt, or the metadata backend of the "
        "dataset. A dataset can override it.",
    )
    instance_prompt: str | None = option(
        None, help="Caption of every image, such as 'a photo of zwx cat'. Only with --caption_strategy=instanceprompt."
    )
    train_batch_size: int = option(1, help="Images per rank and micro-batch.", ge=1, le=65_536)
    resolution: float = option(
        1024, help="Size of training images in pixels. In megapixels with --resolution_type=area.", gt=0, le=65_536
    )
    resolution_type: Literal["pixel", "area", "pixel_area"] = option(
        "pixel_area",
        help="Meaning of resolution. pixel: shorter edge, area: megapixels, pixel_area: edge of the square of equal area.",
    )
    crop: bool | None = option(
        None,
        help="Scale images to cover their bucket and crop the rest; --no_crop stretches them. Default: on, unless "
        "a dataset overrides it.",
    )
    crop_style: Literal["center", "random", "corner"] | None = option(
        None, help="Crop position. Default: center, unless a dataset overrides it.", level="advanced"
    )
    crop_aspect: Literal["preserve", "square"] | None = option(
        None,
        help="Aspect ratio of buckets: that of each image, or square. Default: preserve, unless a dataset overrides it.",
        level="advanced",
    )
    minimum_image_size: float = option(
        0, help="Leave out smaller images, in the unit of --resolution. 0 keeps all.", level="advanced", ge=0
    )
    maximum_image_size: float = option(
        0,
        help="Scale larger images to --target_downsample_size before cropping. 0 scales all images to cover their bucket.",
        level="advanced",
        ge=0,
    )
    target_downsample_size: float = option(
        0,
        help="Size of images above --maximum_image_size before they are cropped, in the unit of --resolution.",
        level="advanced",
        ge=0,
    )
    aspect_bucket_alignment: int | None = option(
        None,
        help="Make bucket widths and heights multiples of this many pixels. Default: set by the model family.",
        level="advanced",
        ge=1,
    )
    short_buckets: Literal["merge", "repeat", "drop", "error"] | None = option(
        None,
        help="Buckets that cannot fill a batch: train in the nearest aspect ratio, raise repeats, leave out, or refuse. "
        "Default: merge, or repeat with --allow_dataset_oversubscription.",
        level="advanced",
    )
    allow_dataset_oversubscription: bool = option(
        False, help="Raise the repeats of buckets that hold fewer images than one effective batch.", level="advanced"
    )
    num_eval_images: int | None = option(
        None, help="Evaluate on this many images of each eval dataset, always the same ones. Default: all.", ge=1
    )
    caption_dropout_probability: float = option(
        0.1, help="Share of captions replaced by the empty prompt, for classifier-free guidance.", ge=0, le=1
    )
    vae_cache_disable: bool = option(
        False,
        help="Encode images in every step instead of once before training.",
        level="advanced",
        tradeoff="no disk space and new random crops every time, slower steps and the VAE in memory",
    )
    text_cache_disable: bool = option(
        False,
        help="Encode captions in every step instead of once before training.",
        level="advanced",
        tradeoff="no disk space, slower steps and the text encoders in memory",
    )
    data_error_budget: Annotated[float, BeforeValidator(_count_or_share), AfterValidator(_whole_above_one)] = option(
        0.01, help='Maximum share (0.01 or "1%") or number of unreadable images before the run stops.', level="advanced", ge=0
    )
    on_changed_data: Literal["refuse", "continue"] = option(
        "refuse",
        help="What to do on resume when images, captions or crops have changed: refuse, or continue with the new data.",
        level="advanced",
    )
