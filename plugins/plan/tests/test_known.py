"""Operations that a rehearsal answers from its table: the ledger counts what it would count without one."""

import pytest
import torch
from torch import nn

from smalti_plan.rehearsal.fake_tensors import RehearsalMode
from smalti_plan.rehearsal.known import Known
from smalti_plan.rehearsal.ledger import Ledger


class Dispatches(RehearsalMode):
    """Counts what reaches it."""

    number = 0

    def dispatch(self, *arguments):
        self.number += 1
        return super().dispatch(*arguments)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden):
        first, *rest = self.wide(self.norm(hidden)).chunk(3, dim=-1)
        mixed = torch.cat([first.transpose(0, 1).contiguous().transpose(0, 1), *rest], dim=-1)
        return hidden + self.narrow(nn.functional.gelu(mixed).mul_(2)).float() * 0.5


def trained(*, with_table):
    """(ledger, dispatches, what the losses look like): a model of equal blocks trains for three steps."""
    mode = Dispatches()
    ledger = Ledger("cpu", 1, Known(mode) if with_table else None)
    kinds = []
    with mode, ledger:
        model = nn.Sequential(*(Block() for _ in range(4)))
        ledger.mark(model.parameters(), "parameters")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            with ledger.counting("forward", "activations"):
                loss = model(torch.randn(5, 8)).square().mean()
            with ledger.counting("backward"):
                loss.backward()
            with ledger.counting("step"):
                optimizer.step()
                optimizer.zero_grad()
            kinds.append((loss.dtype, loss.shape, loss.device))
    return ledger, mode.number, kinds


def test_the_ledger_is_the_same_with_the_table_and_without():
    own, dispatched, kinds = trained(with_table=True)
    plain, all_of_them, same = trained(with_table=False)
    assert own.moments == plain.moments
    assert own.counts == plain.counts
    assert own.held == plain.held
    assert kinds == same
    assert own.counts.touched > 0
    assert dispatched < all_of_them / 2, "most were answered from the table"


@pytest.fixture
def fake():
    mode = RehearsalMode()
    with mode, Ledger("cpu", 1, Known(mode)):
        yield


@pytest.mark.usefixtures("fake")
def test_inputs_that_differ_are_told_apart():
    whole = torch.ones(3, dtype=torch.int64)
    for _ in range(3):
        assert (whole * 2).dtype is torch.int64
        assert (whole * 2.0).dtype is torch.float32
        assert (whole.t() + torch.ones(3, 3).t()).stride() == (1, 3)
        assert (whole + torch.ones(3, 3)).stride() == (3, 1)


@pytest.mark.usefixtures("fake")
def test_views_share_memory_and_what_is_new_does_not():
    for _ in range(3):
        base = torch.zeros(4, 6)
        part = base[1:3].view(-1)
        assert part.untyped_storage() is base.untyped_storage()
        assert part.storage_offset() == 6
        assert part.add_(1) is part
        assert (base + 1).untyped_storage() is not base.untyped_storage()
        out = torch.empty(4, 6)
        assert torch.mul(base, base, out=out) is out


@pytest.mark.usefixtures("fake")
def test_an_input_that_an_operation_resizes_is_resized_each_time():
    for _ in range(3):
        tensor = torch.zeros(2, 3)
        tensor.t_()
        assert tensor.shape == (3, 2)
        tensor.resize_(4, 4)
        assert tensor.untyped_storage().nbytes() == 64
