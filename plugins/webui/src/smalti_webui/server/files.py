"""Files of the user's that pages show: only below the roots that the server was started with."""

from __future__ import annotations

from pathlib import Path

from starlette.exceptions import HTTPException

from smalti_webui.server.settings import Settings


def make_private(folder: Path) -> None:
    """Make a folder that only the user can open. One that an older version made readable for all is closed."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def below_roots(settings: Settings, path: Path | str) -> Path:
    """The path with all links resolved. HTTPException 403 if it is not a root or below one; 404 if it cannot be resolved."""
    try:
        resolved = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, with a null character, a circle of links
        raise HTTPException(404, "there is no such file") from None
    if not any(resolved.is_relative_to(root) for root in settings.roots):
        raise HTTPException(403, "the file is not below a folder that the page was started with")
    return resolved
