"""One option is one declared field: flag, file key, environment name, help, reference page and web control come from it.

A group of options is a pydantic model; a plugin declares it and reads it back, typed, as `config[MyOptions].my_flag`.
"""

from __future__ import annotations

import os
import types as python_types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.fields import FieldInfo

from smalti.config.known_packages import package_of
from smalti.errors import InvalidOptionError, Problem, UserError
from smalti.system import load_json

LARGEST = 2**63 - 1
"""The largest integer that an option may have."""
LONGEST_NAME = 255
"""Bytes in the name of a file, on common file systems."""
_ALIKE = (0.7, 0.8)
"""What a spelling mistake leaves of a short and of a long name, as `difflib` measures it. Below, names have another meaning."""
_SHORT = 5
Level = Literal["basic", "advanced", "expert"]
"""The level of help at which an option is shown."""
JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]


class Options(BaseModel):
    """Base of every group of options. Unknown names are refused, and values do not change after validation.

    A field that may be None has None as its default: None means "not given", in every source alike.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, coerce_numbers_to_str=True, defer_build=True
    )

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: object) -> object:
        """Integers must fit in 64 bits, as C code and files need."""
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"it must lie between -{LARGEST} and {LARGEST}")
        return value

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in type(self).model_fields:
                raise InvalidOptionError(name)
            return super().__getattr__(name)


def invalidated(options: Options, names: Collection[str]) -> Options:
    """The same options without values for `names`: reading one of those raises InvalidOptionError."""
    copy = options.model_copy()
    for name in names:
        vars(copy).pop(name, None)
    return copy


def option(
    default: object,
    *,
    help: str,
    level: Level = "basic",
    when: str = "",
    tradeoff: str = "",
    aliases: Sequence[str] = (),
    accelerate: str = "",
    secret: bool | Callable[[object], bool] = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Declare one option; use as the default of a field of an `Options` class.

    Args:
        default: used when no source names the option; None for fields that may be None.
        help: one sentence, shown in the help and on the reference page.
        level: the level of help at which it is shown; the short help shows "basic" only.
        when: the option has an effect only while this holds: "use_ema", "optimizer == adamw" or "num_processes > 1".
        tradeoff: what is gained and what it costs, such as "less memory, about 30 % slower".
        aliases: former names, and names in other trainers, which are accepted with a notice.
        accelerate: the key of an Accelerate YAML that sets this option, dotted into sections; "key=value" means "true when the
            key has this value".
        secret: never shown; accepted from the environment or as {env:NAME} only. A function says which values are secrets: such
            a value is never shown or copied, and is accepted from configuration files too.
    """
    extra: dict[str, Any] = {
        "level": level,
        "when": when,
        "tradeoff": tradeoff,
        "aliases": tuple(aliases),
        "accelerate": accelerate,
        "secret": secret,
    }
    return Field(default=default, description=help, ge=ge, gt=gt, le=le, lt=lt, json_schema_extra=extra)


def _split(value: object) -> object:
    """A list from one string: JSON if it begins with "[", else separated by commas."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith("["):
        return load_json(text)
    return [part.strip() for part in text.split(",") if part.strip()]


def _one_or_many(value: object) -> object:
    """A list of one string, which is not split because texts contain commas; or a list from JSON."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        with suppress(ValueError):  # "[soft light] a cat" is a prompt
            return load_json(value)
    return [value]


def _tables(value: object) -> object:
    """Tables from JSON; a single one is a list of one."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        value = load_json(value)
    return _without_null([value] if isinstance(value, Mapping) else value)


def _without_null(value: object) -> object:
    """The same without keys that are null, which means "not given" and cannot be written in TOML."""
    if isinstance(value, Mapping):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list | tuple) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A comma-separated list of names."""
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]
"""Several texts: the flag is repeated, a file gives a list."""
Tables = Annotated[tuple[dict[str, Any], ...], BeforeValidator(_tables)]
"""A list of tables, such as [[datasets]]; JSON on the command line."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """What a plugin reads in an Accelerate YAML, or in the value of an option, if options do not correspond to single keys.

    `values` has (key, value) by the name of an option. It overrides the keys that options name with `accelerate=`; the value
    None means that the file does not set the option. `notices` have (key, text), such as "has no effect: ...". Keys, also in
    `Problem.where`, are dotted keys of the file. `rest` has what a `Dialect` leaves as it was given.
    """

    values: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    notices: Sequence[tuple[str, str]] = ()
    problems: Sequence[Problem] = ()
    rest: Mapping[str, object] = field(default_factory=dict)


class Dialect:
    """How another trainer spells options and datasets, and the defaults of its files. This class changes nothing.

    `trainer` names the trainer in messages, and `otherwise` says there how not to use its defaults.
    """

    trainer = ""
    otherwise = ""

    def translate(self, given: Mapping[str, object], schema: Schema) -> Translation:
        """What the values of one file or one command line mean here, by their keys, which may begin with "--".

        The value None stands for an option that has no value, whatever weaker sources say. `rest` of the result has what means
        the same here, and what is not known.
        """
        return Translation(rest=given)

    def claim(self, layers: Mapping[str, Mapping[str, Given]], content: Mapping[str, object], schema: Schema, file: str) -> str:
        """Why a file is one of that trainer, as the place of its defaults in messages; empty if it is not.

        `layers` are the values of all sources, and `content` is what the file holds.
        """
        return ""

    def in_file(self, layer: Mapping[str, Given], notices: list[str]) -> Mapping[str, Given]:
        """The values of such a file, where options with the same name have another meaning there."""
        return layer

    def defaults(self, chosen: dict[str, tuple[str, Given]], schema: Schema) -> Mapping[str, object]:
        """That trainer's defaults by option, where they differ from those here. `chosen` has the values with their layers."""
        return {}

    def translate_chosen(self, given: Mapping[str, object], schema: Schema) -> Translation:
        """What the values that won over those of weaker sources mean here: other values of these, and of options not given."""
        return Translation()

    def translate_dataset(
        self,
        entry: Mapping[str, object],
        entries: Sequence[Mapping[str, object]],
        known: Mapping[str, Collection[str]],
        option: Callable[[str], object],
    ) -> Sequence[Translation]:
        """What one of the `entries` of a data file means here: datasets, each as `rest`; problems alone if it cannot be read.

        `known` has the keys that this entry may have under "", and the storages under "type". `option` returns the value of an
        option, None where there is no configuration. Placeholders in paths are filled in, and comments removed.
        """
        return [Translation(rest=entry)]

    def page(self, schema: Schema) -> str:
        """What becomes of each option of that trainer, as Markdown."""
        package = package_of("commands", "config import")
        assert package is not None
        raise package.error(f"{package.distribution} has the options of other trainers")


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """A section of options as a plugin declares it. `name` is unique; `title` heads the section in the help.

    `translate` takes an Accelerate YAML, and the options of all groups, and reads what `accelerate=` keys of options do not
    cover; `..._config` sections are tables. `derived` takes all given values, not validated, and returns values of other
    options that those of this group contain; called if there are any. Those are used for options that nothing else sets. Their
    keys are keys in the value.

    `scheduler` takes the environment, the values of all sources by their labels, and the notices, to which it may add. It
    returns what a scheduler of jobs says in variables of its own. It may remove weaker values from the sources.

    `urls` has functions by the name of an option that holds a path, of this or another group. If a URL is given there, the
    function takes it, and returns the values of this and of other options that stand for it.

    `dialect` reads options of all groups in the spelling of another trainer. There is at most one.

    `complete` takes the resolved `Config` of `smalti train`, before it is checked, and returns it with values that it chooses
    for options that nothing sets (`Config.chosen`). Called in the launcher of every node, also for a dry run.

    smalti sets `owner`, the plugin in messages; plugins leave it out.
    """

    name: str
    title: str
    options: type[Options]
    translate: Callable[[Mapping[str, object], Schema], Translation] | None = None
    derived: Callable[[Mapping[str, object]], Translation] | None = None
    scheduler: Callable[[Mapping[str, str], dict[str, Mapping[str, Given]], list[str]], Mapping[str, Given]] | None = None
    urls: Mapping[str, Callable[[str], Translation]] = field(default_factory=dict, hash=False)
    dialect: Dialect | None = None
    complete: Callable[[Any], Any] = lambda config: config
    owner: str = field(default="", compare=False)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One declared option, as parser, help and docs use it."""

    name: str
    group: OptionGroup
    info: FieldInfo
    level: Level
    help: str
    when: str
    tradeoff: str
    aliases: tuple[str, ...]
    accelerate: str
    secret: bool | Callable[[object], bool]

    @property
    def default(self) -> object:
        return self.info.get_default()

    def is_secret(self, value: object) -> bool:
        """Whether this value, as it was written, must not be shown or copied."""
        return self.secret if isinstance(self.secret, bool) else self.secret(value)

    @property
    def is_flag(self) -> bool:
        """A switch: `--name` alone means true, `--no_name` false."""
        return bool in self._types

    @property
    def holds_text(self) -> bool:
        """Whether the value is a free text or a path, rather than a number, a switch or a choice."""
        return not self.choices and (self.is_list or str in self._types or Path in self._types)

    @property
    def may_be_none(self) -> bool:
        return type(None) in self._types

    @property
    def may_be_empty(self) -> bool:
        """Whether an empty text is a value, rather than another way to say "not given"."""
        return str in self._types and not self.may_be_none and not self.choices

    @property
    def is_list(self) -> bool:
        """A list: repeating the flag adds to it."""
        return any(get_origin(each) is tuple for each in self._types)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a choice; empty for other options."""
        return tuple(str(word) for each in self._types if get_origin(each) is Literal for word in get_args(each))

    @property
    def kind(self) -> str:
        """What to write, for messages: "true|false", "integer", "number", the choices, ..."""
        if self.choices:
            return "|".join(self.choices)
        names = {bool: "true|false", int: "integer", float: "number", str: "text", Path: "path"}
        return " or ".join(names.get(each, "list") for each in self._types if each is not type(None))

    @property
    def bounds(self) -> str:
        """Allowed range, for messages: "> 0, <= 1"; empty if there is none."""
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        found = []
        for constraint in self.info.metadata:
            found += [f"{sign} {_number(getattr(constraint, key))}" for key, sign in signs.items() if hasattr(constraint, key)]
        return ", ".join(found)

    @property
    def _types(self) -> tuple[Any, ...]:
        annotation = self.info.annotation
        if get_origin(annotation) in (Union, python_types.UnionType):
            return get_args(annotation)
        return (annotation,)

    def read(self, value: object) -> object:
        """A value from any source, in the form that validation expects.

        Choices in any case, with dashes or underscores; "none" for options that may be None and are no text; "~" in paths.
        """
        if isinstance(value, bool) and self.choices:
            value = "yes" if value else "no"  # YAML takes a bare `no` for false
        if not isinstance(value, str):
            return value
        word = _fold(value)
        if self.choices and word in (spelled := {_fold(choice): choice for choice in self.choices}):
            return spelled[word]
        if self.may_be_none and (value == "" or (word in ("none", "null") and str not in self._types)):
            return None
        if Path in self._types and value.startswith("~"):
            with suppress(RuntimeError):  # nobody has this name: `path_error` says so
                return str(Path(value).expanduser())
        return value

    def reject_reason(self, value: object) -> str:
        """Why a value is refused that validation would accept by converting it; empty if it is not refused."""
        if isinstance(value, bool) and not self.is_flag:
            return "a switch's value"
        if not isinstance(value, str):
            return ""
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            return "it is not valid UTF-8"
        if Path not in self._types:
            return ""
        return path_error(value) or ("it is empty" if value == "" else "")

    def check(self, value: object) -> object:
        """The value as its group will hold it. Raises pydantic's ValidationError."""
        return getattr(self.group.options.model_validate({self.name: self.read(value)}), self.name)


@dataclass(frozen=True, kw_only=True)
class Given:
    """One value from a source. `spelling` is the name of the option there, `place` says where it is, for messages.

    `written` is the value before {env:NAME} was replaced; None if it contained none.
    """

    value: object
    spelling: str
    place: str
    written: object = None

    @property
    def shown(self) -> object:
        """The value for messages and files."""
        return self.value if self.written is None else self.written


def path_error(text: str) -> str:
    """Why a text cannot be the path of any file; empty if it can."""
    if "\0" in text:
        return "it contains a zero byte"
    if any(len(name.encode()) > LONGEST_NAME for name in text.split("/")):
        return f"no file has a name of more than {LONGEST_NAME} bytes"
    if text.startswith("~") and os.path.expanduser(text) == text:  # noqa: PTH111 - which raises for nobody
        return f"there is no user {text.partition('/')[0][1:]}"
    return ""


def _number(value: float) -> str:
    """Large whole numbers to the last digit."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _fold(word: str) -> str:
    return word.strip().lower().replace("-", "_")


@dataclass(frozen=True)
class Schema:
    """All options of the core and of the active plugins, by name."""

    groups: tuple[OptionGroup, ...]
    optimizers: frozenset[str] = frozenset()
    """The names of the registered optimizers, which a dialect does not read as another trainer's."""
    options: Mapping[str, Option] = field(init=False)
    aliases: Mapping[str, str] = field(init=False)
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        options: dict[str, Option] = {}
        aliases: dict[str, str] = {}
        for group in self.groups:
            for each in _options_of(group):
                for name in (each.name, *each.aliases):
                    if (other := options.get(name) or options.get(aliases.get(name, ""))) is not None:
                        both = " and by ".join(each.owner or repr(each.name) for each in (other.group, group))
                        fix = "disable one of the two plugins with --without NAME"
                        raise UserError(f"the option {name!r} is declared by {both}", fix=fix)
                options[each.name] = each
                aliases |= dict.fromkeys(each.aliases, each.name)
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "aliases", aliases)
        dialects = [group.dialect for group in self.groups if group.dialect is not None]
        if len(dialects) > 1:
            names = " and ".join(each.trainer for each in dialects)
            raise UserError(f"options are read in the spelling of {names}", fix="disable one of the plugins with --without")
        object.__setattr__(self, "dialect", dialects[0] if dialects else Dialect())

    def find(self, spelling: str) -> Option | None:
        """The option of a flag or key in any accepted spelling: dashes, case, leading "--", aliases."""
        name = _fold(spelling.strip().lstrip("-"))
        return self.options.get(name) or self.options.get(self.aliases.get(name, ""))

    def opposite(self, spelling: str) -> Option | None:
        """The switch that is off where another trainer's `disable_...` is on, such as allow_tf32 for disable_tf32."""
        word = _fold(spelling.lstrip("-"))
        names = (
            [f"{start}{word.removeprefix('disable_')}" for start in ("", "allow_", "use_")]
            if word.startswith("disable_")
            else []
        )
        found = [self.options[name] for name in names if name in self.options]
        return next((each for each in found if each.is_flag), None)

    def near(self, spelling: str) -> list[str]:
        """Similar names, nearest first: names of the same words, with these initials ("lr"), alike, or beginning like this."""
        word = _fold(spelling.lstrip("-"))
        names = [*self.options, *self.aliases]
        initials = [name for name in names if "".join(part[0] for part in name.split("_") if part) == word]
        beginnings = [name for name in names if len(word) > 2 and name.startswith(word)]
        alike = get_close_matches(word, names, n=3, cutoff=_ALIKE[len(word) > _SHORT])
        reordered = [name for name in names if sorted(name.split("_")) == sorted(word.split("_"))]
        found = {self.aliases.get(name, name): None for name in (*reordered, *initials, *alike, *beginnings)}
        return list(found)[:3]


def _options_of(group: OptionGroup) -> Iterable[Option]:
    for name, info in group.options.model_fields.items():
        extra = info.json_schema_extra
        if not isinstance(extra, dict) or not info.description:
            raise TypeError(f"{group.options.__name__}.{name} must be declared with option(..., help=...)")
        declared = Option(name=name, group=group, info=info, help=info.description, **cast(dict[str, Any], extra))
        if declared.may_be_none and info.get_default() is not None:
            raise TypeError(f"{group.options.__name__}.{name} may be None, so None must be its default")
        yield declared


def unknown(spelling: str, schema: Schema, *, where: str) -> Problem:
    """The problem of an unknown option, with the package that has it, or with similar names."""
    if package := package_of("options", _fold(spelling.lstrip("-"))):
        return package.problem(f"{spelling} belongs to {package.distribution}", where)
    prefix = "--" if spelling.startswith("-") else ""
    if opposite := schema.opposite(spelling):
        fix = f"{prefix}no_{opposite.name}" if prefix else f"set {opposite.name} to false"
        return Problem(message=f"unknown option {spelling}", where=where, fix=fix, option=opposite.name)
    near, fix = schema.near(spelling), "remove it, or search the options by a word: smalti train --help WORD"
    if near:
        fix = f"did you mean {' or '.join(f'{prefix}{name}' for name in near)}?"
    return Problem(message=f"unknown option {spelling}", where=where, fix=fix, option=near[0] if near else "")
