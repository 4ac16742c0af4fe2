"""The base class of model families: all that the trainer knows of an architecture.

Shapes: B batch, C latent channels, H, W pixels, h, w latent size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from smalti.diffusion import (
    BetaSchedule,
    Conditioning,
    Objective,
    Prediction,
    RectifiedFlow,
    Sampler,
    Shift,
    build_objective,
    seeded_noise,
)
from smalti.errors import UserError
from smalti.models.context_parallel import ContextPlan
from smalti.models.size_conditioning import SizeConditioning
from smalti.models.weights import SeededWeights, Weights
from smalti.types import FrozenStorage

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder, ExportRequest

Encoding = Literal["latents", "texts"]
"""What the two kinds of encoders make: latents of images, conditioning of texts."""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One batch of images to sample. Every prompt has its own seed, so an image does not depend on its neighbours.

    `objective` is what the loss trains: its prediction and its noise schedule. A family that samples by itself passes it to its
    sampler (`smalti.diffusion.Sampler`) and builds no other.

    `conditioning` is that of the prompts and `unconditional` that of as many negative prompts, where they were encoded before
    training; both are None for families that are not `cacheable`.

    `negative_prompts` are as many as `prompts`, None for an image without one; () for no negative prompts. `guidance_rescale`
    is the share of a guided prediction that is rescaled to the standard deviation of the prediction for the prompt (Lin et
    al. 2023, section 3.4); 0 is none.
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
    negative_prompts: Sequence[str | None] = ()
    guidance_rescale: float = 0.0


class ModelFamily:
    """One architecture with its conditioning, from prompt and image to prediction and back. Inherit from it.

    `name`, `build_model`, `encode_captions` and `forward` are required. The other defaults are those of a model that works on
    pixels, starts from random weights and has no parts beside the trained model: it trains all weights, encodes in every step
    and has no export. Attributes are set on the class, or in `__init__` where they depend on the configuration.

    A public name of a subclass that is nearly a name of this class is taken for a misspelling and refused; names that begin
    with an underscore are free.
    """

    name: str
    """What `--model_family` calls it."""
    prediction: Prediction = "flow_matching"
    """What the model predicts unless `--prediction_type` says otherwise."""
    alignment: int = 1
    """Widths and heights of training images are multiples of this many pixels."""
    beta_schedule: BetaSchedule = "scaled_linear"
    """The noise schedule that a DDPM model was trained with."""
    flow_shift: Shift | None = None
    """Timestep shift of a flow model, unless the options give one; None is no shift."""
    convolutional: bool = False
    """Whether the model spends much of its time in convolutions. On CUDA devices they then use the channels-last format."""
    indivisible: str = ""
    """Why the model cannot be sharded: the end of the sentence "FSDP2 cannot shard ...". Empty if it can be."""
    no_negative_prompt: str = ""
    """Why a negative prompt has no effect on images. Empty if it has one."""
    no_guidance_rescale: str = ""
    """Why `sample` cannot rescale guided predictions. Empty if it can, as the default `sample` does."""
    host_conditioning: Collection[str] = ()
    """Names of the conditioning of captions that `forward` takes in host memory, to read it without waiting for the device, if
    captions were encoded before training. From `encode_captions` and in `sample` it is on `device` as all other."""
    learning_rates: Mapping[str, float] = {}
    """Peak learning rates of the parameters whose names begin so, in place of `--learning_rate`."""
    notices: Sequence[str] = ()
    """What the user should know before the launch, in sentences. Printed once, with the other notices."""
    device: torch.device = torch.device("cpu")
    """Where frozen parts are, and what they encode."""

    # --- the trained model ------------------------------------------------------------------------------------------

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The trainable model. Called with parameters on the meta device; buffers are real, but for large ones that
        `weights` has. Must be cheap.

        A model with a method `enable_gradient_checkpointing` supports `--gradient_checkpointing`. A module that reads
        parameters of its parts without calling these has a true attribute `reads_parts`, so that ZeRO 3 gathers them with it.
        """
        ...

    @abstractmethod
    def encode_captions(self, captions: Sequence[str]) -> Conditioning:
        """Conditioning with a leading dimension of len(captions), on `device`. "" is the empty prompt.

        Shape and values of each row depend on its caption alone, so that rows can be cached and exchanged.
        """
        ...

    @abstractmethod
    def forward(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """The raw prediction, shaped like `noisy`. `timesteps` is (B,), in [0, 1000], 1000 being pure noise."""
        ...

    def encode_negative_prompts(self, prompts: Sequence[str | None]) -> Conditioning:
        """Conditioning of negative prompts, shaped as that of captions. By default the same.

        None is a prompt without one, which guides away from the empty caption: its row is that of "" in `encode_captions`.
        """
        return self.encode_captions([text or "" for text in prompts])

    def weights(self, seed: int) -> Weights:
        """The weights to start from, by default random ones. `seed` matters only for those. The same on every rank."""
        return SeededWeights(self.build_model, seed)

    def block_classes(self) -> tuple[str, ...]:
        """Class names of the repeated blocks, which are sharded, recomputed and compiled. Empty: they are detected."""
        return ()

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """Where several ranks can split the tokens of this model (`--context_parallel_size`). None if they cannot."""
        return None

    # --- images and latents -----------------------------------------------------------------------------------------

    def encode_images(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> latents (B, C, h, w), scaled as the model wants them. By default the pixels."""
        return pixels

    def decode_latents(self, latents: Tensor) -> Tensor:
        """Latents (B, C, h, w) -> (B, 3, H, W) in [-1, 1]. The inverse of `encode_images`."""
        return latents

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        """(C, h, w) of the latents of an image of this size in pixels. Override it together with `encode_images`."""
        return 3, height, width

    def encode_size_conditioning(self, sizes: Sequence[SizeConditioning], width: int, height: int) -> Conditioning:
        """For models that are conditioned on the original size and the crop of an image, as SDXL; by default nothing.

        Conditioning with a leading dimension of len(sizes), on `device`, for images that are trained at `width` x `height`. Its
        names are others than those of `encode_captions`; `forward` gets both.
        """
        return {}

    # --- encoding before training -----------------------------------------------------------------------------------

    @property
    def cacheable(self) -> bool:
        """Whether latents and conditioning can be encoded before training and stored: `encoder_identity` is written.

        Then encoders need not be in memory while the model trains, and `encode_images` and `encode_captions` are not called.
        """
        return type(self).encoder_identity is not ModelFamily.encoder_identity

    def encoder_identity(self, kind: Encoding) -> dict[str, object]:
        """All that decides what this kind of encoder makes of an image or a text, JSON-able. By default nothing is stored.

        Digests of weights and vocabularies, settings, types; no paths. Where it differs, nothing that was stored is used. Must
        not load the encoder. Write `release_encoder` too.
        """
        raise NotImplementedError

    def release_encoder(self, kind: Encoding) -> None:
        """Free the memory of this kind of encoder. `sample` works as before: the request has the conditioning.

        What decodes latents may stay in host memory, and is on the accelerator only while images are sampled.
        """
        raise NotImplementedError

    def raw_latents(self, pixels: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> what is stored of them (B, ...). By default the latents that the model wants.

        An autoencoder in bf16 returns 16 bits; shifted and scaled they are fp32. To store its own output, write this method and
        `normalise_latents`, and let `encode_images` call one after the other.
        """
        return self.encode_images(pixels)

    def normalise_latents(self, raw: Tensor) -> Tensor:
        """Raw latents -> what `encode_images` returns, to the bit, on the device of `raw`. By default the same."""
        return raw

    # --- sampling ---------------------------------------------------------------------------------------------------

    def sample(self, model: nn.Module, request: SampleRequest) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1]. Called under no_grad with the model in eval mode.

        Raises UserError for a width or height that is no multiple of `alignment`.
        """
        width, height, count = request.width, request.height, len(request.prompts)
        if width % self.alignment or height % self.alignment:
            raise UserError(
                f"{self.name} cannot sample images of {width}x{height} pixels",
                fix=f"use a width and a height that are multiples of {self.alignment}",
            )
        conditioning, unconditional = self.request_conditioning(request)
        size = SizeConditioning.of((width, height))
        sizes = self.encode_size_conditioning([size] * count, width, height)
        latents = self.build_sampler(request)(
            lambda noisy, timesteps, given: self.forward(model, noisy, timesteps, given),
            seeded_noise(request.seeds, self.latent_shape(width, height), self.device),
            conditioning | sizes,
            unconditional | sizes,
        )
        return self.decode_latents(latents)

    def build_sampler(self, request: SampleRequest) -> Sampler:
        """What `sample` uses; by default with `flow_shift`, if the objective is rectified flow."""
        shift = 1.0
        if self.flow_shift is not None and isinstance(request.objective, RectifiedFlow):
            shift = self.flow_shift.at(self.image_tokens(request.width, request.height))
        return Sampler(
            objective=request.objective,
            steps=request.steps,
            guidance=request.guidance,
            guidance_rescale=request.guidance_rescale,
            shift=shift,
        )

    def request_conditioning(self, request: SampleRequest) -> tuple[Conditioning, Conditioning]:
        """Conditioning of the prompts, and of the negative prompts: from the request, else encoded now, as in training."""
        if request.conditioning is not None and request.unconditional is not None:
            return request.conditioning, request.unconditional
        negative = request.negative_prompts or [None] * len(request.prompts)
        with torch.autocast(self.device.type, enabled=False):
            return self.encode_captions(request.prompts), self.encode_negative_prompts(negative)

    def sampling_settings(self, request: SampleRequest) -> Mapping[str, str | float]:
        """Settings that `sample` uses in place of those of the request, by name, such as "guidance". Saved with images."""
        return {}

    # --- adapters ---------------------------------------------------------------------------------------------------

    @property
    def adaptable(self) -> bool:
        """Whether the family can train an adapter: `adapter` is written."""
        return type(self).adapter is not ModelFamily.adapter

    @property
    def scales_adapter(self) -> bool:
        """Whether its adapter can be made weaker or stronger while images are sampled: `adapter_strength` is written."""
        return type(self).adapter_strength is not ModelFamily.adapter_strength

    def lora_targets(self) -> tuple[str, ...]:
        """Name endings of the modules that an adapter attaches to by default."""
        return ()

    def adapter(self, seed: int) -> dict[str, object] | None:
        """A description of the adapter, JSON-able; None, the default, when the run trains all weights.

        With an adapter, everything else in the model is frozen and comes from `weights` each time; checkpoints hold what
        trains. The description goes into them, and a run resumes only from those with the same one: include whatever changes
        the meaning of the trained tensors and does not show in their names and shapes, such as a scale and a digest of what is
        frozen. A value is None where it is not known, in a dry run without weights. Write `lora_targets` too.
        """
        return None

    def adapter_strength(self, model: nn.Module, strength: float) -> AbstractContextManager[None]:
        """Within it, what the trained adapter adds is multiplied by `strength`; 0 gives the model without the adapter.

        `model` is that of `build_model`, spread over ranks or not. Afterwards it is as before. Must not be collective. Called
        only where `scales_adapter` is true.
        """
        raise NotImplementedError

    # --- export -----------------------------------------------------------------------------------------------------

    def check_export(self, request: ExportRequest) -> None:
        """Raises UserError for a request that this run cannot be exported with. Called before anything is written.

        By default for all but the format that `export` writes if nothing else is asked for.
        """
        if type(self).export is ModelFamily.export:
            raise UserError(
                f"the family {self.name} has no export of its own",
                fix="`smalti checkpoint convert --format=safetensors` writes the plain tensors",
            )
        if request.format is not None or request.merge or request.single_file:
            raise UserError(
                f"the family {self.name} exports one format only", fix="leave --format, --merge and --single_file out"
            )

    def export(self, folder: ExportFolder) -> None:
        """Write what inference loads into `folder`: the trained tensors, as it yields them, and everything around them.

        It does what `folder.request` says. Runs on machines without accelerators; the complete model need never be in memory.
        By default a trained model cannot be exported.
        """
        raise NotImplementedError

    # --- sizes and costs --------------------------------------------------------------------------------------------

    def frozen_storage(self, model: nn.Module) -> list[FrozenStorage]:
        """How frozen weights are kept once they are loaded, then ways that take less. By default they stay parameters.

        `model` is that of `build_model`, with or without weights. For estimates of memory.
        """
        return [FrozenStorage(bytes=sum(each.nbytes for each in model.parameters() if not each.requires_grad))]

    def image_tokens(self, width: int, height: int) -> int:
        """The length of the sequence that the model attends over for an image of this size in pixels, texts not counted.

        Of several lengths, as in a U-Net, the greatest. By default one token for each square of `alignment` pixels.
        """
        return (width // self.alignment) * (height // self.alignment)

    def flops_per_sample(self, width: int, height: int) -> int:
        """Floating-point operations of one forward pass for one image, attention counted. Backward costs twice that.

        By default counted by torch on the meta device: matrix products, convolutions and attention. Called once for each image
        size. Raises NotImplementedError where it cannot be counted; the run then has no `mfu`.
        """
        from torch.utils.flop_counter import FlopCounterMode  # loaded where utilization is measured: on known accelerators

        conditioning = {name: rows.to("meta") for name, rows in self.example_conditioning(width, height).items()}
        try:
            with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
                noisy = torch.empty(1, *self.latent_shape(width, height))
                self.forward(self.meta_model, noisy, torch.full((1,), 500.0), conditioning)
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotImplementedError(f"the model does not run on the meta device: {error}") from error
        return int(counter.get_total_flops())

    def example_conditioning(self, width: int, height: int) -> Conditioning:
        """Conditioning of one sample, of the right shapes; its values do not matter. By default that of the empty prompt."""
        size = SizeConditioning.of((width, height))
        with torch.no_grad():
            return self.encode_captions([""]) | self.encode_size_conditioning([size], width, height)

    @cached_property
    def meta_model(self) -> nn.Module:
        """The model on the meta device, on which operations are counted."""
        with torch.device("meta"):
            return self.build_model()

    # --- frozen parts -----------------------------------------------------------------------------------------------

    def to(self, device: str) -> None:
        """Move frozen parts (encoders, autoencoder) to the device that training runs on. By default sets `device`."""
        self.device = torch.device(device)


def native_objective(family: ModelFamily) -> Objective:
    """What a family trains unless the options say otherwise."""
    return build_objective(family.prediction, native=family.prediction, beta_schedule=family.beta_schedule)


def encode(
    family: ModelFamily, captions: Sequence[str], sizes: Sequence[SizeConditioning], width: int, height: int
) -> Conditioning:
    """All conditioning of samples, whose images are `width` x `height` pixels."""
    return family.encode_captions(captions) | family.encode_size_conditioning(sizes, width, height)


def latents_of(family: ModelFamily, pixels: Tensor | None, kept: Tensor | None) -> Tensor:
    """The latents of a batch, from its pixels or from what was stored of them."""
    if kept is not None:
        return family.normalise_latents(kept)
    assert pixels is not None, "a batch has pixels or latents"
    return family.encode_images(pixels)


def context_plan(family: ModelFamily, model: nn.Module, *, split_over: int = 1) -> ContextPlan:
    """The family's plan for its model, whose parameters may be on the meta device.

    Raises UserError if there is none, or if its heads cannot be split over `split_over` ranks; 1 if they stay together.
    """
    plan = family.context_plan(model)
    if plan is None:
        raise UserError(
            f"{family.name} cannot be trained with context parallelism: the family does not say where its tokens can be split",
            fix="--context_parallel_size=1; FSDP alone also spreads the memory",
        )
    if plan.heads % split_over:
        raise UserError(
            f"the {plan.heads} attention heads of the model cannot be split over {split_over} ranks",
            fix=f"--context_parallel_comm_strategy=allgather, or a context_parallel_size that divides {plan.heads}",
        )
    return plan
