"""What kinds of autoencoders make of images, and how their output is scaled to the latents that a model is trained on.

Shapes: B batch, (B, 3, H, W) pixels in [-1, 1], (B, C, h, w) latents.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from smalti_diffusers.sources.components import class_of

if TYPE_CHECKING:
    from smalti_diffusers.pipeline import PipelineFamily


class Autoencoder:
    """Latents are (output - `shift_factor`) * `scaling_factor`: those of the configuration, or the defaults of the class."""

    def __init__(self, family: PipelineFamily) -> None:
        self.family = family
        self.config = family.components.config("vae")

    @property
    def scale(self) -> int:
        """Pixels on the edge of one latent pixel."""
        stages = cast(list[int], self.config.get("block_out_channels") or self.config.get("encoder_block_out_channels"))
        return int(2 ** (len(stages) - 1))

    @property
    def channels(self) -> int:
        return cast(int, self.config["latent_channels"])

    def encode(self, pixels: Tensor) -> Tensor:
        """The mean, not a sample: noise is added by training itself, and a cache could hold one sample only."""
        encoded = self._vae.encode(pixels.to(self._dtype))
        return cast(Tensor, encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0])

    def normalise(self, raw: Tensor) -> Tensor:
        """Its own output -> latents, in fp32."""
        shift, scale = self._numbers
        return (raw.float() - shift) * scale

    def decode(self, latents: Tensor) -> Tensor:
        pixels: Tensor = self._vae.decode(self._own(latents).to(self._dtype), return_dict=False)[0]
        return pixels.float().clamp(-1, 1)

    def _own(self, latents: Tensor) -> Tensor:
        """The inverse of `normalise`."""
        shift, scale = self._numbers
        return latents / scale + shift

    @cached_property
    def _numbers(self) -> tuple[float, float]:
        kind = class_of("diffusers", str(self.family.components.kind("vae")))
        defaults = {name: each.default for name, each in signature(kind).parameters.items()}
        shift, scale = (self.config.get(name, defaults.get(name)) for name in ("shift_factor", "scaling_factor"))
        return cast(float, shift or 0.0), cast(float, scale or 1.0)

    @property
    def _vae(self) -> Any:
        return self.family.vae

    @property
    def _dtype(self) -> torch.dtype:
        return cast(torch.dtype, next(self._vae.parameters()).dtype)


class VideoAutoencoder(Autoencoder):
    """An image is a video of one frame; the configuration has mean and standard deviation of each channel."""

    @property
    def scale(self) -> int:
        return int(2 ** len(cast(list[bool], self.config["temperal_downsample"])))

    @property
    def channels(self) -> int:
        return cast(int, self.config["z_dim"])

    def encode(self, pixels: Tensor) -> Tensor:
        return super().encode(pixels.unsqueeze(2)).squeeze(2)

    def normalise(self, raw: Tensor) -> Tensor:
        mean, deviation = self._statistics(raw.device)
        return (raw.float() - mean) / deviation

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).squeeze(2)

    def _own(self, latents: Tensor) -> Tensor:
        mean, deviation = self._statistics(latents.device)
        return (latents * deviation + mean).unsqueeze(2)

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        mean, deviation = (tuple(cast(list[float], self.config[name])) for name in ("latents_mean", "latents_std"))
        return _channels(mean, device), _channels(deviation, device)


@lru_cache(maxsize=4)
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1). It stays on the device, as every step wants it."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


class AlphaAutoencoder(VideoAutoencoder):
    """Images have a fourth channel, from -1, transparent, to 1, opaque as photos are. What is decoded is laid over white."""

    def encode(self, pixels: Tensor) -> Tensor:
        return super().encode(torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))

    def decode(self, latents: Tensor) -> Tensor:
        return over_white(super().decode(latents) / 2 + 0.5) * 2 - 1


def over_white(images: Tensor) -> Tensor:
    """(B, 4, H, W) in [0, 1] -> (B, 3, H, W): over white where they are transparent."""
    alpha = images[:, 3:]
    return images[:, :3] * alpha + 1 - alpha


class PatchAutoencoder(Autoencoder):
    """A latent pixel is a 2x2 square of its own, normalised by the running statistics of a batch norm that it keeps."""

    epsilon: ClassVar[float | None] = None
    """What is added to the variance. None: what the batch norm has."""
    _known: tuple[Tensor, Tensor] | None = None

    @property
    def scale(self) -> int:
        return 2 * super().scale

    @property
    def channels(self) -> int:
        return 4 * super().channels

    def normalise(self, raw: Tensor) -> Tensor:
        known = self._known
        mean, deviation = self._statistics(raw.device)
        if known is None:
            self.family.park_vae()  # where everything was encoded before, it was loaded for its statistics alone
        return (self.squares(raw.float()) - mean) / deviation

    def _own(self, latents: Tensor) -> Tensor:
        mean, deviation = self._statistics(latents.device)
        return self.pixels(latents * deviation + mean)

    def squares(self, raw: Tensor) -> Tensor:
        """(B, C, 2 h, 2 w) -> (B, 4 C, h, w)."""
        return pixel_unshuffle(raw, 2)

    def pixels(self, latents: Tensor) -> Tensor:
        """The inverse of `squares`."""
        return pixel_shuffle(latents, 2)

    def _statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, both (4 C, 1, 1). They stay on the device, as every step wants them."""
        if self._known is None or self._known[0].device != device:
            norm = cast(nn.BatchNorm2d, self._vae.bn)
            mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
            mean, deviation = mean.float(), torch.sqrt(variance.float() + (norm.eps if self.epsilon is None else self.epsilon))
            self._known = mean.view(-1, 1, 1).to(device), deviation.view(-1, 1, 1).to(device)
        return self._known
