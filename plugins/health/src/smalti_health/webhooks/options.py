"""The options of webhooks. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

from smalti import OptionGroup, Options, option
from smalti_health.webhooks.endpoints import holds_secret


def _as_text(value: object) -> object:
    """JSON in one line for tables; texts and paths as they are. A file is not read here: it may hold secrets."""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value)
    return None if isinstance(value, str) and value.strip().lower() in ("", "none", "null") else value


class WebhookOptions(Options):
    webhook_config: Annotated[str | None, BeforeValidator(_as_text)] = option(
        None,
        help="Endpoints to which events of the run are sent: the path of a JSON file, or JSON. none disables it.",
        secret=holds_secret,
    )
    webhook_reporting_interval: int = option(
        60,
        help="Seconds between two events training.progress. 0 disables them.",
        ge=0,
        when="webhook_config",
        level="advanced",
    )


GROUP = OptionGroup(name="webhooks", title="Webhooks", options=WebhookOptions)
