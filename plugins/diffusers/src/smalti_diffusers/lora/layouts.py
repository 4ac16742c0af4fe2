"""Which layer of an original model each layer of diffusers is.

Kohya's tools and ComfyUI name layers as the authors of a model did. There, one layer can hold what diffusers keeps in several:
the rows of query, key and value follow one another in `qkv`.

Names only, collected from the loaders of those tools and from diffusers' own conversions of single files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import cast

Layout = Mapping[str, tuple[str, ...]]
"""Original layer -> the layers of diffusers whose rows make it up, in this order. `{}` is the number of a block."""


def _fused(original: str, block: str, *layers: str) -> dict[str, tuple[str, ...]]:
    return {original: tuple(f"{block}.{layer}" for layer in layers)}


def _renamed(original: str, block: str, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {f"{original}.{theirs}": (f"{block}.{layer}",) for theirs, layer in names.items()}


_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _double_blocks(feed_forward: tuple[str, str]) -> Layout:
    """The blocks of Flux that keep texts and images apart; the two layers of their feed-forward part are named differently."""
    first, second = feed_forward
    block, ours = "double_blocks.{}", "transformer_blocks.{}"
    return {
        **_fused(f"{block}.img_attn.qkv", f"{ours}.attn", *_QKV),
        **_fused(f"{block}.txt_attn.qkv", f"{ours}.attn", *_ADDED_QKV),
        **_renamed(
            block,
            ours,
            {
                "img_attn.proj": "attn.to_out.0",
                "txt_attn.proj": "attn.to_add_out",
                "img_mlp.0": f"ff.{first}",
                "img_mlp.2": f"ff.{second}",
                "txt_mlp.0": f"ff_context.{first}",
                "txt_mlp.2": f"ff_context.{second}",
                "img_mod.lin": "norm1.linear",
                "txt_mod.lin": "norm1_context.linear",
            },
        ),
    }


FLUX: Layout = {
    **_double_blocks(("net.0.proj", "net.2")),
    **_fused("single_blocks.{}.linear1", "single_transformer_blocks.{}", *(f"attn.{each}" for each in _QKV), "proj_mlp"),
    **_renamed("single_blocks.{}", "single_transformer_blocks.{}", {"linear2": "proj_out", "modulation.lin": "norm.linear"}),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "final_layer.linear": ("proj_out",),
}

FLUX2: Layout = {
    **_double_blocks(("linear_in", "linear_out")),
    **_renamed(
        "single_blocks.{}", "single_transformer_blocks.{}", {"linear1": "attn.to_qkv_mlp_proj", "linear2": "attn.to_out"}
    ),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "final_layer.linear": ("proj_out",),
}

SD3: Layout = {
    **_fused("joint_blocks.{}.x_block.attn.qkv", "transformer_blocks.{}.attn", *_QKV),
    **_fused("joint_blocks.{}.context_block.attn.qkv", "transformer_blocks.{}.attn", *_ADDED_QKV),
    **_fused("joint_blocks.{}.x_block.attn2.qkv", "transformer_blocks.{}.attn2", *_QKV),
    **_renamed(
        "joint_blocks.{}",
        "transformer_blocks.{}",
        {
            "x_block.attn.proj": "attn.to_out.0",
            "x_block.attn2.proj": "attn2.to_out.0",
            "x_block.mlp.fc1": "ff.net.0.proj",
            "x_block.mlp.fc2": "ff.net.2",
            "x_block.adaLN_modulation.1": "norm1.linear",
            "context_block.attn.proj": "attn.to_add_out",
            "context_block.mlp.fc1": "ff_context.net.0.proj",
            "context_block.mlp.fc2": "ff_context.net.2",
        },
    ),
    "context_embedder": ("context_embedder",),
    "final_layer.linear": ("proj_out",),
}

_LUMINA_BLOCK = {
    "attention.out": "attn.to_out.0",
    "feed_forward.w1": "feed_forward.linear_1",
    "feed_forward.w2": "feed_forward.linear_2",
    "feed_forward.w3": "feed_forward.linear_3",
    "adaLN_modulation.1": "norm1.linear",
}

LUMINA2: Layout = {
    original: layers
    for block in ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
    for original, layers in {
        **_fused(f"{block}.attention.qkv", f"{block}.attn", *_QKV),
        **_renamed(block, block, _LUMINA_BLOCK),
    }.items()
}

Z_IMAGE: Layout = {
    original: layers
    for block in ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
    for original, layers in {
        **_fused(f"{block}.attention.qkv", f"{block}.attention", *_QKV),
        f"{block}.attention.out": (f"{block}.attention.to_out.0",),
    }.items()
}
"""As ComfyUI keeps the model. musubi-tuner has the names of diffusers."""

_RESNET = {"conv1": "in_layers.2", "time_emb_proj": "emb_layers.1", "conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
_UNET = {
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}


def _unet_prefixes(config: Mapping[str, object]) -> dict[str, str]:
    """Beginnings of names: diffusers counts blocks and layers in them, the original numbers all layers in one row."""
    layers = cast(int, config["layers_per_block"])
    up = cast(list[str], config["up_block_types"])
    prefixes = dict(_UNET)
    for block in range(len(cast(list[int], config["block_out_channels"]))):
        first = block * (layers + 1)
        for layer in range(layers + 1):
            for number, kind in enumerate(("resnets", "attentions")):
                prefixes[f"down_blocks.{block}.{kind}.{layer}"] = f"input_blocks.{1 + first + layer}.{number}"
                prefixes[f"up_blocks.{block}.{kind}.{layer}"] = f"output_blocks.{first + layer}.{number}"
        prefixes[f"down_blocks.{block}.downsamplers.0.conv"] = f"input_blocks.{1 + first + layers}.0.op"
        place = 2 if "Attn" in up[block] else 1
        prefixes[f"up_blocks.{block}.upsamplers.0.conv"] = f"output_blocks.{first + layers}.{place}.conv"
    return prefixes


def unet_layers(config: Mapping[str, object], layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The original layers of an SDXL U-Net of this configuration."""
    prefixes = _unet_prefixes(config)
    found: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        prefix = next((each for each in prefixes if layer == each or layer.startswith(f"{each}.")), None)
        if prefix is not None:
            rest = layer.removeprefix(prefix)
            if ".resnets." in layer:
                rest = f".{_RESNET.get(rest[1:], rest[1:])}"
            found[prefixes[prefix] + rest] = (layer,)
    return found


def original_layers(layout: Layout, layers: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The original layers of a model with these layers of diffusers: the layout with numbers in the place of `{}`."""
    patterns = [
        (re.compile(re.escape(member).replace(r"\{\}", r"(\d+)")), original, members)
        for original, members in layout.items()
        for member in members
    ]
    found = {}
    for layer in layers:
        for pattern, original, members in patterns:
            if match := pattern.fullmatch(layer):
                number = match.groups()
                found[original.format(*number)] = tuple(member.format(*number) for member in members)
    return found
