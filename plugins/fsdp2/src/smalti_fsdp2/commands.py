"""`smalti detect-blocks`: the repeated blocks of a model. Imports torch only when the answer is not cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from smalti import Config, UserError
from smalti.cli import Command, CommandLine, counted, format_bytes, print_table
from smalti.config import Schema
from smalti.models import BlockClass, Structure
from smalti_fsdp2.blocks import unknown_classes
from smalti_fsdp2.detection import FLAG, Detection, detect
from smalti_fsdp2.options import FsdpOptions


@click.command(
    "detect-blocks",
    cls=Command,
    context_settings={"ignore_unknown_options": True},
    examples=("smalti detect-blocks --model_family=toy --toy_depth=12", "smalti detect-blocks config.toml --apply config.toml"),
)
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.option("--refresh", is_flag=True, help="Ignore the cached answer.")
@click.option("--apply", "file", type=click.Path(path_type=Path), help="Write the block classes to this configuration file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def detect_blocks(arguments: tuple[str, ...], refresh: bool, file: Path | None, as_json: bool) -> None:
    """Find the repeated blocks of a model that FSDP should wrap.

    Takes the same arguments as `smalti train`; --model_family is enough for most models. The model is built without weights,
    from its configuration. The answer is cached.

    --apply writes the suggested classes, or those given with --fsdp_transformer_layer_cls_to_wrap.
    """
    command_line = CommandLine.parse(arguments)
    config = command_line.config()
    for notice in config.notices:
        _note(notice)
    detection = detect(config, command_line.plugins, refresh=refresh, report=_note)
    applied = _apply(detection, config, command_line.schema, file.expanduser()) if file is not None else {}
    if as_json:
        click.echo(json.dumps({**detection.as_json(), **({"applied": applied} if applied else {})}, indent=2))
        return
    _print(detection)
    if applied:
        old = "" if applied["old"] is None else f" (before: {json.dumps(applied['old'])})"
        said = f"= {json.dumps(applied['new'])}{old}" if applied["written"] else "unchanged"
        click.echo(f"\n{applied['file']}: {applied['key']} {said}")


def _note(text: str) -> None:
    click.echo(f"smalti: note: {text}", err=True)


def _apply(detection: Detection, config: Config, schema: Schema, file: Path) -> dict[str, object]:
    """Write the choice of the command line, or else the suggestion, into a configuration file; what became of it."""
    from smalti.config import set_option

    chosen = config[FsdpOptions].fsdp_transformer_layer_cls_to_wrap if config.source(FLAG).startswith("flag") else ()
    if problems := unknown_classes(chosen, detection.structure.modules):
        raise UserError(problems[0].message, fix=problems[0].fix)
    names = chosen or detection.structure.suggested
    if not names:
        raise UserError("nothing repeats in this model, so there is nothing to apply", fix=f"--{FLAG}=CLASS,...")
    edit = set_option(file, schema, FLAG, list(names))
    return {"file": str(edit.path), "key": edit.key, "old": edit.old, "new": edit.new, "written": edit.written}


# --- for people -----------------------------------------------------------------------------------------------------


def _print(detection: Detection) -> None:
    for title, text in _head(detection):
        click.echo(f"{title:<12} {text}")
    structure = detection.structure
    if structure.classes:
        click.echo()
        rows = [_row(each, structure) for each in structure.classes]
        print_table(("", "class", "blocks", "parameters", "share", "each", "where", ""), rows, right=(2, 3, 4, 5))
    click.echo()
    for title, text in _meaning(detection):
        click.echo(f"{title:<12} {text}")


def _head(detection: Detection) -> Iterator[tuple[str, str]]:
    structure = detection.structure
    source = " ".join(filter(None, (detection.model_flavour, detection.pretrained_model)))
    yield "model", f"{detection.model_family} {source}".rstrip()
    yield "parameters", f"{structure.parameters:,}; {counted(structure.buffers, 'element')} in buffers"
    how = "cached; --refresh ignores the cache" if detection.cached else "just now"
    yield "looked at", f"{detection.detected_at}, without weights ({how})"


def _row(each: BlockClass, structure: Structure) -> tuple[str, ...]:
    marks = {
        "the family's choice": each.named,
        "inside other blocks": each.nested,
        "in _no_split_modules": each.class_name in structure.no_split_modules,
    }
    return (
        "*" if each.class_name in structure.suggested else "",
        each.class_name,
        f"{each.occurrences:,}",
        f"{each.parameters:,}",
        f"{each.share:.1%}",
        f"{each.largest:,}" if each.smallest == each.largest else f"{each.smallest:,} to {each.largest:,}",
        each.first if each.occurrences == 1 else f"{each.first} ... {each.last}",
        ", ".join(mark for mark, holds in marks.items() if holds),
    )


def _meaning(detection: Detection) -> Iterator[tuple[str, str]]:
    structure = detection.structure
    if structure.no_split_modules:
        yield "no split", f"{', '.join(structure.no_split_modules)} (the model's _no_split_modules)"
    if not detection.flag:
        yield (
            "suggestion",
            "none: nothing repeats, so FSDP would gather it all; --fsdp_auto_wrap_policy=SIZE_BASED_WRAP splits it",
        )
        return
    share = structure.outside / structure.parameters if structure.parameters else 0.0
    yield "* suggestion", detection.flag
    yield "one by one", f"gathered block by block; the largest: {structure.largest_block:,}, {_bf16(structure.largest_block)}"
    yield "throughout", f"gathered for the whole pass: {structure.outside:,} ({share:.1%}), {_bf16(structure.outside)}"


def _bf16(parameters: int) -> str:
    return f"{format_bytes(2 * parameters)} in bf16"
