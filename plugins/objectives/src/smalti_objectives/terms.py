"""The terms that the options ask for."""

from __future__ import annotations

from smalti import Config
from smalti.models import ModelFamily
from smalti.training import Term
from smalti_objectives.masked_loss import mask_terms
from smalti_objectives.options import ObjectivesOptions
from smalti_objectives.preserve import Preservation
from smalti_objectives.regularisation import Regularisation
from smalti_objectives.timestep_range import TimestepRange


def terms(config: Config, family: ModelFamily) -> list[Term]:
    """Those that may change the loss: one without effect would cost its forward passes."""
    options, found = config[ObjectivesOptions], list[Term]([Regularisation(config, family)])
    if options.preserve is not None and options.preserve_weight:
        found.append(Preservation(config, family))
    if (options.timestep_min, options.timestep_max) != (0, 1):
        found.append(TimestepRange(options.timestep_min, options.timestep_max))
    return [*found, *mask_terms(config, family)]
