"""The names of the optimizers of this package, and where each works."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smalti import OptimizerEntry, hookimpl

if TYPE_CHECKING:
    from smalti import Config, Problem

_SETTINGS = {"adam_beta1": "betas", "adam_beta2": "betas", "adam_epsilon": "eps", "adam_weight_decay": "weight_decay"}


_OPTIMIZERS = (
    OptimizerEntry(
        name="adafactor",
        title="Adafactor",
        state_bytes=0,
        factors=1,
        factors_flattened=True,
        factory="smalti_optimizers.adafactor:FixedRateAdafactor",
        accepts=("weight_decay",),
        flat=False,
    ),
    OptimizerEntry(
        name="came",
        title="CAME, Adafactor with a momentum",
        state_bytes=4,
        factors=2,
        factors_flattened=True,
        factory="smalti_optimizers.came:CAME",
        accepts=("betas", "weight_decay"),
        flat=False,
    ),
    OptimizerEntry(
        name="adafactor_scaled",
        title="Adafactor, learning rate scaled by the size of each weight",
        state_bytes=0,
        factors=1,
        factory="torch.optim:Adafactor",
        accepts=("weight_decay",),
        shards=False,
        flat=False,
    ),
    OptimizerEntry(
        name="muon",
        title="Muon for matrices, AdamW for the rest",
        state_bytes=4.1,
        factory="smalti_optimizers.muon:muon",
        flat=False,
    ),
    OptimizerEntry(
        name="adamw8bit",
        title="AdamW with its state in 8 bits",
        state_bytes=2.1,
        factory="smalti_optimizers.adamw8bit:AdamW8bit",
        flat=False,
    ),
    OptimizerEntry(
        name="stableadamw",
        title="StableAdamW, AdamW with the update clipping of Adafactor",
        state_bytes=8,
        factory="smalti_optimizers.stable_adamw:StableAdamW",
        flat=False,
    ),
    OptimizerEntry(
        name="prodigy",
        title="Prodigy, Adam that finds its learning rate",
        state_bytes=16,
        factory="smalti_optimizers.prodigy:Prodigy",
        accepts=("betas", "eps"),
        flat=False,
    ),
    OptimizerEntry(
        name="adamw_schedulefree",
        title="schedule-free AdamW",
        state_bytes=8,
        factory="smalti_optimizers.schedule_free:ScheduleFreeAdamW",
        averages=True,
        flat=False,
    ),
    OptimizerEntry(
        name="prodigy_schedulefree",
        title="schedule-free Prodigy",
        state_bytes=16,
        factory="smalti_optimizers.prodigy_schedule_free:ProdigyScheduleFree",
        averages=True,
        accepts=("betas", "eps"),
        flat=False,
    ),
    OptimizerEntry(
        name="lion",
        title="Lion",
        state_bytes=4,
        factory="smalti_optimizers.lion:Lion",
        accepts=("betas", "weight_decay"),
    ),
    OptimizerEntry(
        name="adagrad",
        title="Adagrad",
        state_bytes=4,
        factory="smalti_optimizers.decoupled:adagrad",
        accepts=("eps", "weight_decay"),
    ),
    OptimizerEntry(
        name="sgd",
        title="SGD with momentum 0.9",
        state_bytes=4,
        factory="smalti_optimizers.decoupled:sgd",
        accepts=("weight_decay",),
    ),
)


class Optimizers:
    """Registers them; `smalti.training` builds the one that `--optimizer` names."""

    @hookimpl
    def check_config(self, config: Config) -> list[Problem]:
        from smalti_optimizers.checks import problems

        return problems(config)

    @hookimpl
    def notices_before_launch(self, config: Config) -> list[str]:
        from smalti_optimizers.checks import name_of

        name = name_of(config)
        taken, given = self.settings().get(name, tuple(_SETTINGS.values())), config.given()
        idle = [option for option, setting in _SETTINGS.items() if setting not in taken and option in given]
        return [f"{option} has no effect: the optimizer {name} does not use it" for option in idle]

    def settings(self) -> dict[str, tuple[str, ...]]:
        """What the optimizers of this package take."""
        return {entry.name: entry.accepts for entry in self.register_optimizers()}

    @hookimpl
    def register_optimizers(self) -> list[OptimizerEntry]:
        return list(_OPTIMIZERS)


plugin = Optimizers()
