"""Detection in a transformer of 12 billion parameters, and answers that are known already.

- seconds: finding and counting the blocks over half a second, libraries imported; memory: the growth of the process's peak
  over 50 MB. The peer of these two is what they may take.
- over building: the same over making the same modules under `torch.device("meta")` and counting nothing.
- known: `smalti detect-blocks` with a kept answer over `smalti --help`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run import Result, paired
from sizes import WARM_UP, sized
from startup import seconds

SITE = Path(__file__).parents[1] / "plugins/fsdp2/tests/detection/site"
PAIRS = sized(5, short=1)
SECONDS, MEGABYTES = 0.5, 50.0

CODE = """
import json, resource, time
import torch
import smalti.training.build_run, smalti.models.weights
import smalti_fluxsized
from smalti.cli.arguments import CommandLine
from smalti_fsdp2.detection import detect

command_line = CommandLine.parse(["--model_family=fluxsized"])
config = command_line.config()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
detect(config, command_line.plugins, refresh=True)
found = time.perf_counter()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
begin_building = time.perf_counter()
with torch.device("meta"):
    smalti_fluxsized.build()
built = time.perf_counter()
print(json.dumps([found - begin, grown / 1024, built - begin_building]))
"""


def measure() -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        measured = [json.loads(python(CODE)) for _ in range(WARM_UP + PAIRS)][WARM_UP:]
        times, megabytes, building = zip(*measured, strict=True)
        return [
            paired("detect: 12 B parameters over half a second", times, [SECONDS] * PAIRS, unit="s", goal=1.0),
            paired("detect: memory for 12 B parameters over 50 MB", megabytes, [MEGABYTES] * PAIRS, unit="MB", goal=1.0),
            paired("detect: over building the modules", times, building, unit="s", goal=1.0),
            known(),
        ]


def python(code: str) -> str:
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True, text=True
    )
    return done.stdout


def known() -> Result:
    smalti = [sys.executable, "-m", "smalti"]
    ours, peer = [], []
    for _ in range(1 + WARM_UP + PAIRS):
        ours.append(seconds([*smalti, "detect-blocks", "--model_family=toy", "--json"]))
        peer.append(seconds([*smalti, "--help"]))
    # The first one looks.
    return paired("detect: a known answer over smalti --help", ours[1 + WARM_UP :], peer[1 + WARM_UP :], unit="s", goal=1.3)
