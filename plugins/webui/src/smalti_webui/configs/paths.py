"""Paths that are typed on a page: relative ones start at the first folder, and none leaves the folders of the server."""

from __future__ import annotations

from pathlib import Path

from smalti import UserError
from smalti_webui.server.files import below_roots
from smalti_webui.server.settings import Settings


def path_below(settings: Settings, text: str, ending: str = "") -> Path:
    """The path, resolved; a name without an ending gets `ending`. UserError if it is no path, HTTPException if not below."""
    try:
        path = Path(text.strip()).expanduser()
        if ending and path.name and not path.suffix:
            path = path.with_name(f"{path.name}{ending}")
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{text!r} is not a path: {error}", fix="write the path of a file") from None
    return below_roots(settings, path if path.is_absolute() else settings.roots[0] / path)
