"""SimpleTuner's options as Markdown: the page docs/reference/simpletuner.md, and `smalti config reference --simpletuner`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from smalti.config import Schema
from smalti_migrate.simpletuner.dataset_keys import REFUSED, UNSUPPORTED, WITHOUT_EFFECT
from smalti_migrate.simpletuner.flavours import FLAVOURS, OTHER_MODELS, OTHER_TASKS
from smalti_migrate.simpletuner.rules import Outcome, Rule
from smalti_migrate.simpletuner.run_keys import PREFIXES
from smalti_migrate.simpletuner.spelling import DEFAULTS
from smalti_migrate.simpletuner.table import KEYS

_INTRODUCTION = (
    "# Options of SimpleTuner",
    "",
    "What becomes of each option of a `config.json` of SimpleTuner. [Coming from SimpleTuner](../moving.md#simpletuner) says",
    "how such a file is read. This page is generated: `smalti config reference --simpletuner > docs/reference/simpletuner.md`.",
    "",
)


def reference_keys_page(schema: Schema) -> str:
    """The page: all tables. Options of the schema that mean the same in both are in none of them."""
    return "\n".join(_lines(schema)) + "\n"


def _lines(schema: Schema) -> Iterator[str]:
    yield from _INTRODUCTION
    yield 'null and empty texts always mean "not given". An option that is in no table has the same name and meaning in both.'
    yield from _table("Another name or other values", "SimpleTuner | smalti | difference", _converted(schema))
    yield from _table("Refused", "SimpleTuner | accepted | why | instead", _refused(schema))
    yield from _table("No effect", "SimpleTuner | why", _ignored(schema))
    yield from _table("Names of models", "family | SimpleTuner | smalti", _models())
    yield from _table("Defaults", "option | SimpleTuner | smalti | condition", _defaults(schema))
    yield from _table("Keys of datasets without an effect", "key | accepted silently | why", _dataset_keys(WITHOUT_EFFECT))
    yield from _table("Keys of datasets that are refused", "key | accepted | why | instead", _dataset_keys(REFUSED))
    values = ((f"`{key}`", f"`{value}`", fix) for key, each in UNSUPPORTED.items() for value, fix in each.items())
    yield from _table("Values of datasets that are not supported yet", "key | value | instead", values)


def _table(title: str, columns: str, rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield from ("", f"## {title}", "", f"| {columns} |", "|" + "---|" * (columns.count("|") + 1))
    yield from ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def _rules(schema: Schema, *outcomes: Outcome) -> Iterator[tuple[str, Rule]]:
    """The rows that speak: those of options that do not exist here, and of values that differ."""
    rows = {**KEYS, **{f"{start}...": rule for start, rule in PREFIXES.items()}}
    for key in sorted(rows):
        rule = rows[key]
        if rule.outcome in outcomes and (schema.find(key) is None) == (rule.outcome != "same"):
            yield key, rule


def _converted(schema: Schema) -> Iterator[tuple[str, ...]]:
    for key, rule in _rules(schema, "renamed", "same"):
        if rule.outcome == "renamed":
            yield f"`{key}`", f"`{rule.option}`", rule.why
        for value, (here, remark) in rule.values.items():
            yield f"`{key}`: `{value}`", f"`{here}`" if here is not None else "not given", remark
        if rule.outcome == "same" and rule.convert is not None:
            yield f"`{key}`", f"`{schema.find(key).name}`", rule.why  # type: ignore[union-attr]


def _refused(schema: Schema) -> Iterator[tuple[str, ...]]:
    for key, rule in _rules(schema, "refused"):
        yield f"`{key}`", _neutral(rule), rule.why, rule.fix


def _ignored(schema: Schema) -> Iterator[tuple[str, ...]]:
    """Keys with the same reason in one row."""
    found: dict[str, list[str]] = {}
    for key, rule in _rules(schema, "ignored"):
        found.setdefault(rule.why, []).append(f"`{key}`")
    yield from ((", ".join(keys), why) for why, keys in found.items())


def _dataset_keys(rules: Mapping[str, Rule]) -> Iterator[tuple[str, ...]]:
    for key, rule in rules.items():
        yield f"`{key}`", _neutral(rule), rule.why, *((rule.fix,) if rule.fix else ())


def _neutral(rule: Rule) -> str:
    return ", ".join(f"`{json.dumps(each)}`" for each in rule.neutral)


def _models() -> Iterator[tuple[str, ...]]:
    for family, names in FLAVOURS.items():
        yield from ((f"`{family}`", f"`{name}`", f"`{here or path}`") for name, (here, path) in names.items())
    yield from (
        (f"`{family}`", f"`{name}`", f"`{here}`, in SimpleTuner's files") for (family, name), here in OTHER_MODELS.items()
    )
    for family, tasks in OTHER_TASKS.items():
        yield from ((f"`{family}`", f"`{name}`", f"not supported: {task}") for name, task in tasks.items())


def _defaults(schema: Schema) -> Iterator[tuple[str, ...]]:
    for each in DEFAULTS:
        if each.option in schema.options:
            here = schema.options[each.option].default
            yield f"`{each.option}`", each.shown, f"`{json.dumps(here)}`" if here is not None else "none", each.when


def counts(schema: Schema) -> Mapping[str, int]:
    """How many keys of the tables there are, by what becomes of them."""
    return {outcome: len(list(_rules(schema, outcome))) for outcome in ("same", "renamed", "ignored", "refused")}
