"""Layers that ComfyUI finds under `transformer.` and their names in diffusers: facts of its `comfy/lora.py` of 2026.

Each entry is a regular expression. Listed are the layers that smalti adapts by default or that users often add.
"""

_FLUX = (
    r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
    r"transformer_blocks\.\d+\.(norm1|norm1_context)\.linear",
)
_FLUX_1 = (
    *_FLUX,
    r"transformer_blocks\.\d+\.(ff|ff_context)\.net\.(0\.proj|2)",
    r"single_transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v)|proj_mlp|proj_out|norm\.linear)",
)
KNOWN = {
    "flux": _FLUX_1,
    # Its class is a subclass of that of Flux.1.
    "chroma": _FLUX_1,
    "flux2": (
        *_FLUX,
        r"transformer_blocks\.\d+\.(ff|ff_context)\.linear_(in|out)",
        r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)",
    ),
    "hidream": (r".*",),  # every layer, by the name of diffusers after "transformer."
    "krea2": (
        r"(transformer|text_fusion\.(layerwise|refiner))_blocks\.\d+\.(attn\.to_(q|k|v|gate|out\.0)|ff\.(gate|up|down))",
        r"img_in|final_layer\.linear|text_fusion\.projector|txt_in\.linear_[12]|time_embed\.linear_[12]|time_mod_proj",
    ),
    "sd3": (
        r"transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
        r"transformer_blocks\.\d+\.attn2\.(to_q|to_k|to_v|to_out\.0)",
        r"transformer_blocks\.\d+\.(ff|ff_context)\.net\.(0\.proj|2)",
    ),
    "auraflow": (
        r"joint_transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)",
        r"single_transformer_blocks\.\d+\.attn\.(to_q|to_k|to_v|to_out\.0)",
        r"(joint|single)_transformer_blocks\.\d+\.(ff|ff_context)\.(linear_1|linear_2|out_projection)",
    ),
    "pixart": (
        r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)",
        r"transformer_blocks\.\d+\.ff\.net\.(0\.proj|2)",
    ),
    # The state dict of ComfyUI's Qwen-Image has the names of diffusers: every layer is known.
    "qwen_image": (r"transformer_blocks\.\d+\..*",),
    # Its feed-forward layers of the gate and beside it are one there.
    "qwen_image21": (r"transformer_blocks\.\d+\.(attn\.to_(q|k|v|out\.0)|img_mlp\.out)",),
    "z_image": (
        r"(layers|context_refiner|noise_refiner)\.\d+\.attention\.(to_q|to_k|to_v|to_out\.0)",
        r"(layers|context_refiner|noise_refiner)\.\d+\.feed_forward\.w[123]",
    ),
}
