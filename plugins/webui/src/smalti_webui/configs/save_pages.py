"""Saving a draft to a file: the difference first, then the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Form, Query
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from smalti import Problem, UserError
from smalti.config import read_text
from smalti_webui.configs.checking import checked, state
from smalti_webui.configs.controls import is_hidden
from smalti_webui.configs.drafts import Draft, StaleDraft, digest, drafts_of
from smalti_webui.configs.paths import path_below
from smalti_webui.configs.saving import ChangedMeanwhile, difference, on_disk, save
from smalti_webui.configs.schemas import schema_for
from smalti_webui.configs.toml_text import given
from smalti_webui.server.files import below_roots
from smalti_webui.server.messages import toast
from smalti_webui.server.templating import page

router = APIRouter()

PathText = Annotated[str, Form(max_length=4096)]
CHANGED = "The file was changed by something else since the draft was opened. The difference is that to the file as it is now."


@router.get("/{id}/save")
def show(request: Request, id: str, path: Annotated[str, Query(max_length=4096)] = "") -> HTMLResponse:
    """The difference to the file, and where to save."""
    return _page(request, Draft.load(request.app.state.settings, id), path)


@router.post("/{id}/save")
def write(request: Request, id: str, version: Annotated[int, Form(ge=1)], path: PathText, seen: PathText = "") -> Response:
    """Save what was shown: this version of the draft, over the file with the digest `seen`."""
    settings = request.app.state.settings
    store, draft = drafts_of(settings), Draft.load(settings, id)
    if draft.version != version:
        return _page(request, draft, path, "The draft was changed in another tab. The difference is that of the newer draft.")
    try:
        target = _target(request, draft, path)
        base = save(target, draft.text, seen)
        store.saved(
            id, version, name=target.stem if target.stem != "config" else target.parent.name, target=str(target), base=base
        )
    except ChangedMeanwhile:
        return _page(request, draft, path, CHANGED)
    except StaleDraft as error:
        return _page(request, error.current, path, "The draft was changed while it was saved.")
    response = RedirectResponse(f"/configs/{id}", 303)
    toast(response, f"Saved to {target}")
    return response


@router.post("/{id}/reread")
def reread(request: Request, id: str, version: Annotated[int, Form(ge=1)]) -> Response:
    """Take the text of the file into the draft. The text of the draft is kept as an earlier version."""
    settings = request.app.state.settings
    draft = Draft.load(settings, id)
    path = below_roots(settings, draft.target)
    response = RedirectResponse(f"/configs/{id}", 303)
    try:
        text = read_text(path)
        drafts_of(settings).write(
            id, version, text, "the file was read again", pending=dict.fromkeys(draft.pending), base=digest(path.read_bytes())
        )
        toast(response, f"{path} was read again; the text before is kept as version {version}")
    except StaleDraft:
        toast(response, "The draft was changed in another tab; nothing was replaced", "warning")
    return response


def _target(request: Request, draft: Draft, path: str) -> Path:
    """The file to save to: below the roots, and resolved. A name without an ending gets .toml."""
    settings = request.app.state.settings
    return path_below(settings, path.strip() or draft.target or f"{draft.name}.toml", ".toml")


def _page(request: Request, draft: Draft, path: str, message: str = "") -> HTMLResponse:
    problems: list[Problem] = []
    disk = None
    try:
        disk = on_disk(_target(request, draft, path))
        if disk.seen and str(disk.path) == draft.target and disk.seen != draft.base:
            message = message or CHANGED
        if disk.seen and str(disk.path) != draft.target:
            message = message or "This file exists already. Saving replaces its content, as the difference shows."
    except UserError as error:
        problems = [Problem.of(error)]
    found = checked(draft, draft.file)
    return page(
        request,
        "configs/save.html",
        status=422 if problems else 200,
        title=f"Save {draft.name}",
        draft=draft,
        disk=disk,
        path=path or (str(disk.path) if disk else ""),
        lines=difference(disk.text, draft.text, _secrets(draft, disk.text)) if disk else [],
        message=message,
        problems=problems,
        state=state(draft, found),
    )


def _secrets(draft: Draft, on_file: str) -> list[str]:
    """Values of secrets in either text, which the difference masks."""
    schema, _ = schema_for(draft.file)
    found = []
    for text in (draft.text, on_file):
        try:
            values = given(text, schema)
        except UserError:
            continue
        found += [str(value) for name, value in values.items() if is_hidden(schema.options[name], value)]
    return found
