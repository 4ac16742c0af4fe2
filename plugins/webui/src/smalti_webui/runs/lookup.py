"""The run that an address names, and what every page about one run shows around its content."""

from __future__ import annotations

from typing import Any

from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse

from smalti.rundir import Summary
from smalti_webui.runs.following import end_of
from smalti_webui.runs.history import Histories
from smalti_webui.runs.index import FoundRun, RunIndex
from smalti_webui.server.templating import page, partial

TABS = (
    ("overview", "", "Overview"),
    ("metrics", "/metrics", "Metrics"),
    ("samples", "/samples", "Samples"),
    ("log", "/log", "Log"),
    ("config", "/config", "Config"),
    ("checkpoints", "/checkpoints", "Checkpoints"),
    ("errors", "/errors", "Errors"),
)


def index_of(request: Request) -> RunIndex:
    """The runs below the roots of the server."""
    state: State = request.app.state
    if not hasattr(state, "runs"):
        state.runs = RunIndex(state.settings.roots)
    index: RunIndex = state.runs
    return index


def histories_of(request: Request) -> Histories:
    """The histories of the runs that were looked at last."""
    state: State = request.app.state
    if not hasattr(state, "histories"):
        state.histories = Histories()
    histories: Histories = state.histories
    return histories


def find_run(request: Request, run_id: str) -> FoundRun:
    """The run with this id. HTTPException 404 if there is none below the roots."""
    found = index_of(request).find(run_id)
    if found is None:
        raise HTTPException(404, "there is no such run below the folders of this page")
    return found


def summary_of(request: Request, run: FoundRun) -> Summary:
    """The run in one row. HTTPException 404 if its directory was removed."""
    summary = index_of(request).summary(run)
    if summary is None:
        raise HTTPException(404, "the run directory was removed, or cannot be read")
    return summary


def run_page(request: Request, run_id: str, tab: str, template: str, **context: Any) -> HTMLResponse:
    """A tab of a run: a template that extends "runs/detail.html" and fills its block `tab`."""
    run = find_run(request, run_id)
    context.setdefault("position", str(end_of(run.directory)))  # before the page reads anything, so that nothing is missed
    return page(request, template, **_around(request, run, tab), **context)


def run_part(request: Request, run: FoundRun, template: str, **context: Any) -> HTMLResponse:
    """A part of a page about a run."""
    return partial(request, template, run=run, summary=summary_of(request, run), **context)


def _around(request: Request, run: FoundRun, tab: str) -> dict[str, Any]:
    base = f"/runs/{run.id}"
    return {
        "run": run,
        "summary": summary_of(request, run),
        "tab": tab,
        "tabs": [(key, base + path, title) for key, path, title in TABS],
        "base": base,
        "title": run.name,
        "here": "runs",
    }
