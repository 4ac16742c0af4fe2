"""Files, environment and flags -> one validated, immutable Config that knows where each value came from.

Priority, strongest first: flags, SMALTI_* environment, Accelerate YAML (what it covers), configuration file, defaults.
Where two sources name the same option with different values, a notice says which won.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, cast

from pydantic import ValidationError

from smalti import acceleratefile
from smalti.configfile import expand, read_mapping
from smalti.errors import ConfigError, Problem, UserError
from smalti.flags import parse_flags
from smalti.options import Given, Option, OptionGroup, Options, Schema, unknown
from smalti.packages import strategies
from smalti.plugins import PluginInfo, Plugins, Selection
from smalti.settings import GROUPS, PluginOptions

G = TypeVar("G", bound=Options)

PREFIX = "SMALTI_"
RESERVED = frozenset({"SMALTI_OUTCOME_DIR", "SMALTI_PARENT", "SMALTI_DIGEST", "SMALTI_CONTEXT_PARALLEL_ON_CPU"})
"""Variables with our prefix that are not options: the launcher's word to its workers."""
PER_MACHINE = frozenset(("machine_rank", "accelerate_config"))
"""Options in which the machines of one run may differ."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option's value. `config[TrainingOptions].max_grad_norm` is typed; `config.value("max_grad_norm")` is not."""

    schema: Schema
    groups: Mapping[type[Options], Options]
    sources: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    accelerate: Mapping[str, object] = field(default_factory=dict)
    """The user's Accelerate YAML as it stands, to be merged into the launch; empty if there is none."""

    def __getitem__(self, group: type[G]) -> G:
        return cast(G, self.groups[group])

    def __contains__(self, group: type[Options]) -> bool:
        return group in self.groups

    def value(self, name: str) -> object:
        return getattr(self.groups[self.schema.options[name].group.options], name)

    def source(self, name: str) -> str:
        """Where the value came from, for people."""
        return self.sources.get(name, "default")

    def values(self) -> dict[str, object]:
        """Every option's value, as JSON would hold it. Secrets are left out."""
        found: dict[str, object] = {}
        for group in self.groups.values():
            found |= group.model_dump(mode="json")
        return {name: value for name, value in found.items() if not self.schema.options[name].secret}

    def changes(self) -> dict[str, object]:
        """The values that are not defaults: what a configuration file needs to hold."""
        defaults = {name: value for kind in self.groups for name, value in kind()}
        return {name: value for name, value in self.values().items() if self.value(name) != defaults[name]}

    def shared_values(self) -> dict[str, object]:
        """The values that are the same on every machine of a run: what its workers are given."""
        return {name: value for name, value in self.values().items() if name not in PER_MACHINE}

    def flags(self) -> list[str]:
        """The flags that give this configuration again."""
        return [f"--{name}={_as_text(value)}" for name, value in self.changes().items()]

    def secrets(self) -> dict[str, str]:
        """The secrets that are set, as environment variables: the only way in which they travel to the workers."""
        names = [option.name for option in self.schema.options.values() if option.secret]
        return {_variable(name): str(value) for name in names if (value := self.value(name)) is not None}

    @property
    def digest(self) -> str:
        """Sixteen hex digits over all values: the same on every rank, or the ranks do not train the same run."""
        text = json.dumps(self.shared_values(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)


def _variable(name: str) -> str:
    return PREFIX + name.upper()


Layer = Mapping[str, Given]


# --- what there is to configure -------------------------------------------------------------------------------------


def schema_of(plugins: Plugins) -> Schema:
    """The options of the core and of all active plugins; the core's sections come first.

    Raises UserError when two plugins declare the same option.
    """
    groups = plugins.gather("declare_options", OptionGroup)
    owners: dict[str, PluginInfo] = {}
    for plugin, answer in plugins.answers("declare_options"):
        mine = plugins.infos[plugin]
        for option in Schema(tuple(cast(list[OptionGroup], answer))).options.values():
            for name in (option.name, *option.aliases):
                if (other := owners.setdefault(name, mine)) is not mine:
                    raise UserError(
                        f"the option {name!r} is declared by plugin {other.name!r} ({other.source}) "
                        f"and by plugin {mine.name!r} ({mine.source})",
                        fix=f"leave one of them out, for example with --without {mine.name}",
                    )
    order = {group.name: index for index, group in enumerate(GROUPS)}
    return Schema(tuple(sorted(groups, key=lambda group: (order.get(group.name, len(order)), group.name))))


def selection_of(arguments: Sequence[str], file: Path | None, environment: Mapping[str, str]) -> Selection:
    """Which plugins were asked for, before any of them is imported: flags, then environment, then the file."""
    schema = Schema(tuple(group for group in GROUPS if group.options is PluginOptions))
    content = read_mapping(file) if file is not None else {}
    problems: list[Problem] = []
    layers: list[list[tuple[str, object, str]]] = [
        [(flag, value, flag) for flag, value in _flags_among(arguments, schema)],
        [(name.removeprefix(PREFIX), value, name) for name, value in environment.items() if name.startswith(PREFIX) and value],
        [(key, expand(value, environment, key, problems), f"{key} in {file}") for key, value in _flat(content, GROUPS)],
    ]
    chosen: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        found: dict[str, tuple[str, ...]] = {}
        for spelling, value, place in layer:
            if (option := schema.find(spelling)) is not None and value is not None:
                try:
                    words = cast(tuple[str, ...], option.check(value))
                except ValidationError:
                    fix = "give names, separated by commas"
                    problems.append(Problem(message=f"{option.name} cannot be {value!r}", where=place, fix=fix))
                else:
                    found[option.name] = (*found.get(option.name, ()), *words)
        chosen = found | chosen
    if problems:
        raise ConfigError(problems)
    return Selection(only=chosen.get("plugins", ()), without=chosen.get("without", ()))


def _flags_among(arguments: Sequence[str], schema: Schema) -> Iterator[tuple[str, str]]:
    """The flags of these options and their values; all other words are left for later."""
    for index, word in enumerate(arguments):
        flag, joined, text = word.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if word.startswith("--") and schema.find(flag) and (joined or not following.startswith("--")):
            yield flag, text if joined else following


# --- resolving ------------------------------------------------------------------------------------------------------


def resolve(
    schema: Schema,
    arguments: Sequence[str] = (),
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """All sources together, validated. Raises ConfigError with every problem at once."""
    environment = os.environ if environment is None else environment
    problems: list[Problem] = []
    content = read_mapping(file) if file is not None else {}
    is_accelerate = acceleratefile.is_accelerate(content)
    layers: dict[str, Layer] = {
        "flag": parse_flags(arguments, schema, problems),
        "environment": _environment_layer(schema, environment, problems),
        "Accelerate YAML": {},
        "file": {} if is_accelerate else _file_layer(schema, content, str(file), environment, problems),
    }
    path = _accelerate_path(layers, file if is_accelerate else None, environment, problems)
    accelerate = content if is_accelerate else read_mapping(path) if path is not None else {}
    notices: list[str] = []
    if path is not None:
        problems += acceleratefile.problems_of(accelerate, schema, path)
        notices += acceleratefile.notices_of(accelerate, schema, path)
        layers["Accelerate YAML"] = acceleratefile.options_in(accelerate, schema, path)
    chosen = _merge(layers, schema, notices)
    _imply(schema, chosen, notices, problems)
    groups = _validate(schema, {name: given for name, (_, given) in chosen.items()}, problems)
    problems += _at_odds(schema, groups, problems)
    if problems:
        raise ConfigError(problems)
    sources = {name: f"{label} ({given.place})" for name, (label, given) in chosen.items()}
    config = Config(schema=schema, groups=groups, sources=sources, accelerate=accelerate)
    return replace(config, notices=(*notices, *_idle_options(config)))


def restore(
    schema: Schema,
    values: Mapping[str, object],
    accelerate: Mapping[str, object],
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The Config of a run from the values that its launcher wrote: how workers get theirs. Secrets come by the environment."""
    environment = os.environ if environment is None else environment
    problems = [unknown(name, schema, where="launch.json") for name in values if name not in schema.options]
    layer = {
        name: Given(value=value, spelling=name, place="launch.json")
        for name, value in values.items()
        if name in schema.options and value is not None
    }
    for option in schema.options.values():
        if option.secret and (value := environment.get(_variable(option.name))) is not None:
            layer[option.name] = Given(value=value, spelling=option.name, place=_variable(option.name))
    groups = _validate(schema, layer, problems)
    if problems:
        raise ConfigError(problems)
    config = Config(schema=schema, groups=groups, accelerate=accelerate)
    # What has its default value is as good as not given: it came from nowhere, or changed nothing.
    return replace(config, sources=dict.fromkeys(config.changes(), "launch"))


def check(config: Config, plugins: Plugins, *, without: Collection[str] = ()) -> None:
    """Ask every plugin, `without` these, what is wrong with the whole configuration. Raises ConfigError with all answers."""
    answers = plugins.answers("check_config", config=config)
    problems = [problem for name, answer in answers if name not in without for problem in cast(list[Problem], answer)]
    if problems:
        raise ConfigError(problems)


# --- the sources ----------------------------------------------------------------------------------------------------


def _environment_layer(schema: Schema, environment: Mapping[str, str], problems: list[Problem]) -> Layer:
    """Variables that are empty count as not set."""
    layer: dict[str, Given] = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable in RESERVED or value == "":
            continue
        spelling = variable.removeprefix(PREFIX).lower()
        option = schema.find(spelling)
        if option is None:
            problems.append(unknown(spelling, schema, where=f"environment variable {variable}"))
        else:
            _put(layer, option, Given(value=value, spelling=spelling, place=variable), problems)
    return layer


def _file_layer(
    schema: Schema, content: Mapping[str, object], file: str, environment: Mapping[str, str], problems: list[Problem]
) -> Layer:
    layer: dict[str, Given] = {}
    for key, raw in _flat(content, schema.groups):
        option = schema.find(key)
        if option is None:
            problems.append(_unknown_key(key, raw, schema, file))
            continue
        value = expand(raw, environment, f"{key} in {file}", problems)
        if option.secret and value == raw and value is not None:
            problems.append(
                Problem(message=f"{key} is a secret", where=file, fix=f'write "{{env:{option.name.upper()}}}" instead')
            )
        elif value is not None:  # null means "not given"
            _put(layer, option, Given(value=value, spelling=key, place=f"{key} in {file}"), problems)
    return layer


def _put(layer: dict[str, Given], option: Option, given: Given, problems: list[Problem]) -> None:
    """Add a value to a layer, unless the same source has another one under another spelling."""
    first = layer.setdefault(option.name, given)
    if first is not given and not _same(option, first.value, given.value):
        message = f"{first.place} and {given.place} are the same option with different values"
        problems.append(Problem(message=message, where=option.name, fix="keep one of them"))


def _flat(values: Mapping[str, object], groups: Sequence[OptionGroup]) -> Iterator[tuple[str, object]]:
    """Keys at the top level, and those in tables that are named like a section: [training], [launch]."""
    sections = {group.name for group in groups}
    for key, value in values.items():
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


def _accelerate_path(
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
        return None if str(given.value).lower() == "none" else Path(str(given.value)).expanduser()
    return acceleratefile.default_file(environment)


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
            if winner is not given and not _same(option, winner.value, given.value):
                values = ("", "") if option.secret else (f"{winner.value!r} from ", f"{given.value!r} from ")
                notices.append(f"{name}: {values[0]}{winner.place} wins over {values[1]}{given.place}")
    return chosen


def _imply(schema: Schema, chosen: dict[str, tuple[str, Given]], notices: list[str], problems: list[Problem]) -> None:
    """Add the values that lie in those of other options. What is given elsewhere must agree with them."""
    for group in schema.groups:
        mine = [name for name in group.options.model_fields if name in chosen]
        if group.implies is None or not mine:
            continue
        found = group.implies({name: chosen[name][1].value for name in mine})
        problems += found.problems
        notices += [f"{key} in {mine[0]} {remark}" for key, remark in found.notices]
        for name, (key, value) in found.values.items():
            inner = Given(value=value, spelling=name, place=f"{key} in {mine[0]}")
            _, given = chosen.setdefault(name, (group.title, inner))
            if given is not inner and not _same(schema.options[name], given.value, value):
                message = f"{name} is {given.value!r}, and {inner.place} says {value!r}"
                problems.append(
                    Problem(message=message, where=given.place, fix="say the same in both, or leave one of them out")
                )


def _at_odds(schema: Schema, groups: Mapping[type[Options], Options], problems: Sequence[Problem]) -> Iterator[Problem]:
    """Two strategies at once, where the plugin of one is missing and so cannot claim the run against the other."""
    switches = [option for option in schema.options.values() if option.accelerate.startswith("distributed_type=")]
    on = {
        option.accelerate.partition("=")[2]
        for option in switches
        if getattr(groups.get(option.group.options), option.name, False)
    }
    titles = strategies(on, {problem.package for problem in problems}) if on else []
    if len(titles) > 1:
        fix = "switch one of them off, in the flags, the configuration file or the Accelerate YAML"
        yield Problem(message=f"{' and '.join(titles)} cannot be enabled simultaneously.", fix=fix)


def _same(option: Option, one: object, other: object) -> bool:
    """Whether two spellings give one value: 8 and "8", true and "yes"."""
    try:
        return bool(option.check(one) == option.check(other))
    except ValidationError:
        return one == other  # the complaint about it comes from validation


def _validate(schema: Schema, chosen: Mapping[str, Given], problems: list[Problem]) -> dict[type[Options], Options]:
    groups: dict[type[Options], Options] = {}
    for group in schema.groups:
        values = {}
        for name in group.options.model_fields:
            if name in chosen:
                values[name] = schema.options[name].read(chosen[name].value)
                if objection := schema.options[name].objection(values[name]):
                    problems.append(_bad_value(schema.options[name], chosen[name], objection))
                    del values[name]
        try:
            groups[group.options] = group.options.model_validate(values)
        except ValidationError as error:
            problems += [_problem(group, schema, chosen, dict(each)) for each in error.errors()]
    return groups


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
        message = "it is none of the choices"
    return _bad_value(option, given, f"entry {inside}: {message}" if inside else message)


_WANTED = {
    "integer": "an integer",
    "number": "a number",
    "path": "a path",
    "list": "a list",
    "text": "a text",
    "true|false": "true or false",
}


def _bad_value(option: Option, given: Given, reason: str) -> Problem:
    shown = "what it is" if option.secret else repr(given.value)
    near = get_close_matches(str(given.value).lower(), option.choices, n=1)
    hint = f"did you mean {near[0]}? " if near and not option.secret else ""
    wanted = f"one of {', '.join(option.choices)}" if option.choices else _WANTED.get(option.kind, option.kind)
    bounds = f" {option.bounds}" if option.bounds else ""
    return Problem(message=f"{option.name} cannot be {shown}: {reason}", where=given.place, fix=f"{hint}give {wanted}{bounds}")


def _idle_options(config: Config) -> Iterator[str]:
    """Notices for options that were set and have no effect, because what they depend on is off."""
    changed = config.changes()
    for name in config.sources:
        option = config.schema.options[name]
        if option.when and name in changed and not _holds(option.when, config):
            yield f"{name} has no effect unless {option.when}"


def _holds(condition: str, config: Config) -> bool:
    key, sign, wanted = (*condition.split(), "", "")[:3]
    value = config.value(key)
    if sign == "==" and value is None:
        return True  # what is not given is chosen by the family, and may be just that
    if sign == ">":
        return float(str(value)) > float(wanted)
    return str(value).lower() == wanted.lower() if sign else bool(value)
