"""`smalti config import-accelerate` and `export-accelerate`: Accelerate YAML to a configuration, and back. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click

from smalti import Config, ConfigError, UserError
from smalti.cli import Command, CommandLine, write_file, write_output
from smalti.config import LaunchOptions, Schema, accelerate_yaml, as_toml, launch_problems, put_into, read_mapping, resolve
from smalti.launch import expected_kind, merged_yaml, yaml_text
from smalti.plugins import BUILT_IN, check as check_plugins, choose_distributed

_UNPROCESSED = {"ignore_unknown_options": True, "help_option_names": ["--help"]}
_NOT_PASSED_ON = frozenset(
    ("compute_environment", "distributed_type", "fp16", "dynamo_backend", "mpirun_config", "downcast_bf16")
)
"""Keys that only set options, or that a notice says have no effect."""
_SAYS_NOTHING: tuple[object, ...] = (None, False, "", [], {}, 0, "no", "NO", "none", "all", "main", "static")
"""What `accelerate config` writes for keys that were not set."""
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_FORCE = click.option("--force", is_flag=True, help="Replace the file of --to if it exists.")


def _to(ending: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The option --to, which names the file to write."""
    text = f"Write a new file, whose name ends in {ending}."
    return click.option("--to", "given", metavar="FILE", help=text)


@click.command(
    "import-accelerate",
    cls=Command,
    context_settings=_UNPROCESSED,
    examples=(
        "smalti config import-accelerate accelerate.yaml",
        "smalti config import-accelerate accelerate.yaml --to=config.toml --merge",
    ),
)
@click.argument("arguments", metavar="FILE [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@_to(".toml")
@click.option("--merge", is_flag=True, help="Set the options in the file of --to, and keep the rest of it.")
@_FORCE
@_JSON
def import_accelerate(arguments: tuple[str, ...], given: str | None, merge: bool, force: bool, as_json: bool) -> None:
    """Convert an Accelerate YAML to a configuration file.

    FILE is the YAML file; flags override it. Keys without a counterpart are listed as notes. --json prints values, sources and
    notices.
    """
    target = _target(given, ".toml")
    command_line = CommandLine.parse(arguments)
    file = command_line.file
    if file is None:
        raise UserError("no Accelerate YAML given", fix="smalti config import-accelerate FILE")
    content = read_mapping(file)
    if not accelerate_yaml.is_accelerate(content):
        raise UserError(f"{file} is not an Accelerate configuration", fix="give a file written by `accelerate config`")
    resolved = resolve(command_line.schema, command_line.flags, file=file, environment={})
    notices = [*resolved.notices, *_unsupported_keys(content, resolved, file)]
    if as_json:
        values = {name: {"value": resolved.values()[name], "source": source} for name, source in resolved.sources.items()}
        click.echo(json.dumps({"values": values, "notices": notices}, indent=2))
        return
    if merge and target is not None and target.exists():
        read_mapping(target)  # raises if it is not TOML
        _print_notices(notices)
        write_file(target, put_into(target.read_text(encoding="utf-8"), resolved, resolved.sources))
        return
    text = "".join(f"# {notice}\n" for notice in notices) + as_toml(resolved, names=resolved.sources)
    write_output(text, target, replace=force, fix="--merge keeps its other options, --force replaces it")


def _unsupported_keys(content: Mapping[str, object], resolved: Config, file: Path) -> Iterator[str]:
    """Notices about keys that a configuration file of smalti cannot express."""
    for key, value in uncovered(content, resolved.schema).items():
        kept = f"keep it with accelerate_config = {json.dumps(str(file))}"
        yield f"{key}: {json.dumps(value, default=str)} has no option; {kept}"
    default = accelerate_yaml.default_file(os.environ)
    if default is not None and default.exists() and default.samefile(file):
        yield f'{file} is Accelerate\'s default file and overrides this one; accelerate_config = "none" ignores it'


def uncovered(values: Mapping[str, object], schema: Schema) -> dict[str, object]:
    """The keys at the top of the file that no option corresponds to, which reach `accelerate launch` from a file only."""
    covered = {option.accelerate.partition(".")[0].partition("=")[0] for option in schema.options.values()}
    known = {*covered, *_NOT_PASSED_ON, "same_network"}
    launchable = accelerate_yaml.launchable(values, schema)
    said = {key: value for key, value in launchable.items() if key not in known and value not in _SAYS_NOTHING}
    if values.get("same_network") is False and values.get("num_machines", 1) != 1:
        said["same_network"] = False  # the default without a file is true
    return said


@click.command(
    "export-accelerate",
    cls=Command,
    context_settings=_UNPROCESSED,
    examples=("smalti config export-accelerate config.toml --to=accelerate.yaml",),
)
@click.argument("arguments", metavar="[CONFIG] [--OPTION=VALUE]...", nargs=-1, type=click.UNPROCESSED)
@_to(".yaml")
@_FORCE
@_JSON
def export_accelerate(arguments: tuple[str, ...], given: str | None, force: bool, as_json: bool) -> None:
    """Print the Accelerate YAML of a launch on accelerators.

    Takes the same arguments as `smalti train`.
    """
    target = _target(given, ".yaml", ".yml")
    command_line = CommandLine.parse(arguments)
    resolved = command_line.config()
    if resolved[LaunchOptions].use_cpu:
        raise UserError("use_cpu is set: a launch on CPUs uses no Accelerate YAML", fix="--no_use_cpu")
    if problems := launch_problems(resolved[LaunchOptions]):
        raise ConfigError(problems)
    check_plugins(resolved, command_line.plugins, without=BUILT_IN)  # whose checks need model and data
    distributed = choose_distributed(resolved, command_line.plugins)
    merged = merged_yaml(resolved, distributed, expected_kind(resolved) or "cuda")
    notices = [*resolved.notices, *accelerate_yaml.differences(resolved.accelerate, merged, resolved.schema)]
    if as_json:
        _print_notices(notices)
        write_output(json.dumps(merged, indent=2) + "\n", target, replace=force)
        return
    text = "".join(f"# {notice}\n" for notice in notices) + yaml_text(merged)
    write_output(text, target, replace=force)


def _target(given: str | None, *endings: str) -> Path | None:
    """The file of --to, which must have one of these endings, as files are parsed by their ending."""
    target = Path(given).expanduser() if given is not None else None
    if target is not None and target.suffix.lower() not in endings:
        raise UserError(f"{target} does not end in {' or '.join(endings)}", fix=f"--to={target.with_suffix(endings[0])}")
    return target


def _print_notices(notices: list[str]) -> None:
    for notice in notices:
        click.echo(f"smalti: note: {notice}", err=True)
