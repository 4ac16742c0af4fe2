"""Which work a run does between steps, such as generating validation images, and when. Plugins add it."""

from __future__ import annotations

from typing import cast

from smalti.config import Config
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, create
from smalti.training.run import PeriodicWork
from smalti.types import RunState


def periodic_work(config: Config, plugins: Plugins) -> list[PeriodicWork]:
    """The work that a run has from all plugins, in the order in which it is done."""
    entries = sorted(plugins.gather(HookSpecs.register_periodic_work), key=lambda entry: entry.order)
    made = [cast(PeriodicWork | None, create(entry, entry.factory, config)) for entry in entries]
    return [work for work in made if work is not None]


def is_due(state: RunState, interval: int) -> bool:
    """Whether something that comes every `interval` steps comes after this one; 0 means never. A skipped step is none."""
    return interval > 0 and state.step % interval == 0 and not state.skipped
