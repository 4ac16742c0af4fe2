"""Channels last, replicated and sharded: the same training, and state in the layout that it always has."""

import pytest
import torch

from smalti.errors import UserError
from smalti.models.setup import use_channels_last, wants_channels_last
from smalti_testing import TinyFamily
from smalti_testing.strategy_subject import open_strategy, whole_state
from support.forked_ranks import forked_processes

STRATEGIES = {"ddp": (), "fsdp2": ("--fsdp_enable",)}


def trained(name: str, flag: str) -> dict[str, torch.Tensor]:
    """Weights and moments after two steps on both ranks, and of which convolutions the inputs had channels last."""
    subject = open_strategy(name, (*STRATEGIES[name], flag), 2)
    seen = []
    for module in subject.parallel.unwrap(subject.model).modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, given: seen.append(_has_channels_last(given[0])))
    for number in range(2):
        subject.step(number)
    state = subject.state()
    assert seen
    assert all(seen) == (flag == "--channels_last")
    assert all(tensor.is_contiguous() for tensor in state.model.values())
    return whole_state(state)


def _has_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def compare(name: str) -> float:
    """The largest difference that channels last make."""
    with_it, without = trained(name, "--channels_last"), trained(name, "--no_channels_last")
    assert with_it.keys() == without.keys()
    return max(float((with_it[key] - without[key]).abs().max()) for key in without)


@pytest.fixture(scope="module")
def pair():
    with forked_processes(group=False) as processes:
        yield processes


@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_the_same_but_for_rounding_and_state_stays_contiguous(pair, name):
    assert pair.run(compare, name) == [pytest.approx(0, abs=1e-5)] * 2


class Convolutional(TinyFamily):
    convolutional = True


@pytest.mark.parametrize(
    ("chosen", "family", "device", "expected"),
    [
        (None, Convolutional(), "cuda:0", True),
        (None, Convolutional(), "cpu", False),
        (None, TinyFamily(), "cuda:0", False),
        (True, TinyFamily(), "cpu", True),
        (False, Convolutional(), "cuda:0", False),
    ],
)
def test_it_is_on_by_itself_for_families_of_convolutions_on_cuda_devices(chosen, family, device, expected):
    assert wants_channels_last(chosen, family, device) is expected


def test_a_model_without_convolutions_is_refused_when_it_is_asked_for():
    with pytest.raises(UserError, match="no convolutions"):
        use_channels_last(torch.nn.Linear(2, 2))
