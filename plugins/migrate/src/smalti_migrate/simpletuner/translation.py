"""Values in SimpleTuner's spelling -> values of options here, with notices about what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from smalti import Problem, Translation
from smalti.config import Option, Schema
from smalti_migrate.simpletuner.rules import Rule, is_empty, is_neutral, is_on
from smalti_migrate.simpletuner.table import rule_of

_ONCE_HERE = ("dataloader_prefetch", "dataloader_prefetch_qlen", "eval_timesteps")
"""Names in the table that were options here too, so that files of earlier versions have them."""


@dataclass(frozen=True, kw_only=True)
class ReferenceOptions(Translation):
    """What values in SimpleTuner's spelling mean here.

    Attributes:
        values: (key, value) by the name of an option, for what has another name or another spelling here. The value None means
            that the option has no value, whatever weaker sources say.
        notices: (keys, text), such as ("vae_batch_size, max_workers", "no effect: ...").
        problems: the values that are refused. `where` is the key.
        rest: the values that mean the same in both, and those that the table does not know, as they were given.
        markers: the keys that SimpleTuner has and smalti has not.
    """

    markers: tuple[str, ...] = ()


def translate_reference_options(given: Mapping[str, object], schema: Schema) -> ReferenceOptions:
    """What options in SimpleTuner's spelling mean here.

    Args:
        given: all values of one file, or of one command line. Keys may begin with "--". Numbers may be texts.
        schema: the options here. An option that has the name of a row of the table is that option.
    """
    translator = _Translator(schema=schema, given={_name(key): value for key, value in given.items()})
    for key, value in given.items():
        translator.read(key, value)
    ignored = [(", ".join(keys), f"no effect: {why}") for why, keys in translator.ignored.items()]
    return ReferenceOptions(
        values=translator.values,
        notices=(*ignored, *translator.notices),
        problems=translator.problems,
        rest=translator.rest,
        markers=tuple(translator.markers),
    )


def _name(key: str) -> str:
    return key.strip().lstrip("-").lower().replace("-", "_")


@dataclass(kw_only=True)
class _Translator:
    """Reads one value after the other."""

    schema: Schema
    given: Mapping[str, object]
    values: dict[str, tuple[str, object]] = field(default_factory=dict)
    ignored: dict[str, list[str]] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    rest: dict[str, object] = field(default_factory=dict)
    markers: list[str] = field(default_factory=list)

    def read(self, key: str, value: object) -> None:
        rule, option = rule_of(_name(key)), self.schema.find(key)
        if rule is None or (option is None) == (rule.outcome == "same"):
            self.rest[key] = value
        elif option is not None:
            self._same(key, value, rule, option)
        else:
            if _name(key) not in _ONCE_HERE:
                self.markers.append(key)
            if not is_neutral(value, rule):
                self._of_another_name(key, value, rule)

    def _same(self, key: str, value: object, rule: Rule, option: Option) -> None:
        """A value of an option that exists here too."""
        if rule.convert is not None and not is_empty(value):
            self._convert(key, value, rule, option.name)
            return
        word = str(value).strip().lower()
        if is_empty(value) or word not in rule.values:
            self.rest[key] = value
            return
        found, remark = rule.values[word]
        self.values[option.name] = (key, found)
        if found is not None:
            self.notices.append((key, f"{_shown(value)} is {_shown(found)} here" + (f": {remark}" if remark else "")))

    def _of_another_name(self, key: str, value: object, rule: Rule) -> None:
        if rule.outcome == "ignored":
            self.ignored.setdefault(rule.why, []).append(key)
        elif rule.outcome == "refused":
            self.problems.append(Problem(message=f"{key} = {_shown(value)}: {rule.why}", where=key, fix=rule.fix))
        elif rule.convert is not None:
            self._convert(key, value, rule, rule.option)
        else:
            self.values[rule.option] = (key, value)
            self._rename(key, {rule.option: value}, rule)

    def _convert(self, key: str, value: object, rule: Rule, name: str) -> None:
        assert rule.convert is not None
        try:
            found = rule.convert(value, self.given)
        except ValueError as error:
            fix = rule.fix or f"remove it, or set {name}"
            self.problems.append(Problem(message=f"{key} = {_shown(value)}: {error}", where=key, fix=fix))
            if rule.outcome == "same":  # else the value would be refused once more, as one of this option
                self.values[name] = (key, self.schema.options[name].default)
            return
        if found == {name: value} and rule.outcome == "same":
            self.rest[key] = value
            return
        if found:
            self.values |= {option: (key, each) for option, each in found.items()}
            self._rename(key, found, rule)
        elif rule.outcome == "same":
            self.values.setdefault(name, (key, None))
            if is_on(value):
                self.notices.append((key, f"no effect: {rule.why}"))

    def _rename(self, key: str, found: Mapping[str, object], rule: Rule) -> None:
        text = ", ".join(f"{option} = {_shown(each)}" for option, each in found.items())
        self.notices.append((key, f"{text} here" + (f": {rule.why}" if rule.why else "")))


def _shown(value: object) -> str:
    """As JSON files have it."""
    return json.dumps(value, default=str, ensure_ascii=False)
