"""What can become of an option of SimpleTuner: another name, no effect, or a refusal; and values that need another spelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["ignored", "refused", "renamed", "same"]
Convert = Callable[[object, Mapping[str, object]], Mapping[str, object]]
"""Takes the value and all values of the file; returns values by the names of options. Raises ValueError with the reason."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What becomes of one option.

    Attributes:
        outcome: "same" is for options that have this name here too, of which only some values need another spelling.
        why: the reason, or the difference in meaning; it completes "KEY has no effect: ...".
        fix: what to do about a refused value.
        neutral: values that change nothing, so they are accepted without a notice. null and an empty text always are.
        option: the name here.
        values: values that have another spelling here, in lower case, with a remark for the notice or an empty text.
        convert: computes the options here, where more than the name differs.
    """

    outcome: Outcome
    why: str = ""
    fix: str = ""
    neutral: tuple[object, ...] = ()
    option: str = ""
    values: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    convert: Convert | None = None


def ignored(why: str, *neutral: object) -> Rule:
    """An option without effect here. Other values than the neutral ones get a notice."""
    return Rule(outcome="ignored", why=why, neutral=neutral)


def refused(why: str, fix: str, *neutral: object) -> Rule:
    """An option whose values are errors, except the neutral ones: without it, something else would be trained."""
    return Rule(outcome="refused", why=why, fix=fix, neutral=neutral)


def renamed(option: str, why: str = "", *, neutral: tuple[object, ...] = (), convert: Convert | None = None) -> Rule:
    """An option that has another name here."""
    return Rule(outcome="renamed", why=why, option=option, neutral=neutral, convert=convert)


def same(
    values: Mapping[str, tuple[object, str]] | None = None, *, convert: Convert | None = None, why: str = "", fix: str = ""
) -> Rule:
    """An option that has this name here too, where some values differ. `fix` is for values that `convert` refuses."""
    return Rule(outcome="same", values=values or {}, convert=convert, why=why, fix=fix)


_SWITCH = {word: index < 3 for index, word in enumerate(("true", "yes", "on", "false", "no", "off"))}


def plain(value: object) -> object:
    """A value for comparisons: texts in lower case without spaces, numbers and switches that are texts as what they are."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return float(value)
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in _SWITCH:
        return _SWITCH[word]
    try:
        return float(word)
    except ValueError:
        return word


def is_empty(value: object) -> bool:
    """Whether a value means "not given" in SimpleTuner's files."""
    return value is None or value == "" or value == [] or value == {}


def is_neutral(value: object, rule: Rule) -> bool:
    """Whether a value changes nothing, in either trainer."""
    found = plain(value)
    return is_empty(value) or any(type(found) is type(each) and found == each for each in map(plain, rule.neutral))


def is_on(value: object) -> bool:
    """Whether a switch is on."""
    return plain(value) not in (False, 0.0, "none", "", None)
