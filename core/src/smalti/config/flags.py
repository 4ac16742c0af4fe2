"""Command-line arguments -> option values.

`--flag value`, `--flag=value`, a bare switch, `--no_switch`; dashes or underscores, any case, no abbreviations. A value that
begins with `--` must be joined with `=`; one that begins with a single dash, such as -1, need not.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BeforeValidator

from smalti.config.core_options.retired import is_retired, report_retired
from smalti.config.options import Given, Option, Schema, unknown
from smalti.config.sources import put_translated
from smalti.errors import Problem

_SWITCH_WORDS = frozenset(("true", "false", "yes", "no", "on", "off", "1", "0"))
_WHERE = "command line"
_READABLE = "other users can read secrets on the command line"
_SECRET = "give it in the environment, as SMALTI_{}, or as {{env:NAME}} in a file"


def parse_flags(arguments: Sequence[str], schema: Schema, problems: list[Problem], notices: list[str]) -> dict[str, Given]:
    """The options that these arguments give. Problems are appended to `problems`.

    The last occurrence of a flag wins, except for lists, which grow.
    """
    found: dict[str, Given] = {}
    others: dict[str, object] = {}
    args = list(arguments)
    while args:
        arg = args.pop(0)
        if not arg.startswith("--") or arg == "--":
            problems.append(_unexpected(arg))
            continue
        flag, joined, text = arg.partition("=")
        option, negated = _option_of(flag, schema)
        if option is None:
            separate = not joined and bool(args) and not args[0].startswith("-")
            others[flag] = text if joined else args.pop(0) if separate else "true"
            continue
        if option.secret is True:
            fix = _SECRET.format(option.name.upper())
            problems.append(Problem(message=_READABLE, where=flag, fix=fix))
        value = text if joined else _next_value(option, negated, args)
        if value is None or (negated and joined):
            problems.append(_bad_form(flag, option, negated))
            continue
        if option.secret is not True and option.is_secret(value):
            fix = f"{_SECRET.format(option.name.upper())}, or in a file of its own"
            problems.append(Problem(message=_READABLE, where=flag, fix=fix, option=option.name))
        found[option.name] = Given(value=_grown(option, found.get(option.name), value), spelling=flag, place=flag)
    return _translated(found, others, schema, problems, notices)


def _translated(
    found: dict[str, Given], others: dict[str, object], schema: Schema, problems: list[Problem], notices: list[str]
) -> dict[str, Given]:
    """The flags that are options here, with those of another trainer among the others. What is left is unknown."""
    translated = schema.dialect.translate(others | {each.spelling: each.value for each in found.values()}, schema)
    for name in [name for name, (key, _) in translated.values.items() if name in found and found[name].spelling == key]:
        found.pop(name)
    put_translated(found, translated, schema, _WHERE, problems, notices)
    for name, (key, value) in translated.values.items():
        if value is None:  # overrides other sources
            nothing = () if schema.options[name].is_list else None
            found[name] = Given(value=nothing, spelling=key, place=key)
    for flag in filter(translated.rest.__contains__, others):
        if not is_retired(flag):
            problems.append(unknown(flag, schema, where=_WHERE))
        else:
            report_retired(flag, others[flag], _WHERE, problems, notices)
    return found


def _option_of(flag: str, schema: Schema) -> tuple[Option | None, bool]:
    """The option that a flag means, and whether it is the `--no_` form of a switch."""
    if (option := schema.find(flag)) is not None:
        return option, False
    if flag[2:5].lower() in ("no_", "no-") and (option := schema.find(flag[5:])) is not None and option.is_flag:
        return option, True
    return None, False


def _next_value(option: Option, negated: bool, args: list[str]) -> str | None:
    """The value of a flag that has no `=`, taken from the arguments after it; None if there is none."""
    if negated:
        return "false"
    if option.is_flag:
        return args.pop(0) if args and args[0].lower() in _SWITCH_WORDS else "true"
    return args.pop(0) if args and not args[0].startswith("--") else None


def _grown(option: Option, before: Given | None, value: object) -> object:
    if not option.is_list:
        return value
    earlier = before.value if before is not None else []
    return [*_as_list(earlier), *_as_list(_parts(option, value))]


def _parts(option: Option, value: object) -> object:
    """One occurrence of a list flag as the elements that it stands for; what cannot be read is left to validation."""
    for constraint in option.info.metadata:
        if isinstance(constraint, BeforeValidator):
            try:
                return constraint.func(value)  # type: ignore[call-arg]
            except ValueError:
                return value
    return value


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _bad_form(flag: str, option: Option, negated: bool) -> Problem:
    if negated:
        return Problem(message="takes no value", where=flag, fix=f"{flag}, or --{option.name}=true", option=option.name)
    fix = f"{flag}=VALUE ({option.kind}); joined by =, any value is accepted"
    return Problem(message="needs a value", where=flag, fix=fix, option=option.name)


def _unexpected(arg: str) -> Problem:
    fix = "options begin with --, and a value with spaces needs quotes"
    if arg.endswith((".toml", ".json", ".yaml", ".yml")):
        fix = f"put the configuration file first: smalti train {arg} ..."
    return Problem(message=f"unexpected argument {arg!r}", where=_WHERE, fix=fix)
