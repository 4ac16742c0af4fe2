"""The exponential moving average of the weights, kept in fp32 beside them.

Also what it and optimizers need of sharded parameters: this rank's parts, and pieces of bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

import torch
from torch import Tensor

from smalti.config import Config, TrainingOptions
from smalti.parallel import Parallel, local_part as local_part, pins_memory, side_stream, use_device

_PIECE_BYTES = 64 * 2**20
"""Bytes of tensors that are worked on together, as long as single ones are not larger."""


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`local_part` of each."""
    return [local_part(tensor) for tensor in tensors]


def grouped(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Indices of neighbours, of these sizes in bytes, that fit into one piece together; or of one that is larger."""
    group: list[int] = []
    taken = 0
    for index, size in enumerate(sizes):
        if group and taken + size > _PIECE_BYTES:
            yield group
            group, taken = [], 0
        group.append(index)
        taken += size
    if group:
        yield group


class WeightAverage(Protocol):
    """Averaged weights beside those that train, for validation and exports: an `Ema`, or what an optimizer averages itself.

    Such an optimizer has a method `average`, which takes `TrainingState.master_weights` and returns this.
    """

    @property
    def shadows(self) -> dict[str, Tensor]:
        """The averaged weights of the last step, by parameter name, or copies of them. A checkpoint is read into them."""
        ...

    @property
    def storage(self) -> Iterable[Tensor]:
        """The tensors that are kept for it all the time."""
        ...

    def update(self, step: int) -> None:
        """Called after optimizer step `step` (counted from 1). The weights may not change after it before `wait`."""
        ...

    def wait(self, seconds: float | None = None) -> bool:
        """Until an update under way has come to its end; whether it did in this time. Raises what has made it fail."""
        ...

    def restart(self) -> None:
        """Begin again from the weights as they are: for a run that resumes from a checkpoint without averaged weights."""
        ...

    def average_parameters(self) -> AbstractContextManager[None]:
        """The model has the averaged weights inside this block; afterwards its own again, bit for bit."""
        ...


class Ema:
    """Shadows of this rank's part of the weights that train (`TrainingState.master_weights`), plain tensors or DTensors.

    The decay warms up as min(decay, (1 + step) / (10 + step)), so that the EMA forgets the first weights quickly. Kept in
    fp32 because in bf16 an update smaller than 1/256 of the weight is lost to rounding. `device` is where the shadows are, None
    beside the parameters. Shadows in host memory of weights on an accelerator are updated in a thread, beside the next step.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, device: str | None = None) -> None:
        self.decay = decay
        self._live = dict(parameters)
        self._shadows = {
            name: parameter.detach().to(device or parameter.device, torch.float32, copy=True)
            for name, parameter in self._live.items()
        }
        self._copies: HostCopies | None = None
        self._running: Future[None] | None = None
        there = [str(each.device) for each in self._live.values() if each.device.type != "cpu"]
        if device == "cpu" and there and side_stream(there[0]) is not None:
            self._copies = HostCopies(self._local_weights(), there[0])
            self._thread = ThreadPoolExecutor(1, "smalti-ema", initializer=use_device, initargs=(there[0],))

    @property
    def shadows(self) -> dict[str, Tensor]:
        """The EMA weights of the last step, by parameter name."""
        self.wait()
        return self._shadows

    @property
    def storage(self) -> Iterable[Tensor]:
        """Their tensors, whatever is being done to them: for whoever asks how large they are."""
        return self._shadows.values()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the shadows towards the weights after optimizer step `step` (counted from 1).

        The weights may not change after it before `wait`.
        """
        self.wait()
        decay = min(self.decay, (1 + step) / (10 + step))
        shadows, live = [local_part(shadow) for shadow in self._shadows.values()], self._local_weights()
        if self._copies is not None:
            self._copies.follow()
            self._running = self._thread.submit(self._copies.average, shadows, live, 1 - decay)
            return
        for group in grouped([shadow.nbytes for shadow in shadows]):  # what is copied to fp32 or here goes before the next
            _move(shadows, None, group, [live[number].to(shadows[number].device) for number in group], 1 - decay)

    def wait(self, seconds: float | None = None) -> bool:
        """Until an update under way has come to its end; whether it did in this time. Raises what has made it fail."""
        if self._running is None:
            return True
        if wait([self._running], timeout=seconds).not_done:
            return False
        self._running.result()  # kept if it failed: shadows that are half updated are never taken for whole
        self._running = None
        return True

    def _local_weights(self) -> list[Tensor]:
        return [local_part(parameter.detach()) for parameter in self._live.values()]

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again from the weights as they are: for a run that resumes from a checkpoint without EMA."""
        for name, shadow in self.shadows.items():
            local_part(shadow).copy_(local_part(self._live[name]))

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """The model has the EMA weights inside this block; afterwards its own again, bit for bit."""
        kept = {name: local_part(parameter).detach().clone() for name, parameter in self._live.items()}
        try:
            self._put(self.shadows)
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._live.items():
            local_part(parameter).copy_(local_part(values[name]))


class HostCopies:
    """Weights of an accelerator in host memory, a few at a time: while some are copied, those before them are averaged.

    `device` is theirs; on the CPU nothing is beside anything else.
    """

    def __init__(self, weights: Sequence[Tensor], device: str) -> None:
        self._stream = side_stream(device)
        self._groups = [list(group) for group in grouped([_aligned(weight.nbytes) for weight in weights])]
        room = max((sum(_aligned(weights[number].nbytes) for number in group) for group in self._groups), default=0)
        kind = torch.device(device).type
        self._buffers = [torch.empty(room, dtype=torch.uint8, pin_memory=pins_memory(kind)) for _ in range(2)]

    def follow(self) -> None:
        """From the loop's thread: what it has asked of the accelerator up to now comes before any copy."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    @torch.no_grad()
    def average(self, shadows: Sequence[Tensor], weights: Sequence[Tensor], share: float) -> None:
        """Move the shadows by this share of the way to the weights. The weights may change once it returns."""
        copied: tuple[torch.Event | None, list[int], list[Tensor]] | None = None
        for turn, group in enumerate(self._groups):
            copies = _pieces(self._buffers[turn % 2], [weights[number] for number in group])
            with self._stream or nullcontext():
                for number, copy in zip(group, copies, strict=True):
                    copy.copy_(weights[number], non_blocking=self._stream is not None)
            event = self._stream.record_event() if self._stream is not None else None
            if copied is not None:
                _move(shadows, *copied, share)
            copied = event, group, copies
        if copied is not None:
            _move(shadows, *copied, share)


def _move(
    shadows: Sequence[Tensor], copied: torch.Event | None, group: Sequence[int], copies: list[Tensor], share: float
) -> None:
    if copied is not None:
        copied.synchronize()
    torch._foreach_lerp_([shadows[number] for number in group], [copy.to(torch.float32) for copy in copies], share)


def _pieces(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Room in a buffer for tensors of the shapes and types of these, and of their strides, if they have no gaps."""
    pieces, taken = [], 0
    for tensor in like:
        piece = buffer[taken : taken + tensor.nbytes].view(tensor.dtype)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        dense = last + 1 == tensor.numel()
        pieces.append(piece.as_strided(tensor.shape, tensor.stride()) if dense else piece.view(tensor.shape))
        taken += _aligned(tensor.nbytes)
    return pieces


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


def build_ema(config: Config, parallel: Parallel, optimizer: torch.optim.Optimizer) -> WeightAverage | None:
    """The optimizer's own average, or an EMA if the options want one."""
    options = config[TrainingOptions]
    if (average := getattr(optimizer, "average", None)) is not None:
        return cast(WeightAverage, average(parallel.state.master_weights()))
    if not options.use_ema:
        return None
    return Ema(parallel.state.master_weights(), options.ema_decay, "cpu" if options.ema_device == "cpu" else None)
