"""The form of a draft: every option of the schema as a field, in the sections of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smalti.config import PREFIX, Level, Option, package_of
from smalti_webui.configs.checking import Checked, default_text
from smalti_webui.configs.controls import Kind, as_text, choices_of, is_hidden, kind_of


@dataclass(frozen=True, kw_only=True)
class Field:
    """An option as the form shows it. `text` is what its control contains; "" if the draft does not give the option.

    `words` are what a search finds it by. `is_on` is the state of a switch. `note` is about secrets.
    """

    name: str
    kind: Kind
    level: Level
    text: str
    is_given: bool
    is_on: bool
    default: str
    choices: tuple[str, ...]
    help: str
    facts: tuple[str, ...]
    when: str
    words: str
    lines: int
    note: str = ""
    suggestions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of options. `package` is what its options come with."""

    name: str
    title: str
    package: str
    fields: tuple[Field, ...]


LEVELS: tuple[Level, ...] = ("basic", "advanced", "expert")


def sections(
    found: Checked, pending: Mapping[str, str], suggestions: Mapping[str, tuple[tuple[str, str], ...]] | None = None
) -> list[Section]:
    """The whole form. A text that is pending is shown in place of the value of the draft."""
    suggested = suggestions or {}
    made = []
    for group in found.schema.groups:
        options = [option for option in found.schema.options.values() if option.group is group]
        fields = tuple(_field(option, found, pending.get(option.name), suggested.get(option.name, ())) for option in options)
        if fields:
            package = package_of("options", fields[0].name)
            made.append(
                Section(
                    name=group.name,
                    title=group.title,
                    package=package.distribution if package else "",
                    fields=fields,
                )
            )
    return made


def _field(option: Option, found: Checked, pending: str | None, suggestions: tuple[tuple[str, str], ...]) -> Field:
    value, default = found.given.get(option.name), default_text(option)
    text = as_text(option, value) if pending is None else pending
    kind = kind_of(option)
    is_on = (text or default) == "true"
    choices = choices_of(option) if kind == "choice" else ()
    if kind == "choice" and text and text not in choices:
        choices = (*choices, text)  # not valid, or spelled in another way
    if kind == "switch" and text not in ("", "true", "false"):
        kind = "text"
    multiline = kind in ("texts", "tables") or "\n" in text
    return Field(
        name=option.name,
        kind=kind,
        level=option.level,
        text=text,
        is_given=value is not None or pending is not None,
        is_on=is_on,
        default=default,
        choices=choices,
        help=option.help,
        facts=tuple(_facts(option)),
        when=option.when,
        words=" ".join((option.name, option.name.replace("_", " "), *option.aliases, option.help, option.group.title)).lower(),
        lines=min(max(text.count("\n") + 1, 3), 16) if multiline else 0,
        note=_note(option, value),
        suggestions=suggestions,
    )


def _facts(option: Option) -> list[str]:
    """What else is known of an option, for the lines below its help."""
    facts = []
    if option.bounds:
        facts.append(f"Range: {option.bounds}.")
    if option.tradeoff:
        facts.append(f"Effect: {option.tradeoff}.")
    if option.aliases:
        facts.append(f"Also called: {', '.join(option.aliases)}.")
    return facts


def _note(option: Option, value: object) -> str:
    if option.secret is True:
        return f"A secret: set the variable {PREFIX}{option.name.upper()}, or write {{env:NAME}}."
    return "A secret is given, which is not shown." if value is not None and is_hidden(option, value) else ""
