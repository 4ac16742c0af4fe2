"""The pages of configurations: the list, new drafts, and the editor with its three views."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Form, Query, UploadFile
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from smalti import UserError
from smalti.config import PLUGINS
from smalti_webui.configs import editing, presets, save_pages, starting
from smalti_webui.configs.checking import checked, state
from smalti_webui.configs.drafts import Draft, DraftStore, drafts_of
from smalti_webui.configs.finding import find_files
from smalti_webui.configs.flags import draft_flags
from smalti_webui.configs.form import LEVELS, sections
from smalti_webui.configs.paths import path_below
from smalti_webui.configs.schemas import suggestions_for
from smalti_webui.runs.lookup import find_run
from smalti_webui.server.messages import toast
from smalti_webui.server.templating import page

router = APIRouter(prefix="/configs")
router.include_router(presets.router)
router.include_router(editing.router)
router.include_router(save_pages.router)

FILES = 10
"""Files that may be imported at once."""
View = Literal["form", "toml", "flags"]
Word = Annotated[str, Form(max_length=4096)]


@router.get("")
def overview(request: Request, copy: str = "") -> HTMLResponse:
    """Drafts, files below the roots, and where a new configuration may begin. `copy` is a run to begin with."""
    settings = request.app.state.settings
    return page(
        request,
        "configs/list.html",
        title="Configs",
        drafts=drafts_of(settings).list(),
        files=find_files(settings.roots),
        recipes=starting.recipes(),
        copied=find_run(request, copy) if copy else None,
    )


@router.post("/new")
def new(request: Request, recipe: Word = "", file: Word = "", run: Word = "", draft: Word = "") -> Response:
    """A draft from one of these."""
    store = drafts_of(request.app.state.settings)
    if recipe:
        made = starting.from_recipe(store, recipe)
    elif file:
        made = starting.from_file(store, path_below(request.app.state.settings, file))
    elif run:
        made = starting.from_run(store, find_run(request, run).directory)
    else:
        made = starting.from_draft(store, Draft.load(request.app.state.settings, draft))
    return RedirectResponse(f"/configs/{made.id}", 303)


@router.post("/import")
def import_(request: Request, files: list[UploadFile], model_family: Word = "", path: Word = "") -> Response:
    """A draft from files of another trainer, or from a JSON or YAML file: uploaded, or on this machine."""
    store = drafts_of(request.app.state.settings)
    given = [file for file in files if file.filename]
    if path.strip():
        paths = [path_below(request.app.state.settings, each) for each in path.split("\n") if each.strip()]
    else:
        paths = _kept(store, given)
    if not paths:
        raise UserError("no file given", fix="choose files of one trainer, or write the path of one")
    made = starting.from_import(store, paths, model_family.strip())
    response = RedirectResponse(f"/configs/{made.id}?view=toml", 303)
    rest = "; what was not converted stands at the end" if "# Not converted:" in made.text else ""
    toast(response, f"{', '.join(each.name for each in paths)} imported{rest}", "warning" if rest else "success")
    return response


def _kept(store: DraftStore, files: list[UploadFile]) -> list[Path]:
    """The uploaded files in a folder of the last import, by their own names."""
    folder = store.folder / ".imports"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    if len(files) > FILES:
        raise UserError(f"{len(files)} files are too many", fix=f"import at most {FILES} at once")
    paths = []
    for file in files:
        content = file.file.read(starting.LARGEST + 1)
        name = Path(file.filename or "").name.lstrip(".")
        if len(content) > starting.LARGEST:
            raise UserError(f"{name} has more than {starting.LARGEST // 1024} KiB", fix="import configuration files, not data")
        if not name or len(name.encode()) > 200:
            raise UserError("this file has no usable name", fix="rename it")
        path = folder / name
        path.write_bytes(content)
        paths.append(path)
    return paths


@router.get("/{id}")
def edit(
    request: Request, id: str, view: View = "form", level: Annotated[str, Query(max_length=10)] = "basic", section: str = ""
) -> HTMLResponse:
    """The editor."""
    draft = Draft.load(request.app.state.settings, id)
    found = checked(draft, draft.file)
    made = sections(found, draft.pending, suggestions_for(draft.file)) if view == "form" else []
    return page(
        request,
        f"configs/{view}.html",
        title=draft.name,
        draft=draft,
        view=view,
        level=level if level in LEVELS else "basic",
        sections=made,
        chosen=section if section in {each.name for each in made} else next((each.name for each in made), ""),
        state=state(draft, found),
        flags=draft.pending.get("flags") or draft_flags(draft, found) if view == "flags" else "",
        missing=[package for package in PLUGINS.values() if package.options and package.options[0] not in found.schema.options],
    )


@router.get("/{id}/export")
def export(request: Request, id: str) -> Response:
    """The text as a file to keep."""
    draft = Draft.load(request.app.state.settings, id)
    headers = {"content-disposition": f'attachment; filename="{_plain(draft.name)}.toml"'}
    return Response(draft.text, media_type="application/toml", headers=headers)


def _plain(name: str) -> str:
    return "".join(each if each.isascii() and (each.isalnum() or each in "-_.") else "-" for each in name) or "config"


@router.post("/{id}/discard")
def discard(request: Request, id: str) -> Response:
    """Move a draft away. The file that it was saved to stays."""
    draft = Draft.load(request.app.state.settings, id)
    to = drafts_of(request.app.state.settings).discard(id)
    response = RedirectResponse("/configs", 303)
    toast(response, f"The draft {draft.name} was moved to {to}")
    return response
