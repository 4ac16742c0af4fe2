"""Importing from SimpleTuner. `smalti train` reads its files too; an import makes one file of them that says everything.

What its options and its dataset keys mean is known to the dialect, which `smalti train` uses too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from smalti import InvalidOptionError
from smalti.config import PREFIX, Config, Schema, draft
from smalti.data import Catalog, DataDefaults, is_comment, parse_datasets
from smalti_migrate.command_lines import options_of, words_of
from smalti_migrate.files import Opened, companion, open_file
from smalti_migrate.rules import Imported, Left, Line, place_of

NAME = "SimpleTuner"
_DEFAULT = f"{NAME}'s default"

ENVIRONMENT: Mapping[str, str] = (
    {"RESUME_CHECKPOINT": "resume_from_checkpoint", "DATALOADER_CONFIG": "data_backend_config", "TRAINING_SEED": "seed"}
    | {"MINIMUM_RESOLUTION": "minimum_image_size", "PUSH_CHECKPOINTS": "push_checkpoints_to_hub"}
    | {"MAX_NUM_STEPS": "max_train_steps", "NUM_EPOCHS": "num_train_epochs"}
    | {"CHECKPOINTING_LIMIT": "checkpoints_total_limit", "HUB_MODEL_NAME": "hub_model_id"}
    | {"MODEL_NAME": "pretrained_model_name_or_path", "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing"}
    | {"LR_SCHEDULE": "lr_scheduler", "TRAINING_NUM_PROCESSES": "num_processes", "TRAINING_NUM_MACHINES": "num_machines"}
    | {"TRAINING_DYNAMO_BACKEND": "dynamo_backend", "TRAINER_DYNAMO_BACKEND": "dynamo_backend"}
)
"""Variables of its config.env whose options have other names. All others are options in capitals."""
_SETTING = re.compile(r"^\s*(?:export\s+)?([A-Z][A-Z0-9_]*)(\+?)=(.*)$")
_USE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)\}?")
_REMAINING = ("accelerate_config", "defaults_from", "data_backend_config")
"""Options that are not written: how this import reads its files, and what becomes [[datasets]]."""


def variables_in(text: str) -> dict[str, object]:
    """The options of a config.env."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if (match := _SETTING.match(line)) is not None:
            value = match[3].strip().strip("\"'").strip()
            value = _USE.sub(lambda use: found.get(use[1], use[0]), value)
            found[match[1]] = f"{found.get(match[1], '')} {value}".strip() if match[2] else value
    values: dict[str, object] = {
        ENVIRONMENT.get(name, name.lower()): value
        for name, value in found.items()
        if name != "TRAINER_EXTRA_ARGS" and value and "${" not in value
    }
    words, _ = words_of(found.get("TRAINER_EXTRA_ARGS", ""), {})
    return values | options_of(words)


def imported(files: Sequence[Opened], schema: Schema, family: str | None, catalog: Catalog | None) -> Imported:
    """The configuration of these files. The data file that the options name is read too, if it exists."""
    result = Imported(trainer=NAME, files=[file.name for file in files])
    options = [file for file in files if file.kind == "options"]
    data = [file for file in files if file.kind == "datasets"]
    prompt: object = None
    for file in options:
        config = _resolved(file, schema, family)
        prompt = _lines(config, file, result) or prompt
        named = _value(config, "data_backend_config")
        if named is not None and not data:
            place = companion(file, str(named))
            if place is None:
                where = place_of(file.name, "data_backend_config")
                result.leave(where, f"there is no file {named}", fix="give it as a further FILE", value=str(named))
            else:
                result.files.append(str(place))
                data = [open_file(place, "datasets")]
    for file in data:
        _datasets(file, prompt, catalog, schema, result)
    return result


def _resolved(file: Opened, schema: Schema, family: str | None) -> Config:
    """The file as `smalti train` reads it: with the names and the meanings of options here, and SimpleTuner's defaults."""
    flags = ["--accelerate_config=none", "--defaults_from=simpletuner"]
    flags += [f"--model_family={family}"] if family else []
    if file.content is not None:
        return draft(schema, flags, file=file.path, environment={})
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in variables_in(file.text).items()]
    return draft(schema, [*flags, *words], environment={})


def _value(config: Config, name: str) -> object:
    """The value of an option; None if it is not valid, which is listed."""
    try:
        return config.shown(name)
    except InvalidOptionError:
        return None


def _lines(config: Config, file: Opened, result: Imported) -> object:
    """Add every option that has a value, list what is refused, and return the instance prompt."""
    for name in config.sources:
        value = None if name in _REMAINING else _value(config, name)
        if value is not None and config.schema.options[name].is_secret(value):
            fix = f"set it in the environment, as {PREFIX}{name.upper()}"
            result.left.append(Left(place=f"{name} in {file.name}", why="secrets are not copied", fix=fix))
        elif value is not None:
            result.add(name, _plain(value), _comment(config.source(name), file))
    for problem in config.problems:
        result.left.append(Left(place=problem.where or file.name, why=problem.message, fix=problem.fix))
    result.notices += [notice for notice in config.notices if "defaults_from" not in notice]
    return _value(config, "instance_prompt")


def _plain(value: object) -> object:
    """A value as TOML and JSON have it."""
    if isinstance(value, Path):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _comment(source: str, file: Opened) -> str:
    """The key of a value: `config.json: lr_end`, or that it is SimpleTuner's default."""
    if source.startswith(_DEFAULT):
        return _DEFAULT
    key, joined, _ = source.partition("(")[2].removesuffix(")").partition(" in ")
    return place_of(file.name, key.lstrip("-")) if joined or key.startswith("--") else source


def _datasets(file: Opened, prompt: object, catalog: Catalog | None, schema: Schema, result: Imported) -> None:
    """The entries of a data file. They keep the keys that they have, which mean the same in a configuration."""
    content = file.content if isinstance(file.content, list) else []
    rows = [row for row in content if isinstance(row, dict)]
    for row in content:
        if not isinstance(row, dict):
            result.leave(file.name, "it is not a table", value=row)
    defaults = DataDefaults(instance_prompt=prompt if isinstance(prompt, str) else None)
    specs, problems = parse_datasets(rows, where=file.name, defaults=defaults, catalog=catalog, dialect=schema.dialect)
    for problem in problems:
        result.left.append(Left(place=problem.where, why=problem.message, fix=problem.fix))
    for spec in specs:
        result.notices += spec.notices
    usable = {spec.id for spec in specs}
    for index, row in enumerate(rows):
        if row.get("id") in usable:
            values = {key: value for key, value in row.items() if value not in (None, "") and not is_comment(key)}
            result.datasets.append(
                {key: Line(value=value, source=place_of(file.name, f"[{index}].{key}")) for key, value in values.items()}
            )
