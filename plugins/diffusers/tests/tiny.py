"""Whole pipelines of a few hundred thousand parameters in diffusers' layout, tokenizers included, with random weights."""

from pathlib import Path
from string import printable

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaTextConditioner,
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKLWan,
    ChromaPipeline,
    ChromaTransformer2DModel,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tiny_parts import (
    chat_tokenizer,
    clip_config,
    clip_tokenizer,
    gemma_config,
    gemma_tokenizer,
    patch_vae,
    qwen3,
    qwen3_vl,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
    vae,
    video_vae,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Model,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral3Model,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    UMT5Config,
    UMT5EncoderModel,
)


def flux(folder: Path, *, guidance: bool = True) -> Path:
    """Flux.1, dev (told its guidance) or schnell."""
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=guidance),
        vae=vae(4, shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def chroma(folder: Path) -> Path:
    """Chroma."""
    torch.manual_seed(0)
    transformer = ChromaTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=2,
    )
    ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def flux2(folder: Path, *, dev: bool = False, distilled: bool = False) -> Path:
    """Flux.2, klein (base or distilled) or dev, the latter with a tokenizer for text alone."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    layers = {"num_hidden_layers": 30 if dev else 27, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16} | layers
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=dev,
    )
    (Flux2Pipeline if dev else Flux2KleinPipeline)(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=patch_vae(),
        text_encoder=Mistral3ForConditionalGeneration(
            Mistral3Config(text_config={"model_type": "mistral"} | text, vision_config={"model_type": "pixtral"} | vision)
        )
        if dev
        else Qwen3ForCausalLM(Qwen3Config(**text)),
        tokenizer=tokenizer,
        transformer=transformer,
        **({} if dev else {"is_distilled": distilled}),
    ).save_pretrained(folder)
    return folder


def ernie(folder: Path) -> Path:
    """ERNIE-Image, without the model that rewrites prompts."""
    torch.manual_seed(0)
    text = {"vocab_size": 5 + len(printable), "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = sizes | {"num_hidden_layers": 1, "head_dim": 16}
    transformer = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=48,
        in_channels=16,
        out_channels=16,
        text_in_dim=24,
        rope_axes_dim=(4, 6, 6),
    )
    for parameter in transformer.parameters():
        if not parameter.any():  # zeros would hide everything
            torch.nn.init.normal_(parameter, std=0.2)
    ErnieImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=patch_vae(),
        text_encoder=Mistral3Model(
            Mistral3Config(
                text_config={"model_type": "ministral3"} | sizes | text | {"hidden_size": 24},
                vision_config={"model_type": "pixtral"} | vision,
            )
        ),
        tokenizer=gemma_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def sd3(folder: Path, *, newer: bool = False) -> Path:
    """Stable Diffusion 3, or 3.5 with normed queries and keys and a block of two attentions."""
    torch.manual_seed(0)
    more = {"dual_attention_layers": (0,), "qk_norm": "rms_norm"} if newer else {}
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=32,
        **more,
    )
    StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift_factor=0.1, scaling_factor=1.5, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(clip_config()),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config()),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(64),
        tokenizer_3=t5_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def ovis_image(folder: Path) -> Path:
    """Ovis-Image."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    transformer = OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    OvisImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae(4, shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=qwen3(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def pixart(folder: Path, *, alpha: bool = False) -> Path:
    """PixArt Sigma, or Alpha that is told the size of the picture."""
    torch.manual_seed(0)
    transformer = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=2,
        cross_attention_dim=48,
        caption_channels=32,
        sample_size=128 if alpha else 32,
        use_additional_conditions=alpha,
    )
    (PixArtAlphaPipeline if alpha else PixArtSigmaPipeline)(
        scheduler=DPMSolverMultistepScheduler(beta_schedule="linear", beta_start=1e-4, beta_end=0.02),
        vae=vae(4, scaling_factor=0.7),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def sana(folder: Path) -> Path:
    """Sana, with an autoencoder that makes 32 pixels one."""
    torch.manual_seed(0)
    widths = (8,) * 6
    transformer = SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
    )
    SanaPipeline(
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=AutoencoderDC(
            latent_channels=8,
            attention_head_dim=4,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            encoder_qkv_multiscales=((),) * 6,
            decoder_qkv_multiscales=((),) * 6,
            scaling_factor=0.4,
        ),
        text_encoder=Gemma2Model(gemma_config()),
        tokenizer=gemma_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def auraflow(folder: Path) -> Path:
    """AuraFlow: one block of each kind."""
    torch.manual_seed(0)
    encoder = UMT5Config(vocab_size=100, d_model=32, d_ff=64, d_kv=16, num_heads=2, num_layers=1)
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    )
    AuraFlowPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=vae(4, scaling_factor=0.13025),
        text_encoder=UMT5EncoderModel(encoder),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def lumina2(folder: Path, *, heads: int = 2) -> Path:
    """Lumina Image 2.0, whose pipeline takes an eighth for granted. The published model has three heads for each of keys."""
    torch.manual_seed(0)
    transformer = Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=12 * heads,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=heads,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(300, 64, 64),
        cap_feat_dim=32,
    )
    Lumina2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=vae(4, (8, 8, 8, 16), shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=Gemma2Model(gemma_config()),
        tokenizer=gemma_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def qwen_image(folder: Path) -> Path:
    """Qwen-Image, whose autoencoder is one for video."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    text = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    heads["rope_parameters"]["mrope_section"] = [2, 3, 3]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=video_vae(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text | heads, vision_config=vision)),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def ideogram(folder: Path) -> Path:
    """Ideogram 4, with the second transformer that it is guided away from."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    transformers = [
        Ideogram4Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=48,
            adaln_dim=16,
            llm_features_dim=13 * 16,
            rope_theta=10_000,
            mrope_section=(4, 2, 2),
        )
        for _ in range(2)
    ]
    Ideogram4Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=patch_vae(),
        text_encoder=qwen3_vl(len(tokenizer), layers=36, width=16),
        tokenizer=tokenizer,
        transformer=transformers[0],
        unconditional_transformer=transformers[1],
    ).save_pretrained(folder)
    return folder


def krea2(folder: Path, *, distilled: bool = False) -> Path:
    """Krea 2, raw or turbo."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    tokenizer.add_tokens(["assistant"], special_tokens=True)  # what is behind a prompt has 5 tokens then, as it should
    transformer = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        timestep_embed_dim=16,
        text_hidden_dim=32,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    for parameter in transformer.parameters():
        if not parameter.any():  # zeros would hide everything
            torch.nn.init.normal_(parameter, std=0.2)
    Krea2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=video_vae(),
        text_encoder=qwen3_vl(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
        text_encoder_select_layers=(1, 2, 3),
        is_distilled=distilled,
    ).save_pretrained(folder)
    return folder


def sd1x(folder: Path, *, second: bool = False) -> Path:
    """Stable Diffusion 1.5, or 2.1 that predicts v."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=(2, 4) if second else 2,
        use_linear_projection=second,
        cross_attention_dim=32,
        norm_num_groups=8,
        sample_size=16,
    )
    published = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "steps_offset": 1}
    scheduler = DDIMScheduler(**published, prediction_type="v_prediction", clip_sample=False, set_alpha_to_one=False)
    StableDiffusionPipeline(
        vae=vae(4),
        text_encoder=CLIPTextModel(clip_config()),
        tokenizer=clip_tokenizer(),
        unet=unet,
        scheduler=scheduler if second else PNDMScheduler(**published, skip_prk_steps=True),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def sd2x(folder: Path) -> Path:
    """Stable Diffusion 2.1."""
    return sd1x(folder, second=True)


def sdxl(folder: Path, *, force_zeros: bool = True, **scheduler: object) -> Path:
    """Stable Diffusion XL; `scheduler` changes the configuration of its scheduler."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(2, 4),
        cross_attention_dim=32 + 48,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=48 + 6 * 8,
        norm_num_groups=8,
        sample_size=16,
    )
    published = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012, "timestep_spacing": "leading"}
    StableDiffusionXLPipeline(
        vae=vae(4, scaling_factor=0.13025, force_upcast=True),
        text_encoder=CLIPTextModel(clip_config()),
        text_encoder_2=CLIPTextModelWithProjection(clip_config(48)),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        unet=unet,
        scheduler=EulerDiscreteScheduler(**(published | scheduler)),
        force_zeros_for_empty_prompt=force_zeros,
        add_watermarker=False,
    ).save_pretrained(folder)
    return folder


def z_image(folder: Path) -> Path:
    """Z-Image."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=24,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 4, 4],
        axes_lens=[300, 64, 64],
    )
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4, shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=qwen3(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def cosmos_transformer() -> CosmosTransformer3DModel:
    torch.manual_seed(0)
    return CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        mlp_ratio=2.0,
        text_embed_dim=24,
        adaln_lora_dim=8,
        max_size=(4, 64, 64),
        rope_scale=(1.0, 4.0, 4.0),
        extra_pos_embed_type=None,
    )


class NoGuardrail:
    """In place of the package of NVIDIA that looks at prompts and images."""

    def to(self, device: object) -> None: ...

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: object) -> object:
        return frames


def cosmos(folder: Path) -> Path:
    """Cosmos-Predict2, without its guardrail."""
    transformer = cosmos_transformer()
    pipeline = Cosmos2TextToImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
        vae=video_vae(AutoencoderKLWan),
        text_encoder=t5_encoder(24),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
        safety_checker=NoGuardrail(),
    )
    pipeline.register_modules(safety_checker=None)
    pipeline.save_pretrained(folder)
    return folder


def anima(folder: Path) -> Path:
    """Anima, a modular pipeline."""
    transformer = cosmos_transformer()
    tokenizer, t5 = qwen_tokenizer(), t5_tokenizer()
    conditioner = AnimaTextConditioner(
        source_dim=32,
        target_dim=24,
        model_dim=16,
        num_layers=2,
        num_attention_heads=2,
        target_vocab_size=len(t5),
        min_sequence_length=64,
    )
    pipeline = AnimaAutoBlocks().init_pipeline()
    pipeline.update_components(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=video_vae(),
        text_encoder=qwen3(len(tokenizer)),
        tokenizer=tokenizer,
        t5_tokenizer=t5,
        text_conditioner=conditioner,
        transformer=transformer,
    )
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
    return folder
