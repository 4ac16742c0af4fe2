"""Concepts and samples of OneTrainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from smalti.migration.converters import number, path, switch, whole
from smalti.migration.entries import add_negative_prompt, flattened, new_entry
from smalti.migration.onetrainer.tables import CONCEPT_DETAILS, CONCEPTS, NAME
from smalti.migration.rules import Entry, Found, Imported, Line, apply, attempt, found_in, source_text

Values = Mapping[str, Found]
DEFAULT = f"default of {NAME}"


def datasets_of(rows: Sequence[object], file: str, options: Values, result: Imported) -> None:
    """A dataset for each concept; several sizes are a list."""
    for index, row in enumerate(row for row in rows if isinstance(row, Mapping)):
        values = found_in(flattened(row), file, before=f"[{index}].")
        attempt(result, _concept, values, options, result)
    sizes = _sizes(options.get("resolution"))
    epochs = options.get("epochs") or Found(value=100, place=f"{DEFAULT}: epochs")
    if len(sizes) > 1:
        count = max(1, round(epochs.read(whole) / len(sizes)))
        note = f"divided by the {len(sizes)} sizes, because each is an epoch's part of its own here"
        result.add("num_train_epochs", count, source_text("", epochs.place, epochs.value, count, note))


def _concept(given: dict[str, Found], options: Values, result: Imported) -> None:
    folder = given.get("path")
    if folder is None or not str(folder.value):
        return
    if "enabled" in given and not given["enabled"].read(switch):
        result.leave(given["enabled"].place, "this concept is off, and left out", value=folder.value)
        return
    override = "image.enable_resolution_override" in given and given["image.enable_resolution_override"].read(switch)
    size = given.get("image.resolution_override") if override else options.get("resolution")
    edges, entry = _sizes(size), new_entry(folder.read(path), folder.place, result)
    if not _captions(given, entry, result):
        return
    _variants(given, entry, result)
    value = edges if len(edges) > 1 else edges[0]
    entry["resolution"] = Line(value=value, source=size.place if size is not None else f"{DEFAULT}: resolution")
    entry["resolution_type"] = Line(value="pixel_area", source="buckets have about the area of the resolution")
    buckets = options.get("aspect_ratio_bucketing")
    if buckets is not None and not buckets.read(switch):
        entry["crop_aspect"] = Line(value="square", source=buckets.place)
    _visits(given, entry, result)
    if "validation_concept" in given and given["validation_concept"].read(switch):
        entry["dataset_type"] = Line(value="eval", source=given["validation_concept"].place)
    result.datasets.append(entry)
    apply(CONCEPTS, {key: each for key, each in given.items() if not key.startswith(CONCEPT_DETAILS)}, result)


def _variants(given: Values, entry: Entry, result: Imported) -> None:
    """What a visit makes of a caption and of an image."""
    flip = given.get("image.enable_random_flip")
    if flip is None or flip.read(switch):
        where = flip.place if flip is not None else f"{DEFAULT}: image.enable_random_flip"
        entry["flip_probability"] = Line(value=0.5, source=where)
    shuffled, dropped = (
        key in given and given[key].read(switch) for key in ("text.enable_tag_shuffling", "text.tag_dropout_enable")
    )
    mode = given.get("text.tag_dropout_mode")
    if dropped and (mode is None or str(mode.value) != "RANDOM"):
        place = mode.place if mode is not None else f"{DEFAULT}: text.tag_dropout_mode"
        fix = "caption_tag_dropout_rate drops each tag with the same probability"
        result.leave(place, "only tags that are dropped one by one", fix=fix, value=mode.value if mode is not None else "FULL")
        dropped = False
    if shuffled or dropped:
        block: dict[str, object] = {} if shuffled else {"enable": False}
        if "text.keep_tags_count" in given and (kept := given["text.keep_tags_count"].read(whole)):
            block["position_start"] = kept
        if "text.tag_delimiter" in given and (separator := str(given["text.tag_delimiter"].value).strip()) not in ("", ","):
            block["split_on"] = separator
        source = given["text.enable_tag_shuffling" if shuffled else "text.tag_dropout_enable"].place
        entry["caption_shuffle"] = Line(value=block or True, source=source)
    if dropped and (rate := given.get("text.tag_dropout_probability")) is not None:
        entry["caption_tag_dropout_rate"] = Line(value=rate.read(number), source=rate.place)


def _sizes(given: Found | None) -> list[int]:
    """The sizes of "512", "512,768" or "768x1024", each as the edge of a square of equal area."""
    if given is None:
        return [512]
    sizes = []
    for part in str(given.value).replace(";", ",").split(","):
        edges = [int(edge) for edge in part.strip().lower().split("x") if edge.strip().isdigit()]
        if edges:
            sizes.append(round((edges[0] * edges[-1]) ** 0.5))
    return list(dict.fromkeys(sizes)) or [512]


def _captions(given: Values, entry: Entry, result: Imported) -> bool:
    """Where captions come from; False if the concept cannot be used."""
    source = given.get("text.prompt_source") or Found(value="sample", place=f"{DEFAULT}: text.prompt_source")
    match str(source.value):
        case "sample":
            entry["caption_strategy"] = Line(value="textfile", source=source.place)
        case "filename":
            entry["caption_strategy"] = Line(value="filename", source=source.place)
        case _:
            file = given.get("text.prompt_path")
            text = Path(str(file.value)).expanduser() if file is not None else Path()
            lines = [line for line in text.read_text("utf-8", "replace").splitlines() if line.strip()] if text.is_file() else []
            if len(lines) != 1:
                why = "one prompt for all images needs a file with one line; this concept is left out"
                fix = 'caption_strategy = "instanceprompt" and instance_prompt in a [[datasets]] table'
                result.leave(source.place, why, fix=fix, value=file.value if file is not None else source.value)
                return False
            entry["caption_strategy"] = Line(value="instanceprompt", source=source.place)
            entry["instance_prompt"] = Line(value=lines[0].strip(), source=str(text))
    return True


def _visits(given: Values, entry: Entry, result: Imported) -> None:
    """How often an epoch visits the images."""
    count = given.get("balancing") or given.get("repeats")
    if count is None:
        return
    strategy = given.get("balancing_strategy")
    visits = count.read(number)
    if strategy is not None and str(strategy.value) == "SAMPLES":
        note = "the same images in every epoch here"
        entry["max_num_samples"] = Line(value=max(1, int(visits)), source=source_text("", count.place, count.value, None, note))
    elif visits >= 1:
        note = "repeats counts additional visits"
        entry["repeats"] = Line(value=round(visits) - 1, source=source_text("", count.place, count.value, None, note))
        if visits != round(visits):
            result.leave(count.place, "visits are whole numbers here", value=count.value)
    else:
        result.leave(count.place, "a part of the images is max_num_samples here", fix="max_num_samples = N", value=visits)


def samples_of(rows: Sequence[object], file: str, options: Values, result: Imported) -> None:
    """Prompts, and the settings of the first one."""
    given = [row for row in rows if isinstance(row, Mapping) and row.get("enabled", True) and row.get("prompt")]
    if not given:
        return
    first = given[0]
    result.add("validation_prompt", [str(row["prompt"]) for row in given], file)
    sizes = dict.fromkeys(f"{row.get('width', 512)}x{row.get('height', 512)}" for row in given)
    result.add("validation_resolution", ",".join(sizes), file)
    if len(sizes) > 1:
        result.leave(file, "every prompt is sampled in every size here", value=list(sizes))
    for key, name in (
        ("seed", "validation_seed"),
        ("diffusion_steps", "validation_num_inference_steps"),
        ("cfg_scale", "validation_guidance"),
    ):
        if key in first:
            value = Found(value=first[key], place=f"{file}: {key}")
            result.add(name, value.read(number), value.place)
        if key != "seed" and len({row.get(key) for row in given}) > 1:
            result.leave(f"{file}: {key}", f"{name} is one for all prompts here; the first is used")
    add_negative_prompt([row.get("negative_prompt") for row in given], file, result)
