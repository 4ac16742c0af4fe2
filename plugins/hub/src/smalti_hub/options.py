"""The options `--push_to_hub` and its like. Imports neither torch nor huggingface_hub."""

from __future__ import annotations

from smalti import OptionGroup, Options, option


class HubOptions(Options):
    push_to_hub: bool = option(
        False, help="Publish the export of the last checkpoint on the Hugging Face Hub when the run is complete."
    )
    push_checkpoints_to_hub: bool = option(False, help="Publish each checkpoint too. Only with --push_to_hub.")
    hub_model_id: str | None = option(
        None, help="Repository on the Hub, as NAME or USER/NAME. Default: the name of --output_dir, for the user of the token."
    )
    hub_private: bool = option(True, help="Create the repository as a private one. An existing repository stays as it is.")
    hub_timeout: int = option(
        1800,
        help="Seconds that the run waits at its end for the upload. An upload that takes longer is ended and can be repeated.",
        ge=0,
        level="advanced",
    )


GROUP = OptionGroup(name="hub", title="Hugging Face Hub", options=HubOptions)
