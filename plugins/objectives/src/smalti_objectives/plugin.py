"""Preservation and ranges of noise levels: terms of the loss. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup, Problem
    from smalti.models import ModelFamily
    from smalti.training import Term


class Objectives:
    """Active where it is installed. Without its options it adds nothing."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_objectives.options import GROUP

        return [GROUP]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_objectives.options import problems

        return problems(config)

    @hookimpl
    def build_terms(self, config: Config, family: ModelFamily) -> list[Term]:
        from smalti_objectives.terms import terms

        return terms(config, family)


plugin = Objectives()
