"""DeepSpeed's own optimizers, where the core looks for the ones that this package registers."""

from __future__ import annotations

from typing import NoReturn

from smalti import UserError


def only_under_deepspeed(parameters: object, **settings: object) -> NoReturn:
    """DeepSpeed makes these itself; whoever asks the registry for one trains without DeepSpeed."""
    raise UserError(
        "this optimizer is DeepSpeed's, and works under DeepSpeed only", fix="--deepspeed_config=..., or --optimizer=adamw"
    )
