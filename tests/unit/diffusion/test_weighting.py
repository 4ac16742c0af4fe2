"""Weights of noise levels: the published formulas, and no weighting where it has no meaning."""

import math

import pytest
import torch

from smalti.diffusion.objective import Objective, build_objective
from smalti.diffusion.weighting import build_weighting
from smalti.errors import UserError

T = torch.tensor([0, 100, 500, 900, 999])


def test_without_options_every_sample_counts_the_same() -> None:
    assert build_weighting(build_objective("epsilon"))(T).tolist() == [1.0] * 5


def min_snr_in_terms_of_the_picture(objective: Objective) -> torch.Tensor:
    """Each weight times the cost of a picture error of 1 in the space of the prediction."""
    weights, snr = build_weighting(objective, snr_gamma=5.0)(T), objective.snr(T)
    return weights * {"epsilon": snr, "v_prediction": snr + 1, "sample": torch.ones(5)}[objective.prediction]


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_min_snr_is_the_same_objective_for_every_prediction(prediction: str) -> None:
    objective = build_objective(prediction, native="epsilon")  # type: ignore[arg-type]
    torch.testing.assert_close(min_snr_in_terms_of_the_picture(objective), objective.snr(T).clamp(max=5.0))


def test_min_snr_is_finite_in_pure_noise() -> None:
    objective = build_objective("v_prediction", rescale_betas_zero_snr=True)
    assert build_weighting(objective, snr_gamma=5.0)(T)[-1] == 0


def test_flow_weights_follow_the_paper() -> None:
    flow, t = build_objective("flow_matching"), torch.tensor([0.25, 0.5, 1.0])
    torch.testing.assert_close(build_weighting(flow, flow_weighting="cosmap")(t), 2 / math.pi / torch.tensor([0.625, 0.5, 1.0]))
    torch.testing.assert_close(build_weighting(flow, flow_weighting="sigma_sqrt")(t), torch.tensor([16.0, 4.0, 1.0]))


def test_one_almost_clean_sample_cannot_ruin_a_step() -> None:
    weigh = build_weighting(build_objective("flow_matching"), flow_weighting="sigma_sqrt")
    assert weigh(torch.tensor([1e-7])).item() <= 1.001e6


@pytest.mark.parametrize(
    ("prediction", "settings"),
    [
        ("flow_matching", {"snr_gamma": 5.0}),
        ("epsilon", {"flow_weighting": "cosmap"}),
        ("flow_matching", {"flow_weighting": "wishful"}),
        ("epsilon", {"snr_gamma": -1.0}),
    ],
)
def test_a_weighting_that_does_not_fit_is_refused_with_a_way_out(prediction: str, settings: dict[str, object]) -> None:
    with pytest.raises(UserError) as raised:
        build_weighting(build_objective(prediction), **settings)  # type: ignore[arg-type]
    assert raised.value.fix
