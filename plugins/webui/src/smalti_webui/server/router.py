"""What belongs to no room: the theme, the session."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from smalti_webui.server.security import cookie_name, cookie_of
from smalti_webui.server.templating import THEME_COOKIE, THEMES

router = APIRouter()


@router.get("/")
async def start() -> RedirectResponse:
    """The first page is that of the runs."""
    return RedirectResponse("/runs", 303)


@router.post("/theme")
async def theme(request: Request, value: Annotated[str, Form(max_length=10)]) -> Response:
    """Keep the theme in a cookie, so that the first paint has it."""
    response: Response = Response(status_code=204)
    if request.headers.get("hx-request") != "true" and request.headers.get("sec-fetch-mode") == "navigate":
        response = RedirectResponse("/runs", 303)
    chosen = value if value in THEMES else THEMES[0]
    response.set_cookie(THEME_COOKIE, chosen, max_age=365 * 86400, samesite="strict", path="/")
    return response


@router.post("/sign-out")
async def sign_out(request: Request) -> Response:
    """End the session of this browser. The next link is in the terminal."""
    state = request.app.state
    name = cookie_name(state.settings)
    state.sessions.end(cookie_of(request.headers, name))
    response = RedirectResponse("/", 303)
    response.delete_cookie(name)
    return response
