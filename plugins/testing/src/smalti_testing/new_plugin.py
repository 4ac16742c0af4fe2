"""`smalti plugin`: start a package with a plugin in it, and document what a plugin implements. Imports no torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from string import Template

import click
from packaging.version import Version

from smalti import UserError
from smalti.cli import Group
from smalti.config import PLUGINS, package_of, package_of_family
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, RegisterHook, load_plugins, selection_of
from smalti_testing.hooks_page import hooks_page
from smalti_testing.protocols import page

_SUFFIX = ".tmpl"
_LONGEST = 24
_TRAIN = (
    "smalti train --model_family=toy --instance_data_dir=photos --output_dir=runs/first --resolution=32 --max_train_steps=10"
)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of plugin that there are templates for, in the folder of its name.

    `trial` is a command that uses the plugin, for which the package of the plugin `needs` must be installed ("" for none).
    `hook` is where it registers an entry under the plugin's name.
    """

    title: str
    trial: str
    hook: RegisterHook | None = None
    needs: str = "toy"


KINDS = {
    "family": Kind(
        title="a model family",
        trial=_TRAIN.replace("=toy", "=$name"),
        hook=HookSpecs.register_model_families,
        needs="",
    ),
    "storage": Kind(
        title="a storage for datasets",
        trial=_TRAIN.replace(
            "--instance_data_dir=photos", """--datasets='[{"id": "photos", "type": "$name", "${name}_file": "photos.zip"}]'"""
        ),
        hook=HookSpecs.register_storage,
    ),
    "metadata": Kind(
        title="a metadata backend for datasets",
        trial=_TRAIN.replace(
            "--instance_data_dir=photos",
            """--datasets='[{"id": "photos", "instance_data_dir": "photos", "metadata_backend": "$name"}]'""",
        ),
        hook=HookSpecs.register_metadata_backends,
    ),
    "strategy": Kind(title="a distribution strategy", trial=f"{_TRAIN} --num_processes=2 --use_cpu --${{name}}_enable"),
    "observer": Kind(title="an observer of runs", trial=f"{_TRAIN} --${{name}}_interval=1"),
    "optimizer": Kind(
        title="an optimizer",
        trial=f"{_TRAIN} --optimizer=$name --learning_rate=1e-4",
        hook=HookSpecs.register_optimizers,
    ),
    "term": Kind(
        title="a term of the loss",
        trial=_TRAIN.replace(
            "--instance_data_dir=photos",
            """--datasets='[{"id": "photos", "instance_data_dir": "photos", "${name}_pixels": 1000000}]'""",
        ),
        hook=HookSpecs.register_columns,
    ),
    "format": Kind(
        title="a format of checkpoints",
        trial="smalti checkpoint convert weights --to=converted",
        hook=HookSpecs.register_checkpoint_formats,
        needs="migrate",
    ),
    "command": Kind(title="a command of smalti", trial="smalti $dashed runs", needs=""),
}


@click.group(cls=Group, examples=("smalti plugin new my-model --kind=family",))
def plugin() -> None:
    """Create a plugin package, or print the protocols of plugins. `smalti plugins` lists the installed plugins."""


@plugin.command(
    examples=("smalti plugin new my-model --kind=family", "smalti plugin new my-store --kind=storage --to=my-store")
)
@click.argument("name")
@click.option(
    "--kind",
    metavar="KIND",
    type=click.Choice(list(KINDS)),
    required=True,
    help=f"What the plugin adds: {', '.join(KINDS)}.",
)
@click.option("--to", "folder", type=click.Path(path_type=Path), help="The folder to create. Default: smalti-NAME.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def new(name: str, kind: str, folder: Path | None, as_json: bool) -> None:
    """Create a package with a plugin called NAME that installs, runs and passes its tests.

    NAME is what users type, for example in --model_family=NAME. Replace the code of the package by your own, one part at a
    time, and run its tests after each.
    """
    word = _checked(name, kind)
    values = _values(word, kind)
    folder = (folder or Path(values["distribution"])).expanduser()
    written = _write(folder, dict(_rendered(kind, values)))
    needed = PLUGINS[KINDS[kind].needs].target if KINDS[kind].needs else ""
    steps = [f"pip install {needed}"] if needed else []
    steps += [f"cd {shlex.quote(str(folder))}", "pip install -e '.[test]'", "pytest", values["trial"]]
    if as_json:
        said = {"name": word, "kind": kind, "distribution": values["distribution"], "package": values["package"]}
        click.echo(json.dumps({**said, "folder": str(folder.absolute()), "files": written, "next": steps}, indent=2))
        return
    click.echo(f"created {folder}: the plugin {word!r}, {KINDS[kind].title}")
    click.echo("".join(f"  {path}\n" for path in written))
    click.echo("next:\n" + "\n".join(f"  {step}" for step in steps))


@plugin.command(examples=("smalti plugin reference hooks > hooks.md",))
@click.argument("subject", type=click.Choice(("protocols", "hooks")), default="protocols")
def reference(subject: str) -> None:
    """Print every protocol that a plugin implements, or every hook, as Markdown."""
    text = page() if subject == "protocols" else hooks_page(load_plugins(strict=False))
    click.echo(text, nl=False)


def _checked(name: str, kind: str) -> str:
    """The name as it stands in code. Raises UserError for one that cannot be used or is taken."""
    word = name.lower().replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", word) or len(word) > _LONGEST:
        raise UserError(
            f"{name!r} cannot be the name of a plugin",
            fix=f"use letters, digits and dashes, a letter first, {_LONGEST} characters at most: {_suggestion(name)}",
        )
    if word == "smalti" or word.startswith("smalti_"):
        short = word.removeprefix("smalti").strip("_") or "pebble"
        raise UserError(f"{name!r} would give a package smalti-{word.replace('_', '-')}", fix=f"leave the prefix out: {short}")
    plugins = load_plugins(selection_of((), None, os.environ), strict=False)
    if holder := _holder(word, kind, plugins):
        raise UserError(f"the name {word!r} is taken by {holder}", fix=f"choose another one, such as my_{word}"[:120])
    return word


def _suggestion(name: str) -> str:
    """The nearest name that can be used."""
    word = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")
    return word[:_LONGEST].strip("-") or "pebble"


def _holder(word: str, kind: str, plugins: Plugins) -> str:
    """What has this name already: a plugin, installed or official, or something of the kind that a plugin registers."""
    if word in plugins.infos:
        return f"an installed plugin ({plugins.infos[word].source})"
    official = PLUGINS.get(word)
    if kind == "family":
        official = official or package_of_family(word)
    if kind in ("storage", "metadata"):
        official = official or package_of("storages", word)
    if official is not None:
        return official.distribution
    root = click.get_current_context().find_root()
    dashed = word.replace("_", "-")
    if kind == "command" and isinstance(root.command, click.Group) and root.command.get_command(root, dashed):
        return f"the command `smalti {dashed}`"
    about = KINDS[kind]
    for entry in plugins.gather(about.hook) if about.hook else ():
        if entry.name == word:
            return f"{entry.kind} of {entry.origin}"
    return ""


def _values(word: str, kind: str) -> dict[str, str]:
    """What stands for the variables of the templates."""
    about, own = KINDS[kind], Version(version("smalti"))
    names = {
        "name": word,
        "package": f"smalti_{word}",
        "dashed": word.replace("_", "-"),
        "distribution": f"smalti-{word.replace('_', '-')}",
    }
    return {
        **names,
        "Title": about.title[:1].upper() + about.title[1:],
        "trial": Template(about.trial).substitute(names),
        "bounds": f">={own.major}.{own.minor},<{own.major}.{own.minor + 1}",
    }


def _rendered(kind: str, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path and content of each file of a new package. The paths of the templates are templates too."""
    templates = files("smalti_testing") / "templates"
    for top in ("every", kind):
        for path, template in _texts(templates / top, PurePosixPath()):
            yield Template(str(path)).substitute(values), Template(template).substitute(values)


def _texts(folder: Traversable, path: PurePosixPath) -> Iterator[tuple[PurePosixPath, str]]:
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            yield from _texts(each, path / each.name)
        elif each.name.endswith(_SUFFIX):
            yield path / each.name.removesuffix(_SUFFIX), each.read_text(encoding="utf-8")


def _write(folder: Path, contents: Mapping[str, str]) -> list[str]:
    """Make the folder with these files, or nothing. Their paths, sorted. Raises UserError."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} already exists", fix="choose another folder with --to=FOLDER, or move that one") from None
    except OSError as error:
        raise UserError(f"cannot create {folder}: {error.strerror}", fix="choose another folder with --to=FOLDER") from None
    try:
        for name, text in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error.strerror}", fix="choose another folder with --to=FOLDER") from None
    return sorted(contents)
