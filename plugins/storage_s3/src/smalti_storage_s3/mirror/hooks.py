"""What a mirror does in a run: restores the run before the launch, and uploads each checkpoint. Imports no torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smalti import Checkpoint, Outcome, RunInfo, RunState, StopReason, UserError, hookimpl

if TYPE_CHECKING:
    from smalti import Config
    from smalti.checkpoint import Snapshot
    from smalti.parallel import Parallel
    from smalti_storage_s3.mirror.options import MirrorOptions
    from smalti_storage_s3.mirror.process import UploadProcess

_log = logging.getLogger(__name__)


class MirrorHooks:
    """The hooks of a mirror. Active with `--checkpoint_mirror`; uploads are those of the main rank."""

    def __init__(self) -> None:
        self._uploads: UploadProcess | None = None
        self._options: MirrorOptions

    @hookimpl
    def restore_run(self, config: Config) -> str | None:
        from smalti.config import LaunchOptions, RunOptions
        from smalti_storage_s3.mirror.options import MirrorOptions

        options = config[MirrorOptions]
        if options.checkpoint_mirror is None or config[LaunchOptions].machine_rank > 0:
            return None
        from smalti_storage_s3.mirror.restoring import restore

        return restore(options.checkpoint_mirror, options.access, config[RunOptions])

    @hookimpl
    def save_checkpoint(self, state: Snapshot, config: Config) -> None:
        """Says how files of other nodes reach node 0. The backend writes the checkpoint."""
        from smalti.config import LaunchOptions
        from smalti_storage_s3.mirror.options import MirrorOptions

        options, launch = config[MirrorOptions], config[LaunchOptions]
        if launch.num_machines > 1 and not launch.shared_output_dir and options.checkpoint_mirror is not None:
            from smalti_storage_s3.mirror.nodes import MirrorRelay

            state.relay = MirrorRelay(options.checkpoint_mirror, options.access)

    @hookimpl
    def load_checkpoint(self, source: Path, parallel: Parallel, config: Config) -> None:
        """Brings the checkpoint to nodes that do not see it. The backend reads it."""
        from smalti.config import LaunchOptions, RunOptions
        from smalti_storage_s3.mirror.options import MirrorOptions

        options, launch = config[MirrorOptions], config[LaunchOptions]
        if launch.num_machines > 1 and not launch.shared_output_dir and options.checkpoint_mirror is not None:
            from smalti.rundir import RunDirectory
            from smalti_storage_s3.mirror.nodes import bring

            run = RunDirectory(cast(Path, config[RunOptions].output_dir))
            bring(options.checkpoint_mirror, options.access, run, source, parallel)

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        from smalti.config import CheckpointOptions
        from smalti_storage_s3.mirror.options import MirrorOptions

        self._options = options = info.config[MirrorOptions]
        if not info.world.is_main or options.checkpoint_mirror is None:
            return
        from smalti_storage_s3.mirror.process import UploadProcess

        limit = options.checkpoint_mirror_total_limit
        if limit is None:
            limit = info.config[CheckpointOptions].checkpoints_total_limit
        arguments = [f"--to={options.checkpoint_mirror}", *options.access.flags(), f"--keep={limit}"]
        arguments += [f"--timeout={options.checkpoint_mirror_timeout}"]
        if not options.checkpoint_mirror_verify:
            arguments.append("--no_verify")
        self._uploads = UploadProcess(info.directory, arguments)
        self._uploads.start()

    @hookimpl
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        if self._uploads is not None:
            self._uploads.notify()
            if failures := self._uploads.failures():
                message, fix = failures[-1]
                raise UserError(f"a checkpoint was not copied to the mirror, which is tried again now: {message}", fix=fix)

    @hookimpl
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        uploads, self._uploads = self._uploads, None
        if uploads is not None and state.stop_reason is StopReason.TAKEN_OVER:
            uploads.stop()
        elif uploads is not None and (name := uploads.finish(self._options.checkpoint_mirror_timeout)):
            _log.warning("%s is complete in %s", name, self._options.checkpoint_mirror)
