"""The model family `pebble` for smalti. Importing this imports no torch, so that `smalti --help` stays fast."""

from __future__ import annotations

from smalti import Config, FamilyEntry, OptionGroup, Options, Problem, hookimpl, option


class PebbleOptions(Options):
    pebble_width: int = option(64, help="Channels of every block.", ge=8)
    pebble_depth: int = option(4, help="Number of blocks.", level="advanced", ge=1)


class Pebble:
    """The plugin: each method is one of smalti's hooks."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        return [OptionGroup(name="pebble", title="Pebble family", options=PebbleOptions)]

    @hookimpl
    def register_model_families(self) -> list[FamilyEntry]:
        return [FamilyEntry(name="pebble", title="a small convolutional network", factory="smalti_pebble.family:create")]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        if config.value("model_family") == "pebble" and config.value("model_type") == "lora":
            return [Problem(message="pebble has no adapters", where="model_type", fix="--model_type=full")]
        return []


plugin = Pebble()
