"""The kernel that computes attention: the chosen one, in every pass of the trained model, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from smalti.config import check
from smalti.errors import ConfigError, PreflightError, UserError
from smalti.launch import check_accelerators
from smalti.models.attention import attention_kernel, choose_attention
from smalti.models.toy import ToyShape, ToyTransformer


class Flashes(TorchDispatchMode):
    """Counts passes of the flash kernel, forward and backward."""

    def __init__(self):
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if "flash_attention" in name:
            self.backward += "backward" in name
            self.forward += "backward" not in name
        return func(*args, **(kwargs or {}))


def flashes(kernel: str, *, recompute: bool = False) -> tuple[int, int]:
    """How often the flash kernel computed in a training step of a model with two blocks."""
    model = ToyTransformer(ToyShape(width=16, depth=2, heads=2, patch=2))
    if recompute:
        model.enable_gradient_checkpointing()
    choose_attention(model, kernel)
    with Flashes() as counted:
        loss = model(torch.ones(1, 3, 4, 4), torch.ones(1), torch.ones(1, 2, dtype=torch.int64)).sum()
        with attention_kernel(kernel):
            loss.backward()
    return counted.forward, counted.backward


@pytest.mark.parametrize(("kernel", "expected"), [("auto", (2, 2)), ("flash", (2, 2)), ("math", (0, 0))])
def test_attention_is_computed_by_the_chosen_kernel(kernel, expected):
    assert flashes(kernel) == expected


@pytest.mark.parametrize(("kernel", "expected"), [("flash", (4, 2)), ("math", (0, 0))])
def test_what_is_computed_again_is_computed_by_the_same_kernel(kernel, expected):
    assert flashes(kernel, recompute=True) == expected


def test_after_a_pass_others_have_torchs_own_choice_again():
    flashes("math")
    with Flashes() as counted:
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)
    assert counted.forward == 1


def test_a_kernel_that_cannot_compute_a_model_is_named():
    class Attending(nn.Module):
        def forward(self, tokens):
            return F.scaled_dot_product_attention(tokens, tokens, tokens)

    model = Attending()
    choose_attention(model, "cudnn")
    with pytest.raises(UserError, match="the kernel 'cudnn' cannot compute the attention of this model here"):
        model(torch.ones(1, 1, 4, 8))


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_kernel_that_the_cpu_has_not_is_refused_before_launch(configure, plugins, kernel):
    with pytest.raises(ConfigError, match=f"there is no attention kernel '{kernel}' for the CPU"):
        check(configure("--use_cpu", f"--sdpa_backend={kernel}"), plugins)
    with pytest.raises(PreflightError, match="needs CUDA devices"):
        check_accelerators(configure(f"--sdpa_backend={kernel}"), "cpu")
