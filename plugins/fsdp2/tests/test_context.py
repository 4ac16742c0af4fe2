"""Ranks that share the tokens of a sample compute what one rank computes: losses, gradients and pictures."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from smalti.models.context import Attention, ContextPlan, Join, Split, context_plan
from smalti.models.family import SampleRequest
from smalti.models.toy import ToyFamily, ToyShape
from smalti.testing import RankFailed, TinyFamily, two_processes
from smalti_fsdp2.context import split_context
from smalti_fsdp2.recomputation import recompute
from smalti.types import Block

TOY = ToyShape(width=32, depth=2, heads=4, max_tokens=5, vocabulary=64)
STRATEGIES = ("allgather", "alltoall")


# --- models ---------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Joint attention over pictures and texts under a mask of texts, then cross-attention to texts that stay whole."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.joint = Joint()
        self.cross = Cross()
        self.leave = nn.Linear(16, 8)

    def forward(self, pictures, texts, mask=None):
        pictures, texts = self.enter(pictures), self.enter(texts)
        pictures = self.cross(self.joint(pictures, texts, mask=mask), texts)
        return self.leave(pictures)


class Joint(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, pictures, texts, mask=None):
        tokens = torch.cat([pictures, texts], dim=1)
        if mask is not None and mask.ndim == 2:  # of texts
            mask = torch.cat([mask.new_ones(pictures.shape[:2]), mask], dim=1)[:, None, None]
        query, key, value = self.qkv(tokens).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)
        return pictures + mixed[:, : pictures.shape[1]]


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, pictures, texts):
        return pictures + F.scaled_dot_product_attention(self.mix(pictures), texts, texts)


def mixed_plan(*masks):
    return ContextPlan(
        heads=4,
        splits=(
            Split(module="joint", tensor="pictures", stream="image", dim=1),
            Split(module="joint", tensor="texts", stream="text", dim=1),
            *masks,
        ),
        attention=(Attention(module="joint", streams=("image", "text")),),
        joins=(Join(module="leave", stream="image", dim=1),),
    )


def flux():
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
