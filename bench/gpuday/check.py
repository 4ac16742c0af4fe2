"""One check in this process: `python -m gpuday.check NAME SETTING RESULT`, for `gpuday.day`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from gpuday import nodes
from gpuday.measures import MEASURES
from gpuday.processes import CheckError, Setting
from gpuday.table import named

MEASURES_OF_NODES = {each.__name__: each for each in (nodes.nodes_save, nodes.nodes_elastic)}


def main(name: str, text: str, result: str) -> None:
    """Write the figures, or why there are none."""
    values = json.loads(text)
    setting = Setting(**values | {"folder": Path(values["folder"])})
    check = named(name, setting.per_node)
    folder = setting.folder / "checks" / name
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was cut off
    folder.mkdir(parents=True)
    found: dict[str, object]
    try:
        found = {"figures": dict(({**MEASURES, **MEASURES_OF_NODES})[check.measure](check, setting, folder))}
    except CheckError as failure:
        found = {"failure": str(failure)}
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
