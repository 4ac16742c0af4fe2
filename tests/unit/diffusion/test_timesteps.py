"""Timestep samplers are quantile functions, and shifts move them without changing their ends."""

import pytest
import torch
from hypothesis import given, strategies as st

from smalti.diffusion.timesteps import (
    MODE_SCALE_BOUNDS,
    Beta,
    ConstantShift,
    LogitNormal,
    Mode,
    Quantile,
    ResolutionShift,
    TimestepSampler,
    Uniform,
    build_timesteps,
    shift_times,
)
from smalti.errors import UserError

GRID = (torch.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize(
    "quantile",
    [
        Uniform(),
        LogitNormal(),
        LogitNormal(mean=0.4, std=1.5),
        Mode(),
        Mode(scale=MODE_SCALE_BOUNDS[0]),
        Mode(scale=MODE_SCALE_BOUNDS[1]),
        Beta(),
        Beta(1.0, 1.0),
        Beta(1.5, 4.0),
    ],
    ids=repr,
)
def test_quantile_functions_rise_from_0_to_1(quantile: Quantile) -> None:
    times = quantile(GRID)
    assert times.dtype == torch.float32
    assert times.diff().min() > -1e-6
    assert 0 <= times[0] < 0.05
    assert 0.9 < times[-1] <= 1


@given(st.floats(min_value=-2, max_value=2), st.floats(min_value=0.2, max_value=2))
def test_the_logit_of_logit_normal_times_is_normal(mean: float, std: float) -> None:
    logits = torch.logit(LogitNormal(mean=mean, std=std)(GRID.double()))
    assert logits.mean().item() == pytest.approx(mean, abs=1e-2)
    assert logits.std().item() == pytest.approx(std, rel=1e-2)


@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (2.0, 2.0), (1.5, 1.0), (2.0, 8.0)])
def test_beta_times_have_the_moments_of_the_distribution(alpha: float, beta: float) -> None:
    times = Beta(alpha, beta)(GRID)
    known = torch.distributions.Beta(alpha, beta)
    assert times.mean().item() == pytest.approx(known.mean.item(), abs=1e-3)
    assert times.std().item() == pytest.approx(known.stddev.item(), abs=1e-3)


@given(st.floats(min_value=0.1, max_value=10), st.floats(min_value=0.001, max_value=0.999))
def test_a_shift_is_undone_by_its_reciprocal(shift: float, time: float) -> None:
    there = shift_times(torch.tensor(time, dtype=torch.float64), shift)
    assert 0 < there < 1
    assert (there > time) == (shift > 1) or shift == pytest.approx(1)
    assert shift_times(there, 1 / shift).item() == pytest.approx(time)


def test_a_shift_leaves_clean_and_pure_noise_alone() -> None:
    torch.testing.assert_close(shift_times(torch.tensor([0.0, 1.0]), 3.0), torch.tensor([0.0, 1.0]))


def test_larger_pictures_are_shifted_more_between_the_published_points() -> None:
    shift = ResolutionShift()
    assert shift.at(256) == pytest.approx(1.6487, abs=1e-3)
    assert shift.at(4096) == pytest.approx(3.1582, abs=1e-3)
    assert shift.at(256) < shift.at(1024) < shift.at(4096)


def test_a_sample_keeps_its_time_in_another_batch() -> None:
    sampler = build_timesteps(distribution="logit_normal", shift=3.0)
    u = torch.tensor([0.1, 0.5, 0.9])
    torch.testing.assert_close(sampler(u, 64)[1:], sampler(u[1:], 64), rtol=0, atol=0)


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal", "mode", "beta"])
def test_extreme_uniform_numbers_stay_in_range(distribution: str) -> None:
    sampler: TimestepSampler = build_timesteps(distribution=distribution, auto_shift=True)  # type: ignore[arg-type]
    times = sampler(torch.tensor([2**-24, 1 - 2**-24]), 4096)
    assert torch.isfinite(times).all()
    assert times.min() >= 0
    assert times.max() <= 1


def test_the_familys_own_shift_is_taken_unless_another_one_is_said() -> None:
    native = ConstantShift(value=3.0)
    said = [
        build_timesteps(shift=shift, auto_shift=auto, native=native).shift for shift, auto in ((None, 0), (1.0, 0), (None, 1))
    ]
    assert said == [native, ConstantShift(value=1.0), ResolutionShift()]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "uniform"),
        ({"distribution": "mode", "shift": 1.0}, "mode(1.29), shift 1 (flow_schedule_shift)"),
        ({"distribution": "beta", "native": ConstantShift(value=3.0)}, "beta(2, 2), shift 3 (default of the family)"),
        (
            {"distribution": "logit_normal", "auto_shift": True},
            "logit-normal(0, 1), shift 1.649 to 3.158 by image size (flow_schedule_auto_shift)",
        ),
    ],
)
def test_distribution_and_shift_are_put_into_words(settings: dict[str, object], words: str) -> None:
    assert build_timesteps(**settings).describe([1024, 4096, 256]) == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"distribution": "poisson"},
        {"distribution": "logit_normal", "sigmoid_scale": 0.0},
        {"shift": 0.0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused_with_a_way_out(settings: dict[str, object]) -> None:
    with pytest.raises(UserError) as raised:
        build_timesteps(**settings)  # type: ignore[arg-type]
    assert raised.value.fix
