"""What a table says about one key of another trainer, and how the values of a file become lines of a configuration.

Every table of a file is read with `Imported.table`. What is converted has the place of its key in the comment of a line.
`list_rest` lists every key of these tables that no comment names, so that no part of an importer can lose one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

Convert = Callable[[object], object]
T = TypeVar("T")
OFF: tuple[object, ...] = (None, False, 0, "", "none", "None", "NONE")
"""Values with which a key asks for nothing, in most trainers. Empty lists and tables do too."""


class _Unset:
    """No default: the key has an effect only if a file has it."""


UNSET = _Unset()


class UnconvertibleError(Exception):
    """A value without a counterpart. It is listed with the reason, and with what to do."""

    def __init__(self, why: str, *, fix: str = "", found: Found | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix
        self.found = found


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One key of another trainer.

    `option`: converted to `options[0]` by `convert`; `default` is that trainer's default, which is written where the key is
    absent. `read`: the module of the trainer converts it, together with other keys. `no effect`: what it asks for is what
    smalti does, or does not concern training. `unsupported`: listed in the result. `secret`: listed without its value.
    A value that is one of `off` is never listed. `note` is the difference in meaning, or the reason. A key that ends with * is
    the beginning of others.
    """

    key: str
    kind: Literal["option", "read", "no effect", "unsupported", "secret"]
    options: tuple[str, ...] = ()
    convert: Convert | None = None
    default: object = UNSET
    note: str = ""
    fix: str = ""
    off: tuple[object, ...] = OFF


def option(key: str, name: str, convert: Convert | None = None, note: str = "", *, default: object = UNSET) -> Rule:
    """A key that corresponds to one option."""
    return Rule(key=key, kind="option", options=(name,), convert=convert, note=note, default=default)


def read(key: str, *names: str, note: str = "", off: tuple[object, ...] = OFF) -> Rule:
    """A key that the module of the trainer converts. `names` are the options that it can become."""
    return Rule(key=key, kind="read", options=names, note=note, off=off)


def no_effect(text: str) -> tuple[Rule, ...]:
    """Keys that nothing has to be done for: lines of `- why | key key`, or `- why | before: key key` for before.key."""
    return tuple(Rule(key=key, kind="no effect", note=why) for why, keys, _ in _reasons(text) for key in keys)


def _reasons(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Why, keys, and what to do instead."""
    for entry in re.split(r"\n *- ", text.strip().removeprefix("- ")):
        why, keys, *fix = " ".join(entry.split()).split(" | ")
        before, _, rest = keys.rpartition(": ")
        yield why, [f"{before}.{key}" if before else key for key in rest.split()], " ".join(fix)


def secret(*keys: str) -> tuple[Rule, ...]:
    """Keys whose values are never shown, in a comment or anywhere else."""
    fix = "set it in the environment, or with the login of that service"
    return tuple(Rule(key=key, kind="secret", note="secrets are not copied", fix=fix) for key in keys)


def unsupported(text: str, *, off: tuple[object, ...] = OFF) -> tuple[Rule, ...]:
    """Keys without a counterpart: lines of `- why | key key | what to do instead`."""
    rules = (Rule(key=key, kind="unsupported", note=why, fix=fix, off=off) for why, keys, fix in _reasons(text) for key in keys)
    return tuple(rules)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A value that a file has. `place` names file and key, such as `train.toml: network_dim`."""

    value: object
    place: str

    def read(self, convert: Callable[[object], T]) -> T:
        """The converted value. The place is added to an UnconvertibleError."""
        try:
            return convert(self.value)
        except UnconvertibleError as error:
            raise UnconvertibleError(error.why, fix=error.fix, found=self) from None


class Values(dict[str, Found]):
    """The values of one table of a file, with their places. `trainer` is whose defaults are meant."""

    def __init__(self, found: Mapping[str, Found], trainer: str) -> None:
        super().__init__(found)
        self.trainer = trainer

    def first(self, *keys: str, default: object = None) -> Found:
        """The value of the first of these keys that is there, which overrides the others; or the default of the last."""
        given = [self[key] for key in keys if key in self]
        return before(*given) if given else Found(value=default, place=f"default of {self.trainer}: {keys[-1]}")

    def on(self, key: str) -> bool:
        """Whether a switch is there, and on."""
        return key in self and self[key].read(switch)

    def over(self, outer: Values) -> Values:
        """These values, and those of an outer table where they say nothing."""
        both = {key: before(each, outer[key]) if key in outer else each for key, each in self.items()}
        return Values({**outer, **both}, self.trainer)


def before(given: Found, *overridden: Found) -> Found:
    """A value that overrides others, which its place names too."""
    return replace(given, place=", before ".join(dict.fromkeys(each.place for each in (given, *overridden))))


def switch(value: object) -> bool:
    """True or false, also from a text."""
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off", ""):
        return False
    if isinstance(value, int | float):
        return bool(value)
    raise UnconvertibleError("it is neither true nor false")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A value of our configuration. `source` says where it comes from, and what was converted."""

    value: object
    source: str


@dataclass(frozen=True, kw_only=True)
class Left:
    """What was not converted. `value` is not shown if it is None."""

    place: str
    why: str
    fix: str = ""
    value: object = None


Entry = dict[str, Line]
"""One dataset: its keys with their values."""


@dataclass(kw_only=True)
class Imported:
    """The result of an import: options, datasets, what is left, and notices about what means something else here.

    `tables` are those that were read, each with its rules. `settled` are places of keys that ask for what smalti does, and
    `left_out` the beginnings of places in tables that are left out as a whole.
    """

    trainer: str
    files: list[str] = field(default_factory=list)
    lines: dict[str, Line] = field(default_factory=dict)
    datasets: list[Entry] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    tables: list[tuple[Sequence[Rule], Values]] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def table(self, rules: Sequence[Rule], values: object, file: str, *, within: str = "") -> Values:
        """Read a table, whose keys are listed unless they are converted. `within` is its place in the file."""
        found = found_in(flattened(values), file, before=within) if isinstance(values, Mapping) else {}
        if not isinstance(values, Mapping) and not asks_for_nothing(values):
            self.leave(place_of(file, within.rstrip(".")), "it is not a table", value=values)
        self.tables.append((rules, Values(found, self.trainer)))
        return self.tables[-1][1]

    def rows(self, rules: Sequence[Rule], rows: object, file: str, *, within: str = "") -> Iterator[tuple[str, Values]]:
        """Read the tables of a list, each with its place in the file."""
        for index, row in enumerate(rows if isinstance(rows, list) else [] if rows is None else [rows]):
            place = f"{within}[{index}]."
            if (found := self.table(rules, row, file, within=place)) or isinstance(row, Mapping):
                yield place, found

    def leave_table(self, within: str, given: Found, why: str, *, fix: str = "", value: object = None) -> None:
        """List a table that is left out because of this value, and none of its keys. Their places begin with `within`."""
        self.leave(given.place, why, fix=fix, value=given.value if value is None else value)
        self.left_out.append(within)

    def add(self, name: str, value: object, source: str) -> None:
        """Set an option."""
        self.lines[name] = Line(value=value, source=source)

    def copy(self, name: str, given: Found, convert: Convert | None = None, note: str = "") -> None:
        """Set an option to a value that was found."""
        value = given.read(convert) if convert is not None else given.value
        self.add(name, value, source_text("", given.place, given.value, value, note))

    def leave(self, place: str, why: str, *, fix: str = "", value: object = None) -> None:
        """List something that was not converted."""
        self.left.append(Left(place=place, why=why, fix=fix, value=value))

    def value(self, name: str) -> object:
        """The value of an option; None if there is none yet."""
        line = self.lines.get(name)
        return line.value if line is not None else None


def attempt(result: Imported, step: Callable[..., None], *arguments: object) -> None:
    """Take one step of an import. A value in it that has no counterpart is listed, and the rest of the step left out."""
    try:
        step(*arguments)
    except UnconvertibleError as error:
        found = error.found
        result.leave(found.place if found else result.trainer, error.why, fix=error.fix, value=found.value if found else None)


def place_of(file: str, key: str) -> str:
    """How a key of a file is named in comments and lists."""
    return f"{file}: {key}" if key else file


def flattened(values: Mapping[str, object], *, before: str = "") -> dict[str, object]:
    """Values of nested tables by dotted keys. Lists are values."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flattened(value, before=f"{before}{key}.")
        elif value is not None:
            found[f"{before}{key}"] = value
    return found


def found_in(values: Mapping[str, object], file: str, *, before: str = "") -> dict[str, Found]:
    """The values of a table with their places; `before` stands before each key. Null means that the key is absent."""
    return {
        str(key): Found(value=value, place=place_of(file, f"{before}{key}"))
        for key, value in values.items()
        if value is not None
    }


def asks_for_nothing(value: object, off: tuple[object, ...] = OFF) -> bool:
    """Whether a value is one of `off`, or empty. True and 1 differ, and so do False and 0 unless both are in `off`."""
    if value in ([], {}, ()):
        return True
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in off)


def convert_options(rules: Iterable[Rule], found: Mapping[str, Found], result: Imported) -> None:
    """Convert the keys that correspond to one option each, in the order of the rules. Options that are set are kept."""
    for rule in rules:
        if rule.kind == "option" and rule.options[0] not in result.lines:
            attempt(result, _convert, rule, found.get(rule.key), result)


def list_rest(result: Imported) -> None:
    """List every key of the tables that asks for something, and that the result does not name."""
    listed = "\n".join(left.place for left in result.left)
    said = "\n".join(
        [listed, *result.settled, *(line.source for each in (result.lines, *result.datasets) for line in each.values())]
    )
    for rules, found in result.tables:
        exact = {rule.key: rule for rule in rules}
        beginnings = [rule for rule in rules if rule.key.endswith("*")]
        for key, given in found.items():
            rule = exact.get(key) or next((each for each in beginnings if key.startswith(each.key[:-1])), _UNKNOWN)
            never = rule.kind in ("unsupported", "secret")
            nothing = rule.kind == "no effect" or asks_for_nothing(given.value, rule.off)
            nothing = nothing or given.place.startswith(tuple(result.left_out))
            if nothing or re.search(rf"(?<![\w/.-]){re.escape(given.place)}(?![\w.\[-])", listed if never else said):
                continue
            why = rule.note if never else f"{_UNUSED}; {rule.note}".rstrip("; ")
            why = why if rule is not _UNKNOWN else f"this key of {result.trainer} is not known here"
            fix = rule.fix.format(trainer=result.trainer) if rule is _UNKNOWN else rule.fix
            result.leave(given.place, why, fix=fix, value=None if rule.kind == "secret" else given.value)
            said, listed = f"{said}\n{given.place}", f"{listed}\n{given.place}"


_UNUSED = "with the other keys of the files there is no use for it here"
_UNKNOWN = Rule(key="", kind="unsupported", fix="look it up in the documentation of {trainer}")


def _convert(rule: Rule, given: Found | None, result: Imported) -> None:
    name = rule.options[0]
    if given is None:
        if rule.default is not UNSET:
            value = rule.convert(rule.default) if rule.convert is not None else rule.default
            result.add(name, value, source_text(f"default of {result.trainer}", rule.key, rule.default, value, rule.note))
        return
    value = given.read(rule.convert) if rule.convert is not None else given.value
    if value is not None:
        result.add(name, value, source_text("", given.place, given.value, value, rule.note))
    else:
        result.settled.append(given.place)


def source_text(origin: str, key: str, before: object, after: object, note: str = "") -> str:
    """The comment of a line: the key, its value if that was converted or is a default, and the note."""
    text = f"{origin}: {key}" if origin else key
    if origin or shown(before) != shown(after):
        text += f" = {shown(before)}"
    return f"{text}; {note}" if note else text


def shown(value: object) -> str:
    """A value in a comment: short, and on one line."""
    text = one_line(str(value).lower() if isinstance(value, bool) else str(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(text: str) -> str:
    """A text for a comment: on one line, without control characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
