"""Whether the browser still waits for an answer. Pages ask that the commands on which they wait end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")


class _Departed(Protocol):
    def __call__(self) -> Awaitable[None]: ...


_departed: ContextVar[_Departed | None] = ContextVar("departed", default=None)


class Departures:
    """Makes it known to `while_waited_for` when the browser closes the connection before it has its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answered = False

        async def departed() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if answered:  # what continues in the background is not for the browser
                await asyncio.Event().wait()

        async def sending(message: Message) -> None:
            nonlocal answered
            answered = answered or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        token = _departed.set(departed)
        try:
            await self._app(scope, receive, sending)
        finally:
            answered = True
            _departed.reset(token)


async def while_waited_for(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the browser goes away: then HTTPException, which nobody reads.

    Call it when the body of the request has been read.
    """
    departed = _departed.get()
    if departed is None:
        return await work
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(departed())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPException(408, "the browser has gone")
    finally:
        task.cancel()
        left.cancel()
        await asyncio.gather(task, left, return_exceptions=True)
