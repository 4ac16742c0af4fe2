"""Facts of a model that are counted without weights, against a real forward pass of the same model."""

import json
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from smalti.hookspecs import HookSpecs
from smalti.models import find_blocks, materialise
from smalti.models.weights import without_weights
from smalti.plugins import create, find_optimizer, load_plugins
from smalti_plan import counting
from smalti_plan.counting import count_facts
from smalti_plan.facts import ModelFacts
from smalti_plan.repeated import Repeated
from smalti_testing.tiny import TinyFamily


@pytest.fixture(scope="module")
def family():
    return TinyFamily()


def facts_of(family, *, bf16):
    with without_weights():
        model = family.build_model()
    return model, count_facts(
        family, model, find_blocks(model, family.block_classes()), width=16, height=8, bf16=bf16, kind="cpu"
    )


def kept_by_autograd(family, model):
    """Bytes of the tensors that a real forward pass keeps, but for weights."""
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    noisy = torch.randn(1, *family.latent_shape(16, 8))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = family.forward(model, noisy, torch.full((1,), 500.0), family.example_conditioning(16, 8))
    del output
    return sum(kept.values())


def test_what_the_backward_pass_needs_is_what_a_real_forward_pass_keeps(family):
    model, facts = facts_of(family, bf16=False)
    sample = facts.sample
    real = materialise(model, family.weights(0), "cpu")
    assert sample.saved + sum(block.saved for block in sample.blocks) == kept_by_autograd(family, real)
    assert (sample.copied, sum(block.copied for block in sample.blocks)) == (0, 0)
    assert all(block.inputs > 0 for block in sample.blocks)


def test_under_autocast_every_weight_of_a_product_is_copied_in_bf16(family):
    _, facts = facts_of(family, bf16=True)
    copied = facts.sample.copied + sum(block.copied for block in facts.sample.blocks)
    with without_weights():
        model = family.build_model()
    products = [each.weight for each in model.modules() if isinstance(each, nn.Linear | nn.Conv2d)]
    assert copied >= 2 * sum(weight.numel() for weight in products) > 0


def test_the_model_is_left_as_it_was_and_operations_are_those_of_the_family(family):
    model, facts = facts_of(family, bf16=False)
    assert all(each.is_meta for each in model.parameters())
    assert facts.sample.flops == family.flops_per_sample(16, 8)
    assert facts.parameters == sum(each.numel() for each in model.parameters())
    assert facts.outside + sum(block.parameters for block in facts.sample.blocks) == facts.parameters


def test_facts_survive_json(family):
    _, facts = facts_of(family, bf16=True)
    assert ModelFacts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


class TwoOutputs(nn.Module):
    """A block that returns two parts of one storage and an input as it is; those that get a shift keep that, too."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.mixes = nn.Linear(8, 8)

    def forward(self, first, second, shift, extra=None):
        TwoOutputs.runs += 1
        both = torch.tanh(self.mixes(torch.cat([first, second], 1)) * shift.exp())
        if extra is not None:
            both = torch.tanh(both + extra)
        return both[:, : first.shape[1]], both[:, first.shape[1] :], shift


class DeepFamily(TinyFamily):
    def build_model(self):
        model = nn.Module()
        model.begin, model.end = nn.Linear(8, 8), nn.Linear(8, 8)
        model.blocks = nn.ModuleList(TwoOutputs() for _ in range(9))
        return model

    def block_classes(self):
        return ("TwoOutputs",)

    def forward(self, model, noisy, timesteps, conditioning):
        first = second = model.begin(torch.ones(1, 6, 8))
        shift = model.begin(torch.ones(8))
        for number, block in enumerate(model.blocks):
            first, second, shift = block(first, second, shift, extra=first[:, :1] if number > 4 else None)
            first, second = first * shift, second.add_(shift)
        return model.end(torch.cat([first, second], 1))


@pytest.mark.parametrize("bf16", [False, True])
def test_blocks_that_are_equal_to_two_before_do_not_run_and_count_the_same(monkeypatch, bf16):
    @contextmanager
    def all_of_them(saved, counter, blocks):
        yield Repeated(saved, counter)

    TwoOutputs.runs = 0
    model, facts = facts_of(DeepFamily(), bf16=bf16)
    assert TwoOutputs.runs == 2 * 2 + 2  # with and without `extra`; once of each for the backward pass
    assert not any("forward" in vars(block) for block in model.blocks)
    monkeypatch.setattr(counting, "repeated_blocks", all_of_them)
    assert facts_of(DeepFamily(), bf16=bf16)[1] == facts
    assert TwoOutputs.runs == 6 + 9 + 2


@pytest.mark.parametrize("name", ["adafactor", "adafactor_scaled", "came"])
def test_rows_and_columns_are_those_that_an_optimizer_keeps(name):
    model, facts = facts_of(WithTable(), bf16=False)
    entry = find_optimizer(name, load_plugins().gather(HookSpecs.register_optimizers))
    trained = [nn.Parameter(torch.zeros(each.shape)) for each in model.parameters() if each.requires_grad]
    optimizer = create(entry, entry.factory, [{"params": trained}], lr=0.1)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(each.nbytes for state in optimizer.state.values() for key, each in state.items() if key != "step")
    factors = facts.flattened_factors if entry.factors_flattened else facts.factors
    assert facts.flattened_factors < facts.factors
    more = (entry.factors - 1) * sum(4 * each.numel() for each in trained if each.dim() < 2)  # a vector has one average
    assert entry.state_bytes * facts.trained + 4 * entry.factors * factors - more == kept


class WithTable(TinyFamily):
    """Beside its convolutions, a weight of three dimensions that is factored over the last two by any rule."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.table = nn.Parameter(torch.empty(1, 16, 8))
        return model
