"""A small model whose blocks are recomputed, one step of it, and weights that come to it as late as they may."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smalti_memory.host_memory import HostMemory
from smalti_memory.streaming import BlockStream

WIDTH = 8


class Layer(nn.Module):
    """A frozen product and one that trains beside it, as with LoRA; the norm's weight is frozen too."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.norm = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.LayerNorm(WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, values):
        return values + torch.tanh(self.base(self.norm(values)) + self.adapter(values))


class Model(nn.Module):
    def __init__(self, depth: int, *, recomputes: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(depth))
        self.recomputes = recomputes

    def forward(self, values, order=None):
        values = self.first(values)
        for number in range(len(self.blocks)) if order is None else order:
            block = self.blocks[number]
            values = checkpoint(block, values, use_reentrant=False) if self.recomputes else block(values)
        return values


class LateStream(BlockStream):
    """Copies arrive as late as they may, and until then a slot holds no numbers: on a CPU, a side stream that takes time."""

    def __init__(self, host: HostMemory | None = None) -> None:
        super().__init__("cpu", host or HostMemory("cpu", limit=2**30, folder=Path()))
        self.pending: dict[int, torch.Tensor] = {}

    def _fetch(self, number):
        slot = super()._fetch(number)
        self.pending[slot.number] = self._blocks[number].memory
        slot.memory.fill_(255)  # NaN in every floating-point type
        return slot

    def _enter(self, number, module, inputs):
        super()._enter(number, module, inputs)
        slot = self._slot_of(number)
        if slot is not None and (memory := self.pending.pop(slot.number, None)) is not None:
            slot.memory[: len(memory)].copy_(memory)


def train_step(model: Model, seed: int, order=None) -> dict[str, torch.Tensor]:
    """The loss and the gradients."""
    model.zero_grad()
    loss = model(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)), order).square().mean()
    loss.backward()
    return {"loss": loss.detach(), **{name: each.grad for name, each in model.named_parameters() if each.grad is not None}}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
