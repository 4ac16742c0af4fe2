"""What lives in which package of this project: so that asking for what is not there says how to get it, or that nobody has it.

The core knows these names and nothing else about its plugins; it never imports one. A test compares the table with what the
packages declare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from smalti.errors import MissingPlugin, Problem, UserError


@dataclass(frozen=True, kw_only=True)
class Package:
    """One of the project's packages, by what can be asked for that it adds.

    `folder` is where it lies below `plugins/`; empty if it is planned and does not exist yet. `accelerate` are sections and
    values of `distributed_type` in an Accelerate YAML; `checkpoints` are patterns of files that mark a folder as a checkpoint
    of a format, with that format's name.
    """

    plugin: str
    folder: str = ""
    options: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    storages: tuple[str, ...] = ()
    accelerate: tuple[str, ...] = ()
    checkpoints: tuple[tuple[str, str], ...] = ()
    strategy: str = ""
    """What its strategy is called, for when the plugin is not there to say."""

    @property
    def distribution(self) -> str:
        return f"smalti-{self.plugin.replace('_', '-')}"

    @property
    def target(self) -> str:
        """What pip installs it from; empty when there is nothing to install: it is there already, or does not exist yet."""
        if not self.folder or installed(self.distribution):
            return ""
        clone = _clone()
        return str(clone / "plugins" / self.folder) if clone is not None else self.distribution

    def problem(self, message: str, where: str) -> Problem:
        """The complaint that something needs this package."""
        available = self.distribution if self.folder else ""
        return Problem(message=message, where=where, fix=self.fix, package=available, install=self.target)

    def error(self, message: str) -> UserError:
        """The same as an exception. A package that does not exist yet is not missing on this machine."""
        return (MissingPlugin if self.folder else UserError)(message, fix=self.fix)

    @property
    def fix(self) -> str:
        """How to get it."""
        if not self.folder:
            return f"leave it out: {self.distribution} is planned and not available yet"
        if not self.target:
            return f"the plugin {self.plugin!r} is installed but left out: remove it from `without`, or add it to `plugins`"
        return f"pip install {self.target}"


PACKAGES = (
    Package(
        plugin="fsdp2",
        folder="fsdp2",
        options=(
            "fsdp_enable",
            "fsdp_version",
            "fsdp_reshard_after_forward",
            "fsdp_state_dict_type",
            "fsdp_cpu_ram_efficient_loading",
            "fsdp_auto_wrap_policy",
            "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_min_num_params",
            "fsdp_cpu_offload",
            "fsdp_sync_each_batch",
            "fsdp_offload_params",
            "fsdp_limit_all_gathers",
            "fsdp_activation_checkpointing",
            "fsdp_activation_checkpointing_mode",
            "fsdp_activation_checkpointing_every",
            "fsdp_param_dtype",
            "fsdp_reduce_dtype",
            "fsdp_output_dtype",
            "fsdp_forward_prefetch",
            "fsdp_backward_prefetch",
            "fsdp_shard_size",
            "context_parallel_size",
            "context_parallel_comm_strategy",
        ),
        commands=("detect-blocks",),
        caches=("fsdp-blocks",),
        accelerate=("FSDP", "fsdp_config", "parallelism_config"),
        checkpoints=(
            (".metadata", "dcp"),
            ("pytorch_model_fsdp_0/.metadata", "accelerate-fsdp"),
            ("pytorch_model_fsdp.bin", "accelerate-fsdp"),
        ),
        strategy="FSDP",
    ),
    Package(
        plugin="deepspeed",
        folder="deepspeed",
        options=("deepspeed_config", "offload_param_path"),
        commands=("deepspeed",),
        caches=("deepspeed-offload",),
        accelerate=("DEEPSPEED", "deepspeed_config"),
        checkpoints=tuple(
            (f"{folder}{kind}_rank_*_model_states.pt", "deepspeed") for folder in ("", "*/") for kind in ("mp", "zero_pp")
        ),
        strategy="DeepSpeed",
    ),
    Package(
        plugin="diffusers",
        folder="diffusers",
        options=(
            "revision",
            "init_from_config",
            "vae_dtype",
            "text_encoder_dtype",
            "tokenizer_max_length",
            "sdxl_empty_prompt",
            "flux_guidance_value",
            "flux_true_cfg_scale",
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "lora_targets",
            "lora_init",
            "lora_init_type",
            "lora_base_dtype",
            "base_model_precision",
        ),
        families=("auraflow", "flux", "flux2", "lumina2", "pixart", "qwen_image", "sana", "sd3", "sdxl", "z_image"),
    ),
    Package(
        plugin="toy",
        folder="toy",
        options=("toy_width", "toy_depth", "toy_heads", "toy_patch", "toy_sample_shift"),
        families=("toy",),
    ),
    Package(plugin="plots", folder="plots"),
    Package(
        plugin="storage_s3",
        options=("aws_bucket_name", "aws_endpoint_url", "aws_region_name"),
        storages=("aws", "parquet"),
    ),
    Package(plugin="health", options=("webhook_config", "gpu_health")),
    Package(plugin="webui", commands=("ui",)),
)

PLUGINS = {package.plugin: package for package in PACKAGES}
KIT = Package(plugin="testing", folder="testing")
"""The contract tests for plugins: a package without a plugin."""


@cache
def installed(name: str) -> bool:
    """Whether a distribution is installed, active or not."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


@cache
def _clone() -> Path | None:
    """The clone that smalti was installed from, if it is on this machine: pip notes it beside the package."""
    noted = distribution("smalti").read_text("direct_url.json")
    url = urlsplit(json.loads(noted)["url"]) if noted else None
    if url is None or url.scheme != "file":
        return None
    root = Path(unquote(url.path)).parent
    return root if (root / "plugins").is_dir() else None


def package_of_option(name: str) -> Package | None:
    """The package that declares this option, under its name or an alias."""
    return next((package for package in PACKAGES if name in package.options), None)


def package_of_topic(word: str) -> Package | None:
    """The package in whose options' names this word begins a part."""
    part = f"_{word.lower().replace('-', '_')}"
    return next((each for each in PACKAGES if any(part in f"_{name}" for name in each.options)), None)


def package_of_family(name: str) -> Package | None:
    """The package that has this model family."""
    return next((package for package in PACKAGES if name.lower().replace("-", "_") in package.families), None)


def packages_with_families() -> str:
    """The families of each package that has some and how to get it, for when there is none at all."""
    return "; or ".join(f"{', '.join(package.families)}: {package.fix}" for package in PACKAGES if package.families)


def package_of_command(name: str) -> Package | None:
    """The package that adds this subcommand of `smalti`."""
    return next((package for package in PACKAGES if name in package.commands), None)


def package_of_storage(name: str) -> Package | None:
    """The package that has this storage or metadata backend."""
    return next((package for package in PACKAGES if name in package.storages), None)


def package_of_checkpoint(folder: Path, known: Iterable[str]) -> Package | None:
    """The package that reads a checkpoint in this folder, unless its format is among the `known` ones."""
    for package in PACKAGES:
        if any(name not in known and any(folder.glob(mark)) for mark, name in package.checkpoints):
            return package
    return None


def package_of_cache(name: str) -> Package | None:
    """The package that keeps this cache."""
    return next((package for package in PACKAGES if name in package.caches), None)


def package_of_accelerate(key: str) -> Package | None:
    """The package that understands this section or `distributed_type` of an Accelerate YAML."""
    return next((package for package in PACKAGES if key in package.accelerate), None)


def strategies(types: Iterable[str], distributions: Iterable[str]) -> list[str]:
    """The titles of the strategies that have one of these `distributed_type`s, or come in one of these distributions."""
    found, wanted = frozenset(types), frozenset(distributions)
    candidates = [package for package in PACKAGES if package.strategy]
    return [each.strategy for each in candidates if found.intersection(each.accelerate) or each.distribution in wanted]
