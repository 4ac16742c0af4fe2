"""The process in which a run is rehearsed: `python -m smalti_plan.rehearsal.child REQUEST RESULT`.

Devices come before torch, and a cluster before anything that uses one: so it is a process of its own.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
import tempfile
import traceback
import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

from smalti import UserError
from smalti.config import Config, restore
from smalti.plugins import Plugins, Selection, load_plugins, schema_of
from smalti.system import load_json, read_regular, write_json_atomically
from smalti_plan.records import Guard, Rehearsal, RehearsalError
from smalti_plan.rehearsal.devices import fake_cuda, python_backend
from smalti_plan.rehearsal.request import Request

_DEVICES = 8


def main() -> None:
    """Rehearse what the first file asks for, and write the result into the second."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    request = Request.from_json(load_json(read_regular(Path(sys.argv[1]))))
    guard, notes = _devices(request)
    result = rehearsed(request, guard, notes)
    write_json_atomically(Path(sys.argv[2]), result.as_json())
    sys.stdout.flush()


def _devices(request: Request) -> tuple[Guard, list[str]]:
    """Make torch believe in the devices of the request; by what, and what that leaves out."""
    if request.kind == "cpu":
        return "none", []
    notes: list[str] = []
    guard: Guard = "python"
    if request.kind == "cuda" and request.extension:
        try:
            fake_cuda.load()
            guard = "extension"
        except OSError as error:
            notes.append(f"what only CUDA devices do was not rehearsed (pinned memory, channels-last): {error}")
    import torch  # noqa: F401 - after the library

    if guard == "extension":
        fake_cuda.install(max(_DEVICES, request.local), name=request.device, memory=request.memory or fake_cuda.MEMORY)
    else:
        python_backend.install(max(_DEVICES, request.local))
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"{python_backend.KIND}:0"
    return guard, notes


def rehearsed(request: Request, guard: Guard, notes: list[str]) -> Rehearsal:
    """The result. An error of the run is a part of it."""
    empty = Rehearsal(candidate=request.candidate, device=request.device, ranks=request.ranks, rank=request.rank, guard=guard)
    phase = "load"
    with ExitStack() as closing:
        try:
            from smalti_plan.rehearsal.rehearsing import Rehearsing

            with tempfile.TemporaryDirectory() as folder:
                work = Rehearsing(request, *load(request, Path(folder)), closing)
                try:
                    return replace(work.through(), guard=guard, notes=(*notes, *work.notes), cpu_seconds=_cpu_seconds())
                except Exception:
                    phase = work.phase
                    raise
        except Exception as error:  # noqa: BLE001 - what the run would end with
            return replace(empty, error=explained(error, phase), notes=tuple(notes), cpu_seconds=_cpu_seconds())


def load(request: Request, directory: Path) -> tuple[Config, Plugins]:
    """The configuration of the request, in a run directory of its own."""
    names = (tuple(cast(list[str], request.values[name])) for name in ("plugins", "without"))
    plugins = load_plugins(Selection(only=next(names), without=next(names)))
    schema = schema_of(plugins)
    values = dict(request.values) | request.overrides(directory)
    return restore(
        schema, {name: value for name, value in values.items() if name in schema.options}, request.accelerate
    ), plugins


def explained(error: Exception, phase: str) -> RehearsalError:
    """An error as the run would report it, with the innermost line that is not torch's."""
    import torch

    frames = traceback.extract_tb(error.__traceback__)
    not_own = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
    own = [frame for frame in frames if not frame.filename.startswith(not_own)]
    last = (own or list(frames))[-1]
    from smalti_plan.rehearsal.fake_tensors import needs_values

    is_users = isinstance(error, UserError)
    message = str(error) if is_users else f"{type(error).__name__}: {error}"
    if needs_values(error):
        message = f"this cannot be rehearsed, because it depends on values of tensors: {error}"
    fix = f"\n  fix: {error.fix}" if isinstance(error, UserError) and error.fix else ""
    return RehearsalError(
        message=f"{message}{fix}",
        where=f"{last.filename}:{last.lineno} in {last.name}",
        phase=phase,
        user=is_users,
        traceback="" if is_users else "".join(traceback.format_exception(error)),
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return round(used.ru_utime + used.ru_stime, 1)


if __name__ == "__main__":
    main()
