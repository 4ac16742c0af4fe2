"""Whether a run adds noise with the schedule with which the pipeline's scheduler removes it. For families of DDPM."""

from __future__ import annotations

from collections.abc import Mapping

from smalti import Config, UserError
from smalti.config import ObjectiveOptions
from smalti.diffusion import PUBLISHED_BETAS

_MENDED = "train from a pipeline whose scheduler_config.json has the schedule that the model was trained with"


def check_noise_schedule(config: Config, scheduler: Mapping[str, object], pipeline: str) -> None:
    """Refuse options that do not go with a scheduler's configuration, as its file has it. `pipeline` is named in the error.

    Stretching the schedule to zero terminal SNR is a choice that a run may make; all else belongs to the model.
    """
    options = config[ObjectiveOptions]
    said = scheduler.get("beta_schedule")
    if said is None or scheduler.get("trained_betas") is not None or scheduler.get("num_train_timesteps", 1000) != 1000:
        kind = scheduler.get("_class_name")
        raise UserError(f"the scheduler of {pipeline} ({kind}) has a noise schedule that cannot be trained", fix=_MENDED)
    if options.beta_schedule not in (None, said):
        raise UserError(
            f"the scheduler of {pipeline} has the noise schedule {said}, and beta_schedule is {options.beta_schedule}",
            fix=f"--beta_schedule={said}",
        )
    trained = dict(zip(("beta_start", "beta_end"), PUBLISHED_BETAS.get(str(said), ()), strict=False))
    if wrong := [name for name, beta in trained.items() if scheduler.get(name) != beta]:
        wrong_values = ", ".join(f"{name}={scheduler.get(name)} instead of {trained[name]}" for name in wrong)
        raise UserError(f"the scheduler of {pipeline} has a noise schedule that cannot be trained: {wrong_values}", fix=_MENDED)
    if scheduler.get("rescale_betas_zero_snr") and not options.rescale_betas_zero_snr:
        raise UserError(
            f"the scheduler of {pipeline} ends in pure noise (zero terminal SNR), and the run would not",
            fix="--rescale_betas_zero_snr",
        )
