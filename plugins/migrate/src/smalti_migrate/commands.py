"""`smalti config import`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from smalti import UserError
from smalti.cli import Command, CommandLine, write_output
from smalti.data import catalog_of
from smalti_migrate.commented_toml import as_json as json_of, as_toml
from smalti_migrate.importing import import_files
from smalti_migrate.rules import one_line
from smalti_migrate.tables import tables_page


@click.command(
    "import",
    cls=Command,
    examples=(
        "smalti config import train.toml dataset.toml",
        "smalti config import train.sh --model_family=sdxl --to=config.toml",
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--to", "target", metavar="FILE", type=click.Path(path_type=Path), help="Write a new file, ending in .toml.")
@click.option("--model_family", metavar="NAME", help="Model family, if the files do not say it.")
@click.option("--tables", is_flag=True, help="Print what is done with each key of each trainer, as Markdown.")
@click.option("--force", is_flag=True, help="Replace the file of --to if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def import_(
    files: tuple[Path, ...], target: Path | None, model_family: str | None, tables: bool, force: bool, as_json: bool
) -> None:
    """Convert files of another trainer to a configuration file.

    FILE is a file of kohya's sd-scripts (options, datasets or a launch script), ai-toolkit, OneTrainer or SimpleTuner. Each
    line names the key that it comes from. What cannot be converted is listed at the end, with the reason.
    """
    if tables:
        click.echo(tables_page(), nl=False)
        return
    target = target.expanduser() if target is not None else None
    if target is not None and target.suffix.lower() != ".toml":
        raise UserError(f"{target} does not end in .toml", fix=f"--to={target.with_suffix('.toml')}")
    if not files:
        raise UserError("no file given", fix="smalti config import FILE...")
    command_line = CommandLine.parse([])
    schema, catalog = command_line.schema, catalog_of(command_line.plugins)
    imported = import_files(files, schema, family=model_family, catalog=catalog)
    if as_json:
        click.echo(json.dumps(json_of(imported), indent=2, default=str))
        return
    write_output(as_toml(imported, schema), target, replace=force)
    if target is not None and imported.left:
        count = "1 thing was" if len(imported.left) == 1 else f"{len(imported.left)} things were"
        click.echo(f"smalti: {count} not converted; the reasons are at the end of {target}:", err=True)
        for left in imported.left:
            click.echo(f"  {left.place}: {one_line(left.why)}", err=True)
