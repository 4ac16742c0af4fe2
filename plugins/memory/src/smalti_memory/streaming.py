"""Frozen weights that are in host memory and come to the device block by block, just before each block computes.

The frozen tensors of a block are one range of host memory, pinned where that is possible, and arrive as one copy in one of a
few slots on the device. What is not pinned passes through another range that is. While a block computes, the next one is copied
on a side stream: the following one in a forward pass, the one before it where activations are recomputed in the backward pass.
What a slot holds at a turn is used again first, so a step copies every block twice, less the slots of each turn.

Which block follows is learned from the order of calls. It decides only what is copied ahead: a block that is not there when it
is called is copied then.

A block that trains without being recomputed, as one of the middle of SDXL, stays on the device from its first step on: its
backward pass would find other weights in the slot.

Nothing here is in a checkpoint, which has no frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti.parallel import side_stream
from smalti_memory.activations import keeps_all
from smalti_memory.host_memory import HostMemory, Layout, Passage
from smalti_memory.options import SLOTS


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
    stays: bool = False
    """On the device."""


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
        self._slots: list[_Slot] = []
        self._stream: torch.Stream | None = None
        self._next: dict[tuple[bool, int], int] = {}
        self._before: dict[int, int] = {}
        self._last: _Call | None = None
        self._passage: Passage | None = None

    def add(self, module: nn.Module) -> None:
        """Move the frozen tensors of a block with values to host memory; parameters that train and buffers stay where they are.

        They may be quantised: a tensor that consists of others, as torchao's do.
        """
        frozen, layout = list(_frozen(module)), Layout()
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
            self._passage = Passage(self.host.pin(max(paged)))
        for number in range(min(SLOTS, len(self._blocks))):
            self._slots.append(_Slot(number=number, memory=torch.empty(largest, dtype=torch.uint8, device=self.device)))
        for number, module in enumerate(self._modules):
            module.register_forward_pre_hook(partial(self._enter, number), prepend=True)

    def _enter(self, number: int, module: nn.Module, inputs: object) -> None:
        """A block is about to compute: its weights arrive, and those of the next one are sent for."""
        if self._blocks[number].stays:
            return
        call = _Call(number, torch._C._current_graph_task_id() != -1, torch.is_grad_enabled())
        if call.trains and not call.recomputes and keeps_all():
            self._keep(number, module)
            return
        slot = self._slot_of(number) or self._fetch(number)
        if slot.arrived is not None:
            torch.accelerator.current_stream(self.device).wait_event(slot.arrived)
        self._slots.remove(slot)
        self._slots.append(slot)  # the one that was used last
        following = self._following(call)
        if following is not None and not self._blocks[following].stays and self._slot_of(following) is None:
            self._fetch(following)

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
    def _keep(self, number: int, module: nn.Module) -> None:
        """Copy a block to the device for good. Raises UserError if that would be most of what is streamed."""
        block = self._blocks[number]
        block.stays = True
        if sum(len(each.memory) * (1 if each.stays else -1) for each in self._blocks) > 0:
            raise UserError(
                f"{type(module).__name__} trains without recomputing its activations, so its weights cannot be streamed",
                fix="a model whose blocks are recomputed with --gradient_checkpointing, or --no_stream_base",
            )
        if (slot := self._slot_of(number)) is not None:
            slot.holds = None
        memory = block.memory.to(self.device, copy=True)
        for home in block.homes:
            home.table[home.name] = _like(home.tensor, home.put_together(memory))
        self.copied += len(memory)

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
            passage = self._passage if block.paged else None
            source = block.memory if passage is None else passage.through(block.memory)
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))
            with self._stream:
                target.copy_(source, non_blocking=True)
            slot.arrived = self._stream.record_event()
            if passage is not None:
                passage.sent(slot.arrived)
        self.copied += len(block.memory)
        slot.holds = number
        if slot.number not in block.there:
            block.there[slot.number] = [_like(home.tensor, home.put_together(slot.memory)) for home in block.homes]
        for home, tensor in zip(block.homes, block.there[slot.number], strict=True):
            home.table[home.name] = tensor
        return slot


def _frozen(module: nn.Module) -> Iterator[tuple[MutableMapping[str, Any], str, Tensor]]:
    """Parameters that do not train, and tensors that a module keeps as attributes, such as a quantised weight."""
    for part in module.modules():
        for table in (part._parameters, vars(part)):
            for name, value in list(table.items()):
                if isinstance(value, Tensor) and not value.requires_grad:
                    yield table, name, value


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    """The values as a parameter that does not train, if the tensor is one."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
