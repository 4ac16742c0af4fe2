import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.errors import CheckpointError
from smalti.parallel.state import capture, named_parameters, optimizer_state_of, restore
from smalti_optimizers.decoupled import sgd
from support.forked_ranks import SingleRank


class Net(nn.Module):
    def __init__(self, one_dimensional=True):
        super().__init__()
        torch.manual_seed(1)
        self.inside = nn.Linear(6, 5, bias=one_dimensional)
        self.conv = nn.Conv2d(2, 3, 3, bias=one_dimensional).to(memory_format=torch.channels_last)
        self.outside = nn.Linear(5, 7, bias=False)
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False),
    "AdamW foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "AdamW amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, amsgrad=True),
    "AdamW tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1), foreach=False),
    "two groups": lambda m: torch.optim.AdamW(
        [{"params": matrices(m)}, {"params": [p for p in m.parameters() if p.ndim != 2], "weight_decay": 0.0}], lr=0.1
    ),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "SGD decoupled": lambda m: sgd([{"params": list(m.parameters())}], lr=0.1, weight_decay=0.5),
    "Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.1),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.1),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.1),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
}


def step(model, optimizer, number, without=()):
    """One step whose gradients depend on its number alone."""
    random = torch.Generator().manual_seed(number)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=random)
        parameter.grad = None if name in without else gradient
    optimizer.step()


def same(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_in_a_fresh_optimizer(tmp_path, name):
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    for number in range(3):
        step(model, optimizer, number)
    saved = save(tmp_path, Snapshot(step=3, state=capture(model, optimizer)), SingleRank())

    other = Net()
    nn.init.zeros_(other.inside.weight)
    fresh = OPTIMIZERS[name](other)
    for group in fresh.param_groups:
        group["lr"] = group["lr"] * 0
    snapshot = Snapshot(step=0, state=capture(other, fresh))
    load(saved.path, snapshot, SingleRank())
    restore(other, fresh, snapshot.state)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, fresh, number)
    assert same(model, other)


def test_state_from_one_kernel_serves_another():
    model, other = Net(), Net()
    optimizer, fresh = OPTIMIZERS["AdamW fused"](model), OPTIMIZERS["AdamW foreach"](other)
    step(model, optimizer, 0)
    restore(other, fresh, capture(model, optimizer))
    assert (fresh.param_groups[0]["fused"], fresh.param_groups[0]["foreach"]) == (None, True)


def test_a_parameter_that_was_never_stepped_stays_so(tmp_path):
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model)
    step(model, optimizer, 0, without={"outside.weight"})
    saved = save(tmp_path, Snapshot(step=1, state=capture(model, optimizer)), SingleRank())
    other = Net()
    fresh = OPTIMIZERS["AdamW"](other)
    step(other, fresh, 9)
    snapshot = Snapshot(step=0, state=capture(other, OPTIMIZERS["AdamW"](other)))
    load(saved.path, snapshot, SingleRank())
    restore(other, fresh, snapshot.state)
    assert "outside.weight" not in optimizer_state_of(fresh, named_parameters(other))


def test_a_state_before_the_first_step_has_no_moments_and_restores():
    model, other = Net(), Net()
    optimizer, fresh = OPTIMIZERS["AdamW"](model), OPTIMIZERS["AdamW"](other)
    step(other, fresh, 0)
    restore(other, fresh, capture(model, optimizer))
    assert not fresh.state


def test_loading_keeps_the_tensors_that_the_model_has(tmp_path):
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model)
    step(model, optimizer, 0)
    saved = save(tmp_path, Snapshot(step=1, state=capture(model, optimizer)), SingleRank())
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    snapshot = Snapshot(step=0, state=capture(model, optimizer))
    load(saved.path, snapshot, SingleRank())
    restore(model, optimizer, snapshot.state)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_moments_are_made_in_the_memory_format_of_their_parameter(tmp_path):
    model = Net()
    optimizer = OPTIMIZERS["AdamW"](model)
    step(model, optimizer, 0)
    saved = save(tmp_path, Snapshot(step=1, state=capture(model, optimizer)), SingleRank())
    snapshot = Snapshot(step=0, state=capture(model, OPTIMIZERS["AdamW"](model)))
    load(saved.path, snapshot, SingleRank())
    assert snapshot.state.optimizer_state["conv.weight"]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_names_are_those_of_the_plain_model():
    model = Net()
    wanted = capture(model, OPTIMIZERS["AdamW"](model)).model.keys()
    model.inside = checkpoint_wrapper(model.inside)
    model.outside = torch.compile(model.outside)
    wrapped = torch.compile(model)
    assert capture(wrapped, OPTIMIZERS["AdamW"](wrapped)).model.keys() == wanted


def test_a_part_of_the_model_may_be_called_module():
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert list(named_parameters(model)) == ["module.weight", "module.bias"]


def test_tied_parameters_are_kept_once_and_stay_tied():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert list(capture(model, OPTIMIZERS["SGD"](model)).model) == ["0.weight"]


def test_only_what_persists_is_kept():
    model = Net()
    assert {"average", "scratch"} & capture(model, OPTIMIZERS["SGD"](model)).model.keys() == {"average"}


def test_state_per_parameter_that_is_no_tensor_comes_back():
    model, other = Net(), Net()
    optimizer, fresh = OPTIMIZERS["SGD momentum"](model), OPTIMIZERS["SGD momentum"](other)
    step(model, optimizer, 0)
    optimizer.state[model.inside.weight]["age"] = 7
    restore(other, fresh, capture(model, optimizer))
    assert fresh.state[other.inside.weight]["age"] == 7


def test_settings_come_back_in_the_types_that_the_optimizer_uses(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), betas=(0.5, 0.75))
    saved = save(tmp_path, Snapshot(step=1, state=capture(model, optimizer)), SingleRank())
    fresh = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    snapshot = Snapshot(step=0, state=capture(model, fresh))
    load(saved.path, snapshot, SingleRank())
    restore(model, fresh, snapshot.state)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["betas"]) == (torch.tensor(0.25), (0.5, 0.75))


def test_an_optimizer_for_another_model_is_refused():
    with pytest.raises(CheckpointError, match="5 parameters that the model does not have"):
        capture(Net(), OPTIMIZERS["SGD"](Net()))


def test_settings_that_json_cannot_hold_are_refused_by_name():
    model = Net()
    optimizer = OPTIMIZERS["SGD"](model)
    optimizer.param_groups[0]["schedule"] = lambda step: 1.0
    with pytest.raises(CheckpointError, match="the optimizer's schedule is a function"):
        capture(model, optimizer)


def test_another_number_of_parameter_groups_is_refused():
    model = Net()
    state = capture(model, OPTIMIZERS["two groups"](model))
    with pytest.raises(CheckpointError, match="has 1 parameter groups, its saved state 2"):
        restore(model, OPTIMIZERS["AdamW"](model), state)


def test_a_model_with_other_tensors_is_refused():
    model, other = Net(), Net(one_dimensional=False)
    state = capture(model, OPTIMIZERS["SGD"](model))
    with pytest.raises(CheckpointError, match=r"other tensors: conv.bias, inside.bias"):
        restore(other, OPTIMIZERS["SGD"](other), state)


def test_what_is_frozen_is_left_out_with_the_buffers_of_modules_that_are_frozen_whole():
    model = Net()
    model.inside.requires_grad_(False)
    model.conv.register_buffer("mask", torch.ones(2))
    model.inside.register_buffer("table", torch.ones(2))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    assert capture(model, optimizer).model.keys() == {"average", "conv.weight", "conv.bias", "conv.mask", "outside.weight"}


def test_what_is_frozen_stays_as_it_is_when_a_state_is_put_back():
    model, other = Net(), Net()
    for each in (model, other):
        each.inside.requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    restore(other, torch.optim.SGD(other.outside.parameters()), capture(model, torch.optim.SGD(model.outside.parameters())))
    assert [bool((parameter == 1).all()) for parameter in (other.inside.weight, other.outside.weight)] == [False, True]
