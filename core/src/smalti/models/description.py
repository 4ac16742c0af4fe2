"""What a model says of itself, for tools that build it from that."""

from __future__ import annotations

from torch import nn


def config_of(model: nn.Module) -> str:
    """The JSON text from which diffusers or transformers builds a model like this; "" for a model of neither.

    Ask before the model is wrapped: it says its class, and some wrappers change that.
    """
    for owner in (model, getattr(model, "config", None)):
        if callable(describe := getattr(owner, "to_json_string", None)):
            return str(describe())
    return ""
