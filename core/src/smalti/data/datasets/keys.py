"""The keys that an entry of any dataset may have, with their help, for pages of reference."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.fields import FieldInfo

from smalti.data.datasets.simpletuner import REFUSED, UNSUPPORTED, WITHOUT_EFFECT
from smalti.data.datasets.spec import ENTRY_KEYS, CaptionShuffle, JsonTable

DATASET_KEYS: Mapping[str, Mapping[str, FieldInfo]] = {
    "": ENTRY_KEYS,
    "The `json` block": JsonTable.model_fields,
    "The `caption_shuffle` block": CaptionShuffle.model_fields,
}
"""By where they stand; "" for those of every entry."""
SIMPLETUNER_KEYS = (WITHOUT_EFFECT, REFUSED, UNSUPPORTED)
"""SimpleTuner's keys that have no effect, those that are refused, and its values that are not supported."""
