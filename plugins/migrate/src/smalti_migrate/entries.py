"""What importers share: an entry for a dataset, an adapter or none, and an optimizer that is not there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from smalti_migrate.converters import number, whole
from smalti_migrate.rules import Convert, Entry, Found, Imported, Line, Rule, Values

ENCODERS = {"sd1x": 1, "sd2x": 1, "sdxl": 2}
"""How many text encoders an adapter can have, by family; none where a family is not named."""
LAYERS = {"sd1x": "192 of 278", "sd2x": "192 of 278", "sdxl": "722 of 788"}
"""Layers of a U-Net that are adapted without its convolutions."""
ONE_RANK = "all layers of an adapter have one rank and one alpha here"
NO_CONVOLUTIONS = f"{ONE_RANK}: convolutions are not adapted, but {{}} layers"
DDPM_FAMILIES = (*ENCODERS, "pixart")
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
        result.lines[key] = lines[0]
        result.settled += [entry.pop(key).source for entry in result.datasets]


_OF_ALL = ("resolution", "resolution_type", "crop_aspect", "crop_style", "minimum_image_size", "caption_dropout_probability")


def for_all(entry: Entry, result: Imported) -> None:
    """Without datasets: make what is known of them the options of these names, which datasets without such a key have."""
    result.lines |= {key: entry[key] for key in _OF_ALL if key in entry and key not in result.lines}


def fitting(rules: Iterable[Rule], kind: str, family: str) -> list[Rule]:
    """The rules without options that are ignored there and refused here: those of LoRA, and min-SNR for flow models."""
    wrong: tuple[str, ...] = () if kind == "lora" else ("lora_", "init_lora")
    wrong += ("snr_gamma",) if family and family not in DDPM_FAMILIES else ()
    return [rule for rule in rules if not (rule.options and rule.options[0].startswith(wrong))]


def add_shuffle(given: Values, entry: Entry, *, shuffle: str, dropout: str, keep: str, separator: str) -> None:
    """What a visit makes of the tags of a caption. The names are those of the keys."""
    rate = given[dropout].read(number) if dropout in given else 0
    if not (given.on(shuffle) or rate):
        return
    block: dict[str, object] = {} if given.on(shuffle) else {"enable": False}
    if keep in given and (kept := given[keep].read(whole)):
        block["position_start"] = kept
    if separator in given and (sign := str(given[separator].value).strip()) not in ("", ","):
        block["split_on"] = sign
    places = ", ".join(given[key].place for key in (shuffle, dropout, keep, separator) if key in given)
    note = "4 variants of each are encoded ahead; text_cache_disable has a new one at each visit, as there"
    entry["caption_shuffle"] = Line(value=block or True, source=f"{places}; {note}")
    if rate:
        entry["caption_tag_dropout_rate"] = Line(value=rate, source=given[dropout].place)


Setting = tuple[str, str, Convert, object]
"""A key of a prompt, the option that it becomes, and the default there; None if the option is not set then."""


def add_prompts(rows: Sequence[Values], settings: Iterable[Setting], result: Imported) -> None:
    """Set the prompts of validation images, and what is one for all of them: of different values the first."""

    def add(name: str, given: Sequence[Found], values: Sequence[object], only: object) -> None:
        result.add(name, only, ", ".join(each.place for each in given[:2]))
        result.settled += [each.place for each in given]
        if len(set(values)) > 1:
            why = f"{name} is one for all prompts here; the first is used"
            result.leave(given[0].place, why, value=list(dict.fromkeys(values)))

    prompts = [row["prompt"] for row in rows]
    add("validation_prompt", prompts, [], [str(each.value) for each in prompts])
    sides = [[row.first(key, default=512) for key in ("width", "height")] for row in rows]
    sizes = list(dict.fromkeys("x".join(str(each.read(whole)) for each in pair) for pair in sides))
    add("validation_resolution", [each for pair in sides for each in pair], [], ",".join(sizes))
    if len(sizes) > 1:
        result.leave(sides[0][0].place, "every prompt is sampled in every size here", value=sizes)
    for key, name, convert, default in settings:
        given = [row.first(key, default=default) for row in rows]
        if known := [each for each in given if each.value not in (None, False, "")]:
            values = [each.read(convert) for each in known]
            add(name, known, values, values[0])


def leave_optimizer(given: Found, result: Imported) -> None:
    """List an optimizer that smalti does not have, and leave its learning rate out: another optimizer needs another one."""
    rate = result.lines.pop("learning_rate", None)
    result.settled += [rate.source] if rate is not None else []
    shown = f" and its learning rate, {rate.value}," if rate is not None else ""
    why = f"smalti has no such optimizer; it{shown} were left out" if shown else "smalti has no such optimizer"
    fix = 'optimizer = "adamw" with a learning rate of its own, such as 1e-4'
    result.leave(given.place, why, fix=fix, value=given.value)


def literal(text: str) -> str:
    """A regular expression of this text, with few backslashes."""
    return re.escape(text).replace("\\.", "[.]")
