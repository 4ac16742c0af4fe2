"""`smalti train`: parse the command line, check the configuration, run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import click

from smalti.cli.arguments import CommandLine, pop_flag
from smalti.cli.pages.help import Command, Formatter, show_page, write_options
from smalti.config import Config, LaunchOptions, RunOptions, Schema, package_of_topic, unknown
from smalti.errors import ExitCode, UserError, problems_in
from smalti.hookspecs import HookSpecs
from smalti.launch import check_run
from smalti.plugins import is_url, open_run
from smalti.rundir import RunDirectory
from smalti.system import Stopped, Terminated, ignore_write_errors, importing, preemption_as_exception

_WIDEST = 100
_FLAGS = (
    ("--help", "Show the options that most runs need."),
    ("--help TOPIC", "Show a section, an option, or all options with a word in their names: lora, ema_decay, ema."),
    ("--help-all", "Show every option."),
    ("--config=FILE", "Same as CONFIG."),
    ("--dry-run", "Check everything and show what would be launched."),
    ("--json", "Print JSON. Only with --dry-run."),
)


class Train(Command):
    """The command. Its help page has the options of the plugins that the command line selects."""

    def page(self, ctx: click.Context, schema: Schema, *, everything: bool) -> str:
        from smalti.cli.pages.options import sections

        formatter = Formatter(max_width=_WIDEST)
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_epilog(ctx, formatter)
        with formatter.section("Help and checks"):
            formatter.write_dl(_FLAGS)
        shown = [option for option in schema.options.values() if everything or option.level == "basic"]
        write_options(formatter, sections(schema, shown), whole=False)
        if hidden := len(schema.options) - len(shown):
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options: --help-all lists them, --help TOPIC those of one topic.")
        return formatter.getvalue().rstrip()


@click.command(
    cls=Train,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    options_metavar="[CONFIG] [--OPTION=VALUE]...",
    examples=(
        "smalti train --model_family=sdxl --model_type=lora --max_train_steps=1000 \\\n"
        "    --instance_data_dir=photos --output_dir=runs/first",
        "smalti train runs/first/config.toml --max_train_steps=2000",
        "smalti train --help fsdp",
    ),
)
@click.argument("arguments", metavar="", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def train(context: click.Context, arguments: tuple[str, ...]) -> int:
    """Train a model, or resume its training.

    CONFIG is a TOML, JSON or YAML file; flags override it. Each run has one --output_dir; the same command resumes it.
    --[no_]x is a switch: --x turns it on, --no_x off.
    """
    rest = list(arguments)
    topic = _pop_topic(rest)
    everything, some = pop_flag(rest, "--help-all"), pop_flag(rest, "--help", "-h")
    dry_run, as_json = pop_flag(rest, "--dry-run"), pop_flag(rest, "--json")
    try:
        command_line = CommandLine.parse(rest)
        if topic is not None:
            show_page(topic_page(command_line.schema, topic))
            return 0
        if everything or some:
            show_page(cast(Train, context.command).page(context, command_line.schema, everything=everything))
            return 0
        return _train(command_line, dry_run=dry_run, as_json=as_json)
    except UserError as error:
        if as_json:
            problems = [problem.as_json() for problem in problems_in(error)]
            click.echo(json.dumps({"problems": problems, "exit_code": int(error.exit_code)}, indent=2))
        raise


def _pop_topic(arguments: list[str]) -> str | None:
    """Remove --help TOPIC and return the topic; None if the word after --help is missing or a configuration file."""
    for index, word in enumerate(arguments):
        flag, joined, topic = word.partition("=")
        if flag not in ("--help", "-h"):
            continue
        if not joined and index + 1 < len(arguments):
            topic = arguments[index + 1]
        if not topic or (not joined and (topic.startswith("-") or Path(topic).is_file())):
            return None
        del arguments[index : index + (1 if joined else 2)]
        return topic
    return None


def topic_page(schema: Schema, topic: str) -> str:
    """The full help of the options that a word matches. Raises UserError if there are none."""
    from smalti.cli.pages.options import matching, sections

    found = matching(schema, topic)
    if not found:
        if package := package_of_topic(topic):
            raise package.error(f"these options belong to {package.distribution}")
        problem = unknown(topic, schema, where="")
        known = ", ".join(group.name for group in schema.groups)
        fix = problem.fix if problem.option else f"name an option, a part of its name, or a section: {known}"
        raise UserError(f"no option and no section is called {topic!r}", fix=fix)
    formatter = Formatter(max_width=_WIDEST)
    write_options(formatter, sections(schema, found), whole=True)
    return formatter.getvalue().strip()


def _train(command_line: CommandLine, *, dry_run: bool, as_json: bool) -> int:
    config = command_line.draft()
    if config.problems:
        check_run(config, command_line.plugins)  # raises, with all other problems
    try:
        with preemption_as_exception(), ExitStack() as closing:
            if not dry_run and (restored := command_line.plugins.decide(HookSpecs.restore_run, config=config)):
                click.echo(f"smalti: {restored}", err=True)
                config = command_line.draft()
            for group in config.schema.groups:
                config = group.complete(config)
            _bring_checkpoint(config, command_line, dry_run=dry_run)
            standby = None
            if not dry_run and config[LaunchOptions].num_processes > 1:
                from smalti.launch import StandbyLauncher  # a single rank runs in this process

                standby = StandbyLauncher()
                closing.callback(standby.close)
            with importing():
                from smalti.launch import Preparation  # imports much, so only if the options are valid

            preparation = Preparation.of(config, command_line.plugins, write=not dry_run)
            if not dry_run:
                ignore_write_errors()
                return int(preparation.launch(standby))
    except Stopped:
        click.echo("smalti: stopped on request before the first step; run the same command to start again", err=True)
        return int(ExitCode.STOPPED)
    except Terminated:
        click.echo("smalti: stopped before the first step; run the same command to start again", err=True)
        return int(ExitCode.PREEMPTED)
    commands = command_line.of_nodes(config)
    click.echo(json.dumps(preparation.describe(commands), indent=2) if as_json else preparation.as_text(commands))
    return 0


def _bring_checkpoint(config: Config, command_line: CommandLine, *, dry_run: bool) -> None:
    """Download the checkpoint of --resume_from_checkpoint=URL, on each node that has its own files. A dry run looks for it."""
    options, launch = config[RunOptions], config[LaunchOptions]
    url = options.resume_from_checkpoint
    if not is_url(url) or options.output_dir is None or (launch.machine_rank > 0 and launch.shared_output_dir):
        return
    found = open_run(url, command_line.plugins, config)
    if dry_run:
        found.check()
        return
    path = found.bring(RunDirectory(options.output_dir), lambda sentence: click.echo(f"smalti: {sentence}", err=True))
    click.echo(f"smalti: {path} is {url}", err=True)
