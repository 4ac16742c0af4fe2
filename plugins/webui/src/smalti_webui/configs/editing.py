"""Changes of a draft, each answered with what the command line says of it now, as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Form
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from smalti import UserError, problems_in
from smalti.system import load_json
from smalti_webui.configs.checking import checked, problems_of_check, state
from smalti_webui.configs.controls import from_text
from smalti_webui.configs.drafts import Draft, DraftStore, StaleDraft, UnknownDraft, drafts_of
from smalti_webui.configs.flags import draft_flags, split, with_flags
from smalti_webui.configs.schemas import schema_for
from smalti_webui.configs.toml_text import with_values
from smalti_webui.server.messages import toast
from smalti_webui.server.processes import run_cli

router = APIRouter()

_CHECK_SECONDS = 180.0
LARGEST = 256 * 1024
"""Characters of a draft."""
Version = Annotated[int, Form(ge=1)]
Text = Annotated[str, Form(max_length=LARGEST)]


def _answer(draft: Draft, status: int = 200, **more: object) -> JSONResponse:
    return JSONResponse({**state(draft, checked(draft, draft.file)), **more}, status)


def _stale(error: StaleDraft) -> JSONResponse:
    """The draft has changed since the page was made: nothing of the request is stored, and the page keeps it."""
    return JSONResponse({"version": error.current.version, "stale": True}, 409)


@router.get("/{id}/state")
def shown(request: Request, id: str) -> Response:
    """What is known of the draft now."""
    return _answer(Draft.load(request.app.state.settings, id))


@router.post("/{id}/change")
def change(request: Request, id: str, version: Version, changes: Text) -> Response:
    """Store what the fields of the form say: texts by option, null for the default."""
    store, draft = drafts_of(request.app.state.settings), Draft.load(request.app.state.settings, id)
    try:
        texts = load_json(changes)
        assert isinstance(texts, dict)
        assert all(text is None or isinstance(text, str) for text in texts.values())
    except (ValueError, AssertionError):
        raise HTTPException(422, "changes are texts by option") from None
    try:
        return _answer(_changed(store, draft, version, texts))
    except StaleDraft as error:
        return _stale(error)


def _changed(store: DraftStore, draft: Draft, version: int, texts: Mapping[str, str | None]) -> Draft:
    schema, _ = schema_for(draft.file)
    values: dict[str, object] = {}
    pending: dict[str, str | None] = {"flags": None}
    for name, text in texts.items():
        option = schema.options.get(name)
        if option is None:
            raise HTTPException(422, "there is no such option")
        pending[name] = None
        try:
            values[name] = None if text is None else from_text(option, text.replace("\r\n", "\n"))
        except UserError:
            pending[name] = text  # a table that is not TOML yet
    if draft.version != version:
        raise StaleDraft(draft)
    text = with_values(draft.text, schema, values)
    return store.write(draft.id, version, text, ", ".join(texts), pending=pending)


@router.post("/{id}/toml")
def toml(request: Request, id: str, version: Version, text: Annotated[str, Form(max_length=LARGEST)] = "") -> Response:
    """Store the text, whatever it says."""
    store, draft = drafts_of(request.app.state.settings), Draft.load(request.app.state.settings, id)
    text = text.replace("\r\n", "\n")
    text = text.replace("\n", "\r\n") if "\r\n" in draft.text else text  # a text area has one kind of line ends
    try:
        return _answer(store.write(id, version, text, "TOML", pending=dict.fromkeys(draft.pending)))
    except StaleDraft as error:
        return _stale(error)


@router.post("/{id}/flags")
def flags(request: Request, id: str, version: Version, text: Annotated[str, Form(max_length=LARGEST)] = "") -> Response:
    """Store what the flags say. Flags with problems are kept as they are, and change nothing else."""
    store, draft = drafts_of(request.app.state.settings), Draft.load(request.app.state.settings, id)
    text = text.replace("\r\n", "\n")
    schema, _ = schema_for(draft.file)
    try:
        try:
            changed = with_flags(draft.text, schema, split(text))
        except UserError as error:
            problems = [each.as_json() for each in problems_in(error)]
            kept = store.write(id, version, draft.text, "flags", pending={"flags": text})
            return _answer(kept, problems=problems)
        return _answer(store.write(id, version, changed, "flags", pending=dict.fromkeys(draft.pending)))
    except StaleDraft as error:
        return _stale(error)


@router.post("/{id}/check")
async def check(request: Request, id: str) -> Response:
    """All checks that need no data: of plugins, datasets, the model family and devices, by a command."""
    store, draft = drafts_of(request.app.state.settings), Draft.load(request.app.state.settings, id)
    result = await run_cli(["config", "check", str(draft.file), "--json"], timeout=_CHECK_SECONDS, cwd=draft.folder)
    kept: dict[str, object] = {"version": draft.version, "t": time.time(), "problems": []}
    if isinstance(result.json, dict):
        found = checked(draft, draft.file)
        kept["problems"] = problems_of_check(draft, found, draft.file, result.json.get("problems", ()))
        kept["unchecked"] = result.json.get("unchecked", "")
    elif result.code:
        kept["failed"] = result.stderr.strip() or f"the check ended with code {result.code}"
    return _answer(store.keep_check(id, kept))


@router.post("/{id}/restore")
def restore(request: Request, id: str, version: Version, wanted: Annotated[int, Form(ge=1)]) -> Response:
    """Bring back an earlier text."""
    store = drafts_of(request.app.state.settings)
    response = RedirectResponse(f"/configs/{id}", 303)
    try:
        store.restore(id, version, wanted)
        toast(response, f"Back to version {wanted}; the text before is kept too")
    except StaleDraft:
        toast(response, "The draft was changed in another tab; nothing was brought back", "warning")
    except UnknownDraft:
        raise HTTPException(404, "there is no such version") from None
    return response


@router.get("/{id}/command")
def command(request: Request, id: str) -> Response:
    """The draft as a command, as JSON."""
    draft = Draft.load(request.app.state.settings, id)
    return JSONResponse({"command": draft_flags(draft, checked(draft, draft.file))})
