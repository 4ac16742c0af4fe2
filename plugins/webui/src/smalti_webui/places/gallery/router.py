"""The tab Samples of a run."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from smalti_webui.places.gallery.samples import Gallery, gallery, settings_of
from smalti_webui.places.state import places
from smalti_webui.runs.lookup import run_page

router = APIRouter(prefix="/runs/{run_id}/samples")
_COLUMNS = 40
_MEDIA = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


@router.get("")
def samples(request: Request, run_id: str, all: bool = False) -> Response:
    run = places(request).run(run_id)
    found = gallery(run.directory)
    steps = list(found.steps) if all else thinned(found)
    return run_page(request, run_id, "samples", "places/samples.html", gallery=found, steps=steps)


@router.get("/file/{name:path}")
def file(request: Request, run_id: str, name: str) -> Response:
    """An image as the run wrote it."""
    own = places(request)
    run = own.run(run_id).directory
    path = own.file_of_run(run, run.samples, name)
    return FileResponse(path, media_type=_MEDIA.get(path.suffix.lower(), "application/octet-stream"))


@router.get("/thumbnail/{width}/{name:path}")
def thumbnail(request: Request, run_id: str, width: int, name: str) -> Response:
    own = places(request)
    run = own.run(run_id).directory
    made = own.thumbnails.of(own.file_of_run(run, run.samples, name), width)
    return FileResponse(made, media_type="image/webp", headers={"cache-control": "private, max-age=60"})


@router.get("/settings/{name:path}")
def settings(request: Request, run_id: str, name: str) -> Response:
    """The settings that the image itself has."""
    own = places(request)
    run = own.run(run_id).directory
    return JSONResponse(dict(settings_of(own.file_of_run(run, run.samples, name))))


def thinned(found: Gallery) -> list[int]:
    """At most `_COLUMNS` of the steps, evenly, with the first and the last one."""
    count = len(found.steps)
    if count <= _COLUMNS:
        return list(found.steps)
    places = sorted({round(number * (count - 1) / (_COLUMNS - 1)) for number in range(_COLUMNS)})
    return [found.steps[place] for place in places]
