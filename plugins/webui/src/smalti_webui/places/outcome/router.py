"""The tabs Checkpoints and Errors of a run."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Form
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from smalti import UserError
from smalti.checkpoint import CheckpointStore, Entry
from smalti_webui.places.job_router import shown
from smalti_webui.places.outcome.failures import attempts, hangs, open_circuits
from smalti_webui.places.state import Places, places
from smalti_webui.runs import actions
from smalti_webui.runs.index import FoundRun
from smalti_webui.runs.lookup import run_page
from smalti_webui.server.files import below_roots, make_private
from smalti_webui.server.messages import toast

router = APIRouter(prefix="/runs/{run_id}")
_RESULT = "places/checkpoint_result.html"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A checkpoint in the table. `kind` says how its weights are stored. `resume` is the command that continues there."""

    name: str
    step: int
    size: int | None
    created: str
    kind: str
    flags: Sequence[str]
    problem: str
    resume: str


# --- checkpoints ----------------------------------------------------------------------------------------------------


@router.get("/checkpoints")
def checkpoints(request: Request, run_id: str) -> Response:
    own = places(request)
    run = own.run(run_id)
    rows = [_row(run, each) for each in reversed(CheckpointStore(run.directory.checkpoints).all())]
    jobs = own.jobs.latest(run=run.id)[:5]
    target = run.path.parent / f"{run.path.name}-export"
    return run_page(request, run_id, "checkpoints", "places/checkpoints.html", rows=rows, jobs=jobs, target=target)


@router.post("/checkpoints/verify")
async def verify(request: Request, run_id: str, name: Annotated[str, Form()] = "") -> Response:
    """Verify one checkpoint, or all of them."""
    own = places(request)
    run = own.run(run_id)
    path = _checkpoint(own, run, name) if name else run.path
    title = f"Verify {name or 'all checkpoints'}"
    job = own.jobs.start(title, ["checkpoint", "verify", str(path), "--json"], template=_RESULT, kind="verify", run=run.id)
    return shown(request, job)


@router.post("/checkpoints/convert")
async def convert(
    request: Request,
    run_id: str,
    name: Annotated[str, Form()],
    target: Annotated[str, Form()],
    ema: Annotated[bool, Form()] = False,
) -> Response:
    """Convert a checkpoint to safetensors, as `smalti checkpoint convert` does."""
    own = places(request)
    run = own.run(run_id)
    args = ["checkpoint", "convert", str(_checkpoint(own, run, name)), f"--to={_target(own, target)}", "--json"]
    args += ["--format=safetensors", *(["--ema"] if ema else [])]
    return shown(request, own.jobs.start(f"Convert {name}", args, template=_RESULT, kind="convert", run=run.id))


@router.post("/checkpoints/export")
async def export(
    request: Request,
    run_id: str,
    name: Annotated[str, Form()],
    target: Annotated[str, Form()],
    weights: Annotated[Literal["", "ema", "raw"], Form()] = "",
    format: Annotated[Literal["", "diffusers", "peft", "comfyui", "kohya"], Form()] = "",
    dtype: Annotated[Literal["", "fp32", "bf16", "fp16"], Form()] = "",
    merge: Annotated[bool, Form()] = False,
    single_file: Annotated[bool, Form()] = False,
) -> Response:
    """Export for inference, as `smalti checkpoint export` does."""
    own = places(request)
    run = own.run(run_id)
    args = ["checkpoint", "export", str(_checkpoint(own, run, name)), f"--to={_target(own, target)}", "--json"]
    args += [f"--{weights}"] if weights else []
    args += [f"--format={format}"] if format else []
    args += [f"--dtype={dtype}"] if dtype else []
    args += [*(["--merge"] if merge else []), *(["--single_file"] if single_file else [])]
    return shown(request, own.jobs.start(f"Export {name}", args, template=_RESULT, kind="export", run=run.id))


@router.post("/checkpoints/resume")
async def resume(request: Request, run_id: str, name: Annotated[str, Form()]) -> Response:
    """Start the run again from one of its checkpoints. Raises UserError if it is running, or cannot be resumed from here."""
    own = places(request)
    run = own.run(run_id)
    _checkpoint(own, run, name)
    step = next(entry.step for entry in CheckpointStore(run.directory.checkpoints).all() if entry.path.name == name)
    pid = await asyncio.to_thread(actions.resume, run, own.settings, f"--resume_from_checkpoint={step}")
    answer = RedirectResponse(f"/runs/{run.id}", 303)
    toast(answer, f"Started {run.name} again from step {step} as process {pid}.", "success")
    return answer


def _row(run: FoundRun, entry: Entry) -> Row:
    manifest = entry.manifest
    return Row(
        name=entry.path.name,
        step=entry.step,
        size=manifest.size if manifest else None,
        created=manifest.created if manifest else "",
        kind=_kind(list(manifest.files), manifest.world_size) if manifest else "",
        flags=list(manifest.flags) if manifest else [],
        problem=entry.problem,
        resume=shlex.join(["smalti", "train", str(run.directory.config_file), f"--resume_from_checkpoint={entry.step}"]),
    )


def _kind(files: Sequence[str], ranks: int) -> str:
    """How the weights are stored: by how many ranks of those that trained."""
    writers = len({name.partition("-part-")[0] for name in files if name.startswith("model/")})
    stored = f"sharded over {writers} ranks" if writers > 1 else "full"
    return stored if ranks == writers or ranks == 1 else f"{stored}, of {ranks} ranks"


def _checkpoint(own: Places, run: FoundRun, name: str) -> Path:
    """The checkpoint of this name. HTTPException 404 for any other."""
    folder = run.directory.checkpoints
    if name not in {entry.path.name for entry in CheckpointStore(folder).all()}:
        raise HTTPException(404, "the run has no such checkpoint")
    return below_roots(own.settings, folder / name)


def _target(own: Places, text: str) -> Path:
    """A new folder below the roots. Raises UserError if it is there, or is elsewhere."""
    path = Path(text.strip()).expanduser()
    if not text.strip() or not path.is_absolute():
        raise UserError("the folder to create is not an absolute path", fix=f"such as {own.settings.roots[0] / 'export'}")
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} already exists, and nothing is overwritten", fix="choose a new folder")
    try:
        return below_roots(own.settings, path.parent) / path.name
    except HTTPException as error:
        roots = ", ".join(map(str, own.settings.roots))
        raise UserError(
            f"{path} is not below {roots}", fix="choose a folder there, or start `smalti ui` with others"
        ) from error


# --- errors ---------------------------------------------------------------------------------------------------------


@router.get("/errors")
def errors(request: Request, run_id: str) -> Response:
    own = places(request)
    run = own.run(run_id)
    found = attempts(run.directory)
    return run_page(
        request,
        run_id,
        "errors",
        "places/errors.html",
        attempts=found,
        hangs=hangs(run.directory),
        circuits=open_circuits(run.directory),
        jobs=own.jobs.latest(run=run.id, kind="bundle")[:1],
    )


@router.post("/errors/bundle")
async def bundle(request: Request, run_id: str) -> Response:
    """Write a support bundle, as `smalti doctor RUN --bundle` does."""
    own = places(request)
    run = own.run(run_id)
    folder = own.folder / "bundles"
    make_private(folder)
    name = f"{run.id}-{time.strftime('%Y%m%d-%H%M%S')}.zip"
    args = ["doctor", str(run.path), f"--bundle={folder / name}", "--json"]
    template = "places/bundle_result.html"
    job = own.jobs.start("Support bundle", args, template=template, kind="bundle", run=run.id, name=name, file=folder / name)
    return shown(request, job)


@router.get("/errors/bundle/{name}")
def download(request: Request, run_id: str, name: str) -> Response:
    own = places(request)
    run = own.run(run_id)
    path = own.folder / "bundles" / name
    if "/" in name or not name.startswith(f"{run.id}-") or not path.is_file():
        raise HTTPException(404, "there is no such bundle")
    return FileResponse(path, filename=f"smalti-{name}", media_type="application/zip")
