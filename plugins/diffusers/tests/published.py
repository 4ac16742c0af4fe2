"""Configurations of published models, for what can be told of them without their weights."""

SDXL = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "in_channels": 4,
    "layers_per_block": 2,
    "out_channels": 4,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "use_linear_projection": True,
}
"""unet/config.json of stable-diffusion-xl-base-1.0, without what diffusers takes as default."""

FLUX_DEV = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
}

SD3 = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 192,
}
SANA = {
    "in_channels": 32,
    "out_channels": 32,
    "num_layers": 20,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_cross_attention_heads": 20,
    "cross_attention_head_dim": 112,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
    "mlp_ratio": 2.5,
}
SD35_MEDIUM = {**SD3, "pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13))}
KLEIN = {
    "num_layers": 5,
    "num_single_layers": 20,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "guidance_embeds": False,
}
PIXART_SIGMA = {
    "norm_type": "ada_norm_single",
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "cross_attention_dim": 1152,
    "attention_bias": True,
    "sample_size": 128,
    "patch_size": 2,
    "caption_channels": 4096,
    "interpolation_scale": 2,
    "use_additional_conditions": False,
}
# The defaults of diffusers' class are the published shape, but for what is said here.
AURAFLOW = {"patch_size": 2, "joint_attention_dim": 2048}
LUMINA2 = {"patch_size": 2, "cap_feat_dim": 2304}
QWEN_IMAGE = {"patch_size": 2, "joint_attention_dim": 3584}
Z_IMAGE = {"cap_feat_dim": 2560}

PUBLISHED = {
    "auraflow": ("AuraFlowTransformer2DModel", AURAFLOW),
    "flux": ("FluxTransformer2DModel", FLUX_DEV),
    "flux2": ("Flux2Transformer2DModel", KLEIN),
    "lumina2": ("Lumina2Transformer2DModel", LUMINA2),
    "pixart": ("PixArtTransformer2DModel", PIXART_SIGMA),
    "qwen_image": ("QwenImageTransformer2DModel", QWEN_IMAGE),
    "sana": ("SanaTransformer2DModel", SANA),
    "sd3": ("SD3Transformer2DModel", SD35_MEDIUM),
    "sdxl": ("UNet2DConditionModel", SDXL),
    "z_image": ("ZImageTransformer2DModel", Z_IMAGE),
}
"""By family, the class in diffusers and the configuration of one published model."""
