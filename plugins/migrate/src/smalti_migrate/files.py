"""Files of other trainers, read once: their text, and what it says if they are TOML, JSON or YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from smalti.config import TABLES, Kind, parse_value, read_text


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A file. `content` is None for a text or a command line. `kind` is what it describes, once it is recognized."""

    path: Path
    text: str
    content: object
    kind: Kind = "options"

    @property
    def name(self) -> str:
        """How comments name it."""
        return self.path.name


def open_file(path: Path, kind: Kind = "options") -> Opened:
    """Read a file. Raises UserError if it cannot be read, with the place of a syntax error."""
    text = read_text(path)
    content = parse_value(path, text) if path.suffix.lower() in TABLES else None
    return Opened(path=path, text=text, content=content, kind=kind)


def companion(file: Opened, named: str) -> Path | None:
    """The file that another one names: below the current folder, as that trainer reads it, or beside the other."""
    relative = Path(named.replace("\\", "/")).expanduser()
    for place in (relative, file.path.parent / relative, file.path.parent / relative.name):
        if place.is_file():
            return place
    return None
