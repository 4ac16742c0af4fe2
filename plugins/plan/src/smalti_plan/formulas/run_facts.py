"""What the formulas need to know of a configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from smalti.config import Config, DataOptions, LaunchOptions, OptimizerOptions, TrainingOptions
from smalti.hookspecs import HookSpecs
from smalti.parallel import Products, products
from smalti.plugins import Plugins, choose_distributed, find_optimizer
from smalti_plan.facts import ModelFacts

_ADAM_BYTES = 8.0
"""Assumed for an optimizer that does not say it."""
_UPDATES = ("weights_dtype", "bf16_update", "release_gradients")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """`state_bytes` of the optimizer for each parameter that trains, without what depends on the model and on the way to train
    (`of_way`): its `factors`, and `rest_bytes` of weights in bf16. `ema` and `ema_on_device`: EMA is kept, and where.

    `averages`: the optimizer averages weights, and a save has the average as it would have an EMA.

    `bf16_weights`: weights that train are kept in bf16, with their gradients. `releases_gradients`: each is freed in the
    backward pass. `activations_on_host`: what recomputation keeps waits in host memory. A way to train may set these three.

    `effective_batch` is to be kept by every way to train, `ranks` are those that are configured. `products` is the type of
    matrix products. `notices` say what was assumed.
    """

    state_bytes: float
    ema: bool
    ema_on_device: bool
    products: Products
    effective_batch: int
    ranks: int
    activations_on_host: bool = False
    notices: tuple[str, ...] = ()
    factors: int = 0
    factors_flattened: bool = False
    averages: bool = False
    bf16_weights: bool = False
    rest_bytes: float = 0.0
    releases_gradients: bool = False

    @classmethod
    def of(cls, config: Config, plugins: Plugins, kind: str) -> RunFacts:
        """For devices of this kind. Raises UserError for an unknown optimizer, or for two strategies."""
        training, launch = config[TrainingOptions], config[LaunchOptions]
        entry = find_optimizer(config[OptimizerOptions].optimizer, plugins.gather(HookSpecs.register_optimizers))
        data_ranks = launch.num_processes // choose_distributed(config, plugins).context
        notices = []
        if entry.state_bytes is None:
            notices.append(
                f"{entry.title} does not say how much state it keeps; {_ADAM_BYTES:.0f} bytes per parameter are assumed"
            )
        # Options of a package that may not be there.
        given = {name: config.value(name) for name in _UPDATES if name in config.schema.options}
        return cls(
            state_bytes=_ADAM_BYTES if entry.state_bytes is None else entry.state_bytes,
            ema=training.use_ema,
            ema_on_device=training.use_ema and training.ema_device == "accelerator",
            products=products(config, kind),
            effective_batch=config[DataOptions].train_batch_size * training.gradient_accumulation_steps * data_ranks,
            ranks=launch.num_processes,
            activations_on_host=bool(config.values().get("offload_activations")),
            notices=tuple(notices),
            factors=entry.factors,
            factors_flattened=entry.factors_flattened,
            averages=entry.averages,
            bf16_weights=given.get("weights_dtype") == "bf16",
            rest_bytes=2.0 if given.get("bf16_update") == "kahan" else 0.0,
            releases_gradients=bool(given.get("release_gradients")),
        )

    def of_way(self, options: Mapping[str, object]) -> RunFacts:
        """Of a way to train that sets these options."""
        return replace(
            self,
            bf16_weights=options["weights_dtype"] == "bf16" if "weights_dtype" in options else self.bf16_weights,
            releases_gradients=bool(options.get("release_gradients", self.releases_gradients)),
            activations_on_host=bool(options.get("offload_activations", self.activations_on_host)),
        )

    def with_state(self, model: ModelFacts) -> RunFacts:
        """With all that the optimizer keeps of this model counted in `state_bytes`."""
        numbers = model.flattened_factors if self.factors_flattened else model.factors
        more = 4 * self.factors * numbers / max(1, model.trained) + (self.rest_bytes if self.bf16_weights else 0)
        return replace(self, state_bytes=self.state_bytes + more, factors=0, rest_bytes=0)
