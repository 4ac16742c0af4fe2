"""Tokenizers, text encoders and autoencoders of the tiny pipelines: a few thousand parameters each, with random weights."""

import re
from string import printable
from unittest.mock import patch

from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLQwenImage21
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    Gemma2Config,
    GemmaTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLProcessor,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

LETTERS = sorted(ByteLevel.alphabet())


def clip_tokenizer() -> CLIPTokenizer:
    """One token for each byte."""
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)


def t5_tokenizer() -> T5TokenizerFast:
    """One token for each character."""
    letters = [letter for letter in printable if not letter.isspace()]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    return T5TokenizerFast(vocab=pieces, model_max_length=64, extra_ids=0)


def gemma_tokenizer() -> GemmaTokenizer:
    """One token for each character, after one for the beginning."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *(letter for letter in printable if letter != " ")]
    tokenizer = GemmaTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], model_max_length=2048)
    beginning = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", pieces.index("<bos>"))])
    tokenizer.backend_tokenizer.post_processor = beginning
    return tokenizer


QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)


def qwen_tokenizer() -> Qwen2Tokenizer:
    """One token for each byte; but one for each word of the template, so that it has 34, as it has for the published one."""
    words = dict.fromkeys(re.findall(r"<.*?>| ?\w+|\n|.", QWEN_TEMPLATE))
    vocab = {letter: number for number, letter in enumerate([*LETTERS, "<|endoftext|>"])}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[])
    tokenizer.add_tokens([word for word in words if len(word) > 1], special_tokens=True)
    return tokenizer


def chat_tokenizer() -> Qwen2Tokenizer:
    """With a template for messages that are text, or a list of one text."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] if message['content'] is string "
        "else message['content'][0]['text'] }}<|im_end|>\n{% endfor %}"
    )
    return tokenizer


def clip_config(width: int = 32, positions: int = 77) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=2 * len(LETTERS) + 2,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        projection_dim=width,
        bos_token_id=2 * len(LETTERS),
        eos_token_id=2 * len(LETTERS) + 1,
    )


def t5_encoder(width: int = 32) -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=100, d_model=width, d_ff=2 * width, d_kv=width // 2, num_heads=2, num_layers=2))


def gemma_config(width: int = 32) -> Gemma2Config:
    return Gemma2Config(
        vocab_size=5 + len(printable),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
    )


def vae(channels: int, widths: tuple[int, ...] = (16, 16, 32), **more: object) -> AutoencoderKL:
    """Pictures shrink to a quarter; by half once more with every further width."""
    return AutoencoderKL(
        block_out_channels=widths,
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=64,
        **more,
    )


def patch_vae() -> AutoencoderKLFlux2:
    """That of Flux.2, with statistics of its own."""
    autoencoder = AutoencoderKLFlux2(
        block_out_channels=(16, 16, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
    )
    autoencoder.bn.running_mean.uniform_(-1, 1)
    autoencoder.bn.running_var.uniform_(0.5, 4)
    return autoencoder


def video_vae(kind: type = AutoencoderKLQwenImage) -> AutoencoderKLQwenImage:
    return kind(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0],
    )


def qwen2_vl(words: int) -> Qwen2_5_VLForConditionalGeneration:
    text = {"vocab_size": words, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    heads["rope_parameters"]["mrope_section"] = [2, 3, 3]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 32}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text | heads, vision_config=vision))


def alpha_vae() -> AutoencoderKLQwenImage21:
    """That of Qwen-Image 2.1: an image has four channels, and a latent pixel is 16 x 16 of it."""
    return AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 2, 2],
        num_res_blocks=1,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0],
    )


def vision_processor(tokenizer: Qwen2Tokenizer) -> Qwen3VLProcessor:
    """For texts and images. That of images stands for the part for videos, which transformers makes only with torchvision."""
    images = Qwen2VLImageProcessorPil()
    with patch.object(Qwen3VLProcessor, "check_argument_for_proper_class"):
        return Qwen3VLProcessor(images, tokenizer, images, chat_template=tokenizer.chat_template)


def qwen3_vl(words: int, layers: int = 3, width: int = 32, kind: type = Qwen3VLModel) -> Qwen3VLModel:
    text = {"vocab_size": words, "hidden_size": width, "intermediate_size": 32, "num_hidden_layers": layers, "head_dim": 16}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": width}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rotary}
    vision["deepstack_visual_indexes"] = [0]
    return kind(Qwen3VLConfig(text_config=text | heads, vision_config=vision))


def qwen3(words: int) -> Qwen3Model:
    config = Qwen3Config(
        vocab_size=words,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    return Qwen3Model(config)


def fill_zeros(model: nn.Module) -> None:
    """Random values for parameters that begin as zeros, which would hide everything."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
