"""The application: the routers of all rooms, static files, and pages for errors."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from smalti import ConfigError, Problem, UserError
from smalti_webui.configs.router import router as configs
from smalti_webui.hardware.router import router as hardware
from smalti_webui.launch.queue import Queue, keep_advancing
from smalti_webui.launch.router import router as launch
from smalti_webui.places.router import router as places
from smalti_webui.runs.router import router as runs
from smalti_webui.server.departure import Departures
from smalti_webui.server.messages import KeptMessages, Messages
from smalti_webui.server.router import router as server
from smalti_webui.server.security import Security
from smalti_webui.server.sessions import Sessions
from smalti_webui.server.settings import Settings
from smalti_webui.server.templating import STATIC, Templates, page, partial, wants_part

ROUTERS = (server, runs, configs, hardware, launch, places)
_log = logging.getLogger(__name__)


def create_app(settings: Settings, on_new_link: Callable[[str], None] = lambda token: None) -> FastAPI:
    """The application. `on_new_link` is called with the token of each link after the first; each works once.

    `app.state` has `settings`, `templates`, `sessions`, `messages`, and `closing`: set when the server stops. What streams to a
    browser ends then.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        queue = asyncio.create_task(keep_advancing(Queue(settings)))
        yield
        app.state.closing = True
        queue.cancel()

    app = _Application(title="smalti", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.settings = settings
    app.state.templates = Templates()
    app.state.sessions = Sessions(settings.token, settings.port, settings.data / "sessions.json", on_new_link)
    app.state.messages = Messages()
    app.state.closing = False
    for router in ROUTERS:
        app.include_router(router)
    app.mount("/static", _Static(directory=STATIC))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UserError, _user_error)
    app.add_exception_handler(OSError, _os_error)
    app.add_exception_handler(Exception, _defect)
    app.add_middleware(Departures)
    app.add_middleware(KeptMessages, messages=app.state.messages)
    return app


class _Application(FastAPI):
    """`Security` surrounds all of it, also the answer to an exception, which no other middleware sees."""

    def build_middleware_stack(self) -> ASGIApp:
        state = self.state
        return Security(super().build_middleware_stack(), state.settings, state.sessions, state.templates)


class _Static(StaticFiles):
    """Static files, whose addresses have a digest of their content, are never asked for again."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        fixed = b"v=" in scope["query_string"]
        response.headers["cache-control"] = "max-age=31536000, immutable" if fixed else "no-cache"
        return response


def _error(request: Request, status: int, title: str, problems: list[Problem]) -> Response:
    show = partial if wants_part(request) else page
    name = "server/problems.html" if wants_part(request) else "server/error.html"
    return show(request, name, status=status, title=title, problems=problems)


_TITLES = {403: "Not allowed", 404: "Not found", 405: "Not possible here", 408: "Too slow", 413: "Too large", 422: "Not valid"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = _TITLES.get(error.status_code, "Error")
    unknown = error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase
    message = f"there is no page {request.url.path}" if unknown else str(error.detail)
    return _error(request, error.status_code, title, [Problem(message=message)])


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [Problem(message=each["msg"], where=".".join(map(str, each["loc"][1:]))) for each in error.errors()]
    return _error(request, 422, _TITLES[422], problems)


async def _os_error(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return _error(request, 404, _TITLES[404], [Problem(message="there is no file with such a long name")])
    return await _defect(request, error)


async def _user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    problems = list(error.problems) if isinstance(error, ConfigError) else [Problem.of(error)]
    return _error(request, 422, "This did not work", problems)


async def _defect(request: Request, error: Exception) -> Response:
    _log.error("%s %s", request.method, request.url.path, exc_info=error)
    message = f"{type(error).__name__}: {error}"
    fix = "the terminal in which `smalti ui` runs has the traceback"
    return _error(request, 500, "The server made an error", [Problem(message=message, fix=fix)])
