"""What becomes a group of its own, by policy."""

import pytest
from torch import nn

from smalti import UserError
from smalti.models.blocks import find_blocks
from smalti.models.weights import without_weights
from smalti_fsdp2.options import FsdpOptions
from smalti_fsdp2.wrapping import units


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise = nn.Linear(width, 4 * width)
        self.fall = nn.Linear(4 * width, width)


def net() -> nn.Module:
    """Three layers of 8 * 10 * 10 + 50 parameters between two ends of 110."""
    with without_weights():
        layers = nn.ModuleList(Layer(10) for _ in range(3))
        return nn.ModuleDict({"first": nn.Linear(10, 10), "layers": layers, "last": nn.Linear(10, 10)})


def paths(policy: str, **options) -> list[str]:
    model = net()
    return [unit.path for unit in units(model, find_blocks(model), FsdpOptions(fsdp_auto_wrap_policy=policy, **options))]


LAYERS = ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("spelling", ["TRANSFORMER_BASED_WRAP", "transformer-based-wrap", "transformer"])
def test_every_block_is_a_group(spelling):
    assert paths(spelling) == LAYERS


def test_no_wrap_leaves_all_to_the_root():
    assert paths("no_wrap") == []


def test_by_size_groups_grow_until_they_are_large_enough():
    assert paths("SIZE_BASED_WRAP", fsdp_min_num_params=800) == LAYERS
    assert paths("SIZE_BASED_WRAP", fsdp_min_num_params=105) == [
        "first",
        *(f"{layer}.{part}" for layer in LAYERS for part in ("rise", "fall")),
        "last",
    ]


def test_a_container_is_no_group_however_large():
    assert paths("SIZE_BASED_WRAP", fsdp_min_num_params=2000) == []


def is_rise(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 40


def test_a_callable_chooses_modules(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "my_policy", sys.modules[__name__])
    assert paths("my_policy.is_rise") == [f"{layer}.rise" for layer in LAYERS]


@pytest.mark.parametrize("name", ["no_such_module.policy", "math.no_such_name", "math.pi"])
def test_a_callable_that_is_none_is_told(name):
    with pytest.raises(UserError, match=name):
        paths(name)


def test_a_word_that_is_no_policy_is_refused():
    with pytest.raises(ValueError, match="none of TRANSFORMER_BASED_WRAP"):
        FsdpOptions(fsdp_auto_wrap_policy="SOME_WRAP")


def test_without_blocks_there_is_nothing_to_shard_block_by_block():
    with pytest.raises(UserError, match="no repeated blocks"):
        units(net(), [], FsdpOptions())


def test_the_last_group_is_kept_for_the_backward_pass_and_all_are_if_asked():
    model = net()
    blocks = find_blocks(model)
    assert [unit.reshard for unit in units(model, blocks, FsdpOptions())] == [True, True, False]
    kept = units(model, blocks, FsdpOptions(fsdp_reshard_after_forward=False))
    assert [unit.reshard for unit in kept] == [False, False, False]
