"""Blocks found in a model's structure, and weights put into a model that has none."""

import torch
from torch import nn

from smalti.models.blocks import find_blocks
from smalti.models.weights import materialise, without_weights


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


class Real:
    """Weights from a model that exists."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = model.state_dict()

    def names(self):
        return iter(self.tensors)

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def empty() -> Net:
    with without_weights():
        return Net()


def test_the_outermost_repeated_class_is_the_block_and_counts_all_that_is_in_it():
    blocks = find_blocks(empty())
    assert [(block.path, block.class_name) for block in blocks] == [(f"blocks.{number}", "Block") for number in range(3)]
    assert {block.parameters for block in blocks} == {2 * (4 * 4 + 4)}


def test_named_classes_are_taken_as_they_are_named():
    assert len(find_blocks(empty(), ["Attention"])) == 6


def test_only_the_last_block_need_not_reshard():
    assert [block.reshard for block in find_blocks(empty())] == [True, True, False]


def test_a_model_without_repetition_has_no_blocks():
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


def test_a_model_gets_its_weights_its_buffers_and_its_ties():
    real = Net()
    real.scale.fill_(7)
    model = materialise(empty(), Real(real), "cpu")
    assert all(torch.equal(tensor, real.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert model.last.weight is model.first.weight
    assert model.hidden.tolist() == [0, 1, 2]
