"""Importing from OneTrainer: its configuration or preset in JSON, with its concepts and samples."""

from __future__ import annotations

from collections.abc import Sequence

from smalti_migrate.converters import number, path, switch, whole
from smalti_migrate.entries import DDPM_FAMILIES, ENCODERS, fitting, leave_optimizer
from smalti_migrate.files import Opened, companion, open_file
from smalti_migrate.onetrainer import tables
from smalti_migrate.onetrainer.data import datasets_of, samples_of, without_concepts
from smalti_migrate.onetrainer.layers import add_layers
from smalti_migrate.rules import Found, Imported, Values, attempt, convert_options, source_text

_ENCODERS = "text encoders are trained for SD 1, SD 2 and SDXL only, by an adapter"
_SHIFTED_ALIKE = ("chroma", "sana", "sd3")
"""Families whose times have `timestep_shift` at all sizes there, as those of DDPM: dynamic_timestep_shifting has no effect."""
_STOPS = {"": 30, "_unit": "EPOCH"}
_STOP_OPTIONS = dict(zip(("EPOCH", "STEP"), tables.STOPPED, strict=True))


def imported(files: Sequence[Opened], family: str | None = None) -> Imported:
    """The configuration of these files. Concepts and samples are in it, or in files that it names or that are given too."""
    result = Imported(trainer=tables.NAME, files=[file.name for file in files])
    found = result.table(tables.OPTIONS, {}, "")
    for file in files:
        if file.kind == "options":
            found |= _renamed(result.table(tables.OPTIONS, file.content, file.name)).over(found)
    if not any(file.kind == "options" for file in files):
        attempt(result, _data, files, found, result)
        return result
    chosen, kind = _model(found, family, result)
    for step in (_optimizer, _devices, _schedule, _ema, _loss, _masks, _precision, _saving):
        attempt(result, step, found, result)
    attempt(result, _base, found, kind, result)
    attempt(result, _timesteps, found, chosen, result)
    attempt(result, _noise_levels, found, result)
    attempt(result, _kind_of_adapter, found, kind, result)
    attempt(result, add_layers, found, chosen, kind, result)
    attempt(result, _encoders, found, chosen, kind, result)
    attempt(result, _data, files, found, result)
    convert_options(fitting(tables.OPTIONS, kind, chosen), found, result)
    return result


def _renamed(found: Values) -> Values:
    """A table with the keys that files of today have."""
    for old in tables.OLD_KEYS.keys() & found.keys():
        found.setdefault(tables.OLD_KEYS[old], found.pop(old))
    return found


def _model(found: Values, family: str | None, result: Imported) -> tuple[str, str]:
    """Family and kind of training."""
    model = found.first("model_type", default="STABLE_DIFFUSION_15")
    chosen = family or tables.FAMILIES.get(str(model.value), "")
    if chosen:
        result.add("model_family", chosen, "--model_family" if family else source_text("", model.place, model.value, chosen))
    else:
        fix = "`smalti plugins` lists the families"
        result.leave(model.place, "smalti does not have this model", fix=fix, value=model.value)
    method = found.first("training_method", default="FINE_TUNE")
    kind = tables.METHODS.get(str(method.value), "")
    if kind:
        result.add("model_type", kind, source_text("", method.place, method.value, kind))
    else:
        fix = 'model_type = "lora", or "full"'
        result.leave(method.place, "smalti trains whole models and LoRA", fix=fix, value=method.value)
    return chosen, kind


def _accumulation(found: Values) -> int:
    return max(1, found.first("gradient_accumulation_steps", default=1).read(whole))


def _micro_batches(count: int) -> str:
    """What a comment says about a number of micro-batches that became one of steps."""
    return f"micro-batches there, of which a step has {count}" if count > 1 else ""


def _of_part(found: Values, key: str, *, default: object, outer: str = "") -> Found:
    """A setting of the trained model, which can stand in several places; `outer` is a key for all models."""
    return found.first(
        *(f"{part}.{key}" for part in tables.PARTS if f"{part}.{key}" in found),
        outer or f"{tables.PARTS[0]}.{key}",
        default=default,
    )


def _optimizer(found: Values, result: Imported) -> None:
    result.copy("learning_rate", _of_part(found, "learning_rate", outer="learning_rate", default=3e-6), number)
    named = found.first("optimizer.optimizer", "optimizer", default="ADAMW")
    name = str(named.value).upper()
    ours = tables.OPTIMIZERS.get(name)
    if ours is None:
        leave_optimizer(named, result)
        return
    result.add("optimizer", ours, source_text("", named.place, name, ours, tables.OPTIMIZER_NOTES.get(name, "")))
    for key, option, optimizers in (
        ("weight_decay", "adam_weight_decay", set(tables.OPTIMIZERS.values())),
        ("beta1", "adam_beta1", {"adamw", "adamw8bit", "adamw_schedulefree", "came", "lion"}),
        ("beta2", "adam_beta2", {"adamw", "adamw8bit", "adamw_schedulefree", "came", "lion"}),
        ("eps", "adam_epsilon", {"adamw", "adamw8bit", "adamw_schedulefree"}),
    ):
        if ours in optimizers and f"optimizer.{key}" in found:
            result.copy(option, found[f"optimizer.{key}"], number)


def _devices(found: Values, result: Imported) -> None:
    devices = [each for each in str(found.first("device_indexes", default="").value).split(",") if each.strip()]
    if found.on("multi_gpu") and devices:
        result.add("num_processes", len(devices), f"{found['device_indexes'].place}, {found['multi_gpu'].place}")
    if found.on("compile"):
        result.add("dynamo_backend", "inductor", found["compile"].place)


def _schedule(found: Values, result: Imported) -> None:
    """The schedule. Its warm-up counts micro-batches, and is a share of the run up to 1."""
    named = found.first("learning_rate_scheduler", default="CONSTANT")
    answer = tables.SCHEDULES.get(str(named.value).upper(), "smalti has no such schedule!")
    if answer.endswith("!"):
        result.leave(named.place, answer.removesuffix("!"), fix='lr_scheduler = "cosine"', value=named.value)
    else:
        result.add("lr_scheduler", answer, source_text("", named.place, named.value, answer))
    warm, count = found.first("learning_rate_warmup_steps", default=200), _accumulation(found)
    steps = warm.read(number)
    if steps > 1:
        value = int(steps / count)
        result.add("lr_warmup_steps", value, source_text("", warm.place, warm.value, value, _micro_batches(count)))
    elif steps > 0:
        why = "it is a share of the run, whose steps follow from the images"
        result.leave(warm.place, why, fix="lr_warmup_steps = N; `smalti train FILE --dry-run` says the steps", value=steps)


def _ema(found: Values, result: Imported) -> None:
    """The EMA. Its decay is per update there, and per step here."""
    mode = found.first("ema", default="OFF")
    if str(mode.value).upper() not in ("GPU", "CPU"):
        return
    result.add("use_ema", True, source_text("", mode.place, mode.value, True))
    result.add("ema_device", "cpu" if str(mode.value).upper() == "CPU" else "accelerator", mode.place)
    decay, every = found.first("ema_decay", default=0.999), found.first("ema_update_step_interval", default=5)
    count = max(1, every.read(whole))
    value = round(float(decay.read(number)) ** (1 / count), 8)
    places = f"{decay.place}, {every.place}"
    result.add("ema_decay", value, source_text("", places, decay.value, value, f"of {count} steps there, of one here"))


def _loss(found: Values, result: Imported) -> None:
    mse, huber = found.first("mse_strength", default=1.0), found.first("huber_strength", default=0.0)
    if mse.read(number) == 0 and huber.read(number) > 0:
        result.add("loss_type", "huber", f"{huber.place}, {mse.place}")
        result.copy("huber_c", found.first("huber_delta", default=1.0), number)
    elif huber.read(number) > 0:
        result.leave(huber.place, "losses are not combined", fix='loss_type = "l2", or "huber"', value=huber.value)
    if mse.read(number) not in (0, 1):
        result.leave(mse.place, "the loss has no factor; the learning rate has the same effect", value=mse.value)
    for key, name in tables.PREDICTIONS.items():
        if found.on(key):
            result.add("prediction_type", name, found[key].place)


def _masks(found: Values, result: Imported) -> None:
    """How masks weight the loss; each dataset says where they are."""
    if not found.on("masked_training"):
        return
    share, prior = found.first("unmasked_probability", default=0.1), found.first("masked_prior_preservation_weight", default=0)
    note = "masks are files -masklabel.png beside the images"
    result.copy("mask_floor", found.first("unmasked_weight", default=0.1), number, note)
    used = round(1 - share.read(number), 6)
    result.add("mask_probability", used, source_text("", share.place, share.value, used, "the share of visits with masks"))
    result.copy("mask_normalise", found.first("normalize_masked_area_loss", default=False), switch)
    if prior.read(number):
        result.copy("prior_outside_mask", prior, number)


def _precision(found: Values, result: Imported) -> None:
    vae = found.first("vae.weight_dtype", default="")
    if str(vae.value) != "FLOAT_16" and (name := tables.BASE_DTYPES.get(str(vae.value), "")):
        result.add("vae_dtype", name, source_text("", vae.place, vae.value, name))
    first = "gradient_checkpointing" if "gradient_checkpointing" in found else ""
    way = _of_part(found, "gradient_checkpointing", default=True) if not first else found[first]
    on = str(way.value).upper() in ("ON", "TRUE", "CPU_OFFLOADED")
    result.add("gradient_checkpointing", on, source_text("", way.place, way.value, on))
    if str(way.value).upper() == "CPU_OFFLOADED":
        result.leave(way.place, "activations are recomputed, not offloaded", fix="see docs/memory.md", value=way.value)


def _base(found: Values, kind: str, result: Imported) -> None:
    """The dtype of the frozen weights of a LoRA."""
    keys = (*(f"{part}.weight_dtype" for part in tables.PARTS), "weight_dtype")
    dtypes = [found[key] for key in keys if key in found and str(found[key].value) != "NONE"]
    if not dtypes:
        return
    name, dtype, place = str(dtypes[0].value), dtypes[0], ", before ".join(each.place for each in dtypes)
    if kind != "lora":
        if name != "FLOAT_32":
            result.leave(dtype.place, "trained weights are fp32 here", fix="see docs/memory.md", value=name)
    elif name in tables.QUANTISED:
        result.add("base_model_precision", tables.QUANTISED[name], source_text("", place, name, tables.QUANTISED[name]))
    elif name in tables.BASE_DTYPES:
        result.add("lora_base_dtype", tables.BASE_DTYPES[name], source_text("", place, name, tables.BASE_DTYPES[name]))
    else:
        result.leave(dtype.place, "smalti has no such precision", fix='base_model_precision = "nf4-torchao"', value=name)


def _timesteps(found: Values, family: str, result: Imported) -> None:
    way = found.first("timestep_distribution", default="UNIFORM")
    name = {"UNIFORM": "uniform", "LOGIT_NORMAL": "logit_normal"}.get(str(way.value).upper())
    if name is None:
        result.leave(way.place, "smalti has no such distribution", fix="--timestep_distribution", value=way.value)
    else:
        result.add("timestep_distribution", name, source_text("", way.place, way.value, name))
    if name == "logit_normal":
        for key, option, more in (("noising_bias", "flow_sigmoid_mean", 0), ("noising_weight", "flow_sigmoid_scale", 1)):
            if key in found:
                value = found[key].read(number) + more
                result.add(option, value, source_text("", found[key].place, found[key].value, value))
    weight = found.first("loss_weight_fn", default="CONSTANT")
    if str(weight.value) == "MIN_SNR_GAMMA" and family in DDPM_FAMILIES:
        strength = found.first("loss_weight_strength", default=5.0)
        result.add("snr_gamma", strength.read(number), f"{weight.place}, {strength.place}")
    elif str(weight.value) not in ("CONSTANT", "MIN_SNR_GAMMA"):
        result.leave(weight.place, "smalti has no such loss weight", fix="snr_gamma, or flow_weighting", value=weight.value)
    shift, noise = found.first("timestep_shift", default=1.0), not family or family in DDPM_FAMILIES
    if found.on("dynamic_timestep_shifting") and family not in _SHIFTED_ALIKE and not noise:
        result.copy("flow_schedule_auto_shift", found["dynamic_timestep_shifting"], switch)
    elif not noise or shift.read(number) != 1:
        result.copy("flow_schedule_shift", shift, number)
    if family in ("flux", "flux2") and any(f"{part}.guidance_scale" in found for part in tables.PARTS):
        result.copy("flux_guidance_value", _of_part(found, "guidance_scale", default=1), number)


def _noise_levels(found: Values, result: Imported) -> None:
    """The range of noise levels, which are shifted after it there. Distributions that are not uniform are scaled there."""
    uniform = result.value("timestep_distribution") == "uniform" and not result.value("flow_schedule_auto_shift")
    shift = number(result.value("flow_schedule_shift") or 1)
    for key, name in (("min_noising_strength", "timestep_min"), ("max_noising_strength", "timestep_max")):
        if key not in found or (level := found[key].read(number)) in (0, 1):
            continue
        if not uniform:
            why, fix = "the range of timesteps is read for uniform ones", f"{name}, from 0 (image) to 1 (noise)"
            result.leave(found[key].place, why, fix=fix, value=level)
            continue
        value = round(shift * level / (1 + (shift - 1) * level), 6)
        result.add(name, value, source_text("", found[key].place, level, value))
        result.settled.append(found[key].place)


def _kind_of_adapter(found: Values, kind: str, result: Imported) -> None:
    """A LoHa, or a DoRA if its lengths are those of rows."""
    name, axis = found.first("peft_type", default="LORA"), found.get("lora_decompose_output_axis")
    result.settled += [axis.place] if axis is not None and isinstance(axis.value, bool) else []
    if kind != "lora":
        return
    if str(name.value) == "LOHA":
        result.add("lora_kind", "loha", source_text("", name.place, name.value, "loha"))
    elif str(name.value) != "LORA":
        result.leave(name.place, "smalti has no such adapter", fix='lora_kind = "lokr"', value=name.value)
    elif found.on("lora_decompose") and axis is not None and axis.read(switch):
        result.add("lora_kind", "dora", f"{found['lora_decompose'].place}, {axis.place}")
    elif found.on("lora_decompose"):
        why = "without lora_decompose_output_axis a DoRA has lengths of columns there; here they are of rows"
        result.leave(found["lora_decompose"].place, why, fix='lora_kind = "dora"', value=True)


def _encoders(found: Values, family: str, kind: str, result: Imported) -> None:
    """Caption dropout, which is of each text encoder there; and text encoders that are trained, by default."""
    rates = [found[f"{each}.dropout_probability"] for each in tables.ENCODERS if f"{each}.dropout_probability" in found]
    rate = rates[0] if rates else found.first("text_encoder.dropout_probability", default=0.0)
    attempt(result, result.copy, "caption_dropout_probability", rate, number)
    result.settled += [each.place for each in rates if each.value == rate.value]
    stops = (f"{each}.stop_training_after{key}" for each in tables.ENCODERS for key in _STOPS)
    result.settled += [found[key].place for key in stops if key in found]
    trained = [each for each in tables.ENCODERS if found.on(f"{each}.train")]
    has = tables.ENCODERS[: ENCODERS.get(family, 0)]
    if has:  # whatever a file says of others
        result.settled += [found[f"{each}.train"].place for each in trained if each not in has]
        trained = [each for each in has if f"{each}.train" not in found or each in trained]
    if len(has) == 1 and "text_encoder_layer_skip" in found:
        result.copy("clip_skip", found["text_encoder_layer_skip"], whole)
    if has and kind == "lora" and trained:
        attempt(result, _adapt_encoders, found, has, trained, result)
        return
    for each in trained if family else ():
        result.leave(found.first(f"{each}.train", default=True).place, _ENCODERS, value=True)


def _adapt_encoders(found: Values, has: Sequence[str], trained: Sequence[str], result: Imported) -> None:
    """Train adapters of those text encoders that are trained, in all their linear layers, at their rates. Others' rate is 0."""
    for each in trained:
        train = found.first(f"{each}.train", default=True)
        result.add("train_text_encoder", True, train.place)
        result.settled.append(train.place)
    run, rates = found.first("learning_rate", default=3e-6), list[tuple[str, float, str]]()
    for name, each in zip(("text_encoder_lr", "text_encoder_2_lr"), has, strict=False):
        own = found.get(f"{each}.learning_rate")
        rate = own if own is not None and own.value is not None else run
        given = each in trained
        rates.append((name, rate.read(number) if given else 0.0, rate.place if given else found[f"{each}.train"].place))
    _stop(found, trained, result)
    before = result.value("learning_rate")
    for name, value, place in rates:
        if value != before:
            result.add(name, value, place)
        before = value
    line = result.lines.get("lora_targets")
    if line is not None and isinstance(line.value, list) and ".*" not in line.value:
        result.add("lora_targets", [*line.value, "fc1", "fc2"], f"{line.source}, and of the text encoders")


def _stop(found: Values, trained: Sequence[str], result: Imported) -> None:
    """When text encoders stop learning, if that is before the end: after 30 epochs unless the file says otherwise."""
    epochs, count = found.first("epochs", default=100).read(whole), _accumulation(found)
    stops, places, words = set[tuple[str, float] | None](), list[str](), list[str]()
    for each in trained:
        after, unit = (found.first(f"{each}.stop_training_after{key}", default=value) for key, value in _STOPS.items())
        option, steps = _STOP_OPTIONS.get(str(unit.value), ""), after.read(whole)
        share = steps / epochs if str(unit.value) == "EPOCH" else max(1, steps // count)
        whole_run = str(unit.value) == "NEVER" or (str(unit.value) == "EPOCH" and share >= 1)
        stops.add(None if whole_run else (option, share))
        places.append(after.place)
        words.append(f"{after.value} {str(unit.value).lower()}")
    (option, share), *others = [each or ("", 0.0) for each in stops]
    if option and share and not others:
        result.add(option, share, source_text("", ", ".join(places), " and ".join(words), share))
    elif stops != {None}:
        fix = "train_text_encoder_steps = N, after which both stop"
        result.leave(", ".join(places), "text encoders stop together here, after steps or epochs", fix=fix, value=words)


def _saving(found: Values, result: Imported) -> None:
    """Intervals in steps, which are micro-batches there. Those in minutes or epochs are listed."""
    count = _accumulation(found)
    for key, option, default in (
        ("sample_after", "validation_step_interval", "MINUTE"),
        ("save_every", "checkpoint_step_interval", "NEVER"),
        ("backup_after", "checkpoint_step_interval", "MINUTE"),
    ):
        every, unit = found.get(key), found.first(f"{key}_unit", default=default)
        if str(unit.value) == "NEVER":
            result.settled += [each.place for each in (every, unit) if each is not None and f"{key}_unit" in found]
        elif every is not None and option not in result.lines and str(unit.value) == "STEP":
            value, place = max(1, every.read(whole) // count), f"{every.place}, {unit.place}"
            result.add(option, value, source_text("", place, every.value, value, _micro_batches(count)))
        elif every is not None and option not in result.lines:
            what = f"{every.value} {str(unit.value).lower()}"
            result.leave(f"{every.place}, {unit.place}", "intervals are in steps here", fix=f"{option} = N", value=what)
    if found.on("rolling_backup"):
        kept = found.first("rolling_backup_count", default=3)
        result.add("checkpoints_total_limit", kept.read(whole), f"{kept.place}, {found['rolling_backup'].place}")


def _data(files: Sequence[Opened], found: Values, result: Imported) -> None:
    """Concepts and samples: in the configuration, in files that are given, or in files that it names."""
    for kind, key, inline, convert in (
        ("datasets", "concept_file_name", "concepts", datasets_of),
        ("prompts", "sample_definition_file_name", "samples", samples_of),
    ):
        rows, name = next(((file.content, file.name) for file in files if file.kind == kind), (None, ""))
        for other in [file for file in files if file.kind == kind][1:]:
            result.leave(other.name, "one file of this kind is imported", fix="put its entries into the other file")
        if rows is None and inline in found:
            rows, name = found[inline].value, f"{found[inline].place.partition(':')[0]}: {inline}"
            result.settled.append(found[inline].place)
        if rows is None and key in found:
            named = found[key].read(path)
            place = next((each for file in files if (each := companion(file, named)) is not None), None)
            if place is None:
                result.leave(found[key].place, f"there is no file {named}", fix="give it as a further FILE", value=named)
            else:
                result.files.append(str(place))
                result.settled.append(found[key].place)
                rows, name = open_file(place).content, place.name
        if rows is not None:
            convert(rows, name, found, result)
        elif kind == "datasets" and key not in found:
            result.leave("concepts", "these files name no images", fix="give the file of concepts as a further FILE")
    if any(file.kind == "options" for file in files):
        without_concepts(found, result)
