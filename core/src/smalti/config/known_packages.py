"""Which package of this project adds what, so that a message about something missing can say what to install.

This is all that the core knows about the plugins, which cannot be asked while they are not installed. A test compares the table
with what the installed plugins declare.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

from smalti.errors import MissingPlugin, Problem


@dataclass(frozen=True, kw_only=True)
class Package:
    """One package of the project, with the names of what it adds.

    `commands` are those of `smalti`, and with the name of a group before it, those that it adds to a group.
    `folder` is its folder below plugins/, if that is not called as the plugin is. `needs` are the plugins of packages that it
    depends on, which pip does not find by itself while they are on no index.
    `accelerate` has sections of an Accelerate YAML and values of its `distributed_type`. `checkpoints` has (pattern, format):
    files that mark a folder as a checkpoint of that format. `strategy` is the title of its distributed plan. `schemes` are
    those of URLs that it takes in place of paths. `nodes` has (index, count) of variables by which a launcher of several nodes
    says which of how many this is.
    """

    plugin: str
    folder: str = ""
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    storages: tuple[str, ...] = ()
    accelerate: tuple[str, ...] = ()
    checkpoints: tuple[tuple[str, str], ...] = ()
    strategy: str = ""
    schemes: tuple[str, ...] = ()
    nodes: tuple[tuple[str, str], ...] = ()

    @property
    def distribution(self) -> str:
        return f"smalti-{(self.folder or self.plugin).replace('_', '-')}"

    @property
    def target(self) -> str:
        """What `pip install` takes, as a shell reads it; empty if the package is installed."""
        if installed(self.distribution):
            return ""
        clone, repository, folder = _clone(), _repository(), f"plugins/{self.folder or self.plugin}"
        place = f"{self.distribution} @ {repository}#subdirectory={folder}" if repository else self.distribution
        own = place if clone is None else str(clone / folder)
        return " ".join((quote(own), *filter(None, (PLUGINS[each].target for each in self.needs))))

    def problem(self, message: str, where: str) -> Problem:
        """A problem of the configuration: something needs this package."""
        return Problem(message=message, where=where, fix=self.fix, package=self.distribution, install=self.target)

    def error(self, message: str) -> MissingPlugin:
        """The same as an exception."""
        return MissingPlugin(message, fix=self.fix)

    @property
    def fix(self) -> str:
        """How to get the package."""
        if not self.target:
            return f"the plugin {self.plugin!r} is installed but disabled: remove it from `without`, or add it to `plugins`"
        return f"pip install {self.target}"


PACKAGES = (
    Package(
        plugin="fsdp2",
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
        options=("deepspeed_config", "offload_param_path"),
        commands=("deepspeed",),
        caches=("deepspeed-offload",),
        optimizers=("deepspeed_adam", "deepspeed_lamb", "deepspeed_lion"),
        accelerate=("DEEPSPEED", "deepspeed_config"),
        checkpoints=tuple(
            (f"{folder}{kind}_rank_*_model_states.pt", "deepspeed") for folder in ("", "*/") for kind in ("mp", "zero_pp")
        ),
        strategy="DeepSpeed",
    ),
    Package(
        plugin="cache",
        options=("cache_dir", "cache_local_dir", "cache_local_gb", "compress_disk_cache"),
        commands=("cache prune", "cache verify"),
        caches=("encodings",),
    ),
    Package(
        plugin="diffusers",
        needs=("cache",),
        options=(
            "revision",
            "base_pipeline",
            "variant",
            "init_from_config",
            "vae_dtype",
            "vae_enable_tiling",
            "vae_enable_slicing",
            "validation_noise_scheduler",
            "text_encoder_dtype",
            "tokenizer_max_length",
            "sdxl_empty_prompt",
            "flux_guidance_value",
            "flux_true_cfg_scale",
            "init_lora",
            "assistant_lora",
            "assistant_lora_path",
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
        plugin="cluster",
        needs=("doctor",),
        options=(
            "nodes",
            "max_restarts",
            "rendezvous_timeout",
            "preflight",
            "node_timeout",
            "time_limit",
            "stop_before",
            "grace_seconds",
            "stop_on_drain",
        ),
        commands=("launch", "nodes"),
        nodes=(
            ("SLURM_NODEID", "SLURM_STEP_NUM_NODES"),
            ("NODE_RANK", "NNODES"),
            ("PET_NODE_RANK", "PET_NNODES"),
            ("JOB_COMPLETION_INDEX", "NNODES"),
            ("JOB_COMPLETION_INDEX", "PET_NNODES"),
        ),
    ),
    Package(
        plugin="toy",
        options=("toy_width", "toy_depth", "toy_heads", "toy_patch", "toy_sample_shift"),
        families=("toy",),
    ),
    Package(plugin="doctor", commands=("doctor",), caches=("speed",)),
    Package(
        plugin="plan",
        needs=("doctor",),
        options=("memory_forecast",),
        commands=("plan",),
        caches=("model-facts", "plan-calibrations", "rehearsals"),
    ),
    Package(plugin="optimizers", optimizers=("adamw8bit", "lion", "prodigy", "stableadamw")),
    Package(plugin="plots"),
    Package(plugin="trackers", folder="plots", options=("report_to", "tracker_project_name")),
    Package(
        plugin="hub",
        options=("push_to_hub", "push_checkpoints_to_hub", "hub_model_id", "hub_private", "hub_timeout"),
        commands=("hub",),
    ),
    Package(
        plugin="data",
        options=("data_scan",),
        commands=("dataset", "dataset reference", "dataset unpack"),
        storages=("csv", "huggingface", "json", "parquet", "webdataset"),
    ),
    Package(
        plugin="storage_s3",
        needs=("data",),
        options=tuple(
            f"checkpoint_mirror{end}"
            for end in ("", "_total_limit", "_timeout", "_verify", "_endpoint_url", "_profile_name", "_region_name")
        ),
        commands=("mirror", "s3"),
        schemes=("s3",),
        storages=("aws",),
    ),
    Package(
        plugin="webhooks", folder="health", options=("webhook_config", "webhook_reporting_interval"), commands=("webhook",)
    ),
    Package(plugin="hangs", folder="health", options=("phase_deadlines", "on_hang")),
    Package(
        plugin="health",
        options=(
            "gpu_health",
            "gpu_health_interval",
            "gpu_health_timeout",
            "gpu_health_ecc_errors",
            "gpu_health_temperature_margin",
            "gpu_health_temperature_seconds",
            "gpu_health_slowdown_share",
            "gpu_health_slowdown_clock",
            "gpu_health_port",
        ),
        commands=("health",),
    ),
    Package(plugin="migrate", options=("defaults_from",), commands=("checkpoint convert", "config import")),
    Package(plugin="webui", needs=("migrate",), commands=("ui",)),
    Package(plugin="testing", commands=("plugin",)),
)

PLUGINS = {package.plugin: package for package in PACKAGES}


@cache
def installed(name: str) -> bool:
    """Whether a distribution is installed, active or not."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _installed_from() -> dict[str, Any]:
    """Where pip has installed smalti from; empty for a package index. pip writes it into the installed package (PEP 610)."""
    written = distribution("smalti").read_text("direct_url.json")
    return dict(json.loads(written)) if written else {}


def _repository() -> str:
    """The repository and commit that smalti was installed from, as pip takes it; empty if it was not."""
    source = _installed_from()
    vcs = source.get("vcs_info")
    return f"{vcs['vcs']}+{source['url']}@{vcs['commit_id']}" if vcs else ""


def _clone() -> Path | None:
    """The clone that smalti was installed from, if it is on this machine."""
    source = _installed_from()
    url = urlsplit(source["url"]) if source else None
    if url is None or url.scheme != "file" or "vcs_info" in source:
        return None
    root = Path(unquote(url.path)).parent
    return root if (root / "plugins").is_dir() else None


def package_of_scheme(scheme: str) -> Package | None:
    """The package that takes URLs of this scheme in place of a path."""
    return next((package for package in PACKAGES if scheme in package.schemes), None)


def package_of_option(name: str) -> Package | None:
    """The package that declares an option of this name or alias."""
    return next((package for package in PACKAGES if name in package.options), None)


def package_of_topic(word: str) -> Package | None:
    """The package with an option that has a part beginning with this word in its name: "fsdp", "lora"."""
    part = f"_{word.lower().replace('-', '_')}"
    return next((each for each in PACKAGES if any(part in f"_{name}" for name in each.options)), None)


def package_of_family(name: str) -> Package | None:
    """The package that has this model family."""
    return next((package for package in PACKAGES if name.lower().replace("-", "_") in package.families), None)


def package_of_optimizer(name: str) -> Package | None:
    """The package that has this optimizer, named as it is registered."""
    return next((package for package in PACKAGES if name in package.optimizers), None)


def family_packages() -> str:
    """The families of each package and how to install it, for a machine without any family."""
    return "; or ".join(f"{', '.join(package.families)}: {package.fix}" for package in PACKAGES if package.families)


def package_of_command(name: str) -> Package | None:
    """The package that adds this command, such as "s3" or "dataset unpack"."""
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


def package_of_nodes() -> Package:
    """The package that launches on several nodes."""
    return next(package for package in PACKAGES if package.nodes)


def variable_of_nodes(environment: Mapping[str, str]) -> str:
    """The variable by which this process is on one of several nodes, as NAME=COUNT; "" if there is none."""
    for index, count in package_of_nodes().nodes:
        if index in environment and (value := environment.get(count, "")).isdigit() and int(value) > 1:
            return f"{count}={value}"
    return ""


def package_of_cache(name: str) -> Package | None:
    """The package that keeps this cache."""
    return next((package for package in PACKAGES if name in package.caches), None)


def package_of_accelerate(key: str) -> Package | None:
    """The package that understands this section or `distributed_type` of an Accelerate YAML."""
    return next((package for package in PACKAGES if key in package.accelerate), None)


def strategies(types: Iterable[str], distributions: Iterable[str]) -> list[str]:
    """The titles of the strategies with one of these `distributed_type`s or from one of these distributions."""
    found, wanted = frozenset(types), frozenset(distributions)
    candidates = [package for package in PACKAGES if package.strategy]
    return [each.strategy for each in candidates if found.intersection(each.accelerate) or each.distribution in wanted]
