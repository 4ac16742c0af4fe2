"""`smalti doctor`: what this node has, and what is wrong with it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from smalti import ConfigError, Finding, InvalidOptionError, UserError, problems_in
from smalti.cli import Command, CommandLine, Root, counted, print_table
from smalti.config import Config, RunOptions, as_toml, package_of
from smalti.plugins import Plugins, load_plugins, selection_of
from smalti.rundir import RunDirectory
from smalti_doctor.bundle import write_bundle
from smalti_doctor.checks.storage import existing
from smalti_doctor.child import run_in_child
from smalti_doctor.masking import Mask
from smalti_doctor.measurements import measure_node
from smalti_doctor.node import diagnose_node
from smalti_doctor.report import Report, Section

_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
_CONFIG_SECONDS = 300.0
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"


@click.command(
    cls=Command,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[CONFIG] [--OPTION=VALUE]...",
    examples=(
        "smalti doctor",
        "smalti doctor runs/first",
        "smalti doctor config.toml --bundle=report.zip",
        "smalti doctor --nodes --hosts=a,b,c --output_dir=/shared/run",
    ),
)
@click.argument("arguments", metavar="", nargs=-1, type=click.UNPROCESSED)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--bundle", metavar="FILE", help="Write a zip file without secrets, to be sent with a question.")
@click.option("--measure", is_flag=True, help="Measure products, copies, memory and disk for about 10 s each.")
@click.option("--nodes", is_flag=True, help="Check several nodes against each other: start it on all of them, or with --hosts.")
@click.option("--hosts", metavar="A,B,C", help="With --nodes: the hosts, on which it is started over ssh.")
@click.option("--ssh_command", metavar="COMMAND", default=_SSH, show_default=True, help="The ssh command of --hosts.")
def doctor(
    arguments: tuple[str, ...],
    as_json: bool,
    bundle: str | None,
    measure: bool,
    nodes: bool,
    hosts: str | None,
    ssh_command: str,
) -> int:
    """Check this node: versions, driver, devices, memory, disks, network name, limits.

    With CONFIG, a run directory or the arguments of `smalti train`, also the checks of that run. Exits with 3 if training could
    not work. With --nodes only the nodes are compared.
    """
    target = _bundle_target(bundle)
    words, run = _run_given(arguments)
    if nodes or hosts is not None:
        flags = (*(["--json"] if as_json else []), *(["--measure"] if measure else []))
        over_ssh = (f"--hosts={hosts}", f"--ssh_command={ssh_command}") if hosts is not None else ()
        return int(_nodes_command().main([*flags, *over_ssh, *words], standalone_mode=False))
    checked = bool(words) and (run is None or run.config_file.is_file())
    config, plugins, problems = _resolved(words)
    mask = Mask.of_run(config)
    report = diagnose_node(plugins, config, mask=mask)
    if checked or problems:
        findings = problems or _config_findings(words)
        report = replace(report, sections=(*report.sections, Section(name="config", findings=findings)))
    if measure:
        report = replace(report, sections=(*report.sections, _speed(report, config)))
    if as_json:
        click.echo(json.dumps(mask.value(report.as_json()), indent=2))
    else:
        _print(report, mask)
    if target is not None:
        members = write_bundle(target, report, mask, config=_config_text(config, words), run=run or _existing_run(config))
        click.echo(f"smalti: wrote {target}: {', '.join(members)}", err=True)
        click.echo(
            "smalti: secrets that smalti knows or recognises are replaced by ***; read the files before you send them", err=True
        )
    return int(report.exit_code)


def _nodes_command() -> click.Command:
    """`smalti nodes`, which is another package's. Raises MissingPlugin without it."""
    context = click.get_current_context()
    root = context.find_root().command
    found = root.get_command(context, "nodes") if isinstance(root, Root) else None
    if found is None:
        package = package_of("commands", "nodes")
        assert package is not None, "the table of packages names it"
        raise package.error(f"--nodes and --hosts belong to {package.distribution}")
    return found


def _bundle_target(bundle: str | None) -> Path | None:
    """Raises UserError, before anything is checked, if the file exists or its folder does not."""
    if bundle is None:
        return None
    target = Path(bundle).expanduser()
    if target.exists():
        raise UserError(f"{target} already exists", fix="give --bundle another name")
    if not target.absolute().parent.is_dir():
        raise UserError(f"the folder {target.absolute().parent} does not exist", fix="create it, or give --bundle another name")
    return target


def _run_given(arguments: Sequence[str]) -> tuple[list[str], RunDirectory | None]:
    """The arguments with the configuration file of a run in place of its directory, and that run.

    A run that has failed at its start has no configuration file: then only its directory is known.
    """
    words = list(arguments)
    if words and not words[0].startswith("-") and (run := RunDirectory(words[0])).record_file.is_file():
        return [str(run.config_file) if run.config_file.is_file() else f"--output_dir={run.path}", *words[1:]], run
    return words, None


def _resolved(words: Sequence[str]) -> tuple[Config | None, Plugins, list[Finding]]:
    """The configuration, if there is one, and the plugins. What prevents reading it is a finding.

    Raises ConfigError for flags that do not exist: then it is unknown what is to be checked.
    """
    try:
        if not words:
            return None, load_plugins(selection_of((), None, os.environ), strict=False), []
        command_line = CommandLine.parse(words)
        config = command_line.draft()
    except UserError as error:
        findings = [_finding(each.message, each.where, each.fix) for each in problems_in(error)]
        return None, load_plugins(selection_of((), None, os.environ), strict=False), findings
    if unknown := [each for each in config.problems if each.where == "command line"]:
        raise ConfigError(unknown)
    return config, command_line.plugins, []


def _config_findings(words: Sequence[str]) -> list[Finding]:
    """The checks of `smalti train` before a launch, in a child process, because they import torch and reach for storages."""
    child = run_in_child("smalti_doctor.config_check", words, seconds=_CONFIG_SECONDS)
    if child.state != "done":
        message = f"the checks of the configuration did not end: {child.error}"
        return [Finding(check="config", level="warning", message=message, fix="smalti train CONFIG --dry-run shows more")]
    problems = child.values["problems"]
    assert isinstance(problems, list)
    unchecked = child.values["unchecked"]
    if not problems and not unchecked:
        return [Finding(check="config", level="ok", message="the checks before a launch have found nothing wrong")]
    if not problems:
        message = f"nothing wrong was found; the model {unchecked} was not opened, because it may have to be downloaded"
        return [Finding(check="config", level="ok", message=message)]
    return [_finding(each["message"], each["where"], each["fix"]) for each in problems]


def _finding(message: str, where: str, fix: str) -> Finding:
    return Finding(check="config", level="error", message=f"{where}: {message}" if where else message, fix=fix)


def _config_text(config: Config | None, words: Sequence[str]) -> str:
    """The configuration as TOML; the text of its file if it has problems; "" without one."""
    try:
        return as_toml(config) if config is not None else ""
    except InvalidOptionError:
        file = Path(words[0]).expanduser()
        return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _speed(report: Report, config: Config | None) -> Section:
    """Of the devices that torch has been seen to use, and of the disk of the output_dir."""
    facts = next(section.facts for section in report.sections if section.name == "devices")
    found = facts.get("torch")
    if not isinstance(found, dict) or "devices" not in found:
        message = "nothing was measured, because torch cannot be used"
        return Section(name="speed", findings=[Finding(check="speed", level="note", message=message)])
    return measure_node(len(found["devices"]), existing(_output_dir(config) or Path.cwd()))


def _output_dir(config: Config | None) -> Path | None:
    try:
        return config[RunOptions].output_dir if config is not None else None
    except InvalidOptionError:
        return None


def _existing_run(config: Config | None) -> RunDirectory | None:
    """The run of a configuration, if it was ever started."""
    path = _output_dir(config)
    run = RunDirectory(path) if path is not None else None
    return run if run is not None and run.record_file.is_file() else None


def _print(report: Report, mask: Mask) -> None:
    rows: list[tuple[str, str, str]] = []
    for each in report.findings:
        rows.append((each.check, each.level, _one_line(mask.text(each.message))))
        if each.fix:
            rows.append(("", "", f"fix: {_one_line(mask.text(each.fix))}"))
    print_table(("check", "", f"smalti doctor on {report.host}"), rows, colours=_COLOURS)
    counts = {level: sum(each.level == level for each in report.findings) for level in ("error", "warning")}
    click.echo(f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}")


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
