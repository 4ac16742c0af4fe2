"""Importing from ai-toolkit: the first process of a YAML or JSON configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from smalti.migration.aitoolkit.layers import add_adapter
from smalti.migration.aitoolkit.tables import (
    DATASETS,
    FAMILIES,
    NAME,
    OLD_FAMILIES,
    OPTIMIZER_NOTES,
    OPTIMIZERS,
    OPTIONS,
    QUANTISED,
    SCHEDULES,
    TIMESTEPS,
    TRAINERS,
)
from smalti.migration.converters import number, path, switch, whole
from smalti.migration.entries import (
    DDPM_FAMILIES,
    add_negative_prompt,
    flattened,
    leave_optimizer,
    new_entry,
    one_for_all,
    without_adapter,
)
from smalti.migration.files import Opened
from smalti.migration.rules import Entry, Found, Imported, Line, Rule, apply, attempt, found_in, source_text

Values = dict[str, Found]
DEFAULT = f"default of {NAME}"


def imported(files: Sequence[Opened], family: str | None = None) -> Imported:
    """The configuration of the first process in the first file."""
    file = files[0]
    result = Imported(trainer=NAME, files=[file.name])
    for other in files[1:]:
        result.leave(other.name, "one file is imported at a time", fix=f"smalti config import {other.path}")
    content = file.content if isinstance(file.content, Mapping) else {}
    config = content["config"]
    first, *more = config["process"]
    if more:
        result.leave(file.name, f"it has {len(more) + 1} processes, of which the first is imported")
    name = str(config.get("name", ""))
    found = found_in(flattened(_named(first, name)), file.name)
    if str(first.get("type")) not in TRAINERS:
        result.leave(f"{file.name}: type", "only trainers of images are supported", value=first.get("type"))
    chosen, kind = _model(found, family, result)
    for step in (_run, _optimizer, _schedule, _publishing):
        attempt(result, step, found, result)
    if kind == "lora":
        attempt(result, add_adapter, found, chosen, DEFAULT, result)
    attempt(result, _quantised, found, kind, result)
    if chosen not in DDPM_FAMILIES and chosen:
        attempt(result, _timesteps, found, result)
    attempt(result, _samples, found, result)
    attempt(result, _datasets, found, result)
    attempt(result, _output, found, name, result)
    rules: Sequence[Rule] = OPTIONS
    if chosen and chosen not in DDPM_FAMILIES:  # ignored there, refused here
        found.pop("train.min_snr_gamma", None)
    if kind != "lora":
        rules, found = without_adapter(rules, found)
    apply(rules, found, result)
    return result


def _named(values: Mapping[str, object], name: str) -> dict[str, object]:
    """The values with [name] replaced by the name of the configuration."""

    def replaced(value: object) -> object:
        if isinstance(value, Mapping):
            return {str(key): replaced(each) for key, each in value.items()}
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return value.replace("[name]", name) if isinstance(value, str) else value

    return {str(key): replaced(value) for key, value in values.items()}


def _model(found: Values, given: str | None, result: Imported) -> tuple[str, str]:
    """Family and kind of training."""
    family, arch = given or "", found.get("model.arch")
    source = "--model_family"
    if not given and arch is not None:
        family, source = FAMILIES.get(str(arch.value).split(":")[0], ""), source_text("", arch.place, arch.value, None)
    elif not given:
        key = next((key for key in OLD_FAMILIES if f"model.{key}" in found and found[f"model.{key}"].value), "")
        family, source = OLD_FAMILIES.get(key, ""), found[f"model.{key}"].place if key else ""
    if family:
        result.add("model_family", family, source)
    else:
        place = arch.place if arch is not None else "model"
        why = "smalti does not have this model"
        result.leave(place, why, fix="`smalti plugins` lists the families", value=arch.value if arch is not None else None)
    network = found.get("network.type")
    has_network = any(key.startswith("network.") for key in found)
    if network is not None and str(network.value) != "lora":
        result.leave(network.place, "only plain LoRA is supported", fix='model_type = "lora"', value=network.value)
    kind = "lora" if has_network else "full"
    result.add(
        "model_type", kind, network.place if network is not None else "network" if has_network else "there is no network"
    )
    return family, kind


def _run(found: Values, result: Imported) -> None:
    """Steps, and how many micro-batches each has."""
    steps = found.get("train.steps") or Found(value=1000, place=f"{DEFAULT}: train.steps")
    legacy, proper = found.get("train.gradient_accumulation_steps"), found.get("train.gradient_accumulation")
    total, note = steps.read(whole), ""
    if legacy is not None and (count := legacy.read(whole)) > 1:
        result.add("gradient_accumulation_steps", count, legacy.place)
        note = f"micro-batches there, of which a step has {count}"
        total = max(1, total // count)
        for key in ("save.save_every", "sample.sample_every"):
            if key in found:
                found[key] = Found(value=max(1, found[key].read(whole) // count), place=f"{found[key].place}, by {count}")
    elif legacy is not None and legacy.read(whole) < 1:
        result.leave(legacy.place, "gradients are not accumulated over an epoch", value=legacy.value)
    elif proper is not None:
        result.add("gradient_accumulation_steps", proper.read(whole), proper.place)
    result.add("max_train_steps", total, source_text("", steps.place, steps.value, total, note))
    rate = found.get("train.unet_lr") or found.get("train.lr") or Found(value=1e-6, place=f"{DEFAULT}: train.lr")
    result.add("learning_rate", rate.read(number), rate.place)
    loss = found.get("train.loss_type")
    if loss is not None and str(loss.value) not in ("mse", "l2"):
        result.leave(loss.place, "smalti has l2, huber and smooth_l1", fix='loss_type = "l2"', value=loss.value)
    ema = found.get("train.ema_config.use_ema")
    if ema is not None and ema.read(switch):
        result.add("use_ema", True, ema.place)
        if "train.ema_config.ema_decay" not in found:
            result.add("ema_decay", 0.999, f"{DEFAULT}: train.ema_config.ema_decay")
    elif ema is not None:
        found.pop("train.ema_config.ema_decay", None)


def _publishing(found: Values, result: Imported) -> None:
    """The repository on the Hub, if there is to be one."""
    push = found.get("save.push_to_hub")
    if push is None or not push.read(switch):
        return
    result.add("push_to_hub", True, push.place)
    if (repository := found.get("save.hf_repo_id")) is not None:
        result.add("hub_model_id", repository.value, repository.place)
    if (private := found.get("save.hf_private")) is not None:
        result.add("hub_private", private.read(switch), private.place)


def _output(found: Values, name: str, result: Imported) -> None:
    folder = found.get("training_folder") or Found(value="output", place=f"{DEFAULT}: training_folder")
    result.add("output_dir", "/".join(filter(None, (folder.read(path).rstrip("/"), name))), f"{folder.place} and name")


def _optimizer(found: Values, result: Imported) -> None:
    given = found.get("train.optimizer") or Found(value="adamw", place=f"{DEFAULT}: train.optimizer")
    name = str(given.value).lower()
    ours = OPTIMIZERS.get(name)
    if ours is None:
        leave_optimizer(given, result)
    else:
        result.add("optimizer", ours, source_text("", given.place, name, ours, OPTIMIZER_NOTES.get(name, "")))
    rate = result.value("learning_rate")
    if ours == "prodigy" and isinstance(rate, int | float) and rate < 0.1:
        result.add("learning_rate", 1.0, f"{given.place}: a learning rate below 0.1 is 1 there with prodigy")
    if ours in ("adamw", "adamw8bit") and "train.optimizer_params.eps" not in found:
        result.add("adam_epsilon", 1e-6, f"{DEFAULT}: {name} has eps = 1e-6")
    elif ours in ("lion", "adafactor", "adagrad", "prodigy") and "train.optimizer_params.weight_decay" not in found:
        result.add("adam_weight_decay", 0.0, f"{DEFAULT}: {name} has no weight decay")
    for key, place in ((key, each.place) for key, each in found.items() if key.startswith("train.optimizer_params.")):
        value = found[key].value
        match key.rpartition(".")[2]:
            case "weight_decay":
                result.add("adam_weight_decay", found[key].read(number), place)
            case "eps":
                result.add("adam_epsilon", found[key].read(number), place)
            case "betas" if isinstance(value, list) and len(value) == 2:
                for option, beta in zip(("adam_beta1", "adam_beta2"), value, strict=True):
                    result.add(option, number(beta), place)


def _schedule(found: Values, result: Imported) -> None:
    given = found.get("train.lr_scheduler") or Found(value="constant", place=f"{DEFAULT}: train.lr_scheduler")
    name = str(given.value).lower()
    answer = SCHEDULES.get(name, "smalti has no such schedule!")
    if answer.endswith("!"):
        result.leave(given.place, answer.removesuffix("!"), fix='lr_scheduler = "cosine"', value=name)
        return
    result.add("lr_scheduler", answer, given.place)
    warm = found.get("train.lr_scheduler_params.num_warmup_steps")
    if warm is None and answer == "constant_with_warmup":
        warm = Found(value=1000, place=f"{DEFAULT}: num_warmup_steps")
    if warm is not None:
        result.add("lr_warmup_steps", warm.read(whole), warm.place)
    low, rate = found.get("train.lr_scheduler_params.eta_min"), result.value("learning_rate")
    if low is not None and isinstance(rate, int | float) and rate > 0:
        ratio = round(low.read(number) / rate, 6)
        result.add("lr_end_ratio", ratio, source_text("", low.place, low.value, ratio, "a share of the learning rate"))


def _quantised(found: Values, kind: str, result: Imported) -> None:
    on = found.get("model.quantize")
    if on is None or not on.read(switch):
        return
    given = found.get("model.qtype") or Found(value="qfloat8", place=f"{on.place}; {DEFAULT}: model.qtype")
    name = str(given.value).partition("|")[0].lower()
    ours = QUANTISED.get(name)
    if kind != "lora":
        result.leave(on.place, "only the base of a LoRA is quantised", fix="--fsdp_enable; see docs/memory.md")
    elif ours is None:
        result.leave(given.place, "smalti has no such precision", fix='base_model_precision = "nf4-torchao"', value=given.value)
    else:
        result.add("base_model_precision", ours, source_text("", given.place, given.value, ours))
        if "|" in str(given.value):
            result.leave(given.place, "the adapter that recovers accuracy is not used", value=given.value)


def _timesteps(found: Values, result: Imported) -> None:
    """How flow models sample timesteps. Only the kinds with `shift` in their name are shifted."""
    given = found.get("train.timestep_type") or Found(value="sigmoid", place=f"{DEFAULT}: train.timestep_type")
    name = str(given.value)
    ours = TIMESTEPS.get(name)
    if ours is None:
        result.leave(given.place, "smalti has no such distribution", fix="--timestep_distribution", value=name)
        return
    result.add("timestep_distribution", ours, source_text("", given.place, name, ours))
    if name.endswith("shift"):
        result.add("flow_schedule_auto_shift", True, source_text("", given.place, name, True))
    else:
        result.add("flow_schedule_shift", 1, f"{given.place}: {name} has no shift")
    if name == "weighted":
        result.leave(given.place, "timesteps are uniform, as there; the weight of their losses is not supported", value=name)


def _samples(found: Values, result: Imported) -> None:
    off = found.get("train.disable_sampling")
    prompts, place = _prompts(found)
    if not prompts or (off is not None and off.read(switch)):
        return
    trigger = str(found["trigger_word"].value) if "trigger_word" in found else ""
    result.add("validation_prompt", [each.replace("[trigger]", trigger).strip(" ,") for each in prompts], place)
    width, height = (found.get(f"sample.{key}") or Found(value=512, place=DEFAULT) for key in ("width", "height"))
    size = f"{width.read(whole)}x{height.read(whole)}"
    result.add("validation_resolution", size, f"{width.place} and sample.height")
    for key, name, convert, default in (
        ("sample_every", "validation_step_interval", whole, 100),
        ("seed", "validation_seed", whole, 0),
        ("guidance_scale", "validation_guidance", number, 7),
        ("sample_steps", "validation_num_inference_steps", whole, 20),
    ):
        given = found.get(f"sample.{key}") or Found(value=default, place=f"{DEFAULT}: sample.{key}")
        result.add(name, given.read(convert), given.place)
    walk = found.get("sample.walk_seed")
    if len(prompts) > 1 and (walk is None or not walk.read(switch)):
        where = walk.place if walk is not None else f"{DEFAULT}: sample.walk_seed"
        result.leave(where, "seeds of validation images count up here; there all prompts have the same one", value=False)
    negative = found.get("sample.neg")
    if negative is not None:
        add_negative_prompt([negative.value], negative.place, result)


def _prompts(found: Values) -> tuple[list[str], str]:
    """The prompts, and where they stand."""
    for key in ("sample.samples", "sample.prompts"):
        rows = found[key].value if key in found else None
        if isinstance(rows, list) and rows:
            texts = [row.get("prompt") if isinstance(row, Mapping) else row for row in rows]
            return [str(text) for text in texts if text], found[key].place
    return [], ""


def _datasets(found: Values, result: Imported) -> None:
    given = found.get("datasets")
    rows = given.value if given is not None and isinstance(given.value, list) else []
    if given is None or not rows:
        result.leave(given.place if given is not None else "datasets", "there is no dataset", fix="--instance_data_dir=FOLDER")
        return
    shared = {key: found[key] for key in ("trigger_word",) if key in found}
    subsets = []
    for index, row in enumerate(row for row in rows if isinstance(row, Mapping)):
        subset = shared | found_in(row, given.place.rpartition(": ")[0], before=f"datasets[{index}].")
        subsets.append(subset)
        attempt(result, _dataset, subset, result)
    attempt(result, _common, subsets, result)


def _dataset(given: Values, result: Imported) -> None:
    """One dataset; several resolutions are a list."""
    folder = given.get("folder_path") or given.get("dataset_path")
    frames = given.get("num_frames")
    if folder is None:
        result.leave(next(iter(given.values())).place, "this dataset has no folder_path", fix="instance_data_dir")
        return
    videos = frames is not None and frames.read(whole) > 1
    if videos or ("is_reg" in given and given["is_reg"].value):
        key = "num_frames" if videos else "is_reg"
        why = next(rule.note for rule in DATASETS if rule.key == key)
        result.leave(given[key].place, why, value=folder.value)
        return
    size = given.get("resolution") or Found(value=512, place=f"{DEFAULT}: resolution")
    sizes = list(dict.fromkeys(whole(each) for each in (size.value if isinstance(size.value, list) else [size.value])))
    entry = new_entry(folder.read(path), folder.place, result)
    _captions(given, entry, result)
    _variants(given, entry)
    shown = sizes if len(sizes) > 1 else sizes[0]
    entry["resolution"] = Line(value=shown, source=source_text("", size.place, size.value, shown))
    entry["resolution_type"] = Line(value="pixel_area", source="buckets have about the area of the resolution")
    if ("buckets" in given and not given["buckets"].read(switch)) or _on(given, "square_crop"):
        entry["crop_aspect"] = Line(value="square", source=(given.get("square_crop") or given["buckets"]).place)
    if _on(given, "random_crop"):
        entry["crop_style"] = Line(value="random", source=given["random_crop"].place)
    flipped, repeats = _on(given, "flip_x"), given.get("num_repeats") or Found(value=1, place=f"{DEFAULT}: num_repeats")
    visits = max(1, repeats.read(whole)) * (2 if flipped else 1)
    if flipped:
        entry["flip_probability"] = Line(value=0.5, source=given["flip_x"].place)
    if flipped or "num_repeats" in given:
        note = "repeats counts additional visits" + (", here also those of mirrored images" if flipped else "")
        entry["repeats"] = Line(value=visits - 1, source=source_text("", repeats.place, repeats.value, None, note))
    result.datasets.append(entry)
    apply(DATASETS, given, result)


def _captions(given: Values, entry: Entry, result: Imported) -> None:
    """Caption files, a default caption, and the trigger word in front."""
    extension, default, trigger = given.get("caption_ext"), given.get("default_caption"), given.get("trigger_word")
    ending = f".{str(extension.value).lstrip('.')}" if extension is not None else ".txt"
    folder = Path(str(entry["instance_data_dir"].value)).expanduser()
    has_files = any(folder.glob(f"*{ending}")) if folder.is_dir() else True
    if not has_files and default is not None:
        entry["caption_strategy"] = Line(value="instanceprompt", source=f"{default.place}; there are no {ending} files")
        words = str(default.value).replace("[trigger]", str(trigger.value) if trigger is not None else "")
        entry["instance_prompt"] = Line(value=words.strip(), source=default.place)
        return
    if not has_files and trigger is not None:
        entry["caption_strategy"] = Line(value="instanceprompt", source=f"there are no {ending} files")
        entry["instance_prompt"] = Line(value=str(trigger.value), source=trigger.place)
        return
    entry["caption_strategy"] = Line(value="textfile", source=extension.place if extension else f"{DEFAULT}: caption_ext")
    entry["disable_multiline_split"] = Line(value=True, source="a caption file is one caption there, whatever its lines")
    if ending != ".txt" and extension is not None:
        entry["caption_extension"] = Line(value=ending, source=extension.place)
    if default is not None:
        entry["instance_prompt"] = Line(
            value=str(default.value), source=f"{default.place}; caption of images without a text file"
        )
        entry["instance_prompt_fallback"] = Line(value=True, source=default.place)


def _variants(given: Values, entry: Entry) -> None:
    """What a visit makes of a caption."""
    trigger = given.get("trigger_word")
    if trigger is not None and (word := str(trigger.value).strip()):
        entry["trigger_word"] = Line(value=word, source=trigger.place)
    shuffled = _on(given, "shuffle_tokens")
    rate = given["token_dropout_rate"].read(number) if "token_dropout_rate" in given else 0.0
    if shuffled or rate:
        block: dict[str, object] = {} if shuffled else {"enable": False}
        if "keep_tokens" in given and (kept := given["keep_tokens"].read(whole)):
            block["position_start"] = kept
        source = given["shuffle_tokens" if shuffled else "token_dropout_rate"].place
        note = "4 variants of each are encoded ahead; text_cache_disable has a new one at each visit, as there"
        entry["caption_shuffle"] = Line(value=block or True, source=f"{source}; {note}")
    if rate:
        entry["caption_tag_dropout_rate"] = Line(value=rate, source=given["token_dropout_rate"].place)
    dropout = given.get("caption_dropout_rate") or Found(value=0.0, place=f"{DEFAULT}: caption_dropout_rate")
    entry["caption_dropout_probability"] = Line(value=dropout.read(number), source=dropout.place)


def _on(given: Values, key: str) -> bool:
    """Whether a switch is on."""
    return key in given and given[key].read(switch)


def _common(subsets: Sequence[Values], result: Imported) -> None:
    """What is one for all datasets here: the alignment of buckets, and caption dropout where it is the same."""
    one_for_all("caption_dropout_probability", result)
    for key, name, convert, default in (("bucket_tolerance", "aspect_bucket_alignment", whole, 64),):
        given = [subset.get(key) or Found(value=default, place=f"{DEFAULT}: {key}") for subset in subsets]
        values = sorted({each.read(convert) for each in given})
        if given:
            result.add(name, given[0].read(convert), given[0].place)
        if len(values) > 1:
            result.leave(given[0].place, f"{name} is one for all datasets here; the first is used", value=values)
