"""What a table says about one key of another trainer, and how the values of a file become lines of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
    smalti does, or does not concern training. `unsupported`: listed in the result, unless its value is one of `off`.
    `note` is the difference in meaning, or the reason.
    """

    key: str
    kind: Literal["option", "read", "no effect", "unsupported"]
    options: tuple[str, ...] = ()
    convert: Convert | None = None
    default: object = UNSET
    note: str = ""
    fix: str = ""
    off: tuple[object, ...] = OFF


def option(key: str, name: str, convert: Convert | None = None, note: str = "", *, default: object = UNSET) -> Rule:
    """A key that corresponds to one option."""
    return Rule(key=key, kind="option", options=(name,), convert=convert, note=note, default=default)


def read(key: str, *names: str, note: str = "") -> Rule:
    """A key that the module of the trainer converts. `names` are the options that it can become."""
    return Rule(key=key, kind="read", options=names, note=note)


def no_effect(why: str, *keys: str) -> tuple[Rule, ...]:
    """Keys that nothing has to be done for."""
    return tuple(Rule(key=key, kind="no effect", note=why) for key in keys)


def unsupported(why: str, *keys: str, fix: str = "", off: tuple[object, ...] = OFF) -> tuple[Rule, ...]:
    """Keys without a counterpart."""
    return tuple(Rule(key=key, kind="unsupported", note=why, fix=fix, off=off) for key in keys)


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
    """The result of an import: options, datasets, what is left, and notices about what means something else here."""

    trainer: str
    files: list[str] = field(default_factory=list)
    lines: dict[str, Line] = field(default_factory=dict)
    datasets: list[Entry] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    def add(self, name: str, value: object, source: str) -> None:
        """Set an option."""
        self.lines[name] = Line(value=value, source=source)

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
    return f"{file}: {key}"


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


def apply(rules: Iterable[Rule], found: Mapping[str, Found], result: Imported) -> None:
    """Convert each key that has a rule, in the order of the rules, and list what has no counterpart.

    Options that are set already are kept. A key without a rule is listed.
    """
    table = {rule.key: rule for rule in rules}
    for rule in table.values():
        given = found.get(rule.key)
        if rule.kind == "option":
            attempt(result, _convert, rule, given, result)
        elif rule.kind == "unsupported" and given is not None and not asks_for_nothing(given.value, rule.off):
            result.leave(given.place, rule.note, fix=rule.fix, value=given.value)
    for key, given in found.items():
        if key not in table and not asks_for_nothing(given.value):
            why = f"this key of {result.trainer} is not known here"
            result.leave(given.place, why, fix=f"look it up in the documentation of {result.trainer}", value=given.value)


def _convert(rule: Rule, given: Found | None, result: Imported) -> None:
    name = rule.options[0]
    if name in result.lines:
        return
    if given is None:
        if rule.default is not UNSET:
            value = rule.convert(rule.default) if rule.convert is not None else rule.default
            result.add(name, value, source_text(f"default of {result.trainer}", rule.key, rule.default, value, rule.note))
        return
    value = given.read(rule.convert) if rule.convert is not None else given.value
    if value is not None:
        result.add(name, value, source_text("", given.place, given.value, value, rule.note))


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
