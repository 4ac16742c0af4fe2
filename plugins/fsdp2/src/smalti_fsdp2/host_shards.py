"""Shards of frozen weights in host memory. Those of one group come to the device as one copy, just before they are gathered.

torch's `CPUOffloadPolicy` takes all parameters of a group: those that train would be there too, the host would wait for their
gradients and step them, and each tensor would be copied by itself. Here torch gathers as usual, on its own streams and as far
ahead as `fsdp_forward_prefetch` says; only the place of the shards differs.

The copy is made on the stream that gathers, and lives until the gather has read it: a part of one block, beside the blocks that
are gathered. Nothing waits for it on the host, unless the shards are pages of a file.

One rank that has whole parameters gathers nothing: torch reads them on the stream that computes, which then waits for the copy.
Without FSDP it would not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from smalti import Config, World
from smalti_fsdp2.pinning import groups_of, move
from smalti_memory.host_memory import HostMemory, Layout, Passage, host_memory
from smalti_memory.options import MemoryOptions, streams_base


class HostShards:
    """The frozen shards of some groups. First `take` them, then train; `copied` counts the bytes that went to the device."""

    def __init__(self, modules: Sequence[nn.Module], device: str, host: HostMemory) -> None:
        self.device = torch.device(device)
        self.host = host
        self.copied = 0
        self._passage: Passage | None = None
        self._groups = [found for module in modules for found in map(frozen_shards, groups_of(module)) if found]
        self._parameters = {id(each.sharded_param) for group in self._groups for each in group}

    def __contains__(self, tensor: object) -> bool:
        """Whether it is one of these parameters, as long as they are on the meta device."""
        return id(tensor) in self._parameters

    @torch.no_grad()
    def take(self) -> None:
        """Move the shards to their place; they are in host memory already, and have no values after it."""
        made = [_Group(self, parameters) for parameters in self._groups]
        paged = [len(group.memory) for group in made if group.paged]
        if paged and self.device.type != "cpu":
            self._passage = Passage(self.host.pin(max(paged)))

    def fetch(self, group: _Group) -> Tensor:
        """A copy of a group's shards on the device, (bytes,), for what is queued in the current stream from here on."""
        passage = self._passage if group.paged else None
        source = group.memory if passage is None else passage.through(group.memory)
        copy = torch.empty_like(source, device=self.device).copy_(source, non_blocking=True)
        if passage is not None:
            passage.sent(torch.accelerator.current_stream(self.device).record_event())
        self.copied += len(copy)
        return copy


class _Group:
    """The frozen shards of what one module gathers: a range of host memory, and its copy while torch asks for them."""

    def __init__(self, shards: HostShards, parameters: Sequence[Any]) -> None:
        layout = Layout()
        places = [layout.place(each._sharded_param_data) for each in parameters]
        self.memory, self.paged = shards.host.take(layout.size)
        self._shards, self._first, self._last = shards, parameters[0], parameters[-1]
        self._copy: Tensor | None = None
        for each, place in zip(parameters, places, strict=True):
            move(each, place(self.memory))
            each.__class__, each.group, each.place = _HostParam, self, place
            each.offload_to_cpu = True  # or else torch would read the shard itself

    def copy_for(self, parameter: object) -> Tensor:
        """The copy. torch asks for all parameters of a group in their order, and once each."""
        if parameter is self._first:
            self._copy = self._shards.fetch(self)
        copy = self._copy
        assert copy is not None
        if parameter is self._last:
            self._copy = None
        return copy


class _HostParam(FSDPParam):
    """torch's record of a parameter whose shard is in a group's range of host memory."""

    group: _Group
    place: Callable[[Tensor], Tensor]

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """What this rank contributes, flat; called in the stream that gathers."""
        shard = self.place(self.group.copy_for(self))
        return [shard if self.param_dtype is None else shard.to(self.param_dtype)]


def host_shards(config: Config, world: World, modules: Sequence[nn.Module]) -> HostShards | None:
    """Those of `modules`, which are in forward order and are gathered one by one; None if the base is not to be streamed.

    The last ones stay on the device as far as `resident_gib` allows: they are needed first on the way back.
    """
    if not streams_base(config):
        return None
    away, room = list(modules), config[MemoryOptions].resident_gib * 2**30
    while away:
        room -= sum(each._sharded_param_data.nbytes for group in groups_of(away[-1]) for each in frozen_shards(group))
        if room < 0:
            break
        away.pop()
    return HostShards(away, world.device, host_memory(config, world))


def frozen_shards(group: Any) -> list[Any]:
    """torch's records of the parameters of a group that do not train."""
    return [each for each in group.fsdp_params if not each.sharded_param.requires_grad]
