"""An import as a TOML file: each line with the key that it comes from, and below what could not be converted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import tomlkit
from tomlkit.items import Item

from smalti.config import Schema, toml_item
from smalti_migrate.rules import Imported, Left, Line, one_line, shown


def as_toml(result: Imported, schema: Schema) -> str:
    """The text of the file. Options stand under the title of their section, in the order of the reference."""
    parts = ["\n".join(_head(result)), *_sections(result, schema)]
    if result.datasets:
        parts.append("\n\n".join(f"[[datasets]]\n{_lines(entry)}" for entry in result.datasets))
    if result.notices:
        parts.append("\n".join(["# Notes:", *(f"# - {one_line(notice)}" for notice in result.notices)]))
    if result.left:
        parts.append("\n".join(["# Not converted:", *(line for left in result.left for line in _left(left))]))
    return "\n\n".join(parts) + "\n"


def _head(result: Imported) -> Iterator[str]:
    yield f"# From {result.trainer}: {one_line(', '.join(result.files))}"
    yield "# Check it with: smalti train THIS_FILE --dry-run"
    if result.left:
        yield f"# {len(result.left)} {'thing was' if len(result.left) == 1 else 'things were'} not converted, see the end."


def _sections(result: Imported, schema: Schema) -> Iterator[str]:
    rest = dict(result.lines)
    for group in schema.groups:
        lines = {name: rest.pop(name) for name in group.options.model_fields if name in rest}
        if lines:
            yield f"# {group.title}\n{_lines(lines)}"
    if rest:
        yield f"# Options of packages that are not installed here\n{_lines(rest)}"


def _lines(lines: Mapping[str, Line]) -> str:
    table = tomlkit.document()
    for name, line in lines.items():
        item = _inline(line.value) if isinstance(line.value, Mapping) else toml_item(line.value)
        item.comment(one_line(line.source))
        table.add(name, item)
    return tomlkit.dumps(table).rstrip("\n")


def _inline(values: Mapping[str, object]) -> Item:
    """A table in braces, on the line of its key."""
    table = tomlkit.inline_table()
    for key, value in values.items():
        if value is not None:
            table[key] = _inline(value) if isinstance(value, Mapping) else toml_item(value)
    return table


def _left(left: Left) -> Iterator[str]:
    value = f" = {shown(left.value)}" if left.value is not None else ""
    yield f"# - {one_line(left.place)}{value}"
    yield f"#   {one_line(left.why)}"
    if left.fix:
        yield f"#   fix: {one_line(left.fix)}"


def as_json(result: Imported) -> dict[str, object]:
    """The same for programs."""
    return {
        "trainer": result.trainer,
        "files": result.files,
        "values": _values(result.lines),
        "datasets": [
            {name: {"value": each.value, "source": each.source} for name, each in entry.items()} for entry in result.datasets
        ],
        "notices": result.notices,
        "left": [{"where": left.place, "value": left.value, "message": left.why, "fix": left.fix} for left in result.left],
    }


def _values(lines: Mapping[str, Line]) -> dict[str, object]:
    return {name: {"value": line.value, "source": line.source} for name, line in lines.items()}
