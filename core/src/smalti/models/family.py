"""What a model family must provide. One file per family answers all of this; the loop knows nothing else of it.

Shapes: B batch, C latent channels, H, W pixels, h, w latent size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from smalti.diffusion import BetaSchedule, Conditioning, Objective, Prediction, build_objective

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder

Encoding = Literal["latents", "texts"]
"""What the two kinds of encoders make: latents of pictures, conditioning of texts."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One batch of pictures to draw. Every prompt has its own seed, so a picture does not depend on its neighbours.

    `objective` is what the loss trains, its prediction and its noise schedule. A family that samples by itself hands it to its
    sampler (`smalti.diffusion.Sampler`) and builds no other.

    `conditioning` is that of the prompts and `unconditional` that of as many empty prompts, where they were encoded before
    training; both are None for families that are not `Cacheable`.
    """

    prompts: Sequence[str]
    seeds: Sequence[int]
    width: int
    height: int
    steps: int
    guidance: float
    objective: Objective
    conditioning: Conditioning | None = None
    unconditional: Conditioning | None = None


class Weights(Protocol):
    """Where the first weights come from: a folder of safetensors, or a seeded initialisation.

    Read name by name, so that a sharded model never has to exist whole on any rank.
    """

    def names(self) -> Iterator[str]:
        """Names of all parameters and persistent buffers."""
        ...

    def get(self, name: str) -> Tensor:
        """One whole tensor, on the CPU. Raises KeyError for a name that is not there."""
        ...


class ModelFamily(Protocol):
    """One architecture with its conditioning, from prompt and picture to prediction and back.

    One whose tokens several ranks can share has a method `context_plan` besides: see `smalti.models.context_parallel`. One
    whose model is conditioned on sizes and crops has `encode_size_conditioning`: see `smalti.models.size_conditioning`.

    A family of DDPM may also have `beta_schedule`, the noise schedule that its model was trained with, where that is not
    "scaled_linear" (`smalti.diffusion.BetaSchedule`), and one of rectified flow `flow_shift`, how far times are moved towards
    noise unless the user says how far (`smalti.diffusion.Shift`). One whose model spends much of its time in convolutions says
    `convolutional = True`; on CUDA devices they then compute with channels last (`smalti.models.memory_format`). One whose
    model no backend can share out says why in `indivisible`, in words that end "cannot share out ...". A module of its model
    that turns its first weights into something else once it has them is a `smalti.models.weights.PostLoadTransform`.
    """

    name: str
    alignment: int
    """Widths and heights of training pictures are multiples of this many pixels."""
    prediction: Prediction
    """What the model predicts unless `--prediction_type` says otherwise."""

    def build_model(self) -> nn.Module:
        """The trainable model. Called with parameters on the meta device; buffers are real, but for large ones that
        `weights` has. Must be cheap.

        A model with a method `enable_gradient_checkpointing` supports `--gradient_checkpointing`.
        """
        ...

    def weights(self, seed: int) -> Weights:
        """The weights to start from; `seed` matters only when they are made at random. The same on every rank."""
        ...

    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Conditioning with a leading dimension of len(captions), on the family's device. "" is the empty prompt.

        Shape and values of each row depend on its caption alone, so that rows can be cached and exchanged.
        """
        ...

    def encode_images(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> latents (B, C, h, w), scaled as the model wants them."""
        ...

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) -> (B, 3, H, W) in [-1, 1]."""
        ...

    def forward(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """The raw prediction, shaped like `noisy`. `timesteps` is (B,), in [0, 1000], 1000 being pure noise."""
        ...

    def sample(self, model: nn.Module, request: SampleRequest) -> Tensor:
        """Pictures (B, 3, H, W) in [-1, 1]. Called under no_grad with the model in eval mode."""
        ...

    def block_classes(self) -> tuple[str, ...]:
        """Class names of the repeated blocks; empty lets detection find them."""
        ...

    def flops_per_sample(self, width: int, height: int) -> int:
        """Floating-point operations of one forward pass for one picture, attention counted. Backward costs twice that.

        Asked once for each size of pictures while a run trains, so it must be cheap and allocate no weights. Raises
        NotImplementedError where it cannot be told; the run then has no `mfu`.
        """
        ...

    def to(self, device: str) -> None:
        """Move frozen parts (encoders, autoencoder) to the device that training runs on."""
        ...


def lacking(family: object) -> list[str]:
    """The attributes and methods of a `ModelFamily` that an object does not have."""
    methods = [name for name, value in vars(ModelFamily).items() if callable(value) and not name.startswith("_")]
    return [name for name in (*ModelFamily.__annotations__, *methods) if not hasattr(family, name)]


def native_schedule(family: ModelFamily) -> BetaSchedule:
    """The noise schedule that the model of a family of DDPM was trained with."""
    return cast(BetaSchedule, getattr(family, "beta_schedule", "scaled_linear"))


def native_objective(family: ModelFamily) -> Objective:
    """What a family trains unless the options say otherwise."""
    return build_objective(family.prediction, native=family.prediction, beta_schedule=native_schedule(family))


@runtime_checkable
class Exporter(Protocol):
    """What a family has besides if `smalti checkpoint export` can make something of its trained models."""

    def export(self, folder: ExportFolder) -> None:
        """Put what inference loads into `folder`: the trained tensors, as it gives them out, and everything around them.

        Runs on machines without accelerators; a whole model need never be in memory.
        """
        ...


@runtime_checkable
class Cacheable(Protocol):
    """What a family has besides if its latents and conditioning can be made before training and kept: see
    `smalti.data.cache.encode_ahead`.

    Then its encoders need not be in memory while it trains, and `encode_images` and `encode_captions` are not called.
    """

    def encoder_identity(self, kind: Encoding) -> dict[str, object]:
        """All that decides what this kind of encoder makes of a picture or a text, JSON-able.

        Digests of weights and vocabularies, settings, types; nothing of where they lie. Where it differs, nothing that was kept
        is used. Must not load the encoder.
        """
        ...

    def release_encoder(self, kind: Encoding) -> None:
        """Give back the memory of this kind of encoder. `sample` works as before: it is told what it needs of texts.

        What decodes pictures may stay in host memory, and is on the accelerator only while pictures are drawn.
        """
        ...


@runtime_checkable
class KeepsRawLatents(Protocol):
    """What a `Cacheable` has besides if its autoencoder's own output takes less room than the latents that the model wants.

    An autoencoder in bf16 gives 16 bits; shifted and scaled they are fp32. So `raw_latents` are kept, and
    `normalise_latents` makes of them what `encode_images` gives, to the bit: it is the second half of that.
    """

    def raw_latents(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> what the autoencoder makes of them (B, ...), in the type in which it computes."""
        ...

    def normalise_latents(self, raw: Tensor) -> Tensor:
        """Raw latents -> latents (B, C, h, w), scaled as the model wants them, on the device of `raw`."""
        ...


def latents_to_keep(family: ModelFamily, pixels: Tensor) -> Tensor:
    """(B, 3, H, W) in [-1, 1] -> what is kept of them."""
    return family.raw_latents(pixels) if isinstance(family, KeepsRawLatents) else family.encode_images(pixels)


def latents_of(family: ModelFamily, pixels: Tensor | None, kept: Tensor | None) -> Tensor:
    """The latents of a batch, from its pixels or from what was kept of them."""
    if kept is not None:
        return family.normalise_latents(kept) if isinstance(family, KeepsRawLatents) else kept
    assert pixels is not None, "a batch has pixels or latents"
    return family.encode_images(pixels)


@runtime_checkable
class TellsSettings(Protocol):
    """What a family has besides if it may draw with other settings than those that it is asked for."""

    def sampling_settings(self, request: SampleRequest) -> dict[str, float]:
        """What it draws with, by name, such as "guidance"; it is written into the pictures in place of what was asked for."""
        ...


@runtime_checkable
class Adaptable(Protocol):
    """What a family has besides if it can train an adapter: then it builds a model in which all else is frozen.

    What is frozen comes from `weights` each time, and checkpoints hold what trains.
    """

    def lora_targets(self) -> tuple[str, ...]:
        """Name endings of the modules that an adapter attaches to by default."""
        ...

    def adapter(self, seed: int) -> dict[str, object] | None:
        """What the adapter is, JSON-able; None when the run trains all weights.

        It goes into checkpoints, and a run resumes only from those that say the same: put in whatever changes the meaning of
        the trained tensors and does not show in their names and shapes, such as a scale and a digest of what is frozen.
        """
        ...


@runtime_checkable
class CountsTokens(Protocol):
    """What a family has besides if a token of its model is not a square of `alignment` pixels."""

    def image_tokens(self, width: int, height: int) -> int:
        """The length of the sequence that the model attends over for an image of this size in pixels, texts not counted.

        Of several lengths, as in a U-Net, the greatest. Must be cheap: the configuration is enough.
        """
        ...


def image_tokens(family: ModelFamily, width: int, height: int) -> int:
    """How many tokens an image is to the model of a family: what the family says, or one for each square of `alignment`."""
    if isinstance(family, CountsTokens):
        return family.image_tokens(width, height)
    return (width // family.alignment) * (height // family.alignment)
