"""The options of DeepSpeed. Imports no torch, no DeepSpeed."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from smalti import Config, Options, UserError, option
from smalti_deepspeed.parsing import as_text, is_none, read


def _as_document(value: object) -> object:
    """JSON in one line, whatever it was given as: a file is read here, so that every rank has what the launcher read.

    What cannot be read stays as it is, for `derived_options` to complain about.
    """
    if is_none(value):
        return None
    try:
        return as_text(read(value))
    except UserError:
        return value


def _or_none(value: object) -> object:
    """No folder, where a text names none: the current one would be a surprise."""
    return None if is_none(value) else value


class DeepSpeedOptions(Options):
    deepspeed_config: Annotated[str | None, BeforeValidator(_as_document)] = option(
        None,
        help="Train with DeepSpeed: its configuration as JSON, or the path of a JSON file. none disables it.",
        accelerate="deepspeed_config",
    )
    offload_param_path: Annotated[str | None, BeforeValidator(_or_none)] = option(
        None,
        help="Folder on a local NVMe drive of each node, for what the DeepSpeed configuration offloads to nvme.",
        when="deepspeed_config",
    )


def enabled(config: Config) -> bool:
    """Whether DeepSpeed trains this run."""
    return config[DeepSpeedOptions].deepspeed_config is not None
