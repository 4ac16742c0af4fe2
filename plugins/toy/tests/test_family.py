"""The toy family: cheap to build anywhere, the same weights everywhere, and it learns."""

import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights
from torch.utils.flop_counter import FlopCounterMode

from smalti.diffusion.objective import SampleNoise, build_objective
from smalti.errors import UserError
from smalti.models.family import ModelFamily, SampleRequest
from smalti_testing.family_subject import native_objective
from smalti_toy.family import ToyFamily, ToyShape, ToyTransformer, hash_words

SMALL = ToyShape(width=32, depth=2, heads=2, max_tokens=6, vocabulary=64)


def small_model(family: ToyFamily, seed: int = 0) -> ToyTransformer:
    weights = family.weights(seed)
    model = family.build_model()
    model.load_state_dict({name: weights.get(name) for name in weights.names()})
    return model


def awake(model: ToyTransformer) -> ToyTransformer:
    """With noise on all parameters, since a fresh model answers zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model.eval()


def request(prompts: list[str], *, width: int = 16, height: int = 16, guidance: float = 2.0) -> SampleRequest:
    return SampleRequest(
        prompts=prompts,
        seeds=list(range(len(prompts))),
        width=width,
        height=height,
        steps=3,
        guidance=guidance,
        objective=build_objective("sample"),
    )


def test_it_is_a_model_family() -> None:
    family: ModelFamily = ToyFamily(SMALL)
    assert (family.name, family.alignment, family.prediction) == ("toy", 4, "sample")


def test_the_default_model_has_about_5_million_parameters() -> None:
    with init_empty_weights():
        model = ToyFamily().build_model()
    assert 4.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 5.5e6


def test_a_model_built_on_the_meta_device_has_nothing_left_there_once_its_weights_are_in() -> None:
    family = ToyFamily(SMALL)
    with init_empty_weights():
        model = family.build_model()
    assert all(parameter.is_meta for parameter in model.parameters())
    weights = family.weights(0)
    model.load_state_dict({name: weights.get(name) for name in weights.names()}, assign=True)
    answer = family.forward(model, torch.randn(2, 3, 8, 8), torch.tensor([10.0, 900.0]), family.encode_captions(["a", ""]))
    assert answer.shape == (2, 3, 8, 8)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = ToyFamily(SMALL).weights(5).get("words.weight")
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(ToyFamily(SMALL).weights(5).get("words.weight"), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(ToyFamily(SMALL).weights(6).get("words.weight"), first)


def test_a_weight_that_is_not_there_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        ToyFamily(SMALL).weights(0).get("no.such.weight")


def test_words_have_the_same_numbers_in_every_process() -> None:
    code = "from smalti_toy.family import hash_words; print(hash_words('Grinning FACE', count=3, vocabulary=4096))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(hash_words("grinning face!", count=3, vocabulary=4096))


def test_the_empty_caption_is_no_words_at_all() -> None:
    assert ToyFamily(SMALL).encode_captions([""])["words"].tolist() == [[0] * 6]


def test_words_never_hash_to_the_number_of_no_word() -> None:
    numbers = {hash_words(f"word{i}", count=1, vocabulary=8)[0] for i in range(200)}
    assert numbers == set(range(1, 8))


def test_long_captions_are_cut_to_the_models_length() -> None:
    assert ToyFamily(SMALL).encode_captions(["one two three four five six seven"])["words"].shape == (1, 6)


def test_the_prompt_the_time_and_the_place_matter() -> None:
    family = ToyFamily(SMALL)
    model = awake(small_model(family))
    noisy = torch.randn(1, 3, 16, 16).expand(3, -1, -1, -1)
    conditioning = family.encode_captions(["sun", "moon", "sun"])
    answer = family.forward(model, noisy, torch.tensor([500.0, 500.0, 100.0]), conditioning)
    assert (answer[0] - answer[1]).abs().max() > 1e-3
    assert (answer[0] - answer[2]).abs().max() > 1e-3
    flat = family.forward(model, torch.zeros(1, 3, 16, 16), torch.tensor([500.0]), family.encode_captions(["sun"]))
    assert (flat[..., :4, :4] - flat[..., -4:, -4:]).abs().max() > 1e-3


def test_word_order_matters() -> None:
    family = ToyFamily(SMALL)
    model = awake(small_model(family))
    answer = family.forward(
        model, torch.zeros(2, 3, 8, 8), torch.full((2,), 500.0), family.encode_captions(["sun moon", "moon sun"])
    )
    assert (answer[0] - answer[1]).abs().max() > 1e-5


@pytest.mark.parametrize(("width", "height"), [(16, 16), (24, 8), (8, 32)])
def test_pictures_of_any_ratio_can_be_drawn(width: int, height: int) -> None:
    family = ToyFamily(SMALL)
    with torch.no_grad():
        pictures = family.sample(awake(small_model(family)), request(["a", "b"], width=width, height=height))
    assert pictures.shape == (2, 3, height, width)
    assert torch.isfinite(pictures).all()


def test_a_picture_does_not_depend_on_its_neighbours() -> None:
    family = ToyFamily(SMALL)
    model = awake(small_model(family))
    with torch.no_grad():
        together = family.sample(model, request(["a", "b", "c"]))
        alone = family.sample(model, request(["a"]))
    torch.testing.assert_close(together[:1], alone, atol=1e-4, rtol=1e-4)


def test_a_size_that_patches_cannot_cover_is_refused_with_the_way_out() -> None:
    family = ToyFamily(SMALL)
    with pytest.raises(UserError, match="18x16"):
        family.sample(small_model(family), request(["a"], width=18))


@pytest.mark.parametrize("shape", [{"width": 30, "heads": 4}, {"width": 30, "heads": 2}, {"depth": 0}], ids=str)
def test_impossible_shapes_are_refused_with_a_way_out(shape: dict[str, int]) -> None:
    with pytest.raises(UserError) as raised:
        ToyShape(**shape)
    assert raised.value.fix


def test_recomputing_blocks_changes_no_gradient() -> None:
    family = ToyFamily(SMALL)
    noisy, words = torch.randn(2, 3, 8, 8), family.encode_captions(["sun", ""])
    gradients = []
    for recompute in (False, True):
        model = awake(small_model(family)).train()
        if recompute:
            model.enable_gradient_checkpointing()
        family.forward(model, noisy, torch.tensor([100.0, 900.0]), words).square().mean().backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_every_parameter_gets_a_gradient() -> None:
    family = ToyFamily(SMALL)
    model = awake(small_model(family))
    family.forward(model, torch.randn(1, 3, 8, 8), torch.ones(1), family.encode_captions(["sun"])).sum().backward()  # type: ignore[no-untyped-call]
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(("width", "height"), [(32, 32), (48, 32)])
def test_the_flops_are_those_that_torch_counts(width: int, height: int) -> None:
    family = ToyFamily()
    with torch.device("meta"):
        model, noisy, words = family.build_model(), torch.empty(1, 3, height, width), torch.zeros(1, 16, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(noisy, torch.zeros(1), words)
    assert counter.get_total_flops() == family.flops_per_sample(width, height)


def test_blocks_are_found_in_the_model() -> None:
    family = ToyFamily(SMALL)
    modules = dict(family.build_model().named_modules())
    assert [type(module).__name__ for module in modules.values()].count(family.block_classes()[0]) == 2


@pytest.mark.parametrize("prediction", ["sample", "flow_matching", "epsilon", "v_prediction"])
def test_it_learns_two_words_with_every_prediction(prediction: str) -> None:
    family = ToyFamily(SMALL, prediction=prediction)  # type: ignore[arg-type]
    model, noise, objective = small_model(family), SampleNoise(0), native_objective(family)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    latents = torch.tensor([0.8, -0.8]).view(2, 1, 1, 1).expand(2, 3, 8, 8).repeat(8, 1, 1, 1)
    conditioning = family.encode_captions(["white", "black"] * 8)
    losses = []
    for step in range(100):
        numbers = range(step * 16, step * 16 + 16)
        t = objective.times(noise.column(numbers, 0))
        drawn = noise.normal(numbers, (3, 8, 8))
        noisy = objective.add_noise(latents, drawn, t)
        prediction_ = family.forward(model, noisy, objective.timesteps(t), conditioning)
        loss = objective.compare(prediction_, objective.target(latents, drawn, t), t).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
