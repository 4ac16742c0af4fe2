"""Compiling where it takes no time: where an earlier run with the same settings has left its code. Imports no torch.

torch keeps what its compiler makes in a folder, by content. Runs that compile keep it in a folder of their own, which outlives
a restart of the node, or in that of the variable TORCHINDUCTOR_CACHE_DIR. A run is noted there after its first steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path

from smalti import Cleared, UserError
from smalti.config import Config, LaunchOptions
from smalti_plan.options import PlanOptions

BACKEND = "inductor"
"""Of torch.compile; others make no code that lasts."""
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable by which torch knows its folder."""
_STEPS = 3
"""Of a run: later ones compile for further sizes at most."""
_GROUPS = frozenset(
    ("model", "data", "diffusers", "lora", "toy", "fsdp", "context", "deepspeed", "memory", "updates", "activations")
)
_OPTIONS = frozenset(("num_processes", "mixed_precision", "dynamo_mode", "sdpa_backend", "channels_last"))
"""Groups of options that the code may depend on, and single options of others."""
_CHOSEN = "--compile=auto"


class CompiledCode:
    """The folder with the code, as a `smalti.plugins.Cache`. Its entries are the runs that are noted there.

    Of a folder that the user has named only the notes are counted and cleared: it may hold more.
    """

    def __init__(self) -> None:
        from platformdirs import user_cache_path

        own = user_cache_path("smalti") / "compiled"
        self._path = Path(os.environ.get(FOLDER) or own)
        self._is_own = self._path == own

    @property
    def place(self) -> str:
        return str(self._path)

    def entries(self) -> int:
        return len(list(self._path.glob("run-*")))

    def size(self) -> int:
        paths = self._path.rglob("*") if self._is_own else self._path.glob("run-*")
        return sum(path.stat().st_size for path in paths if path.is_file())

    def clear(self) -> Cleared:
        cleared = Cleared(count=self.entries(), bytes=self.size())
        try:
            for path in self._path.glob("run-*"):
                path.unlink()
            if self._is_own:
                shutil.rmtree(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"cannot clear {self._path}: {error}", fix="check the folder's owner and permissions") from error
        return cleared

    def note_of(self, config: Config, device: str) -> Path:
        """The file that is there once a run like this has passed its first steps. `device` is the accelerator's name."""
        schema = config.schema
        names = {name for group in schema.groups if group.name in _GROUPS for name in group.options.model_fields}
        values = {name: config.value(name) for name in sorted(names | _OPTIONS) if name in schema.options}
        text = json.dumps([version("torch"), device, values], sort_keys=True, default=str)
        return self._path / f"run-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def completed(config: Config) -> Config:
    """The configuration of a launch, with the backend of torch.compile if the code is there already and nothing else is set.

    Never for several nodes, which would have to agree. Raises UserError for an accelerator that cannot be asked for its name.
    """
    if not _asked(config) or config.source("dynamo_backend") != "default" or config[LaunchOptions].num_machines > 1:
        return config
    code = CompiledCode()
    if not code.entries() or not code.note_of(config, _device_here(config)).exists():
        return config
    return config.chosen("dynamo_backend", BACKEND, _CHOSEN)


def notice(config: Config) -> str | None:
    """What `--compile=auto` has done, in a sentence; None where it was not asked for, or the backend is set."""
    if not _asked(config):
        return None
    if config[LaunchOptions].dynamo_backend is None:
        return f"{_CHOSEN}: not compiled, as no run with these settings has left its code here; --dynamo_backend={BACKEND} does"
    if config.source("dynamo_backend").endswith(_CHOSEN):
        return f"{_CHOSEN}: compiled, with the code of an earlier run in {CompiledCode().place}"
    return None


class Keeping:
    """On a rank of a run that compiles: torch keeps its code for later runs, and the main rank notes the run."""

    def __init__(self, config: Config, device: str, *, notes: bool) -> None:
        code = CompiledCode()
        os.environ.setdefault(FOLDER, code.place)
        self._note = code.note_of(config, device) if notes else None
        self._left = _STEPS

    def step(self) -> None:
        """Called after each step."""
        self._left -= 1
        if self._left == 0 and self._note is not None:
            self._note.parent.mkdir(parents=True, exist_ok=True)
            self._note.write_text(f"torch {version('torch')}\n", encoding="utf-8")


def _asked(config: Config) -> bool:
    return config[PlanOptions].compile == "auto"


def _device_here(config: Config) -> str:
    from smalti_plan.here import device_name

    return "cpu" if config[LaunchOptions].use_cpu else device_name()
