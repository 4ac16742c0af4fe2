"""Importing from ai-toolkit: the first process of a YAML or JSON configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from statistics import NormalDist

from smalti_migrate.aitoolkit import tables
from smalti_migrate.aitoolkit.layers import add_adapter
from smalti_migrate.converters import number, path, switch, text, whole
from smalti_migrate.entries import (
    DDPM_FAMILIES,
    ENCODERS,
    Setting,
    add_prompts,
    add_shuffle,
    fitting,
    leave_optimizer,
    new_entry,
    one_for_all,
)
from smalti_migrate.files import Opened
from smalti_migrate.rules import Entry, Found, Imported, Line, Values, attempt, convert_options, place_of, source_text

DEFAULT = f"default of {tables.NAME}"


def imported(files: Sequence[Opened], family: str | None = None) -> Imported:
    """The configuration of the first process in the first file."""
    file = files[0]
    result = Imported(trainer=tables.NAME, files=[file.name])
    for other in files[1:]:
        result.leave(other.name, "one file is imported at a time", fix=f"smalti config import {other.path}")
    content = file.content if isinstance(file.content, Mapping) else {}
    config = content["config"]
    first, *more = config["process"]
    if more:
        result.leave(file.name, f"it has {len(more) + 1} processes, of which the first is imported")
    around = {key: value for key, value in config.items() if key != "process"}
    name = result.table(tables.FILE, {**content, "config": around}, file.name).first("config.name", default="")
    found = result.table(tables.OPTIONS, _named(first, str(name.value)), file.name)
    if str(first.get("type")) not in tables.TRAINERS:
        result.leave(f"{file.name}: type", "only trainers of images are supported", value=first.get("type"))
    result.settled.append(f"{file.name}: type")
    chosen, kind = _model(found, family, result)
    for step in (_run, _optimizer, _schedule, _prior, _preservation, _slider, _publishing):
        attempt(result, step, found, result)
    if kind == "lora":
        attempt(result, add_adapter, found, chosen, result)
    attempt(result, _encoders, found, kind, chosen, result)
    attempt(result, _quantised, found, kind, result)
    if chosen not in DDPM_FAMILIES and chosen:
        attempt(result, _timesteps, found, result)
    attempt(result, _noise_levels, found, chosen, result)
    noise = found.first("train.noise_scheduler")
    result.settled += [noise.place] if noise.value == ("ddpm" if chosen in DDPM_FAMILIES else "flowmatch") else []
    attempt(result, _samples, file.name, found, result)
    attempt(result, _datasets, file.name, found, result)
    attempt(result, _output, found, name, result)
    convert_options(fitting(tables.OPTIONS, kind, chosen), found, result)
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
        family, source = tables.FAMILIES.get(str(arch.value).split(":")[0], ""), source_text("", arch.place, arch.value, None)
    elif not given:
        key = next((key for key in tables.OLD_FAMILIES if f"model.{key}" in found and found[f"model.{key}"].value), "")
        family, source = (
            tables.OLD_FAMILIES.get(key, ""),
            found[f"model.{key}"].place if key else f"{DEFAULT}: model.arch = sd1",
        )
        family = family if key or any(found.on(f"model.{each}") for each in tables.OTHER_KINDS) else "sd1x"
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
    absent = "network" if has_network else "there is no network"
    result.add("model_type", kind, network.place if network is not None else absent)
    return family, kind


def _run(found: Values, result: Imported) -> None:
    """Steps, and how many micro-batches each has."""
    steps = found.first("train.steps", default=1000)
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
        result.copy("gradient_accumulation_steps", proper, whole)
    elif legacy is not None:
        result.settled.append(legacy.place)
    result.add("max_train_steps", total, source_text("", steps.place, steps.value, total, note))
    result.copy("learning_rate", found.first("train.lr", default=1e-6), number)
    loss = found.first("train.loss_type", default="mse")
    if str(loss.value) not in ("mse", "l2"):
        result.leave(loss.place, "smalti has l2, huber and smooth_l1", fix='loss_type = "l2"', value=loss.value)
    result.settled.append(loss.place)
    if found.on("train.ema_config.use_ema"):
        result.copy("use_ema", found["train.ema_config.use_ema"], switch)
        result.copy("ema_decay", found.first("train.ema_config.ema_decay", default=0.999), number)


def _publishing(found: Values, result: Imported) -> None:
    """The repository on the Hub, if there is to be one."""
    if found.on("save.push_to_hub"):
        for key, name, convert in (
            ("push_to_hub", "push_to_hub", switch),
            ("hf_repo_id", "hub_model_id", text),
            ("hf_private", "hub_private", switch),
        ):
            if f"save.{key}" in found:
                result.copy(name, found[f"save.{key}"], convert)


def _output(found: Values, name: Found, result: Imported) -> None:
    folder = found.first("training_folder", default="output")
    result.add(
        "output_dir", "/".join(filter(None, (folder.read(path).rstrip("/"), str(name.value)))), f"{folder.place}, {name.place}"
    )


def _optimizer(found: Values, result: Imported) -> None:
    given = found.first("train.optimizer", default="adamw")
    name = str(given.value).lower()
    ours = tables.OPTIMIZERS.get(name)
    if ours is None:
        leave_optimizer(given, result)
    else:
        result.add("optimizer", ours, source_text("", given.place, name, ours, tables.OPTIMIZER_NOTES.get(name, "")))
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
    given = found.first("train.lr_scheduler", default="constant")
    name = str(given.value).lower()
    answer = tables.SCHEDULES.get(name, "smalti has no such schedule!")
    if answer.endswith("!"):
        result.leave(given.place, answer.removesuffix("!"), fix='lr_scheduler = "cosine"', value=name)
    else:
        result.add("lr_scheduler", answer, given.place)
    key = "train.lr_scheduler_params.num_warmup_steps"
    if key in found or answer == "constant_with_warmup":
        result.copy("lr_warmup_steps", found.first(key, default=1000), whole)
    low, rate = found.get("train.lr_scheduler_params.eta_min"), result.value("learning_rate")
    if low is not None and isinstance(rate, int | float) and rate > 0:
        ratio = round(low.read(number) / rate, 6)
        result.add("lr_end_ratio", ratio, source_text("", low.place, low.value, ratio, "a share of the learning rate"))


def _quantised(found: Values, kind: str, result: Imported) -> None:
    if not found.on("model.quantize"):
        return
    on, given = found["model.quantize"], found.first("model.qtype", default="qfloat8")
    name = str(given.value).partition("|")[0].lower()
    ours = tables.QUANTISED.get(name)
    if kind != "lora":
        result.leave(on.place, "only the base of a LoRA is quantised", fix="--fsdp_enable; see docs/memory.md")
    elif ours is None:
        result.leave(given.place, "smalti has no such precision", fix='base_model_precision = "nf4-torchao"', value=given.value)
        result.settled.append(on.place)
    else:
        result.add("base_model_precision", ours, source_text("", f"{on.place}, {given.place}", given.value, ours))
        if "|" in str(given.value):
            result.leave(given.place, "the adapter that recovers accuracy is not used", value=given.value)


def _timesteps(found: Values, result: Imported) -> None:
    """How flow models sample timesteps. Only the kinds with `shift` in their name are shifted."""
    given = found.first("train.timestep_type", default="sigmoid")
    name = str(given.value)
    ours = tables.TIMESTEPS.get(name)
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


def _noise_levels(found: Values, family: str, result: Imported) -> None:
    """The first and the last of a thousand denoising steps that are trained: shares of the distribution, counted from noise."""
    first = found.first("train.min_denoising_steps", default=0)
    last = found.first("train.max_denoising_steps", default=1000)
    if first.read(whole) <= 0 and last.read(whole) >= 999:
        return
    if first.read(whole) >= min(last.read(whole), 1000):
        result.leave(first.place, "no denoising step is left to train", value=first.value)
        return
    kind = "linear" if family in DDPM_FAMILIES else str(found.first("train.timestep_type", default="sigmoid").value)
    if kind not in ("linear", "sigmoid"):
        why = f"the range of timesteps is read for linear and sigmoid ones, and these are {kind}"
        result.leave(first.place, why, fix="timestep_min and timestep_max, from 0 (image) to 1 (noise)", value=first.value)
        return
    for name, given in (("timestep_min", last), ("timestep_max", first)):
        share = round(1 - min(max(given.read(whole), 0), 1000) / 1000, 6)
        level = share if kind == "linear" or share in (0, 1) else 1 / (1 + exp(-NormalDist().inv_cdf(share)))
        if level not in (0, 1):
            result.add(name, round(level, 6), source_text("", given.place, given.value, round(level, 6)))
        result.settled.append(given.place)


_SETTINGS: tuple[Setting, ...] = (
    ("seed", "validation_seed", whole, 0),
    ("guidance_scale", "validation_guidance", number, 7),
    ("sample_steps", "validation_num_inference_steps", whole, 20),
    ("neg", "validation_negative_prompt", text, None),
    ("network_multiplier", "validation_adapter_strength", number, None),
)


def _prior(found: Values, result: Imported) -> None:
    """The loss outside of masks."""
    if found.on("train.inverted_mask_prior"):
        weight = found.first("train.inverted_mask_prior_multiplier", default=0.5)
        place = found["train.inverted_mask_prior"].place
        result.add("prior_outside_mask", weight.read(number), f"{place}, {weight.place} = {weight.value}")


def _preservation(found: Values, result: Imported) -> None:
    """What is held where it was: the class of the trigger word, or the empty prompt."""
    for key, kind in (("diff_output_preservation", "class"), ("blank_prompt_preservation", "blank")):
        if not found.on(f"train.{key}"):
            continue
        result.add("preserve", kind, found[f"train.{key}"].place)
        weight = found.first(f"train.{key}_multiplier", default=1.0)
        if weight.read(number) != 1:
            result.copy("preserve_weight", weight, number)
        if kind == "class" and "train.diff_output_preservation_class" in found:
            result.copy("preserve_class", found["train.diff_output_preservation_class"], text)
        return


def _encoders(found: Values, kind: str, family: str, result: Imported) -> None:
    """Adapters in the text encoders of SD and SDXL, all linear layers of their blocks, at the rate of the run."""
    train = found.get("train.train_text_encoder")
    used = {key: found.first(f"model.use_{key}", default=True) for key in ("text_encoder_1", "text_encoder_2")}
    if train is None or not train.read(switch):
        return
    result.settled.append(train.place)
    if not any(each.read(switch) for each in used.values()):
        return
    if kind != "lora" or family not in ENCODERS:
        why, fix = (
            "text encoders are trained for SD 1, SD 2 and SDXL only, by an adapter",
            "train_text_encoder = true for a LoRA of SD or SDXL",
        )
        result.leave(train.place, why, fix=fix, value=train.value)
        return
    first, second = used.values()
    if ENCODERS[family] == 1:
        if not first.read(switch):
            return
    elif not first.read(switch):
        result.add("text_encoder_lr", 0.0, first.place)
        result.copy("text_encoder_2_lr", found.first("train.lr", default=1e-6), number)
    elif not second.read(switch):
        result.add("text_encoder_2_lr", 0.0, second.place)
    result.add("train_text_encoder", True, train.place)
    line = result.lines.get("lora_targets")
    if line is not None and isinstance(line.value, list):
        result.add("lora_targets", [*line.value, "fc1", "fc2"], f"{line.source}, and of the text encoders")


def _slider(found: Values, result: Imported) -> None:
    """A slider of prompts. Its anchor is what is preserved: of three errors there, two are the same one."""
    kind = found.first("type", default="")
    if kind.value != tables.SLIDER:
        return
    result.add("slider", "prompts", kind.place)
    for key, name, convert in (
        ("positive_prompt", "slider_positive", text),
        ("negative_prompt", "slider_negative", text),
        ("guidance_strength", "slider_guidance", number),
    ):
        if f"slider.{key}" in found:
            result.copy(name, found[f"slider.{key}"], convert)
    anchor, strength = found.get("slider.anchor_class"), found.first("slider.anchor_strength", default=1.0)
    if anchor is not None and anchor.value is not None:
        result.add("preserve", "prompts" if anchor.value else "blank", anchor.place)
        if anchor.value:
            result.add("preserve_prompts", [str(anchor.value)], anchor.place)
        weight, note = strength.read(number) / 2, "the errors of sliders count twice there"
        result.add("preserve_weight", weight, source_text("", strength.place, strength.value, weight, note))
    target = found.first("slider.target_class", default="")
    if target.value:
        why, fix = (
            "here a slider starts from the captions of the images",
            f'caption_strategy = "instanceprompt", instance_prompt = "{target.value}"',
        )
        result.leave(target.place, why, fix=fix, value=target.value)


def _samples(file: str, found: Values, result: Imported) -> None:
    """The prompts, each with settings of its own or those of all."""
    if found.on("train.disable_sampling"):
        result.left_out.append(place_of(file, "sample."))
        result.settled.append(found["train.disable_sampling"].place)
        return
    given, trigger = found.first("sample.samples", "sample.prompts"), str(found.first("trigger_word", default="").value)
    listed = given.value if isinstance(given.value, list) else []
    rows = [{"prompt": row} if isinstance(row, str) else row for row in listed]
    outer = Values({key.removeprefix("sample."): each for key, each in found.items() if key.startswith("sample.")}, tables.NAME)
    prompts = []
    for within, row in result.rows(tables.SAMPLES, rows, file, within=given.place.removeprefix(f"{file}: ").partition(",")[0]):
        if "prompt" in row and str(row["prompt"].value):
            words = str(row["prompt"].value).replace("[trigger]", trigger).strip(" ,")
            prompt = Found(value=words, place=row["prompt"].place)
            prompts.append(Values({**row.over(outer), "prompt": prompt}, tables.NAME))
        else:
            result.leave(place_of(file, within.rstrip(".")), "it has no prompt")
    if not prompts:
        return
    result.settled.append(given.place.partition(",")[0])
    add_prompts(prompts, _SETTINGS, result)
    result.copy("validation_step_interval", found.first("sample.sample_every", default=100), whole)
    walk = found.first("sample.walk_seed", default=False)
    if not walk.read(switch) and len(prompts) > 1:
        result.leave(
            walk.place, "seeds of validation images count up here; there all prompts have the same one", value=walk.value
        )
    result.settled.append(walk.place)


def _datasets(file: str, found: Values, result: Imported) -> None:
    given = found.first("datasets", default=[])
    subsets = []
    for within, row in result.rows(tables.DATASETS, given.value, file, within="datasets"):
        subsets.append(row.over(Values({key: found[key] for key in ("trigger_word",) if key in found}, tables.NAME)))
        attempt(result, _dataset, place_of(file, within), subsets[-1], result)
    result.settled.append(given.place)
    if not subsets:
        result.leave(given.place, "there is no dataset", fix="--instance_data_dir=FOLDER")
    attempt(result, _common, subsets, result)


def _dataset(within: str, given: Values, result: Imported) -> None:
    """One dataset; several resolutions are a list."""
    folder, frames = given.first("folder_path", "dataset_path"), given.first("num_frames", default=1)
    if folder.value is None:
        result.leave(within.rstrip("."), "this dataset has no folder_path", fix="instance_data_dir")
        return
    videos = frames.read(whole) > 1
    if videos or given.first("is_reg").value:
        key = "num_frames" if videos else "is_reg"
        why = next(rule.note for rule in tables.DATASETS if rule.key == key)
        result.leave_table(within, given[key], why, value=folder.value)
        return
    result.settled.append(frames.place)
    size = given.first("resolution", default=512)
    sizes = list(dict.fromkeys(whole(each) for each in (size.value if isinstance(size.value, list) else [size.value])))
    entry = new_entry(folder.read(path), folder.place, result)
    _captions(given, entry, result)
    _variants(given, entry)
    shown = sizes if len(sizes) > 1 else sizes[0]
    entry["resolution"] = Line(value=shown, source=source_text("", size.place, size.value, shown))
    entry["resolution_type"] = Line(value="pixel_area", source="buckets have about the area of the resolution")
    buckets = given.first("buckets", default=True)
    if not buckets.read(switch) or given.on("square_crop"):
        entry["crop_aspect"] = Line(value="square", source=given.first("square_crop", "buckets").place)
    result.settled.append(buckets.place)
    if given.on("random_crop"):
        entry["crop_style"] = Line(value="random", source=given["random_crop"].place)
    _masks(given, entry, result)
    flipped, repeats = given.on("flip_x"), given.first("num_repeats", default=1)
    visits = max(1, repeats.read(whole)) * (2 if flipped else 1)
    if flipped:
        entry["flip_probability"] = Line(value=0.5, source=given["flip_x"].place)
    if flipped or "num_repeats" in given:
        note = "repeats counts additional visits" + (", here also those of mirrored images" if flipped else "")
        entry["repeats"] = Line(value=visits - 1, source=source_text("", repeats.place, repeats.value, None, note))
    result.datasets.append(entry)


def _masks(given: Values, entry: Entry, result: Imported) -> None:
    """Where masks are, and the least weight of a place."""
    folder, floor = given.get("mask_path"), given.first("mask_min_value", default=0.0)
    if folder is not None and folder.value:
        entry["mask_path"] = Line(value=folder.read(path), source=folder.place)
    if given.on("alpha_mask"):
        entry["alpha_mask"] = Line(value=True, source=given["alpha_mask"].place)
    if not {"mask_path", "alpha_mask"} & entry.keys():
        return
    if given.on("invert_mask"):
        entry["mask_invert"] = Line(value=True, source=given["invert_mask"].place)
    least, first = floor.read(number), result.value("mask_floor")
    if first is None:
        note = "weights are divided by their mean over the batch there, over an image here"
        result.copy("mask_floor", floor, number, note)
    elif first == least:
        result.settled.append(floor.place)
    else:
        result.leave(floor.place, "mask_floor is one for all datasets here; the first is used", value=least)


def _captions(given: Values, entry: Entry, result: Imported) -> None:
    """Caption files, a default caption, and the trigger word in front."""
    extension, default, trigger = given.get("caption_ext"), given.get("default_caption"), given.get("trigger_word")
    ending = f".{str(extension.value).lstrip('.')}" if extension is not None else ".txt"
    folder = Path(str(entry["instance_data_dir"].value)).expanduser()
    has_files = any(folder.glob(f"*{ending}")) if folder.is_dir() else True
    words = str(default.value if default else "").replace("[trigger]", str(trigger.value if trigger else "")).strip()
    if not has_files and default is not None:
        entry["caption_strategy"] = Line(value="instanceprompt", source=f"{default.place}; there are no {ending} files")
        entry["instance_prompt"] = Line(value=words, source=default.place)
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
        entry["instance_prompt"] = Line(value=words, source=f"{default.place}; caption of images without a text file")
        entry["instance_prompt_fallback"] = Line(value=True, source=default.place)


def _variants(given: Values, entry: Entry) -> None:
    """What a visit makes of a caption."""
    trigger = given.get("trigger_word")
    if trigger is not None and (word := str(trigger.value).strip()):
        entry["trigger_word"] = Line(value=word, source=trigger.place)
    add_shuffle(given, entry, shuffle="shuffle_tokens", dropout="token_dropout_rate", keep="keep_tokens", separator="")
    dropout = given.first("caption_dropout_rate", default=0.0)
    entry["caption_dropout_probability"] = Line(value=dropout.read(number), source=dropout.place)


def _common(subsets: Sequence[Values], result: Imported) -> None:
    """What is one for all datasets here: the alignment of buckets, and caption dropout where it is the same."""
    one_for_all("caption_dropout_probability", result)
    given = [subset.first("bucket_tolerance", default=64) for subset in subsets]
    if values := sorted({each.read(whole) for each in given}):
        result.copy("aspect_bucket_alignment", given[0], whole)
        result.settled += [each.place for each in given]
    if len(values) > 1:
        why = "aspect_bucket_alignment is one for all datasets here; the first is used"
        result.leave(given[0].place, why, value=values)
