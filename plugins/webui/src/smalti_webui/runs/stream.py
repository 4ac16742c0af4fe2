"""The events of a run for browsers: server-sent events whose ids are positions, or JSON since a position."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from smalti import UserError
from smalti.rundir import RunDirectory, to_json
from smalti_webui.runs.following import Batch, Follower, Position
from smalti_webui.runs.history import parse

POLL_SECONDS = 0.4
_ENDED_POLL_SECONDS = 2.0
_KEEP_SECONDS = 15.0
_KEEP = b": \n\n"


def requested_position(request: Request, given: str) -> Position:
    """Where to continue: what the browser has seen last, or `given`. Raises UserError if it is not a position."""
    text = request.headers.get("last-event-id") or given or "0"
    position = Position.parse(text)
    if position is None:
        raise UserError(f"{text[:40]!r} is not a position in events.jsonl", fix="use the position of an earlier answer, or 0")
    return position


def event_stream(request: Request, directory: RunDirectory, position: Position) -> Response:
    """All events from a position on, as they come. A message has lines of events, and the position after them as its id."""
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_messages(request, directory, position), media_type="text/event-stream", headers=headers)


async def since(directory: RunDirectory, position: Position) -> Response:
    """The next events as JSON: `position` for the next request, and whether `more` are waiting."""
    batch = await asyncio.to_thread(Follower(directory, position).read)
    status = await asyncio.to_thread(directory.status)
    content = {
        "position": str(batch.position),
        "more": batch.more,
        "replaced": batch.replaced,
        "status": {"condition": status.condition, "message": status.message, "exit_code": status.exit_code},
        "events": [parse(line) for line in batch.lines],
    }
    return Response(to_json(content), media_type=JSONResponse.media_type)


async def _messages(request: Request, directory: RunDirectory, position: Position) -> AsyncIterator[bytes]:
    follower = Follower(directory, position)
    loop = asyncio.get_running_loop()
    shown, sent = "", loop.time()
    yield b"retry: 1000\n\n"
    while not request.app.state.closing:
        batch = await asyncio.to_thread(follower.read)
        if batch.replaced:
            yield b"event: replaced\ndata:\n\n"
            return
        if batch.lines:
            yield message(batch)
            sent = loop.time()
        status, ended = await asyncio.to_thread(_status, directory)
        if status != shown:
            shown = status
            yield f"event: status\ndata: {status}\n\n".encode()
        if batch.more:
            continue
        if loop.time() - sent > _KEEP_SECONDS:
            yield _KEEP
            sent = loop.time()
        await asyncio.sleep(_ENDED_POLL_SECONDS if ended else POLL_SECONDS)


def message(batch: Batch) -> bytes:
    """The lines of a batch as one message of the default type. A carriage return would end a line of it."""
    lines = b"\ndata: ".join(line.replace(b"\r", b" ") for line in batch.lines)
    return b"id: %s\ndata: %s\n\n" % (str(batch.position).encode(), lines.decode("utf-8", "replace").encode())


def _status(directory: RunDirectory) -> tuple[str, bool]:
    try:
        status = directory.status()
    except (UserError, OSError) as error:
        return json.dumps({"condition": "unknown", "message": str(error)}), True
    found: dict[str, Any] = {"condition": status.condition, "message": status.message, "exit_code": status.exit_code}
    if status.condition == "stale":  # the seconds in the message change all the time
        found["message"] = "no heartbeat"
    return json.dumps(found), status.ended
