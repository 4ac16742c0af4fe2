"""A small model whose blocks repeat, with shared weights and buffers."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(width), Attention(width)])


class Net(nn.Module):
    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)
