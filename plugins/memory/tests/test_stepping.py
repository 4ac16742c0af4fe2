"""Optimizers that step some parameters at a time: the same steps, also in bf16, on any number of ranks and after a resume."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from smalti import Block, UserError, World
from smalti.checkpoint import Snapshot, load, save
from smalti.parallel import GlooCommunicator, capture, restore
from smalti.training.optim.optimizers import AdamW
from smalti_memory.updates import casts
from smalti_memory.updates.stepping import NonFiniteGradientError, ReleasesGradients, StepsInPieces, in_pieces
from smalti_optimizers.adafactor import FixedRateAdafactor
from smalti_optimizers.adamw8bit import AdamW8bit
from smalti_optimizers.decoupled import sgd
from smalti_optimizers.lion import Lion
from smalti_optimizers.muon import muon
from smalti_optimizers.prodigy import Prodigy
from support.forked_ranks import forked_processes

SHAPES = {"wide": (7, 640), "long": (5, 4, 3, 5), "vector": (11,), "single": (1, 9)}
ROUND = {"wide": (7, 640), "long": (5, 4, 4, 8), "vector": (128,), "single": (1, 32)}
"""Whose parts are whole vectors of the processor: the last numbers of others are rounded otherwise by torch's AdamW."""
KINDS = {
    "adamw": lambda groups: AdamW(groups, lr=1e-2, weight_decay=0.1),
    "adafactor": lambda groups: FixedRateAdafactor(groups, lr=1e-2, weight_decay=0.1),
    "adamw8bit": lambda groups: AdamW8bit(groups, lr=1e-2, weight_decay=0.1),
    "lion": lambda groups: Lion(groups, lr=1e-3, weight_decay=0.1),
    "sgd": lambda groups: sgd(groups, lr=1e-2, weight_decay=0.1),
}


def gradient(step: int, parameter: torch.Tensor) -> torch.Tensor:
    shape = tuple(parameter.shape)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(step + len(shape))) * 10.0 ** (step % 3 - 1)
    whole = whole.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole


def made(kind="adamw", rounding=None, *, dtype=None, mixin=StepsInPieces, shapes=SHAPES):
    """A model of odd shapes over all ranks, and its optimizer; ranks may have nothing of a parameter."""
    model, ranks = nn.Module(), dist.get_world_size() if dist.is_initialized() else 1
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        value = value.to(dtype or (torch.float32 if rounding is None else torch.bfloat16))
        if ranks > 1:
            value = distribute_tensor(value, init_device_mesh("cpu", (ranks,)), [Shard(0)])
        model.register_parameter(name, nn.Parameter(value))
    optimizer = KINDS[kind]([{"params": list(model.named_parameters())}])
    if mixin is not None:
        optimizer = in_pieces(optimizer, mixin)
        optimizer.start(5, rounding)
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        for parameter in model.parameters():
            parameter.grad = gradient(step, parameter)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_are_stepped_as_the_whole_and_the_optimizer_stays_what_it_was(kind, monkeypatch):
    shapes = {**SHAPES, "number": ()}
    plain, optimizer = made(kind, mixin=None, shapes=shapes)
    train(plain, optimizer, range(5))
    monkeypatch.setattr("smalti.training.optim.ema._PIECE_BYTES", 400)
    model, pieces = made(kind, shapes=shapes)
    train(model, pieces, range(5))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (type(pieces).__name__, isinstance(pieces, type(optimizer))) == (type(optimizer).__name__, True)
    assert capture(plain, optimizer).param_groups == capture(model, pieces).param_groups


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_bf16_weights_follow_those_of_fp32(kind, rounding):
    shapes = {"wide": (64, 640)}
    model, optimizer = made(kind, rounding, shapes=shapes)
    first, exact = copy.deepcopy(model.wide.detach()).float(), None
    reference, fp32 = made(kind, mixin=None, shapes=shapes)
    reference.wide.data.copy_(first)
    for step in range(60):
        model.wide.grad = (0.01 * gradient(step, model.wide.float())).bfloat16()
        reference.wide.grad = model.wide.grad.float()
        optimizer.step()
        fp32.step()
    found, exact = model.wide.detach().float(), reference.wide.detach()
    if rounding == "kahan":
        found = found + optimizer.state[model.wide]["rounding_rest"].float()
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4)
        return
    assert (found - exact).abs().max() <= 60 * 2**-8 * exact.abs().max()
    moved, wanted = (found - first).double(), (exact - first).double()
    share = (moved * wanted).sum() / wanted.square().sum()
    assert share == pytest.approx(1.0, abs=0.02), "without bias"


def continued(kind: str, rounding: str, source: Path | None, target: Path, steps: range) -> None:
    """These steps on all ranks, from a checkpoint if there is one, and saved."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = World(rank=rank, size=ranks, local_rank=rank, local_size=ranks)
    communicator = GlooCommunicator(world=world, group=dist.group.WORLD if ranks > 1 else None)
    model, optimizer = made(kind, rounding, shapes=SHAPES if kind == "lion" else ROUND)
    if source is not None:
        into = Snapshot(step=0, state=capture(model, optimizer))
        load(next(source.glob("step-*")), into, communicator)
        restore(model, optimizer, into.state)
    train(model, optimizer, steps)
    save(target, Snapshot(step=steps.stop, state=capture(model, optimizer), trainer={}), communicator)


def contents(folder: Path, kind: str, rounding: str) -> dict[str, torch.Tensor]:
    into = Snapshot(step=0, state=capture(*made(kind, rounding, shapes=SHAPES if kind == "lion" else ROUND)))
    load(next(folder.glob("step-*")), into, GlooCommunicator(world=World(), group=None))
    held = {f"{name}.{key}": each for name, state in into.state.optimizer_state.items() for key, each in state.items()}
    return {**into.state.model, **held}


@pytest.fixture(scope="module")
def pairs_and_fours():
    with forked_processes() as two, forked_processes(ranks=4) as four:
        yield two, four


@pytest.mark.parametrize(("kind", "rounding"), [("adamw", "stochastic"), ("adamw", "kahan"), ("lion", "stochastic")])
def test_a_run_continues_on_another_number_of_ranks_bit_for_bit(kind, rounding, tmp_path, pairs_and_fours):
    two, four = pairs_and_fours
    places = [tmp_path / name for name in ("two", "four", "one", "whole")]
    for place in places:
        place.mkdir()
    two.run(continued, kind, rounding, None, places[0], range(3))
    four.run(continued, kind, rounding, places[0], places[1], range(3, 5))
    continued(kind, rounding, places[1], places[2], range(5, 7))
    continued(kind, rounding, None, places[3], range(7))
    found, wanted = (contents(place, kind, rounding) for place in places[2:])
    assert found.keys() == wanted.keys()
    assert {each.dtype for name, each in wanted.items() if name in SHAPES} == {torch.bfloat16}
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert ("wide.rounding_rest" in wanted) == (rounding == "kahan")


# --- within the backward pass ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three layers, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, values):
        values = torch.tanh(self.first(values))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(values)))))


def released(kind="adamw", *, value=0.0, norm=0.0, mixin=ReleasesGradients):
    torch.manual_seed(2)
    model = Net()
    optimizer = KINDS[kind]([{"params": list(model.named_parameters())}])
    if mixin is not None:
        optimizer = in_pieces(optimizer, mixin)
        optimizer.start(0, None)
        optimizer.release(value_limit=value, norm_limit=norm)
    return model, optimizer


def backward(model, step):
    loss = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_the_backward_pass_are_the_whole_step_also_after_a_resume(kind, tmp_path):
    model, optimizer = released(kind, mixin=None)
    losses, norms = [], []
    for step in range(8):
        losses.append(backward(model, step))
        norms.append(nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    communicator, found, sizes = GlooCommunicator(world=World(), group=None), [], []
    for begin in (0, 4):
        early, releasing = released(kind)
        if begin:
            into = Snapshot(step=0, state=capture(early, releasing))
            load(next(tmp_path.glob("step-*")), into, communicator)
            restore(early, releasing, into.state)
        for step in range(begin, begin + 4):
            found.append(backward(early, step))
            assert all(each.grad is None for each in early.parameters())
            sizes.append(releasing.released_norm().item())
            releasing.step()
            releasing.zero_grad()
        save(tmp_path, Snapshot(step=begin + 4, state=capture(early, releasing), trainer={}), communicator)
    assert found == losses
    assert sizes == pytest.approx(norms, rel=1e-6)
    for one, other in zip(model.parameters(), early.parameters(), strict=True):
        assert torch.equal(one, other)


def test_no_gradient_is_alive_beside_another():
    model, _ = released()
    most = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: most.append(sum(p.grad is not None for p in model.parameters())))
    backward(model, 0)
    assert max(most) == 0, "after the optimizer's own hook, which is called before"


@pytest.mark.parametrize(("limits", "clip"), [({"value": 1e-3}, "value"), ({"norm": 1e-3}, "norm")])
def test_gradients_are_clipped_before_they_are_released(limits, clip):
    models = []
    for mixin in (None, ReleasesGradients):
        model, optimizer = released("sgd", mixin=mixin, **(limits if mixin else {}))
        backward(model, 0)
        if mixin is None:
            for parameter in model.parameters():
                if clip == "value":
                    nn.utils.clip_grad_value_([parameter], 1e-3)
                else:
                    nn.utils.clip_grad_norm_([parameter], 1e-3)
            optimizer.step()
        models.append(model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_a_loss_that_is_not_finite_changes_nothing_and_a_gradient_that_is_not_ends_the_run():
    model, optimizer = released()
    before = copy.deepcopy(model.state_dict())
    optimizer.steps = False
    backward(model, 0)
    assert optimizer.released_norm().item() == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (len(optimizer.state), [each.grad for each in model.parameters()]) == (0, [None] * 6)
    optimizer.steps = True
    model.first.bias.register_hook(lambda gradient: gradient * float("inf"))
    backward(model, 1)
    with pytest.raises(NonFiniteGradientError, match="not finite") as error:
        optimizer.released_norm()
    assert (error.value.exit_code, "last checkpoint" in error.value.fix) == (1, True)


def test_copies_of_weights_are_kept_neither_by_autocast_nor_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(casts, "_LEAST", 1)
    gradients, computed = [], []
    for frees in (False, True):
        torch.manual_seed(2)
        model, cached = Net(), []
        model.last.register_forward_hook(lambda *_, cached=cached: cached.append(torch.is_autocast_cache_enabled()))
        first, last = [], []
        for module, calls in ((model.first, first), (model.last, last)):
            module.forward = partial(lambda own, calls, values: calls.append(1) or own(values), module.forward, calls)
        if frees:
            casts.free_casts(model, [Block(path="twice", class_name="Linear", parameters=42)], recompute=True)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(3, 4)).float().square().mean()
            loss.backward()
        with torch.no_grad():
            model(torch.ones(3, 4))
        gradients.append(torch.cat([part.weight.grad.flatten() for part in (model.first, model.last)]))
        computed.append((len(first), len(last), cached))
    assert torch.equal(*gradients)
    assert computed == [(3, 3, [True, True, True]), (5, 5, [False, False, True])]
    assert torch.is_autocast_cache_enabled()


def test_optimizers_that_need_all_parameters_at_once_are_refused():
    model = Net()
    together = Prodigy([{"params": list(model.named_parameters())}], lr=1.0)
    pieces = in_pieces(together, StepsInPieces)
    pieces.start(0, None)
    backward(model, 0)
    with pytest.raises(UserError, match="Prodigy keeps numbers for all parameters together"):
        pieces.step()
    groups = [{"params": list(model.named_parameters()), "weight_decay": 0.0}]
    with pytest.raises(UserError, match="consists of several"):
        in_pieces(muon(groups, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0), StepsInPieces)
