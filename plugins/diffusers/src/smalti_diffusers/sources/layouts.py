"""The names that the tools of each model have for its weights, by those of diffusers and transformers.

Facts as data: the beginning of a name here, and what it is there; `{}` stands for a number. A mark at the end changes the
tensor: `#n` makes it the n-th of several that are joined along their first dimension, `~` exchanges the two halves of that
dimension (shift and scale), `^` makes a matrix a convolution of one pixel, `@` transposes it, `=` makes it one row of numbers.
Reading such files is left to diffusers' own conversion functions (`conversion`); the tables are for writing them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

Table = Mapping[str, str]
Config = Mapping[str, object]


def _block(prefix: str, other: str, names: Table) -> dict[str, str]:
    return {f"{prefix}.{name}": f"{other}.{theirs}" for name, theirs in names.items()}


def _joined(names: tuple[str, ...], other: str) -> dict[str, str]:
    return {name: f"{other}#{number}" for number, name in enumerate(names)}


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_TIME = {"linear_1": "mlp.0", "linear_2": "mlp.2"}
_LAYERS = {"linear_1": "in_layer", "linear_2": "out_layer"}
_SWAPPED = "final_layer.adaLN_modulation.1~"

_FLUX_NORMS = {
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
}
_FLUX_SINGLE_NORMS = {"attn.norm_q.weight": "norm.query_norm.scale", "attn.norm_k.weight": "norm.key_norm.scale"}
_FLUX_ATTENTION = {
    **_joined(_QKV, "img_attn.qkv"),
    **_joined(_ADDED, "txt_attn.qkv"),
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    **_FLUX_NORMS,
}
_FLUX = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    **_block("time_text_embed.timestep_embedder", "time_in", _LAYERS),
    **_block("time_text_embed.text_embedder", "vector_in", _LAYERS),
    **_block("time_text_embed.guidance_embedder", "guidance_in", _LAYERS),
    **_block(
        "transformer_blocks.{}",
        "double_blocks.{}",
        {
            **_FLUX_ATTENTION,
            "norm1.linear": "img_mod.lin",
            "norm1_context.linear": "txt_mod.lin",
            "ff.net.0.proj": "img_mlp.0",
            "ff.net.2": "img_mlp.2",
            "ff_context.net.0.proj": "txt_mlp.0",
            "ff_context.net.2": "txt_mlp.2",
        },
    ),
    **_block(
        "single_transformer_blocks.{}",
        "single_blocks.{}",
        {
            **_joined((*_QKV, "proj_mlp"), "linear1"),
            "proj_out": "linear2",
            "norm.linear": "modulation.lin",
            **_FLUX_SINGLE_NORMS,
        },
    ),
    "proj_out": "final_layer.linear",
    "norm_out.linear": _SWAPPED,
}
_CHROMA = {
    **_FLUX,
    **_block("distilled_guidance_layer.layers.{}", "distilled_guidance_layer.layers.{}", _LAYERS),
    "distilled_guidance_layer.norms.{}.weight": "distilled_guidance_layer.norms.{}.scale",
}
_FLUX2 = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    **_block("time_guidance_embed.timestep_embedder", "time_in", _LAYERS),
    **_block("time_guidance_embed.guidance_embedder", "guidance_in", _LAYERS),
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    **_block(
        "transformer_blocks.{}",
        "double_blocks.{}",
        {
            **_FLUX_ATTENTION,
            "ff.linear_in": "img_mlp.0",
            "ff.linear_out": "img_mlp.2",
            "ff_context.linear_in": "txt_mlp.0",
            "ff_context.linear_out": "txt_mlp.2",
        },
    ),
    **_block(
        "single_transformer_blocks.{}",
        "single_blocks.{}",
        {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2", **_FLUX_SINGLE_NORMS},
    ),
    "proj_out": "final_layer.linear",
    "norm_out.linear": _SWAPPED,
}
_SD3 = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "context_embedder": "context_embedder",
    **_block("time_text_embed.timestep_embedder", "t_embedder", _TIME),
    **_block("time_text_embed.text_embedder", "y_embedder", _TIME),
    **_block(
        "transformer_blocks.{}",
        "joint_blocks.{}",
        {
            **_joined(_QKV, "x_block.attn.qkv"),
            **_joined(_ADDED, "context_block.attn.qkv"),
            **_joined(("attn2.to_q", "attn2.to_k", "attn2.to_v"), "x_block.attn2.qkv"),
            "attn.to_out.0": "x_block.attn.proj",
            "attn.to_add_out": "context_block.attn.proj",
            "attn2.to_out.0": "x_block.attn2.proj",
            "attn.norm_q": "x_block.attn.ln_q",
            "attn.norm_k": "x_block.attn.ln_k",
            "attn.norm_added_q": "context_block.attn.ln_q",
            "attn.norm_added_k": "context_block.attn.ln_k",
            "attn2.norm_q": "x_block.attn2.ln_q",
            "attn2.norm_k": "x_block.attn2.ln_k",
            "norm1.linear": "x_block.adaLN_modulation.1",
            "norm1_context.linear": "context_block.adaLN_modulation.1",
            "ff.net.0.proj": "x_block.mlp.fc1",
            "ff.net.2": "x_block.mlp.fc2",
            "ff_context.net.0.proj": "context_block.mlp.fc1",
            "ff_context.net.2": "context_block.mlp.fc2",
        },
    ),
    "proj_out": "final_layer.linear",
    "norm_out.linear": _SWAPPED,
}
_AURA_MLP = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
_AURAFLOW = {
    "register_tokens": "register_tokens",
    "pos_embed.pos_embed": "positional_encoding",
    "pos_embed.proj": "init_x_linear",
    "context_embedder": "cond_seq_linear",
    **_block("time_step_proj", "t_embedder", _TIME),
    **_block(
        "joint_transformer_blocks.{}",
        "double_layers.{}",
        {
            **_block("ff", "mlpX", _AURA_MLP),
            **_block("ff_context", "mlpC", _AURA_MLP),
            "norm1.linear": "modX.1",
            "norm1_context.linear": "modC.1",
            **dict(zip((*_QKV, "attn.to_out.0"), ("attn.w2q", "attn.w2k", "attn.w2v", "attn.w2o"), strict=True)),
            **dict(zip((*_ADDED, "attn.to_add_out"), ("attn.w1q", "attn.w1k", "attn.w1v", "attn.w1o"), strict=True)),
        },
    ),
    **_block(
        "single_transformer_blocks.{}",
        "single_layers.{}",
        {
            **_block("ff", "mlp", _AURA_MLP),
            "norm1.linear": "modCX.1",
            **dict(zip((*_QKV, "attn.to_out.0"), ("attn.w1q", "attn.w1k", "attn.w1v", "attn.w1o"), strict=True)),
        },
    ),
    "proj_out": "final_linear",
    "norm_out.linear": "modF.1~",
}
_LUMINA2_BLOCK = {
    **_joined(_QKV, "attention.qkv"),
    "attn.to_out.0": "attention.out",
    "attn.norm_q": "attention.q_norm",
    "attn.norm_k": "attention.k_norm",
    **_block("feed_forward", "feed_forward", {"linear_1": "w1", "linear_2": "w2", "linear_3": "w3"}),
    "norm1.linear": "adaLN_modulation.1",
    "norm1.norm": "attention_norm1",
    "norm2": "attention_norm2",
    "ffn_norm1": "ffn_norm1",
    "ffn_norm2": "ffn_norm2",
}
_LUMINA2 = {
    "x_embedder": "x_embedder",
    "time_caption_embed.caption_embedder.{}": "cap_embedder.{}",
    **_block("time_caption_embed.timestep_embedder", "t_embedder", _TIME),
    **_block("layers.{}", "layers.{}", _LUMINA2_BLOCK),
    **_block("noise_refiner.{}", "noise_refiner.{}", _LUMINA2_BLOCK),
    **_block("context_refiner.{}", "context_refiner.{}", {**_LUMINA2_BLOCK, "norm1": "attention_norm1"}),
    "norm_out.linear_1": "final_layer.adaLN_modulation.1",
    "norm_out.linear_2": "final_layer.linear",
}
_Z_IMAGE_BLOCK = {
    **_joined(("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv"),
    "attention.to_out.0": "attention.out",
    "attention.norm_q": "attention.q_norm",
    "attention.norm_k": "attention.k_norm",
}
_Z_IMAGE = {
    **_block("layers.{}", "layers.{}", _Z_IMAGE_BLOCK),
    **_block("noise_refiner.{}", "noise_refiner.{}", _Z_IMAGE_BLOCK),
    **_block("context_refiner.{}", "context_refiner.{}", _Z_IMAGE_BLOCK),
    "all_x_embedder.2-1": "x_embedder",
    "all_final_layer.2-1.linear": "final_layer.linear",
    "all_final_layer.2-1.adaLN_modulation.{}": "final_layer.adaLN_modulation.{}",
}

_COSMOS_ATTENTION = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out.0": "output_proj"}
_COSMOS_ATTENTION |= {"norm_q": "q_norm", "norm_k": "k_norm"}
_COSMOS_MODULATION = {"linear_1": "1", "linear_2": "2"}
_COSMOS_BLOCK = {
    **_block("attn1", "self_attn", _COSMOS_ATTENTION),
    **_block("attn2", "cross_attn", _COSMOS_ATTENTION),
    **_block("norm1", "adaln_modulation_self_attn", _COSMOS_MODULATION),
    **_block("norm2", "adaln_modulation_cross_attn", _COSMOS_MODULATION),
    **_block("norm3", "adaln_modulation_mlp", _COSMOS_MODULATION),
    "ff.net.0.proj": "mlp.layer1",
    "ff.net.2": "mlp.layer2",
}
_COSMOS = {
    "patch_embed.proj": "x_embedder.proj.1",
    "time_embed.t_embedder": "t_embedder.1",
    "time_embed.norm": "t_embedding_norm",
    **_block("transformer_blocks.{}", "blocks.{}", _COSMOS_BLOCK),
    **_block("norm_out", "final_layer.adaln_modulation", _COSMOS_MODULATION),
    "proj_out": "final_layer.linear",
}

_IDEOGRAM = _block(
    "layers.{}.attention",
    "layers.{}.attention",
    {**_joined(("to_q", "to_k", "to_v"), "qkv"), "to_out.0": "o"},
)
_KREA2_BLOCK = {
    "attn.to_q": "attn.wq",
    "attn.to_k": "attn.wk",
    "attn.to_v": "attn.wv",
    "attn.to_out.0": "attn.wo",
    "attn.to_gate": "attn.gate",
    "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
    "attn.norm_k.weight": "attn.qknorm.knorm.scale",
    "ff": "mlp",
    "norm1.weight": "prenorm.scale",
    "norm2.weight": "postnorm.scale",
    "scale_shift_table": "mod.lin=",
}
_KREA2 = {
    "img_in": "first",
    **_block("time_embed", "tmlp", {"linear_1": "0", "linear_2": "2"}),
    "time_mod_proj": "tproj.1",
    **_block("txt_in", "txtmlp", {"norm.weight": "0.scale", "linear_1": "1", "linear_2": "3"}),
    "text_fusion.projector": "txtfusion.projector",
    **_block("text_fusion.layerwise_blocks.{}", "txtfusion.layerwise_blocks.{}", _KREA2_BLOCK),
    **_block("text_fusion.refiner_blocks.{}", "txtfusion.refiner_blocks.{}", _KREA2_BLOCK),
    **_block("transformer_blocks.{}", "blocks.{}", _KREA2_BLOCK),
    **_block("final_layer", "last", {"linear": "linear", "norm.weight": "norm.scale", "scale_shift_table": "modulation.lin"}),
}

_QWEN_IMAGE_21 = _block(
    "transformer_blocks.{}.img_mlp", "transformer_blocks.{}.img_mlp", _joined(("gate_layer", "proj"), "gate_up")
)

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def _sd3(config: Config) -> Table:
    """In the last block the modulation of the text has shift and scale only, in the other order."""
    last = f"transformer_blocks.{cast(int, config['num_layers']) - 1}.norm1_context.linear"
    other = f"joint_blocks.{cast(int, config['num_layers']) - 1}.context_block.adaLN_modulation.1~"
    return {**_SD3, last: other}


def _unet(config: Config) -> Table:
    """Blocks of the U-Net are numbered across its stages there. Names below a block's attention are the same."""
    layers = cast(int, config["layers_per_block"])
    down, up = (cast("list[str]", config[name]) for name in ("down_block_types", "up_block_types"))
    table = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        **_block("mid_block.resnets.0", "middle_block.0", _RESNET),
        "mid_block.attentions.0": "middle_block.1",
        **_block("mid_block.resnets.1", "middle_block.2", _RESNET),
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
    }
    for stage in range(len(down)):
        first = 1 + stage * (layers + 1)
        for layer in range(layers):
            table |= _block(f"down_blocks.{stage}.resnets.{layer}", f"input_blocks.{first + layer}.0", _RESNET)
            table[f"down_blocks.{stage}.attentions.{layer}"] = f"input_blocks.{first + layer}.1"
        table[f"down_blocks.{stage}.downsamplers.0.conv"] = f"input_blocks.{first + layers}.0.op"
    for stage, kind in enumerate(up):
        first = stage * (layers + 1)
        for layer in range(layers + 1):
            table |= _block(f"up_blocks.{stage}.resnets.{layer}", f"output_blocks.{first + layer}.0", _RESNET)
            table[f"up_blocks.{stage}.attentions.{layer}"] = f"output_blocks.{first + layer}.1"
        table[f"up_blocks.{stage}.upsamplers.0.conv"] = f"output_blocks.{first + layers}.{2 if 'Attn' in kind else 1}.conv"
    return table


_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def _vae(config: Config) -> Table:
    """Stages of the decoder are counted from the other end there; products of its attention are convolutions."""
    stages = len(cast("list[str]", config["up_block_types"]))
    table = {
        "quant_conv": "quant_conv",
        "post_quant_conv": "post_quant_conv",
        **{f"{side}.{name}": f"{side}.{name}" for side in ("encoder", "decoder") for name in ("conv_in", "conv_out")},
    }
    for side, blocks, other in (("encoder", "down_blocks", "down"), ("decoder", "up_blocks", "up")):
        table[f"{side}.conv_norm_out"] = f"{side}.norm_out"
        for number in range(2):
            table[f"{side}.mid_block.resnets.{number}"] = f"{side}.mid.block_{number + 1}"
        table |= {f"{side}.mid_block.attentions.0.{name}": f"{side}.mid.attn_1.{to}^" for name, to in _ATTENTION.items()}
        for stage in range(stages):
            place = f"{side}.{other}.{stage if side == 'encoder' else stages - 1 - stage}"
            table[f"{side}.{blocks}.{stage}.resnets.{{}}"] = f"{place}.block.{{}}"
            table[f"{side}.{blocks}.{stage}.resnets.{{}}.conv_shortcut"] = f"{place}.block.{{}}.nin_shortcut"
            table[f"{side}.{blocks}.{stage}.downsamplers.0"] = f"{place}.downsample"
            table[f"{side}.{blocks}.{stage}.upsamplers.0"] = f"{place}.upsample"
    return table


_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
    **_joined(tuple(f"self_attn.{name}_proj.weight" for name in "qkv"), "attn.in_proj_weight"),
    **_joined(tuple(f"self_attn.{name}_proj.bias" for name in "qkv"), "attn.in_proj_bias"),
}
OPEN_CLIP: Table = {
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    **_block("text_model.encoder.layers.{}", "transformer.resblocks.{}", _OPEN_CLIP_LAYER),
    "text_model.final_layer_norm": "ln_final",
    "text_projection.weight": "text_projection@",
}
"""The second text encoder of SDXL: transformers' names, and those of OpenCLIP."""

LAYOUTS: Mapping[str, Callable[[Config], Table]] = {
    "AuraFlowTransformer2DModel": lambda config: _AURAFLOW,
    "AutoencoderKL": _vae,
    "ChromaTransformer2DModel": lambda config: _CHROMA,
    "ErnieImageTransformer2DModel": lambda config: {},
    "CosmosTransformer3DModel": lambda config: _COSMOS,
    "Flux2Transformer2DModel": lambda config: _FLUX2,
    "FluxTransformer2DModel": lambda config: _FLUX,
    "HiDreamImageTransformer2DModel": lambda config: {},
    "Ideogram4Transformer2DModel": lambda config: _IDEOGRAM,
    "Krea2Transformer2DModel": lambda config: _KREA2,
    "Lumina2Transformer2DModel": lambda config: _LUMINA2,
    "QwenImageTransformer2DModel": lambda config: {},
    "QwenImage21Transformer2DModel": lambda config: _QWEN_IMAGE_21,
    "SD3Transformer2DModel": _sd3,
    "UNet2DConditionModel": _unet,
    "ZImageTransformer2DModel": lambda config: _Z_IMAGE,
}
"""By the class of a model in diffusers: the table for a configuration. A name that is not in it is the same there."""
