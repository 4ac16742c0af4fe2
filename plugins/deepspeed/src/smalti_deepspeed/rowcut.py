"""This rank's ranges of tensors as DTensors of whole rows, which checkpoints and all other strategies understand, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from smalti.parallel import Communicator
from smalti_deepspeed.resharding import Cut, decode, encode, exchange, rows


class RowCut:
    """Built on every rank from what it holds of each tensor. *Collective*.

    `shapes` are those of the whole tensors, `held` this rank's ranges of them, by name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], held: Cut, ranks: Communicator) -> None:
        self._shapes = shapes
        self._rank, size = ranks.world.rank, ranks.world.size
        self._held = [decode(text) for text in ranks.all_gather_text(encode(held))]
        # A scalar has no rows: every rank gets the whole of it, and one gives it back.
        self._rows = [
            {name: rows(shape, rank, size) if shape else (0, 1) for name, shape in shapes.items()} for rank in range(size)
        ]
        self._givers = [
            {name: span if shapes[name] or rank == 0 else (0, 0) for name, span in cut.items()}
            for rank, cut in enumerate(self._rows)
        ]
        self._mesh = init_device_mesh("cpu", (size,))

    def portable(self, ranges: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies in host memory of tensors of which this rank gives its range, (n,); some or all of the names. *Collective*."""
        found = exchange(ranges, self._held, self._rows, self._rank)
        return {name: self._as_rows(part.cpu(), self._shapes[name]) for name, part in found.items()}

    def put_back(self, portable: Mapping[str, Tensor], ranges: Mapping[str, Tensor]) -> None:
        """Fill this rank's ranges, (n,), from tensors like those that `self.portable` gave. *Collective*."""
        parts = {}
        for name, into in ranges.items():
            start, stop = self._givers[self._rank][name]
            tensor = portable[name]
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts[name] = local.detach().reshape(-1)[: stop - start].to(into.device, into.dtype)
        exchange(parts, self._givers, self._held, self._rank, into=ranges)

    def _as_rows(self, part: Tensor, shape: torch.Size) -> Tensor:
        if not shape:
            return part.view(())
        size = shape[1:].numel()
        local = part.view(part.numel() // size if size else 0, *shape[1:])
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
