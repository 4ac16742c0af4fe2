"""Registers terms of the loss, the columns that they read, and their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import ColumnEntry, hookimpl

if TYPE_CHECKING:
    from smalti import Config, OptionGroup
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
)


class Objectives:
    """Active where it is installed; what a run does not ask for does nothing."""

    @hookimpl
    def declare_options(self) -> list[OptionGroup]:
        from smalti_objectives.mask_options import GROUP

        return [GROUP]

    @hookimpl
    def register_columns(self) -> list[ColumnEntry]:
        return list(COLUMNS)

    @hookimpl
    def build_terms(self, config: Config, family: ModelFamily) -> list[Term]:
        from smalti_objectives.masked_loss import mask_terms

        return mask_terms(config, family)


plugin = Objectives()
