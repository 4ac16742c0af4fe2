"""The addresses of the runs: the table, one run, its events, and requests to it."""

from __future__ import annotations

import asyncio
import csv
import io
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response

from smalti.rundir import RequestKind, to_json
from smalti.system import open_regular
from smalti_webui.runs import actions, log
from smalti_webui.runs.configuration import values
from smalti_webui.runs.history import TITLES, History
from smalti_webui.runs.index import FoundRun
from smalti_webui.runs.lookup import find_run, histories_of, index_of, run_page, run_part, summary_of
from smalti_webui.runs.overview import overview_of
from smalti_webui.runs.rows import Rows, Table
from smalti_webui.runs.stream import event_stream, requested_position, since
from smalti_webui.server.files import below_roots
from smalti_webui.server.messages import Level, toast
from smalti_webui.server.templating import page, partial, wants_part

router = APIRouter(prefix="/runs")
_CONSOLE = 1_000_000
"""Bytes of a console that are shown: its end."""
Text = Annotated[str, Query(max_length=200)]


# --- the table ------------------------------------------------------------------------------------------------------


@router.get("")
def table(
    request: Request, search: Text = "", shown: Text = "all", number: Annotated[int, Query(alias="page")] = 1
) -> HTMLResponse:
    """The runs below the roots."""
    return page(request, "runs/list.html", title="Runs", **_table(request, search, shown, number))


@router.get("/rows")
def rows(
    request: Request, search: Text = "", shown: Text = "all", number: Annotated[int, Query(alias="page")] = 1
) -> HTMLResponse:
    """The table alone, as it is now."""
    return partial(request, "runs/rows.html", **_table(request, search, shown, number))


def _table(request: Request, search: str, shown: str, number: int) -> dict[str, Any]:
    state = request.app.state
    if not hasattr(state, "rows"):
        state.rows = Rows(index_of(request))
    found: Table = state.rows.table(search, shown, number)
    return {"table": found, "search": search, "shown": shown}


# --- one run --------------------------------------------------------------------------------------------------------


@router.get("/{run_id}")
def overview(request: Request, run_id: str) -> HTMLResponse:
    """What the run does, and its numbers."""
    run = find_run(request, run_id)
    return run_page(request, run_id, "overview", "runs/overview.html", **_overview(request, run))


@router.get("/{run_id}/overview")
def overview_now(request: Request, run_id: str) -> HTMLResponse:
    """The overview alone, as it is now."""
    run = find_run(request, run_id)
    return run_part(request, run, "runs/overview_now.html", **_overview(request, run))


@router.get("/{run_id}/newest")
def newest(request: Request, run_id: str) -> HTMLResponse:
    """The newest images alone, as they are now."""
    run = find_run(request, run_id)
    return run_part(request, run, "runs/newest.html", base=f"/runs/{run.id}", **_overview(request, run))


@router.get("/{run_id}/head")
def head(request: Request, run_id: str) -> HTMLResponse:
    """Status, progress and buttons of the run, as they are now."""
    run = find_run(request, run_id)
    return run_part(request, run, "runs/head.html", base=f"/runs/{run.id}")


def _overview(request: Request, run: FoundRun) -> dict[str, Any]:
    followed = histories_of(request).of(run.directory)
    with followed.lock:
        overview = overview_of(followed.history, followed.gpus, summary_of(request, run))
        return {"overview": overview, "position": str(followed.history.position)}


@router.get("/{run_id}/metrics")
def metrics(request: Request, run_id: str) -> HTMLResponse:
    """The curves of the run."""
    run = find_run(request, run_id)
    followed = histories_of(request).of(run.directory)
    with followed.lock:
        names = [(name, TITLES.get(name, name)) for name in followed.history.names()]
        table, markers = _table_twin(followed.history), list(followed.history.markers)[::-1][:100]
    return run_page(request, run_id, "metrics", "runs/metrics.html", names=names, table=table, markers=markers)


@router.get("/{run_id}/series")
def series(request: Request, run_id: str, points: Annotated[int, Query(ge=2, le=5000)] = 1000) -> Response:
    """The thinned series and the markers as JSON, with the position from which the events continue them."""
    followed = histories_of(request).of(find_run(request, run_id).directory)
    with followed.lock:
        history = followed.history
        content = {
            "position": str(history.position),
            "series": [
                {"name": name, "title": TITLES.get(name, name), **history.series[name].columns(points)}
                for name in history.names()
            ],
            "markers": [
                {"kind": each.kind, "step": each.step, "time": each.time, "text": each.text} for each in history.markers
            ],
        }
    return Response(to_json(content), media_type="application/json")


@router.get("/{run_id}/metrics.csv")
def metrics_csv(request: Request, run_id: str) -> Response:
    """The thinned series as CSV: a line for each point of each series."""
    run = find_run(request, run_id)
    followed = histories_of(request).of(run.directory)
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(("metric", "step", "time", "mean", "low", "high", "count"))
    with followed.lock:
        for name in followed.history.names():
            columns = followed.history.series[name].columns(5000)
            order = ("step", "time", "mean", "low", "high", "count")
            shown = name if name[:1].isalpha() else f"_{name}"  # a spreadsheet would take "=..." for a formula
            writer.writerows((shown, *row) for row in zip(*(columns[each] for each in order), strict=True))
    return _download(written.getvalue(), f"{run.id}.csv", "text/csv")


def _table_twin(history: History) -> list[dict[str, Any]]:
    """First, least, largest and last value of each series."""
    found = []
    for name in history.names():
        columns = history.series[name].columns(5000)
        means = [mean for mean in columns["mean"] if mean is not None]
        lows, highs = [low for low in columns["low"] if low is not None], [high for high in columns["high"] if high is not None]
        if means:
            ends = {"first": means[0], "least": min(lows), "largest": max(highs), "last": means[-1]}
            found.append({"title": TITLES.get(name, name), "step": columns["step"][-1], **ends})
    return found


@router.get("/{run_id}/log")
def run_log(
    request: Request, run_id: str, level: Text = "info", node: Text = "", rank: Text = "", text: Text = ""
) -> HTMLResponse:
    """The events of the run as lines."""
    return run_page(
        request,
        run_id,
        "log",
        "runs/log.html",
        **_log(request, run_id, log.Filter(level=level, node=node, rank=rank, text=text)),
    )


@router.get("/{run_id}/log/lines")
def log_lines(
    request: Request, run_id: str, level: Text = "info", node: Text = "", rank: Text = "", text: Text = ""
) -> HTMLResponse:
    """The lines alone, as they are now."""
    return partial(
        request, "runs/log_lines.html", **_log(request, run_id, log.Filter(level=level, node=node, rank=rank, text=text))
    )


def _log(request: Request, run_id: str, wanted: log.Filter) -> dict[str, Any]:
    run = find_run(request, run_id)
    lines, more = log.last_lines(run.directory, wanted)
    return {
        "lines": lines,
        "more": more,
        "wanted": wanted,
        "levels": log.LEVELS,
        "console": actions.console_log(run, request.app.state.settings),
    }


@router.get("/{run_id}/log/download")
def log_download(request: Request, run_id: str) -> Response:
    """The file events.jsonl."""
    run = find_run(request, run_id)
    return _file(request, run.directory.events_file, "application/x-ndjson", f"{run.id}.events.jsonl")


@router.get("/{run_id}/log/console")
def console_log(request: Request, run_id: str) -> Response:
    """The output of the latest launch of the run by the page."""
    file = actions.console_log(find_run(request, run_id), request.app.state.settings)
    if file is None:
        raise HTTPException(404, "the run was not started from this page")
    with open_regular(file) as output:
        output.seek(max(0, file.stat().st_size - _CONSOLE))
        return PlainTextResponse(output.read().decode("utf-8", "replace"))


@router.get("/{run_id}/config")
def config(request: Request, run_id: str, other: Text = "") -> HTMLResponse:
    """The resolved values with their sources, and how they differ from those of another run."""
    run = find_run(request, run_id)
    compared = find_run(request, other) if other else None
    found = values(run.directory, compared.directory if compared else None)
    runs = [each for each in index_of(request).runs() if each.id != run.id][:200]
    return run_page(request, run_id, "config", "runs/config.html", values=found, runs=runs, other=compared)


@router.get("/{run_id}/config/download")
def config_download(request: Request, run_id: str) -> Response:
    """The file config.toml."""
    run = find_run(request, run_id)
    return _file(request, run.directory.config_file, "application/toml", f"{run.id}.toml")


# --- events and requests --------------------------------------------------------------------------------------------


@router.get("/{run_id}/events")
async def events(request: Request, run_id: str, given: Annotated[str, Query(alias="from", max_length=4000)] = "") -> Response:
    """Events since a position: as a stream for a browser's EventSource, otherwise as JSON."""
    directory = (await asyncio.to_thread(find_run, request, run_id)).directory
    position = requested_position(request, given)
    if "text/event-stream" in request.headers.get("accept", ""):
        return event_stream(request, directory, position)
    return await since(directory, position)


@router.post("/{run_id}/stop-now")
async def stop_now(request: Request, run_id: str) -> Response:
    """End the run without another checkpoint."""
    run = await asyncio.to_thread(find_run, request, run_id)
    await asyncio.to_thread(actions.stop_now, run.directory)
    return _done(request, run, "Stopping now, without another checkpoint.", "success")


@router.post("/{run_id}/resume")
async def resume(request: Request, run_id: str) -> Response:
    """Start the run again from its latest checkpoint."""
    run = await asyncio.to_thread(find_run, request, run_id)
    pid = await asyncio.to_thread(actions.resume, run, request.app.state.settings)
    return _done(request, run, f"Started {run.name} again as process {pid}.", "success")


@router.post("/{run_id}/stop")
async def stop(request: Request, run_id: str) -> Response:
    """Ask the run to finish its step, save a checkpoint and stop."""
    return await _ask(request, run_id, "stop")


@router.post("/{run_id}/save")
async def save(request: Request, run_id: str) -> Response:
    """Ask the run to save a checkpoint after its step."""
    return await _ask(request, run_id, "save")


@router.post("/{run_id}/sample")
async def sample(request: Request, run_id: str) -> Response:
    """Ask the run to generate its validation images after its step."""
    return await _ask(request, run_id, "sample")


async def _ask(request: Request, run_id: str, kind: RequestKind) -> Response:
    run = await asyncio.to_thread(find_run, request, run_id)
    text, level = await actions.ask(run.directory, kind)
    return _done(request, run, text, level)


def _done(request: Request, run: FoundRun, text: str, level: Level) -> Response:
    back = f"/runs/{run.id}"
    response: Response = Response("") if wants_part(request) else RedirectResponse(back, 303)
    toast(response, text, level)
    return response


def _file(request: Request, path: Path, kind: str, name: str) -> Response:
    file = below_roots(request.app.state.settings, path)
    if not file.is_file():
        raise HTTPException(404, f"the run has no {path.name} yet")
    return FileResponse(file, media_type=kind, filename=name)


def _download(text: str, name: str, kind: str) -> Response:
    return Response(text, media_type=kind, headers={"content-disposition": f'attachment; filename="{name}"'})
