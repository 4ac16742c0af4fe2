"""Registers the storage `aws` for datasets, and mirrors of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import Config, Finding, OptionGroup, Problem, StorageEntry, hookimpl
from smalti_storage_s3.client.settings import KEYS
from smalti_storage_s3.mirror.hooks import MirrorHooks, mirror_problems
from smalti_storage_s3.mirror.options import GROUP

if TYPE_CHECKING:
    import click


class StorageS3(MirrorHooks):
    """Active where it is installed; nothing is imported or sent before a dataset or a mirror is on S3."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        return config.run_checks(mirror_problems)

    @hookimpl
    def register_commands(self, commands: click.Group) -> None:
        from smalti_storage_s3.commands import s3
        from smalti_storage_s3.mirror.commands import mirror

        commands.add_command(mirror)
        commands.add_command(s3)

    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        return [
            StorageEntry(
                name="aws",
                title="S3, and stores like it",
                factory="smalti_storage_s3.client.storage:open_dataset",
                keys=KEYS,
                schemes=("s3",),
                open_run="smalti_storage_s3.mirror.place:open_run",
            )
        ]

    @hookimpl
    def diagnose(self, config: Config | None) -> list[Finding]:
        if config is None:
            return []
        from smalti_storage_s3.findings import s3_findings

        return s3_findings(config)


plugin = StorageS3()
