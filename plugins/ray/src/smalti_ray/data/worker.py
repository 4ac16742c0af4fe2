"""What runs on the nodes: an actor that holds the encoders, or opens the files of a scan, and does one task after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from smalti import Config, ExitCode, PreflightError, UserError
from smalti.config import restore
from smalti.plugins import Plugins, Selection, find_family, load_plugins, schema_of
from smalti.rundir import Phases
from smalti_ray.cluster import versions

if TYPE_CHECKING:
    from smalti.data import PreparedData
    from smalti_cache.encode_part import EncodedPart, PartEncoder
    from smalti_data.all_ranks.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")
_TRIED = 3
"""Images of a dataset that are read to see whether a node can read it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker works for. `folder` has the indexes of the datasets, and `probes` are files that each node has to see."""

    kind: Literal["scan", "encode"]
    values: Mapping[str, object]
    accelerate: Mapping[str, object]
    plugins: tuple[str, ...]
    current: str
    """The current folder of the command, to which paths of the configuration are relative."""
    folder: str
    probes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Range:
    """A task of an encoding: part `number` of `count` of all texts, or of all images."""

    kind: Literal["texts", "latents"]
    number: int
    count: int

    def __str__(self) -> str:
        return f"part {self.number + 1} of {self.count} of the {'texts' if self.kind == 'texts' else 'images'}"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A worker is ready. `encoders` identify what it encodes with, by kind."""

    encoders: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A UserError on a worker, as a value: exceptions of several arguments do not survive pickling."""

    message: str
    fix: str
    exit_code: int
    in_data: bool

    def raised(self, node: str) -> UserError:
        """The error for the user of the command."""
        error = (PreflightError if self.in_data else UserError)(f"node {node}: {self.message}", fix=self.fix)
        error.exit_code = ExitCode(self.exit_code)
        return error


def _answering(method: Callable[Concatenate[Worker, P], R]) -> Callable[Concatenate[Worker, P], R | Failure | None]:
    """A method that answers with a UserError as a `Failure`, and with None once the worker was stopped."""

    @wraps(method)
    def answer(self: Worker, /, *args: P.args, **kwargs: P.kwargs) -> R | Failure | None:
        try:
            return method(self, *args, **kwargs)
        except KeyboardInterrupt:
            return None
        except UserError as error:
            in_data = isinstance(error, PreflightError)
            return Failure(message=error.message, fix=error.fix, exit_code=int(error.exit_code), in_data=in_data)

    return answer


class _Stoppable(Phases):
    """Raises KeyboardInterrupt where progress is made once `stopped` is set: what was encoded until then is written."""

    stopped = False

    def advance(self, done: int, total: int | None = None) -> None:
        super().advance(done, total)
        if self.stopped:
            raise KeyboardInterrupt


class Worker:
    """The actor. `do` runs in one thread, while another one answers `progress` and `stop`."""

    def __init__(self) -> None:
        self._phases = _Stoppable()
        self._work: Callable[[Any], object] | None = None

    def facts(self) -> dict[str, str]:
        """The `versions` of this node, and its address as `node`."""
        from ray.util import get_node_ip_address

        return {"node": get_node_ip_address(), **versions()}  # type: ignore[no-untyped-call]

    @_answering
    def open(self, job: Job) -> Opened:
        """Load what the tasks of a job need."""
        try:
            os.chdir(job.current)
        except OSError as error:
            _refuse(job.current, error)
        for probe in job.probes:
            try:
                Path(probe).read_bytes()
            except OSError as error:
                _refuse(str(Path(probe).parent), error)
        values = job.values
        selection = Selection(only=_names(values["plugins"]), without=_names(values["without"]))
        plugins = load_plugins(selection)
        if different := sorted({*plugins.versions} ^ {*job.plugins}):
            raise UserError(f"other plugins than those of the command: {', '.join(different)}", fix="install the same packages")
        config = restore(schema_of(plugins), values, job.accelerate)
        if job.kind == "scan":
            self._work = _scanning(config, plugins, Path(job.folder))
            return Opened()
        encoder, encoders = _encoding(config, plugins, Path(job.folder), self._phases)
        self._work = lambda task: _encode(encoder, task)
        return Opened(encoders=encoders)

    @_answering
    def do(self, task: Range | Task) -> object:
        """Do a task; returns an `EncodedPart` for a `Range`."""
        assert self._work is not None, "it was opened"
        self._phases.current = None
        try:
            return self._work(task)
        finally:
            self._phases.current = None

    def progress(self) -> int:
        """How many images or texts of the current task are encoded."""
        phase = self._phases.current
        return 0 if phase is None else phase.done or 0

    def stop(self) -> None:
        """Let the current task end soon; what was encoded is written."""
        self._phases.stopped = True


def _refuse(folder: str, error: OSError) -> None:
    fix = "give folders that all nodes share, under one path: --output_dir, --cache_dir, the current folder"
    raise UserError(f"{folder} is not the folder that the command has there: {error.strerror or error}", fix=fix) from error


def _names(value: object) -> tuple[str, ...]:
    assert isinstance(value, list | tuple)
    return tuple(map(str, value))


def _scanning(config: Config, plugins: Plugins, folder: Path) -> Callable[[Task], None]:
    from smalti_data.all_ranks.scan import open_dataset, work_on

    opened = cache(partial(open_dataset, config, plugins))
    return lambda task: work_on(task, *opened(task.dataset), folder)


def _encoding(config: Config, plugins: Plugins, folder: Path, phases: Phases) -> tuple[PartEncoder, dict[str, str]]:
    from smalti.config import DataOptions
    from smalti.data import load_data
    from smalti_cache.encode_part import PartEncoder

    data = load_data(config, plugins, find_family(config, plugins).alignment, folder)
    for one in (data, data.held_out):
        if one is not None:
            _check_readable(one)
    encoder = PartEncoder(config, plugins, data, phases)
    options = config[DataOptions]
    disabled = {"texts": options.text_cache_disable, "latents": options.vae_cache_disable}
    return encoder, {kind: encoder.encoder(kind) for kind in ("texts", "latents") if not disabled[kind]}


def _encode(encoder: PartEncoder, task: Range) -> EncodedPart:
    from smalti_cache.wanted import Part

    return encoder.encode(Part(task.number, task.count), task.kind)


def _check_readable(data: PreparedData) -> None:
    """Raises UserError if a dataset cannot be read on this node: none of the first images that the scan found usable."""
    from smalti.data import BadSampleError, StorageError

    for dataset in data.datasets:
        problem = ""
        for row in [row for row in range(min(len(dataset.index), 100)) if dataset.index.size(row)[0]][:_TRIED]:
            try:
                dataset.read(row)
            except (BadSampleError, StorageError) as error:
                problem = problem or f"{dataset.index.key(row)}: {error}"
            else:
                problem = ""
                break
        if problem:
            raise UserError(
                f"dataset {dataset.spec.id!r} cannot be read here, for example {problem}",
                fix="put it in a folder that all nodes share under one path, or on an object store",
            )
