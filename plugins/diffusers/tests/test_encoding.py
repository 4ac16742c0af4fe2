"""What was encoded before training is to the last bit what would be encoded in every step; by then the encoders are gone."""

import shutil
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import pytest
import tiny
import torch
from PIL import Image

from smalti.config.config import Config
from smalti.config.resolution import resolve
from smalti.data.encoded import Encoded, encode_ahead
from smalti.data.from_options import scan_data
from smalti.data.loader import Loader
from smalti.data.prepared import PreparedData
from smalti.models.family import SampleRequest
from smalti.models.weights import materialise
from smalti.plugins import find_family
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.rundir import Phases
from smalti.training import DdpParallel
from smalti.training.loss import denoising_loss
from smalti.types import World
from smalti_diffusers.families.flux import Flux
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from smalti_testing.family_subject import native_objective
from support.whole import some

FAMILIES = ("flux", "flux2", "sdxl", "sana", "qwen_image")
PROMPTS = ("a red fox", "colour 1")
STEPS = 4


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Pictures that have to be scaled and cut, in two shapes; two of them with the same caption."""
    folder, random = tmp_path_factory.mktemp("photographs"), torch.Generator().manual_seed(0)
    for number in range(8):
        size = (90, 70) if number % 2 else (70, 90)
        levels = torch.randint(0, 256, (size[1], size[0], 3), generator=random, dtype=torch.uint8)
        Image.fromarray(levels.numpy()).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"colour {number // 2}")
    return folder


@pytest.fixture(scope="module", params=some(FAMILIES, "flux"))
def subject(request, tmp_path_factory, photographs):
    """A run of a family as far as data go, and a model."""
    root = tmp_path_factory.mktemp("encoding")
    plugins = load_plugins()
    dataset = f'{{"id": "photographs", "instance_data_dir": "{photographs}", "crop": true, "crop_style": "center"}}'
    (root / "data.json").write_text(f"[{dataset}]")
    flags = {
        "model_family": request.param,
        "pretrained_model_name_or_path": getattr(tiny, request.param)(root / "pipeline"),
        "output_dir": root / "run",
        "data_backend_config": root / "data.json",
        "resolution": 64,
        "train_batch_size": len(PROMPTS),
        "caption_dropout_probability": 0.4,
        "mixed_precision": "no",
        "vae_dtype": "bf16",
        "max_train_steps": STEPS,
    }
    config = resolve(schema_of(plugins), [f"--{name}={value}" for name, value in flags.items()], environment={})
    return Subject(config, plugins, scan_data(config, plugins, 32, root / "run" / "data"), root / "run")


@dataclass(frozen=True)
class Subject:
    config: Config
    plugins: object
    data: PreparedData
    directory: Path

    def family(self):
        return find_family(self.config, self.plugins)

    def encode(self, family) -> Encoded:
        settings, alone = (self.config, self.plugins), DdpParallel(self.config)
        return encode_ahead(*settings, family, self.data, alone, self.directory / "data", Phases(), PROMPTS[:1], [])

    def losses(self, family, model, encoded: Encoded) -> list[torch.Tensor]:
        loss = denoising_loss(self.config, family, "cpu", encoded.conditioning([""], "cpu"))
        sources = {"latents": encoded.latents, "texts": encoded.texts}
        with Loader(self.data, world=World(), micro_batch=len(PROMPTS), **sources) as loader, torch.no_grad():
            return [loss(model, batch.micro[0], DdpParallel(self.config)).parts for batch in islice(loader, STEPS)]

    def pictures(self, family, model, encoded: Encoded) -> torch.Tensor:
        request = SampleRequest(
            prompts=PROMPTS, seeds=(1, 2), width=64, height=96, steps=2, guidance=2.0, objective=native_objective(family)
        )
        conditioning, unconditional = (encoded.conditioning(texts, "cpu") for texts in (PROMPTS, [""] * len(PROMPTS)))
        with torch.no_grad():
            return family.sample(model, replace(request, conditioning=conditioning, unconditional=unconditional))


def test_losses_and_pictures_are_the_same_without_encoders(subject):
    family = subject.family()
    model = materialise(family.build_model(), family.weights(0), "cpu").eval()
    losses, pictures = subject.losses(family, model, Encoded()), subject.pictures(family, model, Encoded())

    encoded = subject.encode(family)
    assert "encoder" not in vars(family)
    torch.testing.assert_close(subject.losses(family, model, encoded), losses)
    torch.testing.assert_close(subject.pictures(family, model, encoded), pictures, atol=1e-5, rtol=0)
    assert "encoder" not in vars(family)

    bucket = subject.data.order.buckets[0]
    kept, _ = encoded.latents.get(int(bucket.samples[0]), bucket.bucket)
    assert kept.dtype == torch.bfloat16  # half the room of the fp32 that the model is given

    again = subject.family()
    subject.encode(again)
    assert {"encoder", "frozen"} & vars(again).keys() == set()  # nothing was loaded, since nothing was missing


def identities(folder: Path, **options) -> tuple[dict, dict]:
    family = Flux(Components(folder), DiffusersOptions(**options))
    return family.encoder_identity("latents"), family.encoder_identity("texts")


def test_an_encoder_is_the_same_wherever_it_lies_and_another_when_anything_of_it_differs(tmp_path):
    folder = tiny.flux(tmp_path / "here")
    latents, texts = identities(folder)
    assert identities(shutil.copytree(folder, tmp_path / "there")) == (latents, texts)
    assert identities(folder, tokenizer_max_length=99)[1] != texts
    assert [one == other for one, other in zip(identities(folder, vae_dtype="bf16"), (latents, texts), strict=True)] == [
        False,
        True,
    ]

    def changes(path: str) -> list[bool]:
        """Whether latents and texts are kept elsewhere after the last byte that matters of a file is another."""
        there = shutil.copytree(folder, tmp_path / path.replace("/", "-"))
        content = bytearray((there / path).read_bytes())
        place = content.rindex(b"0") if path.endswith("json") else len(content) - 1
        content[place] = content[place] ^ 1
        (there / path).write_bytes(content)
        return [one != other for one, other in zip(identities(there), (latents, texts), strict=True)]

    assert changes("vae/diffusion_pytorch_model.safetensors") == [True, False]
    assert changes("vae/config.json") == [True, False]
    assert changes("text_encoder_2/model.safetensors") == [False, True]
    assert changes("tokenizer_2/tokenizer.json") == [False, True]
    assert changes("transformer/diffusion_pytorch_model.safetensors") == [False, False]
