"""Where `smalti checkpoint` finds checkpoints: in folders, or behind URLs such as s3://BUCKET/RUN. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    WEIGHTS,
    CheckpointStore,
    Entry,
    Manifest,
    StoredTensor,
    read_manifest,
    stored_tensors,
    verify,
)
from smalti.errors import CheckpointError, UserError
from smalti.plugins import load_plugins, selection_of
from smalti.remote import CHECKPOINTS, UNUSABLE, RemoteCheckpoint, RemoteRun, download_partly, is_url, open_run


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One checkpoint. `path` is its path or URL; `problem` is why its manifest cannot be used, "" if it can."""

    name: str
    path: str
    step: int
    manifest: Manifest | None
    problem: str


class PlaceType(click.ParamType["Place"]):
    """An existing folder, or a URL that a plugin opens."""

    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Place:
        if is_url(text := str(value)):
            return RemotePlace(text)
        return LocalPlace(click.Path(exists=True, file_okay=False, path_type=Path).convert(text, param, ctx))


class LocalPlace:
    """A run directory or checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def checkpoints(self) -> list[Listed]:
        """All of them, lowest step first. Reads manifests only."""
        if is_checkpoint(self.path):
            return [self.newest()]
        return [_listed(entry) for entry in entries(self.path)]

    def newest(self) -> Listed:
        """The newest one whose manifest can be used; without one the newest. Raises BadParameter if there is none."""
        path = newest(self.path)
        try:
            manifest, problem = read_manifest(path), ""
        except CheckpointError as error:
            manifest, problem = None, error.message
        return Listed(name=path.name, path=str(path), step=manifest.step if manifest else 0, manifest=manifest, problem=problem)

    def tensors(self, listed: Listed) -> dict[str, Mapping[str, StoredTensor]]:
        """Its tensors by group. Reads headers. Raises CheckpointError."""
        return {group: found for group in (*GROUPS, WEIGHTS) if (found := stored_tensors(Path(listed.path) / group))}

    def problems(self, listed: Listed) -> tuple[str, ...]:
        """What is wrong with it. Reads every byte."""
        return verify(Path(listed.path)).problems


class RemotePlace:
    """The same behind a URL. `url` has no slash at its end."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.name = self.url.rpartition("/")[2]
        self._run: RemoteRun | None = None
        self._found: dict[str, RemoteCheckpoint] = {}

    @property
    def run(self) -> RemoteRun:
        if self._run is None:
            self._run = open_run(self.url, load_plugins(selection_of((), None, os.environ), strict=False))
        return self._run

    def checkpoints(self) -> list[Listed]:
        self._found = {each.name: each for each in self.run.all()}
        if not self._found:
            raise click.BadParameter(f"no checkpoint found in {self.url}", param_hint="PATH")
        return [self._listed(each) for each in self._found.values()]

    def newest(self) -> Listed:
        found = self.checkpoints()
        return next((each for each in reversed(found) if each.manifest), found[-1])

    def tensors(self, listed: Listed) -> dict[str, Mapping[str, StoredTensor]]:
        if listed.manifest is None:
            raise CheckpointError(listed.problem)
        checkpoint = self._found[listed.name]
        groups = {group: self.run.tensors(checkpoint, listed.manifest, group) for group in (*GROUPS, WEIGHTS)}
        return {group: found for group, found in groups.items() if found}

    def problems(self, listed: Listed) -> tuple[str, ...]:
        return self.run.verify(self._found[listed.name])

    @contextmanager
    def downloaded(self, beside: Path, groups: Collection[str] | None, *, step: int | None = None) -> Iterator[Path]:
        """Yields the newest checkpoint, or that of a step, in a temporary run directory beside `beside`; see `download_partly`.

        With `groups`, only these groups of tensors. Raises UserError if the checkpoint has none of a group that is not "model".
        """
        if step is not None and self.run.only:
            raise UserError(f"{self.url} is one checkpoint, of one step", fix="leave out --step, or name the run")
        choice = self.run.only or ("latest" if step is None else str(step))
        for each in self.run.find(choice):
            try:
                self.run.manifest(each)
            except UNUSABLE as error:
                if choice != "latest":
                    raise CheckpointError(f"{self.url}: {each.name}: {error.message}") from error
                click.echo(f"skipped {each.name}: {error.message}", err=True)
                continue
            with download_partly(self.run, each, beside, _report, groups) as path:
                yield path
            return
        raise CheckpointError(f"no checkpoint of {self.url} can be used", fix=f"`smalti checkpoint ls {self.url}` says why")

    def url_of(self, name: str) -> str:
        """The URL of a checkpoint with this name."""
        return self.url if self.run.only else f"{self.url.removesuffix(f'/{CHECKPOINTS}')}/{CHECKPOINTS}/{name}"

    def _listed(self, each: RemoteCheckpoint) -> Listed:
        manifest, problem = None, ""
        if each.published:
            try:
                manifest = self.run.manifest(each)
            except UNUSABLE as error:
                problem = error.message
        else:
            problem = f"{MANIFEST} is missing: the upload has not ended, or the file was removed"
        return Listed(name=each.name, path=self.url_of(each.name), step=each.step, manifest=manifest, problem=problem)


Place = LocalPlace | RemotePlace


@contextmanager
def opened_checkpoint(place: Place, target: Path, groups: Collection[str] | None) -> Iterator[Path]:
    """The checkpoint at a place; for a run directory, its newest one. In a folder it may be one of another trainer."""
    if isinstance(place, RemotePlace):
        check_new(target)
        with place.downloaded(target, groups) as path:
            yield path
    else:
        has_own = any(CheckpointStore(root).all() for root in (place.path / "checkpoints", place.path))
        yield newest(place.path) if has_own else place.path


def check_new(target: Path) -> None:
    """Raises UserError before a download if its result could not be written."""
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} already exists, and nothing is overwritten", fix="choose a new folder")


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or path.name.startswith("step-")


def entries(path: Path) -> list[Entry]:
    """The checkpoints of a run directory, or in a folder. Raises BadParameter if there are none."""
    for root in (path / "checkpoints", path):
        if found := CheckpointStore(root).all():
            return found
    raise click.BadParameter(f"no checkpoint found in {path}", param_hint="PATH")


def newest(path: Path) -> Path:
    """The checkpoint at `path`; for a run directory, its newest one that can be used."""
    if is_checkpoint(path):
        return path
    found = entries(path)
    return next((entry.path for entry in reversed(found) if entry.manifest), found[-1].path)


def _listed(entry: Entry) -> Listed:
    return Listed(name=entry.path.name, path=str(entry.path), step=entry.step, manifest=entry.manifest, problem=entry.problem)


def _report(sentence: str) -> None:
    click.echo(sentence, err=True)
