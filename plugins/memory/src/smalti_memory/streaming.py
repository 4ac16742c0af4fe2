"""Frozen weights that are in host memory and come to the device block by block, just before each block computes.

The frozen tensors of a block are one range of host memory, pinned where that is possible, and arrive as one copy in one of a
few slots on the device. What is not pinned passes through another range that is. While a block computes, the next one is copied
on a side stream: the following one in a forward pass, the one before it where activations are recomputed in the backward pass.
What a slot holds at a turn is used again first, so a step copies every block twice, less the slots of each turn.

Which block follows is learned from the order of calls. It decides only what is copied ahead: a block that is not there when it
is called is copied then.

Nothing here is in a checkpoint, which has no frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from smalti import UserError
from smalti.parallel import side_stream
from smalti_memory.activations import keeps_all
from smalti_memory.host_memory import HostMemory
from smalti_memory.options import SLOTS

_RESIDENT = 0.25
"""Of the bytes of all blocks, those of blocks that may stay on the device because they are not recomputed."""
_ALIGNMENT = 256
"""Bytes to which tensors within a block are aligned: what vectorised kernels want at most."""


@dataclass(frozen=True, kw_only=True)
class _Home:
    """Where a frozen tensor is found: `table[name]` is what its module computes with."""

    table: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    """In host memory; a `Parameter` if it was one."""
    put_together: Callable[[Tensor], Tensor]
    """From a copy of the block's range of memory (bytes,), anywhere, the tensor in it."""


@dataclass(kw_only=True, eq=False)
class _Block:
    memory: Tensor
    """The block's range of host memory, (bytes,)."""
    paged: bool
    """It is the pages of a file."""
    homes: list[_Home]
    there: dict[int, list[Tensor]] = field(default_factory=dict)
    """By slot, the tensors of `homes` in it."""


@dataclass(kw_only=True, eq=False)
class _Slot:
    number: int
    memory: Tensor
    holds: int | None = None
    arrived: torch.Event | None = None


@dataclass(frozen=True)
class _Call:
    block: int
    recomputes: bool
    trains: bool


class BlockStream:
    """Streams the frozen weights of blocks to `device`. First `add` each block, then `start`.

    `copied` counts the bytes that were sent to the device. `host` is the memory that they come from.
    """

    def __init__(self, device: str, host: HostMemory) -> None:
        self.device = torch.device(device)
        self.copied = 0
        self.host = host
        self._blocks: list[_Block] = []
        self._modules: list[nn.Module] = []
        self._resident: set[int] = set()
        """Blocks that are not recomputed, as the first one in the middle of SDXL's U-Net."""
        self._slots: list[_Slot] = []
        self._stream: torch.Stream | None = None
        self._next: dict[tuple[bool, int], int] = {}
        self._before: dict[int, int] = {}
        self._last: _Call | None = None
        self._passage: Tensor | None = None
        """Pinned memory through which pages of files go to the device."""
        self._passed: torch.Event | None = None
        """When it is free again."""

    def add(self, module: nn.Module) -> None:
        """Move the frozen tensors of a block with values to host memory; parameters that train and buffers stay where they are.

        They may be quantised: a tensor that consists of others, as torchao's do.
        """
        frozen, layout = list(_frozen(module)), _Layout()
        tensors = {id(tensor): tensor for _, _, tensor in frozen}
        made = {key: layout.place(tensor) for key, tensor in tensors.items()}  # once, where two modules share one
        memory, paged = self.host.take(layout.size)
        layout.fill(memory)
        here = {key: _like(tensor, made[key](memory)) for key, tensor in tensors.items()}
        homes = []
        for table, name, tensor in frozen:
            table[name] = here[id(tensor)]
            homes.append(_Home(table=table, name=name, tensor=here[id(tensor)], put_together=made[id(tensor)]))
        self._blocks.append(_Block(memory=memory, paged=paged, homes=homes))
        self._modules.append(module)

    def start(self) -> None:
        """Allocate the slots; from here on each block fetches its weights when it is called."""
        largest = max((len(block.memory) for block in self._blocks), default=0)
        self._stream = side_stream(str(self.device))
        if self._stream is not None and (paged := [len(block.memory) for block in self._blocks if block.paged]):
            self._passage = self.host.pin(max(paged))
        for number in range(min(SLOTS, len(self._blocks))):
            self._slots.append(_Slot(number=number, memory=torch.empty(largest, dtype=torch.uint8, device=self.device)))
        for number, module in enumerate(self._modules):
            module.register_forward_pre_hook(partial(self._enter, number), prepend=True)

    def _enter(self, number: int, module: nn.Module, inputs: object) -> None:
        """A block is about to compute: its weights arrive, and those of the next one are sent for."""
        call = _Call(number, torch._C._current_graph_task_id() != -1, torch.is_grad_enabled())
        if number not in self._resident and call.trains and not call.recomputes and keeps_all():
            self._settle(number, module)
        if number in self._resident:
            return
        slot = self._slot_of(number) or self._fetch(number)
        if slot.arrived is not None:
            torch.accelerator.current_stream(self.device).wait_event(slot.arrived)
        self._slots.remove(slot)
        self._slots.append(slot)  # the one that was used last
        following = self._following(call)
        if following is not None and following not in self._resident and self._slot_of(following) is None:
            self._fetch(following)

    @torch.no_grad()
    def _settle(self, number: int, module: nn.Module) -> None:
        """From here on the block's weights stay on the device: a backward pass needs them that does not call it again."""
        self._resident.add(number)
        sizes = [len(block.memory) for block in self._blocks]
        if sum(sizes[each] for each in self._resident) > _RESIDENT * sum(sizes):
            raise UserError(
                f"{type(module).__name__} trains without recomputing its activations, so its weights cannot be streamed",
                fix="a model whose blocks are recomputed with --gradient_checkpointing, or --no_stream_base",
            )
        if (slot := self._slot_of(number)) is not None:
            slot.holds = None
        memory = self._blocks[number].memory.to(self.device, copy=True)
        for home in self._blocks[number].homes:
            home.table[home.name] = _like(home.tensor, home.put_together(memory))

    def _following(self, call: _Call) -> int | None:
        """The block that will be called next, as far as that is known."""
        last, self._last = self._last, call
        if last is not None and not last.recomputes and not call.recomputes and last.trains == call.trains:
            self._next[call.trains, last.block] = call.block
            if call.trains:
                self._before[call.block] = last.block
        return self._before.get(call.block) if call.recomputes else self._next.get((call.trains, call.block))

    def _slot_of(self, number: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.holds == number), None)

    @torch.no_grad()
    def _fetch(self, number: int) -> _Slot:
        """Copy a block to the slot that was used longest ago, once all that was queued so far has been computed."""
        slot, block = self._slots[0], self._blocks[number]
        if slot.holds is not None:
            for home in self._blocks[slot.holds].homes:
                home.table[home.name] = home.tensor
        target = slot.memory[: len(block.memory)]
        if self._stream is None:
            target.copy_(block.memory)
        else:
            source = self._pinned(block)
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
            with self._stream:
                target.copy_(source, non_blocking=True)
            slot.arrived = self._stream.record_event()
            if block.paged:
                self._passed = slot.arrived
        self.copied += len(block.memory)
        slot.holds = number
        if slot.number not in block.there:
            block.there[slot.number] = [_like(home.tensor, home.put_together(slot.memory)) for home in block.homes]
        for home, tensor in zip(block.homes, block.there[slot.number], strict=True):
            home.table[home.name] = tensor
        return slot

    def _pinned(self, block: _Block) -> Tensor:
        """The block's range, or a copy of it in pinned memory. The host waits until what passed there before has arrived."""
        if not block.paged or self._passage is None:
            return block.memory
        if self._passed is not None:
            self._passed.synchronize()
        return self._passage[: len(block.memory)].copy_(block.memory)


def _frozen(module: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str, Tensor]]:
    """Parameters that do not train, and tensors that a module keeps as attributes, such as a quantised weight."""
    for part in module.modules():
        for table in (part._parameters, vars(part)):
            for name, value in list(table.items()):
                if isinstance(value, Tensor) and not value.requires_grad:
                    yield table, name, value


class _Layout:
    """Where in a range of memory the parts of tensors lie."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[tuple[int, Tensor]] = []

    def place(self, tensor: Tensor) -> Callable[[Tensor], Tensor]:
        """Reserve room; returns what puts the tensor together from such a range, (bytes,)."""
        shape, stride, dtype, kind = tensor.shape, tensor.stride(), tensor.dtype, type(tensor)
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = {name: self.place(getattr(tensor, name)) for name in names}
            return lambda memory: kind.__tensor_unflatten__(
                {name: build(memory) for name, build in inner.items()}, context, shape, stride
            )
        begin, end = self.size, self.size + tensor.nbytes
        self._parts.append((begin, tensor.detach()))
        self.size = -(-end // _ALIGNMENT) * _ALIGNMENT
        return lambda memory: memory[begin:end].view(dtype).view(shape)

    def fill(self, memory: Tensor) -> None:
        """Copy the parts of all tensors into a range."""
        for begin, part in self._parts:
            memory[begin : begin + part.nbytes].view(part.dtype).view(part.shape).copy_(part)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """The values as a parameter that does not train, if the tensor is one."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
