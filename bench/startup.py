"""How long `smalti --help` and `smalti plugins` take, against `accelerate launch --help`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from run import Result, paired
from sizes import WARM_UP, sized

PAIRS = sized(7, short=1)
COMMANDS = sized((["--help"], ["plugins"]), short=(["plugins"],))


def measure() -> list[Result]:
    scripts = Path(sys.executable).parent
    results = []
    for arguments in COMMANDS:
        ours, peer = [], []
        for _ in range(PAIRS + WARM_UP):
            ours.append(seconds([str(scripts / "smalti"), *arguments]))
            peer.append(seconds([str(scripts / "accelerate"), "launch", "--help"]))
        results.append(paired(f"startup: smalti {' '.join(arguments)}", ours[WARM_UP:], peer[WARM_UP:], unit="s", goal=0.3))
    return results


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin
