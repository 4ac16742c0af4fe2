"""How far images are from those of the model before training."""

import pytest
import torch

from smalti_validation.drift import drift, structural_similarity


def noise(*shape, seed=1):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(one, other):
    """SSIM window by window: weighted means, variances and covariance of 11 x 11 pixels."""
    line = torch.exp(-((torch.arange(11.0, dtype=torch.float64) - 5) ** 2) / (2 * 1.5**2))
    weights = line[:, None] * line / (line[:, None] * line).sum()
    values = []
    for channel in range(3):
        for row in range(one.shape[1] - 10):
            for column in range(one.shape[2] - 10):
                a, b = (image[channel, row : row + 11, column : column + 11] for image in (one, other))
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                spread = (weights * (a - mean_a) ** 2).sum() + (weights * (b - mean_b) ** 2).sum()
                both = (weights * (a - mean_a) * (b - mean_b)).sum()
                top = (2 * mean_a * mean_b + 1e-4) * (2 * both + 9e-4)
                values.append(top / ((mean_a**2 + mean_b**2 + 1e-4) * (spread + 9e-4)))
    return float(torch.stack(values).mean())


def test_the_similarity_is_that_of_the_definition():
    one = noise(3, 14, 17)
    other = 0.7 * one + 0.3 * noise(3, 14, 17, seed=2)
    assert structural_similarity(one, other) == pytest.approx(by_definition(one, other), abs=1e-12)


@pytest.mark.parametrize("size", [(8, 8), (16, 24)])
def test_the_same_image_has_no_drift(size):
    image = noise(3, *size)
    assert drift(image, image) == (0.0, pytest.approx(1.0, abs=1e-12))


def test_drift_grows_with_the_distance():
    image, other = noise(3, 16, 16), noise(3, 16, 16, seed=2)
    found = [drift(image + share * (other - image), image) for share in (0.0, 0.3, 0.9)]
    assert sorted(found, key=lambda each: each[0]) == sorted(found, key=lambda each: -each[1]) == found
