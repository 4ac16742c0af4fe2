"""Tiny pipelines as in `tiny`: those of models from 2025 on."""

from pathlib import Path
from string import printable

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaTextConditioner,
    AutoencoderKLWan,
    BriaPipeline,
    BriaTransformer2DModel,
    ChromaPipeline,
    ChromaTransformer2DModel,
    Cosmos2TextToImagePipeline,
    CosmosTransformer3DModel,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    HiDreamImagePipeline,
    HiDreamImageTransformer2DModel,
    Ideogram4Pipeline,
    Ideogram4Transformer2DModel,
    Krea2Pipeline,
    Krea2Transformer2DModel,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tiny_parts import (
    alpha_vae,
    chat_tokenizer,
    clip_config,
    clip_tokenizer,
    fill_zeros,
    gemma_tokenizer,
    patch_vae,
    qwen2_vl,
    qwen3,
    qwen3_vl,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
    vae,
    video_vae,
    vision_processor,
)
from transformers import (
    CLIPTextModelWithProjection,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3Model,
    PreTrainedTokenizerFast,
    Qwen3VLForConditionalGeneration,
)


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


def bria(folder: Path) -> Path:
    """Bria 3.2, with the autoencoder of Stable Diffusion XL."""
    torch.manual_seed(0)
    transformer = BriaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[0, 8, 8],
    )
    BriaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae(4, scaling_factor=0.4),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
        transformer=transformer,
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
    fill_zeros(transformer)
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


def longcat_image(folder: Path) -> Path:
    """LongCat-Image, whose pipeline takes sixteen channels for granted; without the part that rewrites prompts."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
    transformer = LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    LongCatImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae(16, shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=qwen2_vl(len(tokenizer)),
        tokenizer=tokenizer,
        text_processor=None,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def qwen_image(folder: Path) -> Path:
    """Qwen-Image, whose autoencoder is one for video."""
    torch.manual_seed(0)
    tokenizer = qwen_tokenizer()
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
        text_encoder=qwen2_vl(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def hidream(folder: Path, *, distilled: bool = False, layers: tuple[int, int] = (0, 1), edge: int = 24) -> Path:
    """HiDream-I1, full or distilled, whose blocks take these layers of Llama; made for a square of `edge` latent pixels."""
    torch.manual_seed(0)
    words = t5_tokenizer()
    words.model_max_length = 512
    llama = PreTrainedTokenizerFast(tokenizer_object=t5_tokenizer().backend_tokenizer, eos_token="</s>", model_max_length=512)
    sizes = {"vocab_size": 100, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": max(layers) + 1}
    transformer = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[32, 24],
        text_emb_dim=32 + 48,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(edge, edge),
        llama_layers=list(layers),
    )
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    HiDreamImagePipeline(
        scheduler=FlowMatchLCMScheduler(shift=6.0) if distilled else UniPCMultistepScheduler(**flow),
        vae=vae(4, shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(clip_config(positions=218)),
        tokenizer=clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(clip_config(48, positions=218)),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(),
        tokenizer_3=words,
        text_encoder_4=LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)),
        tokenizer_4=llama,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def qwen_image21(folder: Path, *, sigmas: list[float] | None = None) -> Path:
    """Qwen-Image 2.1; `sigmas` are noise levels that the pipeline says itself."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    tokens = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "assistant"]
    tokenizer.add_tokens(tokens, special_tokens=True)
    transformer = QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    fill_zeros(transformer)
    QwenImage21Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9, shift_terminal=0.02),
        vae=alpha_vae(),
        text_encoder=qwen3_vl(len(tokenizer), kind=Qwen3VLForConditionalGeneration),
        processor=vision_processor(tokenizer),
        transformer=transformer,
        sample_sigmas=sigmas,
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
    fill_zeros(transformer)
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
