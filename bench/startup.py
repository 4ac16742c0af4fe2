"""How long `smalti --help` and `smalti plugins` take, against `accelerate launch --help`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from run import Result, paired

PAIRS = 7


def measure() -> list[Result]:
    scripts = Path(sys.executable).parent
    results = []
    for arguments in (["--help"], ["plugins"]):
        ours, peer = [], []
        for _ in range(PAIRS + 1):
            ours.append(seconds([str(scripts / "smalti"), *arguments]))
            peer.append(seconds([str(scripts / "accelerate"), "launch", "--help"]))
        # The first pair only warms the page cache.
        results.append(paired(f"startup: smalti {' '.join(arguments)}", ours[1:], peer[1:], unit="s", goal=0.3))
    return results


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin
