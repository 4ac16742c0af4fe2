"""What pipelines need of a processor for texts and images where there are texts only: no torchvision, which videos need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from smalti_diffusers.sources.components import class_of


class TextProcessor:
    """Tokenizer and chat template of the processor in a folder: the token ids of transformers' Qwen3VLProcessor."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = cast(Any, class_of("transformers", "AutoTokenizer")).from_pretrained(folder)
        settings, _ = cast(Any, class_of("transformers", "ProcessorMixin")).get_processor_dict(folder)
        self._template = settings.get("chat_template") or self.tokenizer.chat_template
        """The processor's own, whose file the tokenizer may not read."""

    def __call__(self, text: Sequence[str], **options: object) -> Any:
        """Tensors of token ids and masks; `options` are those of a tokenizer."""
        return self.tokenizer(text, **options)

    def apply_chat_template(self, messages: Sequence[Mapping[str, object]], **options: object) -> Any:
        """Token ids of one conversation, in a list as those of several; `options` are those of a tokenizer."""
        return [self.tokenizer.apply_chat_template(messages, chat_template=self._template, **options)]


class NoTexts:
    """The processor of a pipeline that encodes nothing. Its constructor counts tokens that it never takes off."""

    tokenizer = SimpleNamespace(encode=lambda text: [0])

    def apply_chat_template(self, messages: object, **options: object) -> list[list[int]]:
        return [[]]
