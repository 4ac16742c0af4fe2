"""What commands print: columns, and sizes for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Columns as wide as their widest cell; those numbered in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def in_bytes(number: int) -> str:
    """1536 -> "1.5 KiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(int(math.log2(number)) // 10, len(units) - 1) if number else 0
    return f"{number} B" if power == 0 else f"{number / 2 ** (10 * power):.1f} {units[power]}"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """1 -> "1 block", 2 -> "2 blocks"."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"
