"""The average of the weights: right, in fp32, and out of the way when it should be."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from smalti.parallel.state import ModelState
from smalti.training.optim.ema import Ema, HostCopies


def test_the_average_follows_the_formula_with_its_warm_up():
    parameter = nn.Parameter(torch.zeros(3))
    ema = Ema({"w": parameter}, 0.9)
    expected = 0.0
    for step in range(1, 40):
        with torch.no_grad():
            parameter.fill_(float(step))
        ema.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    assert ema.shadows["w"].tolist() == pytest.approx([expected] * 3)


def test_an_average_of_bf16_weights_is_kept_in_fp32():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    ema = Ema({"w": parameter}, 0.999)
    with torch.no_grad():
        parameter.fill_(1.0078125)  # one step of bf16
    for step in range(100_000, 100_010):
        ema.update(step)
    assert 1 < float(ema.shadows["w"][0]) < 1.0001


class FloatsMade(TorchDispatchMode):
    """The most bytes of new fp32 tensors that there were at a time."""

    most = held = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        made = function(*arguments, **keywords or {})
        if function is torch.ops.aten._to_copy.default and made.dtype == torch.float32:
            self.held += made.nbytes
            self.most = max(self.most, self.held)
            weakref.finalize(made.untyped_storage(), self._free, made.nbytes)
        return made

    def _free(self, size):
        self.held -= size


def test_an_update_copies_a_few_bf16_weights_at_a_time(monkeypatch):
    monkeypatch.setattr("smalti.training.optim.ema._PIECE_BYTES", 1024)
    live = {str(number): torch.randn(100, dtype=torch.bfloat16) for number in range(20)}
    ema = Ema(live, 0.9)
    for weight in live.values():
        weight.add_(1)
    expected = [torch.lerp(ema.shadows[name], weight.float(), 1 - 2 / 11) for name, weight in live.items()]
    with FloatsMade() as made:
        ema.update(1)
    assert all(map(torch.equal, ema.shadows.values(), expected))
    assert 0 < made.most <= 1024


def test_the_model_has_its_own_weights_again_after_drawing():
    model = nn.Linear(4, 4)
    ema = Ema(dict(model.named_parameters()), 0.5)
    with torch.no_grad():
        model.weight.add_(1)
    before, averaged = model.weight.clone(), ema.shadows["weight"].clone()
    with ema.average_parameters():
        inside = model.weight.clone()
    assert torch.equal(inside, averaged)
    assert torch.equal(model.weight, before)


def test_the_weights_come_back_after_an_error_too():
    model = nn.Linear(2, 2)
    ema = Ema(dict(model.named_parameters()), 0.5)
    with torch.no_grad():
        model.weight.add_(1)
    before = model.weight.clone()
    with pytest.raises(KeyError), ema.average_parameters():
        raise KeyError
    assert torch.equal(model.weight, before)


def test_frozen_parameters_have_no_average():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    assert list(Ema(ModelState(model, torch.optim.SGD(model.parameters())).master_weights(), 0.5).shadows) == ["weight"]


def weights() -> list[torch.Tensor]:
    """Of several groups, one of them larger than a group may be; not all are contiguous."""
    shapes = ((3,), (8, 4), (70, 7), (1, 1), (4, 4, 3, 3), (40,), (2, 0))
    made = [torch.randn(shape) for shape in shapes]
    made[4] = made[4].to(memory_format=torch.channels_last)
    return [*made, torch.randn(6, 5).t(), torch.randn(8, 6)[:, 1:3], torch.randn(33, dtype=torch.bfloat16)]


@pytest.mark.parametrize("room", [64, 256, 2**26])
def test_weights_that_go_through_host_memory_in_groups_are_averaged_as_all_at_once(monkeypatch, room):
    monkeypatch.setattr("smalti.training.optim.ema._PIECE_BYTES", room)
    live = weights()
    shadows = [torch.randn_like(weight, dtype=torch.float32) for weight in live]
    expected = [torch.lerp(shadow, weight.float(), 0.25) for shadow, weight in zip(shadows, live, strict=True)]
    HostCopies(live, "cpu").average(shadows, live, 0.25)
    assert all(map(torch.equal, shadows, expected))


def test_an_average_that_could_not_be_updated_is_never_taken_for_whole():
    ema = Ema({"w": nn.Parameter(torch.zeros(3))}, 0.9)
    ema._copies, ema._thread = HostCopies([torch.zeros(3)], "cpu"), ThreadPoolExecutor(1)
    ema._live["w"] = nn.Parameter(torch.zeros(5))
    ema.update(1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            assert ema.shadows
