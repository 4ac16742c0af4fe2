"""Datasets and prompts of kohya's sd-scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smalti_migrate.converters import number, path, text, whole
from smalti_migrate.entries import Setting, add_prompts, add_shuffle, for_all, new_entry, one_for_all
from smalti_migrate.files import Opened
from smalti_migrate.kohya.tables import DATASETS, NAME, PROMPTS
from smalti_migrate.rules import (
    Entry,
    Found,
    Imported,
    Line,
    UnconvertibleError,
    Values,
    attempt,
    no_effect,
    place_of,
    read,
    source_text,
    unsupported,
)

_REPEATED = re.compile(r"^(\d+)_(.*)$")


def datasets_of(files: Sequence[Opened], options: Values, result: Imported) -> None:
    """The datasets of dataset files: one for each subset. `options` are those of the command line."""
    subsets = [subset for file in files for subset in _subsets(file, options, result)]
    for within, given in subsets:
        attempt(result, _dataset, within, given, result)
    attempt(result, _common, [given for _, given in subsets], result)


def _subsets(file: Opened, options: Values, result: Imported) -> Iterator[tuple[str, Values]]:
    """The values of each subset, with its place: its own, those of its dataset, of [general], and of the command line."""
    content = file.content if isinstance(file.content, Mapping) else {}
    outer = Values({key: value for key, value in options.items() if key in _SHARED}, NAME)
    if "train_batch_size" in options:
        outer["batch_size"] = options["train_batch_size"]
    result.table(_PARTS, {key: value for key, value in content.items() if key != "general"}, file.name)
    outer = result.table(DATASETS, content.get("general"), file.name, within="general.").over(outer)
    for within, dataset in result.rows((*DATASETS, *_PARTS), content.get("datasets"), file.name, within="datasets"):
        rows = dataset.pop("subsets", None)
        for place, subset in result.rows(DATASETS, rows and rows.value, file.name, within=f"{within}subsets"):
            yield place_of(file.name, place), subset.over(dataset.over(outer))
        if rows is None:
            result.leave(place_of(file.name, within.rstrip(".")), "this dataset has no subsets", fix="[[datasets.subsets]]")


_SHARED = {
    *("cache_latents", "cache_latents_to_disk", "masked_loss"),
    *(rule.key for rule in DATASETS if rule.kind != "no effect"),
}
_PARTS = no_effect("- its tables are read | datasets")


def _dataset(within: str, given: Values, result: Imported) -> None:
    """One subset as a dataset, if smalti can train on it."""
    folder = given.get("image_dir")
    for key, fix in _LEFT_OUT.items():
        if key in given and given[key].value:
            why = next(rule.note for rule in DATASETS if rule.key == key)
            result.leave_table(within, given[key], why, fix=fix, value=folder and folder.value)
            return
    if folder is None:
        result.leave(within.rstrip("."), "this subset has no image_dir", fix="instance_data_dir")
        return
    entry = new_entry(folder.read(path), folder.place, result)
    repeats = given.get("num_repeats")
    if repeats is not None:
        source = source_text("", repeats.place, repeats.value, None, "repeats counts additional visits")
        entry["repeats"] = Line(value=max(0, repeats.read(whole) - 1), source=source)
    _captions(given, entry, result)
    _variants(given, entry)
    _sizes(given, entry, result)
    _masks(given, entry, result)
    result.datasets.append(entry)


_LEFT_OUT = {"is_reg": "add the folder with is_regularisation_data", "metadata_file": "put NAME.txt beside each image"}


def _captions(given: Values, entry: Entry, result: Imported) -> None:
    """Where captions come from. Class tokens are the caption of images without a caption file, and none has one if no
    extension is given, unless the folder says otherwise.
    """
    words, extension = given.get("class_tokens"), given.first("caption_extension", "caption_extention", default=".caption")
    ending = str(extension.value)
    folder = Path(str(entry["instance_data_dir"].value)).expanduser()
    has_files = any(folder.glob(f"*{ending}")) if folder.is_dir() else {"caption_extension", "caption_extention"} & given.keys()
    if words is not None and words.value and not has_files:
        source = f"{words.place}; there are no files as {extension.place} = {ending} says"
        entry["caption_strategy"] = Line(value="instanceprompt", source=source)
        entry["instance_prompt"] = Line(value=str(words.value), source=words.place)
        return
    entry["caption_strategy"] = Line(value="textfile", source=extension.place)
    if ending != ".txt":
        entry["caption_extension"] = Line(value=ending, source=extension.place)
    if words is not None and words.value:
        entry["instance_prompt"] = Line(value=str(words.value), source=f"{words.place}; caption of images without a text file")
        entry["instance_prompt_fallback"] = Line(value=True, source=words.place)


def _variants(given: Values, entry: Entry) -> None:
    """What a visit makes of a caption, and of an image."""
    for key in ("caption_prefix", "caption_suffix"):
        if key in given and (text := str(given[key].value).strip()):
            entry[key] = Line(value=text, source=given[key].place)
    add_shuffle(
        given,
        entry,
        shuffle="shuffle_caption",
        dropout="caption_tag_dropout_rate",
        keep="keep_tokens",
        separator="caption_separator",
    )
    if "caption_dropout_rate" in given:
        place = given["caption_dropout_rate"].place
        entry["caption_dropout_probability"] = Line(value=given["caption_dropout_rate"].read(number), source=place)
    if given.on("flip_aug"):
        entry["flip_probability"] = Line(value=0.5, source=given["flip_aug"].place)


def _masks(given: Values, entry: Entry, result: Imported) -> None:
    """Where masks are, and what they do to the loss."""
    folder, masked = given.get("conditioning_data_dir"), given.on("masked_loss")
    if masked and folder is not None and folder.value:
        entry["mask_path"] = Line(value=folder.read(path), source=folder.place)
    if given.on("alpha_mask"):
        entry["alpha_mask"] = Line(value=True, source=given["alpha_mask"].place)
    if not {"mask_path", "alpha_mask"} & entry.keys():
        return
    place = given["masked_loss"].place if masked else given["alpha_mask"].place
    result.add("mask_floor", 0.0, f"{place}; black places do not count there")
    result.add("mask_normalise", False, f"{place}; a small mask gives a small loss there")


def _sizes(given: Values, entry: Entry, result: Imported) -> None:
    """Resolution, buckets and crops."""
    size = given.first("resolution", default=512)
    width, height = _width_and_height(size.value)
    edge = round(math.sqrt(width * height))
    entry["resolution"] = Line(value=edge, source=source_text("", size.place, size.value, edge))
    entry["resolution_type"] = Line(value="pixel_area", source="buckets have about the area of the resolution")
    bucket = given.first("enable_bucket", default=False)
    if given.on("enable_bucket"):
        result.settled.append(bucket.place)
    else:
        entry["crop_aspect"] = Line(value="square", source=source_text("", bucket.place, bucket.value, None))
        if width != height:
            fix = 'crop_aspect = "preserve"'
            result.leave(size.place, "without buckets every image becomes a square here", fix=fix, value=size.value)
    if given.on("random_crop"):
        entry["crop_style"] = Line(value="random", source=given["random_crop"].place)
    smallest = given.get("skip_image_resolution")
    if smallest is not None and smallest.value:
        pair = _width_and_height(smallest.value)
        entry["minimum_image_size"] = Line(value=round(math.sqrt(math.prod(pair))), source=smallest.place)


def _width_and_height(value: object) -> tuple[int, int]:
    """The two sizes of 512, "512,768" or [512, 768]."""
    parts = value if isinstance(value, list) else str(value).split(",")
    sizes = [whole(part.strip() if isinstance(part, str) else part) for part in parts]
    if len(sizes) not in (1, 2):
        raise UnconvertibleError("it is neither one size nor two")
    return sizes[0], sizes[-1]


def _common(subsets: Sequence[Values], result: Imported) -> None:
    """What is one for all datasets here: batch size, alignment, caching. Different ones are listed."""
    for key, name, convert in (
        ("batch_size", "train_batch_size", whole),
        ("bucket_reso_steps", "aspect_bucket_alignment", whole),
    ):
        given = [subset[key] for subset in subsets if key in subset]
        values = {each.read(convert) for each in given}
        if given:
            result.add(name, convert(given[0].value), given[0].place)
        if len(values) > 1:
            why = f"{name} is one for all datasets here; the first is used"
            result.leave(given[0].place, why, value=sorted(values))
    one_for_all("caption_dropout_probability", result)
    masked = [subset["masked_loss"] for subset in subsets if subset.on("masked_loss")]
    if masked and "mask_floor" not in result.lines:
        result.leave(masked[0].place, "no dataset has masks", fix='mask_path = "FOLDER" in a [[datasets]] table', value=True)
    bucketed = any(subset.on("enable_bucket") for subset in subsets)
    if bucketed and "aspect_bucket_alignment" not in result.lines:
        result.add("aspect_bucket_alignment", 64, f"default of {NAME}: bucket_reso_steps")
    elif not bucketed:
        result.lines.pop("aspect_bucket_alignment", None)
    random = [subset["random_crop"] for subset in subsets if subset.on("random_crop")]
    cached = [each[key].place for each in subsets for key in ("cache_latents", "cache_latents_to_disk") if each.on(key)]
    result.settled += cached
    if random and not cached:
        result.add("vae_cache_disable", True, f"{random[0].place}; without cached latents each visit has a crop of its own")


def folders_of(options: Values, result: Imported) -> None:
    """The datasets of train_data_dir: one for each folder `10_name` in it. Without, what the options say of all datasets."""
    root, folders, folder = options.get("train_data_dir"), [], None
    if root is not None:
        folder = Path(root.read(path)).expanduser()
        folders = sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    named = [(each, match) for each in folders if (match := _REPEATED.match(each.name))]
    if root is not None and not named:
        why = "there is no folder `10_name` in it" if folder and folder.is_dir() else "this folder does not exist on this node"
        fix = "write one [[datasets]] table for each folder `10_name`: repeats = 9, and name as instance_prompt"
        result.leave(root.place, why, fix=fix, value=root.value)
    elif root is None and any(name in result.lines for name in ("learning_rate", "model_type")):
        fix = "give the dataset file too: smalti config import OPTIONS DATASETS"
        result.leave("datasets", "these files name no images", fix=fix)
    shared = Values({key: value for key, value in options.items() if key in _SHARED}, NAME)
    subsets = []
    for each, match in named:
        here = {"image_dir": str(each), "num_repeats": int(match[1]), "class_tokens": match[2].strip()}
        places = {key: Found(value=value, place=f"{root.place}, {each.name}") for key, value in here.items()} if root else {}
        subsets.append(Values({**shared, **places}, NAME))
        attempt(result, _dataset, "", subsets[-1], result)
    if not named and result.lines:
        entry: Entry = {}
        attempt(result, _sizes, shared, entry, result)
        for_all(entry, result)
    attempt(result, _common, subsets or [shared], result)


def prompts_of(file: Opened, family: str, result: Imported) -> None:
    """Prompts of a text file, one a line with `--w 1024`, or of TOML or JSON."""
    rows = list(_rows(file, result))
    if not rows:
        result.leave(file.name, "it has no prompt", fix="--validation_prompt=TEXT")
        return
    attempt(result, add_prompts, rows, _FLUX_PROMPTS if family == "flux" else _PROMPTS, result)


_COMMON_PROMPTS = ("seed", "validation_seed", whole, None), ("negative_prompt", "validation_negative_prompt", text, None)
_PROMPTS: tuple[Setting, ...] = (
    ("sample_steps", "validation_num_inference_steps", whole, 30),
    ("scale", "validation_guidance", number, 7.5),
    *_COMMON_PROMPTS,
)
_FLUX_PROMPTS: tuple[Setting, ...] = (
    ("sample_steps", "validation_num_inference_steps", whole, 20),
    ("guidance_scale", "validation_guidance", number, 3.5),
    ("scale", "flux_true_cfg_scale", number, 1.0),
    *_COMMON_PROMPTS,
)
_FLAGS = {
    "n": "negative_prompt",
    "w": "width",
    "h": "height",
    "d": "seed",
    "s": "sample_steps",
    "l": "scale",
    "g": "guidance_scale",
    "ss": "sample_sampler",
    "cn": "controlnet_image",
    "fs": "flow_shift",
    "ctr": "cfg_trunc_ratio",
    "rcfg": "renorm_cfg",
}


def _rows(file: Opened, result: Imported) -> Iterator[Values]:
    """The prompts, of which each can have settings."""
    content: object = file.content
    shared = Values({}, NAME)
    if isinstance(content, Mapping):
        table = content.get("prompt")
        shared = result.table((*PROMPTS, read("subset")), table, file.name, within="prompt.")
        rest = {key: value for key, value in content.items() if key != "prompt"}
        result.table(unsupported("- only [prompt] is read | *"), rest, file.name)
        content = shared.pop("subset").value if "subset" in shared else None
    elif content is None:
        content = list(_lines(file.text))
    rows = [_row(row) if isinstance(row, str) else row for row in content] if isinstance(content, list) else content
    for within, row in result.rows(PROMPTS, rows, file.name):
        if "prompt" in row.over(shared):
            yield row.over(shared)
        else:
            result.leave(place_of(file.name, within.rstrip(".")), "it has no prompt")


def _lines(text: str) -> Iterator[str]:
    return (line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#"))


def _row(line: str) -> dict[str, object]:
    """A prompt with the flags after it."""
    prompt, *flags = re.split(r"\s--(?=[a-z]+\s)", line)
    pairs = (flag.partition(" ") for flag in flags)
    return {"prompt": prompt.strip(), **{_FLAGS.get(name, name): value.strip() for name, _, value in pairs}}
