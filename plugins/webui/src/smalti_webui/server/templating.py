"""Pages and parts of pages from templates. Everything is escaped; a name that a template needs and does not get is an error."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.filters import do_urlencode
from starlette.requests import Request
from starlette.responses import HTMLResponse

from smalti_webui.server import formats

PACKAGE = Path(__file__).parents[1]
STATIC = PACKAGE / "static"
THEMES = ("system", "light", "dark")
THEME_COOKIE = "smalti-ui-theme"
NAVIGATION = (
    ("runs", "/runs", "Runs", "g r"),
    ("configs", "/configs", "Configs", "g c"),
    ("launch", "/launch", "Queue", "g q"),
    ("datasets", "/datasets", "Datasets", "g d"),
    ("plugins", "/plugins", "Plugins", "g p"),
    ("doctor", "/doctor", "Doctor", "g o"),
    ("maintenance", "/maintenance", "Maintenance", "g m"),
)
"""The pages of the navigation: the room, the address, the title, the shortcut."""


@cache
def _environment() -> Environment:
    """The templates, which every application of a process shares: compiling those of a form takes 0.1 s."""
    loader = FileSystemLoader(PACKAGE / "templates")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"static": static_url, "navigation": NAVIGATION, "version": version("smalti")}
    made.filters |= {**formats.FILTERS, "urlencode": _quoted}
    return made


def _quoted(value: Any) -> str:
    """The filter of jinja, also for names that UTF-8 cannot express."""
    return do_urlencode(value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value)


class Templates:
    """The templates of all rooms, in one environment."""

    def __init__(self) -> None:
        self.environment = _environment()

    def render(self, name: str, **context: Any) -> str:
        """The text of a page. What UTF-8 cannot express, in names of files and damaged events, becomes "?"."""
        return self.environment.get_template(name).render(context).encode("utf-8", "replace").decode("utf-8")


def page(request: Request, name: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A whole page. `context` has `title`, and `here` if the navigation marks another page than the address says."""
    state = request.app.state
    common = {
        "request": request,
        "theme": theme_of(request),
        "here": _here(request),
        "recent": state.messages.recent(),
        "pending": state.messages.take_pending(),
        "settings": state.settings,
    }
    return HTMLResponse(state.templates.render(name, **{**common, **context}), status)


def partial(request: Request, name: str, *, status: int = 200, **context: Any) -> HTMLResponse:
    """A part of a page, which replaces an element of a page that is shown."""
    return HTMLResponse(request.app.state.templates.render(name, **{"request": request, **context}), status)


def _here(request: Request) -> str:
    """The entry of the navigation to which an address belongs."""
    first = request.url.path.strip("/").partition("/")[0]
    return {"hardware": "configs", "compare": "runs"}.get(first, first)


def wants_part(request: Request) -> bool:
    """Whether the page asks for a part of itself, and not the browser for a whole page."""
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-request-type") != "full"


def theme_of(request: Request) -> str:
    """The theme that the user has chosen, so that the first paint has it."""
    chosen = request.cookies.get(THEME_COOKIE, "system")
    return chosen if chosen in THEMES else "system"


@cache
def static_url(path: str) -> str:
    """The address of a static file, with a digest: an update is loaded at once, and everything else comes from the cache."""
    digest = hashlib.sha256((STATIC / path).read_bytes()).hexdigest()[:10]
    return f"/static/{path}?v={digest}"
