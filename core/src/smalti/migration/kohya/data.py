"""Datasets and prompts of kohya's sd-scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from smalti.migration.converters import number, path, switch, whole
from smalti.migration.entries import add_negative_prompt, new_entry, one_for_all
from smalti.migration.files import Opened
from smalti.migration.kohya.tables import DATASETS, NAME
from smalti.migration.rules import Entry, Found, Imported, Line, UnconvertibleError, apply, attempt, found_in, source_text

Values = Mapping[str, Found]
_REPEATED = re.compile(r"^(\d+)_(.*)$")


def datasets_of(files: Sequence[Opened], options: Values, result: Imported) -> None:
    """The datasets of dataset files: one for each subset. `options` are those of the command line."""
    subsets = [subset for file in files for subset in _subsets(file, options)]
    for given in subsets:
        attempt(result, _dataset, given, result)
    attempt(result, _common, subsets, result)


def _subsets(file: Opened, options: Values) -> Iterator[dict[str, Found]]:
    """The values of each subset: its own, those of its dataset, of [general], and of the command line."""
    content = file.content if isinstance(file.content, Mapping) else {}
    outer = {key: value for key, value in options.items() if key in _SHARED}
    if "train_batch_size" in options:
        outer["batch_size"] = options["train_batch_size"]
    general = content.get("general")
    outer |= found_in(general if isinstance(general, Mapping) else {}, file.name, before="general.")
    for i, dataset in enumerate(each for each in content.get("datasets") or [] if isinstance(each, Mapping)):
        here = f"datasets[{i}]."
        shared = outer | found_in({key: v for key, v in dataset.items() if key != "subsets"}, file.name, before=here)
        for j, subset in enumerate(each for each in dataset.get("subsets") or [] if isinstance(each, Mapping)):
            yield shared | found_in(subset, file.name, before=f"{here}subsets[{j}].")


_SHARED = {rule.key for rule in DATASETS} - {"validation_seed", "validation_split"}


def _dataset(given: dict[str, Found], result: Imported) -> None:
    """One subset as a dataset, if smalti can train on it."""
    folder = given.get("image_dir")
    for key in ("is_reg", "metadata_file"):
        if key in given and given[key].value:
            why = next(rule.note for rule in DATASETS if rule.key == key)
            fix = (
                "add the folder as a dataset with is_regularisation_data"
                if key == "is_reg"
                else "put NAME.txt beside each image"
            )
            result.leave(given[key].place, why, fix=fix, value=folder.value if folder else given[key].value)
            return
    if folder is None:
        result.leave(next(iter(given.values())).place, "this subset has no image_dir", fix="instance_data_dir")
        return
    entry = new_entry(folder.read(path), folder.place, result)
    repeats = given.get("num_repeats")
    if repeats is not None:
        source = source_text("", repeats.place, repeats.value, None, "repeats counts additional visits")
        entry["repeats"] = Line(value=max(0, repeats.read(whole) - 1), source=source)
    _captions(given, entry, result)
    _variants(given, entry)
    _sizes(given, entry, result)
    result.datasets.append(entry)
    apply(DATASETS, {key: each for key, each in given.items() if not _is_listed(each, result)}, result)


def _is_listed(given: Found, result: Imported) -> bool:
    """Whether a value that several subsets share is listed already."""
    return any(left.place == given.place for left in result.left)


def _captions(given: Values, entry: Entry, result: Imported) -> None:
    """Where captions come from. Class tokens are the caption of images without a caption file, and none has one if no
    extension is given, unless the folder says otherwise.
    """
    words, extension = given.get("class_tokens"), given.get("caption_extension") or given.get("caption_extention")
    ending = str(extension.value) if extension is not None else ".caption"
    folder = Path(str(entry["instance_data_dir"].value)).expanduser()
    has_files = any(folder.glob(f"*{ending}")) if folder.is_dir() else extension is not None
    if words is not None and words.value and not has_files:
        entry["caption_strategy"] = Line(value="instanceprompt", source=f"{words.place}; there are no {ending} files")
        entry["instance_prompt"] = Line(value=str(words.value), source=words.place)
        return
    entry["caption_strategy"] = Line(value="textfile", source=extension.place if extension else f"default of {NAME}: {ending}")
    if ending != ".txt":
        where = extension.place if extension is not None else f"default of {NAME}: caption_extension"
        entry["caption_extension"] = Line(value=ending, source=where)
    if words is not None and words.value:
        entry["instance_prompt"] = Line(value=str(words.value), source=f"{words.place}; caption of images without a text file")
        entry["instance_prompt_fallback"] = Line(value=True, source=words.place)


def _variants(given: Values, entry: Entry) -> None:
    """What a visit makes of a caption, and of an image."""
    for key in ("caption_prefix", "caption_suffix"):
        if key in given and (text := str(given[key].value).strip()):
            entry[key] = Line(value=text, source=given[key].place)
    shuffled = _on(given, "shuffle_caption")
    rate = given["caption_tag_dropout_rate"].read(number) if "caption_tag_dropout_rate" in given else 0.0
    if shuffled or rate:
        block: dict[str, object] = {} if shuffled else {"enable": False}
        if "keep_tokens" in given and (kept := given["keep_tokens"].read(whole)):
            block["position_start"] = kept
        if "caption_separator" in given and (separator := str(given["caption_separator"].value).strip()) not in ("", ","):
            block["split_on"] = separator
        source = given["shuffle_caption" if shuffled else "caption_tag_dropout_rate"].place
        note = "4 variants of each are encoded ahead; text_cache_disable has a new one at each visit, as there"
        entry["caption_shuffle"] = Line(value=block or True, source=f"{source}; {note}")
    if rate:
        entry["caption_tag_dropout_rate"] = Line(value=rate, source=given["caption_tag_dropout_rate"].place)
    if "caption_dropout_rate" in given:
        place = given["caption_dropout_rate"].place
        entry["caption_dropout_probability"] = Line(value=given["caption_dropout_rate"].read(number), source=place)
    if _on(given, "flip_aug"):
        entry["flip_probability"] = Line(value=0.5, source=given["flip_aug"].place)


def _sizes(given: Values, entry: Entry, result: Imported) -> None:
    """Resolution, buckets and crops."""
    size = given.get("resolution")
    width, height = _width_and_height(size.value if size is not None else 512)
    place = size.place if size is not None else f"default of {NAME}: resolution"
    edge = round(math.sqrt(width * height))
    entry["resolution"] = Line(value=edge, source=source_text("", place, size.value if size else 512, edge))
    entry["resolution_type"] = Line(value="pixel_area", source="buckets have about the area of the resolution")
    bucket = given.get("enable_bucket")
    if not _on(given, "enable_bucket"):
        where = bucket.place if bucket is not None else f"default of {NAME}: enable_bucket = false"
        entry["crop_aspect"] = Line(value="square", source=where)
        if width != height:
            result.leave(
                place,
                "without buckets every image becomes a square here",
                fix='crop_aspect = "preserve"',
                value=size and size.value,
            )
    if _on(given, "random_crop"):
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
    if any(_on(subset, "enable_bucket") for subset in subsets):
        if "aspect_bucket_alignment" not in result.lines:
            result.add("aspect_bucket_alignment", 64, f"default of {NAME}: bucket_reso_steps")
    else:
        result.lines.pop("aspect_bucket_alignment", None)
    random = [subset["random_crop"] for subset in subsets if _on(subset, "random_crop")]
    cached = any(_on(subset, "cache_latents") or _on(subset, "cache_latents_to_disk") for subset in subsets)
    if random and not cached:
        result.add("vae_cache_disable", True, f"{random[0].place}; without cached latents each visit has a crop of its own")


def _on(subset: Values, key: str) -> bool:
    """Whether a switch is on."""
    return key in subset and subset[key].read(switch)


def folders_of(options: Values, result: Imported) -> None:
    """The datasets of train_data_dir: one for each folder `10_name` in it."""
    root = options.get("train_data_dir")
    if root is None:
        if any(name in result.lines for name in ("learning_rate", "model_type")):
            fix = "give the dataset file too: smalti config import OPTIONS DATASETS"
            result.leave("datasets", "these files name no images", fix=fix)
        return
    folder = Path(root.read(path)).expanduser()
    found = sorted(each for each in folder.iterdir() if each.is_dir() and _REPEATED.match(each.name)) if folder.is_dir() else []
    if not found:
        why = "there is no folder `10_name` in it" if folder.is_dir() else "this folder does not exist on this node"
        fix = "write one [[datasets]] table for each folder `10_name`: repeats = 9, and name as instance_prompt"
        result.leave(root.place, why, fix=fix, value=root.value)
        return
    subsets = []
    for each in found:
        match = _REPEATED.match(each.name)
        assert match is not None
        here = {"image_dir": str(each), "num_repeats": int(match[1]), "class_tokens": match[2].strip()}
        shared = {key: value for key, value in options.items() if key in _SHARED}
        subsets.append(shared | {key: Found(value=value, place=f"{root.place}, {each.name}") for key, value in here.items()})
    for given in subsets:
        attempt(result, _dataset, given, result)
    attempt(result, _common, subsets, result)


def prompts_of(file: Opened, family: str, result: Imported) -> None:
    """Prompts of a text file, one a line with `--w 1024`, or of TOML or JSON."""
    rows = list(_rows(file))
    if not rows:
        result.leave(file.name, "it has no prompt", fix="--validation_prompt=TEXT")
        return
    result.add("validation_prompt", [row["prompt"] for row in rows], file.name)
    sizes = dict.fromkeys(f"{row.get('width', 512)}x{row.get('height', 512)}" for row in rows)
    result.add("validation_resolution", ",".join(sizes), f"{file.name}; the default there is 512x512")
    if len(sizes) > 1:
        result.leave(file.name, "every prompt is sampled in every size here", value=list(sizes))
    for key, name, default in _FLUX_PROMPTS if family == "flux" else _PROMPTS:
        values = list(dict.fromkeys(number(row[key]) if key in row else default for row in rows))
        if values[0] is not None:
            result.add(name, values[0], f"{file.name}: {key}; the default there is {default}")
        if len(values) > 1 and key != "seed":
            result.leave(file.name, f"{name} is one for all prompts here; the first is used", value=values)
    add_negative_prompt([row.get("negative_prompt") for row in rows], file.name, result)


_PROMPTS = (
    ("sample_steps", "validation_num_inference_steps", 30),
    ("scale", "validation_guidance", 7.5),
    ("seed", "validation_seed", None),
)
_FLUX_PROMPTS = (
    ("sample_steps", "validation_num_inference_steps", 20),
    ("guidance_scale", "validation_guidance", 3.5),
    ("scale", "flux_true_cfg_scale", 1.0),
    ("seed", "validation_seed", None),
)
_FLAGS = {"n": "negative_prompt", "w": "width", "h": "height", "d": "seed", "s": "sample_steps", "l": "scale"} | {
    "g": "guidance_scale"
}


def _rows(file: Opened) -> Iterator[dict[str, object]]:
    content = file.content
    if isinstance(content, Mapping):
        prompt = content.get("prompt")
        if isinstance(prompt, Mapping):
            shared = {key: value for key, value in prompt.items() if key != "subset"}
            rows = [{**shared, **table} for table in prompt.get("subset") or [] if isinstance(table, Mapping)]
            yield from (row for row in rows if "prompt" in row)
    elif isinstance(content, list):
        yield from (row for row in content if isinstance(row, dict) and "prompt" in row)
    else:
        for line in map(str.strip, file.text.splitlines()):
            if line and not line.startswith("#"):
                prompt, *flags = re.split(r"\s--(?=[a-z]+\s)", line)
                row: dict[str, object] = {"prompt": prompt.strip()}
                for flag in flags:
                    name, _, value = flag.partition(" ")
                    if name in _FLAGS:
                        row[_FLAGS[name]] = value.strip()
                yield row
