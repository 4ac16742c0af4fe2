"""Registers the storage `aws` for datasets, and mirrors of checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import CommandCollector, Finding, StorageEntry, hookimpl
from smalti_storage_s3.mirror.hooks import MirrorHooks

if TYPE_CHECKING:
    from smalti import Config, OptionGroup, Problem


class StorageS3(MirrorHooks):
    """Active where it is installed; nothing is imported or sent before a dataset or a mirror is on S3."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_storage_s3.mirror.options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_storage_s3.mirror.options import mirror_problems

        return config.run_checks(mirror_problems)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_storage_s3.mirror.commands:mirror", "List, verify, upload and download copies of runs.")
        commands.add_deferred("smalti_storage_s3.commands:s3", "Check access to S3 and compatible stores.")

    @hookimpl
    def register_storage(self) -> list[StorageEntry]:
        from smalti_storage_s3.client.settings import KEYS

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
