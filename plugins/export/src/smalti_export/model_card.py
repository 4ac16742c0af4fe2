"""The model card beside an export: a README.md for the Hugging Face Hub, with settings, images and how to load the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import cast

import yaml

from smalti import Config
from smalti.checkpoint import Usage
from smalti.config import DataOptions
from smalti.rundir import RunDirectory

FILE = "README.md"
MARK = "<!-- This card was written by smalti. Remove this line, and uploads keep the card that is on the Hub. -->"
_IMAGES = 4
_SETTINGS = (
    *("model_type", "resolution", "train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler"),
    *("lr_warmup_steps", "optimizer", "mixed_precision", "lora_rank", "lora_alpha", "base_model_precision", "prediction_type"),
    *("timestep_distribution", "flow_schedule_shift", "snr_gamma", "caption_dropout_probability", "seed"),
)
"""The options that a card shows. No folders, and nothing of the machine."""


def sampled_images(run: RunDirectory, step: int) -> list[tuple[str, Path]]:
    """Up to four (prompt, file) of the last validation up to this step whose files are still there."""
    validations = [event for event in run.events() if event.kind == "sample" and (event.step or 0) <= step]
    for event in reversed(validations):
        images = cast(list[Mapping[str, str]], event.fields.get("images", []))
        found = [(image["prompt"], run.path / image["path"]) for image in images]
        if found := [(prompt, path) for prompt, path in found if path.is_file()]:
            return found[:_IMAGES]
    return []


def model_card(
    title: str,
    config: Config,
    *,
    family: str,
    step: int,
    averaged: bool,
    metadata: Mapping[str, object],
    images: Iterable[tuple[str, str]],
    usages: Iterable[Usage],
) -> str:
    """The text of the card.

    Args:
        metadata: what the family adds to the head of the card, such as `base_model`. A path there is left out.
        images: (prompt, name of the file in the export).
    """
    images = tuple(images)
    head = _head(config, metadata, images)
    kind = "EMA weights" if averaged else "weights"
    base = f" from {head['base_model']}" if "base_model" in head else ""
    made = f"The {kind} of step {step} of a model of the family {family}, trained{base} with smalti {version('smalti')}."
    text = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    return "\n".join((f"---\n{text}---\n{MARK}\n", f"# {title}\n", made, *_body(config, head, images, usages)))


def _head(config: Config, metadata: Mapping[str, object], images: tuple[tuple[str, str], ...]) -> dict[str, object]:
    named = _on_the_hub(str(metadata.get("base_model", "")))
    found = {name: value for name, value in metadata.items() if named or not name.startswith("base_model")}
    found["tags"] = [*cast(list[str], metadata.get("tags", [])), "smalti"]
    if prompt := config[DataOptions].instance_prompt:
        found["instance_prompt"] = prompt
    if images:
        found["widget"] = [{"text": prompt, "output": {"url": name}} for prompt, name in images]
    return found


def _on_the_hub(model: str) -> bool:
    """Whether a model is named as on the Hub: a path says something about one machine only."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).exists()


def _body(
    config: Config, head: Mapping[str, object], images: Iterable[tuple[str, str]], usages: Iterable[Usage]
) -> Iterator[str]:
    yield "The license of the base model applies.\n"
    if "instance_prompt" in head:
        yield f"Trained with the prompt `{_plain(str(head['instance_prompt']))}`: use its words in prompts.\n"
    for prompt, name in images:
        yield f"![{_plain(prompt)}]({name})\n*{_plain(prompt)}*\n"
    if usages := [usage for usage in usages if not usage.needs_run]:
        yield "## Use\n"
    for usage in usages:
        yield f"{usage.tool}:\n\n```\n{usage.text}\n```\n"
    yield "## Training\n"
    yield "| option | value |\n|---|---|"
    values = config.values()
    for name in _SETTINGS:
        value = values.get(name)
        if value not in (None, "", "no_change"):
            yield f"| `{name}` | {f'{value:g}' if isinstance(value, float) else value} |"
    yield ""


def _plain(text: str) -> str:
    """In one line, without what ends a link or emphasis."""
    return " ".join(text.split()).translate(str.maketrans("", "", "[]()*`"))
