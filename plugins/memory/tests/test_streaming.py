"""Streamed weights: the numbers of a resident model, as few copies as there can be, and nothing used after it left."""

import copy
import errno

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from smalti import UserError
from smalti_memory.host_memory import HostMemory
from support.recomputed import WIDTH, LateStream, Model, equal, train_step


def pair(depth: int) -> tuple[Model, Model, LateStream]:
    """A model, the same with its blocks streamed, and the stream."""
    torch.manual_seed(depth)
    resident = Model(depth)
    streamed, stream = copy.deepcopy(resident), LateStream()
    for block in streamed.blocks:
        stream.add(block)
    stream.start()
    return resident, streamed, stream


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_losses_and_gradients_are_those_of_a_resident_model(depth):
    resident, streamed, _ = pair(depth)
    for seed in range(3):
        assert equal(train_step(streamed, seed), train_step(resident, seed))
        with torch.no_grad():
            assert torch.equal(streamed(torch.ones(2, WIDTH)), resident(torch.ones(2, WIDTH)))


@settings(max_examples=30, deadline=None)
@given(passes=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 4), min_size=1, max_size=9)), min_size=1, max_size=4))
def test_so_are_they_whatever_the_order_of_the_blocks(passes):
    """Skipped ones, some called twice, other orders from pass to pass: prediction decides nothing but what is copied ahead."""
    resident, streamed, _ = pair(5)
    for seed, (trains, order) in enumerate(passes):
        order = list(dict.fromkeys(order)) if trains else order
        if trains:
            assert equal(train_step(streamed, seed, order), train_step(resident, seed, order))
        else:
            with torch.no_grad():
                assert torch.equal(streamed(torch.ones(2, WIDTH), order), resident(torch.ones(2, WIDTH), order))


@pytest.mark.parametrize("depth", [2, 3, 7])
def test_a_step_copies_each_block_twice_less_what_is_there_at_the_turns(depth):
    _, streamed, stream = pair(depth)
    block = len(stream._blocks[0].memory)
    for seed in range(2):  # in the first steps the order is learned
        train_step(streamed, seed)
    before = stream.copied
    train_step(streamed, 2)
    assert stream.copied - before == 2 * (depth - 2) * block


def test_a_block_that_computes_finds_the_next_one_on_its_way():
    _, streamed, stream = pair(6)
    train_step(streamed, 0)
    there = []
    for number, block in enumerate(streamed.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: there.append((number, {s.holds for s in stream._slots})))
    train_step(streamed, 1)
    forward, backward = there[:6], there[6:]
    assert [held for _, held in forward] == [{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}, {4, 5}]
    assert [(number, held) for number, held in backward] == [
        (5, {4, 5}),
        (4, {3, 4}),
        (3, {2, 3}),
        (2, {1, 2}),
        (1, {0, 1}),
        (0, {0, 1}),
    ]


def test_only_two_blocks_are_outside_host_memory():
    _, streamed, stream = pair(7)
    train_step(streamed, 0)
    slots = {slot.memory.untyped_storage().data_ptr() for slot in stream._slots}
    away = [block for block in streamed.blocks if block.base.weight.untyped_storage().data_ptr() in slots]
    assert len(away) == len(slots) == 2


def test_a_frozen_weight_that_two_layers_share_is_copied_once():
    torch.manual_seed(0)
    resident = Model(3)
    for block in resident.blocks:
        block.norm.weight = block.norm.bias
    streamed, stream = copy.deepcopy(resident), LateStream()
    for block in streamed.blocks:
        stream.add(block)
    stream.start()
    assert equal(train_step(streamed, 0), train_step(resident, 0))
    norm = streamed.blocks[0].norm
    assert norm.weight.data_ptr() == norm.bias.data_ptr()


def test_one_block_of_many_that_is_not_recomputed_stays_on_the_device():
    class Partly(Model):
        def forward(self, values, order=None):
            values = self.first(values)
            for number, block in enumerate(self.blocks):
                values = block(values) if number == 2 else checkpoint(block, values, use_reentrant=False)
            return values

    torch.manual_seed(0)
    resident = Partly(6)
    streamed, stream = copy.deepcopy(resident), LateStream()
    for block in streamed.blocks:
        stream.add(block)
    stream.start()
    for seed in range(3):
        with torch.no_grad():
            assert torch.equal(streamed(torch.ones(2, WIDTH)), resident(torch.ones(2, WIDTH)))
        assert equal(train_step(streamed, seed), train_step(resident, seed))
    assert stream._resident == {2}


def test_a_model_that_is_not_recomputed_is_refused_when_it_trains():
    model, stream = Model(3, recomputes=False), LateStream()
    for block in model.blocks:
        stream.add(block)
    stream.start()
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    with pytest.raises(UserError, match="Layer trains without recomputing its activations") as caught:
        train_step(model, 0)
    assert "--gradient_checkpointing" in caught.value.fix


def test_what_is_beyond_the_limit_of_pinned_memory_is_pages_of_files(tmp_path):
    resident = Model(6)
    streamed, block = copy.deepcopy(resident), 1024  # 4 x 256 bytes
    stream = LateStream(HostMemory("cpu", limit=2 * block + 1, folder=tmp_path))
    for each in streamed.blocks:
        stream.add(each)
    stream.start()
    assert [len(each.memory) for each in stream._blocks] == [block] * 6
    assert [each.paged for each in stream._blocks] == [False, False, True, True, True, True]
    assert (stream.host.pinned, list(tmp_path.iterdir())) == (2 * block, []), "files that are gone with the process"
    for seed in range(3):
        assert equal(train_step(streamed, seed), train_step(resident, seed))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(UserError, match=r"1.0 KiB of streamed weights cannot be written to .*: No space left") as caught:
        HostMemory("cpu", limit=0, folder=tmp_path).take(1024)
    assert "--pinned_gib" in caught.value.fix


@pytest.mark.parametrize("precision", ["int8-torchao", "fp8-torchao", "nf4-torchao"])
def test_quantised_weights_are_streamed_as_they_are_kept(precision):
    pytest.importorskip("torchao")
    from smalti_diffusers.lora.quantisation import QuantisedLinear

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = QuantisedLinear(nn.Linear(128, 128, dtype=torch.bfloat16).requires_grad_(False), precision)
            self.adapter = nn.Linear(128, 128, bias=False, dtype=torch.bfloat16)

        def forward(self, values):
            return values + self.base(values) + self.adapter(values)

    torch.manual_seed(0)
    blocks = [Wide() for _ in range(4)]
    for block in blocks:
        block.base.weights_loaded()
    values, stream, results = torch.randn(4, 128, dtype=torch.bfloat16), LateStream(), []
    for streams in (False, True):
        if streams:
            for block in blocks:
                stream.add(block)
            stream.start()
        for block in blocks:
            block.zero_grad()
        out = values
        for block in blocks:
            out = checkpoint(block, out, use_reentrant=False)
        out.square().mean().backward()
        results.append({"out": out.detach(), **{str(n): block.adapter.weight.grad for n, block in enumerate(blocks)}})
    assert equal(*results)
    assert len(stream._blocks[0].memory) < 128 * 128 * (0.8 if precision == "nf4-torchao" else 1.4)
