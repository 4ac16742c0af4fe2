"""The toy family: a small transformer on pixels that needs torch alone, for the demo, for tests and as a first example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import FamilyEntry, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup, Problem


class Toy:
    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_toy.configuration import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_toy.configuration import problems

        return problems(config)

    @hookimpl
    def register_model_families(self) -> list[FamilyEntry]:
        return [FamilyEntry(name="toy", title="a small transformer on pixels", factory="smalti_toy.configuration:create")]


plugin = Toy()
