"""Which rank writes which chunk of which tensor.

Every rank says what it holds; from that, every rank computes the same division for all. A shard has one holder and is written
there. What several ranks hold alike (replicated parameters, replicas of a shard) is written once, by whichever of them has
least to write.

The chunks that a rank holds are told by torch's distributed-checkpoint planner, which knows every kind of sharded tensor.
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
from smalti.checkpoint.format.safetensors_layout import Chunk, join
from smalti.errors import CheckpointError
from smalti.parallel import Communicator, run_on_all_ranks

Chunks = dict[str, Chunk]
"""One rank's chunks by tensor name; a rank holds at most one chunk of a tensor."""


def local_chunks(tensors: Mapping[str, Tensor]) -> Chunks:
    """What this rank holds of each tensor: its shard of a DTensor, which may be empty, and the whole of a plain one."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors))
    return {item.index.fqn: _chunk(item) for item in planner.create_local_plan().items}


def encode_chunks(chunks: Chunks) -> str:
    """For the way to the other ranks; a twentieth of the JSON, in which most is names."""
    told = json.dumps([[name, p.dtype, p.shape, p.offsets] for name, p in chunks.items()], separators=(",", ":"))
    return b64encode(zlib.compress(told.encode())).decode()


def decode_chunks(text: str) -> Chunks:
    told = json.loads(zlib.decompress(b64decode(text)))
    return {name: Chunk(dtype=dtype, shape=tuple(shape), offsets=tuple(offsets)) for name, dtype, shape, offsets in told}


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """One rank's view of who writes what: the chunks that it writes itself, and the bytes of each whole tensor.

    `held` stands for what all ranks hold, by which the division was made.
    """

    held: str
    rank: int
    mine: Chunks
    sizes: Mapping[str, int]


_latest: WritePlan | None = None
"""The latest of this process. Saves of a run divide alike."""


def plan_on_all_ranks(ranks: Communicator, tensors: Mapping[str, Tensor]) -> WritePlan:
    """Divide the tensors among the ranks; raises RankError where those together do not hold all of them. *Collective*.

    Ranks exchange digests of what they hold, and the chunks themselves only if some rank has not just divided the same: with
    512 ranks and 3,000 tensors those are 8 MB for each rank, and half a minute of a processor.
    """
    global _latest
    latest, own = _latest, ""

    def tell() -> str:
        nonlocal own
        own = encode_chunks(local_chunks(tensors))
        shapes = json.dumps({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        known = latest.held if latest is not None and latest.rank == ranks.world.rank else ""
        return json.dumps([_digest(own + shapes), known])

    told = [json.loads(text) for text in run_on_all_ranks(ranks, tell)]
    held = _digest(json.dumps([digest for digest, _ in told]))
    if latest is not None and all(known == held for _, known in told):
        return latest
    made: list[WritePlan] = []
    texts = run_on_all_ranks(ranks, lambda: own)

    def make() -> str:
        made.append(_divided(held, texts, ranks.world.rank, tensors))
        return ""

    run_on_all_ranks(ranks, make)
    [_latest] = made
    return _latest


def _divided(held: str, texts: Sequence[str], rank: int, tensors: Mapping[str, Tensor]) -> WritePlan:
    known = {text: decode_chunks(text) for text in set(texts)}  # replicas hold the same
    chunks = [known[text] for text in texts]
    check_complete(chunks, tensors)
    sizes: dict[str, int] = {}
    for (name, _), size in {(name, p.offsets): p.size for each in chunks for name, p in each.items()}.items():
        sizes[name] = sizes.get(name, 0) + size
    return WritePlan(
        held=held, rank=rank, mine={name: chunks[rank][name] for name in sorted(divide(chunks)[rank])}, sizes=sizes
    )


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def divide(held: Sequence[Chunks]) -> list[set[str]]:
    """For each rank, the tensors of which it writes its chunk, given what all ranks hold, in rank order.

    Balanced by bytes. The same on every rank.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, chunks in enumerate(held):
        for name, chunk in chunks.items():
            holders.setdefault((name, chunk.offsets), []).append(rank)
    writes: list[set[str]] = [set() for _ in held]
    load = [0] * len(held)
    # Shards first, as they leave no choice; then the largest replicas, so that small ones can even out the rest.
    order = sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -held[item[1][0]][item[0][0]].size, item[0]))
    for (name, _), ranks in order:
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += held[writer][name].size
        writes[writer].add(name)
    return writes


def check_complete(held: Sequence[Chunks], tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError when what the ranks hold does not make up the tensors: a gap, an overlap, another shape.

    Loading would see such a tensor as a smaller one.
    """
    chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
    for rank_chunks in held:
        for name, chunk in rank_chunks.items():
            chunks.setdefault(name, {})[chunk.offsets] = chunk
    for name, tensor in tensors.items():
        if name not in chunks or join(name, list(chunks[name].values())).shape != tuple(tensor.shape):
            raise CheckpointError(f"the ranks together do not hold the whole of {name}")


def memory(tensor: Tensor) -> memoryview:
    """The bytes of what this rank holds of a tensor, row by row; a copy only where it is not stored like that on the CPU."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _chunk(item: WriteItem) -> Chunk:
    data = item.tensor_data
    if data is None:
        raise CheckpointError(f"{item.index.fqn} is not a tensor")
    dtype = NAMES.get(data.properties.dtype)
    if dtype is None:
        raise CheckpointError(f"{item.index.fqn} is of type {data.properties.dtype}, which a checkpoint cannot hold")
    return Chunk(dtype=dtype, shape=tuple(data.chunk.sizes), offsets=tuple(data.chunk.offsets))
