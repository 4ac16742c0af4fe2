"""Validation images with another scheduler than the pipeline's, and decoded in tiles or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti import UserError
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import class_of

_NOISE = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler-a": "EulerAncestralDiscreteScheduler",
    "heun": "HeunDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
}
"""For models that predict noise or velocity of DDPM."""
_FLOW = {
    "euler": "FlowMatchEulerDiscreteScheduler",
    "unipc": "UniPCMultistepScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
}
"""For rectified flow."""
_TAKE_SIGMAS = ("euler", "unipc")
"""Schedulers of rectified flow for pipelines that compute the noise levels themselves."""
_TERMINAL_NOISE = ("ddim", "ddpm", "euler", "euler-a", "unipc", "dpm++")
"""Schedulers that can begin in pure noise (zero terminal SNR)."""
_FOR_PIPELINES = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
"""What pipelines read in the scheduler's configuration, whatever the scheduler."""


def check_scheduler(name: str, pipeline: str, *, flow: bool, given_sigmas: bool, terminal_noise: bool) -> None:
    """Raises UserError if images of a model cannot be sampled with this scheduler.

    Args:
        name: as `validation_noise_scheduler` has it.
        pipeline: the class of the pipeline, for the message.
        flow: whether the model is one of rectified flow.
        given_sigmas: whether the pipeline computes the noise levels itself.
        terminal_noise: whether the noise schedule of the run ends in pure noise.
    """
    known = list(_FLOW if flow else _NOISE)
    if given_sigmas:
        known = [each for each in known if each in _TAKE_SIGMAS]
    if terminal_noise:
        known = [each for each in known if each in _TERMINAL_NOISE]
    if name in known:
        return
    why = "its model is one of rectified flow" if flow else "its model predicts noise or velocity"
    why = "its pipeline computes the noise levels itself" if flow and given_sigmas and name in _FLOW else why
    why = "the noise schedule of the run ends in pure noise" if not flow and name in _NOISE else why
    raise UserError(
        f"validation_noise_scheduler={name}: {pipeline} cannot sample with it, because {why}",
        fix=f"--validation_noise_scheduler={known[0]}; also possible: {', '.join(known[1:])}",
    )


def scheduler_in_place(name: str, base: Mapping[str, Any], *, flow: bool) -> object:
    """The scheduler of this name with noise schedule and timestep shift of another one, whose configuration is `base`."""
    cls = class_of("diffusers", (_FLOW if flow else _NOISE)[name])
    values = {**base, "clip_sample": False, "thresholding": False}  # which are for pixels, not for latents
    if flow:
        shift = values.get("shift", values.get("flow_shift"))
        values |= {"shift": shift, "flow_shift": shift, "use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    known = signature(cls).parameters
    scheduler = cls(**{key: value for key, value in values.items() if key in known and value is not None})
    scheduler.register_to_config(**{key: values[key] for key in _FOR_PIPELINES if key in values and key not in known})
    return cast(object, scheduler)


@contextmanager
def decoding(vae: nn.Module, options: DiffusersOptions) -> Iterator[None]:
    """Within it, images are decoded in tiles or one by one, as the options say. Latents are encoded without either."""
    vae_any = cast(Any, vae)
    switches = [
        (vae_any.enable_tiling, vae_any.disable_tiling, options.vae_enable_tiling),
        (vae_any.enable_slicing, vae_any.disable_slicing, options.vae_enable_slicing),
    ]
    wanted = [(on, off) for on, off, is_wanted in switches if is_wanted]
    try:
        for on, _ in wanted:
            on()
        yield
    finally:
        for _, off in wanted:
            off()


def decode_in_own_type(vae: nn.Module) -> None:
    """Make an autoencoder keep its type: pipelines call it with latents of the encoders' type, and under the run's autocast."""
    decode = cast("Callable[..., object]", vae.decode)

    def in_own_type(latents: Tensor, *arguments: object, **keywords: object) -> object:
        with torch.autocast(latents.device.type, enabled=False):
            return decode(latents.to(next(vae.parameters()).dtype), *arguments, **keywords)

    vae.decode = in_own_type  # type: ignore[assignment]
