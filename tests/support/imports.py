"""What processes import before commands and ranks are forked from them: each of those would take a second with it."""

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
