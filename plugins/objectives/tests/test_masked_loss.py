"""Masked and weighted losses against their formulas in fp64, and against the formula of kohya's trainer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from smalti.config import Config, resolve
from smalti.data import (
    BUILT_IN_METADATA,
    BUILT_IN_STORAGES,
    Bucket,
    Catalog,
    DataDefaults,
    MicroBatch,
    catalog_of,
    dataset_specs,
    parse_datasets,
)
from smalti.diffusion import SampleNoise, build_objective
from smalti.errors import ConfigError
from smalti.models import SizeConditioning
from smalti.plugins import Selection, load_plugins, schema_of
from smalti.training import Step, Term
from smalti_objectives.mask_options import MaskOptions
from smalti_objectives.masked_loss import LossWeight, MaskedLoss, PriorOutsideMask, mask_terms, place_weights
from smalti_objectives.plugin import COLUMNS
from smalti_testing import TinyFamily

CHANNELS, HEIGHT, WIDTH = 4, 6, 5
EVERYTHING = torch.full((1, HEIGHT, WIDTH), 255, dtype=torch.uint8)
HALF = torch.cat([EVERYTHING[:, :, :3], torch.zeros(1, HEIGHT, 2, dtype=torch.uint8)], 2)
ONE = torch.zeros(1, HEIGHT, WIDTH, dtype=torch.uint8).index_fill(1, torch.tensor(2), 0)
ONE[0, 2, 3] = 200
NOTHING = torch.zeros_like(ONE)
MASKS = torch.stack([EVERYTHING, HALF, ONE])


def config(*flags: str) -> Config:
    return resolve(schema_of(load_plugins(Selection(only=("objectives",)))), flags, environment={})


def step_of(masks: Tensor = MASKS, *, loss_type: str = "l2", first: int = 0, **columns: Tensor) -> Step:
    """A step over as many images as there are masks, whose predictions have gradients."""
    count = len(masks)
    rows = [torch.Generator().manual_seed(first + row) for row in range(count)]
    prediction, base, target = (
        torch.stack([torch.randn(CHANNELS, HEIGHT, WIDTH, generator=row) for row in rows]) for _ in range(3)
    )
    batch = MicroBatch(
        bucket=Bucket(WIDTH, HEIGHT),
        pixels=None,
        latents=None,
        conditioning=None,
        captions=("",) * count,
        numbers=tuple(range(first, first + count)),
        keys=("",) * count,
        size_conditioning=(SizeConditioning(width=WIDTH, height=HEIGHT, left=0, top=0),) * count,
        columns={"mask": masks, **columns},
    )
    return Step(
        batch=batch,
        objective=build_objective("flow_matching", loss_type=loss_type),
        noise=SampleNoise(7),
        t=torch.linspace(0.2, 0.8, count),
        weights=torch.linspace(1.0, 2.0, count),
        predictions={"policy": prediction.requires_grad_(), "base": base},
        targets={"": target},
    )


def loss(step: Step, *terms: Term) -> Tensor:
    """What `DenoisingLoss` makes of the factors of these terms."""
    errors = step.errors()
    for term in terms:
        errors = errors if (factor := term.factor(step)) is None else errors * factor
    return step.mean(errors)


def exact_errors(step: Step, against: Tensor) -> Tensor:
    """(B, C, h, w) in fp64."""
    square = (step.predictions["policy"].detach().double() - against.double()).square()
    if step.objective.cost.kind == "huber":
        c = step.objective.cost.threshold
        square = 2 * c * ((square + c * c).sqrt() - c)
    return square


@pytest.mark.parametrize("loss_type", ["l2", "huber"])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_loss_of_an_image_is_the_mean_over_its_mask(loss_type: str, floor: float) -> None:
    step = step_of(loss_type=loss_type)
    errors, w = exact_errors(step, step.targets[""]), (MASKS.double() / 255).clamp(min=floor)
    each = (w * errors).sum((1, 2, 3)) / (CHANNELS * w.sum((1, 2, 3)))
    expected = (each * step.weights.double()).mean()

    assert loss(step, MaskedLoss(config(f"--mask_floor={floor}"))).item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_formula_of_kohya() -> None:
    """In train_network.py and custom_train_functions.py the loss is multiplied with the mask, then averaged over everything."""
    step = step_of()
    element = torch.nn.functional.mse_loss(step.predictions["policy"], step.targets[""], reduction="none")
    image = MASKS[:, 0].float().unsqueeze(1) / 255
    image = torch.nn.functional.interpolate(image, size=element.shape[2:], mode="area")
    kohya = ((element * image).mean([1, 2, 3]) * step.weights).mean()

    assert torch.equal(loss(step, MaskedLoss(config("--mask_floor=0", "--no_mask_normalise"))), kohya)


def test_the_rule_of_onetrainer() -> None:
    """Weights are clamped from below, and an image is divided by the mean of its clamped mask."""
    step = step_of()
    clamped = torch.clamp(MASKS.float() / 255, 0.1, 1)
    element = step.errors() * clamped
    expected = ((element.mean([1, 2, 3]) / clamped.mean([1, 2, 3])) * step.weights).mean()

    torch.testing.assert_close(loss(step, MaskedLoss(config())), expected)


def test_a_mask_of_ones_changes_nothing_to_the_bit() -> None:
    step = step_of(torch.stack([EVERYTHING] * 3))
    for flags in ((), ("--no_mask_normalise", "--mask_floor=0")):
        assert torch.equal(loss(step, MaskedLoss(config(*flags))), loss(step))


def test_an_image_has_the_same_loss_in_any_batch_to_the_bit() -> None:
    term, together = MaskedLoss(config("--mask_probability=0.7")), step_of()
    factor = term.factor(together)
    each = (together.errors() * factor).flatten(1).mean(1)
    for row in range(3):
        alone = step_of(MASKS[row : row + 1], first=row)
        alone = replace(alone, predictions={"policy": together.predictions["policy"][row : row + 1]})
        alone = replace(alone, targets={"": together.targets[""][row : row + 1]}, t=together.t[row : row + 1])
        assert torch.equal((alone.errors() * term.factor(alone)).flatten(1).mean(1), each[row : row + 1])


def test_without_a_floor_black_places_have_no_gradient_and_an_all_black_mask_no_loss() -> None:
    step = step_of(torch.stack([HALF, ONE, NOTHING]))
    value = loss(step, MaskedLoss(config("--mask_floor=0")))
    value.backward()
    gradient = step.predictions["policy"].grad
    shown = (step.batch.columns["mask"] > 0).expand_as(gradient)

    assert torch.isfinite(value)
    assert torch.equal(gradient != 0, shown)
    assert loss(step_of(NOTHING[None]), MaskedLoss(config("--mask_floor=0"))).item() == 0


def test_a_share_of_visits_uses_no_mask_whatever_the_batch() -> None:
    options = config("--mask_probability=0.3", "--mask_floor=0")[MaskOptions]
    weights = place_weights(step_of(torch.stack([NOTHING] * 400)), options)
    used = (weights == 0).flatten(1).all(1)

    assert torch.equal(used, ~(weights == 1).flatten(1).all(1))
    assert 0.2 < used.float().mean() < 0.4
    later = place_weights(step_of(torch.stack([NOTHING] * 50), first=100), options)
    assert torch.equal(later, weights[100:150])


@pytest.mark.parametrize("loss_type", ["l2", "huber"])
def test_outside_of_the_mask_the_model_without_its_adapter_is_the_target(loss_type: str) -> None:
    step = step_of(loss_type=loss_type)
    term = PriorOutsideMask(config("--prior_outside_mask=0.5"), "")
    errors, w = exact_errors(step, step.predictions["base"]), (MASKS.double() / 255).clamp(min=0.1)
    each = ((1 - w) * errors).sum((1, 2, 3)) / (CHANNELS * (1 - w).sum((1, 2, 3)).clamp(min=1))
    expected = (each * step.weights.double()).mean()

    assert term.weight == 0.5
    assert term.loss(step).item() == pytest.approx(expected.item(), rel=1e-6)
    same = replace(step, predictions={"policy": step.predictions["base"], "base": step.predictions["base"]})
    assert term.loss(same).item() == 0
    assert term.loss(replace(step, predictions={"policy": step.predictions["policy"]})) is None


def test_the_weight_of_an_image_is_a_factor_of_its_loss() -> None:
    weights = torch.tensor([0.0, 1.0, 2.5])
    step = step_of(loss_weight=weights)
    each = step.errors().flatten(1).mean(1)
    assert torch.equal(loss(step, LossWeight()), (each * weights * step.weights).mean())


def test_the_weight_of_an_image_is_a_factor_of_its_loss_outside_of_the_mask():
    weights = torch.tensor([0.0, 1.0, 2.5])
    term, step = PriorOutsideMask(config("--prior_outside_mask=1"), ""), step_of()
    each = []
    for row in range(3):
        alone = step_of(MASKS[row : row + 1], first=row)
        alone = replace(alone, t=step.t[row : row + 1], weights=step.weights[row : row + 1])
        each.append(term.loss(alone))
    torch.testing.assert_close(term.loss(step_of(loss_weight=weights)), (torch.stack(each) * weights).mean())


def test_a_run_without_these_columns_has_no_factors() -> None:
    step = step_of()
    step = replace(step, batch=replace(step.batch, columns={}))
    terms = mask_terms(config("--prior_outside_mask=1", "--model_type=lora"), TinyFamily())
    assert [term.factor(step) for term in terms] == [None] * 3
    assert terms[2].loss(step) is None


@pytest.mark.parametrize(("flags", "left_out"), [(("--mask_floor=0",), True), (("--mask_floor=0.1",), False)])
def test_the_options_of_a_run_say_whether_images_with_an_empty_mask_are_samples(tmp_path, flags, left_out) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"id": "pets", "instance_data_dir": str(tmp_path), "mask_path": str(tmp_path / "masks")}]))
    plugins = load_plugins(Selection(only=("objectives",)))
    given = resolve(schema_of(plugins), (f"--data_backend_config={file}", *flags), environment={})
    [spec] = dataset_specs(given, catalog_of(plugins))
    assert spec.columns["mask"].leaves_out_empty == left_out


def test_passes_and_checks_follow_from_the_datasets() -> None:
    catalog = Catalog.of(BUILT_IN_STORAGES, BUILT_IN_METADATA, COLUMNS)
    entries = [
        {"id": "a", "instance_data_dir": "a", "mask_path": "m", "conditioning_type": None},
        {"id": "b", "instance_data_dir": "b"},
        {"id": "c", "instance_data_dir": "c", "dataset_type": "conditioning", "conditioning_type": "mask"},
    ]
    specs, problems = parse_datasets(entries, where="", defaults=DataDefaults(), catalog=catalog)
    masked, plain, other = specs
    prior = PriorOutsideMask(config("--prior_outside_mask=1"), "")

    assert not problems
    assert (prior.passes(0, [plain, masked]), prior.passes(0, [plain])) == (("base",), ())
    without = MaskedLoss(config("--mask_floor=0.2")).check([plain, other])
    assert without == ["mask_floor without effect: no dataset has masks (mask_path, mask_suffix, ...)"]
    assert not MaskedLoss(config("--mask_floor=0.2")).check([masked])
    assert not MaskedLoss(config()).check([plain])
    with pytest.raises(
        ConfigError, match="prior_outside_mask needs the model without its adapter, and all weights are trained"
    ):
        PriorOutsideMask(config("--prior_outside_mask=1"), "all weights are trained").check([masked])
