"""Entries of a data file of SimpleTuner, as smalti spells them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from smalti import Problem, Translation
from smalti_migrate.simpletuner.dataset_keys import (
    REFUSED,
    SAME_BACKENDS,
    SAME_KEYS,
    UNSUPPORTED,
    WITHOUT_CROP,
    WITHOUT_EFFECT,
    belongs_to_another_source,
)
from smalti_migrate.simpletuner.rules import Rule, is_neutral, is_on, plain

_OWN = {"preserve_data_backend_cache", *WITHOUT_EFFECT, *REFUSED}
_TAR = ("tar", "webshart")


def translated_entry(
    entry: Mapping[str, object],
    entries: Iterable[Mapping[str, object]],
    known: Mapping[str, Collection[str]],
    option: Callable[[str], object],
) -> Translation:
    """What `entry`, one of the `entries` of a file, means here. See `Dialect.translate_dataset`.

    Of an entry that cannot be read there is one problem and nothing else: its other keys follow from that.
    """
    has_masks = str(entry.get("conditioning_type")).lower() == "mask"
    for key in ("type",) if has_masks else ("dataset_type", "type"):
        if problem := _unsupported(entry, key, known.get(key, ())):
            return Translation(problems=[problem])
    notices, problems = list[tuple[str, str]](), list[Problem]()
    rest: dict[str, object] = {}
    backend = _backend(entry)
    for given, value in entry.items():
        key = SAME_KEYS.get(given, given)
        if key in known[""] or key in (backend, str(entry.get("type")).lower()):
            rest[key] = value
        elif (rule := WITHOUT_EFFECT.get(key) or REFUSED.get(key)) is not None:
            if _changes_nothing(value, rule):
                continue
            if rule.outcome == "ignored":
                notices.append((key, f"has no effect: {rule.why}"))
            else:
                problems.append(Problem(message=f"{key} is not supported for a dataset: {rule.why}", fix=rule.fix))
        elif belongs_to_another_source(key):
            notices.append((key, "has no effect: it belongs to another storage or metadata backend"))
        else:
            rest[key] = value
    if problem := _unsupported(entry, "crop_style"):
        problems.append(problem)
        del rest["crop_style"]
    if "metadata_backend" in entry:
        rest["metadata_backend"] = backend
    if str(entry.get("caption_strategy")).lower() in _TAR:
        rest["caption_strategy"] = "webdataset"
    if _is_of_simpletuner(entries):
        notices += _with_its_meaning(rest, option)
    return Translation(rest=rest, notices=notices, problems=problems)


def _is_of_simpletuner(entries: Iterable[Mapping[str, object]]) -> bool:
    """Whether a file is spelled for SimpleTuner: with a text_embeds entry, which it requires, or keys that only it has."""
    return any(entry.get("dataset_type") == "text_embeds" or _OWN & entry.keys() for entry in entries)


def _with_its_meaning(rest: dict[str, object], option: Callable[[str], object]) -> list[tuple[str, str]]:
    """Replaces values that mean something else here; returns the notices."""
    notices = []
    table = "json" in rest or str(rest.get("caption_strategy")).lower() == "json"
    if rest.get("metadata_backend") == "json" and not table:
        rest["metadata_backend"] = "discovery"
        text = "is read as 'discovery', which it is in SimpleTuner; for a table of captions, add"
        notices.append(("metadata_backend 'json'", f'{text} "json": {{"path": "metadata.jsonl"}}'))
    if "conditioning_data" in rest:
        notices.append(("conditioning_data", "has masks, which SimpleTuner weights as --mask_floor=0 --no_mask_normalise do"))
    if "crop" in rest and not is_on(rest["crop"]):
        rest |= {"crop_style": rest.get("crop_style") or option("crop_style") or "center", **WITHOUT_CROP}
        notices.append(("crop: false", "is read as crop_aspect: preserve, since SimpleTuner does not stretch images"))
    return notices


def _backend(entry: Mapping[str, object]) -> str:
    name = str(entry.get("metadata_backend", "discovery")).lower()
    return SAME_BACKENDS.get(name, name)


def _changes_nothing(value: object, rule: Rule) -> bool:
    """Whether a value asks for what happens here anyway, as does a table that is switched off."""
    if isinstance(value, Mapping):
        return not value or any(plain(value.get(switch, True)) is False for switch in ("enable", "enabled"))
    return is_neutral(value, rule)


def _unsupported(entry: Mapping[str, object], key: str, known: Collection[str] = ()) -> Problem | None:
    value = str(entry.get(key, "")).lower()
    if value in known or value not in UNSUPPORTED[key]:
        return None
    return Problem(message=f"{key} {value!r} is not supported yet", fix=UNSUPPORTED[key][value])
