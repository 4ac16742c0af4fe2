"""`smalti webhook`: try the endpoints of a configuration, and list the outbox of a run."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from smalti import ConfigError, Problem, UserError
from smalti.cli import Command, CommandLine, Group, print_table

if TYPE_CHECKING:
    from smalti_health.webhooks.delivery.request import Reply
    from smalti_health.webhooks.endpoints import Endpoint

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(cls=Group, examples=("smalti webhook test --webhook_config=webhooks.json", "smalti webhook ls runs/first"))
def webhook() -> None:
    """Try webhooks, and list which events were delivered."""


@webhook.command(
    "test",
    cls=Command,
    context_settings={"ignore_unknown_options": True},
    examples=("smalti webhook test --webhook_config=webhooks.json", "smalti webhook test config.toml"),
)
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@_JSON
@click.pass_context
def test(context: click.Context, arguments: tuple[str, ...], as_json: bool) -> None:
    """Send one test event to every endpoint, whatever its level, and say what comes back.

    Takes the same arguments as `smalti train`. Exits with 1 if an endpoint did not accept the event.
    """
    endpoints = _endpoints(arguments)
    with ThreadPoolExecutor(len(endpoints)) as pool:
        results = list(pool.map(_attempt, endpoints))
    if as_json:
        rows = [
            {"endpoint": each.name, "delivered": _is_delivered(reply), "response": str(reply), "seconds": round(seconds, 3)}
            for each, (reply, seconds) in zip(endpoints, results, strict=True)
        ]
        click.echo(json.dumps(rows, indent=2))
    else:
        for each, (reply, seconds) in zip(endpoints, results, strict=True):
            word = "delivered" if _is_delivered(reply) else "NOT delivered"
            click.echo(f"{each.name}: {word}: {reply}, after {seconds:.2f} s")
    context.exit(0 if all(_is_delivered(reply) for reply, _ in results) else 1)


@webhook.command("ls", cls=Command, examples=("smalti webhook ls runs/first", "smalti webhook ls runs/first --json"))
@click.argument("run_dir", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_JSON
def list_outbox(run_dir: Path, as_json: bool) -> None:
    """List the outbox of a run: its critical events, and what was delivered where.

    Critical are faults of GPUs, errors, and the end of the run. The next start of the run sends what is pending. Endpoints
    that answered 410 (Gone) are disabled for the run.
    """
    from smalti_health.webhooks.delivery.outbox import FOLDER, Outbox

    outbox = Outbox(run_dir)
    rows, disabled = list(outbox.rows()), outbox.disabled()
    if as_json:
        described = [{**asdict(row), "status": row.status} for row in rows]
        click.echo(json.dumps({"events": described, "disabled": list(disabled.values())}, indent=2))
        return
    table = []
    for row in rows:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.event.time))
        table += [
            (moment, row.event.type, each.status, str(each.attempts), each.endpoint, each.last)
            for each in row.deliveries.values()
        ]
    if table:
        print_table(("time", "event", "status", "attempts", "endpoint", "last response"), table, right=(3,))
    else:
        click.echo(f"{run_dir / FOLDER}: no critical event was sent", err=True)
    for each in disabled.values():
        click.echo(f"disabled: {each.get('endpoint')}; to use it again, remove {run_dir / FOLDER / 'disabled.json'}", err=True)


def _endpoints(arguments: Sequence[str]) -> tuple[Endpoint, ...]:
    """The endpoints of a configuration, of which only the webhooks need to be valid."""
    from smalti_health.webhooks.endpoints import read
    from smalti_health.webhooks.options import WebhookOptions

    config = CommandLine.parse(arguments).draft()
    if problems := [each for each in config.problems if each.option == "webhook_config"]:
        raise ConfigError(problems)
    value = config[WebhookOptions].webhook_config
    if value is None:
        raise UserError("the configuration has no webhooks", fix="--webhook_config=FILE")
    found: list[Problem] = []
    endpoints = read(value, os.environ, found)
    if found:
        raise ConfigError(found)
    return endpoints


def _attempt(endpoint: Endpoint) -> tuple[Reply, float]:
    """What came back, and the seconds that it took."""
    from smalti_health.webhooks.delivery.channel import message
    from smalti_health.webhooks.delivery.request import post
    from smalti_health.webhooks.events import Source

    host = socket.gethostname()
    source = Source(run="test", directory=Path(), job_id="test", host=host)
    event = source.event("notification", "info", "Test", f"a test event of smalti, from {host}", now=time.time())
    began = time.monotonic()
    headers, body = message(endpoint, event, int(time.time()))
    return post(endpoint, headers, body), time.monotonic() - began


def _is_delivered(reply: Reply) -> bool:
    return reply.status is not None and 200 <= reply.status < 300
