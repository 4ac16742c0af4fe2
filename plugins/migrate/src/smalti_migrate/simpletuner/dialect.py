"""SimpleTuner's spelling of options, for files, flags and variables; and options of how files of other trainers are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from smalti import OptionGroup, Options, Translation, option
from smalti.config import Dialect, Given, Schema
from smalti_migrate.kohya.folders import with_folders
from smalti_migrate.optimizer_names import translate_optimizer
from smalti_migrate.simpletuner.datasets import translated_entry
from smalti_migrate.simpletuner.spelling import reference_defaults, reference_keys, with_reference_meaning
from smalti_migrate.simpletuner.translation import translate_reference_options

_CHOICE = "defaults_from"
_SHOWN = 4
"""Keys that are named as the reason why a file is SimpleTuner's."""


class SimpleTunerOptions(Options):
    defaults_from: Literal["auto", "simpletuner", "smalti"] = option(
        "auto",
        help="Whose defaults are used for options that are not given. auto: SimpleTuner's, for a file with two or more keys "
        "that only SimpleTuner has.",
        level="advanced",
    )


class KohyaOptions(Options):
    kohya_folders: bool = option(
        False,
        help="Read folders such as `10_zwx cat` as kohya's trainer does: 10 visits in an epoch, and `zwx cat` as caption.",
        level="advanced",
    )


class SimpleTuner(Dialect):
    trainer = "SimpleTuner"
    otherwise = "--defaults_from=smalti uses others"

    def translate(self, given: Mapping[str, object], schema: Schema) -> Translation:
        return translate_reference_options(given, schema)

    def claim(self, layers: Mapping[str, Mapping[str, Given]], content: Mapping[str, object], schema: Schema, file: str) -> str:
        given = next((layer[_CHOICE] for layer in layers.values() if _CHOICE in layer), None)
        chosen = str(given.value).lower() if given is not None else "auto"
        if given is not None and chosen == "simpletuner":
            return given.place
        keys = reference_keys(content, schema) if chosen != "smalti" else ()
        known = ", ".join(keys[:_SHOWN]) + (" ..." if len(keys) > _SHOWN else "")
        return f"{file}, which has {known}" if keys else ""

    def in_file(self, layer: Mapping[str, Given], notices: list[str]) -> Mapping[str, Given]:
        return with_reference_meaning(layer, notices)

    def defaults(self, chosen: dict[str, tuple[str, Given]], schema: Schema) -> Mapping[str, object]:
        values = {name: given.value for name, (_, given) in chosen.items()}
        if str(values.get(_CHOICE)).lower() == "simpletuner":
            # The defaults are values from here on, so whoever reads the result must not apply them once more.
            label, given = chosen[_CHOICE]
            chosen[_CHOICE] = (label, replace(given, value="smalti"))
        return reference_defaults(values, schema)

    def translate_chosen(self, given: Mapping[str, object], schema: Schema) -> Translation:
        return translate_optimizer(given, schema.optimizers)

    def translate_dataset(
        self,
        entry: Mapping[str, object],
        entries: Sequence[Mapping[str, object]],
        known: Mapping[str, Collection[str]],
        option: Callable[[str], object],
    ) -> Sequence[Translation]:
        found = translated_entry(entry, entries, known, option)
        return with_folders(found, option) if found.rest else [found]

    def page(self, schema: Schema) -> str:
        from smalti_migrate.simpletuner.page import reference_keys_page

        return reference_keys_page(schema)


GROUPS = (
    OptionGroup(name="simpletuner", title="SimpleTuner", options=SimpleTunerOptions, dialect=SimpleTuner()),
    OptionGroup(name="kohya", title="Folders of kohya's trainer", options=KohyaOptions),
)
