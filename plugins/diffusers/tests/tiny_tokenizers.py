"""Tokenizers with few tokens, of the classes that the pipelines have."""

import re
from string import printable

from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import CLIPTokenizer, GemmaTokenizer, Qwen2Tokenizer, T5TokenizerFast

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
