"""Objectives: the algebra between pictures, noise and predictions, and the published schedules."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from smalti.diffusion.objective import (
    Cost,
    Ddpm,
    HuberSchedule,
    Objective,
    RectifiedFlow,
    beta_table,
    build_objective,
    zero_terminal_snr,
)
from smalti.errors import UserError

OBJECTIVES: dict[str, Objective] = {
    "epsilon": build_objective("epsilon"),
    "v": build_objective("v_prediction"),
    "v, zero SNR": build_objective("v_prediction", rescale_betas_zero_snr=True),
    "DDPM sample": build_objective("sample", native="epsilon"),
    "velocity": build_objective("flow_matching"),
    "flow sample": build_objective("sample"),
}
everywhere = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)


def pictures(count: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 3, 4, 6, generator=generator), torch.randn(count, 3, 4, 6, generator=generator)


def perfect(objective: Objective, latents: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What a model that knows everything would answer, by the definitions in the papers."""
    alpha, sigma = (rate.view(-1, 1, 1, 1) for rate in objective.alpha_sigma(t))
    return {
        "epsilon": noise,
        "sample": latents,
        "v_prediction": alpha * noise - sigma * latents,
        "flow_matching": noise - latents,
    }[objective.prediction]


@everywhere
def test_the_right_answer_costs_nothing(objective: Objective) -> None:
    latents, noise = pictures()
    t = objective.times(torch.tensor([0.002, 0.1, 0.5, 0.9, 0.998]))
    answer = perfect(objective, latents, noise, t)
    assert objective.compare(answer, objective.target(latents, noise, t), t).max() < 1e-10


@everywhere
def test_each_sample_has_its_own_cost(objective: Objective) -> None:
    latents, noise = pictures()
    t = objective.times(torch.full((5,), 0.5))
    answer = perfect(objective, latents, noise, t).clone()
    answer[2] += 1
    costs = objective.compare(answer, objective.target(latents, noise, t), t)
    assert costs.shape == (5,)
    assert costs.argmax() == 2
    assert costs.dtype == torch.float32


@everywhere
def test_split_finds_the_picture_and_the_noise_again(objective: Objective) -> None:
    latents, noise = pictures()
    t = objective.times(torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95]))
    noisy = objective.add_noise(latents, noise, t)
    picture, rest = objective.to_x0_and_noise(perfect(objective, latents, noise, t), noisy, t)
    torch.testing.assert_close(picture, latents, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(rest, noise, atol=2e-4, rtol=1e-3)


@everywhere
def test_corruption_mixes_at_the_rates_and_keeps_the_dtype(objective: Objective) -> None:
    latents, noise = pictures()
    t = objective.times(torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9]))
    alpha, sigma = (rate.view(-1, 1, 1, 1) for rate in objective.alpha_sigma(t))
    torch.testing.assert_close(objective.add_noise(latents, noise, t), alpha * latents + sigma * noise)
    assert objective.add_noise(latents.bfloat16(), noise.bfloat16(), t).dtype == torch.bfloat16


@everywhere
def test_snr_falls_with_noise_and_timesteps_rise(objective: Objective) -> None:
    t = objective.times(torch.linspace(0.01, 1, 100))
    assert objective.snr(t).diff().max() < 0
    assert objective.timesteps(t).diff().min() > 0
    assert objective.timesteps(t).max() <= 1000


@given(st.floats(min_value=0, max_value=1, exclude_min=True))
def test_every_fraction_has_a_discrete_step(u: float) -> None:
    step = OBJECTIVES["epsilon"].times(torch.tensor([u])).item()
    assert 0 <= step <= 999
    assert step == pytest.approx(min(999, math.ceil(u * 1000) - 1), abs=1)


def test_uniform_numbers_reach_all_steps_equally_often() -> None:
    u = (torch.arange(10_000) + 0.5) / 10_000
    assert OBJECTIVES["epsilon"].times(u).bincount().tolist() == [10] * 1000


def test_flow_sample_is_judged_by_velocity_with_a_floor() -> None:
    latents, noise = pictures(2)
    t = torch.tensor([0.5, 0.01])
    objective = RectifiedFlow("sample")
    costs = objective.compare(latents + 0.1, objective.target(latents, noise, t), t)
    torch.testing.assert_close(costs, torch.tensor([(0.1 / 0.5) ** 2, (0.1 / 0.05) ** 2]))


@settings(max_examples=30)
@given(st.floats(min_value=0.01, max_value=10), st.floats(min_value=0.001, max_value=5))
def test_huber_is_square_when_small_and_linear_when_large(difference: float, threshold: float) -> None:
    d, zero = torch.full((1, 4), difference), torch.zeros(1, 4)
    huber = Cost(kind="huber", threshold=threshold)(d, zero).mean().item()
    smooth = Cost(kind="smooth_l1", threshold=threshold)(d, zero).mean().item()
    assert huber <= min(difference**2, 2 * threshold * difference) * 1.001
    assert huber == pytest.approx(smooth * threshold, rel=1e-4)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
@pytest.mark.parametrize("schedule", ["snr", "exponential"])
def test_the_threshold_of_a_huber_loss_falls_with_the_noise_from_one_to_its_end(name: str, schedule: HuberSchedule) -> None:
    objective = OBJECTIVES[name]
    t = objective.times(torch.tensor([1e-4, 0.25, 0.5, 0.75, 1.0]))
    found = Cost(kind="huber", threshold=0.1, schedule=schedule).thresholds(objective, t)
    assert found is not None
    assert bool((found.diff() < 0).all())
    assert found[0].item() == pytest.approx(1.0, abs=0.1)
    assert found[-1].item() == pytest.approx(0.1, abs=0.01)


def test_the_threshold_by_snr_is_that_of_the_paper() -> None:
    objective = OBJECTIVES["epsilon"]
    t = objective.times(torch.tensor([0.3, 0.9]))
    alpha, sigma = objective.alpha_sigma(t)
    found = Cost(kind="huber", threshold=0.2, schedule="snr").thresholds(objective, t)
    assert found is not None
    torch.testing.assert_close(found, 0.8 / (1 + sigma / alpha).square() + 0.2)


def test_each_sample_has_the_threshold_of_its_own_noise_level() -> None:
    latents, noise = pictures(2)
    objective = build_objective("epsilon", loss_type="huber", huber_schedule="snr")
    t = objective.times(torch.tensor([0.1, 0.9]))
    both = objective.compare(latents, objective.target(latents, noise, t), t)
    alone = [
        objective.compare(
            latents[i : i + 1], objective.target(latents[i : i + 1], noise[i : i + 1], t[i : i + 1]), t[i : i + 1]
        )
        for i in (0, 1)
    ]
    torch.testing.assert_close(both, torch.cat(alone))


def test_small_differences_cost_the_same_under_huber_and_l2() -> None:
    d, zero = torch.full((1, 4), 0.01), torch.zeros(1, 4)
    torch.testing.assert_close(Cost(kind="huber", threshold=1.0)(d, zero), Cost()(d, zero), rtol=1e-2, atol=0)


def test_zero_terminal_snr_ends_in_pure_noise_and_starts_the_same() -> None:
    betas = beta_table("scaled_linear")
    rescaled = (1 - zero_terminal_snr(betas)).cumprod(0)
    assert rescaled[-1] == 0
    assert rescaled[0] == pytest.approx((1 - betas[0]).item())
    assert OBJECTIVES["v, zero SNR"].snr(torch.tensor([999])).item() == 0


@pytest.mark.parametrize(
    ("prediction", "native", "process"),
    [
        ("flow_matching", "epsilon", RectifiedFlow),
        ("epsilon", "flow_matching", Ddpm),
        ("v_prediction", "flow_matching", Ddpm),
        ("sample", "epsilon", Ddpm),
        ("sample", "v_prediction", Ddpm),
        ("sample", "flow_matching", RectifiedFlow),
        ("sample", "sample", RectifiedFlow),
    ],
)
def test_the_prediction_chooses_the_process(prediction: str, native: str, process: type) -> None:
    assert isinstance(build_objective(prediction, native=native), process)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prediction": "epsilon", "rescale_betas_zero_snr": True}, "zero terminal SNR"),
        ({"prediction": "wishes"}, "wishes"),
        ({"prediction": "epsilon", "beta_schedule": "wobbly"}, "wobbly"),
        ({"prediction": "epsilon", "beta_start": 0.5, "beta_end": 0.1}, "betas from 0.5"),
        ({"prediction": "epsilon", "loss_type": "l7"}, "l7"),
        ({"prediction": "epsilon", "loss_type": "huber", "huber_c": 0.0}, "Huber"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_way_out(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        build_objective(**settings)  # type: ignore[arg-type]
    assert raised.value.fix
