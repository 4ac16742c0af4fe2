"""Every key that a dataset may have, with its help, for pages of reference."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo

from smalti.data.datasets.simpletuner import REFUSED, UNSUPPORTED, WITHOUT_EFFECT
from smalti.data.datasets.spec import ENTRY_KEYS, CaptionShuffle, JsonTable
from smalti.data.sources.archives.hub import HubDataset
from smalti.data.sources.archives.row_images import ImageColumns
from smalti.data.sources.archives.webdataset import WebDatasetMembers
from smalti.data.sources.tables.columns import TableColumns
from smalti.data.sources.urls.url_list import UrlList

DATASET_KEYS: Mapping[str, Mapping[str, FieldInfo]] = {
    "": ENTRY_KEYS,
    "The `json` block": JsonTable.model_fields,
    "The `caption_shuffle` block": CaptionShuffle.model_fields,
    "The `csv` and `parquet` blocks": TableColumns.model_fields,
    "Columns of parquet files with images": ImageColumns.model_fields,
    "Keys of `type: huggingface`": HubDataset.model_fields,
    "Keys of `type: csv`": UrlList.model_fields,
    "The `webdataset` block": WebDatasetMembers.model_fields,
}
"""By where they stand; "" for those of every entry."""
SIMPLETUNER_KEYS = (WITHOUT_EFFECT, REFUSED, UNSUPPORTED)
"""SimpleTuner's keys that have no effect, those that are refused, and its values that are not supported."""
