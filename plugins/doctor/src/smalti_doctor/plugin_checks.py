"""What plugins find on this node, with the hook `diagnose`."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from smalti import Finding, InvalidOptionError
from smalti.config import Config
from smalti.hookspecs import HookSpecs
from smalti.plugins import Plugins, summary
from smalti_doctor.time_limits import run_within

SECONDS = 30.0
"""A plugin that takes longer is left behind."""


def plugin_findings(plugins: Plugins, config: Config | None, seconds: float = SECONDS) -> list[Finding]:
    """The findings of all plugins, in the order of the plugins. All are asked at the same time.

    A plugin that fails, or does not return within this time, is a warning.
    """

    def ask(name: str) -> list[Finding]:
        with suppress(InvalidOptionError):  # the option is reported by the checks of the configuration
            return plugins.call_one(name, HookSpecs.diagnose, config=config) or []
        return []

    answers = run_within({name: (partial(ask, name), seconds) for name in plugins.implementers(HookSpecs.diagnose)})
    return [
        finding
        for name, answer in answers.items()
        for finding in ([_broken(plugins, name, answer)] if isinstance(answer, Exception) else answer)
    ]


def _broken(plugins: Plugins, name: str, error: Exception) -> Finding:
    origin = plugins.infos[name].origin
    what = f"{error}: its driver or server may hang" if isinstance(error, TimeoutError) else f"failed: {summary(error)}"
    return Finding(check=f"plugin {name}", level="warning", message=f"the diagnosis of {origin} {what}", fix=origin.workaround)
