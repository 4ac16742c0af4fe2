"""Flat ranges, as ZeRO shards tensors to DTensors sharded by rows, as checkpoints and other strategies hold them, and back.

ZeRO concatenates parameters and shards the result equally: a rank holds a range of a parameter's flattened elements, which may
begin and end anywhere. Whole rows are such ranges too. Each element goes straight from the rank that has it to the rank that
needs it; no rank ever holds a full tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from smalti.parallel import Communicator
from smalti.system import load_json

Range = tuple[int, int]
"""First element, and the one after the last."""
Ranges = Mapping[str, Range]
"""The range that one rank holds of each tensor, by name. All ranks have the same names in the same order."""

_BATCH = 2**26
"""Elements of all ranks that are sent at once: few calls, and buffers that are small compared to a model."""


class RowSharding:
    """Built on every rank from what it holds of each tensor. *Collective*.

    `shapes` are those of the full tensors, `held` this rank's ranges of them, by name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], held: Ranges, communicator: Communicator) -> None:
        self._shapes = shapes
        self._rank, size = communicator.world.rank, communicator.world.size
        self._held = [decode(text) for text in communicator.all_gather_text(encode(held))]
        # A scalar has no rows: every rank gets it, and rank 0 sends it.
        self._rows = [
            {name: rows(shape, rank, size) if shape else (0, 1) for name, shape in shapes.items()} for rank in range(size)
        ]
        self._senders = [
            {name: span if shapes[name] or rank == 0 else (0, 0) for name, span in ranges.items()}
            for rank, ranges in enumerate(self._rows)
        ]
        self._mesh = init_device_mesh("cpu", (size,))

    def to_rows(self, ranges: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory of tensors of which this rank has its range, (n,); some or all of the names. *Collective*."""
        found = exchange(ranges, self._held, self._rows, self._rank)
        return {name: self._as_rows(part.cpu(), self._shapes[name]) for name, part in found.items()}

    def copy_from(self, portable: Mapping[str, Tensor], ranges: Mapping[str, Tensor]) -> None:
        """Fill this rank's ranges, (n,), from tensors like those that `to_rows` returns. *Collective*."""
        parts = {}
        for name, into in ranges.items():
            start, stop = self._senders[self._rank][name]
            tensor = portable[name]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts[name] = local.detach().reshape(-1)[: stop - start].to(into.device, into.dtype)
        exchange(parts, self._senders, self._held, self._rank, into=ranges)

    def _as_rows(self, part: Tensor, shape: torch.Size) -> Tensor:
        if not shape:
            return part.view(())
        size = shape[1:].numel()
        local = part.view(part.numel() // size if size else 0, *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def rows(shape: Sequence[int], rank: int, ranks: int) -> Range:
    """The range of a rank when rows are split as torch's `Shard(0)` splits them."""
    count, each = shape[0], -(-shape[0] // ranks)
    size = _numel(shape[1:])
    return min(rank * each, count) * size, min((rank + 1) * each, count) * size


def encode(ranges: Ranges) -> str:
    """Ranges as text for the other ranks."""
    return json.dumps(ranges)


def decode(text: str) -> Ranges:
    return {name: (start, stop) for name, (start, stop) in load_json(text).items()}


def exchange(
    parts: Mapping[str, Tensor],
    have: Sequence[Ranges],
    want: Sequence[Ranges],
    rank: int,
    *,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Convert this rank's range of each tensor in the sharding `have`, (n,), to its range in the sharding `want`, (m,).

    *Collective*. `have` and `want` list the ranges of all ranks. In `have`, each element is on one rank; in `want` it may be on
    several. `into` are tensors to fill, of the dtypes and on the devices of `parts`; by default new ones are made.
    """
    found = dict(into) if into is not None else {n: part.new_empty(_length(want[rank][n])) for n, part in parts.items()}
    for names in _batches(parts, have):
        _exchange({name: parts[name] for name in names}, found, have, want, rank)
    return found


def _exchange(
    parts: Mapping[str, Tensor], found: Mapping[str, Tensor], have: Sequence[Ranges], want: Sequence[Ranges], rank: int
) -> None:
    """Fill those of `found` that have the names of `parts`."""
    like = next(iter(parts.values()))
    for name, part in parts.items():  # what stays here
        _slice(found[name], want[rank][name], have[rank][name]).copy_(_slice(part, have[rank][name], want[rank][name]))
    if not _travels(parts, have, want):
        return
    sent = [
        [_slice(part, have[rank][name], ranges[name]) for name, part in parts.items()] if other != rank else []
        for other, ranges in enumerate(want)
    ]
    received = [
        [_slice(found[name], want[rank][name], ranges[name]) for name in parts] if other != rank else []
        for other, ranges in enumerate(have)
    ]
    sizes = [sum(piece.numel() for piece in pieces) for pieces in received]
    flat = like.new_empty(sum(sizes))
    outgoing = torch.cat([like[:0], *(piece for pieces in sent for piece in pieces)])
    dist.all_to_all_single(flat, outgoing, sizes, [sum(piece.numel() for piece in pieces) for pieces in sent])
    position = 0
    for place in (place for pieces in received for place in pieces):
        place.copy_(flat[position : position + place.numel()])
        position += place.numel()


def _travels(names: Iterable[str], have: Sequence[Ranges], want: Sequence[Ranges]) -> bool:
    """Whether any rank has elements for another one, which is often not so. The same on all ranks."""
    pairs = [(mine, theirs) for one, mine in enumerate(have) for other, theirs in enumerate(want) if one != other]
    return any(_overlap(mine[name], theirs[name]) for name in names for mine, theirs in pairs)


def _batches(parts: Mapping[str, Tensor], have: Sequence[Ranges]) -> Iterator[list[str]]:
    """The names, some at a time, of one type and device; the same on every rank."""
    batch: list[str] = []
    size = 0
    for name, part in parts.items():
        length = sum(_length(ranges[name]) for ranges in have)
        kind = (part.dtype, part.device)
        if batch and (size + length > _BATCH or kind != (parts[batch[0]].dtype, parts[batch[0]].device)):
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += length
    if batch:
        yield batch


def _slice(part: Tensor, own: Range, other: Range) -> Tensor:
    """The elements of this rank's part that another range has too."""
    start, stop = max(own[0], other[0]), min(own[1], other[1])
    return part[start - own[0] : stop - own[0]] if start < stop else part[:0]


def _overlap(one: Range, other: Range) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _length(span: Range) -> int:
    return span[1] - span[0]


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())
