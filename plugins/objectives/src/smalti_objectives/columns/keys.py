"""The keys of a dataset entry for its columns."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, ValidationInfo, model_validator

from smalti.data import ColumnKeys, Folder


def _checked_ending(value: str) -> str:
    if not re.fullmatch(r"[-.\w]+\.\w+", value):
        raise ValueError('give the ending of the names of masks, such as ".mask.png"')
    return value


class MaskKeys(ColumnKeys):
    """Where the masks of the images are. Brightness is the weight of a place: white counts fully, black not at all."""

    conditioning_data: str | None = Field(
        None,
        description="Id of the entry of `dataset_type: conditioning` with the masks of these images: files in the same"
        " subfolders, with the same names but for the extension.",
    )
    conditioning_type: Literal["mask"] | None = Field(
        None, description="What the images of an entry of `dataset_type: conditioning` are: `mask`, the masks of other images."
    )
    mask_path: Folder | None = Field(
        None, description="Folder with the masks of these images, named like those of `conditioning_data`."
    )
    mask_suffix: Annotated[str, AfterValidator(_checked_ending)] | None = Field(
        None,
        description="Masks are files beside the images, whose names have this ending in place of the extension: `.mask.png`, or"
        " `-masklabel.png` as in OneTrainer. They are no images.",
    )
    alpha_mask: bool = Field(
        False,
        description="The opacity of an image without a mask file is its mask. Colours are still those on a white ground.",
    )
    mask_invert: bool = Field(False, description="Train what is black in the masks, instead of what is white.")
    mask_required: bool = Field(
        False,
        description="Images without a mask cannot be used. By default they are trained as a whole, and counted in a notice.",
    )

    _leaves_out_empty: bool = PrivateAttr(False)

    @model_validator(mode="after")
    def _follow_options(self, info: ValidationInfo) -> Self:
        option = info.context or (lambda name: None)
        unused = option("mask_probability") == 1 and not option("prior_outside_mask")
        self._leaves_out_empty = unused and option("mask_floor") == 0
        return self

    @property
    def leaves_out_empty(self) -> bool:
        """Whether nothing is trained of an image whose mask is black everywhere, so that it is no sample of a run."""
        return self._leaves_out_empty

    @property
    def endings(self) -> tuple[str, ...]:
        return (self.mask_suffix,) if self.mask_suffix else ()


class WeightTable(BaseModel):
    """The `loss_weight_table` block."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Folder = Field(description="The table: parquet, CSV, TSV, or JSON lines. It may be that of the captions.")
    filename_column: str = Field("filename", description="Path of the image relative to the folder, with or without extension.")
    weight_column: str = Field("loss_weight", description="The weight.")


class WeightKeys(ColumnKeys):
    """How much images count in the loss."""

    loss_weight: float = Field(1.0, ge=0, description="Factor of the loss of each image, kohya's `prior_loss_weight`.")
    loss_weight_table: WeightTable | None = Field(
        None,
        description="A weight for each image: a table with `path`, `filename_column` (`filename`) and `weight_column`"
        " (`loss_weight`). Images without a row have the weight `loss_weight`.",
    )


class RejectedKeys(ColumnKeys):
    """Pairs of a better and a worse image."""

    rejected_path: Folder = Field(
        description="Folder with a worse image for each image, in the same subfolders and with the same names but for the"
        " extension. With `--dpo_beta` a run learns to prefer the images of the dataset.",
    )


class CounterpartKeys(ColumnKeys):
    """Pairs of images at the two ends of a slider."""

    slider_counterpart_path: Folder = Field(
        description="Folder with the image for the strength -1 for each image, named like those of `rejected_path`. With"
        " `--slider=images` a run trains the images of the dataset at the strength 1.",
    )
