"""How values are written on pages: numbers, bytes, durations, times."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

from smalti.system import format_bytes

MISSING = "\N{EN DASH}"
"""What stands for a value that is not known."""


def number(value: float | None, digits: int = 4) -> str:
    """A number with some significant digits; whole numbers with thousands separators."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.{digits}g}"


def duration(seconds: float | None) -> str:
    """A duration in its two largest units: 3 d 4 h, 12 min 5 s."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = max(round(seconds), 0)
    parts = (whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")
    first = next((n for n, (amount, _) in enumerate(parts) if amount), 3)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[first : first + 2] if amount or unit == parts[first][1])


def moment(seconds: float | None) -> str:
    """A time in unix seconds as local date and time."""
    try:
        return MISSING if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):  # beyond what a date can be: damaged files
        return MISSING


def size(value: float | None) -> str:
    """A number of bytes."""
    return MISSING if value is None else format_bytes(int(value))


def percent(share: float | None) -> str:
    """A share from 0 to 1."""
    return MISSING if share is None else f"{share * 100:.0f} %"


FILTERS: dict[str, Callable[..., Any]] = {
    "number": number,
    "duration": duration,
    "moment": moment,
    "size": size,
    "percent": percent,
}
