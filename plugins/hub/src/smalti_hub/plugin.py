"""Publishes a run: at its end, and with `--push_checkpoints_to_hub` each checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from smalti import Checkpoint, CommandCollector, Outcome, Problem, RunInfo, RunState, StopReason, UserError, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup
    from smalti_hub.options import HubOptions
    from smalti_hub.uploads import Uploads


class Hub:
    """Active on the main rank of runs with `--push_to_hub`."""

    def __init__(self) -> None:
        self._uploads: Uploads | None = None
        self._options: HubOptions
        self._newest: int | None = None

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_hub.options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        return config.run_checks(_options, _access)

    @hookimpl
    def register_commands(self, commands: CommandCollector) -> None:
        commands.add_deferred("smalti_hub.commands:hub", "Publish results on the Hugging Face Hub.")

    @hookimpl
    def on_train_start(self, state: RunState, info: RunInfo) -> None:
        from smalti_hub.options import HubOptions

        self._options = info.config[HubOptions]
        self._newest = state.step or None  # the checkpoint that the run resumed from
        if info.world.is_main and self._options.push_to_hub:
            from smalti_hub.publish import default_name
            from smalti_hub.uploads import Uploads

            repository = self._options.hub_model_id or default_name(info.directory)
            self._uploads = Uploads(info.directory, repository, private=self._options.hub_private)

    @hookimpl
    def on_checkpoint(self, state: RunState, checkpoint: Checkpoint) -> None:
        self._newest = checkpoint.step
        if self._uploads is not None and self._options.push_checkpoints_to_hub:
            self._uploads.add(checkpoint.step)

    @hookimpl
    def on_train_end(self, state: RunState, outcome: Outcome | None) -> None:
        uploads, self._uploads = self._uploads, None
        if uploads is None:
            return
        if outcome is None or outcome.reason is not StopReason.COMPLETED:
            uploads.stop()  # a run that was asked to stop has little time
        elif self._newest is not None:
            if not self._options.push_checkpoints_to_hub:
                uploads.add(self._newest)
            uploads.finish(self._options.hub_timeout)


def _options(config: Config) -> Iterator[Problem]:
    from smalti_hub.options import HubOptions

    options = config[HubOptions]
    if options.push_checkpoints_to_hub and not options.push_to_hub:
        message = "push_checkpoints_to_hub does nothing without push_to_hub"
        yield Problem(message=message, where=config.source("push_checkpoints_to_hub"), fix="--push_to_hub")
    if options.push_to_hub and options.hub_model_id is not None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, not in __all__

        try:
            validate_repo_id(options.hub_model_id)
        except HFValidationError as error:
            message = f"hub_model_id={options.hub_model_id!r} is not a name of a repository: {error}"
            yield Problem(message=message, where=config.source("hub_model_id"), fix="--hub_model_id=USER/NAME, or NAME")


def _access(config: Config) -> Iterator[Problem]:
    """Asks the Hub who the token belongs to. A Hub that cannot be reached now is no problem: it is not needed yet."""
    from smalti_hub.options import HubOptions

    if not config[HubOptions].push_to_hub:
        return
    from smalti_hub.upload import HubUnreachableError, check_token

    try:
        check_token()
    except HubUnreachableError:
        return
    except UserError as error:
        yield Problem(message=error.message, where=config.source("push_to_hub"), fix=error.fix)


plugin = Hub()
