"""Giving a sharded model its first weights, tensor by tensor: no rank but the first ever holds more than its shards."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from smalti.checkpoint import Chunks, decode_chunks, encode_chunks, local_chunks
from smalti.models import Weights, first_weight
from smalti.parallel import Communicator
from smalti_fsdp2.host_shards import HostShards
from smalti_fsdp2.pinning import pin_gradients_exactly, pin_shards


@runtime_checkable
class QuantisingWeights(Protocol):
    """`Weights` that quantise some tensors while they are read, each row by itself."""

    def quantised_rows(self, name: str, start: int, stop: int) -> Tensor | None:
        """Rows of such a tensor, as they are in all of it; None for another tensor."""
        ...


@torch.no_grad()
def fill(
    model: nn.Module,
    weights: Weights,
    communicator: Communicator,
    *,
    on_host: bool,
    from_first: bool,
    streamed: HostShards | None = None,
    pin_limit: int = 0,
) -> None:
    """Allocate this rank's shards of a model on the meta device and fill them, and put buffers on the device. *Collective*.

    `on_host` keeps the shards in host memory, up to `pin_limit` bytes of them pinned; else only those that are `streamed` are
    there. With `from_first`, rank 0 alone reads `weights` and sends the others their shards; without, every rank reads each
    tensor and keeps its part of it, and quantises only that of `QuantisingWeights`.
    """
    buffers = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if buffer is not None}
    device = "cpu" if on_host else communicator.world.device
    away: Container[Tensor] = () if streamed is None else streamed

    def allocated(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu" if tensor in away else device)

    model._apply(allocated)  # type: ignore[no-untyped-call]
    kind = torch.device(communicator.world.device).type
    if on_host and kind != "cpu":
        pin_shards(model, kind, pin_limit)
        pin_gradients_exactly()
    if streamed is not None:
        streamed.take()
    fill_buffers(model, buffers, weights, communicator.world.device)
    parameters = dict(model.named_parameters())
    if not from_first or communicator.world.size == 1:
        mine = local_chunks(parameters)
        for name, parameter in parameters.items():
            _local(parameter).copy_(_own_part(weights, name, parameter, mine))
    else:
        _distribute(parameters, weights, communicator)


def fill_buffers(model: nn.Module, buffers: Mapping[str, Tensor], weights: Weights, device: str) -> None:
    """Put these buffers into a model, on `device`: those that `weights` has from there, the others as they are."""
    known = set(weights.names())
    for name, buffer in buffers.items():
        owner, _, own = name.rpartition(".")
        first = weights.get(name) if name in known else buffer
        model.get_submodule(owner)._buffers[own] = first.to(device)


def _distribute(parameters: Mapping[str, Tensor], weights: Weights, communicator: Communicator) -> None:
    """Rank 0 reads one tensor after the other and sends every rank its part, all of them at once.

    From host memory to host memory: between accelerators, each pair of ranks would get a communicator of its own, whose buffers
    stay on the first rank's device.
    """
    held = [decode_chunks(text) for text in communicator.all_gather_text(encode_chunks(local_chunks(parameters)))]
    for name, parameter in parameters.items():
        local = _local(parameter)
        if communicator.world.is_main:
            whole = first_weight(weights, name, parameter).to("cpu", local.dtype)
            parts = [_part(whole, chunks, name).contiguous() for chunks in held]
            under_way = [dist.isend(part, rank) for rank, part in enumerate(parts) if rank > 0 and part.numel()]
            local.copy_(parts[0])
            for message in filter(None, under_way):
                message.wait()
        elif local.numel():
            received = torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format)
            dist.recv(received, 0)
            local.copy_(received)


def _own_part(weights: Weights, name: str, parameter: Tensor, mine: Chunks) -> Tensor:
    if isinstance(weights, QuantisingWeights) and name in mine:
        start = mine[name].offsets[0]
        rows = weights.quantised_rows(name, start, start + mine[name].shape[0])
        if rows is not None:
            return rows
    return _part(first_weight(weights, name, parameter), mine, name)


def _part(whole: Tensor, chunks: Chunks, name: str) -> Tensor:
    chunk = chunks.get(name)
    if chunk is None:
        return whole.flatten()[:0]
    return whole[_slices(chunk.offsets, chunk.shape)]


def _slices(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
