"""A copy of the state in the memory of the host, made while the next step computes.

Weights, moments and averages do not change before the next optimizer step, so the copy may take as long as forward and backward
do. A rank copies only what it is going to write.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smalti.checkpoint.agreement import together
from smalti.checkpoint.planning import decode_pieces, divide, encode_pieces, local_pieces
from smalti.checkpoint.snapshot import Snapshot
from smalti.parallel import Ranks


class Staging:
    """Buffers in host memory, kept from one save to the next; pinned where tensors come from an accelerator."""

    def __init__(self, device: str) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream = torch.Stream(device) if torch.device(device).type != "cpu" else None

    def follow(self) -> None:
        """From the loop's thread: what it has asked of the accelerator up to now comes before any copy."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    def copy(self, snapshot: Snapshot, ranks: Ranks) -> Snapshot:
        """The snapshot in host memory, good until the next call. *Collective*.

        Tensors that another rank writes stay on the meta device: they have a shape there, and no contents.
        """
        tensors = snapshot.tensors()
        held = [decode_pieces(text) for text in together(ranks, lambda: encode_pieces(local_pieces(tensors)))]
        mine = divide(held)[ranks.world.rank]
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items() if name in mine}
        with self._stream or nullcontext():
            for name, buffer in self._buffers.items():
                _local(buffer).copy_(_local(tensors[name]), non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()
        other = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items() if name not in mine}
        return snapshot.replaced({**self._buffers, **other})

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.dtype == like.dtype and _local(kept).shape == _local(like).shape:
            return kept
        pinned = self._stream is not None and like.device.type != "cpu"
        return torch.empty_like(like.detach(), device="cpu", pin_memory=pinned, requires_grad=False)


def frozen(snapshot: Snapshot, names: Collection[str]) -> Snapshot:
    """With copies of the model's tensors of these names: buffers, which a forward pass may change."""
    model = snapshot.state.model
    copies = {f"model/{name}": model[name].detach().clone() for name in names if name in model}
    return snapshot.replaced(snapshot.tensors() | copies)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
