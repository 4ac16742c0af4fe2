"""`make gpu-day`: all that waits for a GPU, the most valuable first, within the minutes. See bench/gpu.md.

A day that is cut off resumes with the same command. The report goes to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gpuday.checks import Check
from gpuday.day import Day
from gpuday.models import ROOT
from gpuday.processes import Setting
from gpuday.report import write_report
from gpuday.table import GPU_DAY, cluster


def main(words: Sequence[str]) -> int:
    """0: what was checked has passed. 1: something has failed."""
    arguments = _parser().parse_args(words)
    checks: Sequence[Check] = cluster(arguments.per_node) if arguments.nodes else GPU_DAY
    if unknown := set(arguments.only) - {check.name for check in checks}:
        raise SystemExit(f"no checks are called {', '.join(sorted(unknown))}; --list prints the table")
    checks = [check for check in checks if not arguments.only or check.name in arguments.only]
    if arguments.list:
        print(table(checks))
        return 0
    folder = Path(arguments.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    hardware = _hardware(arguments, folder)
    if not (arguments.rehearse or hardware["gpus"]):
        raise SystemExit("torch sees no GPU here; --rehearse tries all of it on the CPU")
    setting = Setting(folder=folder, rehearsed=arguments.rehearse, hardware=hardware, per_node=arguments.per_node)
    day = Day(checks=checks, setting=setting, minutes=arguments.minutes, limit=arguments.limit, say=partial(print, flush=True))
    results = day.go(again=arguments.again)
    place = Path(arguments.results) if arguments.results else folder if arguments.rehearse else ROOT / "bench/results"
    for path in write_report(checks, results, hardware, place, rehearsed=arguments.rehearse):
        print(path)
    return int(any(each["status"] == "failed" for each in results.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuday", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="start no check that would end later (default: 30)")
    parser.add_argument("--only", nargs="+", default=(), metavar="CHECK", help="these checks of the table")
    parser.add_argument("--again", action="store_true", help="make checks again that have failed")
    parser.add_argument("--rehearse", action="store_true", help="tiny models on the CPU, as if it were the device")
    parser.add_argument("--folder", default=str(ROOT / "build/gpu-day"), help="what is done, and logs (default: build/gpu-day)")
    parser.add_argument("--results", help="folder of the report (default: bench/results; of a rehearsal the --folder)")
    parser.add_argument("--limit", type=float, help="seconds of each check, instead of 2.5 times those of the table")
    parser.add_argument("--nodes", type=int, default=0, help="the checks of a cluster, within a SLURM job of N nodes")
    parser.add_argument("--per_node", type=int, default=8, help="ranks of each node (default: 8)")
    parser.add_argument("--list", action="store_true", help="print the table and end")
    return parser


def table(checks: Sequence[Check]) -> str:
    """The checks as a table in Markdown."""
    rows = [
        f"| {check.name} | {check.what} | {check.needs} | {check.minutes:g} | {'; '.join(map(str, check.bounds))} |"
        for check in checks
    ]
    return "\n".join(["| check | what | needs | min | passed if |", "|---|---|---|---|---|", *rows])


def _hardware(arguments: argparse.Namespace, folder: Path) -> Mapping[str, object]:
    """Asked in another process: what uses a device here would be in the way of the checks."""
    setting = Setting(folder=folder, rehearsed=arguments.rehearse, hardware={})
    process = subprocess.run(
        [sys.executable, "-m", "gpuday.facts"],
        env=setting.environment("check"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(process.stdout.splitlines()[-1])
    if arguments.nodes:
        found |= {"nodes": arguments.nodes, **({"gpus": arguments.per_node} if arguments.rehearse else {})}
    return {name: value for name, value in found.items() if name != "host"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
