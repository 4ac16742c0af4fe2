"""The pages of this room: its addresses have no common beginning."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

from smalti_webui.server.templating import page

router = APIRouter()


@router.get("/datasets")
async def datasets(request: Request) -> HTMLResponse:
    return page(request, "server/later.html", title="Datasets", command="smalti dataset")


@router.get("/plugins")
async def plugins(request: Request) -> HTMLResponse:
    return page(request, "server/later.html", title="Plugins", command="smalti plugins")


@router.get("/doctor")
async def doctor(request: Request) -> HTMLResponse:
    return page(request, "server/later.html", title="Doctor", command="smalti doctor")


@router.get("/maintenance")
async def maintenance(request: Request) -> HTMLResponse:
    return page(request, "server/later.html", title="Maintenance", command="smalti cache ls")
