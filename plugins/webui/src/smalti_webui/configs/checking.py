"""What the command line says of a draft: its problems and notices at the options, and what has an effect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from smalti import InvalidOptionError, Problem, UserError, problems_in
from smalti.config import Config, Option, Schema, draft as draft_of, refuse_other_trainers
from smalti.plugins import Selection
from smalti_webui.configs.controls import as_text, from_text
from smalti_webui.configs.drafts import Draft
from smalti_webui.configs.schemas import schema_for, schema_with
from smalti_webui.configs.toml_text import NAME, given, unwrapped

_FLAG = re.compile(r"--([A-Za-z][A-Za-z0-9_-]*)")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A draft as the command line reads it. `broken` says why the text is not TOML; "" if it is.

    `given` are the values that the text gives, as they are written. `idle` has, by option, what must hold for it to have an
    effect. `elsewhere` has (source, text) of values that do not come from the draft, and are not the usual defaults.
    """

    schema: Schema
    config: Config
    given: Mapping[str, object]
    problems: tuple[Problem, ...]
    notices: tuple[tuple[str, str], ...]
    idle: Mapping[str, str]
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    broken: str = ""

    @property
    def works(self) -> bool:
        return not self.problems and not self.broken


def checked(draft: Draft, file: Path) -> Checked:
    """What `smalti train FILE` says of the options, without what needs data, a model or a device.

    `file` has the text of the draft. Messages name the file that the draft is saved to.
    """
    name = draft.target or f"{draft.name}.toml"
    try:
        values = given(draft.text, schema_with(Selection()))
    except UserError as error:
        return _broken(error.message.removeprefix(f"{NAME} "))
    schema, problems = schema_for(file)
    values = given(draft.text, schema)
    with suppress(UserError):
        problems += _refused(file)
    try:
        config = draft_of(schema, file=file)
    except UserError as error:  # a file that the draft names cannot be read
        problems += problems_in(error)
        config = draft_of(schema, environment={})
    problems += [each for each in config.problems if each not in problems]
    problems += [Problem(message=_why_pending(text, schema, key), option=key) for key, text in draft.pending.items()]
    shown = [_named(each, str(file), name, schema) for each in problems]
    notices = tuple((_option_in(each, schema), each.replace(str(file), name)) for each in config.notices)
    idle = {each.name: each.when for each in schema.options.values() if not _applies(config, each)}
    return Checked(
        schema=schema,
        config=config,
        given=values,
        problems=tuple(shown),
        notices=notices,
        idle=idle,
        elsewhere=_elsewhere(config, str(file), schema),
    )


def _broken(message: str) -> Checked:
    schema = schema_with(Selection())
    config = draft_of(schema, environment={})
    return Checked(schema=schema, config=config, given={}, problems=(), notices=(), idle={}, broken=message)


def _refused(file: Path) -> list[Problem]:
    try:
        refuse_other_trainers(file, "options")
    except UserError as error:
        return list(problems_in(error))
    return []


def _why_pending(text: str, schema: Schema, key: str) -> str:
    option = schema.options.get(key)
    try:
        if option is not None:
            from_text(option, text)
    except UserError as error:
        return error.message
    return "this text has not been applied"


def _named(problem: Problem, file: str, name: str, schema: Schema) -> Problem:
    """The problem at its option, with the file's own name. A problem without option is at the one that the fix names."""
    option = problem.option
    if not option and (flag := _FLAG.search(problem.fix)) and (found := schema.find(flag.group(1))):
        option = found.name
    changes: dict[str, str] = {part: getattr(problem, part).replace(file, name) for part in ("message", "where", "fix")}
    return replace(problem, option=option, **changes)  # type: ignore[arg-type]


def _option_in(notice: str, schema: Schema) -> str:
    """The option that a notice is about: its first word."""
    option = schema.options.get(notice.split(" ", 1)[0].rstrip(":"))
    return option.name if option is not None else ""


def _applies(config: Config, option: Option) -> bool:
    try:
        return config.applies(option.name)
    except InvalidOptionError:
        return True


def _elsewhere(config: Config, file: str, schema: Schema) -> dict[str, tuple[str, str]]:
    found = {}
    for name, source in config.sources.items():
        with suppress(InvalidOptionError):
            option, value = schema.options[name], config.shown(name)
            if file not in source and not option.is_secret(value):
                found[name] = (source, as_text(option, _plain(value)))
    return found


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def default_text(option: Option) -> str:
    """The default as a control would have it; "" if there is none."""
    return as_text(option, _plain(option.default))


def differences(found: Checked) -> list[tuple[str, str, str]]:
    """(option, value, default) of what the draft gives and is not the default; texts of secrets are left out."""
    rows = []
    for name, value in found.given.items():
        option = found.schema.options[name]
        default = default_text(option)
        try:
            if option.check(unwrapped(value)) == option.default:
                continue
        except ValueError:  # not valid, so it differs
            pass
        rows.append((name, as_text(option, value) or ("(secret)" if option.is_secret(value) else '""'), default))
    return rows


def state(draft: Draft, found: Checked) -> dict[str, object]:
    """What a page shows of a draft beside its fields, as JSON."""
    checked_now = draft.checked if draft.checked.get("version") == draft.version else None
    problems = [each.as_json() for each in found.problems]
    for each in cast(list[dict[str, str]], checked_now["problems"]) if checked_now else ():
        if all(each["message"] != known["message"] for known in problems):
            problems.append(each)
    return {
        "version": draft.version,
        "broken": found.broken,
        "saved": draft.is_saved,
        "problems": problems,
        "notices": [{"option": option, "text": text} for option, text in found.notices],
        "idle": dict(found.idle),
        "elsewhere": {name: {"source": source, "text": text} for name, (source, text) in found.elsewhere.items()},
        "given": sorted({*found.given, *draft.pending}),
        "differences": [{"option": name, "text": text, "default": default} for name, text, default in differences(found)],
        "checked": checked_now and {"unchecked": checked_now.get("unchecked", ""), "failed": checked_now.get("failed", "")},
    }


def problems_of_check(draft: Draft, found: Checked, file: Path, problems: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The problems that a command has found in the file of a draft, with the file's own name, at their options."""
    name = draft.target or f"{draft.name}.toml"
    made = [Problem(message=each["message"], where=each["where"], fix=each["fix"], option=each["option"]) for each in problems]
    return [_named(each, str(file), name, found.schema).as_json() for each in made]
