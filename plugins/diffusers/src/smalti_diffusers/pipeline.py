"""What the families have in common: a pipeline of diffusers around the model that is trained.

Captions are encoded by the pipeline's own `encode_prompt`, and images are sampled by the pipeline itself with the trained model
in it, so that training sees what inference will. A family adds how its model is called.

Shapes: B batch, (B, 3, H, W) pixels, (B, C, h, w) latents.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from smalti import Config, FrozenStorage, UserError
from smalti.config import ModelOptions, ObjectiveOptions, RunOptions
from smalti.diffusion import BetaSchedule, Conditioning, Prediction
from smalti.models import Encoding, ModelFamily, SampleRequest, SeededWeights, Weights, without_weights
from smalti.parallel import in_bf16
from smalti.system import importing
from smalti_diffusers.exporting import check_request, export_pipeline
from smalti_diffusers.families.autoencoders import Autoencoder
from smalti_diffusers.families.captions import Captions, prompt_arguments
from smalti_diffusers.flavours import FLAVOURS
from smalti_diffusers.flowshift import scheduler_shift
from smalti_diffusers.lora.adapter import attach
from smalti_diffusers.lora.assistant import ASSISTANT, is_distilled, locate as locate_assistant, notice
from smalti_diffusers.lora.chosen import FROZEN_TYPES, base_dtype, base_precision, chosen_adapter, description
from smalti_diffusers.lora.eight_bits import eight_bit_weights
from smalti_diffusers.lora.encoders import BaseWeights, EncoderRates, JoinedWeights, trained_encoders
from smalti_diffusers.lora.first_weights import AdaptedWeights
from smalti_diffusers.lora.header import AdapterHeader
from smalti_diffusers.lora.quantisation import is_sharded, quantise, storage
from smalti_diffusers.lora.reading import AdapterFile
from smalti_diffusers.lora.strength import adapter_scaled
from smalti_diffusers.lora.timed import mask_ranks
from smalti_diffusers.options import DiffusersOptions, LoraOptions
from smalti_diffusers.sampling import check_scheduler, decode_in_own_type, decoding, scheduler_in_place
from smalti_diffusers.sources.components import Components, class_of
from smalti_diffusers.sources.location import download_notice
from smalti_diffusers.sources.model_file import ModelFile
from smalti_diffusers.sources.start import (
    check_family,
    model_alone,
    open_beside_base,
    open_pipeline,
    published_pipeline,
    unused_parts,
)

if TYPE_CHECKING:
    from smalti.checkpoint import ExportFolder, ExportRequest


class PipelineFamily(ModelFamily):
    """A family around a diffusers pipeline; each is a subclass in a file of its own."""

    pipeline: str
    """The pipeline's class in diffusers."""
    other_pipelines: ClassVar[tuple[str, ...]] = ()
    """Classes of pipelines that the family trains too; `pipeline` is then the one of the run."""
    former_names: ClassVar[tuple[str, ...]] = ()
    """What `pipeline` was called before; pipelines were published under these names too."""
    flavours: ClassVar[Mapping[str, str]] = {}
    """Of a family of another package: hub ids or folders of pipelines, the default first."""
    part: ClassVar[str] = "transformer"
    """Which part of the pipeline is trained."""
    adaptable_encoders: ClassVar[tuple[str, ...]] = ()
    """The text encoders that an adapter can be trained in, along with the model."""
    text_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    """How names of the parts begin that encode texts."""
    texts: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2", "text_encoder_3")
    unused_parts: ClassVar[tuple[str, ...]] = ()
    """Parts that are exported as they are, and otherwise not loaded."""
    blocks: ClassVar[tuple[str, ...]]
    targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    captions: ClassVar[Captions]
    """The conditioning of captions."""
    autoencoder: ClassVar[type[Autoencoder]] = Autoencoder
    patch: ClassVar[int | None] = None
    """Latent pixels on the edge of one token, or what latent sizes must be multiples of. None: the model's `patch_size`."""
    vae_in_fp32: bool = False
    source: str
    """The pipeline or model that the run started from, as it was named: a path or hub id."""
    base_source: str | None
    """The pipeline with the other parts of a model that is alone; None if `source` is a pipeline."""
    predictions: ClassVar[tuple[Prediction, ...]] = ()
    """Predictions that a run may choose, in addition to that of the pipeline's scheduler."""
    rescales_guidance: ClassVar[bool] = False
    """Whether the pipeline has an argument `guidance_rescale`."""
    gives_sigmas: ClassVar[bool] = False
    """Whether the pipeline computes the noise levels itself and passes them to its scheduler."""

    def __init__(self, components: Components, options: DiffusersOptions, config: Config | None = None) -> None:
        if components.pipeline in self.other_pipelines:
            self.pipeline = components.pipeline
        elif components.pipeline not in (self.pipeline, *self.former_names):
            raise UserError(
                f"{components.folder} is a {components.pipeline}, not a {self.pipeline}",
                fix=f"name a pipeline of {self.name}, or another --model_family",
            )
        self.components = components
        self._autoencoder = self.autoencoder(self)
        self.source = str(components.folder)
        self.base_source = None
        self.options = options
        scheduler = components.config("scheduler")
        native = self.native_prediction(scheduler)
        self.beta_schedule = cast(BetaSchedule, scheduler.get("beta_schedule", "scaled_linear"))
        chosen = config[ObjectiveOptions].prediction_type if config is not None else None
        self.prediction: Prediction = chosen or native
        if self.prediction not in (native, *self.predictions):
            raise UserError(
                f"{self.name} cannot be trained with the prediction '{self.prediction}': its pipeline could not sample with it",
                fix=f"leave --prediction_type out; the pipeline says {native}",
            )
        self._bf16 = config is None or in_bf16(config)
        self.encoders = trained_encoders(config, self.adaptable_encoders, self.name)
        self._encoder_rates = EncoderRates(config)
        self.lora = chosen_adapter(config, self.lora_targets(), self.idle_layers())
        self._base_dtype = base_dtype(config)
        self._precision = base_precision(config)
        self._init_lora = config[LoraOptions].init_lora if config is not None else None
        self._assistant_lora = config[LoraOptions].assistant_lora if config is not None else None
        self.indivisible = "" if is_sharded(self._precision) else f"weights in {self._precision}"
        self.alignment = self.vae_scale * (self.patch or cast(int, self.model_config["patch_size"]))
        if self.prediction == "flow_matching":
            self.flow_shift = scheduler_shift(scheduler)
        self.seed = config[RunOptions].seed if config is not None else 0
        self._vae_on_host = False
        if self.options.validation_noise_scheduler is not None:
            stretched = config is not None and config[ObjectiveOptions].rescale_betas_zero_snr
            check_scheduler(
                self.options.validation_noise_scheduler,
                self.pipeline,
                flow=self.prediction == "flow_matching",
                given_sigmas=self.gives_sigmas,
                terminal_noise=stretched or bool(scheduler.get("rescale_betas_zero_snr")),
            )
        self.no_guidance_rescale = "" if self.rescales_guidance else f"{self.pipeline} does not rescale guided predictions"

    @classmethod
    def create(cls, config: Config) -> Self:
        """The family over the pipeline that the options name: a path or hub id, or a flavour's; or over a model and its base.

        Raises UserError for a path that is none of these, and for parts without weights.
        """
        model, options, flavours = config[ModelOptions], config[DiffusersOptions], cls.flavours or FLAVOURS[cls.name]
        if model.model_flavour is not None and model.model_flavour not in flavours:
            raise UserError(f"{cls.name} has no flavour {model.model_flavour!r}", fix=f"one of {', '.join(flavours)}")
        flavour = model.model_flavour or next(iter(flavours))
        name = model.pretrained_model_name_or_path or flavours[flavour]
        alone, base = model_alone(name, cls.part, options.revision, options.variant), None
        if alone is None:
            if options.base_pipeline is not None:
                raise UserError(
                    f"{name} is a pipeline, and --base_pipeline is for a model without one",
                    fix="leave out --base_pipeline, or name a file or a transformer folder",
                )
            components = open_pipeline(name, options.revision, options.variant)
        else:
            if isinstance(alone, ModelFile):
                check_family(alone, cls.name)
                if model.model_flavour is None:
                    flavour = cls.flavour_of(alone, flavours) or flavour
            base = options.base_pipeline or flavours[flavour]
            components = open_beside_base(alone, cls.part, base, options.revision, options.variant)
        components.check_weights(skip=cls.part if options.init_from_config else None)
        made = cls(components, options, config)
        if isinstance(alone, ModelFile) and (unused := unused_parts(alone, components)):
            made.notices = (f"{alone} also has {', '.join(unused)}, which is not used: these parts are those of {base}",)
        made.source, made.base_source = name, base
        if components.missing:
            made.notices = (*made.notices, download_notice(components.missing, components.folder))
        if not config[LoraOptions].assistant_lora and (is_distilled(name) or components.settings.get("is_distilled")):
            made.notices = (*made.notices, notice(cls.name))
        return made

    @classmethod
    def flavour_of(cls, file: ModelFile, flavours: Mapping[str, str]) -> str | None:
        """The flavour that a single file is of, which says where its other parts come from; None if it is unknown."""
        published = published_pipeline(file)
        return next((flavour for flavour, name in flavours.items() if name == published), None)

    @classmethod
    def build_adaptable(cls, components: Components) -> nn.Module:
        """The model with all that adapters in files can change, text encoders included, by the names of layers in a run."""
        return components.build(cls.part)

    # --- what a family may say otherwise ----------------------------------------------------------------------------

    def native_prediction(self, scheduler: dict[str, object]) -> Prediction:
        """What the model was trained to predict, by its scheduler's configuration."""
        if "FlowMatch" in str(scheduler.get("_class_name")) or scheduler.get("prediction_type") == "flow_prediction":
            return "flow_matching"
        return cast(Prediction, scheduler.get("prediction_type", "epsilon"))

    def scheduler_changes(self) -> dict[str, object]:
        """What the scheduler's configuration has to say otherwise, so that the pipeline samples with what this run trains."""
        return {}

    def pipeline_changes(self) -> dict[str, object]:
        """What model_index.json has to say otherwise in an export, so that it loads and samples as this run does."""
        return {} if self.components.pipeline == self.pipeline else {"_class_name": self.pipeline}

    @abstractmethod
    def inputs(self, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> dict[str, object]:
        """What the model is called with, by the names of its arguments."""
        ...

    def idle_layers(self) -> tuple[str, ...]:
        """How names of layers of the trained model begin that its prediction does not depend on."""
        return ()

    def embedded(self, model: nn.Module, conditioning: Conditioning) -> Conditioning:
        """Conditioning as `prompts` takes it, of what `encode_captions` gives; `model` may hold the encoders."""
        return conditioning

    def outputs(self, prediction: Tensor, noisy: Tensor) -> Tensor:
        """The model's output in the shape of `noisy`."""
        return prediction

    # --- the trained model ------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        model = self.build_base()
        if self.lora is None:
            return model
        model = attach(model, self.lora, self._base_dtype, self._assistant)
        mask_ranks(model, self.lora, self)
        return model if self._precision == "no_change" else quantise(model, self.block_classes(), self._precision)

    def frozen_storage(self, model: nn.Module) -> list[FrozenStorage]:
        kept = super().frozen_storage(model)
        return kept if self.lora is None else storage(model, self.block_classes(), self._precision, kept[0])

    def build_base(self) -> nn.Module:
        """The model without an adapter."""
        return self.components.build(self.part)

    def weights(self, seed: int) -> Weights:
        base = self.base_weights(seed)
        if self.lora is None:
            return base
        with without_weights():
            model = self.build_model()
        start = self._adapter_file(self._init_lora) if self._init_lora is not None else None
        weights = AdaptedWeights(base, model, self.lora, seed, start, self._assistant)
        return eight_bit_weights(weights, model)

    @cached_property
    def _assistant(self) -> AdapterFile | None:
        """The adapter that is active in training only."""
        return self._adapter_file(locate_assistant(self._assistant_lora)) if self._assistant_lora else None

    def _adapter_file(self, path: Path) -> AdapterFile:
        return AdapterFile(AdapterHeader(path), self.name, self.meta_model, self.model_config)

    def base_weights(self, seed: int) -> BaseWeights:
        """The first weights of the model without an adapter."""
        from_config = self.options.init_from_config or self.components.lacks_weights(self.part)
        model = SeededWeights(self.build_base, seed) if from_config else self.components.weights(self.part)
        if not self.encoders:
            return model
        there = [part for part in self.encoders if not self.components.lacks_weights(part)]
        return JoinedWeights(model, {part: self.components.weights(part) for part in there})

    def adapter(self, seed: int) -> dict[str, object] | None:
        if self.lora is None:
            return None
        lacking = self.components.lacks_weights(self.part) and not self.options.init_from_config
        base = None if lacking else self.base_weights(seed).digest()
        kept: dict[str, object] = {} if self._precision == "no_change" else {"base_precision": self._precision}
        if self._assistant is not None:
            kept["assistant"] = self._assistant.digest()
        return {**description(self.lora, self.build_model), "base": base, **kept}

    def adapter_strength(self, model: nn.Module, strength: float) -> AbstractContextManager[None]:
        return adapter_scaled(model, strength)

    def forward(self, model: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        prediction: Tensor = model(**self.inputs(noisy, timesteps, conditioning), return_dict=False)[0]
        return self.outputs(prediction, noisy)

    def rate_ratio(self, name: str) -> float:
        ratio = self.lora.rate_ratio if self.lora is not None and ".lora_B." in name else 1.0
        return self._encoder_rates.scaled(name, ratio)

    @property
    def model_config(self) -> Mapping[str, object]:
        """The configuration of the trained model."""
        return self.components.config(self.part)

    def block_classes(self) -> tuple[str, ...]:
        return self.blocks

    def lora_targets(self) -> tuple[str, ...]:
        return self.targets

    @cached_property
    def meta_model(self) -> nn.Module:
        """Without an adapter, which adds next to nothing; types do not matter, everything is fp32 here."""
        with torch.device("meta"):
            return self.build_base()

    @abstractmethod
    def example_conditioning(self, width: int, height: int) -> Conditioning:
        """Conditioning of one sample, of the right shapes, without an encoder; its values do not matter."""
        ...

    # --- the frozen parts -------------------------------------------------------------------------------------------

    @cached_property
    def frozen(self) -> object:
        """The pipeline that makes and decodes latents and samples, without the trained model and what encodes texts."""
        return self._pipeline(encodes=False)

    @cached_property
    def encoder(self) -> object:
        """The pipeline that encodes texts, and can do nothing else."""
        return self._pipeline(encodes=True)

    def _pipeline(self, *, encodes: bool) -> object:
        with importing():  # before any weights are there
            cls = class_of("diffusers", self.pipeline)
        without = (self.part, *self.encoders, *self.unused_parts)
        used = {part for part in self.components.parts() if part not in without and self.encodes_texts(part) == encodes}
        frozen: dict[str, object] = dict.fromkeys(self.unused_parts)
        frozen |= {part: self._load(part) if part in used else None for part in self.components.parts()}
        pipeline = self.assemble(cls, frozen, encodes=encodes)
        pipeline.set_progress_bar_config(disable=True)
        return cast(object, pipeline.to(self.device))

    def assemble(self, cls: type, parts: Mapping[str, object], *, encodes: bool) -> Any:
        """The pipeline of these parts, which encodes texts or does everything else."""
        return cls(**parts, **self.components.settings)

    def encodes_texts(self, part: str) -> bool:
        return part.startswith(self.text_parts)

    def _load(self, part: str) -> object:
        if part in self.texts:
            return self.components.load(part, self._dtype("texts"))
        if part == "vae":
            vae = cast(nn.Module, self.components.load(part, self._dtype("latents")))
            decode_in_own_type(vae)
            return vae
        loaded = self.components.load(part)
        return self._scheduler(loaded) if part == "scheduler" else loaded

    def _scheduler(self, loaded: Any) -> object:
        """What images are sampled with, in place of the pipeline's own."""
        changes, name = self.scheduler_changes(), self.options.validation_noise_scheduler
        if name is not None:
            return scheduler_in_place(name, {**loaded.config, **changes}, flow=self.prediction == "flow_matching")
        return cast(object, type(loaded).from_config(loaded.config, **changes)) if changes else loaded

    def _dtype(self, kind: Encoding) -> torch.dtype:
        """The type in which this kind of encoder computes."""
        on_cpu = self.device.type == "cpu"
        if kind == "latents":
            default = torch.float32 if self.vae_in_fp32 or on_cpu else torch.bfloat16
            return FROZEN_TYPES.get(self.options.vae_dtype, default)
        default = torch.bfloat16 if self._bf16 and not on_cpu else torch.float32
        return FROZEN_TYPES.get(self.options.text_encoder_dtype, default)

    def to(self, device: str) -> None:
        super().to(device)
        for name in ("frozen", "encoder"):
            if name in self.__dict__:
                self.__dict__[name].to(self.device)

    def encoder_identity(self, kind: Encoding) -> dict[str, object]:
        if kind == "latents":
            return {"vae": self.components.identity("vae"), "dtype": str(self._dtype(kind))}
        used = [part for part in self.components.parts() if self.encodes_texts(part) and part not in self.encoders]
        parts = {part: self.components.identity(part) for part in used}
        return {"pipeline": self.pipeline, **parts, "dtype": str(self._dtype(kind)), **self.text_settings()}

    def release_encoder(self, kind: Encoding) -> None:
        """Text encoders are freed; the autoencoder moves to host memory, since it still has to decode images."""
        if kind == "texts":
            self.__dict__.pop("encoder", None)
        else:
            self._vae_on_host = True
            self.park_vae()
        _free_memory(self.device)

    def park_vae(self) -> None:
        """To host memory, if latents are encoded before training."""
        if self._vae_on_host and "frozen" in self.__dict__:
            self.frozen.to("cpu")  # type: ignore[attr-defined]

    # --- latents ----------------------------------------------------------------------------------------------------

    @property
    def vae(self) -> nn.Module:
        return cast(nn.Module, self.frozen.vae)  # type: ignore[attr-defined]

    @property
    def vae_scale(self) -> int:
        """Pixels on the edge of one latent pixel."""
        return self._autoencoder.scale

    @property
    def latent_channels(self) -> int:
        return self._autoencoder.channels

    def latent_shape(self, width: int, height: int) -> tuple[int, ...]:
        return self.latent_channels, height // self.vae_scale, width // self.vae_scale

    def encode_images(self, pixels: Tensor) -> Tensor:
        return self.normalise_latents(self.raw_latents(pixels))

    def raw_latents(self, pixels: Tensor) -> Tensor:
        return self._autoencoder.encode(pixels)

    def normalise_latents(self, raw: Tensor) -> Tensor:
        return self._autoencoder.normalise(raw)

    def decode_latents(self, latents: Tensor) -> Tensor:
        return self._autoencoder.decode(latents)

    # --- texts ------------------------------------------------------------------------------------------------------

    def text_settings(self) -> dict[str, object]:
        """What decides the conditioning of captions, apart from the encoders."""
        return {}

    # --- images -----------------------------------------------------------------------------------------------------

    def sample(self, model: nn.Module, request: SampleRequest) -> Tensor:
        """Images by the pipeline itself, with this model in it. It gets the conditioning that training would use.

        An assistant adapter is off meanwhile.
        """
        with adapter_scaled(model, 0, ASSISTANT) if self._assistant is not None else nullcontext():
            return self._sample(model, request)

    def _sample(self, model: nn.Module, request: SampleRequest) -> Tensor:
        conditioning, unconditional = (self.embedded(model, each) for each in self.request_conditioning(request))
        pipeline = cast(Any, self.frozen).to(self.device)
        setattr(pipeline, self.part, model)
        try:
            with decoding(self.vae, self.options):
                images = self.call_pipeline(
                    request,
                    **self.prompts(conditioning, unconditional),
                    width=request.width,
                    height=request.height,
                    num_inference_steps=request.steps,
                    generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
                    output_type="pt",
                )
        finally:
            setattr(pipeline, self.part, None)
            self.park_vae()
        return images.float() * 2 - 1

    def call_pipeline(self, request: SampleRequest, **given: object) -> Tensor:
        """Images in [0, 1]. `given` are the arguments that all pipelines have in common."""
        rescaling = {"guidance_rescale": request.guidance_rescale} if request.guidance_rescale else {}
        guided = {"guidance_scale": request.guidance} | rescaling | self.sampling(request)
        return cast(Tensor, cast(Any, self.frozen)(**given, **guided).images)

    def prompts(self, conditioning: Conditioning, unconditional: Conditioning) -> dict[str, object]:
        """The pipeline's arguments for prompts that are encoded, and for the negative ones that it guides away from."""
        return prompt_arguments(self.captions, conditioning, unconditional)

    def sampling_settings(self, request: SampleRequest) -> Mapping[str, str | float]:
        name = self.options.validation_noise_scheduler
        return {} if name is None else {"scheduler": name}

    def sampling(self, request: SampleRequest) -> dict[str, object]:
        """More arguments for the pipeline, or another `guidance_scale` where it has another meaning."""
        return {}

    # --- for inference ----------------------------------------------------------------------------------------------

    def check_export(self, request: ExportRequest) -> None:
        check_request(self, request)
        self._assistant_lora = None  # it is off in what is exported, so its file need not be there any more

    def export(self, folder: ExportFolder) -> None:
        """The pipeline that the run started from, with the trained part in the place of its own; or the file of an adapter."""
        export_pipeline(self, folder)


def _free_memory(device: torch.device) -> None:
    """Free what was released, including cycles of objects, and what the allocator keeps."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
