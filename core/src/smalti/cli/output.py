"""Output of commands: tables, formatted sizes, progress, and files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap

import click

from smalti.errors import UserError
from smalti.system import atomic_write, counted as counted, format_bytes as format_bytes

_NARROWEST = 24
"""The least width of the last column. If there is less space, it is printed on a line of its own."""


def print_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), colours: Mapping[str, str] | None = None
) -> None:
    """Print a table. The columns numbered in `right` are right-aligned.

    Cells whose text is in `colours` are coloured. On a terminal, the last column is wrapped if it does not fit.
    """
    last = len(titles) - 1
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(last)]
    begin = sum(widths) + 2 * last
    widest = max(len(row[last]) for row in (titles, *rows)) if last in right else 0
    columns = get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else 0
    for row in (titles, *rows):
        cells = []
        for column, (cell, width) in enumerate(zip(row[:last], widths, strict=True)):
            padded = cell.rjust(width) if column in right else cell.ljust(width)
            cells.append(click.style(padded, fg=colour) if (colour := (colours or {}).get(cell)) else padded)
        click.echo("  ".join([*cells, _last(row[last].rjust(widest), begin, columns)]).rstrip())


def _last(text: str, begin: int, columns: int) -> str:
    """The last cell of a row, which starts at column `begin`, wrapped at the width of the terminal."""
    if not columns or begin + len(text) <= columns:
        return text
    if columns - begin >= _NARROWEST:
        return f"\n{'':>{begin}}".join(wrap(text, columns - begin, break_on_hyphens=False))
    return "".join(f"\n    {line}" for line in wrap(text, max(columns - 4, _NARROWEST), break_on_hyphens=False))


def write_output(text: str, target: Path | None, *, replace: bool, fix: str = "--force replaces it") -> None:
    """Print the text, or write it to a file, which must be new unless `replace`. `fix` is the fix if it exists."""
    if target is None:
        click.echo(text, nl=False)
        return
    if target.exists() and not replace:
        raise UserError(f"{target} already exists", fix=fix)
    write_file(target, text)


def write_file(target: Path, text: str) -> None:
    """Write a file in one step, and say so on stderr. Raises UserError if the system refuses it."""
    try:
        atomic_write(target.resolve(), text.encode())
    except OSError as error:
        raise UserError(
            f"cannot write {target}: {error.strerror}", fix="check that the folder exists and is writable"
        ) from None
    click.echo(f"smalti: wrote {target}", err=True)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal. Yields the function to call with the bytes done and the total."""
    with click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def progress(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield progress
