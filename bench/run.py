"""Speed as ratios: `make bench` runs every case, `make bench ARGS=NAME` one; one line of JSON for each result.

Each case measures ours and a peer in turn, so that a machine that slows down slows both, and quotes medians. Results that are
worth keeping go to `bench/results/`, with date, versions and hardware: `make bench ARGS="--keep NAME"`. `--short` only tries
whether the cases run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sizes import VARIABLE

if TYPE_CHECKING:
    from smalti.config import Config

CASES = (
    *("startup", "first_step", "step", "sdxl", "save", "detect", "shard", "zero", "headers"),
    *("data_s3", "data_cache", "health", "web", "web_events", "ranking", "plan", "fit", "ray_encode"),
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians of paired runs; `ratio` is the median of the ratios pair by pair, `goal` the most that it should be."""

    name: str
    ratio: float
    ours: float
    peer: float
    unit: str
    goal: float
    pairs: int
    precision: str = ""
    """In which both sides of a pair train a model, where they do."""


def paired(name: str, ours: Iterable[float], peer: Iterable[float], *, unit: str, goal: float, precision: str = "") -> Result:
    """A result from two equally long series measured in turn."""
    pairs = list(zip(ours, peer, strict=True))
    return Result(
        name=name,
        ratio=round(statistics.median(one / other for one, other in pairs), 4),
        ours=round(statistics.median(one for one, _ in pairs), 5),
        peer=round(statistics.median(other for _, other in pairs), 5),
        unit=unit,
        goal=goal,
        pairs=len(pairs),
        precision=precision,
    )


def precision_of(config: Config) -> str:
    """In which a run of this configuration computes here."""
    from smalti.parallel import in_bf16

    return "bf16" if in_bf16(config) else "fp32"


def main(words: Sequence[str] | None = None) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help=f"any of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--keep", action="store_true", help="also write the results to bench/results/")
    parser.add_argument("--short", action="store_true", help="one pair of the smallest size, which says nothing about speed")
    arguments = parser.parse_args(words)
    if arguments.short and arguments.keep:
        parser.error("results of --short are not worth keeping")
    if arguments.short:
        os.environ[VARIABLE] = "1"  # before a case is imported, and for the processes that it starts
    results: list[dict[str, object]] = []
    for name in arguments.cases or CASES:
        measure: Callable[[], list[Result]] = import_module(name).measure
        for result in measure():
            print(json.dumps(asdict(result)), flush=True)
            results.append(asdict(result))
        if arguments.keep:  # after each case: a later one may fail
            keep(results)


def keep(results: list[dict[str, object]]) -> None:
    """Write these results to the file of the day; results of other names in it stay."""
    versions = {name: version(name) for name in ("smalti", "torch", "accelerate")}
    record = {"date": date.today().isoformat(), "hardware": hardware(), "python": platform.python_version(), **versions}
    path = Path(__file__).parent / "results" / f"{record['date']}-cpu.json"
    path.parent.mkdir(exist_ok=True)
    earlier = json.loads(path.read_text())["results"] if path.exists() else []
    results = list({each["name"]: each for each in [*earlier, *results]}.values())
    path.write_text(json.dumps({**record, "results": results}, indent=2) + "\n")
    print(f"kept in {path}", file=sys.stderr)


def hardware() -> str:
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{os.cpu_count()} cores of {model or platform.machine()}"


if __name__ == "__main__":
    main()
