"""Preservation and ranges of noise levels, against their formulas; what is refused."""

import math
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

from smalti import ConfigError
from smalti.config.resolution import resolve
from smalti.data import Bucket, DataDefaults, MicroBatch, SecondCaptions, parse_datasets
from smalti.diffusion import RandomColumn, SampleNoise, build_timesteps
from smalti.models import SizeConditioning, materialise
from smalti.plugins import load_plugins, schema_of
from smalti.training import Term, denoising_loss
from smalti_objectives.plugin import plugin
from smalti_objectives.timestep_range import TruncatedSampler
from smalti_testing import TinyFamily

SCHEMA = schema_of(load_plugins())
CLASS = ("--model_type=lora", "--preserve=class", "--preserve_class=cat")
WIDTH, HEIGHT = 12, 8


class FullPrecision:
    autocast = nullcontext


class Adapted(TinyFamily):
    """Of which half of the weights are the model without its adapter."""

    @contextmanager
    def adapter_strength(self, model, strength):
        with torch.no_grad():
            kept = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.mul_(0.5 + strength / 2)
            yield
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)


class ZeroAdapter(TinyFamily):
    """An adapter that was not trained yet."""

    def adapter_strength(self, model, strength):
        return nullcontext()


def entry(**values: object):
    entries = [{"id": "pets", "instance_data_dir": "/pets", **values}]
    [spec], problems = parse_datasets(entries, where="", defaults=DataDefaults(resolution=16))
    assert not problems
    return spec


ZWX, OTHER = entry(trigger_word="zwx"), entry()


def config(*flags: str):
    return resolve(SCHEMA, flags, environment={})


def loss_of(family, *flags: str):
    given = config("--caption_dropout_probability=0", *flags)
    return denoising_loss(given, family, "cpu", terms=plugin.build_terms(given, family))


def batch_of(loss, *datasets, position: int = 0) -> MicroBatch:
    """One image for each dataset, as the loader makes it."""
    count, needs = len(datasets), loss.needs(position, datasets)
    captions = tuple(f"zwx number {number}" for number in range(count))
    second = tuple(
        loss.second_caption("preserve", caption, spec, number)
        for number, (caption, spec) in enumerate(zip(captions, datasets, strict=True))
        if needs
    )
    return MicroBatch(
        bucket=Bucket(WIDTH, HEIGHT),
        pixels=torch.rand(count, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0)) * 2 - 1,
        latents=None,
        captions=captions,
        conditioning=None,
        numbers=tuple(range(count)),
        keys=captions,
        size_conditioning=(SizeConditioning(width=WIDTH, height=HEIGHT, left=0, top=0),) * count,
        datasets=datasets,
        needs=needs,
        second_captions={"preserve": SecondCaptions(captions=second, conditioning=None)} if needs else {},
    )


def model_of(family):
    return materialise(family.build_model(), family.weights(0), "cpu")


@pytest.mark.parametrize(("way", "captions"), [("class", ["cat number 0"]), ("blank", [""]), ("prompts", ["a dog"])])
@pytest.mark.parametrize("prediction", ["flow_matching", "epsilon"])
def test_hook_build_terms_preserves_by_the_formula(way, captions, prediction):
    family = Adapted()
    flags = ("--model_type=lora", f"--preserve={way}", f"--prediction_type={prediction}", "--preserve_weight=0.3")
    loss = loss_of(family, *flags, "--preserve_class=cat", "--preserve_prompts=a dog")
    model, batch = model_of(family), batch_of(loss, ZWX)
    assert loss.names == ("denoising", "preserve")
    found = loss(model, batch, FullPrecision()).parts
    found[1].backward()

    noise = loss.noise.normal((0,), (3, HEIGHT, WIDTH))
    t = loss.objective.times(loss.timesteps(loss.noise.column((0,), RandomColumn.TIMESTEP), 24))
    inputs = loss.objective.add_noise(batch.pixels, noise, t), loss.objective.timesteps(t), family.encode_captions(captions)
    with torch.no_grad(), family.adapter_strength(model, 0.0):
        base = family.forward(model, *inputs)
    wanted = 0.3 * (family.forward(model, *inputs).double() - base.double()).square().mean()
    assert found[1].item() == pytest.approx(wanted.item(), rel=1e-5)
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_without_weight_the_loss_is_that_of_before_and_an_untrained_adapter_has_none():
    family = ZeroAdapter()
    before, off, on = (loss_of(family, *flags) for flags in ((), (*CLASS, "--preserve_weight=0"), CLASS))
    model = model_of(family)
    plain, without, preserved = (loss(model, batch_of(loss, ZWX, ZWX), FullPrecision()).parts for loss in (before, off, on))
    assert torch.equal(plain, without)
    assert preserved.tolist() == [plain.item(), 0.0]


def test_only_images_with_a_trigger_word_preserve_a_class_and_only_in_the_steps_that_are_due():
    family = Adapted()
    loss, model = loss_of(family, *CLASS, "--preserve_every=3"), model_of(family)
    passes = {"policy|caption=preserve", "base|caption=preserve"}
    assert [loss.needs(position, [OTHER, ZWX]) == passes for position in range(6)] == [False, False, True] * 2
    assert loss.needs(2, [OTHER]) == frozenset()
    assert loss.needs(2, [entry(is_regularisation_data=True, trigger_word="zwx")]) == {"base"}

    groups = (ZWX,), (ZWX, OTHER), (OTHER,)
    first, both, neither = (loss(model, batch_of(loss, *some, position=2), FullPrecision()).parts for some in groups)
    torch.testing.assert_close(both[1], first[1] / 2)
    assert neither[1] == 0
    weighted = replace(batch_of(loss, ZWX, position=2), columns={"loss_weight": torch.tensor([0.25])})
    torch.testing.assert_close(loss(model, weighted, FullPrecision()).parts, first / 4)


@pytest.mark.parametrize(
    ("caption", "renamed"),
    [
        ("zwx, a zwx.", "cat, a cat."),
        ("zwx-like zwxy azwx ZWX", "cat-like zwxy azwx ZWX"),
        ("一只zwx的照片", "一只cat的照片"),
    ],
)
def test_every_occurrence_of_the_trigger_word_becomes_the_class(caption, renamed):
    assert loss_of(Adapted(), *CLASS).second_caption("preserve", caption, ZWX, 1) == renamed


def test_each_trigger_word_can_have_a_class_of_its_own():
    both = entry(trigger_word="zwx"), entry(id="toys", trigger_word="abc")
    loss = loss_of(Adapted(), *CLASS[:2], "--preserve_class=zwx=cat", "--preserve_class=abc=toy, of wood")
    assert [loss.second_caption("preserve", "zwx, abc", spec, 1) for spec in both] == ["cat, abc", "zwx, toy, of wood"]
    loss = loss_of(Adapted(), *CLASS, "--preserve_class=abc=toy")
    assert [loss.second_caption("preserve", "zwx, abc", spec, 1) for spec in both] == ["cat, abc", "zwx, toy"]

    [_, term, *_] = plugin.build_terms(config(*CLASS[:2], "--preserve_class=zwx=cat"), Adapted())
    [notice] = term.check(both)
    assert notice.startswith("preserve=class has no effect on the dataset toys: it has no trigger_word that")
    assert term.passes(0, both[1:]) == ()
    with pytest.raises(ConfigError, match="no dataset has one that preserve_class names"):
        term.check(both[1:])


def test_a_visit_takes_one_of_the_prompts_by_its_number_alone():
    words = "--model_type=lora", "--preserve=prompts", "--preserve_prompts=a", "--preserve_prompts=b", "--preserve_prompts=c"
    loss = loss_of(Adapted(), *words)
    chosen = [loss.second_caption("preserve", "zwx", ZWX, number) for number in range(300)]
    column = SampleNoise(loss.noise.seed).column(range(300), 4)
    assert chosen == ["abc"[int(3 * share)] for share in column.tolist()]
    assert {*chosen} == {"a", "b", "c"}


def test_all_second_captions_are_encoded_before_training():
    texts = {0: ("zwx a", "zwx b"), 1: ("zwx b",)}

    class Rows:
        def __len__(self):
            return 2

    def data(spec):
        return SimpleNamespace(datasets=[SimpleNamespace(spec=spec, index=Rows(), texts=texts.__getitem__)])

    def listed(spec, *flags):
        given = config("--model_type=lora", *flags)
        return [text for term in plugin.build_terms(given, Adapted()) for text in term.texts(data(spec))]

    assert listed(ZWX, *CLASS) == ["cat a", "cat b"]
    assert listed(OTHER, *CLASS) == []
    assert listed(ZWX, "--preserve=blank") == [""]
    assert listed(ZWX, "--preserve=prompts", "--preserve_prompts=a dog") == ["a dog"]


@pytest.mark.parametrize(
    ("flags", "family", "datasets", "message"),
    [
        (CLASS[1:], Adapted(), (ZWX,), "all weights are trained"),
        (CLASS, TinyFamily(), (ZWX,), "the model family tiny cannot leave out its adapter"),
        (CLASS, Adapted(), (OTHER,), "no dataset has one"),
    ],
)
def test_preservation_that_cannot_work_is_refused_with_the_reason(flags, family, datasets, message):
    terms = plugin.build_terms(config(*flags), family)
    with pytest.raises(ConfigError, match=message):
        [term.check(datasets) for term in terms]


def test_a_dataset_without_effect_is_named():
    [_, term, *_] = plugin.build_terms(config(*CLASS), Adapted())
    assert term.check((ZWX, OTHER)) == ["preserve=class has no effect on the dataset pets: it has no trigger_word"]


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        (("--preserve=class",), "preserve"),
        (("--preserve=prompts",), "preserve"),
        (("--timestep_min=0.5", "--timestep_max=0.5"), "timestep_min"),
    ],
)
def test_hook_check_config_finds_options_that_do_not_go_together(flags, where):
    assert [problem.where for problem in plugin.check_config(config(*flags))] == [where]


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal", "mode", "beta"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_times_in_a_range_have_the_frequencies_of_the_distribution(distribution, shift):
    whole = build_timesteps(distribution=distribution, shift=shift)
    u = (torch.arange(20_000) + 0.5) / 20_000
    for low, high in ((0.0, 0.875), (0.875, 1.0), (0.3, 0.6)):
        everywhere = whole(u, 64)
        inside = everywhere[(everywhere >= low) & (everywhere <= high)].sort().values
        truncated = TruncatedSampler(sampler=whole, low=low, high=high)
        places = (torch.linspace(0.01, 0.99, 50) * len(inside)).long()
        torch.testing.assert_close(truncated((places + 0.5) / len(inside), 64), inside[places], atol=2e-3, rtol=0)
        ends = truncated(torch.tensor([1e-7, 1 - 1e-7]), 64)
        assert low <= float(ends.min())
        assert float(ends.max()) <= high


def test_a_range_is_what_a_run_trains_on_and_says():
    loss = loss_of(TinyFamily(), "--timestep_min=0.4", "--flow_schedule_shift=3")
    times = loss.timesteps(loss.noise.column(range(1000), 0), 24)
    assert float(times.min()) >= 0.4
    said = loss.describe_timesteps([Bucket(WIDTH, HEIGHT)])
    assert said == "logit-normal(0, 1), shift 3 (flow_schedule_shift), of these the times from 0.4 to 1"
    assert math.isclose(float(loss_of(TinyFamily()).timesteps(torch.tensor([0.5]), 24)), 0.5)
    assert replace(loss, terms=()).timesteps is loss.timesteps


class FlowDpo(Term):
    """What another package could add: of a pair of images with the same noise, the first one is to gain on the base."""

    name = "dpo"

    def __init__(self, beta: float):
        self.beta = beta

    def passes(self, position, datasets):
        return "base", "policy|latents=rejected", "base|latents=rejected"

    def factor(self, step):
        return torch.zeros((), device=step.t.device)  # in place of the denoising loss

    def loss(self, step):
        gain, other = (
            (step.errors(f"policy{latents}") - step.errors(f"base{latents}")).flatten(1).mean(1)
            for latents in ("", "|latents=rejected")
        )
        return -torch.nn.functional.logsigmoid(-self.beta / 2 * (gain - other)).mean()


class TextSlider(Term):
    """What another package could add: a direction between two texts, learned as an adapter."""

    name = "slider"
    second_captions = MappingProxyType({"slider+": lambda *_: "very old", "slider-": lambda *_: "very young"})

    def passes(self, position, datasets):
        return "base", "base|caption=slider+", "base|caption=slider-"

    def target(self, step, target):
        neutral, more, less = (step.predictions[f"base{caption}"] for caption in ("", "|caption=slider+", "|caption=slider-"))
        return neutral + 3 * (more - less)


def dpo(family, rejected):
    given = config("--model_type=lora", "--caption_dropout_probability=0")
    loss = denoising_loss(given, family, "cpu", terms=[FlowDpo(1000.0)])
    model, batch = model_of(family), replace(batch_of(loss_of(family), ZWX, OTHER), needs=loss.needs(0, []))
    return loss, model, replace(batch, columns={"rejected": batch.pixels if rejected is None else rejected})


def test_another_package_can_train_preferences():
    rejected = torch.rand(2, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for family, other in ((Adapted(), None), (ZeroAdapter(), rejected)):
        loss, model, batch = dpo(family, other)
        assert loss(model, batch, FullPrecision()).parts.tolist() == [0.0, pytest.approx(math.log(2), abs=1e-7)]
    loss, model, batch = dpo(Adapted(), rejected)
    found = loss(model, batch, FullPrecision()).parts[1].item()

    noise, t = loss.noise.normal((0, 1), (3, HEIGHT, WIDTH)), loss.timesteps(loss.noise.column((0, 1), 0), 24)
    gains = []
    for images in (batch.pixels, rejected):
        inputs = loss.objective.add_noise(images, noise, t), 1000 * t, loss.family.encode_captions(batch.captions)
        squares = []
        for strength in (1.0, 0.0):
            with torch.no_grad(), loss.family.adapter_strength(model, strength):
                squares.append((loss.family.forward(model, *inputs).double() - (noise - images)).square().mean((1, 2, 3)))
        gains.append(squares[0] - squares[1])
    wanted = -torch.log(torch.sigmoid(-500 * (gains[0] - gains[1]))).mean()
    assert found == pytest.approx(wanted.item(), rel=1e-3)


def test_another_package_can_train_sliders_of_texts():
    family = Adapted()
    given = config("--model_type=lora", "--caption_dropout_probability=0")
    loss = denoising_loss(given, family, "cpu", terms=[TextSlider()])
    model, batch = model_of(family), batch_of(loss_of(family), ZWX)
    second = {
        name: SecondCaptions(captions=(loss.second_caption(name, "", ZWX, 0),), conditioning=None)
        for name in ("slider+", "slider-")
    }
    found = loss(model, replace(batch, needs=loss.needs(0, []), second_captions=second), FullPrecision()).parts

    noise, t = loss.noise.normal((0,), (3, HEIGHT, WIDTH)), loss.timesteps(loss.noise.column((0,), 0), 24)
    noisy = loss.objective.add_noise(batch.pixels, noise, t)

    def predicted(text):
        return family.forward(model, noisy, 1000 * t, family.encode_captions([text])).double()

    with torch.no_grad(), family.adapter_strength(model, 0.0):
        wanted = predicted(batch.captions[0]) + 3 * (predicted("very old") - predicted("very young"))
    assert found.item() == pytest.approx((predicted(batch.captions[0]) - wanted).square().mean().item(), rel=1e-4)
