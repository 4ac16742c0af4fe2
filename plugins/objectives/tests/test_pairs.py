"""Sliders and preferences: their formulas in fp64, the pairs of images they are trained on, and what is refused."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from smalti.config import Config, resolve
from smalti.data import (
    BUILT_IN_METADATA,
    BUILT_IN_STORAGES,
    Bucket,
    Catalog,
    DataDefaults,
    Loader,
    MicroBatch,
    SecondCaptions,
    build_datasets,
    parse_datasets,
    prepare,
)
from smalti.data.batch_check import BatchShape
from smalti.data.prepared import DataRules
from smalti.errors import ConfigError, UserError
from smalti.models import SizeConditioning, materialise
from smalti.plugins import load_plugins, schema_of
from smalti.training import Term, Turn, denoising_loss
from smalti.types import World
from smalti_objectives.plugin import COLUMNS, plugin
from smalti_testing import TinyFamily
from smalti_testing.tiny import TinyModel

SCHEMA = schema_of(load_plugins())
CATALOG = Catalog.of(BUILT_IN_STORAGES, BUILT_IN_METADATA, COLUMNS)
WIDTH, HEIGHT = 12, 8
PROMPTS = ("--slider=prompts", "--slider_positive=very old", "--slider_negative=very young")


class Precise:
    """In place of a `Parallel`."""

    @staticmethod
    @contextmanager
    def autocast():
        yield


class Adapter(nn.Module):
    """A model of which all but what `change` adds is frozen."""

    def __init__(self, base: TinyModel) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.change = nn.Conv2d(3, 3, 1)
        self.strength, self.passes = 1.0, 0

    def forward(self, noisy: Tensor, timesteps: Tensor, words: Tensor) -> Tensor:
        self.passes += 1
        return self.base(noisy, timesteps, words) + self.strength * self.change(noisy)


class AdaptedFamily(TinyFamily):
    """In fp64, with an adapter."""

    def build_model(self) -> Adapter:
        return Adapter(super().build_model())

    def forward(self, model, noisy, timesteps, conditioning):
        return super().forward(model, noisy.double(), timesteps.double(), conditioning)

    @contextmanager
    def adapter_strength(self, model, strength):
        before, model.strength = model.strength, model.strength * strength
        yield
        model.strength = before


def config(*flags: str) -> Config:
    return resolve(SCHEMA, ("--model_type=lora", "--caption_dropout_probability=0", *flags), environment={})


def loss_and_model(*flags: str):
    family, given = AdaptedFamily(), config(*flags)
    model = materialise(family.build_model(), family.weights(0), "cpu").double()
    return denoising_loss(given, family, "cpu", terms=plugin.build_terms(given, family)), model


def spec_of(**keys: object):
    entries = [{"id": "pets", "instance_data_dir": "/pets", **keys}]
    [spec], problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16), catalog=CATALOG)
    assert not problems, problems
    return spec


PAIRED, PLAIN = spec_of(rejected_path="/worse"), spec_of()


def batch_of(loss, *datasets, **columns: Tensor) -> MicroBatch:
    count, needs = len(datasets), loss.needs(0, datasets)
    second = {name for term in loss.terms for name in term.second_captions}
    return MicroBatch(
        bucket=Bucket(WIDTH, HEIGHT),
        pixels=torch.rand(count, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0)) * 2 - 1,
        latents=None,
        captions=("a person",) * count,
        conditioning=None,
        numbers=tuple(range(count)),
        keys=("",) * count,
        size_conditioning=(SizeConditioning(width=WIDTH, height=HEIGHT, left=0, top=0),) * count,
        datasets=datasets,
        needs=needs,
        columns=columns,
        second_captions={
            name: SecondCaptions(captions=(loss.second_caption(name, "a person", PLAIN, 0),) * count, conditioning=None)
            for name in second
        },
    )


def other_images(count: int) -> Tensor:
    """Bytes (B, 3, H, W)."""
    return torch.randint(0, 256, (count, 3, HEIGHT, WIDTH), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


class Formula:
    """Predictions and targets of a batch, as the papers write them: v(x, strength, caption), at the noise of the run."""

    def __init__(self, loss, model: Adapter, batch: MicroBatch) -> None:
        self.loss, self.model, self.batch = loss, model, batch
        self.noise = loss.noise.normal(batch.numbers, (3, HEIGHT, WIDTH))
        self.t = loss.timesteps(loss.noise.column(batch.numbers, 0), WIDTH * HEIGHT)

    def predicted(self, strength: float, caption: str = "a person", images: Tensor | None = None) -> Tensor:
        clean = self.batch.pixels if images is None else images
        t = self.t.view(-1, 1, 1, 1)
        noisy = ((1 - t) * clean + t * self.noise).double()
        words = self.loss.family.encode_captions([caption] * len(clean))["words"]
        return self.model.base(noisy, 1000 * self.t.double(), words) + strength * self.model.change(noisy)

    def target(self, images: Tensor) -> Tensor:
        return (self.noise - images).double()


def turns_of(loss, model: Adapter, batch: MicroBatch) -> list[Tensor]:
    """The loss of each turn, each with its backward pass, as the loop makes them."""
    found = []
    for turn in loss.turns:
        with loss.at(turn, model):
            parts = loss(model, batch, Precise(), turn).parts
            (parts.sum() / len(loss.turns)).backward()
        found.append(parts)
    return found


def check_gradient(model: Adapter, expected: Tensor) -> None:
    found = [parameter.grad.clone() for parameter in model.change.parameters()]
    for gradient, wanted in zip(found, torch.autograd.grad(expected, list(model.change.parameters())), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rescale", [True, False])
def test_a_slider_of_prompts_has_the_loss_and_the_gradient_of_its_formula(rescale: bool) -> None:
    loss, model = loss_and_model(*PROMPTS, "--slider_guidance=2", f"--slider_rescale={str(rescale).lower()}")
    batch = batch_of(loss, PLAIN, PLAIN)
    found, formula = turns_of(loss, model, batch), Formula(loss, model, batch)

    expected = []
    for strength in (1, -1):
        neutral, more, less = (formula.predicted(0, caption).detach() for caption in ("a person", "very old", "very young"))
        target = neutral + strength * 2 * (more - less)
        if rescale:
            deviation, mean = target.std((1, 2, 3), keepdim=True), target.mean((1, 2, 3), keepdim=True)
            target = (target - mean) / deviation * neutral.std((1, 2, 3), keepdim=True) + neutral.mean((1, 2, 3), keepdim=True)
        expected.append((formula.predicted(strength) - target).square().mean())
    assert [each.sum().item() for each in found] == pytest.approx([each.item() for each in expected], rel=1e-6)
    check_gradient(model, sum(expected) / 2)
    assert (model.strength, model.passes) == (1, 3 + 2), "both strengths share what the model predicts without the adapter"


def test_a_slider_of_images_learns_the_counterparts_at_the_negative_strength() -> None:
    loss, model = loss_and_model("--slider=images")
    counterparts = other_images(2)
    batch = batch_of(loss, PLAIN, PLAIN, slider_counterpart=counterparts)
    found, formula = turns_of(loss, model, batch), Formula(loss, model, batch)

    ends = ((1, batch.pixels), (-1, counterparts.float() / 127.5 - 1))
    expected = [(formula.predicted(s, images=images) - formula.target(images)).square().mean() for s, images in ends]
    assert [each.sum().item() for each in found] == pytest.approx([each.item() for each in expected], rel=1e-6)
    check_gradient(model, sum(expected) / 2)


def test_what_both_ends_of_a_slider_show_is_not_learned() -> None:
    loss, model = loss_and_model("--slider=images")
    nn.init.zeros_(model.change.weight)
    nn.init.zeros_(model.change.bias)
    batch = batch_of(loss, PLAIN)
    same = ((batch.pixels + 1) * 127.5).round().to(torch.uint8)
    turns_of(loss, model, replace(batch, pixels=same.float() / 127.5 - 1, columns={"slider_counterpart": same}))
    assert all(float(parameter.grad.abs().max()) < 1e-7 for parameter in model.change.parameters())


@pytest.mark.parametrize("prompts", [True, False])
def test_a_trained_slider_moves_predictions_one_way_and_the_other(prompts: bool) -> None:
    flags = PROMPTS if prompts else ("--slider=images",)
    loss, model = loss_and_model(*flags)
    batch = batch_of(loss, PLAIN, **({} if prompts else {"slider_counterpart": torch.full((1, 3, HEIGHT, WIDTH), 220).byte()}))
    optimizer = torch.optim.SGD(model.change.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        turns_of(loss, model, batch)
        optimizer.step()
    formula = Formula(loss, model, batch)
    base, up, down = (formula.predicted(strength).detach() for strength in (0, 1, -1))
    if prompts:
        wanted = formula.predicted(0, "very old").detach() - formula.predicted(0, "very young").detach()
    else:
        wanted = 220 / 127.5 - 1 - batch.pixels.double()  # the velocity is noise - image
    along = [float(((moved - base) * wanted).sum()) for moved in (up, down)]
    assert along[0] > 0 > along[1]


def test_a_preference_has_the_loss_and_the_gradient_of_its_formula() -> None:
    loss, model = loss_and_model("--dpo_beta=1000")
    rejected, weights = other_images(3), torch.tensor([2.0, 0.25, 0.5])
    batch = batch_of(loss, PAIRED, PLAIN, PAIRED, rejected=rejected, loss_weight=weights)
    [found], formula = turns_of(loss, model, batch), Formula(loss, model, batch)

    def gain(images: Tensor) -> Tensor:
        errors = [(formula.predicted(s, images=images) - formula.target(images)).square().mean((1, 2, 3)) for s in (1, 0)]
        return errors[0] - errors[1].detach()

    losses = -torch.log(torch.sigmoid(-500 * (gain(batch.pixels) - gain(rejected.float() / 127.5 - 1))))
    preferred = (2 * losses[0] + losses[2] / 2) / 3
    learned = (formula.predicted(1) - formula.target(batch.pixels)).square().mean((1, 2, 3))[1] / 3 / 4
    assert loss.names == ("denoising", "dpo")
    assert found.tolist() == pytest.approx([learned.item(), preferred.item()], rel=1e-6)
    check_gradient(model, preferred + learned)


def test_an_untrained_adapter_and_equal_images_have_no_preference() -> None:
    loss, model = loss_and_model("--dpo_beta=1000")
    nn.init.zeros_(model.change.weight)
    nn.init.zeros_(model.change.bias)
    [untrained] = turns_of(loss, model, batch_of(loss, PAIRED, rejected=other_images(1)))
    assert untrained.tolist() == pytest.approx([0.0, np.log(2)], abs=1e-7)
    nn.init.ones_(model.change.bias)
    batch = batch_of(loss, PAIRED, rejected=other_images(1))
    [equal] = turns_of(loss, model, replace(batch, pixels=batch.columns["rejected"].float() / 127.5 - 1))
    assert equal.tolist() == pytest.approx([0.0, np.log(2)], abs=1e-7)


def test_masks_count_in_preferences() -> None:
    loss, model = loss_and_model("--dpo_beta=1000", "--mask_floor=0")
    batch = batch_of(loss, PAIRED, rejected=other_images(1))
    mask = torch.zeros(1, 1, HEIGHT, WIDTH, dtype=torch.uint8)
    mask[..., :4] = 255
    [found], formula = (
        turns_of(loss, model, replace(batch, columns={**batch.columns, "mask": mask})),
        Formula(loss, model, batch),
    )
    gains = []
    for images in (batch.pixels, batch.columns["rejected"].float() / 127.5 - 1):
        shown = [(formula.predicted(s, images=images) - formula.target(images))[..., :4].square().mean() for s in (1, 0)]
        gains.append(shown[0] - shown[1])
    assert found[1].item() == pytest.approx(-torch.log(torch.sigmoid(-500 * (gains[0] - gains[1]))).item(), rel=1e-6)


def test_without_these_options_there_is_one_turn_and_two_terms_with_turns_are_refused() -> None:
    loss, model = loss_and_model()
    assert list(loss.turns) == [Turn()]
    assert loss_and_model(*PROMPTS)[0].turns[1] == Turn(strength=-1)

    class Other(Term):
        name = "other"
        turns = (Turn(strength=2),)

    slider, _ = loss_and_model(*PROMPTS)
    with pytest.raises(UserError, match="different strengths: slider, other"):
        replace(slider, terms=[*slider.terms, Other()])
    plain = replace(loss, terms=[Other()])
    with plain.at(plain.turns[0], model):
        assert model.strength == 2


# --- pairs of images ------------------------------------------------------------------------------------------------


def pictures(folder: Path, *, first: int = 0, size: tuple[int, int] = (24, 16), kind: str = "png") -> Path:
    folder.mkdir(parents=True)
    for number in range(6):
        pixels = np.random.default_rng(first + number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{kind}")
    return folder


def data_of(folder: Path, budget: float = 0.01, **keys: object):
    framing = {"crop": True, "crop_aspect": "square", "crop_style": "random", "flip_probability": 0.5}
    entry = {"id": "pets", "instance_data_dir": str(folder), "caption_strategy": "filename", **framing, **keys}
    specs, problems = parse_datasets([entry], where="", defaults=DataDefaults(resolution=16), catalog=CATALOG)
    assert not problems, problems
    shape = BatchShape(train_batch_size=2, ranks=1, accumulation=1)
    return prepare(build_datasets(specs, CATALOG), DataRules(seed=3, shape=shape, alignment=8, error_budget=budget))


@pytest.mark.parametrize("column", ["rejected", "slider_counterpart"])
def test_both_images_of_a_pair_are_seen_in_the_same_frame(tmp_path: Path, column: str) -> None:
    folder, other = pictures(tmp_path / "pets"), pictures(tmp_path / "others")
    data = data_of(folder, **{f"{column}_path": str(other)})
    with Loader(data, world=World(), micro_batch=2) as loader:
        found = [batch.micro[0] for batch in islice(loader, 6)]
    assert all(torch.equal(one.columns[column].float() / 127.5 - 1, one.pixels) for one in found)
    assert len({one.pixels[0].sum().item() for one in found}) > 3


def test_an_image_without_another_one_cannot_be_used_nor_one_of_another_shape(tmp_path: Path) -> None:
    folder, other = pictures(tmp_path / "pets"), pictures(tmp_path / "others", kind="webp")
    (other / "3.webp").unlink()
    Image.new("RGB", (16, 24)).save(other / "4.webp")
    data = data_of(folder, budget=4, rejected_path=str(other))
    errors = data.error_budget()
    with Loader(data, world=World(), micro_batch=2, errors=errors) as loader:
        seen = {key for batch in islice(loader, 6) for key in batch.micro[0].keys}
    assert seen == {f"pets/{number}.png" for number in (0, 1, 2, 5)}
    assert [(item.key, item.reason) for item in data.quarantined] == [("3.png", f"no image of the same name in {other}")]
    assert "its size is 16x24, not of the aspect ratio" in errors.items[-1].reason


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    folder = pictures(tmp_path / "pets")
    for place, message in (("pets/others", "would be training images too"), ("empty", "none of its images has one")):
        (tmp_path / place).mkdir()
        with pytest.raises(UserError, match=message):
            data_of(folder, budget=9, rejected_path=str(tmp_path / place))


class Full(TinyFamily):
    """Without an adapter that could be left out."""


class Cached(AdaptedFamily):
    """Whose latents are cached."""

    cacheable = True


@pytest.mark.parametrize(
    ("flags", "family", "spec", "message"),
    [
        (PROMPTS, Full(), PLAIN, "strengths 1 and -1, and the model family tiny cannot leave out its adapter"),
        ((*PROMPTS, "--lora_kind=dora"), AdaptedFamily(), PLAIN, "which dora has not"),
        (("--slider=images",), AdaptedFamily(), PLAIN, "no counterparts"),
        (("--slider=images",), Cached(), spec_of(slider_counterpart_path="/down"), "autoencoder is put away"),
        (("--dpo_beta=2000",), AdaptedFamily(), PLAIN, "no dataset has rejected ones"),
        (("--dpo_beta=2000",), Cached(), PAIRED, "autoencoder is put away"),
        (("--dpo_beta=2000", "--model_type=full"), AdaptedFamily(), PAIRED, "all weights are trained"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(flags, family, spec, message) -> None:
    terms = plugin.build_terms(config(*flags), family)
    with pytest.raises(ConfigError, match=message):
        [term.check([spec]) for term in terms]


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (("--slider=prompts",), "slider"),
        ((*PROMPTS, "--dpo_beta=1"), "slider"),
        ((*PROMPTS, "--release_gradients", "--max_grad_norm=0"), "slider"),
    ],
)
def test_options_that_do_not_go_together_are_refused(flags, where) -> None:
    assert [problem.where for problem in plugin.check_config(config(*flags))] == [where]
