"""The terms that the options ask for."""

from __future__ import annotations

from smalti import Config
from smalti.models import ModelFamily
from smalti.training import Term
from smalti_objectives.masked_loss import mask_terms
from smalti_objectives.options import ObjectivesOptions
from smalti_objectives.preference import Preference
from smalti_objectives.preserve import Preservation
from smalti_objectives.regularisation import Regularisation
from smalti_objectives.sliders import slider
from smalti_objectives.timestep_range import TimestepRange


def terms(config: Config, family: ModelFamily) -> list[Term]:
    """Those that may change the loss: one without effect would cost its forward passes."""
    options = config[ObjectivesOptions]
    found = [*slider(config, family), Regularisation(config, family)]  # which has the last word on its images
    if options.preserve is not None and options.preserve_weight:
        found.append(Preservation(config, family))
    if (options.timestep_min, options.timestep_max) != (0, 1):
        found.append(TimestepRange(options.timestep_min, options.timestep_max))
    if options.dpo_beta is not None:
        found.append(Preference(config, family))
    return [*found, *mask_terms(config, family)]
