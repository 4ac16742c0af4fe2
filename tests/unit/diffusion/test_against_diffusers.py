"""Where diffusers defines the same thing, we agree with it."""

import pytest
import torch

from smalti.diffusion.objective import BetaSchedule, Conditioning, Prediction, RectifiedFlow, build_objective
from smalti.diffusion.sampling import Sampler, seeded_noise
from smalti.diffusion.timesteps import LogitNormal, Mode, ResolutionShift
from smalti.diffusion.weighting import cosmap, sigma_sqrt

diffusers = pytest.importorskip("diffusers")
SHAPE = (3, 4, 4)


def wobbly(noisy: torch.Tensor, timesteps: torch.Tensor, _: Conditioning) -> torch.Tensor:
    """Some smooth function of its input, in the place of a model."""
    return torch.sin(3 * noisy + timesteps.float().view(-1, 1, 1, 1) / 300)


@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_noisy_latents_and_v_targets_agree(schedule: BetaSchedule, zero_snr: bool) -> None:
    start, end = (1e-4, 0.02) if schedule == "linear" else (0.00085, 0.012)
    peer = diffusers.DDPMScheduler(beta_start=start, beta_end=end, beta_schedule=schedule, rescale_betas_zero_snr=zero_snr)
    ours = build_objective("v_prediction", beta_schedule=schedule, rescale_betas_zero_snr=zero_snr)
    latents, noise, t = seeded_noise(range(6), SHAPE), seeded_noise(range(6, 12), SHAPE), torch.arange(0, 1000, 180)
    noisy = peer.add_noise(latents, noise, t)
    torch.testing.assert_close(ours.add_noise(latents, noise, t), noisy, atol=2e-4, rtol=1e-4)
    assert ours.compare(peer.get_velocity(latents, noise, t), ours.target(latents, noise, t), t).max() < 1e-7


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_ddpm_sampling_is_ddim(prediction: Prediction) -> None:
    peer = diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        clip_sample=False,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
    )
    peer.set_timesteps(25)
    noisy = start = seeded_noise([1, 2], SHAPE)
    for t in peer.timesteps:
        noisy = peer.step(wobbly(noisy, t.expand(2), {}), t, noisy).prev_sample
    sampler = Sampler(objective=build_objective(prediction, native="epsilon"), steps=25)
    assert sampler.times().tolist() == peer.timesteps.tolist()
    torch.testing.assert_close(sampler(wobbly, start, {}), noisy, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_sampling_is_eulers_method(shift: float) -> None:
    peer = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    peer.set_timesteps(sigmas=torch.linspace(1, 1 / 20, 20).tolist())
    noisy = start = seeded_noise([1, 2], SHAPE)
    for t in peer.timesteps:
        noisy = peer.step(wobbly(noisy, t.expand(2), {}), t, noisy).prev_sample
    sampler = Sampler(objective=RectifiedFlow(), steps=20, shift=shift)
    torch.testing.assert_close(sampler(wobbly, start, {}), noisy, atol=1e-4, rtol=1e-4)


def test_timestep_densities_and_weights_agree() -> None:
    from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

    def drawn(scheme: str) -> torch.Tensor:
        times: torch.Tensor = compute_density_for_timestep_sampling(
            scheme, 100_000, logit_mean=0.4, logit_std=1.2, mode_scale=1.29, generator=torch.Generator().manual_seed(0)
        )
        return times.sort().values

    u = (torch.arange(100_000) + 0.5) / 100_000
    torch.testing.assert_close(LogitNormal(mean=0.4, std=1.2)(u), drawn("logit_normal"), atol=0.01, rtol=0)
    torch.testing.assert_close(Mode(scale=1.29)(u), drawn("mode"), atol=0.01, rtol=0)
    for scheme, ours in (("sigma_sqrt", sigma_sqrt), ("cosmap", cosmap)):
        torch.testing.assert_close(ours(u[1000:]), compute_loss_weighting_for_sd3(scheme, u[1000:]))


def test_the_resolution_dependent_shift_is_that_of_flux() -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    for side in (32, 64, 96, 128):
        peer = torch.tensor(calculate_shift(side * side // 4)).exp().item()
        assert ResolutionShift().at(side * side // 4) == pytest.approx(peer)
