"""Attention is replaced in the modules that are named, by whatever way they come to it, and nowhere else."""

from functools import wraps

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from smalti import UserError
from smalti_fsdp2.rebinding import Rebinding

TOKENS = torch.randn(1, 2, 3, 4)


def helper(tokens):
    return scaled_dot_product_attention(tokens, tokens, tokens)


class ByAlias(nn.Module):
    def forward(self, tokens):
        return F.scaled_dot_product_attention(tokens, tokens, tokens)


class ByFullName(nn.Module):
    def forward(self, tokens):
        return torch.nn.functional.scaled_dot_product_attention(F.silu(tokens), tokens, value=tokens)


class ByHelper(nn.Module):
    def forward(self, tokens):
        return self.attend(tokens)

    def attend(self, tokens):
        return next(helper(each[None]) for each in tokens)


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = ByAlias()

    def forward(self, tokens):
        return self.own(tokens)


class Processor:
    def __call__(self, module, tokens):
        return helper(tokens)


class Processed(nn.Module):
    def __init__(self, processor):
        super().__init__()
        self.processor = processor

    def forward(self, tokens):
        return self.processor(self, tokens)


class Other(nn.Module):
    def forward(self, tokens):
        return tokens @ tokens.mT @ tokens


def wrapped():
    module = ByAlias()
    forward = module.forward

    @wraps(forward)
    def around(*arguments):
        return forward(*arguments)

    module.forward = around
    return module


def zeros(query, key, value, *more, **named):
    return torch.zeros_like(query)


@pytest.mark.parametrize("make", [ByAlias, ByFullName, ByHelper, Within, wrapped, lambda: Processed(Processor())])
def test_a_module_computes_attention_by_another_function_and_others_of_its_class_do_not(make):
    module, other = make(), make()
    before = other(TOKENS)
    assert Rebinding(zeros).apply(module)
    assert not module(TOKENS).any()
    assert torch.equal(other(TOKENS), before)


def test_a_processor_that_others_share_stays_theirs():
    processor = Processor()
    module, other = Processed(processor), Processed(processor)
    Rebinding(zeros).apply(module)
    assert not module(TOKENS).any()
    assert other(TOKENS).any()


def test_all_modules_of_a_class_share_one_copy():
    one, other = Processed(Processor()), Processed(Processor())
    rebinding = Rebinding(zeros)
    rebinding.apply(nn.ModuleList([one, other]))
    assert type(one.processor) is type(other.processor)


def test_a_module_with_attention_of_its_own_is_told_apart():
    module = Other()
    assert not Rebinding(zeros).apply(module)
    assert type(module) is Other


def test_what_diffusers_would_compute_otherwise_is_refused():
    from diffusers.models.transformers.transformer_flux import FluxAttention

    module = FluxAttention(8, dim_head=4, heads=2)
    assert Rebinding(zeros).apply(module)
    tokens = torch.randn(1, 3, 8)
    assert not module(tokens).any()
    module.processor._attention_backend = "flash"
    with pytest.raises(UserError, match="the attention 'flash' of diffusers cannot be split"):
        module(tokens)
