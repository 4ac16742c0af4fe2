"""Activations in host memory: the numbers of a run without it, little left on the device, nothing used before it is there."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smalti_memory.activations import ActivationOffload
from support.recomputed import WIDTH, LateStream, Model, equal, train_step

BATCH = 3


class Late(ActivationOffload):
    """Copies arrive as late as they may, in the order of a stream; until then their targets hold no numbers.

    A source is only looked at: whoever lets go of one too early is found out.
    """

    def __init__(self) -> None:
        super().__init__("cpu", least=BATCH * WIDTH * 4)
        self.queue: list[tuple] = []

    def _copy(self, target, source):
        layout = source.dtype, source.shape, source.stride(), source.storage_offset()
        self.queue.append((target, weakref.ref(source.untyped_storage()), *layout))
        target.fill_(torch.nan)
        return len(self.queue)

    def _arrive(self, kept):
        if kept.copied is None:
            return
        for place, item in enumerate(self.queue[: kept.copied]):
            if item is not None:
                target, storage, dtype, shape, stride, offset = item
                source = torch.empty(0, dtype=dtype).set_(storage(), offset, shape, stride)
                target.copy_(source)
                self.queue[place] = None
        kept.copied = None


def pair(depth: int, model=Model) -> tuple[nn.Module, nn.Module, Late]:
    """A model, the same with its activations offloaded, and what offloads them."""
    torch.manual_seed(depth)
    resident = model(depth)
    offloaded, offload = copy.deepcopy(resident), Late()
    offload.attach(offloaded)
    return resident, offloaded, offload


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_losses_and_gradients_are_those_of_a_run_without_it(depth):
    resident, offloaded, offload = pair(depth)
    for seed in range(3):
        assert equal(train_step(offloaded, seed), train_step(resident, seed))
        with torch.no_grad():
            assert torch.equal(offloaded(torch.ones(2, WIDTH)), resident(torch.ones(2, WIDTH)))
    assert offload.copied > 0


class Conditioned(Model):
    """Every block gets the same second input, and what blocks return is used again further up, as in a U-Net."""

    def forward(self, values, order=None):
        values = self.first(values)
        condition, skipped = values.sin(), []
        for block in self.blocks:
            skipped.append(values)
            values = checkpoint(lambda one, other, block=block: block(one + other), values, condition, use_reentrant=False)
        while skipped:
            values = (values * skipped.pop()).tanh()
        return values


def test_a_tensor_that_many_operations_keep_is_copied_once():
    resident, offloaded, offload = pair(5, Conditioned)
    assert equal(train_step(offloaded, 0), train_step(resident, 0))
    kept = 1 + 6 + 5 + 5  # the condition, inputs of blocks and the last output, products, their inputs
    assert offload.copied <= 2 * kept * BATCH * WIDTH * 4


def test_as_it_is_with_streamed_weights():
    resident, offloaded, _ = pair(5)
    stream = LateStream()
    for block in offloaded.blocks:
        stream.add(block)
    stream.start()
    for seed in range(3):
        assert equal(train_step(offloaded, seed), train_step(resident, seed))


def test_few_inputs_of_blocks_are_on_the_device_at_the_end_of_the_forward_pass():
    _, offloaded, offload = pair(12)
    loss = offloaded(torch.randn(BATCH, WIDTH)).square().mean()
    kept = [each() for each in offload._order]
    assert len(kept) >= 12
    assert sum(each.there is not None for each in kept) == 2
    del kept
    loss.backward()
    gc.collect()
    assert not any(each() for each in offload._order), "nothing stays after a step"


class Joint(Model):
    """Every block takes two inputs and returns both, as those do that join images and texts."""

    def forward(self, values, order=None):
        values, other = self.first(values), values.sin()
        for block in self.blocks:
            values, other = checkpoint(
                lambda one, two, block=block: (block(one), two + one), values, other, use_reentrant=False
            )
        return values + other


def test_few_inputs_of_blocks_are_on_the_device_in_the_backward_pass_and_each_comes_back_once():
    class Counting(Late):
        most = 0

        def _unpack(self, packed):
            found = super()._unpack(packed)
            there = [kept for each in self._order if (kept := each()) is not None and kept.there is not None]
            self.most = max(self.most, len(there))
            return found

    torch.manual_seed(0)
    resident = Joint(12)
    offloaded, offload = copy.deepcopy(resident), Counting()
    offload.attach(offloaded)
    assert equal(train_step(offloaded, 0), train_step(resident, 0))
    assert offload.most <= 4
    assert offload.copied <= 2 * (2 * 12 + 2) * BATCH * WIDTH * 4


def test_host_memory_is_used_again_and_is_one_piece_after_a_pass():
    _, offloaded, offload = pair(4)
    addresses = []
    for seed in range(3):
        train_step(offloaded, seed)
        addresses.append(offload._memory._slab.data_ptr())
        assert len(offload._memory._arenas) == 1
    assert len(set(addresses)) == 1


def test_two_forward_passes_may_come_before_their_backward_passes():
    resident, offloaded, _ = pair(4)
    results = []
    for model in (resident, offloaded):
        model.zero_grad()
        losses = [model(torch.full((BATCH, WIDTH), value)).square().mean() for value in (0.5, 2.0)]
        for loss in losses:
            loss.backward()
        results.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert equal(*results)


def test_weights_and_what_is_small_stay_where_they_are():
    offload = Late()
    linear = nn.Linear(64, 64)
    offload.attach(linear)
    linear(torch.ones(1, 64, requires_grad=True)).sum().backward()
    assert offload.copied == 64 * 4, "the input, to the host; it is still there when it is needed"


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_strides_stay_as_they_are(layout):
    offload, seen = Late(), []
    images = torch.randn(2, 4, 6, 6).to(memory_format=layout).requires_grad_()

    class Squares(torch.autograd.Function):
        @staticmethod
        def forward(context, values):
            context.save_for_backward(values)
            return values * 2

        @staticmethod
        def backward(context, gradient):
            seen.extend(context.saved_tensors)
            return gradient

    module = nn.Module()
    module.forward = lambda values: Squares.apply(values * 1)
    offload.attach(module)
    module(images).sum().backward()
    [after] = seen
    assert offload.copied > 0
    assert (after.stride(), after.tolist()) == (images.stride(), images.tolist())
