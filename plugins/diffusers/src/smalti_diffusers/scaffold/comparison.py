"""A family beside its pipeline: what both call the model with, what they predict, decode and sample.

Shapes: B prompts, latents (B, C, h, w), images (B, 3, H, W) in [-1, 1].
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from smalti.diffusion import build_objective
from smalti.models import SampleRequest, SizeConditioning
from smalti.system import load_json
from smalti_diffusers.families.tokens import PLAIN, Tokens
from smalti_diffusers.pipeline import PipelineFamily
from smalti_diffusers.sources.components import Components, class_of
from smalti_diffusers.sources.location import find_folder

PROMPTS = ("A red fox in the snow", "two boats")
_LAYERS = ("layers", "depth", "blocks", "layers_per_block")
"""How keys of configurations end whose value is a number of layers, or one for each stage."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".gguf", ".onnx", ".index.json")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """`ours` and `theirs` are the tensors of two calls, by argument; `expected` is what the scheduler gets first."""

    ours: Sequence[Mapping[str, Tensor]]
    theirs: Sequence[Mapping[str, Tensor]]
    prediction: Tensor
    expected: Tensor
    decoded: Tensor
    sampled: Tensor
    images: Tensor


def small_pipeline(source: str, folder: Path, layers: int = 2) -> Path:
    """A pipeline in `folder` with the configurations and tokenizers of `source`, a folder or hub id, and random weights.

    Models but the autoencoder have at most `layers` layers of each kind. Raise it if the pipeline takes hidden states of a
    layer by its number. No weights are downloaded.
    """
    found = find_folder(source, None)
    for path in found.rglob("*"):
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            target = folder / path.relative_to(found)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    components = Components(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for part in components.models():
            _write_small(components, part, layers)
    return folder


def _write_small(components: Components, part: str, layers: int) -> None:
    path = components.folder / part / "config.json"
    if part != "vae":
        path.write_text(json.dumps(_smaller(load_json(path.read_bytes()), layers), indent=2), encoding="utf-8")
    model = components.build(part)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # what is zero on purpose would hide differences
                parameter.normal_(std=0.02)
    cast(Any, model).save_pretrained(path.parent)


def _smaller(config: Any, layers: int) -> Any:
    """A configuration with fewer layers; those of its sub-configurations too."""
    if not isinstance(config, dict):
        return config
    found = {key: _smaller(value, layers) for key, value in config.items()}
    for key, value in found.items():
        if key.endswith(_LAYERS) and type(value) is int:
            found[key] = min(value, layers)
        elif key.endswith(_LAYERS) and isinstance(value, list) and all(type(each) is int for each in value):
            found[key] = [min(each, layers) for each in value]
    if isinstance(kinds := found.get("layer_types"), list):
        found["layer_types"] = kinds[: found["num_hidden_layers"]]
    return found


def compare(family: PipelineFamily, prompts: Sequence[str] = PROMPTS, **arguments: object) -> Compared:
    """Two steps of the pipeline without classifier-free guidance, and of the family on the same latents.

    `arguments` are more arguments of the pipeline. Raises AssertionError if it guides all the same.
    """
    run = _Run(family, tuple(prompts), arguments)
    theirs, expected = run.recorded()
    latents, images = run.sampled("latent"), run.sampled("pt") * 2 - 1
    noisy = [run.latents(next(iter(call.values()))) for call in theirs]
    with torch.no_grad():
        conditioning = run.conditioning()
        times = run.pipeline.scheduler.timesteps[:2].float()
        inputs = [family.inputs(each, times[step].expand(len(each)), conditioning) for step, each in enumerate(noisy)]
        return Compared(
            ours=[_tensors(each) for each in inputs],
            theirs=[run.rows(_tensors(each)) for each in theirs],
            prediction=family.forward(run.model, noisy[0], times[0].expand(len(prompts)), conditioning),
            expected=run.latents(expected),
            decoded=family.decode_latents(run.latents(latents)),
            sampled=family.sample(run.model, run.request()),
            images=images,
        )


class _Run:
    """The pipeline of a family with its own models, and how it is called."""

    def __init__(self, family: PipelineFamily, prompts: Sequence[str], arguments: Mapping[str, object]) -> None:
        self.family, self.prompts = family, prompts
        self.width, self.height = 3 * family.alignment, 2 * family.alignment
        self.pipeline = cast(Any, class_of("diffusers", "DiffusionPipeline")).from_pretrained(family.components.folder)
        self.pipeline.set_progress_bar_config(disable=True)
        self.model = cast(nn.Module, getattr(self.pipeline, family.part))
        known = signature(type(self.pipeline).__call__).parameters
        self.guidance = family.options.flux_guidance_value if getattr(family, "takes_guidance", False) else 1.0
        given = {"guidance_scale": self.guidance, "true_cfg_scale": 1.0, **getattr(family, "sample_arguments", {}), **arguments}
        self.arguments = {name: value for name, value in given.items() if name in known}

    def sampled(self, output: str) -> Tensor:
        """Latents or images, as the pipeline returns them."""
        return cast(
            Tensor,
            self.pipeline(
                prompt=list(self.prompts),
                width=self.width,
                height=self.height,
                num_inference_steps=2,
                output_type=output,
                generator=[torch.Generator().manual_seed(seed) for seed in range(len(self.prompts))],
                **self.arguments,
            ).images,
        )

    def recorded(self) -> tuple[list[dict[str, Any]], Tensor]:
        """The arguments of the model in the first two steps, and what the scheduler gets first."""
        calls: list[dict[str, Any]] = []
        expected: list[Tensor] = []
        forward, step = signature(type(self.model).forward), self.pipeline.scheduler.step

        def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls.append({k: v for k, v in forward.bind(module, *given, **named).arguments.items() if k != "self"})

        def noted(output: Tensor, *given: Any, **named: Any) -> Any:
            expected.append(output)
            return step(output, *given, **named)

        hook = self.model.register_forward_pre_hook(note, with_kwargs=True)
        self.pipeline.scheduler.step = noted
        self.sampled("latent")
        hook.remove()
        self.pipeline.scheduler.step = step
        assert len(next(iter(calls[0].values()))) == len(self.prompts), (
            "the pipeline applies classifier-free guidance; give `compare` the arguments without it"
        )
        return calls[:2], expected[0]

    def latents(self, found: Any) -> Tensor:
        """In smalti's shape, of what the model is given or the pipeline returns."""
        like = torch.empty(len(self.prompts), *self.family.latent_shape(self.width, self.height))
        if isinstance(found, Tensor) and found.shape == like.shape:
            return found
        tokens = cast(Tokens, getattr(self.family, "tokens", PLAIN))
        return tokens.unpack(found, like)

    def rows(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With a row for each prompt of a time that is one number."""
        return {name: each if each.ndim else each.expand(len(self.prompts)) for name, each in tensors.items()}

    def conditioning(self) -> dict[str, Tensor]:
        size = SizeConditioning(width=self.width, height=self.height, left=0, top=0)
        sizes = self.family.encode_size_conditioning([size] * len(self.prompts), self.width, self.height)
        return {**self.family.encode_captions(self.prompts), **sizes}

    def request(self) -> SampleRequest:
        prediction = self.family.prediction
        return SampleRequest(
            prompts=self.prompts,
            seeds=tuple(range(len(self.prompts))),
            width=self.width,
            height=self.height,
            steps=2,
            guidance=self.guidance,
            objective=build_objective(prediction, native=prediction, beta_schedule=self.family.beta_schedule),
        )


def _tensors(arguments: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Those among the arguments of a call, and in dictionaries and lists among them."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in _tensors(value).items()}
        elif isinstance(value, Tensor):
            found[str(name)] = value
    return found
