"""Frozen shards in host memory: the numbers of a model whose shards are on the device, and as many copies as gathers."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from smalti import Block, World
from smalti.models.weights import SeededWeights, Weights, without_weights
from smalti.parallel.gloo import GlooCommunicator
from smalti_diffusers.lora.eight_bits import EightBitLinear, eight_bit_weights
from smalti_fsdp2.host_shards import HostShards
from smalti_fsdp2.load_weights import fill
from smalti_fsdp2.options import FsdpOptions
from smalti_fsdp2.pinning import pin_gradients_exactly
from smalti_fsdp2.sharding import prefetch, shard, shard_mesh
from smalti_fsdp2.wrapping import units
from smalti_memory.host_memory import HostMemory
from support.forked_ranks import forked_processes
from support.late_copies import LateCopies
from support.whole import some

WIDTH, DEPTH = 48, 4


class Adapted(nn.Module):
    """A frozen layer, in 8 bits or not, and one that trains beside it; 48 rows, 50 and a norm of 3 are shared unevenly."""

    def __init__(self, kept_as: torch.dtype | None) -> None:
        super().__init__()
        base = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.base = base if kept_as is None else EightBitLinear(base, kept_as)
        self.up, self.norm = nn.Linear(WIDTH, 50).requires_grad_(False), nn.LayerNorm(3).requires_grad_(False)
        self.adapter, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(50, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + (self.base(tokens) + self.adapter(tokens)).tanh()
        return tokens + self.norm(self.down(self.up(tokens)).unflatten(-1, (-1, 3))).flatten(-2)


def build(kept_as: torch.dtype | None = None) -> nn.Module:
    return nn.Sequential(*(Adapted(kept_as) for _ in range(DEPTH)))


class Poisoned(HostShards):
    """What was copied is NaN as soon as the next group is copied: torch must have read it by then."""

    before: torch.Tensor | None = None

    def fetch(self, group):
        if self.before is not None:
            self.before.fill_(255)
        self.before = super().fetch(group)
        return self.before


class Late(Poisoned):
    """What was copied is NaN until its stream has come so far, or that of another one with `strays`."""

    strays = False

    def fetch(self, group):
        copy = super().fetch(group)
        with torch.cpu.stream(torch.cpu.Stream()) if self.strays else nullcontext():
            COPIES.add(copy, group.memory)
        return copy


class Stray(Late):
    strays = True


COPIES = LateCopies()


def trained(
    size: int, kept_as: torch.dtype | None, limit: int | None, folder: Path, kind: type[HostShards] = Poisoned
) -> tuple[list, HostShards | None, list]:
    """Losses and gradients of some steps, with shards in host memory if there is a limit of pinned memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
    with without_weights():
        model = build(kept_as)
    weights: Weights = SeededWeights(build, 5)
    weights = weights if kept_as is None else eight_bit_weights(weights, model)
    blocks = [Block(path=str(n), class_name="Adapted", parameters=1, reshard=n < DEPTH - 1) for n in range(DEPTH)]
    chosen = units(model, blocks, FsdpOptions())
    shard(model, chosen, shard_mesh(world, size), FsdpOptions(), bf16=True)
    groups = [model.get_submodule(unit.path) for unit in chosen]
    prefetch(groups, 1, 1)
    shards = None
    if limit is not None:
        shards = kind(groups[:-1], "cpu", HostMemory("cpu", limit=limit, folder=folder))
    fill(model, weights, GlooCommunicator(world=world, group=dist.group.WORLD), on_host=True, from_first=False, streamed=shards)
    found = []
    for step in range(2):
        tokens = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens).float().square().mean()
        loss.backward()
        found.append(loss.detach())
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(model(tokens))
        for each in (model, *groups):
            each.reshard()
    found += [each.grad.full_tensor() for each in model.parameters() if each.requires_grad]
    frozen = [each.to_local().clone() for each in model.parameters() if not each.requires_grad]
    return found, shards, frozen


def difference(
    size: int, kept_as: torch.dtype | None, limit: int, folder: Path, kind: type[HostShards] = Poisoned
) -> list[str]:
    """What is not as it is with all shards on the device."""
    expected, _, kept = trained(size, kept_as, None, folder)
    with COPIES.streams() if issubclass(kind, Late) else nullcontext():
        found, shards, frozen = trained(size, kept_as, limit, folder, kind)
    wrong = [] if all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)) else ["the numbers"]
    wrong += [] if all(torch.equal(one, other) for one, other in zip(frozen, kept, strict=True)) else ["the frozen shards"]
    held = sum(len(each[0].group.memory) for each in shards._groups)
    wrong += [] if len(shards._groups) == DEPTH - 1 else ["the groups"]
    # A step gathers each of them twice, and once more where it computes without gradients.
    return wrong + ([] if shards.copied == 2 * 3 * held > 0 else [f"{shards.copied} bytes copied, of {held}"])


@pytest.fixture(scope="module")
def four():
    with forked_processes(ranks=4) as ranks:
        yield ranks


EVERY = [*product([1, 2, 4], [None, torch.int8, torch.float8_e4m3fn])]


@pytest.mark.parametrize(("size", "kept_as"), some(EVERY, (1, torch.int8), (2, torch.float8_e4m3fn), (4, None)))
def test_a_model_with_frozen_shards_in_host_memory_is_the_same_model(four, tmp_path, size, kept_as):
    """Shards of 1, 2 or 4 ranks; four are one group, or several copies of the model."""
    assert four.run(difference, size, kept_as, 2**30, tmp_path) == [[]] * 4


@pytest.mark.parametrize("size", [1, 4])
def test_so_is_it_where_copies_take_time(four, tmp_path, size):
    assert four.run(difference, size, None, 2**30, tmp_path, Late) == [[]] * 4
    assert four.run(difference, size, None, 2**30, tmp_path, Stray) == [["the numbers"]] * 4, "a copy that nothing waits for"


def test_so_is_it_where_pages_of_files_take_what_may_not_be_pinned(four, tmp_path):
    assert four.run(difference, 4, None, 3000, tmp_path) == [[]] * 4


def settings_after(before: str) -> str:
    torch._C._accelerator_setAllocatorSettings(before)
    pin_gradients_exactly()
    return torch._C._accelerator_getAllocatorSettings()


def test_what_torch_pins_is_rounded_up_no_more_and_its_other_settings_stay(four):
    own = "pinned_max_round_threshold_mb"
    assert four.run(settings_after, "")[0] == f"{own}:1"
    assert four.run(settings_after, "expandable_segments:True")[0] == f"expandable_segments:True,{own}:1"
    assert four.run(settings_after, f"{own}:64")[0] == f"{own}:64", "what the user says stays"
