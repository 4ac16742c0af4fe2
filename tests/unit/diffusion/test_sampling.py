"""Samplers find the picture when the model knows it, and treat each prompt on its own."""

import pytest
import torch

from smalti.diffusion.objective import Conditioning, Objective, RectifiedFlow, build_objective
from smalti.diffusion.sampling import Denoise, Sampler, seeded_noise
from smalti.errors import UserError

OBJECTIVES: dict[str, Objective] = {
    "epsilon": build_objective("epsilon"),
    "v": build_objective("v_prediction", rescale_betas_zero_snr=True),
    "DDPM sample": build_objective("sample", native="epsilon"),
    "velocity": build_objective("flow_matching"),
    "flow sample": build_objective("sample"),
}
everywhere = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
SHAPE = (3, 4, 4)


def knows(objective: Objective) -> Denoise:
    """A model that knows that the picture is its conditioning, everywhere the same number."""

    def denoise(noisy: torch.Tensor, timesteps: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        t = timesteps / 1000 if isinstance(objective, RectifiedFlow) else timesteps.long()
        alpha, sigma = (rate.view(-1, 1, 1, 1) for rate in objective.alpha_sigma(t))
        picture = conditioning["level"].view(-1, 1, 1, 1).expand_as(noisy)
        noise = (noisy - alpha * picture) / sigma
        return {
            "epsilon": noise,
            "sample": picture,
            "v_prediction": alpha * noise - sigma * picture,
            "flow_matching": noise - picture,
        }[objective.prediction]

    return denoise


@everywhere
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_model_that_knows_the_picture_draws_it(objective: Objective, shift: float) -> None:
    level = torch.tensor([-0.5, 0.25])
    sampler = Sampler(objective=objective, steps=7, shift=shift)
    picture = sampler(knows(objective), seeded_noise([1, 2], SHAPE), {"level": level})
    torch.testing.assert_close(picture, level.view(2, 1, 1, 1).expand(2, *SHAPE), atol=2e-3, rtol=0)


@everywhere
def test_guidance_goes_beyond_the_prompt_away_from_the_empty_one(objective: Objective) -> None:
    prompt, empty = {"level": torch.tensor([0.3])}, {"level": torch.tensor([0.1])}
    sampler = Sampler(objective=objective, steps=5, guidance=2.0)
    picture = sampler(knows(objective), seeded_noise([1], SHAPE), prompt, empty)
    assert picture.mean().item() == pytest.approx(0.5, abs=5e-3)


def test_guidance_of_1_asks_the_model_once_per_step() -> None:
    batches: list[int] = []

    def denoise(noisy: torch.Tensor, _: torch.Tensor, __: Conditioning) -> torch.Tensor:
        batches.append(len(noisy))
        return noisy

    Sampler(objective=OBJECTIVES["velocity"], steps=4)(denoise, seeded_noise([1, 2], SHAPE), {})
    assert batches == [2] * 4


def test_guidance_without_an_empty_prompt_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty prompt"):
        Sampler(objective=OBJECTIVES["velocity"], guidance=3.0)(knows(OBJECTIVES["velocity"]), torch.zeros(1, *SHAPE), {})


def test_the_noise_of_a_picture_depends_on_its_own_seed_only() -> None:
    assert torch.equal(seeded_noise([4, 5, 6], SHAPE)[1:2], seeded_noise([5], SHAPE))


@everywhere
def test_sampling_starts_at_pure_noise_and_never_repeats_a_time(objective: Objective) -> None:
    times = Sampler(objective=objective, steps=1000, shift=1.0).times()
    assert objective.timesteps(times)[0] >= 999
    assert times.diff().max() < 0


@pytest.mark.parametrize("settings", [{"steps": 0}, {"steps": 1001}, {"shift": 0.0}], ids=str)
def test_impossible_settings_are_refused_with_a_way_out(settings: dict[str, float]) -> None:
    with pytest.raises(UserError) as raised:
        Sampler(objective=OBJECTIVES["velocity"], **settings)  # type: ignore[arg-type]
    assert raised.value.fix
