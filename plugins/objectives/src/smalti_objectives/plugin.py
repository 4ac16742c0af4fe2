"""Preservation, masks, sliders, preferences and so on: terms of the loss, and their columns. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import ColumnEntry, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup, Problem
    from smalti.models import ModelFamily
    from smalti.training import Term

COLUMNS = (
    ColumnEntry(
        name="mask",
        title="Masks",
        keys="smalti_objectives.columns.keys:MaskKeys",
        factory="smalti_objectives.columns.masks:open_mask",
    ),
    ColumnEntry(
        name="loss_weight",
        title="Weight in the loss",
        keys="smalti_objectives.columns.keys:WeightKeys",
        factory="smalti_objectives.columns.weights:open_weight",
    ),
    ColumnEntry(
        name="rejected",
        title="Rejected images",
        keys="smalti_objectives.columns.keys:RejectedKeys",
        factory="smalti_objectives.columns.images:open_rejected",
    ),
    ColumnEntry(
        name="slider_counterpart",
        title="Counterparts of a slider",
        keys="smalti_objectives.columns.keys:CounterpartKeys",
        factory="smalti_objectives.columns.images:open_counterpart",
    ),
)


class Objectives:
    """Active where it is installed. Without its options it adds nothing."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_objectives.mask_options import GROUP as MASKS
        from smalti_objectives.options import GROUP

        return [GROUP, MASKS]

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_objectives.options import problems

        return problems(config)

    @hookimpl
    def register_columns(self) -> list[ColumnEntry]:
        return list(COLUMNS)

    @hookimpl
    def build_terms(self, config: Config, family: ModelFamily) -> list[Term]:
        from smalti_objectives.terms import terms

        return terms(config, family)


plugin = Objectives()
