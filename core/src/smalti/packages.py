"""What lives in which package: so that asking for what is not installed names what to install.

The core knows these names and nothing else about its plugins; it never imports one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

OFFICIAL = {
    "fsdp2": "smalti-fsdp2",
    "deepspeed": "smalti-deepspeed",
    "storage_s3": "smalti-storage-s3",
    "health": "smalti-health",
    "diffusers": "smalti-diffusers",
    "webui": "smalti-webui",
}
"""Plugins that the project ships in packages of their own, by plugin name."""

_OPTIONS = {
    "fsdp_": "fsdp2",
    "context_parallel": "fsdp2",
    "deepspeed_": "deepspeed",
    "offload_param": "deepspeed",
    "aws_": "storage_s3",
    "webhook_": "health",
    "gpu_": "health",
    "vae_": "diffusers",
    "text_cache": "diffusers",
    "compress_disk_cache": "diffusers",
    "lora_": "diffusers",
    "base_model_precision": "diffusers",
    "webui_": "webui",
}
_COMMANDS = {"detect-blocks": "fsdp2", "deepspeed": "deepspeed", "ui": "webui"}
_CACHES = {"fsdp-blocks": "fsdp2", "deepspeed-offload": "deepspeed"}
_FAMILIES = frozenset(
    ("auraflow", "flux", "flux2", "lumina2", "pixart", "pixart_sigma", "qwen_image", "sana", "sd3", "sdxl", "z_image")
)
_ACCELERATE = {
    "fsdp_config": "fsdp2",
    "parallelism_config": "fsdp2",
    "FSDP": "fsdp2",
    "deepspeed_config": "deepspeed",
    "DEEPSPEED": "deepspeed",
}
_STRATEGIES = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed"}
"""What each strategy is called, by the `distributed_type` of an Accelerate YAML, for when its plugin is not there to say."""


_CHECKPOINTS = {
    ".metadata": ("dcp", "fsdp2"),
    "pytorch_model_fsdp_0": ("accelerate-fsdp", "fsdp2"),
    "pytorch_model_fsdp.bin": ("accelerate-fsdp", "fsdp2"),
    "*/mp_rank_*_model_states.pt": ("deepspeed", "deepspeed"),
    "*/zero_pp_rank_*_model_states.pt": ("deepspeed", "deepspeed"),
}
"""What marks a folder as a checkpoint of a format, and the plugin that reads it."""


def package_of_option(name: str, known: Iterable[str] = ()) -> str:
    """The package that declares options of this kind, or "" if no package does, or if some `known` option shows it is there."""
    prefix = next((prefix for prefix in _OPTIONS if name.startswith(prefix)), None)
    if prefix is None or any(other.startswith(prefix) for other in known):
        return ""
    return OFFICIAL[_OPTIONS[prefix]]


def package_of_family(name: str) -> str:
    """The package that has this model family, or ""."""
    return OFFICIAL["diffusers"] if name.lower().replace("-", "_") in _FAMILIES else ""


def package_of_command(name: str) -> str:
    """The package that adds this subcommand of `smalti`, or ""."""
    return OFFICIAL[_COMMANDS[name]] if name in _COMMANDS else ""


def package_of_checkpoint(folder: Path, known: Iterable[str]) -> str:
    """The package that reads a checkpoint in this folder, or "" if none does, or if its format is among the `known` ones."""
    for mark, (name, plugin) in _CHECKPOINTS.items():
        if name not in known and any(folder.glob(mark)):
            return OFFICIAL[plugin]
    return ""


def package_of_cache(name: str) -> str:
    """The package that keeps this cache, or ""."""
    return OFFICIAL[_CACHES[name]] if name in _CACHES else ""


def package_of_accelerate(key: str) -> str:
    """The package that understands this section or `distributed_type` of an Accelerate YAML."""
    return OFFICIAL[_ACCELERATE[key]] if key in _ACCELERATE else ""


def strategies(types: Iterable[str], packages: Iterable[str]) -> list[str]:
    """The titles of the strategies that have one of these `distributed_type`s, or come in one of these packages."""
    found, wanted = frozenset(types), frozenset(packages)
    return [title for kind, title in _STRATEGIES.items() if kind in found or package_of_accelerate(kind) in wanted]
