"""The sources of a configuration: environment, file and Accelerate YAML, each as values by option."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError

from smalti.config import accelerate_yaml
from smalti.config.core_options.retired import is_retired, report_retired
from smalti.config.files import PREFIX, expand, variables_in
from smalti.config.kept_defaults import TABLE
from smalti.config.known_packages import package_of
from smalti.config.options import Given, Option, OptionGroup, Schema, Translation, path_error, unknown
from smalti.errors import Problem

RESERVED = frozenset({"SMALTI_OUTCOME_DIR", "SMALTI_PARENT", "SMALTI_DIGEST", "SMALTI_CONTEXT_PARALLEL_ON_CPU"})
"""Variables with the prefix that are not options: the launcher sets them for its workers."""

SCHEDULER = "scheduler"
"""The label of the layer with what a scheduler says of this launch."""
_SEVERAL = 2
"""Unknown keys that are no mistakes in spelling, but names of another trainer."""
_COMMENTS = ("_", "//", "#")
"""Beginnings of keys that are comments in files without a syntax for them."""

Layer = Mapping[str, Given]


def variable(name: str) -> str:
    """The environment variable of an option."""
    return PREFIX + name.upper()


def environment_layer(schema: Schema, environment: Mapping[str, str], problems: list[Problem], notices: list[str]) -> Layer:
    """Variables that are empty count as not set."""
    layer: dict[str, Given] = {}
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and name not in RESERVED and value != ""
    }
    found = schema.dialect.translate(given, schema)
    put_translated(layer, found, schema, "the environment", problems, notices)
    for spelling, value in found.rest.items():
        name = variable(spelling)
        option = schema.find(spelling)
        if option is None and is_retired(spelling):
            report_retired(spelling, value, f"environment variable {name}", problems, notices)
        elif option is None:
            problems.append(unknown(spelling, schema, where=f"environment variable {name}"))
        else:
            _put(layer, option, Given(value=value, spelling=spelling, place=name), problems)
    return layer


def file_layer(schema: Schema, content: Mapping[str, object], file: str, problems: list[Problem], notices: list[str]) -> Layer:
    """The values of a configuration file. null and empty texts mean "not given", except for texts that may be empty."""
    layer: dict[str, Given] = {}
    unknown_keys: list[Problem] = []
    pairs = list(flat(content, schema.groups))
    found = schema.dialect.translate(dict(pairs), schema)
    put_translated(layer, found, schema, file, problems, notices)
    for key, raw in pairs:
        if key not in found.rest:
            continue
        option = schema.find(key)
        if option is None and is_retired(key):
            report_retired(key, raw, file, problems, notices)
            continue
        if option is None and key.startswith(_COMMENTS):
            continue
        if option is None:
            unknown_keys.append(_unknown_key(key, raw, schema, file))
            problems.append(unknown_keys[-1])
            continue
        if option.secret is True and raw is not None and not variables_in(raw):
            fix = f'write "{{env:{option.name.upper()}}}" instead'
            problems.append(Problem(message=f"{key} is a secret", where=file, fix=fix, option=option.name))
        elif not _not_given(option, raw):
            _put(layer, option, Given(value=raw, spelling=key, place=f"{key} in {file}"), problems)
    problems += _of_another_trainer(unknown_keys, schema, file)
    return layer


def _of_another_trainer(unknown_keys: Sequence[Problem], schema: Schema, file: str) -> Iterator[Problem]:
    """Which package reads a file whose keys may be those of SimpleTuner, if it is not active."""
    package = package_of("commands", "config import")
    several = sum(not problem.package for problem in unknown_keys) >= _SEVERAL
    if package is not None and several and file.endswith(".json") and not schema.dialect.trainer:
        yield package.problem(f"if this is a configuration of SimpleTuner, {package.distribution} reads it", file)


def _not_given(option: Option, raw: object) -> bool:
    """null and empty texts, except texts that may be empty."""
    return raw is None or (raw == "" and not option.may_be_empty)


def put_translated(
    layer: dict[str, Given], found: Translation, schema: Schema, source: str, problems: list[Problem], notices: list[str]
) -> None:
    """Add what options of another trainer mean here to a layer, with their notices and problems."""
    for name, (key, value) in found.values.items():
        if value is not None:
            _put(layer, schema.options[name], Given(value=value, spelling=name, place=f"{key} in {source}"), problems)
    problems += [replace(problem, where=source) for problem in found.problems]
    notices += [f"{key} in {source}: {text}" for key, text in found.notices]


def with_variables(layer: Layer, environment: Mapping[str, str], problems: list[Problem]) -> Layer:
    """The layer with every {env:NAME} replaced, from whatever source."""
    found: dict[str, Given] = {}
    for name, given in layer.items():
        missing: list[Problem] = []
        value = expand(given.value, environment, given.place, missing) if variables_in(given.value) else given.value
        problems += [replace(problem, option=name) for problem in missing]
        found[name] = given if value == given.value else replace(given, value=value, written=given.value)
    return found


def _put(layer: dict[str, Given], option: Option, given: Given, problems: list[Problem]) -> None:
    """Add a value to a layer. Two spellings of one option with different values are a problem."""
    first = layer.setdefault(option.name, given)
    if first is not given and not same(option, first.value, given.value):
        message = f"{first.place} and {given.place} are the same option with different values"
        problems.append(Problem(message=message, where=option.name, fix="keep one of them", option=option.name))


def flat(values: Mapping[str, object], groups: Sequence[OptionGroup]) -> Iterator[tuple[str, object]]:
    """Keys at the top level and in tables named like a section, such as [training]; without the table [defaults]."""
    sections = {group.name for group in groups}
    for key, value in values.items():
        if key == TABLE and isinstance(value, dict):
            continue
        if isinstance(value, dict) and key in sections:
            yield from ((str(inner), each) for inner, each in value.items())
        else:
            yield key, value


def _unknown_key(key: str, value: object, schema: Schema, file: str) -> Problem:
    problem = unknown(key, schema, where=file)
    sections = [group.name for group in schema.groups]
    if isinstance(value, dict) and not problem.package and (near := get_close_matches(key, sections, n=1)):
        return Problem(message=f"unknown section [{key}]", where=file, fix=f"did you mean [{near[0]}]?")
    return problem


def accelerate_path(
    layers: Mapping[str, Layer], itself: Path | None, environment: Mapping[str, str], problems: list[Problem]
) -> Path | None:
    """The Accelerate YAML to use: the one given as the configuration file or by option, else the user's default one."""
    given = next((layer["accelerate_config"] for layer in layers.values() if "accelerate_config" in layer), None)
    if itself is not None:
        if given is not None:
            message = f"{itself} is an Accelerate YAML already"
            problems.append(Problem(message=message, where=given.place, fix="give one of the two"))
        return itself
    if given is not None:
        text = str(given.value)
        return None if text.lower() == "none" or path_error(text) else Path(text).expanduser()  # validation reports it
    return accelerate_yaml.default_file(environment)


def same(option: Option, one: object, other: object) -> bool:
    """Whether two values are equal once validated, such as 8 and "8", or true and "yes"."""
    try:
        return bool(option.check(one) == option.check(other))
    except ValidationError:
        return one == other  # validation reports the invalid one
