"""What plugins find on this node, with the hook `diagnose`."""

from __future__ import annotations

import threading
import time

from smalti.config import Config
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, summary
from smalti.types import Finding

SECONDS = 30.0
"""A plugin that takes longer is left behind."""


def plugin_findings(plugins: Plugins, config: Config | None, seconds: float = SECONDS) -> list[Finding]:
    """The findings of all plugins, in the order of the plugins. All are asked at the same time.

    A plugin that fails, or does not return within this time, is a warning. The thread of one that hangs remains.
    """
    answers: dict[str, list[Finding]] = {}

    def ask(name: str) -> None:
        try:
            answers[name] = plugins.call_one(name, HookSpecs.diagnose, config=config) or []
        except Exception as error:  # noqa: BLE001 - the other plugins are asked whatever one raises
            answers[name] = [_broken(plugins, name, f"failed: {summary(error)}")]

    names = plugins.implementers(HookSpecs.diagnose)
    threads = [threading.Thread(target=ask, args=(name,), name=f"smalti-diagnose-{name}", daemon=True) for name in names]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    late = f"did not return within {seconds:g} s: its driver or server may hang"
    return [finding for name in names for finding in answers.get(name, [_broken(plugins, name, late)])]


def _broken(plugins: Plugins, name: str, what: str) -> Finding:
    origin = plugins.infos[name].origin
    return Finding(check=f"plugin {name}", level="warning", message=f"the diagnosis of {origin} {what}", fix=origin.workaround)
