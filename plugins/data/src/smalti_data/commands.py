"""`smalti dataset unpack`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from smalti.cli import Command
from smalti_data import parquet_images

_SHOWN = 10  # unusable rows, in text


@click.command(
    cls=Command,
    examples=(
        "smalti dataset unpack parquet --to photos --caption_column=text",
        "smalti dataset unpack train-*.parquet --to cats --no_captions",
    ),
)
@click.argument("sources", metavar="FILE|FOLDER...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--to", "folder", required=True, metavar="FOLDER", type=click.Path(path_type=Path), help="Where to write.")
@click.option("--image_column", metavar="NAME", help="Column of the images. Default: the only one with images.")
@click.option(
    "--caption_column",
    metavar="NAME",
    help="Column of the captions; a dot reaches into a column of structs. Default: the only one with texts.",
)
@click.option("--no_captions", is_flag=True, help="Write no captions, for --caption_strategy=instanceprompt.")
@click.option("--max_num_samples", type=click.IntRange(min=1), help="Write only the first images. Default: all.")
def unpack(
    sources: tuple[Path, ...],
    folder: Path,
    image_column: str | None,
    caption_column: str | None,
    no_captions: bool,
    max_num_samples: int | None,
) -> None:
    """Write the images of parquet files into a folder, with their captions.

    The Hugging Face Hub has each dataset as parquet files. Images are not encoded again. Nothing is overwritten; the same
    command continues after an interruption.
    """
    files = parquet_images.parquet_files(sources)
    columns = parquet_images.choose_columns(files[0], image_column, caption_column, captions=not no_captions)
    is_terminal = sys.stderr.isatty()
    done = parquet_images.unpack(
        files,
        folder,
        columns,
        most=max_num_samples,
        progress=lambda count: click.echo(f"\r{count} images", err=True, nl=False) if is_terminal else None,
    )
    there = f", of which {done.present} were there" if done.present else ""
    click.echo(f"{done.images} images in {folder}{there}; captions: {columns.caption or 'none'}")
    for place, reason in list(done.unusable.items())[:_SHOWN]:
        click.echo(f"    left out: {place}: {reason}")
    if len(done.unusable) > _SHOWN:
        click.echo(f"    and {len(done.unusable) - _SHOWN} more")
    if any(part.startswith("partial-") for file in files for part in file.parts):
        click.echo("note: partial: the Hub converts only the first part of a large dataset; its own files have all of it")
    strategy = " --caption_strategy=instanceprompt --instance_prompt=TEXT" if no_captions else ""
    click.echo(f"next: smalti dataset check --instance_data_dir={shlex.quote(str(folder))}{strategy}")
