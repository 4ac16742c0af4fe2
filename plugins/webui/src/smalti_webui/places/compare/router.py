"""The page Compare."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from smalti.plugins import Selection
from smalti_webui.configs.schemas import schema_with
from smalti_webui.places.compare.differences import beside, differences, shown_steps
from smalti_webui.places.gallery.samples import gallery
from smalti_webui.places.state import places
from smalti_webui.server.templating import page

router = APIRouter(prefix="/compare")
MOST = 8
"""Runs that are compared at most: more colours are hard to distinguish."""


@router.get("")
def compare(request: Request, run: Annotated[list[str] | None, Query()] = None, step: int | None = None) -> Response:
    own = places(request)
    chosen = [own.run(each) for each in dict.fromkeys(run or ())][:MOST]
    galleries = [gallery(each.directory) for each in chosen]
    steps = shown_steps(galleries)
    shown = step if step in steps else steps[-1] if steps else None
    return page(
        request,
        "places/compare.html",
        title="Compare",
        here="runs",
        runs=chosen,
        names=[{"id": each.id, "name": each.name} for each in chosen],
        others=own.index.runs(),
        summaries=[own.index.summary(each) for each in chosen],
        differences=differences([each.directory for each in chosen], schema_with(Selection())),
        steps=steps,
        step=shown,
        beside=beside(galleries, shown) if shown is not None else [],
    )
