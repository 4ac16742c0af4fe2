"""From a micro-batch to its loss: what of the batch and of the family decides its noise levels."""

from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import torch

from smalti.config.resolution import resolve
from smalti.data.buckets import Bucket
from smalti.data.datasets.parse import DataDefaults, parse_datasets
from smalti.data.datasets.spec import DatasetSpec
from smalti.data.loader import MicroBatch, SecondCaptions
from smalti.diffusion import RandomColumn
from smalti.diffusion.timesteps import LogitNormal, Uniform
from smalti.errors import UserError
from smalti.models.size_conditioning import SizeConditioning
from smalti.models.weights import materialise
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.training.loss import denoising_loss
from smalti.training.terms import Step, Term
from smalti_objectives.regularisation import Regularisation
from smalti_testing import TinyFamily

WIDTH, HEIGHT = 12, 8


class Coarse(TinyFamily):
    """A token of its model is a square of 4 x 4 pixels, two of its alignment on each edge."""

    def image_tokens(self, width: int, height: int) -> int:
        return width * height // 16


class FullPrecision:
    autocast = nullcontext


@dataclass
class Recorder:
    """A timestep sampler that notes for how many tokens it was asked."""

    tokens: int = 0

    def __call__(self, u: torch.Tensor, tokens: int) -> torch.Tensor:
        self.tokens = tokens
        return u


def test_times_are_asked_for_by_the_tokens_of_the_familys_images() -> None:
    asked = []
    for family in (TinyFamily(), Coarse()):
        loss = replace(denoising_loss(config(), family, "cpu"), timesteps=(recorder := Recorder()))  # type: ignore[arg-type]
        loss(model_of(family), batch(), FullPrecision())
        asked.append(recorder.tokens)
    assert asked == [24, 6]


@pytest.mark.parametrize(
    ("flags", "quantile"),
    [
        ((), LogitNormal(mean=0.0, std=1.0)),
        (("--prediction_type=sample",), LogitNormal()),
        (("--prediction_type=epsilon",), Uniform()),
        (("--prediction_type=v_prediction",), Uniform()),
        (("--timestep_distribution=uniform",), Uniform()),
        (("--flow_sigmoid_scale=1.5", "--flow_sigmoid_mean=0.5"), LogitNormal(mean=0.5, std=1.5)),
        (("--prediction_type=epsilon", "--timestep_distribution=logit_normal"), LogitNormal()),
    ],
)
def test_flows_train_the_middle_most_and_ddpm_all_noise_levels_unless_the_options_say_so(flags, quantile) -> None:
    assert denoising_loss(config(*flags), TinyFamily(), "cpu").timesteps.quantile == quantile


def test_a_dataset_can_drop_captions_more_often_than_the_option_says() -> None:
    class Listening(TinyFamily):
        texts: list[str]

        def encode_captions(self, captions):
            self.texts = list(captions)
            return super().encode_captions(captions)

    texts = {}
    for shares in ((), (1.0, 0.0), (None, 0.0), (0.0, None)):
        for option in (0, 1):
            family = Listening()
            loss = denoising_loss(config(f"--caption_dropout_probability={option}"), family, "cpu")
            datasets = tuple(entry(caption_dropout_probability=share) for share in shares)
            loss(model_of(family), replace(batch(), datasets=datasets), FullPrecision())
            texts[shares, option] = family.texts

    assert (texts[(), 0], texts[(), 1]) == (["a", "b"], ["", ""])
    assert texts[(1.0, 0.0), 0] == texts[(1.0, 0.0), 1] == ["", "b"]
    assert texts[(None, 0.0), 1] == ["", "b"]
    assert texts[(0.0, None), 1] == ["a", ""]


@pytest.mark.parametrize("regularised", [(False, False), (True, False)])
@pytest.mark.parametrize(
    ("flags", "other"),
    [
        ((), ()),
        (("--flow_weighting=cosmap",), ("--loss_type=huber", "--huber_schedule=snr")),
        (("--prediction_type=sample", "--loss_type=smooth_l1"), ("--huber_schedule=exponential",)),
        (("--prediction_type=epsilon", "--snr_gamma=5"), ("--loss_type=huber", "--huber_schedule=snr")),
        (("--prediction_type=v_prediction", "--loss_type=smooth_l1"), ("--snr_gamma=5",)),
    ],
)
def test_without_another_term_loss_and_gradients_are_those_of_plain_means_to_the_bit(flags, other, regularised) -> None:
    family = TinyFamily()
    datasets = tuple(entry(is_regularisation_data=flag) for flag in regularised)
    for options in (flags, (*flags, *other)):
        loss, model = loss_of(family, *options), model_of(family)
        given = drawn(loss, datasets)
        plain = plainly(loss, model, given, regularised)
        wanted = gradients(plain, model)
        losses = loss(model, given, FullPrecision())
        found = losses.parts
        assert found.tolist() == [plain.item()]
        t = loss.objective.times(losses.fractions)
        assert (losses.samples * loss.weighting(t)).mean() == plain
        assert not losses.samples.requires_grad
        assert all(map(torch.equal, gradients(found.sum(), model), wanted))


def plainly(loss, model, given, regularised) -> torch.Tensor:
    """The loss in as few words as there are, as it was before there were terms."""
    family, objective = loss.family, loss.objective
    noise = loss.noise.normal(given.numbers, given.pixels.shape[1:])
    chance = loss.noise.column(given.numbers, RandomColumn.TIMESTEP)
    t = objective.times(loss.timesteps(chance, family.image_tokens(WIDTH, HEIGHT)))
    noisy, texts = objective.add_noise(given.pixels, noise, t), family.encode_captions(given.captions)
    target = objective.target(given.pixels, noise, t)
    if any(regularised):
        with torch.no_grad(), loss.without_adapter(model):
            base = family.forward(model, noisy, objective.timesteps(t), texts)
        target = torch.where(torch.tensor(regularised).view(-1, 1, 1, 1), base, target)
    prediction = family.forward(model, noisy, objective.timesteps(t), texts)
    if objective.prediction == "sample":
        time = t.view(-1, 1, 1, 1).clamp(min=objective.floor)
        prediction, target = prediction / time, target / time
    losses, cost = (prediction - target).square(), objective.cost
    if cost.kind != "l2":
        thresholds = cost.thresholds(objective, t)
        c = cost.threshold if thresholds is None else thresholds.view(-1, 1, 1, 1)
        losses = 2 * losses / ((losses + c * c).sqrt() + c) * (c if cost.kind == "huber" else 1.0)
    return (losses.flatten(1).mean(1) * loss.weighting(t)).mean()


def test_regularisation_data_is_trained_towards_the_model_without_the_adapter() -> None:
    family = TinyFamily()
    model = model_of(family)
    loss = loss_of(family)

    def of(regularised: tuple[bool, bool], *, without=halved, any_rank: bool = True) -> torch.Tensor:
        datasets = tuple(entry(is_regularisation_data=flag) for flag in regularised)
        needs = frozenset({"base"}) if any_rank else loss.needs(0, datasets)
        chosen = replace(batch(), datasets=datasets, needs=needs)
        return replace(loss, without_adapter=without)(model, chosen, FullPrecision()).parts

    ordinary, first, second, both = (of(each) for each in ((False, False), (True, False), (False, True), (True, True)))
    torch.testing.assert_close(first + second, ordinary + both)
    assert of((True, True), without=lambda _: nullcontext()) == 0, "the same model predicts the same"
    assert 0 < both != ordinary
    assert of((False, False), any_rank=False) == ordinary, "another rank's regularisation data changes nothing here"
    both.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Nothing(Term):
    name = "nothing"

    def loss(self, step: Step) -> torch.Tensor:
        return 0 * step.errors().mean()


def test_hook_build_terms_of_a_term_that_adds_nothing_leaves_loss_and_gradients_to_the_bit() -> None:
    family = TinyFamily()
    model = model_of(family)
    alone, loss = loss_of(family), loss_of(family, terms=[Nothing()])
    given = drawn(alone, (entry(), entry()))
    found, before = (each(model, given, FullPrecision()).parts for each in (loss, alone))
    assert (loss.names, alone.names) == (("denoising", "nothing"), ("denoising",))
    assert found.tolist() == [*before.tolist(), 0.0]
    assert all(map(torch.equal, gradients(found.sum(), model), gradients(before.sum(), model)))


class Weight(Term):
    name = "weight"

    def factor(self, step):
        return torch.tensor([3.0, 0.0]).view(-1, 1, 1, 1)


def test_the_loss_of_a_visit_does_not_depend_on_the_weight_of_its_image() -> None:
    family = TinyFamily()
    model = model_of(family)
    alone, loss = loss_of(family), loss_of(family, terms=[Weight()])
    given = drawn(alone, (entry(), entry()))
    plain, found = (each(model, given, FullPrecision()) for each in (alone, loss))
    torch.testing.assert_close(found.samples, torch.tensor([plain.samples[0], float("nan")]), equal_nan=True)
    torch.testing.assert_close(found.parts, 1.5 * plain.samples[:1], msg="all timesteps have the weight 1")


class Everything(Term):
    """What a term can do, each once."""

    name = "everything"
    weight = 0.5
    second_captions = MappingProxyType({"other": lambda caption, dataset, number: f"{caption} of {dataset.id} {number}"})

    def passes(self, position, datasets):
        return ("base", "policy|caption=other", "base|caption=other|latents=rejected") if position % 2 else ()

    def target(self, step, target):
        return 2 * target

    def factor(self, step):
        return step.batch.columns["mask"] / step.batch.columns["mask"].mean((1, 2, 3), keepdim=True)

    def loss(self, step):
        other = step.errors("policy|caption=other", "base") - step.errors("base|caption=other|latents=rejected")
        return step.mean(other)


@pytest.mark.parametrize("flag", ["--prediction_type=flow_matching", "--prediction_type=v_prediction"])
def test_a_term_has_passes_targets_factors_and_columns_as_in_a_hand_written_loss(flag: str) -> None:
    family = TinyFamily()
    model = model_of(family)
    loss = loss_of(family, flag, "--caption_dropout_probability=0", terms=[Everything()])
    assert (loss.needs(0, []), len(loss.needs(1, []))) == (frozenset(), 3)
    given = drawn(loss, (entry(), entry()), position=1)
    columns = {"mask": torch.rand(2, 1, HEIGHT, WIDTH) + 0.1, "rejected": torch.rand(2, 3, HEIGHT, WIDTH)}
    captions = tuple(loss.second_caption("other", each, entry(), number) for each, number in zip("ab", (1, 2), strict=True))
    assert captions == ("a of pets 1", "b of pets 2")
    second = {"other": SecondCaptions(captions=captions, conditioning=None)}
    losses = loss(model, replace(given, columns=columns, second_captions=second), FullPrecision())
    found = losses.parts

    objective, noise = loss.objective, loss.noise.normal((1, 2), (3, HEIGHT, WIDTH))
    t = objective.times(loss.timesteps(loss.noise.column((1, 2), RandomColumn.TIMESTEP), 24))

    def predicted(pixels, captions, *, base):
        with halved(model) if base else nullcontext():
            noisy = objective.add_noise(pixels, noise, t)
            return family.forward(model, noisy, objective.timesteps(t), family.encode_captions(captions)).double()

    wanted = objective.target(given.pixels, noise, t).double()
    mask = columns["mask"].double()
    per_sample = (mask * (predicted(given.pixels, "ab", base=False) - 2 * wanted) ** 2).sum((1, 2, 3)) / (
        3 * mask.sum((1, 2, 3))
    )
    policy, base = predicted(given.pixels, captions, base=False), predicted(given.pixels, "ab", base=True)
    rejected = predicted(columns["rejected"], captions, base=True) - objective.target(columns["rejected"], noise, t).double()
    term = 0.5 * ((policy - base) ** 2 - rejected**2).mean()
    torch.testing.assert_close(found, torch.stack([per_sample.mean(), term]).float())
    torch.testing.assert_close(losses.samples, per_sample.float())


def test_a_second_pass_that_a_rank_does_not_use_stays_in_its_graph() -> None:
    """Its backward pass gathers parameters together with the other ranks."""
    family = TinyFamily()
    model, seen = model_of(family), []
    loss = loss_of(family, terms=[Nothing()])
    model.leave.register_full_backward_hook(lambda *_: seen.append(1))
    second = {"other": SecondCaptions(captions=("c", "d"), conditioning=None)}
    given = replace(drawn(loss, (entry(), entry())), needs=frozenset({"policy|caption=other"}), second_captions=second)
    found = loss(model, given, FullPrecision()).parts
    assert found.tolist() == loss(model, replace(given, needs=frozenset()), FullPrecision()).parts.tolist()
    found.sum().backward()
    assert len(seen) == 2


def test_a_pass_of_the_base_is_refused_where_there_is_none() -> None:
    loss = denoising_loss(config(), TinyFamily(), "cpu")
    with pytest.raises(UserError, match="the model without its adapter, which this run does not have"):
        loss(model_of(TinyFamily()), replace(batch(), needs=frozenset({"base"})), FullPrecision())


@contextmanager
def halved(model):
    """A model whose weights are half as large stands for that without the adapter."""
    with torch.no_grad():
        kept = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.mul_(0.5)
        yield
        for parameter, before in zip(model.parameters(), kept, strict=True):
            parameter.copy_(before)


def model_of(family: TinyFamily):
    return materialise(family.build_model(), family.weights(0), "cpu")


def loss_of(family: TinyFamily, *flags: str, terms: Sequence[Term] = ()):
    """The loss with regularisation, where half of the weights stand for the model without an adapter, and further terms."""
    given = config(*flags)
    loss = denoising_loss(given, family, "cpu", terms=[Regularisation(given, family), *terms])
    return replace(loss, without_adapter=halved)


def drawn(loss, datasets: tuple[DatasetSpec, ...], position: int = 0) -> MicroBatch:
    """A batch of images that differ, with the passes that it needs."""
    pixels = torch.rand(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return replace(batch(), pixels=pixels, datasets=datasets, needs=loss.needs(position, datasets))


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()))


def entry(**values: object) -> DatasetSpec:
    given = {name: value for name, value in values.items() if value is not None}
    entries = [{"id": "pets", "instance_data_dir": "/pets", **given}]
    [spec], problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16))
    assert not problems
    return spec


def config(*flags: str):
    return resolve(schema_of(load_plugins()), flags, environment={})


def batch() -> MicroBatch:
    return MicroBatch(
        bucket=Bucket(WIDTH, HEIGHT),
        pixels=torch.zeros(2, 3, HEIGHT, WIDTH),
        latents=None,
        captions=("a", "b"),
        conditioning=None,
        numbers=(1, 2),
        keys=("a", "b"),
        size_conditioning=(SizeConditioning(width=WIDTH, height=HEIGHT, left=0, top=0),) * 2,
    )
