"""Importing from OneTrainer: its configuration or preset in JSON, with its concepts and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smalti.migration.converters import number, path, switch, whole
from smalti.migration.entries import DDPM_FAMILIES, flattened, leave_optimizer, without_adapter
from smalti.migration.files import Opened, companion, open_file
from smalti.migration.onetrainer.data import datasets_of, samples_of
from smalti.migration.onetrainer.layers import add_layers
from smalti.migration.onetrainer.tables import (
    BASE_DTYPES,
    ENCODERS,
    FAMILIES,
    IGNORED,
    METHODS,
    NAME,
    OLD_KEYS,
    OPTIMIZER_NOTES,
    OPTIMIZERS,
    OPTIONS,
    PARTS,
    QUANTISED,
    SCHEDULES,
)
from smalti.migration.rules import Found, Imported, Rule, apply, attempt, found_in, source_text

Values = dict[str, Found]
DEFAULT = f"default of {NAME}"


def imported(files: Sequence[Opened], family: str | None = None) -> Imported:
    """The configuration of these files. Concepts and samples are in it, or in files that it names or that are given too."""
    result = Imported(trainer=NAME, files=[file.name for file in files])
    found: Values = {}
    for file in files:
        if file.kind == "options" and isinstance(file.content, Mapping):
            known = {key: value for key, value in file.content.items() if not str(key).startswith(IGNORED)}
            flat = {OLD_KEYS.get(key, key): value for key, value in flattened(known).items()}
            found |= found_in(flat, file.name)
    if not any(file.kind == "options" for file in files):
        attempt(result, _data, files, found, result)
        return result
    chosen, kind = _model(found, family, result)
    for step in (_optimizer, _ema, _loss, _precision, _saving):
        attempt(result, step, found, result)
    attempt(result, _schedule, found, result)
    attempt(result, _base, found, kind, result)
    attempt(result, _timesteps, found, chosen, result)
    _encoders(found, chosen, result)
    attempt(result, add_layers, found, chosen, kind, DEFAULT, result)
    attempt(result, _data, files, found, result)
    rules: Sequence[Rule] = OPTIONS
    if kind != "lora":
        rules, found = without_adapter(rules, found)
    apply(rules, found, result)
    return result


def given(found: Values, key: str, default: object) -> Found:
    """The value of a key, or the default that OneTrainer has for it."""
    return found.get(key) or Found(value=default, place=f"{DEFAULT}: {key}")


def _model(found: Values, family: str | None, result: Imported) -> tuple[str, str]:
    """Family and kind of training."""
    model = given(found, "model_type", "STABLE_DIFFUSION_15")
    chosen = family or FAMILIES.get(str(model.value), "")
    if chosen:
        result.add("model_family", chosen, "--model_family" if family else source_text("", model.place, model.value, chosen))
    else:
        fix = "`smalti plugins` lists the families"
        result.leave(model.place, "smalti does not have this model", fix=fix, value=model.value)
    method = given(found, "training_method", "FINE_TUNE")
    kind = METHODS.get(str(method.value), "")
    if kind:
        result.add("model_type", kind, source_text("", method.place, method.value, kind))
    else:
        fix = 'model_type = "lora", or "full"'
        result.leave(method.place, "smalti trains whole models and LoRA", fix=fix, value=method.value)
    return chosen, kind


def _accumulation(found: Values) -> int:
    return max(1, given(found, "gradient_accumulation_steps", 1).read(whole))


def _micro_batches(count: int) -> str:
    """What a comment says about a number of micro-batches that became one of steps."""
    return f"micro-batches there, of which a step has {count}" if count > 1 else ""


def _optimizer(found: Values, result: Imported) -> None:
    rates = [found[f"{part}.learning_rate"] for part in PARTS if f"{part}.learning_rate" in found]
    rate = rates[0] if rates else given(found, "learning_rate", 3e-6)
    result.add("learning_rate", rate.read(number), rate.place)
    named = given(found, "optimizer.optimizer", "ADAMW")
    if "optimizer" in found:  # older files
        named = found.pop("optimizer")
    name = str(named.value).upper()
    ours = OPTIMIZERS.get(name)
    if ours is None:
        leave_optimizer(named, result)
    else:
        result.add("optimizer", ours, source_text("", named.place, name, ours, OPTIMIZER_NOTES.get(name, "")))
    for key, option, optimizers in (
        ("weight_decay", "adam_weight_decay", set(OPTIMIZERS.values())),
        ("beta1", "adam_beta1", {"adamw", "adamw8bit", "lion"}),
        ("beta2", "adam_beta2", {"adamw", "adamw8bit", "lion"}),
        ("eps", "adam_epsilon", {"adamw", "adamw8bit"}),
    ):
        if ours in optimizers and (value := found.get(f"optimizer.{key}")) is not None:
            result.add(option, value.read(number), value.place)
    for key in [key for key in found if key.startswith("optimizer.")]:
        found.pop(key)  # the settings of every optimizer are in the file
    if "multi_gpu" in found and found["multi_gpu"].read(switch) and "device_indexes" in found:
        devices = [each for each in str(found["device_indexes"].value).split(",") if each.strip()]
        if devices:
            result.add("num_processes", len(devices), found["device_indexes"].place)
    if "compile" in found and found["compile"].read(switch):
        result.add("dynamo_backend", "inductor", found["compile"].place)


def _schedule(found: Values, result: Imported) -> None:
    """The schedule. Its warm-up counts micro-batches, and is a share of the run up to 1."""
    named = given(found, "learning_rate_scheduler", "CONSTANT")
    answer = SCHEDULES.get(str(named.value).upper(), "smalti has no such schedule!")
    if answer.endswith("!"):
        result.leave(named.place, answer.removesuffix("!"), fix='lr_scheduler = "cosine"', value=named.value)
        return
    result.add("lr_scheduler", answer, source_text("", named.place, named.value, answer))
    warm, count = given(found, "learning_rate_warmup_steps", 200), _accumulation(found)
    steps = warm.read(number)
    if steps > 1:
        value = int(steps / count)
        result.add("lr_warmup_steps", value, source_text("", warm.place, warm.value, value, _micro_batches(count)))
    elif steps > 0:
        why = "it is a share of the run, whose steps follow from the images"
        result.leave(warm.place, why, fix="lr_warmup_steps = N; `smalti train FILE --dry-run` says the steps", value=steps)


def _ema(found: Values, result: Imported) -> None:
    """The EMA. Its decay is per update there, and per step here."""
    mode = given(found, "ema", "OFF")
    if str(mode.value).upper() not in ("GPU", "CPU"):
        return
    result.add("use_ema", True, source_text("", mode.place, mode.value, True))
    result.add("ema_device", "cpu" if str(mode.value).upper() == "CPU" else "accelerator", mode.place)
    decay, every = given(found, "ema_decay", 0.999), given(found, "ema_update_step_interval", 5)
    count = max(1, every.read(whole))
    value = round(float(decay.read(number)) ** (1 / count), 8)
    result.add("ema_decay", value, source_text("", decay.place, decay.value, value, f"of {count} steps there, of one here"))


def _loss(found: Values, result: Imported) -> None:
    mse, huber = given(found, "mse_strength", 1.0), given(found, "huber_strength", 0.0)
    if mse.read(number) == 0 and huber.read(number) > 0:
        result.add("loss_type", "huber", huber.place)
        result.add("huber_c", given(found, "huber_delta", 1.0).read(number), given(found, "huber_delta", 1.0).place)
    elif huber.read(number) > 0:
        result.leave(huber.place, "losses are not combined", fix='loss_type = "l2", or "huber"', value=huber.value)
    if mse.read(number) not in (0, 1):
        result.leave(mse.place, "the loss has no factor; the learning rate has the same effect", value=mse.value)
    for key, name in (("force_v_prediction", "v_prediction"), ("force_epsilon_prediction", "epsilon")):
        if key in found and found[key].read(switch):
            result.add("prediction_type", name, found[key].place)


def _precision(found: Values, result: Imported) -> None:
    vae = found.get("vae.weight_dtype")
    name = BASE_DTYPES.get(str(vae.value), "") if vae is not None and str(vae.value) != "FLOAT_16" else ""
    if vae is not None and name:
        result.add("vae_dtype", name, source_text("", vae.place, vae.value, name))
    legacy = found.get("gradient_checkpointing")
    parts = [found[f"{part}.gradient_checkpointing"] for part in PARTS if f"{part}.gradient_checkpointing" in found]
    way = legacy or (parts[0] if parts else Found(value=True, place=f"{DEFAULT}: gradient_checkpointing"))
    on = str(way.value).upper() in ("ON", "TRUE", "CPU_OFFLOADED")
    result.add("gradient_checkpointing", on, source_text("", way.place, way.value, on))
    if str(way.value).upper() == "CPU_OFFLOADED":
        result.leave(way.place, "activations are recomputed, not offloaded", fix="see docs/memory.md", value=way.value)


def _base(found: Values, kind: str, result: Imported) -> None:
    """The dtype of the frozen weights of a LoRA."""
    given_dtypes = [found.get(key) for key in (*(f"{part}.weight_dtype" for part in PARTS), "weight_dtype")]
    dtype = next((each for each in given_dtypes if each is not None and str(each.value) != "NONE"), None)
    if dtype is None:
        return
    name = str(dtype.value)
    if kind != "lora":
        if name != "FLOAT_32":
            result.leave(dtype.place, "trained weights are fp32 here", fix="see docs/memory.md", value=name)
    elif name in QUANTISED:
        result.add("base_model_precision", QUANTISED[name], source_text("", dtype.place, name, QUANTISED[name]))
    elif name in BASE_DTYPES:
        result.add("lora_base_dtype", BASE_DTYPES[name], source_text("", dtype.place, name, BASE_DTYPES[name]))
    else:
        result.leave(dtype.place, "smalti has no such precision", fix='base_model_precision = "nf4-torchao"', value=name)


def _timesteps(found: Values, family: str, result: Imported) -> None:
    way = given(found, "timestep_distribution", "UNIFORM")
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
    weight = found.get("loss_weight_fn")
    if weight is not None and str(weight.value) == "MIN_SNR_GAMMA" and family in DDPM_FAMILIES:
        result.add("snr_gamma", given(found, "loss_weight_strength", 5.0).read(number), weight.place)
    elif weight is not None and str(weight.value) not in ("CONSTANT", "MIN_SNR_GAMMA"):
        result.leave(weight.place, "smalti has no such loss weight", fix="snr_gamma, or flow_weighting", value=weight.value)
    if not family or family in DDPM_FAMILIES:
        return
    if "dynamic_timestep_shifting" in found and found["dynamic_timestep_shifting"].read(switch):
        result.add("flow_schedule_auto_shift", True, found["dynamic_timestep_shifting"].place)
    else:
        shift = given(found, "timestep_shift", 1.0)
        result.add("flow_schedule_shift", shift.read(number), shift.place)
    guidance = next((found[f"{part}.guidance_scale"] for part in PARTS if f"{part}.guidance_scale" in found), None)
    if guidance is not None and family in ("flux", "flux2"):
        result.add("flux_guidance_value", guidance.read(number), guidance.place)


def _encoders(found: Values, family: str, result: Imported) -> None:
    """Caption dropout, which is of each text encoder there; and text encoders that are trained, by default."""
    rates = [found[f"{each}.dropout_probability"] for each in ENCODERS if f"{each}.dropout_probability" in found]
    rate = rates[0] if rates else Found(value=0.0, place=f"{DEFAULT}: text_encoder.dropout_probability")
    attempt(result, lambda: result.add("caption_dropout_probability", rate.read(number), rate.place))
    for each in ENCODERS if family else ():
        train = found.get(f"{each}.train")
        if train is not None and train.value is True:
            result.leave(train.place, "text encoders are not trained here", value=True)
    if family == "sdxl" and "text_encoder.train" not in found:
        result.leave(f"{DEFAULT}: text_encoder.train", "text encoders are not trained here", value=True)


def _saving(found: Values, result: Imported) -> None:
    """Intervals in steps, which are micro-batches there. Those in minutes or epochs are listed."""
    count = _accumulation(found)
    for key, unit_key, option in (
        ("sample_after", "sample_after_unit", "validation_step_interval"),
        ("save_every", "save_every_unit", "checkpoint_step_interval"),
        ("backup_after", "backup_after_unit", "checkpoint_step_interval"),
    ):
        every, unit = found.get(key), found.get(unit_key)
        if every is None or unit is None or option in result.lines:
            continue
        if str(unit.value) == "STEP":
            value = max(1, every.read(whole) // count)
            result.add(option, value, source_text("", every.place, every.value, value, _micro_batches(count)))
        elif str(unit.value) in ("EPOCH", "MINUTE", "HOUR", "SECOND"):
            what = f"{every.value} {str(unit.value).lower()}"
            result.leave(every.place, "intervals are in steps here", fix=f"{option} = N", value=what)
    if "rolling_backup" in found and found["rolling_backup"].read(switch):
        kept = given(found, "rolling_backup_count", 3)
        result.add("checkpoints_total_limit", kept.read(whole), kept.place)


def _data(files: Sequence[Opened], found: Values, result: Imported) -> None:
    """Concepts and samples: in the configuration, in files that are given, or in files that it names."""
    for kind, key, inline, convert in (
        ("datasets", "concept_file_name", "concepts", datasets_of),
        ("prompts", "sample_definition_file_name", "samples", samples_of),
    ):
        rows, name = next(((file.content, file.name) for file in files if file.kind == kind), (None, ""))
        if rows is None and inline in found:
            rows, name = found[inline].value, f"{found[inline].place.partition(':')[0]}: {inline}"
        if rows is None and key in found:
            named = found[key].read(path)
            place = next((each for file in files if (each := companion(file, named)) is not None), None)
            if place is None:
                result.leave(found[key].place, f"there is no file {named}", fix="give it as a further FILE", value=named)
            else:
                result.files.append(str(place))
                rows, name = open_file(place).content, place.name
        if isinstance(rows, list):
            convert(rows, name, found, result)
        elif kind == "datasets" and rows is None and key not in found:
            result.leave("concepts", "these files name no images", fix="give the file of concepts as a further FILE")
    epochs = given(found, "epochs", 100)
    if "num_train_epochs" not in result.lines and any(file.kind == "options" for file in files):
        result.add("num_train_epochs", epochs.read(whole), epochs.place)
