"""When all ranks scan. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from smalti.config import Config
from smalti.data import catalog_of, dataset_specs
from smalti.plugins import Plugins
from smalti_data.options import ScanOptions


def ranks_scan(config: Config, plugins: Plugins, directory: Path) -> bool:
    """Whether all ranks scan rather than the launcher; `directory` has the indexes of the run.

    A scan by the launcher would take long for remote images that have never been scanned: then there is one machine where there
    could be all.
    """
    if config[ScanOptions].data_scan == "ranks":
        return True
    specs = dataset_specs(config, catalog_of(plugins))
    new = [spec for spec in specs if spec.has_images and not (directory / f"{spec.file_name}.arrow").exists()]
    return any(spec.type not in ("local", "csv") for spec in new)  # a list of URLs is downloaded by one process in any case
