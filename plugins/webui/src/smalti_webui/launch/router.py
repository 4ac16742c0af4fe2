"""The pages of the launch: the dry run of a draft, starting it, the queue, and what was started."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Form
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from smalti import UserError
from smalti.config import as_toml
from smalti.system import load_json
from smalti_webui.configs.drafts import Draft
from smalti_webui.hardware.edited import Edited
from smalti_webui.launch.devices import Devices, local_devices
from smalti_webui.launch.dry_run import DryRun, dry_run_of
from smalti_webui.launch.launches import Launch, Progress, Request as Wanted, progress_of
from smalti_webui.launch.queue import Queue
from smalti_webui.server.messages import toast
from smalti_webui.server.processes import run_cli
from smalti_webui.server.templating import page, partial

router = APIRouter(prefix="/launch")

_CHECKING = 600.0
_SHOWN = 20
Word = Annotated[str, Form(max_length=200)]


def queue_of(request: Request) -> Queue:
    """The queue of this server's user."""
    return Queue(request.app.state.settings)


async def _edited(request: Request, draft: str) -> Edited:
    settings = request.app.state.settings
    return await asyncio.to_thread(lambda: Edited(Draft.load(settings, draft), settings))


# --- the queue and what was started: addresses before those of drafts -------------------------------------------------


def _overview(queue: Queue) -> dict[str, Any]:
    """What waits, with its reasons, and what was started."""
    devices = local_devices()
    entries = queue.entries()
    waiting = [
        (entry.request, queue.reason(entry.request, devices) if place == 0 else f"waits for {entries[0].request.name} to start")
        for place, entry in enumerate(entries)
    ]
    launches = [(launch, progress_of(queue.store, launch)) for launch in queue.store.all()[:_SHOWN]]
    return {"waiting": waiting, "launches": launches, "devices": devices, "paused": queue.paused}


@router.get("")
async def overview(request: Request) -> HTMLResponse:
    """The queue and the launches."""
    context = await asyncio.to_thread(_overview, queue_of(request))
    return page(request, "launch/queue.html", title="Queue", here="launch", **context)


@router.get("/list")
async def overview_list(request: Request) -> HTMLResponse:
    """The same without the frame, for the page to refresh itself."""
    return partial(request, "launch/queue-list.html", **await asyncio.to_thread(_overview, queue_of(request)))


@router.post("/queue/{action}")
async def change_queue(request: Request, action: str, id: Word = "") -> Response:
    """Pause, continue, move up or remove."""
    queue = queue_of(request)
    response = RedirectResponse("/launch", 303)
    if action in ("pause", "continue"):
        await asyncio.to_thread(queue.pause, paused=action == "pause")
        toast(response, "the queue is paused: nothing is started" if action == "pause" else "the queue continues", "info")
    elif action == "up":
        await asyncio.to_thread(queue.move_up, id)
    elif action == "remove":
        removed = await asyncio.to_thread(queue.remove, id)
        queue.store.discard(removed)
        toast(response, f"{removed.name} was removed from the queue")
    else:
        raise UserError(f"the queue knows no action {action!r}", fix="pause, continue, up or remove")
    return response


def _started(queue: Queue, identity: str) -> dict[str, Any]:
    launch: Launch = queue.store.find(identity)
    progress: Progress = progress_of(queue.store, launch)
    return {"launch": launch, "progress": progress, "log": queue.store.log(identity)}


@router.get("/started/{identity}")
async def started(request: Request, identity: str) -> HTMLResponse:
    """A launch: how far it is, and the last lines of its log."""
    context = await asyncio.to_thread(_started, queue_of(request), identity)
    return page(request, "launch/started.html", title=context["launch"].request.name, here="launch", **context)


@router.get("/started/{identity}/progress")
async def started_progress(request: Request, identity: str) -> Response:
    """The same without the frame. Once the run has begun, the page of the run takes over."""
    context = await asyncio.to_thread(_started, queue_of(request), identity)
    response = partial(request, "launch/progress.html", **context)
    if context["progress"].run_id and context["progress"].state == "running":
        response.headers["HX-Redirect"] = f"/runs/{context['progress'].run_id}"
    return response


# --- a draft ----------------------------------------------------------------------------------------------------------


@router.get("/{draft}")
async def show(request: Request, draft: str) -> HTMLResponse:
    """The page of a draft; the checks follow."""
    subject = await _edited(request, draft)
    return page(request, "launch/page.html", title="Launch", here="configs", draft=subject.draft)


@router.get("/{draft}/checks")
async def checks(request: Request, draft: str) -> HTMLResponse:
    """The dry run of a draft."""
    subject = await _edited(request, draft)
    words = ["train", subject.file, "--dry-run", "--json"]
    done = await run_cli(words, _CHECKING, cwd=subject.draft.folder)
    answer = None if done.json is None else load_json(subject.named(done.stdout))
    found = dry_run_of(answer, subject.named(done.stderr), done.code, subject.output_dir)
    wanted = _wanted_gpus(subject, devices := await asyncio.to_thread(local_devices))
    return partial(
        request,
        "launch/checks.html",
        draft=subject.draft,
        dry_run=found,
        settings_json=json.dumps(found.settings, indent=2) if found.settings else "",
        accelerate_text=_yaml(found),
        toml="" if subject.problems else as_toml(subject.config),
        shell="" if subject.problems else _shell(subject.config.flags()),
        waits=await asyncio.to_thread(_waits, request, subject, wanted, devices),
    )


@router.post("/{draft}/start")
async def start(request: Request, draft: str) -> Response:
    """Start the draft now."""
    subject = await _edited(request, draft)
    launch = await asyncio.to_thread(_start, queue_of(request), subject)
    response = RedirectResponse(f"/launch/started/{launch.id}", 303)
    toast(response, f"{launch.request.name} was started", "info")
    return response


@router.post("/{draft}/queue")
async def enqueue(request: Request, draft: str) -> Response:
    """Append the draft to the queue."""
    subject = await _edited(request, draft)
    queue = queue_of(request)
    wanted = await asyncio.to_thread(lambda: _new(queue, subject, local_devices()))
    await asyncio.to_thread(queue.add, wanted)
    response = RedirectResponse("/launch", 303)
    toast(response, f"{wanted.name} was added to the queue")
    return response


def _start(queue: Queue, subject: Edited) -> Launch:
    devices = local_devices()
    wanted = _new(queue, subject, devices)
    try:
        return queue.start(wanted, devices)
    except UserError:
        queue.store.discard(wanted)
        raise


def _new(queue: Queue, subject: Edited, devices: Devices) -> Wanted:
    return queue.store.new(
        name=subject.draft.name,
        text=subject.draft.toml(),
        folder=subject.draft.folder,
        output_dir=subject.output_dir,
        gpus=_wanted_gpus(subject, devices),
        draft=subject.draft.id,
    )


def _waits(request: Request, subject: Edited, gpus: int, devices: Devices) -> str:
    """What a launch in the queue would wait for now."""
    queue = queue_of(request)
    if entries := queue.entries():
        return f"waits for {len(entries)} before it"
    probe = Wanted(
        id="", name="", config=subject.draft.folder, folder=subject.draft.folder, output_dir=subject.output_dir, gpus=gpus
    )
    return queue.reason(probe, devices)


def _wanted_gpus(subject: Edited, devices: Devices) -> int:
    """GPUs of this node that a draft needs: none on a node without, or with --use_cpu."""
    return 0 if subject.on_cpu or not devices.gpus else subject.local_ranks


def _shell(flags: Sequence[str]) -> str:
    """A launch as a command for a shell, a flag on each line."""
    return " \\\n    ".join(["smalti train", *map(shlex.quote, flags)])


def _yaml(found: DryRun) -> str:
    if not found.accelerate:
        return ""
    import yaml

    return str(yaml.safe_dump(dict(found.accelerate), sort_keys=True))
