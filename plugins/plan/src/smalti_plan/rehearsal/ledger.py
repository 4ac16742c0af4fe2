"""Counts what operations allocate, compute and send, by phase and by what it is for."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from smalti_plan.rehearsal.known import Costs, Known

_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "send",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
}
_BUFFERS = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of the operations whose tensors are gathered, sent or received."""
_DEVICE = torch.ops.prim.device.default
_PASSING = frozenset(("activations", "temporaries"))
_HOST = "host"
_FLOPS = {**flop_registry, torch.ops.aten._int_mm: flop_registry[torch.ops.aten.mm]}
"""torch's own, and products of int8, which it leaves out (torch 2.13)."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Cell:
    """One storage: on the device or on the host, what it is for, its size."""

    on_host: bool
    kind: str
    size: int


class _Watched(weakref.ref[torch.UntypedStorage]):
    """A storage for as long as it lives; its address, which another may have after that, and its cell."""

    __slots__ = ("address", "cell")
    address: int
    cell: _Cell


@dataclass(kw_only=True)
class Moment:
    """The largest moment of a phase: bytes on the device by kind, and of the host at its own largest moment."""

    device: dict[str, int] = field(default_factory=dict)
    total: int = 0
    host: int = 0


@dataclass(kw_only=True)
class Counted:
    """Messages: bytes and calls by collective, phase, ranks and nodes of a group. Operations: FLOPs and calls by class, type.

    `touched` are bytes that operations have read and written.
    """

    traffic: Counter[tuple[str, str, int, int]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str, int, int]] = field(default_factory=Counter)
    flops: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    touched: int = 0


class Ledger(TorchDispatchMode):
    """Watches all operations inside of it. `device` is the kind that counts as device memory, "cpu" for ranks on the CPU.

    New storages count as `kind` until they are marked as something else. Sizes are rounded up to `unit`. Operations that are
    `known` are not computed.
    """

    def __init__(self, device: str, unit: int, known: Known | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._unit, self._known = device, unit, known
        self._cells: dict[int, _Watched] = {}
        self.held: Counter[str] = Counter()
        """Bytes by kind, now; "host" for all host memory."""
        self._total = 0
        self.kind = "temporaries"
        self.phase = ""
        self.moments: dict[str, Moment] = {}
        self.counts = Counted()

    @contextmanager
    def counting(self, phase: str, kind: str = "temporaries") -> Iterator[None]:
        """Within it, new storages are of this kind, and what is counted belongs to this phase. Phases may be nested."""
        before = self.phase, self.kind
        self.begin(phase, kind)
        try:
            yield
        finally:
            self.phase, self.kind = before

    def begin(self, phase: str, kind: str) -> None:
        self.phase, self.kind = phase, kind
        self._note()

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """The storages of these tensors are of this kind from now on."""
        for tensor in tensors:
            if tensor is not None:
                local = getattr(tensor, "_local_tensor", tensor)
                self._see(local if type(local) is FakeTensor else tensor.detach(), kind)

    def mark_rest(self, kind: str) -> None:
        """What is there on the device and has no other purpose is of this kind from now on."""
        for cell in [each.cell for each in list(self._cells.values())]:
            if not cell.on_host and cell.kind in _PASSING:
                self._become(cell, kind)

    def forget(self, phase: str) -> None:
        """Begin anew to look for the largest moment of device memory in this phase."""
        if phase in self.moments:
            self.moments[phase].total, self.moments[phase].device = 0, {}

    def take_counts(self) -> Counted:
        """What was sent and computed since the last call."""
        taken, self.counts = self.counts, Counted()
        return taken

    def __enter__(self) -> Ledger:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            self._resize(storage, size)
            if (known := self._cells.get(storage._cdata)) is not None:
                self._change(known.cell, self._rounded(storage.nbytes(), known.cell.on_host))
            return storage

        storage: Any = torch.UntypedStorage
        storage.resize_ = resize
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        storage: Any = torch.UntypedStorage
        storage.resize_ = self._resize
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # C++ asks so half of all calls
            return args[0].device
        kwargs = kwargs or {}
        known = self._known
        key, tensors = (None, []) if known is None else known.key_of(func, args, kwargs)
        if known is not None and key is not None and (entry := known.get(key)) is not None:
            made = known.again(entry, tensors)
            self._count(entry.costs)
        else:
            made = func(*args, **kwargs)
            costs = Costs()
            if func.namespace in _BUFFERS:
                self._exchanged(func, args, kwargs, made)
            elif not func.is_view:
                self._count(costs := self._costs(func, args, kwargs, made))
            if known is not None and key is not None and known.key_of(func, args, kwargs)[0] == key:
                known.learn(key, tensors, made, costs)
        if isinstance(made, Tensor):
            self._see(made)
        elif made is not None:
            for each in tree_iter(made):
                if isinstance(each, Tensor):
                    self._see(each)
        return made

    # --- memory -----------------------------------------------------------------------------------------------------

    def _see(self, tensor: Tensor, kind: str | None = None) -> None:
        tensor = getattr(tensor, "_local_tensor", tensor)
        place = tensor.device.type
        if place not in (self._device, "cpu"):
            return
        storage = tensor.untyped_storage()
        known = self._cells.get(storage._cdata)
        on_host = place != self._device
        size = self._rounded(storage.nbytes(), on_host)
        cell = self._begun(storage, on_host, kind or self.kind) if known is None else known.cell
        if known is not None and kind is not None and not cell.on_host and cell.kind != kind:
            self._become(cell, kind)
        if size != cell.size:
            self._change(cell, size)

    def _begun(self, storage: torch.UntypedStorage, on_host: bool, kind: str) -> _Cell:
        cell = _Cell(on_host=on_host, kind=_HOST if on_host else kind, size=0)
        watched = _Watched(storage, self._ended)
        watched.address, watched.cell = storage._cdata, cell
        self._cells[watched.address] = watched
        return cell

    def _ended(self, watched: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(watched, _Watched)
        self._change(watched.cell, 0)
        if self._cells.get(watched.address) is watched:
            del self._cells[watched.address]

    def _rounded(self, size: int, on_host: bool) -> int:
        return size if on_host else -(-size // self._unit) * self._unit

    def _become(self, cell: _Cell, kind: str) -> None:
        self.held[cell.kind] -= cell.size
        self.held[kind] += cell.size
        cell.kind = kind
        moment = self.moments.get(self.phase)
        if moment is not None and moment.total == self._total:  # what is allocated shows its purpose a little later
            moment.device = self._on_device()

    def _change(self, cell: _Cell, size: int) -> None:
        difference, cell.size = size - cell.size, size
        self.held[cell.kind] += difference
        if not cell.on_host:
            self._total += difference
        if difference > 0:
            self._note()

    def _note(self, passing: int = 0) -> None:
        """Keep this moment if it is the largest of its phase; `passing` are bytes that are there for this moment only."""
        moment = self.moments.get(self.phase)
        if moment is None:
            moment = self.moments[self.phase] = Moment()
        if self._total + passing > moment.total:
            moment.total, moment.device = self._total + passing, self._on_device()
            moment.device["gathered"] = moment.device.get("gathered", 0) + passing
        moment.host = max(moment.host, self.held[_HOST])

    def _on_device(self) -> dict[str, int]:
        return {name: size for name, size in self.held.items() if name != _HOST}

    # --- messages and operations ------------------------------------------------------------------------------------

    def _exchanged(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        tensors = [each for each in tree_iter((args, kwargs, made)) if isinstance(each, Tensor)]
        name = _COLLECTIVES.get(func._opname)
        for tensor in tensors:
            known = self._cells.get(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
            if known is not None and not known.cell.on_host and known.cell.kind in _PASSING:
                self._become(known.cell, "gathered")
        if name == "reduce_scatter" and func._opname == "_reduce_scatter_base_":
            self._see(args[0], "gradients")
            if self._device == "cpu":  # gloo reduces a copy of the whole input
                self._note(args[1].nbytes)
        if name is not None and tensors:
            ranks, nodes = _group_of(args)
            key = (name, self.phase, ranks, nodes)
            self.counts.traffic[key] += max(tensor.numel() * tensor.element_size() for tensor in tensors)
            self.counts.messages[key] += 1

    def _costs(self, func: Any, args: Any, kwargs: Any, made: Any) -> Costs:
        count = _FLOPS.get(func._overloadpacket)
        first = next((each for each in tree_iter(args) if isinstance(each, Tensor)), None)
        kind, flops, touched = None, 0, 0
        if count is not None and first is not None:
            kind = _class_of(func._schema.name), str(first.dtype).removeprefix("torch.")
            flops = int(count(*args, **kwargs, out_val=made))
        if func.namespace == "aten" and "empty" not in func._opname:
            for each in tree_iter((args, made)):
                if isinstance(each, Tensor) and each.device.type == self._device:
                    touched += each.numel() * each.element_size()
        return Costs(kind=kind, flops=flops, touched=touched)

    def _count(self, costs: Costs) -> None:
        self.counts.touched += costs.touched
        if costs.kind is not None:
            self.counts.flops[costs.kind] += costs.flops
            self.counts.calls[costs.kind] += 1


def _class_of(name: str) -> str:
    if "attention" in name or "flash" in name:
        return "attention"
    if "conv" in name:
        return "convolution"
    return "matmul" if any(each in name for each in ("mm", "dot", "mv")) else "other"


def _group_of(args: Any) -> tuple[int, int]:
    """The ranks of a collective operation's group, and the nodes that they are on."""
    for each in args:
        if isinstance(each, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(each)
            except (RuntimeError, TypeError):
                continue
            local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            ranks = dist.get_process_group_ranks(group)
            return len(ranks), len({rank // local for rank in ranks})
    return int(os.environ.get("WORLD_SIZE", "1")), 1
