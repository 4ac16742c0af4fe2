"""Communication between ranks over gloo: short messages in host memory, which never wait for the accelerator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed.distributed_c10d import _world

from smalti.types import World

if TYPE_CHECKING:
    from smalti.parallel.late_ranks import Presence

_SLICE = timedelta(seconds=1)
_NO_TIMEOUT = timedelta(days=365)
_UNUSED_TAG = 0x5A17
"""The tag of a message that nobody sends."""


class BrokenGroupError(dist.DistError):
    """This rank has broken its connections to the others, because one of them is lost."""


@dataclass(frozen=True, kw_only=True)
class GlooCommunicator:
    """`AbortableCommunicator` over a gloo group of all ranks; `group` is None in a single process.

    With `presence`, a call waits for ranks that work as long as that takes; without it, as long as the time-out of the group.
    """

    world: World
    group: dist.ProcessGroup | None
    presence: Presence | None = None

    def all_reduce_max(self, code: int) -> int:
        if self.group is None:
            return code
        word, options = torch.tensor(code, dtype=torch.int64), AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._complete(partial(self.group.allreduce, [word], options), options)
        return int(word)

    def all_gather_text(self, value: str) -> Sequence[str]:
        if self.group is None:
            return [value]
        text = value.encode()
        lengths = [int(length) for length in self._gather(torch.tensor([len(text)]))]
        padded = torch.frombuffer(bytearray(text.ljust(max(*lengths, 1))), dtype=torch.uint8)
        gathered = zip(self._gather(padded), lengths, strict=True)
        return [each[:length].numpy().tobytes().decode() for each, length in gathered]

    def _gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        assert self.group is not None
        found, options = [torch.empty_like(value) for _ in range(self.world.size)], AllgatherOptions()
        self._complete(partial(self.group.allgather, [found], [value], options), options)
        return found

    def _complete(self, begin: Callable[[], dist.Work], options: AllreduceOptions | AllgatherOptions) -> None:
        """Begin a call and wait for its end. Raises BrokenGroupError if the ranks that are late are given up."""
        if self.presence is None:
            begin().wait()
            return
        late, options.timeout = self.presence.begin_call(), _NO_TIMEOUT
        work = begin()
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises if the call has failed, and not if it was completed just now
                    return
            else:
                return
            if reason := late.given_up():
                break_connections(self.group)  # so that what has begun ends
                raise BrokenGroupError(reason)

    def barrier(self) -> None:
        self.all_reduce_max(0)

    def abort(self) -> None:
        break_connections(self.group)


def break_group(seconds: float) -> None:
    """Abort all communication of this process, on gloo and on an accelerator, permanently. From any thread.

    NCCL's kernels then end with arbitrary outputs, and raise no error where a thread waited for them. Its abort may block on
    the device: this returns after at most `seconds`.
    """
    break_all_connections()
    aborting = threading.Thread(target=_abort_accelerators, name="smalti-abort", daemon=True)
    aborting.start()
    aborting.join(seconds)


def _abort_accelerators() -> None:
    """What `torch.distributed._abort_process_group` does, except that the main thread still knows the group."""
    groups = [(group, device) for group in reversed(list(_world.pg_map)) for device in group._device_types]
    backends: list[Any] = [group._get_backend(device) for group, device in groups if device.type != "cpu"]
    grouped = next((each for each in backends if hasattr(each, "_group_start")), None)
    if grouped is not None:  # else NCCL's communicators could wait for each other
        grouped._group_start()
    for backend in backends:
        with suppress(RuntimeError):
            backend.abort()
    if grouped is not None:
        grouped._group_end()


def break_all_connections() -> None:
    """`break_connections` for every process group of this process."""
    for group in list(_world.pg_map):
        break_connections(group)


def break_connections(group: dist.ProcessGroup | None) -> None:
    """Close this rank's gloo connections in a group, permanently: calls that wait on them, on any rank, fail at once.

    The backend of an accelerator in the same group is not affected. `ProcessGroup.abort` has no effect on gloo (torch 2.13),
    but gloo closes all its connections when a message times out.
    """
    if group is None or not _has_gloo(group):
        return
    for other in range(group.size()):
        if other != group.rank():
            with suppress(RuntimeError):  # it times out, or the connection is closed already
                group.recv([torch.zeros(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))


def _has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the group uses gloo for tensors in host memory; its name also depends on the backend for accelerators."""
    try:
        return str(group._get_backend(torch.device("cpu")).name()) == "gloo"
    except RuntimeError:  # the group is for accelerators only
        return False


def is_connection_error(error: BaseException) -> bool:
    """Whether an exception means that communication between ranks failed, as opposed to this rank's own work.

    torch has `DistError` for that, but raises gloo's errors as `RuntimeError`; their messages begin with the place in gloo's
    source or name its connections.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(
        word in str(error) for word in ("/gloo/", "Application timeout caused pair closure")
    )
