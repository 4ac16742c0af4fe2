"""Which rank writes which piece of which tensor.

Every rank says what it holds; from that, every rank computes the same division for all. A shard has one holder and is written
there. What several ranks hold alike (replicated parameters, replicas of a shard) is written once, by whichever of them has
least to write.

The pieces that a rank holds are told by torch's distributed-checkpoint planner, which knows every kind of sharded tensor.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from smalti.checkpoint.dtypes import NAMES
from smalti.checkpoint.format.safetensors_layout import Piece, join
from smalti.errors import CheckpointError
from smalti.parallel import Communicator, run_on_all_ranks

Pieces = dict[str, Piece]
"""One rank's pieces by tensor name; a rank holds at most one piece of a tensor."""


def local_pieces(tensors: Mapping[str, Tensor]) -> Pieces:
    """What this rank holds of each tensor: its shard of a DTensor, which may be empty, and the whole of a plain one."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return {item.index.fqn: _piece(item) for item in planner.create_local_plan().items}


def encode_pieces(pieces: Pieces) -> str:
    """For the way to the other ranks; a twentieth of the JSON, in which most is names."""
    told = json.dumps([[name, p.dtype, p.shape, p.offsets] for name, p in pieces.items()], separators=(",", ":"))
    return b64encode(zlib.compress(told.encode())).decode()


def decode_pieces(text: str) -> Pieces:
    told = json.loads(zlib.decompress(b64decode(text)))
    return {name: Piece(dtype=dtype, shape=tuple(shape), offsets=tuple(offsets)) for name, dtype, shape, offsets in told}


@dataclass(frozen=True, kw_only=True)
class Division:
    """One rank's view of who writes what: the pieces that it writes itself, and the bytes of each whole tensor.

    `held` stands for what all ranks hold, by which the division was made.
    """

    held: str
    rank: int
    mine: Pieces
    sizes: Mapping[str, int]


_latest: Division | None = None
"""The latest of this process. Saves of a run divide alike."""


def divide_together(ranks: Communicator, tensors: Mapping[str, Tensor]) -> Division:
    """Divide the tensors among the ranks; raises RankError where those together do not hold all of them. *Collective*.

    Ranks exchange digests of what they hold, and the pieces themselves only if some rank has not just divided the same: with
    512 ranks and 3,000 tensors those are 8 MB for each rank, and half a minute of a processor.
    """
    global _latest
    latest, own = _latest, ""

    def tell() -> str:
        nonlocal own
        own = encode_pieces(local_pieces(tensors))
        shapes = json.dumps({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        known = latest.held if latest is not None and latest.rank == ranks.world.rank else ""
        return json.dumps([_digest(own + shapes), known])

    told = [json.loads(text) for text in run_on_all_ranks(ranks, tell)]
    held = _digest(json.dumps([digest for digest, _ in told]))
    if latest is not None and all(known == held for _, known in told):
        return latest
    made: list[Division] = []
    texts = run_on_all_ranks(ranks, lambda: own)

    def make() -> str:
        made.append(_divided(held, texts, ranks.world.rank, tensors))
        return ""

    run_on_all_ranks(ranks, make)
    [_latest] = made
    return _latest


def _divided(held: str, texts: Sequence[str], rank: int, tensors: Mapping[str, Tensor]) -> Division:
    known = {text: decode_pieces(text) for text in set(texts)}  # replicas hold the same
    pieces = [known[text] for text in texts]
    check_whole(pieces, tensors)
    sizes: dict[str, int] = {}
    for (name, _), size in {(name, p.offsets): p.size for each in pieces for name, p in each.items()}.items():
        sizes[name] = sizes.get(name, 0) + size
    return Division(held=held, rank=rank, mine={name: pieces[rank][name] for name in sorted(divide(pieces)[rank])}, sizes=sizes)


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


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
