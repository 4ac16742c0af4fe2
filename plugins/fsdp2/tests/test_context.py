"""Ranks that share the tokens of a sample compute what one rank computes: predictions, gradients and pictures."""

import copy
import re
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.debug import CommDebugMode

from smalti import Block, UserError
from smalti.models.context_parallel import Attention, ContextPlan, Join, Split
from smalti.models.family import SampleRequest, context_plan
from smalti_fsdp2.activation_checkpointing import recompute
from smalti_fsdp2.context import split_context
from smalti_testing import RankFailed, TinyFamily
from smalti_testing.family_subject import native_objective
from smalti_toy.family import ToyFamily, ToyShape
from support.forked_ranks import forked_processes
from support.whole import some

TOY = ToyFamily(ToyShape(width=32, depth=2, heads=4, max_tokens=4, vocabulary=64))
STRATEGIES = ("allgather", "alltoall")


# --- models: what they are made of, where they are split, and what goes in ------------------------------------------


class Joint(nn.Module):
    """Attention over pictures and texts, under a mask of texts (B, T) or of everything."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, pictures, texts, mask=None):
        if mask is not None and mask.ndim == 2:
            mask = torch.cat([mask.new_ones(pictures.shape[:2]), mask], dim=1)[:, None, None]
        parts = self.qkv(torch.cat([pictures, texts], dim=1)).unflatten(2, (3, 4, 4))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        return pictures + mixed[:, : pictures.shape[1]]


class Cross(nn.Module):
    """Attention to texts that stay whole."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, pictures, texts):
        return pictures + F.scaled_dot_product_attention(self.mix(pictures), texts, texts)


class Mixed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.enter = nn.Linear(8, 16)
        self.joint = Joint()
        self.cross = Cross()
        self.leave = nn.Linear(16, 8)
        self.bias = nn.Parameter(torch.zeros(1, 4, 16, 16))

    def forward(self, pictures, texts, mask):
        pictures, texts = self.enter(pictures), self.enter(texts)
        if self.kind == "whole mask":
            mask = torch.cat([mask.new_ones(pictures.shape[:2]), mask], dim=1)[:, None, None]
        if self.kind == "bias":
            mask = self.bias
        return self.leave(self.cross(self.joint(pictures, texts, mask), texts))


class Biased(nn.Module):
    """A bias for all keys that is split with the queries."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 9, 9))
        self.rows = Rows()

    def forward(self, tokens):
        return self.rows(tokens, self.bias)


class Rows(nn.Module):
    def forward(self, tokens, bias):
        heads = tokens.unflatten(2, (4, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2)


def biased():
    plan = ContextPlan(
        heads=4,
        splits=(
            Split(module="rows", tensor="tokens", stream="tokens", dim=1),
            Split(module="rows", tensor="bias", stream="tokens", dim=-2),
        ),
        attention=(Attention(module="rows", streams=("tokens",)),),
        joins=(Join(module="rows", stream="tokens", dim=1),),
    )
    return Biased(), plan, lambda draw: {"tokens": draw(2, 9, 16)}


def mixed(kind):
    masks = Split(module="joint", tensor="mask", stream="text", dim=1, ndim=2)
    plan = ContextPlan(
        heads=4,
        splits=(
            Split(module="joint", tensor="pictures", stream="image", dim=1),
            Split(module="joint", tensor="texts", stream="text", dim=1),
            masks,
        ),
        attention=(Attention(module="joint", streams=("image", "text")),),
        joins=(Join(module="leave", stream="image", dim=1),),
    )

    def inputs(draw):
        return {"pictures": draw(2, 9, 8), "texts": draw(2, 7, 8), "mask": torch.arange(7) < torch.tensor([[7], [3]])}

    return Mixed(kind), plan, inputs


def toy(edge):
    """4 words and (edge / 4)² patches."""

    def inputs(draw):
        return {"noisy": draw(2, 3, edge, edge), "timesteps": torch.tensor([100.0, 700.0]), "words": torch.ones(2, 4).long()}

    model = TOY.build_model()
    return model, context_plan(TOY, model), inputs


def flux(text):
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    plan = ContextPlan(
        heads=4,
        splits=(
            Split(module="", tensor="hidden_states", stream="image", dim=1),
            Split(module="", tensor="encoder_hidden_states", stream="text", dim=1),
            Split(module="", tensor="img_ids", stream="image", dim=0, ndim=2),
            Split(module="", tensor="txt_ids", stream="text", dim=0, ndim=2),
        ),
        attention=(
            Attention(module="transformer_blocks.*.attn", streams=("text", "image")),
            Attention(module="single_transformer_blocks.*.attn", streams=("text", "image")),
        ),
        joins=(Join(module="proj_out", stream="image", dim=1),),
    )

    def inputs(draw):
        return {
            "hidden_states": draw(2, 16, 8),
            "encoder_hidden_states": draw(2, text, 24),
            "pooled_projections": draw(2, 16),
            "timestep": torch.tensor([0.1, 0.7]),
            "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
            "txt_ids": torch.zeros(text, 3),
            "return_dict": False,
        }

    return model, plan, inputs


CASES = {
    "toy": lambda: toy(16),
    "toy, uneven": lambda: toy(12),
    "toy, few tokens": lambda: toy(4),
    "flux": lambda: flux(4),
    "flux, uneven": lambda: flux(5),
    "split mask": lambda: mixed("split mask"),
    "whole mask": lambda: mixed("whole mask"),
    "whole bias": lambda: mixed("bias"),
    "split bias": biased,
}


# --- on every rank --------------------------------------------------------------------------------------------------


@cache
def group_of(context):
    return dist.new_subgroups(context)[0]


def noisy(model):
    """With noise on all parameters, since gates and outputs may start at zero."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model


def loss_of(model, inputs, number):
    """The loss for sample `number`."""
    draws = torch.Generator().manual_seed(number)
    answer = model(**inputs(lambda *shape: torch.randn(shape, generator=draws)))
    answer = answer[0] if isinstance(answer, tuple) else answer
    return (answer * torch.randn(answer.shape, generator=draws)).square().mean()


def disagreement(case, strategy, *, context=2, recomputing=""):
    """How far this rank's loss and the mean gradient over all ranks are from those of one rank, relatively."""
    torch.manual_seed(0)
    model, plan, inputs = CASES[case]()
    model = noisy(model)
    alone = copy.deepcopy(model)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    wanted = [loss_of(alone, inputs, number) for number in range(ranks // context)]
    torch.stack(wanted).mean().backward()
    split_context(model, plan, group_of(context), strategy)
    if recomputing:
        recompute(model, blocks_of(model), mode=recomputing, every=1)
    loss = loss_of(model, inputs, rank // context)
    loss.backward()
    errors = {"loss": far(loss, wanted[rank // context])}
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            dist.all_reduce(gradient)
            errors[name] = far(gradient / ranks, other.grad)
    return errors


def blocks_of(model):
    paths = [path for path, _ in model.named_modules() if re.fullmatch(r"\w*blocks\.\d+", path)]
    return [Block(path=path, class_name="", parameters=0) for path in paths]


def compiled(cases, strategy, backend, recomputing):
    """How far losses and mean gradients are from those of one rank, for inputs of several sizes; graphs and breaks."""
    counters.clear()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, plan, _ = CASES[cases[0]]()
    model = noisy(model)
    alone = copy.deepcopy(model)
    split_context(model, plan, group_of(2), strategy)
    if recomputing:
        recompute(model, blocks_of(model), mode=recomputing, every=1)
    for block in blocks_of(model):
        module = model.get_submodule(block.path)
        module.forward = torch.compile(module.forward, backend=backend)
    errors = []
    for case in cases:
        _, _, inputs = CASES[case]()
        losses = [loss_of(each, inputs, 0) for each in (model, alone)]
        errors.append(far(*losses))
        for loss in losses:
            loss.backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(one.grad)
        errors.append(far(one.grad / 2, other.grad))
    return max(errors), counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def messages(case, strategy):
    """That one forward pass sends, by kind."""
    model, plan, inputs = CASES[case]()
    split_context(model, plan, group_of(2), strategy)
    with CommDebugMode() as communication:
        loss_of(model, inputs, 0)
    return {str(name).split(".")[1].strip("_"): count for name, count in communication.get_comm_counts().items()}


def far(found, wanted):
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))


def pictures(strategy):
    """Those that this rank draws, and those that it would draw alone."""
    family = TOY
    torch.manual_seed(0)
    model = noisy(family.build_model()).eval()
    request = SampleRequest(
        prompts=["a fox", "two boats"],
        seeds=[1, 2],
        width=16,
        height=12,
        steps=3,
        guidance=2.0,
        objective=native_objective(family),
    )
    with torch.no_grad():
        alone = family.sample(model, request)
        split_context(model, context_plan(family, model), group_of(2), strategy)
        return far(family.sample(model, request), alone)


def attention_of_another_kind():
    class Own(nn.Module):
        def forward(self, tokens):
            return tokens @ tokens.transpose(1, 2) @ tokens

    split, join = Split(module="", tensor="tokens", stream="tokens", dim=1), Join(module="", stream="tokens", dim=1)
    plan = ContextPlan(heads=1, splits=(split,), attention=(Attention(module="", streams=("tokens",)),), joins=(join,))
    model = Own()
    split_context(model, plan, group_of(2), "allgather")
    model(torch.randn(1, 4, 2))


@pytest.fixture(scope="module")
def pair():
    with forked_processes() as processes:
        yield processes


@pytest.fixture(scope="module")
def four():
    with forked_processes(ranks=4) as processes:
        yield processes


def worst(answers):
    return max(error for answer in answers for error in answer.values())


# --- what holds -----------------------------------------------------------------------------------------------------


EVERY = [*product(CASES, STRATEGIES)]
KEPT = [("flux", "alltoall"), ("toy, few tokens", "alltoall"), *((case, "allgather") for case in CASES if case != "toy")]


@pytest.mark.parametrize(("case", "strategy"), some(EVERY, *KEPT))
def test_two_ranks_have_the_loss_and_the_gradients_of_one(pair, case, strategy):
    assert worst(pair.run(disagreement, case, strategy)) < 1e-5


RECOMPUTED = [*product(["full", "selective"], STRATEGIES)]


@pytest.mark.parametrize(("recomputing", "strategy"), some(RECOMPUTED, ("full", "alltoall"), ("selective", "allgather")))
def test_blocks_that_are_computed_again_see_all_tokens_again(pair, recomputing, strategy):
    assert worst(pair.run(disagreement, "toy, uneven", strategy, recomputing=recomputing)) < 1e-5


COMPILED = [
    (["toy, uneven"], "allgather", "aot_eager", "selective", 2),
    (["flux", "flux, uneven"], "allgather", "eager", "", 4),
    (["flux", "flux, uneven"], "alltoall", "eager", "full", 4),
]


@pytest.mark.parametrize(("cases", "strategy", "backend", "recomputing", "most"), some(COMPILED, COMPILED[0]))
def test_a_compiled_block_is_one_graph_that_sees_all_tokens(pair, cases, strategy, backend, recomputing, most):
    """Of each size; one block of each class of Flux is compiled for the first size, and for all others."""
    for error, graphs, breaks in pair.run(compiled, cases, strategy, backend, recomputing):
        assert error < 1e-5
        assert 0 < graphs <= most
        assert breaks == {}


def test_keys_and_values_travel_in_one_message(pair):
    """For two blocks; one more joins what comes out."""
    assert pair.run(messages, "flux", "allgather") == [{"allgather_base": 3}] * 2
    assert pair.run(messages, "flux", "alltoall") == [{"alltoall_base": 4, "allgather_base": 1}] * 2


@pytest.mark.parametrize(("context", "strategy"), some([*product([2, 4], STRATEGIES)], (2, "alltoall"), (4, "allgather")))
def test_four_ranks_have_them_too_in_two_groups_or_in_one(four, context, strategy):
    assert worst(four.run(disagreement, "toy, uneven", strategy, context=context)) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_for_which_no_token_is_left_changes_nothing(four, strategy):
    assert worst(four.run(disagreement, "toy, few tokens", strategy, context=4)) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pictures_are_those_of_one_rank(pair, strategy):
    assert max(pair.run(pictures, strategy)) < 1e-5


def test_attention_that_cannot_be_made_to_see_all_tokens_is_refused(pair):
    with pytest.raises(RankFailed, match="UserError: attention in the model would see a part of the tokens"):
        pair.run(attention_of_another_kind)


def test_a_family_that_does_not_say_where_it_can_be_split_is_refused():
    family = TinyFamily()
    with pytest.raises(UserError, match="tiny cannot be trained with context parallelism"):
        context_plan(family, family.build_model())
