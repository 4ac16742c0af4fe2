"""Concepts and samples of OneTrainer."""

from __future__ import annotations

from pathlib import Path

from smalti_migrate.converters import number, path, switch, text, whole
from smalti_migrate.entries import Setting, add_prompts, add_shuffle, for_all, new_entry
from smalti_migrate.onetrainer.tables import CONCEPTS, SAMPLES
from smalti_migrate.rules import Entry, Found, Imported, Line, UnconvertibleError, Values, attempt, place_of, source_text


def datasets_of(rows: object, file: str, options: Values, result: Imported) -> None:
    """A dataset for each concept; several sizes are a list."""
    for within, values in result.rows(CONCEPTS, rows, file):
        attempt(result, _concept, place_of(file, within), values, options, result)


def without_concepts(options: Values, result: Imported) -> None:
    """What the options say of all datasets, and how often an epoch visits them."""
    entry: Entry = {}
    size, epochs = options.first("resolution", default=512), options.first("epochs", default=100)
    _shape(size, options, entry, result)
    for_all(entry, result) if not result.datasets else result.settled.extend(line.source for line in entry.values())
    sizes = size.read(_sizes)
    count = max(1, round(epochs.read(whole) / len(sizes)))
    note = f"divided by the {len(sizes)} sizes, because each is an epoch's part of its own here" if len(sizes) > 1 else ""
    result.add("num_train_epochs", count, source_text("", epochs.place, epochs.value, count, note))


def _concept(within: str, given: Values, options: Values, result: Imported) -> None:
    folder = given.get("path")
    if folder is None or not str(folder.value):
        result.leave_table(within, folder or Found(value=None, place=within.rstrip(".")), "this concept has no path", value="")
        return
    if not given.first("enabled", default=True).read(switch):
        result.leave_table(within, given["enabled"], "this concept is off, and left out", value=folder.value)
        return
    result.settled.append(given.first("enabled").place)
    override = given.on("image.enable_resolution_override") and "image.resolution_override" in given
    size = given["image.resolution_override"] if override else options.first("resolution", default=512)
    entry = new_entry(folder.read(path), folder.place, result)
    if not _captions(within, given, entry, result):
        return
    _variants(given, entry, result)
    _shape(size, options, entry, result)
    _visits(given, entry, result)
    if override:
        result.settled.append(given["image.enable_resolution_override"].place)
    kind = given.first("type", default="STANDARD")
    if given.on("validation_concept") or kind.value == "VALIDATION":
        entry["dataset_type"] = Line(value="eval", source=given.first("validation_concept", "type").place)
    if options.on("masked_training"):
        entry["mask_suffix"] = Line(value="-masklabel.png", source=options["masked_training"].place)
    if kind.value == "PRIOR_PREDICTION":
        entry["is_regularisation_data"] = Line(value=True, source=kind.place)
    if (weight := given.get("loss_weight")) is not None and weight.read(number) != 1:
        entry["loss_weight"] = Line(value=weight.read(number), source=weight.place)
    result.settled += [kind.place] if kind.value in ("STANDARD", "VALIDATION") else []
    result.datasets.append(entry)


def _shape(size: Found, options: Values, entry: Entry, result: Imported) -> None:
    """Resolution and buckets."""
    edges = size.read(_sizes)
    entry["resolution"] = Line(value=edges if len(edges) > 1 else edges[0], source=size.place)
    entry["resolution_type"] = Line(value="pixel_area", source="buckets have about the area of the resolution")
    buckets = options.first("aspect_ratio_bucketing", default=True)
    if not buckets.read(switch):
        entry["crop_aspect"] = Line(value="square", source=buckets.place)
    result.settled.append(buckets.place)


def _variants(given: Values, entry: Entry, result: Imported) -> None:
    """What a visit makes of a caption and of an image."""
    flip = given.first("image.enable_random_flip", default=False)
    if flip.read(switch):
        entry["flip_probability"] = Line(value=0.5, source=flip.place)
    mode, dropped = given.first("text.tag_dropout_mode", default="FULL"), given.on("text.tag_dropout_enable")
    if dropped and str(mode.value) != "RANDOM":
        fix = "caption_tag_dropout_rate drops each tag with the same probability"
        result.leave(mode.place, "only tags that are dropped one by one", fix=fix, value=mode.value)
    result.settled += [given["text.tag_dropout_enable"].place, mode.place] if dropped else []
    dropout = "text.tag_dropout_probability" if dropped and str(mode.value) == "RANDOM" else ""
    keep, separator = "text.keep_tags_count", "text.tag_delimiter"
    add_shuffle(given, entry, shuffle="text.enable_tag_shuffling", dropout=dropout, keep=keep, separator=separator)


def _sizes(value: object) -> list[int]:
    """The sizes of "512", "512,768" or "768x1024", each as the edge of a square of equal area."""
    pairs = [
        [whole(edge.strip()) for edge in part.split("x")] for part in str(value).lower().replace(";", ",").split(",") if part
    ]
    if not pairs:
        raise UnconvertibleError("it does not name a size")
    return list(dict.fromkeys(round((pair[0] * pair[-1]) ** 0.5) for pair in pairs))


def _captions(within: str, given: Values, entry: Entry, result: Imported) -> bool:
    """Where captions come from; False if the concept cannot be used."""
    source = given.first("text.prompt_source", default="sample")
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
                result.leave_table(within, source, why, fix=fix, value=file.value if file is not None else source.value)
                return False
            entry["caption_strategy"] = Line(value="instanceprompt", source=source.place)
            entry["instance_prompt"] = Line(value=lines[0].strip(), source=f"{file.place if file else ''}, {text}")
    return True


def _visits(given: Values, entry: Entry, result: Imported) -> None:
    """How often an epoch visits the images."""
    count = given.first("balancing", "repeats", default=1)
    strategy = given.first("balancing_strategy", default="REPEATS")
    visits, place = count.read(number), f"{count.place}, {strategy.place}"
    if str(strategy.value) == "SAMPLES":
        note = "the same images in every epoch here"
        entry["max_num_samples"] = Line(value=max(1, int(visits)), source=source_text("", place, count.value, None, note))
    elif visits >= 1:
        note = "repeats counts additional visits"
        if {"balancing", "repeats"} & given.keys():
            entry["repeats"] = Line(value=round(visits) - 1, source=source_text("", count.place, count.value, None, note))
        result.settled += [strategy.place] if strategy.value == "REPEATS" else []
        if visits != round(visits):
            result.leave(count.place, "visits are whole numbers here", value=count.value)
    else:
        result.leave(place, "a part of the images is max_num_samples here", fix="max_num_samples = N", value=visits)


def samples_of(rows: object, file: str, _options: Values, result: Imported) -> None:
    """The prompts that are on."""
    prompts = []
    for within, row in result.rows(SAMPLES, rows, file):
        if not row.first("enabled", default=True).read(switch):
            result.leave_table(place_of(file, within), row["enabled"], "this sample is off, and left out")
        elif not row.first("prompt", default="").value:
            result.leave(place_of(file, within.rstrip(".")), "it has no prompt")
        else:
            prompts.append(row)
            result.settled.append(row.first("enabled").place)
    if prompts:
        add_prompts(prompts, _SETTINGS, result)


_SETTINGS: tuple[Setting, ...] = (
    ("seed", "validation_seed", whole, None),
    ("diffusion_steps", "validation_num_inference_steps", whole, None),
    ("cfg_scale", "validation_guidance", number, None),
    ("negative_prompt", "validation_negative_prompt", text, None),
)
