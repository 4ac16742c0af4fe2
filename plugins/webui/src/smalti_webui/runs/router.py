"""The pages of this room."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from smalti_webui.server.templating import page

router = APIRouter(prefix="/runs")


@router.get("")
async def first(request: Request) -> HTMLResponse:
    """The page of the room."""
    return page(request, "server/later.html", title="Runs", command="smalti run ls")
