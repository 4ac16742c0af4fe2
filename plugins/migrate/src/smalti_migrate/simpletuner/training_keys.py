"""SimpleTuner's options of optimizer, learning rate, objective and EMA."""

from __future__ import annotations

from collections.abc import Mapping

from smalti_migrate.simpletuner.conversions import (
    ema_decay,
    end_ratio,
    optimizer_settings,
    schedule,
    schedule_shift,
    sets,
    without_interval,
)
from smalti_migrate.simpletuner.rules import Rule, ignored, refused, renamed, same

_TEXT_ENCODERS = "text encoders are not trained"
_BETA = "set it to 2, or use timestep_distribution=logit_normal with flow_sigmoid_mean and flow_sigmoid_scale"
_BIAS = "no timesteps are preferred"
_OFFSET = "offset noise is not supported"


def _distribution(name: str) -> Rule:
    """A switch that chooses a distribution of timesteps."""
    option = "timestep_distribution"
    return renamed(option, "true chooses this distribution", neutral=(False,), convert=sets(option, name))


TRAINING_KEYS: Mapping[str, Rule] = {
    # Length
    "ignore_final_epochs": ignored("max_train_steps decides if it is given", True),
    "strict_epoch_limit": refused("max_train_steps decides if it is given", "leave max_train_steps out", False),
    # Optimizer
    "optimizer_config": renamed("adam_weight_decay, ...", "its settings are options here", convert=optimizer_settings),
    "optimizer_beta1": renamed("adam_beta1"),
    "optimizer_beta2": renamed("adam_beta2"),
    "optimizer_cpu_offload_method": refused(
        "optimizer state stays on the device", "use FSDP2 with fsdp_cpu_offload, or DeepSpeed", "none"
    ),
    "optimizer_offload_gradients": refused(
        "gradients stay on the device", "use FSDP2 with fsdp_cpu_offload, or DeepSpeed", False
    ),
    "optimizer_release_gradients": renamed("release_gradients", neutral=(False,)),
    "fuse_optimizer": ignored("fused optimizers are used where there are any"),
    "prodigy_steps": ignored("it belongs to Prodigy"),
    "text_encoder_limit": ignored(_TEXT_ENCODERS),
    "freeze_encoder_before": ignored(_TEXT_ENCODERS),
    "freeze_encoder_after": ignored(_TEXT_ENCODERS),
    "freeze_encoder_strategy": ignored(_TEXT_ENCODERS),
    "save_text_encoder": ignored(_TEXT_ENCODERS),
    "freeze_encoder": ignored(_TEXT_ENCODERS, True),
    "layer_freeze_strategy": refused("all layers are trained", "set it to none, or train a LoRA", "none"),
    "use_bitfit": refused("all weights are trained, not biases alone", "set it to false, or train a LoRA", False),
    # Learning rate
    "lr_scheduler": same(convert=schedule, why="another name", fix="set lr_scheduler to cosine"),
    "lr_end": renamed("lr_end_ratio", "a share of learning_rate", convert=end_ratio),
    "lr_num_cycles": refused("schedules have no restarts", "set it to 1", 1),
    "lr_scale": refused("learning_rate is used as it is given", "compute the rate, and give it as learning_rate", False),
    "lr_scale_sqrt": ignored("learning_rate is used as it is given", False),
    # Objective
    "snr_gamma": same({"0": (None, ""), "0.0": (None, "")}),
    "use_soft_min_snr": refused("soft min-SNR is not supported", "snr_gamma=5 is min-SNR weighting", False),
    "soft_min_snr_sigma_data": ignored("soft min-SNR is not supported"),
    "snr_weight": ignored("snr_gamma weights by the signal-to-noise ratio", 0.1, 1.0),
    "flow_use_uniform_schedule": _distribution("uniform"),
    "flow_use_beta_schedule": renamed(
        "timestep_distribution",
        "true chooses this distribution",
        neutral=(False,),
        convert=sets("timestep_distribution", "beta"),
    ),
    "flow_beta_schedule_alpha": refused("alpha is always 2 here", _BETA, 2),
    "flow_beta_schedule_beta": refused("beta is always 2 here", _BETA, 2),
    "flow_schedule_shift": same(convert=schedule_shift, why="0 there means without a shift, which is 1 here"),
    "flow_custom_timesteps": refused("a list of timesteps is not supported", "timestep_distribution=uniform"),
    "timestep_bias_strategy": refused(_BIAS, "set it to none", "none"),
    "timestep_bias_begin": ignored(_BIAS, 0),
    "timestep_bias_end": ignored(_BIAS, 1000),
    "timestep_bias_multiplier": ignored(_BIAS, 1.0),
    "timestep_bias_portion": ignored(_BIAS, 0.25),
    "disable_segmented_timestep_sampling": ignored("every image has its own random timestep", True),
    "training_scheduler_timestep_spacing": ignored("all timesteps of the schedule are trained", "trailing"),
    "offset_noise": refused(_OFFSET, "set it to false", False),
    "noise_offset": ignored(f"{_OFFSET}; there it has an effect only with offset_noise", 0, 0.1),
    "noise_offset_probability": ignored(_OFFSET, 0.25),
    "input_perturbation": refused("input perturbation is not supported", "set it to 0", 0),
    "input_perturbation_steps": ignored("input perturbation is not supported", 0),
    "diff2flow_loss": ignored("a model keeps its own objective", False),
    "scheduled_sampling_max_step_offset": refused("scheduled sampling is not supported", "set it to 0", 0),
    "distillation_method": refused("distillation is not supported", "remove it"),
    "seed_for_each_device": ignored("noise depends on the image's place in the run, not on the device"),
    # EMA
    "ema_decay": same(convert=without_interval, why="with ema_update_interval, the decay for one step"),
    "ema_update_interval": renamed(
        "ema_decay", "the EMA is updated in every step, with a decay that forgets as fast", neutral=(1,), convert=ema_decay
    ),
    "ema_cpu_only": ignored("with ema_device=cpu, the EMA is computed on the CPU"),
    "ema_foreach_disable": ignored("it changes speed only"),
    "ema_validation": ignored("validation images show the EMA if there is one", "ema_only"),
}
