"""smalti trains diffusion models in shards. This module holds the names that a plugin needs; importing it imports no torch.

What a plugin implements is described in `smalti.hookspecs`, which is the first file to read. Besides the names here it may use
these modules and what is below them; docs/writing-a-plugin.md says what each is for. All others belong to the core alone and
may change with any release.

    smalti.config.core_options, smalti.parallel.precision, smalti.parallel.protocol, smalti.parallel.process_group, smalti.training.ddp, smalti.parallel.gloo, smalti.parallel.accelerator,
    smalti.models.family, smalti.models.context_parallel, smalti.models.size_conditioning, smalti.models.weights, smalti.models.blocks,
    smalti.models.compile,
    smalti.diffusion, smalti.training.optim.optimizers, smalti.data.datasets.spec, smalti.data.datasets.sources, smalti.data.storage.protocol, smalti.checkpoint,
    smalti.plugins, smalti.cli.arguments, smalti.plugins.families, smalti.training.run, smalti.config.options, smalti.plugins.caches, smalti.config.edit,
    smalti.cli.output, smalti.cli.pages.help, smalti.rundir.directory, smalti.rundir.writer, smalti.rundir.events, smalti.system.files, smalti.config.files,
    smalti.config.accelerate_yaml, smalti.system.imports, smalti.rundir.png, smalti.hookspecs, smalti.types, smalti.config.resolution, smalti.plugins.schema,
    smalti.plugins.lookup, smalti.cli.entry
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smalti.config.options import Names, OptionGroup, Options, Tables, Texts, Translation, option
    from smalti.config.resolution import Config
    from smalti.errors import CheckpointError, ConfigError, ExitCode, MissingPlugin, PreflightError, Problem, UserError
    from smalti.hookspecs import HookSpecs, hookimpl
    from smalti.types import (
        Block,
        CacheEntry,
        Checkpoint,
        CheckpointFormat,
        Cleared,
        DistributedPlan,
        EvaluationResult,
        FamilyEntry,
        FaultAction,
        GpuFault,
        MetadataEntry,
        OptimizerEntry,
        Origin,
        Outcome,
        Registered,
        RunInfo,
        RunState,
        StepResult,
        StopReason,
        StorageEntry,
        ValidationImage,
        ValidationResult,
        World,
    )

__all__ = [
    "Block",
    "CacheEntry",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFormat",
    "Cleared",
    "Config",
    "ConfigError",
    "DistributedPlan",
    "EvaluationResult",
    "ExitCode",
    "FamilyEntry",
    "FaultAction",
    "GpuFault",
    "HookSpecs",
    "MetadataEntry",
    "MissingPlugin",
    "Names",
    "OptimizerEntry",
    "OptionGroup",
    "Options",
    "Origin",
    "Outcome",
    "PreflightError",
    "Problem",
    "Registered",
    "RunInfo",
    "RunState",
    "StepResult",
    "StopReason",
    "StorageEntry",
    "Tables",
    "Texts",
    "Translation",
    "UserError",
    "ValidationImage",
    "ValidationResult",
    "World",
    "hookimpl",
    "option",
]

_HOMES = {
    "smalti.config.resolution": ("Config",),
    "smalti.errors": (
        *("CheckpointError", "ConfigError", "ExitCode", "MissingPlugin", "PreflightError", "Problem", "UserError"),
    ),
    "smalti.hookspecs": ("HookSpecs", "hookimpl"),
    "smalti.config.options": ("Names", "OptionGroup", "Options", "Tables", "Texts", "Translation", "option"),
}
_HOME = dict.fromkeys(__all__, "smalti.types") | {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `smalti --help` does not pay for all of them."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
