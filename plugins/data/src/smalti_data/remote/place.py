"""What a URL such as s3://BUCKET/RUN stands for in place of a path. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Literal

import click

from smalti import CheckpointError, UserError
from smalti.checkpoint import (
    GROUPS,
    MANIFEST,
    STATE,
    WEIGHTS,
    ListedCheckpoint,
    State,
    StoredTensor,
    decode_state,
    parse_checkpoint_name,
)
from smalti.data import Storage
from smalti.rundir import RunDirectory
from smalti_data.remote.checkpoints import CHECKPOINTS, UNUSABLE, RemoteCheckpoint, RemoteRun
from smalti_data.remote.downloads import download_partly
from smalti_data.remote.resuming import download_to_resume, downloaded, find_to_resume


def run_at(url: str, open_storage: Callable[[str], Storage]) -> RemoteRun:
    """The run at a URL: that of the run, or of its folder `checkpoints`, or of one checkpoint, which the result has `only`."""
    parts, only = url.rstrip("/").split("/"), ""
    if len(parts) > 4 and parse_checkpoint_name(parts[-1]) is not None:
        only = parts.pop()
    if len(parts) > 4 and parts[-1] == CHECKPOINTS:
        return RemoteRun(open_storage("/".join(parts[:-1])), only=only)
    return RemoteRun(open_storage("/".join(parts)), folder="" if only else f"{CHECKPOINTS}/", only=only)


class RemotePlace:
    """A `smalti.checkpoint.RunPlace`. `open_storage` returns the storage of what is below a URL; it is called at first use."""

    def __init__(self, url: str, open_storage: Callable[[str], Storage]) -> None:
        self.url = url.rstrip("/")
        self.name = self.url.rpartition("/")[2]
        self._open_storage = open_storage
        self._found: dict[str, RemoteCheckpoint] = {}

    @cached_property
    def run(self) -> RemoteRun:
        return run_at(self.url, self._open_storage)

    def checkpoints(self) -> list[ListedCheckpoint]:
        self._found = {each.name: each for each in self.run.all()}
        if not self._found:
            raise UserError(f"no checkpoint found in {self.url}", fix="give the URL of a run or of one of its checkpoints")
        return [self._listed(each) for each in self._found.values()]

    def newest(self) -> ListedCheckpoint:
        found = self.checkpoints()
        return next((each for each in reversed(found) if each.manifest), found[-1])

    def best(self) -> str:
        ranked, _ = self.run.ranked()
        return ranked[0].name if ranked else ""

    def tensors(self, listed: ListedCheckpoint) -> dict[str, Mapping[str, StoredTensor]]:
        if listed.manifest is None:
            raise CheckpointError(listed.problem)
        checkpoint = self._found[listed.name]
        groups = {group: self.run.tensors(checkpoint, listed.manifest, group) for group in (*GROUPS, WEIGHTS)}
        return {group: found for group, found in groups.items() if found}

    def state(self, listed: ListedCheckpoint) -> State:
        return decode_state(self.run.storage.read(self._found[listed.name].prefix + STATE), STATE)

    def problems(self, listed: ListedCheckpoint) -> tuple[str, ...]:
        return self.run.verify(self._found[listed.name])

    @contextmanager
    def downloaded(
        self, beside: Path, groups: Collection[str] | None, *, step: int | Literal["best"] | None = None
    ) -> Iterator[Path]:
        """Yields the newest checkpoint, that of a step, or the best, in a temporary run directory beside `beside`; see
        `download_partly`.

        With `groups`, only these groups of tensors. Raises UserError if the checkpoint has none of a group that is not "model".
        """
        if step is not None and self.run.only:
            raise UserError(f"{self.url} is one checkpoint, of one step", fix="leave out --step, or name the run")
        choice = self.run.only or ("latest" if step is None else str(step))
        for each in self.run.find(choice):
            try:
                self.run.manifest(each)
            except UNUSABLE as error:
                if choice not in ("latest", "best"):
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

    def check(self) -> None:
        find_to_resume(self.run)

    def bring(self, target: RunDirectory, report: Callable[[str], None]) -> Path:
        return download_to_resume(self.run, self.url, target, report)

    def brought(self, target: RunDirectory) -> Path | None:
        return downloaded(target, self.url)

    def _listed(self, each: RemoteCheckpoint) -> ListedCheckpoint:
        manifest, problem = None, ""
        if each.published:
            try:
                manifest = self.run.manifest(each)
            except UNUSABLE as error:
                problem = error.message
        else:
            problem = f"{MANIFEST} is missing: the upload has not ended, or the file was removed"
        return ListedCheckpoint(name=each.name, path=self.url_of(each.name), step=each.step, manifest=manifest, problem=problem)


def _report(sentence: str) -> None:
    click.echo(sentence, err=True)
