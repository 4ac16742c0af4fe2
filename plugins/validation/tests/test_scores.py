"""Scores of validation images, with tiny models whose weights are random."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    BitImageProcessorPil,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
)

from smalti import ConfigError
from smalti.config.resolution import resolve
from smalti.hookspecs import hookimpl
from smalti.launch.preflight import Preparation
from smalti.plugins.discovery import Selection, load_plugins
from smalti.plugins.registry import PluginInfo
from smalti.plugins.schema import schema_of
from smalti_validation.scores import Clip, Dino, clip_score, discrepancy

SIZE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
LETTERS = sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Four images to train on, and the folders of the models."""
    root = tmp_path_factory.mktemp("scores")
    torch.manual_seed(0)
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[]).save_pretrained(root / "clip")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    texts = {**small, "vocab_size": len(words), "eos_token_id": len(words) - 1, "max_position_embeddings": 20}
    config = CLIPConfig(text_config=texts, vision_config={**small, "image_size": 32, "patch_size": 8}, projection_dim=12)
    CLIPModel(config).save_pretrained(root / "clip")
    CLIPImageProcessorPil(**SIZE).save_pretrained(root / "clip")
    vision = {name: value for name, value in small.items() if name != "intermediate_size"}
    Dinov2Model(Dinov2Config(**vision, image_size=32, patch_size=8)).save_pretrained(root / "dino")
    BitImageProcessorPil(**SIZE).save_pretrained(root / "dino")
    (root / "photos").mkdir()
    for number in range(4):
        picture(number).save(root / "photos" / f"{number}.png")
    (root / "photos" / "torn.png").write_bytes((root / "photos" / "0.png").read_bytes()[:-90])
    return root


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8))


def test_features_are_those_that_the_model_compares(root):
    clip, images, texts = (
        Clip(root / "clip", "cpu"),
        [picture(8), picture(9)],
        ["a cat", "a dog that is longer than twenty tokens"],
    )
    with torch.no_grad():
        found = clip.images(images), clip.texts(texts)
        model = CLIPModel.from_pretrained(root / "clip").eval()
        pixels = CLIPImageProcessorPil.from_pretrained(root / "clip")(images=images, return_tensors="pt")
        tokens = CLIPTokenizer.from_pretrained(root / "clip")(
            texts, padding=True, truncation=True, max_length=20, return_tensors="pt"
        )
        expected = model(**pixels, **tokens)
    assert torch.allclose(found[0], expected.image_embeds, atol=1e-6)
    assert torch.allclose(found[1], expected.text_embeds, atol=1e-6)


def test_the_score_of_clip_is_the_mean_cosine_without_negative_ones():
    images, texts = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.6, 0.8], [0.0, -1.0]])
    assert clip_score(images, texts) == pytest.approx(30)


def test_the_discrepancy_is_that_of_the_definition_without_bias():
    one, other = torch.rand(3, 4, dtype=torch.float64), torch.rand(5, 4, dtype=torch.float64)

    def mean(pairs):
        values = [math.exp(-float((a - b).square().sum()) / 200) for a, b in pairs]
        return sum(values) / len(values)

    within = sum(mean([(a, b) for i, a in enumerate(them) for j, b in enumerate(them) if i != j]) for them in (one, other))
    expected = 1000 * (within - 2 * mean([(a, b) for a in one for b in other]))
    assert discrepancy(one, other) == pytest.approx(expected, abs=1e-9)


class Listener:
    def __init__(self):
        self.metrics = {}

    @hookimpl
    def log_metrics(self, metrics, step):
        self.metrics.setdefault(step, {}).update(metrics)


def prepared(root: Path, name: str, *flags: str) -> tuple[Preparation, Listener]:
    plugins, listener = load_plugins(Selection(only=("toy", "validation"), without=("console",))), Listener()
    plugins.register(PluginInfo(name="listener", distribution="tests", version="1"), listener)
    given = [
        *("--model_family=toy", "--toy_width=32", "--toy_depth=1", "--toy_heads=2", "--resolution=16", "--use_cpu"),
        *(
            "--resolution_type=pixel",
            "--mixed_precision=no",
            "--max_train_steps=2",
            "--data_error_budget=1",
            "--caption_strategy=filename",
        ),
        *(f"--instance_data_dir={root / 'photos'}", f"--output_dir={root / name}", "--validation_num_inference_steps=1"),
        *flags,
    ]
    return Preparation.of(resolve(schema_of(plugins), given, environment={}), plugins, write=True), listener


def test_the_images_of_a_validation_are_scored(root):
    prompts = ("--validation_prompt=a cat", "--validation_prompt=a dog", "--validation_step_interval=1")
    models = (f"--clip_weights={root / 'clip'}", f"--dino_weights={root / 'dino'}")
    preparation, listener = prepared(root, "run", *prompts, *models)
    assert preparation.launch() == 0
    images = [Image.open(root / "run" / "samples" / "00000002" / name) for name in ("00-a-cat.png", "01-a-dog.png")]
    with torch.no_grad():
        clip, dino = Clip(root / "clip", "cpu"), Dino(root / "dino", "cpu")
        expected = clip_score(clip.images(images), clip.texts(["a cat", "a dog"]))
        trained = [picture(number) for number in range(4)]
        nearest = (dino.images(images) @ dino.images(trained).T).max(dim=1).values
        distance = discrepancy(clip.images(images), clip.images(trained))
    found = listener.metrics[2]
    assert (found["clip/score"], found["clip/mmd"]) == pytest.approx((expected, distance), abs=1e-4)
    assert found["dino/nearest"] == pytest.approx(float(nearest.mean()), abs=1e-6)
    assert found["dino/largest"] == pytest.approx(float(nearest.max()), abs=1e-6)
    assert "clip/score" in listener.metrics[1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--clip_weights={root}/dino",), "has a model of the type dinov2"),
        (("--dino_weights={root}/photos",), "has no model of transformers"),
        (("--clip_weights={root}/nowhere",), "has no model of transformers"),
    ],
)
def test_a_folder_without_such_a_model_is_refused_before_anything_starts(root, flags, told):
    with pytest.raises(ConfigError, match=told):
        prepared(root, "refused", "--validation_prompt=a cat", *(flag.format(root=root) for flag in flags))


def test_scores_without_prompts_are_told(root):
    preparation, _ = prepared(root, "none", f"--clip_weights={root / 'clip'}")
    assert any("clip_weights and dino_weights without effect" in notice for notice in preparation.notices)
