"""The options of this package. Imports no torch."""

from __future__ import annotations

from typing import Literal

from smalti import OptionGroup, Options, option


class ScanOptions(Options):
    data_scan: Literal["auto", "launcher", "ranks"] = option(
        "auto",
        help="Who scans datasets: the launcher, or all ranks together. Default: ranks if a remote dataset has no index yet.",
        level="advanced",
    )


GROUP = OptionGroup(name="scan", title="Scan of datasets", options=ScanOptions)
