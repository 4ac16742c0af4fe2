"""What processes import before commands and ranks are forked from them: each of those would take a second with it."""

import gc
from importlib import import_module

MODULES = (
    "smalti.builtin.checks",
    "smalti.data.scan.earlier",
    "smalti.launch.preflight",
    "smalti.launch.rank",
    "smalti.launch.worker",
    "smalti.models.family_check",
    "smalti.training.ddp_parallel",
    "smalti_deepspeed.checks",
    "smalti_diffusers.checks",
    "smalti_fsdp2.checks",
    "smalti_health.hangs.watch",
    "smalti_objectives.terms",
    "smalti_plan.limit.completing",
    "smalti_validation.work",
    "numpy.ma",  # which pyarrow tries
    "pyarrow.compute",
    "tomlkit",
    "torch._dynamo",  # which optimizers import when they are first used
    "torch.distributed.fsdp",
)


def import_for_runs() -> None:
    """These, and the modules of all official plugins that declare options. To be called before there are threads."""
    from smalti.config.known_packages import PACKAGES
    from smalti.plugins import Selection, load_plugins, schema_of

    for name in MODULES:
        import_module(name)
    schema_of(load_plugins(Selection(only=tuple(package.plugin for package in PACKAGES)), strict=False))


def enable_garbage_collection() -> None:
    """In a process of tests that keeps what it has made: Python's defaults would look through all of it again and again.

    A full collection follows 2,000,000 new objects instead of 70,000: they took a tenth of the time of all tests.
    """
    gc.set_threshold(2_000, 20, 50)
    gc.enable()
