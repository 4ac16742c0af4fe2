"""--allow_tf32: only the trained model, forward and backward, and in what torch.compile can still read."""

import pytest
import torch
from torch import nn

from smalti.models.setup import choose_tf32, products_in_tf32, tf32_choice
from smalti.parallel.precision import products


def switches() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class Looking(nn.Module):
    def forward(self) -> tuple[bool, bool]:
        return switches()


@pytest.mark.parametrize("allowed", [True, False])
def test_the_trained_model_alone_computes_as_was_chosen(allowed):
    before, model = switches(), Looking()
    choose_tf32(model, allowed)
    assert model() == (allowed, allowed)
    assert (switches(), Looking()()) == (before, before)


def test_without_a_choice_torch_keeps_its_own():
    before, model = switches(), Looking()
    choose_tf32(model, None)
    with products_in_tf32(None):
        assert (switches(), model()) == (before, before)


@pytest.mark.parametrize("allowed", [True, False])
def test_torch_compile_can_read_the_precision_that_is_set(allowed):
    with products_in_tf32(allowed):
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if allowed else "ieee")


@pytest.mark.parametrize(
    ("flags", "device", "choice", "name"),
    [
        (("--mixed_precision=no",), "cuda:1", True, "tf32"),
        (("--mixed_precision=no", "--no_allow_tf32"), "cuda:1", False, "fp32"),
        (("--mixed_precision=bf16",), "cuda:1", None, "bf16"),
        (("--mixed_precision=no",), "cpu", None, "fp32"),
    ],
)
def test_fp32_runs_on_cuda_devices_use_tf32_unless_told_otherwise(configure, flags, device, choice, name):
    config = configure(*flags)
    assert tf32_choice(config, device) is choice
    assert products(config, torch.device(device).type) == name


def test_on_rocm_a_variable_decides(configure, monkeypatch):
    monkeypatch.setattr("smalti.parallel.precision.is_rocm", lambda: True)
    monkeypatch.delenv("HIPBLASLT_ALLOW_TF32", raising=False)
    assert products(configure("--mixed_precision=no"), "cuda") == "fp32"
    monkeypatch.setenv("HIPBLASLT_ALLOW_TF32", "1")
    assert products(configure("--mixed_precision=no"), "cuda") == "tf32"
