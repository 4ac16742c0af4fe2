"""The prompts of validation images: those of the options, then those of the prompt library."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from smalti import ConfigError, Problem
from smalti.config import read_mapping
from smalti_validation.options import STRONGEST, ValidationOptions, sizes_in

if TYPE_CHECKING:
    from smalti import Config

_KEYS = ("prompt", "negative_prompt", "resolution", "seed", "adapter_strength")
_LONGEST = 60
"""Characters of a prompt or name in the name of a file."""


@dataclass(frozen=True, kw_only=True)
class ValidationPrompt:
    """One prompt with all that its images depend on, apart from what all images of the run share.

    `stem` begins the names of its files. `shown` is the prompt for files, events and messages: with {env:NAME} where that was
    written. `sizes` are (width, height) in pixels; empty for the sizes of the run. `where` names the entry in messages.
    """

    stem: str
    prompt: str
    shown: str
    negative_prompt: str | None
    seed: int
    adapter_strength: float
    sizes: tuple[tuple[int, int], ...] = ()
    where: str = "validation_resolution"


def validation_prompts(config: Config) -> tuple[ValidationPrompt, ...]:
    """The prompts of a run, in the order of its options and of its library. Reads the library.

    The prompts of `validation_prompt` have the seeds `validation_seed`, `validation_seed` + 1 and so on. A prompt of the
    library has the seed of its entry, else `validation_seed`: so other entries can come and go without changing its images.
    Raises ConfigError with every problem of the library.
    """
    options = config[ValidationOptions]
    shown = config.shown("validation_prompt")
    if not isinstance(shown, tuple) or len(shown) != len(options.validation_prompt):
        shown = [f"prompt {number}" for number in range(len(options.validation_prompt))]  # a variable holds them all
    given = tuple(
        ValidationPrompt(
            stem=f"{number:02d}-{_ascii_words(str(text)) or 'image'}",
            prompt=prompt,
            shown=str(text),
            negative_prompt=options.validation_negative_prompt,
            seed=options.validation_seed + number,
            adapter_strength=options.validation_adapter_strength,
        )
        for number, (prompt, text) in enumerate(zip(options.validation_prompt, shown, strict=True))
    )
    library = options.validation_prompt_library
    return given if library is None else (*given, *_library(library, options))


def _library(path: Path, options: ValidationOptions) -> Iterator[ValidationPrompt]:
    content = read_mapping(path)
    problems = [problem for name, value in content.items() for problem in _problems(path, name, value)]
    if not content:
        problems = [Problem(message=f"{path} has no prompts", where="validation_prompt_library", fix='write name = "a prompt"')]
    if problems:
        raise ConfigError(problems)
    for name, value in content.items():
        entry = value if isinstance(value, Mapping) else {"prompt": value}
        yield ValidationPrompt(
            stem=_words(name),
            prompt=str(entry["prompt"]),
            shown=str(entry["prompt"]),
            negative_prompt=str(entry["negative_prompt"]) if "negative_prompt" in entry else options.validation_negative_prompt,
            seed=int(str(entry.get("seed", options.validation_seed))),
            adapter_strength=float(str(entry.get("adapter_strength", options.validation_adapter_strength))),
            sizes=sizes_in(str(entry["resolution"])) if "resolution" in entry else (),
            where=f"{path}: {name}",
        )


def _problems(path: Path, name: str, value: object) -> Iterator[Problem]:
    """What is wrong with an entry of a library."""
    where = f"{path}: {name}"
    if not _words(name):
        yield Problem(message=f"{name!r} cannot name an image", where=where, fix="use letters, digits, - and _")
    if isinstance(value, str):
        return
    if not isinstance(value, Mapping):
        yield Problem(
            message=f"an entry cannot be {value!r}", where=where, fix=f"give a text, or a table with {', '.join(_KEYS)}"
        )
        return
    if "prompt" not in value:
        yield Problem(message="the entry has no prompt", where=where, fix='prompt = "..."')
    for key, each in value.items():
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            fix = f"did you mean {near[0]}?" if near else f"known: {', '.join(_KEYS)}"
            yield Problem(message=f"unknown key {key!r}", where=where, fix=fix)
        elif reason := _reason(str(key), each):
            yield Problem(message=f"{key} cannot be {each!r}", where=where, fix=reason)


def _reason(key: str, value: object) -> str:
    """What to give instead of a value; empty if it is valid."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "seed":
            return "" if isinstance(value, int) and number and 0 <= value < 2**63 else "give an integer from 0"
        case "adapter_strength":
            finite = number and math.isfinite(float(str(value))) and abs(float(str(value))) <= STRONGEST
            return "" if finite else f"give a number from -{STRONGEST:g} to {STRONGEST:g}"
        case "resolution":
            try:
                sizes_in(str(value))
            except ValueError as error:
                return str(error)
            return ""
        case _:
            return "" if isinstance(value, str) else "give a text"


def _words(name: str) -> str:
    """A name of the library as the name of a file: letters and digits of any alphabet, - and _."""
    return re.sub(r"[^\w]+", "-", name).strip("-")[:_LONGEST]


def _ascii_words(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:_LONGEST]
