"""The pages Plugins, Doctor and Maintenance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Form
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from smalti.config import PLUGINS
from smalti.rundir import RunDirectory
from smalti.system import load_json
from smalti_webui.places.datasets.catalog import Source
from smalti_webui.places.installation.caches import THUMBNAILS, CacheRow, caches_of, confirmed, emptied, own_caches
from smalti_webui.places.job_router import shown
from smalti_webui.places.state import Places, places
from smalti_webui.server.formats import size
from smalti_webui.server.messages import toast
from smalti_webui.server.processes import Result, run_cli
from smalti_webui.server.templating import page, partial

router = APIRouter()
_SECONDS = 120.0
LEVELS = ("error", "warning", "note", "ok")


@router.get("/plugins")
async def plugins(request: Request) -> Response:
    """What `smalti plugins` says, and what could be installed."""
    result = await run_cli(["plugins", "--json"], timeout=_SECONDS)
    found: list[dict[str, Any]] = result.json["plugins"] if isinstance(result.json, dict) else []
    families = result.json["model_families"] if isinstance(result.json, dict) else []
    installed = {each["name"] for each in found}
    available = [package for name, package in sorted(PLUGINS.items()) if name not in installed]
    order = {"broken": 0, "incompatible": 0, "disabled": 2}
    found.sort(key=lambda each: (order.get(each["state"], 1), each["built_in"], each["name"]))
    error = "" if found else result.stderr
    return page(
        request, "places/plugins.html", title="Plugins", plugins=found, families=families, available=available, error=error
    )


# --- doctor ---------------------------------------------------------------------------------------------------------


@router.get("/doctor")
def doctor(request: Request) -> Response:
    own = places(request)
    return page(
        request,
        "places/doctor.html",
        title="Doctor",
        jobs=own.jobs.latest(kind="doctor")[:1],
        sources=[each for each in own.catalog.sources() if not each.is_folder],
    )


@router.post("/doctor")
async def diagnose(request: Request, source: Annotated[str, Form()] = "", measure: Annotated[bool, Form()] = False) -> Response:
    """Run `smalti doctor`, with the checks of a configuration if one is chosen."""
    own = places(request)
    chosen = _source(own, source)
    args = ["doctor", *(chosen.arguments if chosen else []), *(["--measure"] if measure else []), "--json"]
    return shown(request, own.jobs.start("Doctor", args, template="places/doctor_result.html", kind="doctor", levels=LEVELS))


# --- maintenance ----------------------------------------------------------------------------------------------------


@router.get("/maintenance")
async def maintenance(request: Request, source: str = "") -> Response:
    """All caches, those of a configuration too if one is chosen."""
    own = places(request)
    chosen = _source(own, source)
    rows, error = await _rows(own, chosen)
    return page(
        request,
        "places/maintenance.html",
        title="Maintenance",
        rows=rows,
        error=error,
        sources=[each for each in own.catalog.sources() if not each.is_folder],
        chosen=chosen,
        cleared="",
    )


@router.post("/maintenance/clear")
async def clear(
    request: Request,
    name: Annotated[str, Form()],
    place: Annotated[str, Form()],
    source: Annotated[str, Form()] = "",
) -> Response:
    """Clear a cache that the user has confirmed with its path."""
    own = places(request)
    chosen = _source(own, source)
    rows = own_caches(own.thumbnails) if name == THUMBNAILS else (await _rows(own, chosen))[0]
    row = confirmed(rows, name, place)
    error = ""
    if row.kind == THUMBNAILS:
        done = f"{row.place}: cleared {size(own.thumbnails.trim(0))}"
        rows = (await _rows(own, chosen))[0]
    else:
        args = ["cache", "clear", name, *(chosen.arguments if chosen else []), "--yes", "--json"]
        result = await run_cli(args, timeout=_SECONDS, changes=True)
        done = _cleared(row, result)
        error = (result.stderr.strip() or f"exit code {result.code}") if result.code else ""
        rows = rows if error else [emptied(each) if each is row else each for each in rows]
    cleared = "" if error else done
    answer = partial(request, "places/caches.html", rows=rows, error=error, cleared=cleared, chosen=chosen)
    if cleared:
        toast(answer, cleared, "success")
    return answer


async def _rows(own: Places, chosen: Source | None) -> tuple[list[CacheRow], str]:
    """The caches with why one cannot be cleared now, and what went wrong."""
    result = await run_cli(["cache", "ls", *(chosen.arguments if chosen else []), "--json"], timeout=_SECONDS)
    used_by = _running(own) if chosen else []
    return [*caches_of(result.json, used_by), *own_caches(own.thumbnails)], "" if result.json else result.stderr.strip()


def _running(own: Places) -> Sequence[str]:
    """The names of runs that run now, and may use what is encoded."""
    return [run.name for run in own.index.runs() if RunDirectory(run.path).status().condition in ("running", "stale")]


def _source(own: Places, source_id: str) -> Source | None:
    """The configuration with this id; None for "". HTTPException 404 if there is none."""
    if not source_id:
        return None
    found = next((each for each in own.catalog.sources() if each.id == source_id), None)
    if found is None:
        raise HTTPException(404, "this configuration is not there any more")
    return found


def _cleared(row: CacheRow, result: Result) -> str:
    """What was cleared, as the command says it."""
    found = result.json if isinstance(result.json, dict) else load_json("{}")
    removed = sum(each["bytes"] for each in found.get("removed", ())) if "removed" in found else found.get("bytes", 0)
    return f"{row.place}: cleared {size(removed)}" if removed else f"{row.place}: nothing to clear"
