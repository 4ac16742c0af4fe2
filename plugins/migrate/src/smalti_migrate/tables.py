"""The tables of the importers as Markdown: the page docs/reference/other-trainers.md, and `smalti config import --tables`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from smalti_migrate.aitoolkit import tables as aitoolkit
from smalti_migrate.kohya import gui, tables as kohya
from smalti_migrate.onetrainer import tables as onetrainer
from smalti_migrate.optimizer_names import ALIASES, REFUSED
from smalti_migrate.rules import UNSET, Rule, shown

PAGE: Mapping[str, Mapping[str, Sequence[Rule]]] = {
    kohya.NAME: {
        "Options": kohya.OPTIONS,
        "Datasets": kohya.DATASETS,
        "Prompts": kohya.PROMPTS,
        "Flags of accelerate launch": kohya.LAUNCHER,
        "Fields of presets of the GUI": gui.FIELDS,
    },
    aitoolkit.NAME: {"Options": aitoolkit.OPTIONS, "Datasets": aitoolkit.DATASETS, "Samples": aitoolkit.SAMPLES},
    onetrainer.NAME: {"Options": onetrainer.OPTIONS, "Concepts": onetrainer.CONCEPTS, "Samples": onetrainer.SAMPLES},
}
"""Heading -> heading -> rules."""


def tables_page() -> str:
    """The page: all tables."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Keys of other trainers"
    yield ""
    yield "What `smalti config import` does with each key of kohya's sd-scripts, ai-toolkit and OneTrainer. Every other key is"
    yield "listed at the end of its result. [Coming from other trainers](../moving.md) says how to import a file."
    yield "This page is generated: `smalti config import --tables > docs/reference/other-trainers.md`."
    for trainer, tables in PAGE.items():
        for title, rules in tables.items():
            yield from ("", f"## {trainer}: {title.lower()}", "", f"| {trainer} | smalti | difference |", "|---|---|---|")
            yield from map(_row, (rule for rule in rules if rule.kind in ("option", "read")))
            yield from _grouped("No effect here", [rule for rule in rules if rule.kind == "no effect"])
            yield from _grouped("Not converted", [rule for rule in rules if rule.kind == "unsupported"])
    yield from _optimizers()


def _optimizers() -> Iterator[str]:
    """Names with the same meaning in one row."""
    yield from ("", "## Names of optimizers", "")
    yield "They are accepted in any case, with dashes or underscores. An optimizer that a plugin registers under one of them is"
    yield from ("the plugin's own.", "", "| name there | smalti | settings, unless given | difference |", "|---|---|---|---|")
    names: dict[tuple[str, ...], list[str]] = {}
    for name, alias in ALIASES.items():
        settings = ", ".join(f"`{option}={value:g}`" for option, value in alias.settings.items())
        names.setdefault((f"`{alias.name}`", settings, alias.difference), []).append(f"`{name}`")
    yield from (f"| {', '.join(same)} | {' | '.join(meaning)} |" for meaning, same in names.items())
    yield from ("", "| not supported | instead |", "|---|---|")
    refused: dict[str, list[str]] = {}
    for name, instead in REFUSED.items():
        refused.setdefault(instead, []).append(f"`{name}`")
    yield from (f"| {', '.join(same)} | {instead} |" for instead, same in refused.items())


def _row(rule: Rule) -> str:
    ours = ", ".join(f"`{name}`" for name in rule.options) or "read by the import"
    default = f"default there: {shown(rule.default)}" if rule.default is not UNSET else ""
    return f"| `{rule.key}` | {ours} | {escaped('; '.join(filter(None, (rule.note, default))))} |"


def _grouped(title: str, rules: Iterable[Rule]) -> Iterator[str]:
    """Keys with the same reason in one row."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for rule in rules:
        by_reason.setdefault((rule.note, rule.fix), []).append(rule.key)
    for (why, fix), keys in by_reason.items():
        text = f"{title}: {why}" + (f". Instead: {fix}" if fix else "")
        yield f"| {', '.join(f'`{key}`' for key in keys)} |  | {escaped(text)} |"


def escaped(text: str) -> str:
    """A text that can stand in a table: HTML and column signs are escaped."""
    return text.replace("|", "\\|").replace("<", "&lt;")
