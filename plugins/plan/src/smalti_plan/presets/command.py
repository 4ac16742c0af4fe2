"""`smalti config new`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import click

from smalti import FamilyEntry, UserError
from smalti.cli import Command, CommandLine, on_terminal, write_output
from smalti.plugins import known_families
from smalti_plan.presets.choosing import planned
from smalti_plan.presets.request import USUAL_IMAGES, Goal, Request, card_of, images_in, model_of
from smalti_plan.presets.text import as_json as json_of, as_toml, memory_of, time_of

_MOST_GPUS = 16
_PROMPT = "a photo of zwx"
"""Written if there is neither a caption nor a prompt."""


@click.command(
    "new",
    cls=Command,
    examples=(
        "smalti config new",
        "smalti config new --model=sdxl --card=12GB --data=photos --to=config.toml",
        "smalti config new --model=flux --goal=full --card=h100-80g --gpus=8",
    ),
)
@click.option("--model", metavar="NAME", help="FAMILY, FAMILY/FLAVOUR or a Hub id, such as sd3/3.5-large.")
@click.option("--card", metavar="NAME", help="Card of the planner's table, or its memory, such as 12GB. Default: this node's.")
@click.option("--gpus", metavar="N", type=click.IntRange(1, _MOST_GPUS), help="GPUs, all in one node. Default: 1.")
@click.option("--goal", type=click.Choice(["lora", "full"]), help="Train a LoRA, or all weights. Default: lora.")
@click.option("--data", metavar="FOLDER", type=click.Path(path_type=Path), help="Folder of the images. Default: photos.")
@click.option("--images", metavar="N", type=click.IntRange(1), help=f"Number of images. Default: counted, else {USUAL_IMAGES}.")
@click.option("--prompt", metavar="TEXT", help="Caption of all images. Default: each has its own in a text file beside it.")
@click.option("--to", "target", metavar="FILE", type=click.Path(path_type=Path), help="Write a new file, ending in .toml.")
@click.option("--overwrite", is_flag=True, help="Replace the file of --to if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def new(
    model: str | None,
    card: str | None,
    gpus: int | None,
    goal: Goal | None,
    data: Path | None,
    images: int | None,
    prompt: str | None,
    target: Path | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a configuration for a model, a card and a folder of images.

    Of all ways to train, the planner's formulas choose the fastest that fits: precision of frozen weights, recomputation,
    sharding, offload, images at once. The rest are values that others publish for such runs. Each line says why. On a
    terminal, what is not given is asked for. Needs no GPU, no weights and no network.
    """
    command_line = CommandLine.parse([])
    families = known_families(command_line.plugins)
    asks = not as_json and on_terminal()
    if asks and model is None:
        model, card, gpus, goal, data, target = _asked(families, card, gpus, goal, data, target)
    target = _checked(target, overwrite=overwrite)
    request = _request(families, model, card or "detected", gpus or 1, goal or "lora", data or Path("photos"), images, prompt)
    try:
        made = planned(request, command_line.schema, command_line.plugins, lambda line: click.echo(f"smalti: {line}", err=True))
    except UserError as error:
        if error.fix != "--model_type=full":
            raise
        raise UserError(error.message, fix="--goal=full") from error  # which is the option of this command
    text = as_toml(made, _again(request, card, images))
    if target is not None or not as_json:
        write_output(text, target, replace=overwrite, fix="--overwrite replaces it")
    if as_json:
        click.echo(json.dumps(json_of(made, text, None if target is None else str(target)), indent=2))
        return
    for line in (memory_of(made), time_of(made), *(f"note: {notice}" for notice in made.notices)):
        click.echo(f"smalti: {line}", err=True)


def _asked(
    families: Mapping[str, FamilyEntry],
    card: str | None,
    gpus: int | None,
    goal: Goal | None,
    data: Path | None,
    target: Path | None,
) -> tuple[str, str, int, Goal, Path, Path]:
    """What is not given, from the terminal."""
    for name, entry in families.items():
        flavours = f" ({', '.join(f'{name}/{each}' for each in entry.flavours)})" if len(entry.flavours) > 1 else ""
        click.echo(f"  {name:<12} {entry.title}{flavours}", err=True)
    model = click.prompt("Model", default="sdxl" if "sdxl" in families else next(iter(families), None), err=True)
    card = card or click.prompt("Card, or its memory", default="detected", err=True)
    gpus = gpus or click.prompt("GPUs", default=1, type=click.IntRange(1, _MOST_GPUS), err=True)
    goal = goal or cast(Goal, click.prompt("Goal", default="lora", type=click.Choice(["lora", "full"]), err=True))
    data = data or Path(click.prompt("Folder of the images", default="photos", err=True))
    target = target or Path(click.prompt("Write to", default="config.toml", err=True))
    return model, card, gpus, goal, data, target


def _checked(target: Path | None, *, overwrite: bool) -> Path | None:
    """The file to write, before the seconds that planning takes. Raises UserError."""
    if target is None:
        return None
    target = target.expanduser()
    if target.suffix.lower() != ".toml":
        raise UserError(f"{target} does not end in .toml", fix=f"--to={target.with_suffix('.toml')}")
    if target.exists() and not overwrite:
        raise UserError(f"{target} already exists", fix="--overwrite replaces it")
    return target


def _request(
    families: Mapping[str, FamilyEntry],
    model: str | None,
    card: str,
    gpus: int,
    goal: Goal,
    data: Path,
    images: int | None,
    prompt: str | None,
) -> Request:
    """Raises UserError for a model or a card that is not known, and for a folder without images."""
    if model is None:
        raise UserError("no model given", fix=f"--model=NAME: {', '.join(families)}")
    entry, weights = model_of(model, families)
    data = data.expanduser()
    found, caption = images_in(data) if data.is_dir() else (0, "")
    if data.is_dir() and not found:
        raise UserError(f"no images in {data}", fix="--data=FOLDER with the images in it")
    if prompt is None:
        prompt = "" if caption or not found else _PROMPT
    return Request(
        entry=entry,
        weights=weights,
        goal=goal,
        device=card_of(card),
        gpus=gpus,
        data=data,
        images=images or found or USUAL_IMAGES,
        counted=bool(found) and images in (None, found),
        prompt=prompt,
        example=caption,
        output=Path("runs") / f"{data.resolve().name}-{entry.name}-{goal}",
    )


def _again(request: Request, card: str | None, images: int | None) -> list[str]:
    """The command with what was given or asked for."""
    words = ["smalti", "config", "new", f"--model={request.weights or request.entry.name}", f"--goal={request.goal}"]
    words += [f"--card={card}" if card else "", f"--gpus={request.gpus}", f"--data={request.data}"]
    words += [f"--images={images}" if images else "", f"--prompt={request.prompt}" if request.prompt else ""]
    return [word for word in words if word]
