"""What importers share: an entry for a dataset, an adapter or none, and an optimizer that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from smalti.migration.rules import Entry, Found, Imported, Line, Rule

DDPM_FAMILIES = ("sdxl", "pixart")
"""Families that predict noise. All others are flow models, which have no min-SNR weighting."""


def new_entry(folder: str, place: str, result: Imported) -> Entry:
    """A dataset with an id of its own, made from the name of its folder."""
    named = re.split(r"[\\/]", folder.rstrip("\\/"))[-1]
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", named).strip("-._") or "dataset"
    taken = {entry["id"].value for entry in result.datasets}
    names = (base, *(f"{base}-{count}" for count in range(2, len(taken) + 3)))
    free = next(name for name in names if name not in taken)
    return {"id": Line(value=free, source="name of the folder"), "instance_data_dir": Line(value=folder, source=place)}


def one_for_all(key: str, result: Imported) -> None:
    """Make a key that all datasets have with the same value the option of that name."""
    lines = [entry.get(key) for entry in result.datasets]
    if lines and lines[0] is not None and len({None if line is None else line.value for line in lines}) == 1:
        result.lines.setdefault(key, lines[0])
        for entry in result.datasets:
            del entry[key]


def without_adapter(rules: Iterable[Rule], found: Mapping[str, Found]) -> tuple[list[Rule], dict[str, Found]]:
    """The rules and values without options of LoRA, which full fine-tuning refuses or ignores."""
    hidden = {rule.key for rule in rules if rule.options and rule.options[0].startswith("lora_")}
    return (
        [rule for rule in rules if rule.key not in hidden],
        {key: value for key, value in found.items() if key not in hidden},
    )


def leave_optimizer(given: Found, result: Imported) -> None:
    """List an optimizer that smalti does not have, and leave its learning rate out: another optimizer needs another one."""
    rate = result.lines.pop("learning_rate", None)
    shown = f" and its learning rate, {rate.value}," if rate is not None else ""
    why = f"smalti has no such optimizer; it{shown} were left out" if shown else "smalti has no such optimizer"
    fix = 'optimizer = "adamw" with a learning rate of its own, such as 1e-4'
    result.leave(given.place, why, fix=fix, value=given.value)


def flattened(values: Mapping[str, object], *, before: str = "") -> dict[str, object]:
    """Values of nested tables by dotted keys. Lists are values."""
    found: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flattened(value, before=f"{before}{key}.")
        elif value is not None:
            found[f"{before}{key}"] = value
    return found


def literal(text: str) -> str:
    """A regular expression of this text, with few backslashes."""
    return re.escape(text).replace("\\.", "[.]")


def add_negative_prompt(given: Iterable[object], place: str, result: Imported) -> None:
    """Set the negative prompt of validation images, which is one for all of them."""
    texts = list(dict.fromkeys(str(text).strip() for text in given if text and str(text).strip()))
    if texts:
        result.add("validation_negative_prompt", texts[0], place)
    if len(texts) > 1:
        fix = "a file for validation_prompt_library has a negative prompt for each"
        result.leave(place, "validation_negative_prompt is one for all prompts; the first is used", fix=fix, value=texts)
