"""`smalti ui`."""

from __future__ import annotations

from pathlib import Path

import click

from smalti.cli import Command

_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(
    cls=Command,
    examples=("smalti ui", "smalti ui runs /data/runs", "smalti ui --port=8080 --no_open", "smalti ui --json --no_open"),
)
@click.argument("roots", nargs=-1, metavar="[ROOT]...", type=_FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. What is sent is not encrypted.")
@click.option("--port", default=7414, show_default=True, type=click.IntRange(0, 65535), help="Port. 0 takes a free one.")
@click.option("--open/--no_open", "opens", default=True, help="Open the page in a browser.")
@click.option("--json", "as_json", is_flag=True, help="Print the address and the process id as JSON.")
def ui(roots: tuple[Path, ...], host: str, port: int, opens: bool, as_json: bool) -> int:
    """The web page: configure, plan, launch, watch and compare runs.

    Runs are searched below each ROOT, by default the current folder; a ROOT may be made later. Files elsewhere are not shown.
    The printed link works once and for one browser. Ctrl-C stops the page; runs continue.
    """
    from smalti_webui.server.serve import serve

    return serve(roots, host=host, port=port, opens=opens, as_json=as_json)
