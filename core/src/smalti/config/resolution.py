"""Merging files, environment and flags into one validated Config.

Priority, strongest first: flags, SMALTI_* environment, Accelerate YAML (what it covers), the scheduler (which node this is),
configuration file, defaults.
Where two sources name the same option with different values, a notice says which won.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from smalti.config import accelerate_yaml
from smalti.config.config import PER_MACHINE, Config, References, without_values
from smalti.config.files import read_mapping
from smalti.config.flags import parse_flags
from smalti.config.kept_defaults import Kept, kept_defaults
from smalti.config.known_packages import package_of, strategies
from smalti.config.options import Given, Option, OptionGroup, Options, Schema, invalidated, unknown
from smalti.config.sources import (
    SCHEDULER,
    Layer,
    accelerate_path,
    environment_layer,
    file_layer,
    same,
    variable,
    with_variables,
)
from smalti.errors import ConfigError, Problem, did_you_mean


def resolve(
    schema: Schema, arguments: Sequence[str] = (), *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """All sources together, validated. Raises ConfigError with every problem at once."""
    config = draft(schema, arguments, file=file, environment=environment)
    if config.problems:
        raise ConfigError(config.problems)
    return config


def draft(
    schema: Schema, arguments: Sequence[str] = (), *, file: Path | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """The same, but with the problems in the Config, so that it can be checked for more of them."""
    environment = os.environ if environment is None else environment
    problems: list[Problem] = []
    content = read_mapping(file) if file is not None else {}
    is_accelerate = accelerate_yaml.is_accelerate(content)
    notices: list[str] = []
    layers: dict[str, Layer] = {
        "flag": parse_flags(arguments, schema, problems, notices),
        "environment": environment_layer(schema, environment, problems, notices),
        "Accelerate YAML": {},
        SCHEDULER: {},
        "file": {} if is_accelerate else file_layer(schema, content, str(file), problems, notices),
    }
    layers = {label: with_variables(layer, environment, problems) for label, layer in layers.items()}
    dialect = schema.dialect
    claim = dialect.claim(layers, {} if is_accelerate else content, schema, str(file))
    if claim:
        layers["file"] = dialect.in_file(layers["file"], notices)
    path = accelerate_path(layers, file if is_accelerate else None, environment, problems)
    accelerate = content if is_accelerate else read_mapping(path) if path is not None else {}
    if path is not None:
        problems += accelerate_yaml.problems_of(accelerate, schema, path)
        notices += accelerate_yaml.notices_of(accelerate, schema, path)
        layers["Accelerate YAML"] = with_variables(accelerate_yaml.options_in(accelerate, schema, path), environment, problems)
    for group in schema.groups:
        if group.scheduler is not None:
            layers[SCHEDULER] = {**layers[SCHEDULER], **group.scheduler(environment, layers, notices)}
    chosen = _merge(layers, schema, notices)
    _translate_chosen(schema, chosen, notices, problems)
    _replace_urls(schema, chosen, notices, problems)
    _derive(schema, chosen, notices, problems)
    kept = kept_defaults(chosen["output_dir"][1].value if "output_dir" in chosen else None, content, file, notices)
    reference = Kept()
    if claim:
        reference = Kept(values=dialect.defaults(chosen, schema), place=claim, label=f"{dialect.trainer}'s default")
    kept = kept if kept.values else reference
    _keep(schema, chosen, kept, reference, notices)
    if path is not None and "mixed_precision" not in chosen and (remark := accelerate_yaml.precision_notice(accelerate, path)):
        notices.append(remark)
    values = {name: given for name, (_, given) in chosen.items()}
    groups = _validate(schema, values, problems)
    problems += _conflicts(schema, groups, problems)
    sources = {name: f"{label} ({given.place})" for name, (label, given) in chosen.items()}
    config = Config(schema=schema, groups=groups, sources=sources, accelerate=accelerate, kept=kept, problems=tuple(problems))
    config = replace(config, references=References.of(schema, values, environment))
    return replace(config, notices=(*notices, *(_idle_options(config) if not problems else ())))


def restore(
    schema: Schema, values: Mapping[str, object], accelerate: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Config:
    """The Config of a worker, from the values that the launcher wrote. Secrets come from the environment."""
    environment = os.environ if environment is None else environment
    problems = [unknown(name, schema, where="launch.json") for name in values if name not in schema.options]
    layer = {
        name: Given(value=value, spelling=name, place="launch.json")
        for name, value in values.items()
        if name in schema.options and value is not None
    }
    for option in schema.options.values():
        if option.secret is False or option.name in layer or (value := environment.get(variable(option.name))) is None:
            continue
        if option.is_secret(value):
            layer[option.name] = Given(value=value, spelling=option.name, place=variable(option.name))
    layer = dict(with_variables(layer, environment, problems))
    groups = _validate(schema, layer, problems)
    if problems:
        raise ConfigError(problems)
    config = Config(schema=schema, groups=groups, accelerate=accelerate, references=References.of(schema, layer, environment))
    # A value that equals its default counts as not given.
    return replace(config, sources=dict.fromkeys(config.changes(), "launch"))


# --- merging and validating -----------------------------------------------------------------------------------------


def _merge(layers: Mapping[str, Layer], schema: Schema, notices: list[str]) -> dict[str, tuple[str, Given]]:
    """The strongest value of each option with its layer, and a notice for each weaker one that differs."""
    chosen: dict[str, tuple[str, Given]] = {}
    for label, layer in layers.items():
        for name, given in layer.items():
            option = schema.options[name]
            spelling = given.spelling.lstrip("-").replace("-", "_").lower()
            if spelling not in (name, f"no_{name}") and spelling.rstrip("s") != name.rstrip("s"):
                notices.append(f"{spelling} is called {name} here")
            _, winner = chosen.setdefault(name, (label, given))
            if winner is not given and not same(option, winner.value, given.value):
                secret = option.is_secret(winner.shown) or option.is_secret(given.shown)
                values = ("", "") if secret else (f"{winner.shown!r} from ", f"{given.shown!r} from ")
                notices.append(f"{name}: {values[0]}{winner.place} wins over {values[1]}{given.place}")
    return chosen


def _translate_chosen(
    schema: Schema, chosen: dict[str, tuple[str, Given]], notices: list[str], problems: list[Problem]
) -> None:
    """Replace values that have another spelling here, and add those that they stand for."""
    found = schema.dialect.translate_chosen({name: given.value for name, (_, given) in chosen.items()}, schema)
    problems += found.problems
    notices += [f"{key} {remark}" for key, remark in found.notices]
    for name, (key, value) in found.values.items():
        new = Given(value=value, spelling=name, place=key)
        label, given = chosen.get(name, (schema.options[name].group.title, new))
        chosen[name] = (label, replace(given, value=value, written=None))


def _replace_urls(schema: Schema, chosen: dict[str, tuple[str, Given]], notices: list[str], problems: list[Problem]) -> None:
    """Replace a URL that is given as a path by the values of options that stand for it. Others stay, and are paths."""
    for group in schema.groups:
        for name, replaced in group.urls.items():
            label, given = chosen.get(name, ("", None))
            if given is None or "://" not in str(given.value):
                continue
            found = replaced(str(given.value))
            problems += [replace(problem, option=name, where=given.place) for problem in found.problems]
            notices += [f"{key} {remark}" for key, remark in found.notices]
            for each, (_, value) in found.values.items():
                new = replace(given, value=value, spelling=each, written=None)
                _, other = chosen.setdefault(each, (label, new))
                if each == name:
                    chosen[each] = (label, new)
                elif other is not new and not same(schema.options[each], other.value, value):
                    message = f"{each} is {other.shown!r}, and {name} is {given.shown!r}"
                    problems.append(Problem(message=message, where=other.place, fix="leave one of them out", option=each))


def _derive(schema: Schema, chosen: dict[str, tuple[str, Given]], notices: list[str], problems: list[Problem]) -> None:
    """Add the values that values of other options contain. An option that is also given elsewhere must have the same value."""
    for group in schema.groups:
        mine = [name for name in group.options.model_fields if name in chosen]
        if group.derived is None or not mine:
            continue
        found = group.derived({name: given.value for name, (_, given) in chosen.items()})
        problems += [replace(problem, option=mine[0]) for problem in found.problems]
        notices += [f"{key} in {mine[0]} {remark}" for key, remark in found.notices]
        for name, (key, value) in found.values.items():
            inner = Given(value=value, spelling=name, place=f"{key} in {mine[0]}")
            _, given = chosen.setdefault(name, (group.title, inner))
            if given is not inner and not same(schema.options[name], given.value, value):
                message = f"{name} is {given.shown!r}, and {inner.place} says {value!r}"
                problems.append(
                    Problem(
                        message=message,
                        where=given.place,
                        fix="give the same value in both, or leave one of them out",
                        option=name,
                    )
                )


def _keep(schema: Schema, chosen: dict[str, tuple[str, Given]], kept: Kept, reference: Kept, notices: list[str]) -> None:
    """Use the defaults that are kept for options that are not given, if this version has others.

    Those that are also the defaults of the trainer whose file it is are reported together.
    """
    theirs: dict[str, object] = {}
    for name, value in kept.values.items():
        option = schema.options.get(name)
        if option is None or name in chosen or name in PER_MACHINE or option.is_secret(value):
            continue
        if value is None and not option.may_be_none:
            continue  # not a valid value any more
        if not same(option, value, option.default):
            chosen[name] = (kept.label, Given(value=value, spelling=name, place=kept.place))
            if reference.values.get(name) == value:
                theirs[name] = value
            else:
                notices.append(f"{name}: {value!r}, the default when the run began; it is {option.default!r} now")
    if theirs:
        shown = ", ".join(f"{name} = {json.dumps(value)}" for name, value in theirs.items())
        dialect = schema.dialect
        notices.append(f"{dialect.trainer}'s defaults are used ({reference.place}): {shown}; {dialect.otherwise}")


def _conflicts(schema: Schema, groups: Mapping[type[Options], Options], problems: Sequence[Problem]) -> Iterator[Problem]:
    """Two strategies at once, if one of them cannot return a plan because its plugin is missing or its options are invalid."""
    on, packages = set(), {problem.package for problem in problems}
    for option in schema.options.values():
        key, _, kind = option.accelerate.partition("=")
        known = vars(groups[option.group.options])
        if kind and known.get(option.name):
            on.add(kind)
        elif not kind and option.name not in known and (package := package_of("accelerate", key)) is not None:
            packages.add(package.distribution)
    titles = strategies(on, packages) if on else []
    if len(titles) > 1:
        fix = "disable one of them, in the flags, the configuration file or the Accelerate YAML"
        yield Problem(message=f"{' and '.join(titles)} cannot be enabled simultaneously.", fix=fix)


def _validate(schema: Schema, chosen: Mapping[str, Given], problems: list[Problem]) -> dict[type[Options], Options]:
    """Every group of options. Options with problems have no value."""
    groups: dict[type[Options], Options] = {}
    for group in schema.groups:
        values = {}
        for name in group.options.model_fields:
            if name in chosen:
                values[name] = schema.options[name].read(chosen[name].value)
                if reject_reason := schema.options[name].reject_reason(values[name]):
                    problems.append(_bad_value(schema.options[name], chosen[name], reject_reason))
                    del values[name]
        made, errors = _made(group.options, values)
        problems += [_problem(group, schema, chosen, each) for each in errors]
        groups[group.options] = made
    return without_values(groups, problems)


def _made(kind: type[Options], values: Mapping[str, object]) -> tuple[Options, list[Mapping[str, object]]]:
    """The options without the invalid values, and the errors of these."""
    try:
        return kind.model_validate(values), []
    except ValidationError as error:
        errors: list[Mapping[str, object]] = [dict(each) for each in error.errors()]
    if not values:
        raise TypeError(f"the defaults of {kind.__name__} are refused: {errors}")
    # An error without a location is about the group as a whole.
    refused = {str(place[0]) for each in errors if (place := cast(tuple[object, ...], each["loc"]))} & values.keys()
    rest = {name: value for name, value in values.items() if refused and name not in refused}
    made, _ = _made(kind, rest)
    return invalidated(made, values.keys() - rest.keys()), errors


def _problem(group: OptionGroup, schema: Schema, chosen: Mapping[str, Given], error: Mapping[str, object]) -> Problem:
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    place = cast(tuple[str | int, ...], error["loc"])
    if not place:
        return Problem(message=message, where=group.title)
    option = schema.options[str(place[0])]
    inside = ".".join(str(part) for part in place[1:] if isinstance(part, int))
    given = chosen.get(option.name, Given(value=option.default, spelling=option.name, place=option.name))
    if error["type"] == "literal_error":
        message = "not a valid choice"
    problem = _bad_value(option, given, f"entry {inside}: {message}" if inside else message)
    if error["type"] != "value_error" or option.kind not in ("text", "list"):
        return problem
    return replace(problem, fix=f"see `smalti config explain {option.name}`")


def _bad_value(option: Option, given: Given, reason: str) -> Problem:
    secret = option.is_secret(given.shown)
    shown = "what it is" if secret else repr(given.shown)
    hint = "" if secret else did_you_mean(str(given.shown).lower(), option.choices)
    if (secret or given.written is not None) and str(given.value) in reason:
        reason = "the value is not valid"
    kind = "true or false" if option.is_flag else f"{'an' if option.kind[0] in 'aeiou' else 'a'} {option.kind}"
    wanted = f"one of {', '.join(option.choices)}" if option.choices else kind
    bounds = f" {option.bounds}" if option.bounds else ""
    message, fix = f"{option.name} cannot be {shown}: {reason}", f"{hint} give {wanted}{bounds}".lstrip()
    return Problem(message=message, where=given.place, fix=fix, option=option.name)


def _idle_options(config: Config) -> Iterator[str]:
    """Notices for options that were set and have no effect, because their condition does not hold."""
    changed = config.changes()
    for name in config.sources:
        option = config.schema.options[name]
        if name in changed and not config.is_default(name) and not config.applies(name):
            yield f"{name} has no effect unless {option.when}"
