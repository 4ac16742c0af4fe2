"""Which rank writes which piece of which tensor.

Every rank says what it holds; from that, every rank computes the same division for all. A shard has one holder and is written
there. What several ranks hold alike (replicated parameters, replicas of a shard) is written once, by whichever of them has
least to write.

The pieces that a rank holds are told by torch's distributed-checkpoint planner, which knows every kind of sharded tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from smalti.checkpoint.dtypes import NAMES
from smalti.checkpoint.format.safetensors_layout import Piece, join
from smalti.errors import CheckpointError

Pieces = dict[str, Piece]
"""One rank's pieces by tensor name; a rank holds at most one piece of a tensor."""


def local_pieces(tensors: Mapping[str, Tensor]) -> Pieces:
    """What this rank holds of each tensor: its shard of a DTensor, which may be empty, and the whole of a plain one."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return {item.index.fqn: _piece(item) for item in planner.create_local_plan().items}


def encode_pieces(pieces: Pieces) -> str:
    """For the way to the other ranks."""
    return json.dumps([[name, p.dtype, p.shape, p.offsets] for name, p in pieces.items()], separators=(",", ":"))


def decode_pieces(text: str) -> Pieces:
    return {
        name: Piece(dtype=dtype, shape=tuple(shape), offsets=tuple(offsets)) for name, dtype, shape, offsets in json.loads(text)
    }


def divide(held: Sequence[Pieces]) -> list[set[str]]:
    """For each rank, the tensors of which it writes its piece, given what all ranks hold, in rank order.

    Balanced by bytes. The same on every rank.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, pieces in enumerate(held):
        for name, piece in pieces.items():
            holders.setdefault((name, piece.offsets), []).append(rank)
    writes: list[set[str]] = [set() for _ in held]
    load = [0] * len(held)
    # Shards first, as they leave no choice; then the largest replicas, so that small ones can even out the rest.
    order = sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -held[item[1][0]][item[0][0]].size, item[0]))
    for (name, _), ranks in order:
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += held[writer][name].size
        writes[writer].add(name)
    return writes


def check_whole(held: Sequence[Pieces], tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError when what the ranks hold does not make up the tensors: a gap, an overlap, another shape.

    Loading would see such a tensor as a smaller one.
    """
    pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
    for rank_pieces in held:
        for name, piece in rank_pieces.items():
            pieces.setdefault(name, {})[piece.offsets] = piece
    for name, tensor in tensors.items():
        if name not in pieces or join(name, list(pieces[name].values())).shape != tuple(tensor.shape):
            raise CheckpointError(f"the ranks together do not hold the whole of {name}")


def memory(tensor: Tensor) -> memoryview:
    """The bytes of what this rank holds of a tensor, row by row; a copy only where it is not stored like that on the CPU."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    dtype = NAMES.get(data.properties.dtype)
    if dtype is None:
        raise CheckpointError(f"{item.index.fqn} is of type {data.properties.dtype}, which a checkpoint cannot hold")
    return Piece(dtype=dtype, shape=tuple(data.chunk.sizes), offsets=tuple(data.chunk.offsets))
