"""Lion, StableAdamW and AdamW in 8 bits against libraries and definitions; and the same steps on any number of ranks."""

import bisect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smalti.checkpoint import Snapshot, load, save
from smalti.parallel import GlooCommunicator, capture, restore
from smalti.training import local_part
from smalti.training.optim.ema import grouped
from smalti.training.optim.optimizers import AdamW
from smalti.types import World
from smalti_optimizers import adamw8bit
from smalti_optimizers.adafactor import FixedRateAdafactor
from smalti_optimizers.adamw8bit import AdamW8bit, Codes, block_length, codebook
from smalti_optimizers.came import CAME
from smalti_optimizers.lion import Lion
from smalti_optimizers.prodigy import Prodigy
from smalti_optimizers.prodigy_schedule_free import ProdigyScheduleFree
from smalti_optimizers.schedule_free import ScheduleFree, ScheduleFreeAdamW
from smalti_optimizers.stable_adamw import StableAdamW
from support.forked_ranks import forked_processes
from support.whole import some

SHAPES = {"matrix": (5, 3), "vector": (7,), "convolution": (4, 3, 2, 2), "table": (1, 4, 6), "number": ()}


def gradients(step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Of very different size from step to step, so that update clipping has something to clip."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 5 - 3)


FOLLOWED = {
    "lion": (Lion, "optimi:Lion", {"betas": (0.9, 0.99)}, {}),
    "stableadamw": (StableAdamW, "optimi:StableAdamW", {"betas": (0.9, 0.99), "eps": 1e-6}, {}),
    "adafactor": (FixedRateAdafactor, "transformers:Adafactor", {}, {"scale_parameter": False, "relative_step": False}),
    "came": (CAME, "came_pytorch:CAME", {}, {"betas": (0.9, 0.999, 0.9999)}),
    "adamw_schedulefree": (ScheduleFreeAdamW, "schedulefree:AdamWScheduleFree", {}, {}),
}
"""Ours, the library's, the settings of both, and more of the library's."""
FACTORED = {"adafactor": 1, "came": 2}
"""Those with rows and columns: pairs of them for each parameter, which are also the all-reduces in a step."""


@pytest.mark.parametrize(("kind", "is_older"), [*((kind, False) for kind in FOLLOWED), *((kind, True) for kind in FACTORED)])
def test_fifty_steps_are_those_of_a_library(kind, is_older):
    """Of one that is given convolutions as matrices if they are factored so; in runs of earlier versions they are not."""
    ours, theirs, common, more = FOLLOWED[kind]
    module, _, name = theirs.partition(":")
    library = getattr(pytest.importorskip(module), name)
    first = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
    both = [{name: nn.Parameter(value.clone()) for name, value in first.items()} for _ in range(2)]
    if kind in FACTORED and not is_older:
        both[1]["convolution"] = nn.Parameter(first["convolution"].flatten(1).clone())
    common = {"lr": 1e-2, "weight_decay": 0.1, **common}
    optimizers = [ours([{"params": list(both[0].values())}], **common), library(list(both[1].values()), **common, **more)]
    if is_older:
        held = optimizers[0].state[both[0]["convolution"]]
        rows = ("row_var", "row_res")[: FACTORED[kind]]
        held |= {name: torch.zeros(4, 3, 2, 1) for name in rows}
        held |= {name.replace("row", "col"): torch.zeros(4, 3, 1, 2) for name in rows}
    if isinstance(optimizers[0], ScheduleFree):
        optimizers[1].train()
    for step in range(50):
        for weights, optimizer in zip(both, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = min(1e-2, (step + 1) * 1e-3)
            for name, weight in weights.items():
                weight.grad = gradients(step, SHAPES[name]).view(weight.shape)
            optimizer.step()
    for name, shape in SHAPES.items():
        torch.testing.assert_close(both[0][name], both[1][name].view(shape), rtol=1e-5, atol=2e-6)
    if isinstance(optimizers[0], ScheduleFree):
        own = {name: weight.detach().clone() for name, weight in both[0].items()}
        optimizers[1].eval()
        with optimizers[0].average(both[0]).average_parameters():
            for name in SHAPES:
                torch.testing.assert_close(both[0][name], both[1][name], rtol=1e-5, atol=2e-6)
        assert all(torch.equal(own[name], both[0][name]) for name in SHAPES)


def test_prodigy_finds_the_rate_that_its_authors_package_finds():
    library = pytest.importorskip("prodigyopt").Prodigy
    goals = {name: torch.randn(shape, generator=torch.Generator().manual_seed(2)) for name, shape in SHAPES.items()}
    both = [{name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()} for _ in range(2)]
    more = {"safeguard_warmup": True, "weight_decay": 0.0}
    optimizers = [
        kind([{"params": list(weights.values())}], **extra)
        for kind, weights, extra in ((Prodigy, both[0], {}), (library, both[1], more))
    ]
    found = []
    for step in range(60):
        for weights, optimizer in zip(both, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = min(1.0, (step + 1) / 10)
            for name, weight in weights.items():
                weight.grad = weight.detach() - goals[name]
            optimizer.step()
        found.append([optimizer.param_groups[0]["d"] for optimizer in optimizers])
    assert found[-1][0] > 1e-3
    torch.testing.assert_close(*torch.tensor(found, dtype=torch.float64).unbind(1), rtol=1e-3, atol=0)
    for name in SHAPES:
        torch.testing.assert_close(both[0][name], both[1][name], rtol=1e-3, atol=1e-4)


def test_prodigy_without_a_schedule_is_that_of_the_library_without_its_extras():
    """In fp64 there, where it then keeps all of `s` and `p0` in fp64 as well, and not every eleventh number in bf16."""
    library = pytest.importorskip("prodigyplus").ProdigyPlusScheduleFree

    class Whole(library):
        def get_sliced_tensor(self, tensor, slice_p=1):
            return tensor.ravel()

    goals = {name: torch.randn(shape, generator=torch.Generator().manual_seed(2)) for name, shape in SHAPES.items()}
    ours, theirs = (
        {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}
        for dtype in (torch.float32, torch.float64)
    )
    optimizer = ProdigyScheduleFree([{"params": list(ours.values())}], weight_decay=0.1)
    extras = dict.fromkeys(("factored", "use_stableadamw", "stochastic_rounding", "split_groups"), False)
    other = Whole(list(theirs.values()), weight_decay=0.1, **extras)
    found = []
    for step in range(50):
        for weights, each in ((ours, optimizer), (theirs, other)):
            each.param_groups[0]["lr"] = min(1.0, (step + 1) / 10)
            for name, weight in weights.items():
                weight.grad = weight.detach() - goals[name]
            each.step()
        found.append([each.param_groups[0]["d"] for each in (optimizer, other)])
    assert found[-1][0] > 1e-3
    torch.testing.assert_close(*torch.tensor(found, dtype=torch.float64).unbind(1), rtol=1e-4, atol=0)
    other.eval()
    with optimizer.average(ours).average_parameters():
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name].float(), rtol=1e-4, atol=1e-6)


def test_lion_works_on_any_number_of_weights_at_a_time(monkeypatch):
    def trained() -> list[torch.Tensor]:
        weights = [nn.Parameter(torch.ones(3, 5)) for _ in range(4)]
        optimizer = Lion([{"params": weights}], lr=0.1)
        for step in range(3):
            for number, weight in enumerate(weights):
                weight.grad = gradients(step + number, (3, 5))
            optimizer.step()
        return [weight.detach() for weight in weights]

    together = trained()
    monkeypatch.setattr("smalti.training.optim.ema._PIECE_BYTES", 100)
    assert [list(group) for group in grouped([60, 60, 40, 200])] == [[0], [1, 2], [3]]
    assert all(torch.equal(one, other) for one, other in zip(together, trained(), strict=True))


# --- 8 bits ---------------------------------------------------------------------------------------------------------


def test_the_codes_are_those_of_the_library_that_introduced_them():
    library = pytest.importorskip("torchao.optim.quant_utils")
    for signed in (True, False):
        torch.testing.assert_close(
            torch.tensor(codebook(signed=signed)), torch.tensor(library.create_dynamic_map(signed)), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize(("signed", "least"), [(True, -0.99296875), (False, 0.0)])
def test_there_are_256_codes_from_the_least_to_one(signed, least):
    values = codebook(signed=signed)
    assert (len(set(values)), values[0], values[-1]) == (256, pytest.approx(least), 1.0)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_code_is_found_for_numbers_beside_every_edge(signed):
    values = torch.tensor(codebook(signed=signed))
    edges = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(edges, torch.tensor(side)) for side in (-2.0, 2.0)]
    numbers = torch.cat([values, edges, *beside, torch.tensor([0.0, -0.0] if signed else [0.0])])
    found = Codes(signed=signed, device=torch.device("cpu")).nearest(numbers)
    assert torch.equal(found, torch.bucketize(numbers, edges, out_int32=True, right=True))


class Moments(AdamW8bit):
    """To look at how a moment is rounded."""

    def rounded(self, name: str, values: torch.Tensor, block: int) -> torch.Tensor:
        rows = values.view(1, -1)
        held = {name: torch.zeros_like(rows, dtype=torch.uint8), f"{name}_scale": torch.zeros(1, rows.shape[1] // block)}
        self._write(held, name, rows)
        return self._read(held, name).view(-1)


floats = st.floats(-1e4, 1e4, width=32).filter(lambda value: value == 0 or abs(value) > 1e-18)
"""Whose squares are not subnormal either."""


@settings(max_examples=60, deadline=None)
@given(values=st.lists(floats, min_size=6, max_size=6), name=st.sampled_from(["exp_avg", "exp_avg_sq"]))
def test_a_moment_becomes_the_nearest_code_times_the_largest_value_of_its_block(values, name):
    wanted = torch.tensor(values) if name == "exp_avg" else torch.tensor(values).square()
    found = Moments([{"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1).rounded(name, wanted, block=3)
    book = codebook(signed=name == "exp_avg")
    for value, got, block in zip(wanted.tolist(), found.tolist(), wanted.view(2, 3).repeat_interleave(3, 0), strict=True):
        scale = float(block.abs().max())
        after = bisect.bisect(book, value / scale if scale else 0.0)
        nearest = min(abs(value - code * scale) for code in book[max(0, after - 1) : after + 1])
        assert abs(value - got) <= nearest * (1 + 1e-4) + scale * 1e-6


@settings(max_examples=100, deadline=None)
@given(shape=st.lists(st.integers(1, 700), min_size=1, max_size=4).filter(lambda shape: len(shape) != 1 or shape[0] < 700))
def test_blocks_divide_rows(shape):
    length = block_length(torch.Size(shape))
    rows, size = shape[0], torch.Size(shape).numel()
    if length is None:
        small = len(shape) == 1 or size < 4096
        assert small or all(size // rows % each for each in range(16, 257))
    else:
        assert 16 <= length <= 256
        assert size // rows % length == 0


def test_state_in_8_bits_takes_two_bytes_per_weight_and_trains_like_adamw(monkeypatch):
    monkeypatch.setattr(adamw8bit, "_AT_ONCE", {"cpu": 64 * 100})  # several pieces
    goal, losses = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)), []
    for kind in (AdamW, AdamW8bit):
        weight = nn.Parameter(torch.zeros(300, 64))
        optimizer = kind([{"params": [weight], "weight_decay": 0.01}], lr=0.05)
        for _ in range(60):
            weight.grad = weight.detach() - goal
            optimizer.step()
        losses.append(float((weight.detach() - goal).square().mean()))
        state = optimizer.state[weight]
    assert sum(each.nbytes for each in state.values()) / weight.numel() < 2.2
    assert losses[1] == pytest.approx(losses[0], rel=0.1, abs=1e-3)


def test_the_memory_format_of_a_convolution_makes_no_difference():
    """Also after loading, which allocates codes like the parameter."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        value = torch.randn(32, 16, 3, 3, generator=torch.Generator().manual_seed(4)).to(memory_format=memory_format)
        weight = nn.Parameter(value)
        optimizer = AdamW8bit([{"params": [weight]}], lr=1e-2)
        for step in range(4):
            weight.grad = gradients(step, (32, 16, 3, 3)).to(memory_format=memory_format)
            optimizer.step()
            state = optimizer.state[weight]
            state |= {
                name: torch.empty_like(weight, dtype=torch.uint8).copy_(state[name]) for name in ("exp_avg", "exp_avg_sq")
            }
        found.append((weight.detach(), state["exp_avg"]))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# --- ranks ----------------------------------------------------------------------------------------------------------

NAMES = {"wide": (7, 640), "long": (5, 64, 3, 5), "deep": (3, 8, 8), "vector": (11,), "single": (1, 4096), "thin": (6, 1)}
KINDS = {
    "lion": Lion,
    "stableadamw": StableAdamW,
    "adamw8bit": AdamW8bit,
    "prodigy": Prodigy,
    "adafactor": FixedRateAdafactor,
    "came": CAME,
    "adamw_schedulefree": ScheduleFreeAdamW,
    "prodigy_schedulefree": ProdigyScheduleFree,
}
SUMMED = ("stableadamw", "prodigy", "adafactor", "came", "prodigy_schedulefree")
"""Those that sum over a parameter, which ranks do in another order."""


def sharded(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of odd shapes over all ranks, whole on one; some ranks have nothing of some parameters."""
    model, ranks = nn.Module(), dist.get_world_size() if dist.is_initialized() else 1
    for name, shape in NAMES.items():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        if ranks > 1:
            value = distribute_tensor(value, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        model.register_parameter(name, nn.Parameter(value))
    settings = {"lr": 1.0} if kind.startswith("prodigy") else {"lr": 1e-3, "weight_decay": 0.1}
    return model, KINDS[kind]([{"params": list(model.parameters())}], **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for parameter in model.parameters():
            gradient = gradients(step, tuple(parameter.shape))
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def averages(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor] | None:
    """x of a schedule-free optimizer, as checkpoints have it."""
    if not isinstance(optimizer, ScheduleFree):
        return None
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    average = optimizer.average(dict(model.named_parameters()))
    shadows = average.shadows
    with average.average_parameters():
        assert all(torch.equal(local_part(model.get_parameter(name)), local_part(x)) for name, x in shadows.items())
    assert all(torch.equal(local_part(one), local_part(other)) for one, other in zip(kept, model.parameters(), strict=True))
    return shadows


def continued(kind: str, source: Path | None, target: Path, steps: range) -> None:
    """These steps on all ranks, from a checkpoint if there is one, and saved."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
    communicator = GlooCommunicator(world=world, group=dist.group.WORLD if ranks > 1 else None)
    model, optimizer = sharded(kind)
    if source is not None:
        into = Snapshot(step=0, state=capture(model, optimizer), ema=averages(model, optimizer))
        load(next(source.glob("step-*")), into, communicator)
        restore(model, optimizer, into.state)
    train(model, optimizer, steps)
    state = capture(model, optimizer)
    save(target, Snapshot(step=steps.stop, state=state, ema=averages(model, optimizer), trainer={}), communicator)


def contents(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = sharded(kind)
    into = Snapshot(step=0, state=capture(model, optimizer), ema=averages(model, optimizer))
    load(next(folder.glob("step-*")), into, GlooCommunicator(world=World(), group=None))
    held = {f"{name}.{key}": each for name, state in into.state.optimizer_state.items() for key, each in state.items()}
    return {**into.state.model, **held, **{f"average of {name}": each for name, each in (into.ema or {}).items()}}


@pytest.fixture(scope="module")
def pairs_and_threes():
    with forked_processes() as two, forked_processes(ranks=3) as three:
        yield two, three


@pytest.mark.parametrize("kind", some(KINDS, "lion", "adamw8bit", "came", "prodigy_schedulefree"))
def test_a_run_continues_on_another_number_of_ranks_as_on_one(kind, tmp_path, pairs_and_threes):
    two, three = pairs_and_threes
    places = [tmp_path / name for name in ("two", "three", "one", "whole")]
    for place in places:
        place.mkdir()
    two.run(continued, kind, None, places[0], range(3))
    three.run(continued, kind, places[0], places[1], range(3, 5))
    continued(kind, places[1], places[2], range(5, 7))
    continued(kind, None, places[3], range(7))
    found, wanted = (contents(place, kind) for place in places[2:])
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        local = name.startswith(("deep.", "vector.")) and "var" in name
        if kind in SUMMED and not (kind in FACTORED and local):
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-7)
        else:
            assert torch.equal(found[name], tensor), name
    if kind == "adamw8bit":
        assert (wanted["wide.exp_avg"].dtype, wanted["wide.exp_avg_scale"].shape) == (torch.uint8, (7, 4))
        assert wanted["long.exp_avg_sq_scale"].shape == (5, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_continues_to_the_bit(kind, tmp_path):
    continued(kind, None, tmp_path / "begun", range(3))
    continued(kind, tmp_path / "begun", tmp_path / "resumed", range(3, 7))
    continued(kind, None, tmp_path / "whole", range(7))
    found, wanted = (contents(tmp_path / place, kind) for place in ("resumed", "whole"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def counted_steps(kind: str, wanted: int) -> None:
    """Of two groups, as they are with weight decay for matrices only."""
    calls: list[int] = []
    model, _ = sharded(kind)
    parameters = list(model.parameters())
    optimizer = KINDS[kind]([{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}], lr=1e-3)
    real = dist.all_reduce
    dist.all_reduce = lambda *arguments, **more: calls.append(1) or real(*arguments, **more)
    try:
        train(model, optimizer, range(2))
    finally:
        dist.all_reduce = real
    assert len(calls) == 2 * wanted


@pytest.mark.parametrize("kind", FACTORED)
def test_all_parameters_share_the_collectives_of_a_step(kind, pairs_and_threes):
    pairs_and_threes[0].run(counted_steps, kind, FACTORED[kind])
