"""Whole pipelines of a few hundred thousand parameters in diffusers' layout, tokenizers included, with random weights."""

from pathlib import Path

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from tiny_newer import (
    NoGuardrail as NoGuardrail,
    anima as anima,
    bria as bria,
    chroma as chroma,
    cosmos as cosmos,
    cosmos_transformer as cosmos_transformer,
    ernie as ernie,
    hidream as hidream,
    ideogram as ideogram,
    krea2 as krea2,
    longcat_image as longcat_image,
    ovis_image as ovis_image,
    qwen_image as qwen_image,
    qwen_image21 as qwen_image21,
    z_image as z_image,
)
from tiny_parts import (
    chat_tokenizer,
    clip_config,
    clip_tokenizer,
    gemma_config,
    gemma_tokenizer,
    patch_vae,
    t5_encoder,
    t5_tokenizer,
    vae,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    Gemma2Model,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
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
