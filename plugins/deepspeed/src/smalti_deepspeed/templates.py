"""DeepSpeed configurations that a user keeps under names, in the user's own folder. Imports no torch, no DeepSpeed.

They lie in `deepspeed/NAME.json` of the folder that the system has for a user's settings (`XDG_CONFIG_HOME`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from smalti import UserError
from smalti.config import Edit, Schema, is_accelerate, read_mapping, set_option
from smalti.system import remove_file, write_json_atomically
from smalti_deepspeed.parsing import Document, read_file, section

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Template:
    """One kept configuration. `error` says why it cannot be read; then there is no `document`."""

    name: str
    path: Path
    document: Document
    error: str = ""

    @property
    def summary(self) -> str:
        """What it asks for, in one line."""
        if self.error:
            return self.error
        zero = section(self.document, "zero_optimization")
        parts = [f"ZeRO {zero.get('stage', '?')}"]
        for name, what in (("offload_optimizer", "optimizer"), ("offload_param", "parameters")):
            device = section(zero, name).get("device", "none")
            parts += [f"{what} on {device}"] if device != "none" else []
        parts += [str(kind) for name in ("optimizer", "scheduler") if (kind := section(self.document, name).get("type"))]
        return ", ".join(parts)

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "path": str(self.path), "summary": self.summary, "error": self.error}


def folder() -> Path:
    """Where templates lie; it need not exist. Raises UserError for a user without a home."""
    from platformdirs import user_config_path

    try:
        return user_config_path("smalti") / "deepspeed"
    except RuntimeError as error:
        raise UserError(f"there is no folder for settings: {error}", fix="set HOME or XDG_CONFIG_HOME") from error


def templates() -> list[Template]:
    """All templates, sorted by name."""
    return [_load(path) for path in sorted(folder().glob("*.json")) if _NAME.fullmatch(path.stem)]


def template(name: str) -> Template:
    """The template of that name. Raises UserError with the nearest names if there is none, or if it is broken."""
    path = _path(name)
    if not path.is_file():
        names = [each.stem for each in folder().glob("*.json") if each.is_file()]
        near = get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`smalti deepspeed templates save NAME FILE` keeps one"
        raise UserError(f"there is no template {name!r}", fix=hint)
    return Template(name=name, path=path, document=read_file(path))


def save_template(name: str, document: Mapping[str, object], *, replace: bool = False) -> Template:
    """Keep a configuration under a name that is new, unless it may replace another. The file is whole or not there."""
    path = _path(name)
    if path.exists() and not replace:
        raise UserError(f"there is a template {name!r} already", fix="--force replaces it, or give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, dict(document))
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", fix="check its owner and permissions, and the free space"
        ) from error
    return Template(name=name, path=path, document=dict(document))


def remove_template(name: str) -> Path:
    """Remove a template, also a broken one; where it was. Raises UserError if there is none."""
    path = _path(name)
    if not path.is_file():
        template(name)
    try:
        remove_file(path)
    except OSError as error:
        raise UserError(f"cannot remove {path}: {error.strerror}", fix="check the file's owner and permissions") from error
    return path


def apply_template(name: str, file: Path, schema: Schema) -> Edit:
    """Make a template the `deepspeed_config` of a configuration file, of which everything else stays, comments too."""
    document = template(name).document
    if is_accelerate(read_mapping(file)):
        fix = "name a configuration file of smalti's, or write a deepspeed_config_file into it by hand"
        raise UserError(f"{file} is an Accelerate configuration, whose deepspeed_config has other keys", fix=fix)
    return set_option(file, schema, "deepspeed_config", document)


def _path(name: str) -> Path:
    if not _NAME.fullmatch(name):
        fix = "letters, digits, - and _, at most 64 of them"
        raise UserError(f"{name!r} cannot be the name of a template", fix=fix)
    return folder() / f"{name}.json"


def _load(path: Path) -> Template:
    try:
        return Template(name=path.stem, path=path, document=read_file(path))
    except UserError as error:
        return Template(name=path.stem, path=path, document={}, error=error.message)
