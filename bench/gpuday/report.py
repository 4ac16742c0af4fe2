"""What a day has found, as JSON for `gpuday.documents` and as Markdown for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from gpuday.checks import Check
from gpuday.day import State, write

_FACTS = (
    "device",
    "gpus",
    "nodes",
    "memory",
    "driver",
    "cuda",
    "python",
    "torch",
    "diffusers",
    "deepspeed",
    "torchao",
    "smalti",
)


def write_report(
    checks: Sequence[Check], results: State, hardware: Mapping[str, object], folder: Path, *, rehearsed: bool
) -> tuple[Path, Path]:
    """Write DATE-HARDWARE.json and .md into the folder; their paths."""
    today = date.today().isoformat()
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(hardware["device"])).strip("-")
    more = [f"{hardware['nodes']}x{hardware['gpus']}"] if hardware.get("nodes") else []
    base = folder / "-".join([today, *(["rehearsal"] if rehearsed else []), name, *more])
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "date": today,
        "hardware": dict(hardware),
        "rehearsed": rehearsed,
        "checks": {check.name: results[check.name] for check in checks},
        "measured": measured(checks, results),
    }
    as_json, as_text = base.with_name(f"{base.name}.json"), base.with_name(f"{base.name}.md")
    write(as_json, record)
    as_text.write_text("\n".join(_lines(checks, results, hardware, today, rehearsed=rehearsed)) + "\n")
    return as_json, as_text


def measured(checks: Sequence[Check], results: State) -> dict[str, float]:
    """The figures that documents quote, by the key of their mark. One that has failed is quoted, too, if it has measured."""
    found = {}
    for check in checks:
        figures = results[check.name]["figures"]
        assert isinstance(figures, dict)
        for key, figure in (check.marks or {}).items():
            if figures.get(figure) is not None:
                found[key] = float(figures[figure])
    return found


def _lines(
    checks: Sequence[Check], results: State, hardware: Mapping[str, object], today: str, *, rehearsed: bool
) -> list[str]:
    counts = {status: sum(each["status"] == status for each in results.values()) for status in ("passed", "failed", "left out")}
    title = f"# {'Rehearsal on the CPU' if rehearsed else hardware['device']}, {today}"
    rows = [_row(check, results[check.name]) for check in checks]
    facts = [f"| {name} | {_short(hardware[name])} |" for name in _FACTS if hardware.get(name) is not None]
    failures = [
        line
        for check in checks
        if results[check.name]["status"] == "failed"
        for line in ("", f"### {check.name}", "", check.what, "", "```", *map(str, _problems(results[check.name])), "```")
    ]
    return [
        title,
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items()),
        *(["", "Tiny models on the CPU in the place of a device: times and sizes say nothing."] if rehearsed else []),
        "",
        "| | |",
        "|---|---|",
        *facts,
        "",
        "| check | result | s | figures | expected |",
        "|---|---|---|---|---|",
        *rows,
        *(["", "## What failed"] if failures else []),
        *failures,
    ]


def _row(check: Check, result: Mapping[str, object]) -> str:
    cells = (check.name, result["status"], f"{result['seconds']:.0f}", _figures(result), "; ".join(map(str, check.bounds)))
    return f"| {' | '.join(map(str, cells))} |"


def _problems(result: Mapping[str, object]) -> list[object]:
    problems = result["problems"]
    assert isinstance(problems, list)
    return problems


def _figures(result: Mapping[str, object]) -> str:
    figures = result["figures"]
    assert isinstance(figures, dict)
    if result["status"] == "left out":
        return "; ".join(map(str, _problems(result)))
    return ", ".join(f"{name} {_short(value)}" for name, value in figures.items() if value is not None)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
