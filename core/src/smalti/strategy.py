"""Which backend trains the run. Imports no torch."""

from __future__ import annotations

from smalti.config import Config
from smalti.errors import UserError
from smalti.plugins import Plugins
from smalti.types import DistributedPlan


def choose_distributed(config: Config, plugins: Plugins) -> DistributedPlan:
    """The one backend that claims the run. Raises UserError when two do."""
    claims = plugins.gather("configure_distributed", DistributedPlan, config=config)
    wanted = [plan for plan in reversed(claims) if not plan.fallback]  # the last registered first, as in every decide hook
    if len(wanted) > 1:
        raise UserError(
            f"{', '.join(plan.title for plan in wanted[:-1])} and {wanted[-1].title} cannot be enabled simultaneously.",
            fix="switch one of them off, in the flags, the configuration file or the Accelerate YAML",
        )
    return wanted[0] if wanted else next(plan for plan in claims if plan.fallback)
