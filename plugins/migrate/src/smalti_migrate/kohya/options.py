"""Importing from kohya's sd-scripts: options in TOML, JSON or a command line, datasets in TOML or JSON, and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from smalti import UserError
from smalti_migrate.command_lines import commands_in
from smalti_migrate.converters import number, path, whole
from smalti_migrate.entries import ENCODERS, fitting, leave_optimizer
from smalti_migrate.files import Opened, companion, open_file
from smalti_migrate.kohya import gui, tables
from smalti_migrate.kohya.data import datasets_of, folders_of, prompts_of
from smalti_migrate.kohya.layers import add_layers, add_text_encoders, words_in
from smalti_migrate.rules import (
    Found,
    Imported,
    Values,
    attempt,
    convert_options,
    found_in,
    source_text,
)

DEFAULT = f"default of {tables.NAME}"


def imported(files: Sequence[Opened], family: str | None = None) -> Imported:
    """The configuration that these files describe. Files that they name are read too, if they exist."""
    result = Imported(trainer=tables.NAME, files=[file.name for file in files])
    found = result.table(tables.ALL_OPTIONS, {}, "")
    script = ""
    for file in files:
        if file.kind == "options":
            script = _options_of(file, found, result) or script
    datasets = [file for file in files if file.kind == "datasets"]
    if not datasets and (named := _companion(files, found, "dataset_config", result)) is not None:
        datasets = [named]
    model = _Model.of(script, found, family, result)
    if any(file.kind == "options" for file in files):
        _convert_options(found, model, result)
    if datasets:
        attempt(result, datasets_of, datasets, found, result)
    else:
        attempt(result, folders_of, found, result)
    attempt(result, _convert_prompts, files, found, model, result)
    return result


def _options_of(file: Opened, found: Values, result: Imported) -> str:
    """Add the options of a file to `found`, with those of the file that it names, and return its script."""
    if isinstance(file.content, Mapping):
        if not gui.is_preset(file.content):
            _add(_flat(file.content), file.name, found, result)
            return ""
        options, script = gui.options_in(file.content, file.name, result)
        found |= options.over(found)
        return script
    commands = [each for each in commands_in(file.text) if each.script in (*tables.SCRIPTS, *tables.OTHER_SCRIPTS)]
    if not commands:
        raise UserError(f"{file.path} has no readable command of {tables.NAME}", fix="put it on a line of its own")
    command, *more = commands
    if more:
        names = ", ".join(each.script for each in more)
        result.leave(file.name, "one command is imported, the first", fix="put each into a file", value=names)
    for name in command.unset:
        result.leave(file.name, f"the variable {name} is not set in this file", fix="write its value in its place")
    given = Values(found_in(command.options, file.name, before="--"), tables.NAME)
    if "config_file" in given:
        named = given["config_file"].read(path)
        other = companion(file, named) or companion(file, f"{named}.toml")
        if other is None:
            result.leave(given["config_file"].place, f"there is no file {named}", fix="give it as a further FILE")
        else:
            result.files.append(str(other))
            result.settled.append(given["config_file"].place)
            _add(_flat(open_file(other).content), str(other), found, result)
    found |= given.over(found)
    launcher = result.table(tables.LAUNCHER, command.launcher, file.name, within="accelerate launch --")
    result.settled += [launcher.first("mixed_precision").place] if "mixed_precision" in found else []
    convert_options(tables.LAUNCHER, launcher, result)
    return command.script


def _add(content: object, file: str, found: Values, result: Imported) -> None:
    """Add the options of a table, which override those that are there."""
    found |= Values(found_in(content, file) if isinstance(content, Mapping) else {}, tables.NAME).over(found)


def _flat(content: object) -> dict[str, object]:
    """Options of a TOML file, of which sections are only for reading."""
    values: dict[str, object] = {}
    for key, value in content.items() if isinstance(content, Mapping) else ():
        values |= {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {str(key): value}
    return values


def _companion(files: Sequence[Opened], found: Values, key: str, result: Imported) -> Opened | None:
    """The file that an option names, if it exists; else it is listed."""
    if key not in found:
        return None
    if not isinstance(found[key].value, str):
        result.leave(found[key].place, "it is not the name of a file", value=found[key].value)
        return None
    named = path(found[key].value)
    other = next((place for file in files if (place := companion(file, named)) is not None), None)
    if other is None:
        result.leave(found[key].place, f"there is no file {named}", fix="give it as a further FILE", value=named)
        return None
    result.files.append(str(other))
    result.settled.append(found[key].place)
    return open_file(other)


class _Model:
    """Family and kind of training, as far as the files say."""

    def __init__(self, family: str, kind: str) -> None:
        self.family = family
        self.kind = kind

    @property
    def is_flow(self) -> bool:
        return self.family in ("anima", "chroma", "flux", "sd3", "lumina2")

    @classmethod
    def of(cls, script: str, found: Values, given: str | None, result: Imported) -> _Model:
        """From the script, the network module and keys that only one family has."""
        if not found and not script:
            return cls(given or "", "")
        family, kind = tables.SCRIPTS.get(script, ("", ""))
        source = f"script {script}" if script else ""
        module = found.get("network_module")
        if module is not None:
            kind = "lora" if str(module.value) in tables.NETWORKS else "other"
            if not family and (family := tables.NETWORKS.get(str(module.value), "")):
                source = module.place
        if not family and (key := next((key for key in tables.FAMILY_KEYS if key in found), None)):
            family, source = tables.FAMILY_KEYS[key], f"{found[key].place}, which only this family has"
        key, values, other = tables.VARIANTS.get(family or "sd1x", ("", (), ""))
        if key in found and found[key].value in values:
            family, source = other, found[key].place
            result.settled.append(source)
        if given:
            family, source = given, "--model_family"
        if script in tables.OTHER_SCRIPTS:
            result.leave(script, "smalti does not train what this script trains", fix="it has LoRA and full fine-tuning")
        elif family:
            result.add("model_family", family, source)
        else:
            result.leave("model_family", "no key says which model this is", fix="smalti config import FILE --model_family=sdxl")
        if kind == "other" and module is not None:
            result.leave(module.place, "only plain LoRA is supported", fix='model_type = "lora"', value=module.value)
        kind = kind if kind in ("lora", "full") else "lora" if module is not None else "full"
        source = module.place if module is not None else f"script {script}" if script else "there is no network_module"
        result.add("model_type", kind, source)
        return cls(family, kind)


def _convert_options(found: Values, model: _Model, result: Imported) -> None:
    for of_model in (_numbers, _objective, _updates):
        attempt(result, of_model, found, model, result)
    for step in (_run, _optimizer, _schedule, _saving):
        attempt(result, step, found, result)
    if model.kind == "lora":
        attempt(result, add_layers, found, model.family, result)
        attempt(result, add_text_encoders, found, model.family, result)
    rules = fitting(tables.ALL_OPTIONS, model.kind, model.family)
    if "network_weights" in found and "network_dim" not in found:
        rules = [rule for rule in rules if rule.key not in ("network_dim", "network_alpha")]
    if "release_clip_norm" in result.lines:
        rules = [rule for rule in rules if rule.key != "max_grad_norm"]
    convert_options(rules, found, result)


def _run(found: Values, result: Imported) -> None:
    folder, name = found.get("output_dir"), found.get("output_name")
    if folder is not None and name is not None:
        place = f"{folder.place}, {name.place}; a run has a directory of its own"
        result.add("output_dir", f"{folder.read(path).rstrip('/')}/{name.value}", place)
    if "max_train_epochs" in found:
        result.copy("num_train_epochs", found.first("max_train_epochs", "max_train_steps"), whole)
    else:
        result.copy("max_train_steps", found.first("max_train_steps", default=1600), whole)


def _numbers(found: Values, model: _Model, result: Imported) -> None:
    result.copy("learning_rate", found.first("unet_lr", "learning_rate", default=2e-6), number)
    for key in ("fp8_base", "fp8_base_unet"):
        if found.on(key) and model.kind == "lora":
            note = "only the linear layers of the blocks are quantised"
            result.add("base_model_precision", "fp8-torchao", f"{found.first(key, 'fp8_base_unet').place}; {note}")
            break
    if found.on("no_half_vae"):
        result.add("vae_dtype", "fp32", found["no_half_vae"].place)
    if model.family == "anima" and model.kind == "full" and "llm_adapter_lr" not in found:
        result.leave(f"{DEFAULT}: llm_adapter_lr", "the text conditioner is not trained")
    if "clip_skip" in found and ENCODERS.get(model.family) == 1:
        skipped = found["clip_skip"].read(whole) - 1
        result.add("clip_skip", skipped, source_text("", found["clip_skip"].place, skipped + 1, skipped))
    if found.on("apply_t5_attn_mask") and model.family == "chroma":
        result.settled.append(found["apply_t5_attn_mask"].place)
    if found.on("torch_compile"):
        backend = found.first("dynamo_backend", default="inductor")
        result.add("dynamo_backend", str(backend.value).lower(), f"{found['torch_compile'].place}, {backend.place}")


def _updates(found: Values, model: _Model, result: Imported) -> None:
    """How weights are updated where all of them train. With a fused backward pass the norm of each gradient is limited."""
    for key in ("full_bf16", "fused_backward_pass"):
        if not found.on(key):
            continue
        given = found[key]
        if model.kind != "full":
            result.leave(given.place, "it is for runs in which all weights train", value=given.value)
        elif key == "full_bf16":
            result.add("weights_dtype", "bf16", given.place)
        else:
            result.add("release_gradients", True, given.place)
            result.add("max_grad_norm", 0, f"{given.place} = {given.value}: the norm of all gradients is not known")
            result.copy("release_clip_norm", found.first("max_grad_norm", default=1.0), number)


def _optimizer(found: Values, result: Imported) -> None:
    given = found.get("optimizer_type")
    if given is None and found.on("use_8bit_adam"):
        given = Found(value="AdamW8bit", place=found["use_8bit_adam"].place)
    name = str(given.value).lower() if given is not None else "adamw"
    place = given.place if given is not None else f"{DEFAULT}: optimizer_type = AdamW"
    ours = tables.OPTIMIZERS.get(name)
    if ours is None and given is not None:
        leave_optimizer(given, result)
        return
    arguments = found.get("optimizer_args")
    words = words_in(arguments) if arguments is not None else {}
    if given is not None and ours == "adafactor":
        if words.pop("relative_step", "True").lower() != "false":
            leave_optimizer(Found(value="Adafactor with relative_step", place=given.place), result)
            return
        ours = "adafactor" if words.pop("scale_parameter", "True").lower() == "false" else "adafactor_scaled"
        words.pop("warmup_init", None)
    source = source_text("", place, given.value if given else "adamw", ours, tables.OPTIMIZER_NOTES.get(name, ""))
    result.add("optimizer", ours, source)
    if ours not in ("adamw", "adamw8bit", "prodigy") and "weight_decay" not in words:
        result.add("adam_weight_decay", 0.0, f"{place}: the default of this optimizer there")
    if arguments is not None:
        _optimizer_arguments(words, arguments.place, result)


def _optimizer_arguments(words: Mapping[str, str], before: str, result: Imported) -> None:
    for key, value in words.items():
        numbers = [part.strip(" ()[]") for part in value.split(",") if part.strip(" ()[]")]
        place = f"{before} {key}"
        if key == "weight_decay":
            result.add("adam_weight_decay", number(value), place)
        elif key == "eps" and len(numbers) == 1:
            result.add("adam_epsilon", number(value), place)
        elif key == "betas" and len(numbers) == 2:
            for name, beta in zip(("adam_beta1", "adam_beta2"), numbers, strict=True):
                result.add(name, number(beta), place)
        else:
            result.leave(place, "this argument of the optimizer has no option", value=value)


def _schedule(found: Values, result: Imported) -> None:
    """The schedule. One that smalti lacks is listed, and what is given with it is kept for the one that replaces it."""
    given = found.first("lr_scheduler", default="constant")
    name = str(given.value).lower()
    answer = tables.SCHEDULES.get(name, f"smalti has no schedule {name}!")
    cycles = found.get("lr_scheduler_num_cycles")
    if cycles is not None and cycles.read(whole) <= 1:
        result.settled.append(cycles.place)
    elif cycles is not None and name == "cosine_with_restarts":
        answer = "restarts of the cosine schedule are not supported!"
    if answer.endswith("!"):
        result.leave(given.place, answer.removesuffix("!"), fix='lr_scheduler = "cosine"', value=name)
    else:
        result.add("lr_scheduler", answer, source_text("", given.place, name, answer))
    if (warm := found.get("lr_warmup_steps")) is not None and answer != "constant":
        _steps(warm, "lr_warmup_steps", result)
    elif warm is not None and number(str(warm.value).rstrip("%")) > 0:
        result.add("lr_warmup_steps", 0, f"{warm.place} = {warm.value}; constant has no warm-up there")
    if "lr_scheduler_min_lr_ratio" in found:
        result.copy("lr_end_ratio", found["lr_scheduler_min_lr_ratio"], number)
    total, decay = result.value("max_train_steps"), found.get("lr_decay_steps")
    if decay is not None and answer == "warmup_stable_decay":
        share = _share(decay.value)
        share = share if share is not None else decay.read(whole) / total if isinstance(total, int) else None
        if share is None:
            why = "it is a number of steps there, and a share of the run here"
            result.leave(decay.place, why, fix="lr_decay_share = 0.1", value=decay.value)
        else:
            result.add("lr_decay_share", round(share, 6), source_text("", decay.place, decay.value, share))


def _share(value: object) -> float | None:
    """A share of the run, which is a number below 1 or has a percent sign; None for a number of steps."""
    if isinstance(value, str) and value.endswith("%"):
        return float(number(value[:-1])) / 100
    share = float(number(value))
    return share if 0 < share < 1 else None


def _steps(given: Found, name: str, result: Imported) -> None:
    """A number of steps, which may be a share of the run."""
    share, total = _share(given.value), result.value("max_train_steps")
    if share is None:
        result.add(name, given.read(whole), given.place)
    elif isinstance(total, int):
        result.add(name, round(share * total), source_text("", given.place, given.value, None, f"of {total} steps"))
    else:
        result.leave(
            given.place, "it is a share of the run, whose steps are not known yet", fix=f"{name} = N", value=given.value
        )


def _objective(found: Values, model: _Model, result: Imported) -> None:
    if found.on("v_parameterization"):
        result.add("prediction_type", "v_prediction", found["v_parameterization"].place)
    if str(found.first("loss_type").value) in ("huber", "smooth_l1"):
        result.copy("huber_schedule", found.first("huber_schedule", default="snr"))
    for key, name in (("min_timestep", "timestep_min"), ("max_timestep", "timestep_max")):
        if key in found and (step := found[key].read(whole)) not in (0, 1000):
            _noise_level(found[key], name, step, model, result)
    if model.is_flow:
        _flow(found, model.family, result)


def _noise_level(given: Found, name: str, step: int, model: _Model, result: Imported) -> None:
    """The first step of noise that is trained, or the one after the last."""
    if model.is_flow:
        fix = f"{name}, from 0 (image) to 1 (noise)"
        result.leave(given.place, "the range of timesteps is read for SD and SDXL", fix=fix, value=given.value)
        return
    result.add(name, step / 1000, source_text("", given.place, step, step / 1000))
    result.settled.append(given.place)


def _flow(found: Values, family: str, result: Imported) -> None:
    """Timesteps of flow models: how they are sampled, and how they are shifted."""
    sampling = found.first("timestep_sampling", default={"lumina2": "shift", "anima": "sigmoid"}.get(family, "sigma"))
    scheme = found.first("weighting_scheme", default="uniform")
    shift = found.first("discrete_flow_shift", default={"lumina2": 6.0, "anima": 1.0}.get(family, 3.0))
    shift = found.first("training_shift", default=1.0) if family == "sd3" else shift
    way = str(sampling.value) if family != "sd3" else "sigma"
    by_sigmoid = ("sigmoid", "shift", "flux_shift", "nextdit_shift")
    if way == "sigma" or way not in ("uniform", *by_sigmoid):
        if way != "sigma":
            result.leave(sampling.place, "smalti has no such distribution", fix="--timestep_distribution", value=way)
        name = tables.TIMESTEPS.get(str(scheme.value), "uniform")
        place = f"{scheme.place}, {sampling.place}" if family != "sd3" else scheme.place
        result.add("timestep_distribution", name, source_text("", place, scheme.value, name))
        for key, ours, at in (
            ("logit_mean", "flow_sigmoid_mean", "logit_normal"),
            ("logit_std", "flow_sigmoid_scale", "logit_normal"),
        ):
            if name == at and key in found:
                result.copy(ours, found[key], number)
    else:
        name = "uniform" if way == "uniform" else "logit_normal"
        result.add("timestep_distribution", name, source_text("", sampling.place, way, name))
        if way in by_sigmoid and "sigmoid_scale" in found:
            result.copy("flow_sigmoid_scale", found["sigmoid_scale"], number)
    if way in ("flux_shift", "nextdit_shift"):
        result.add("flow_schedule_auto_shift", True, f"{sampling.place} = {way}")
    elif way in ("uniform", "sigmoid"):
        result.add("flow_schedule_shift", 1, f"{sampling.place} = {way}, which has no shift")
    else:
        result.copy("flow_schedule_shift", shift, number)
    if str(scheme.value) in ("sigma_sqrt", "cosmap"):
        result.copy("flow_weighting", scheme)
    if family == "flux":
        result.copy("flux_guidance_value", found.first("guidance_scale", default=3.5), number)
    if family in ("chroma", "flux"):
        kind = found.first("model_prediction_type", default="sigma_scaled")
        if kind.value != "raw":
            result.leave(kind.place, "smalti computes the loss of the velocity itself, which is raw there", value=kind.value)
        result.settled.append(kind.place)


def _saving(found: Values, result: Imported) -> None:
    every, last = found.get("save_every_n_steps"), found.get("save_last_n_steps")
    if every is not None and last is not None and every.read(whole) > 0:
        count = max(1, last.read(whole) // every.read(whole))
        result.add("checkpoints_total_limit", count, f"{last.place} = {last.value}, a number of steps there")
    if (epochs := found.get("save_last_n_epochs")) is not None:
        result.add("checkpoints_total_limit", epochs.read(whole), f"{epochs.place}; checkpoints are counted here, not epochs")
    if (repository := found.get("huggingface_repo_id")) is not None and repository.value:
        result.copy("hub_model_id", repository)
        for name in ("push_to_hub", "push_checkpoints_to_hub"):
            result.add(name, True, repository.place)
        if (visibility := found.get("huggingface_repo_visibility")) is not None:
            result.add("hub_private", visibility.value != "public", f"{visibility.place} = {visibility.value}")
    if (trackers := found.get("log_with")) is not None:
        names = ["tensorboard", "wandb"] if trackers.value == "all" else [str(trackers.value)]
        result.add("report_to", names, trackers.place)


def _convert_prompts(files: Sequence[Opened], found: Values, model: _Model, result: Imported) -> None:
    prompts = [file for file in files if file.kind == "prompts"]
    if not prompts and "sample_prompts" in found:
        value, name = found["sample_prompts"].value, found["sample_prompts"].place
        if isinstance(value, str) and not value.lower().endswith((".txt", ".toml", ".json")):
            prompts_of(Opened(path=Path(name), text=value, content=None, kind="prompts"), model.family, result)
            result.settled.append(name)
            return
        other = _companion(files, found, "sample_prompts", result)
        prompts = [other] if other is not None else []
    for file in prompts:
        prompts_of(file, model.family, result)
