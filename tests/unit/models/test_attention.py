"""The kernel that computes attention: the chosen one, in every pass of the trained model, and nowhere else."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from smalti.errors import ConfigError, PreflightError, UserError
from smalti.launch.plan import check_accelerators
from smalti.models.attention import attention_kernel, choose_attention
from smalti.plugins.schema import check
from smalti_toy.family import ToyShape, ToyTransformer


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
    choose_attention(model, kernel, "cpu")
    with Flashes() as counted:
        loss = model(torch.ones(1, 3, 4, 4), torch.ones(1), torch.ones(1, 2, dtype=torch.int64)).sum()
        with attention_kernel(kernel):
            loss.backward()
    return counted.forward, counted.backward


class SelfAttention(nn.Module):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(tokens, tokens, tokens, mask)


@pytest.mark.parametrize(("kernel", "expected"), [("auto", (2, 2)), ("flash", (2, 2)), ("math", (0, 0))])
def test_attention_is_computed_by_the_chosen_kernel(kernel, expected):
    assert flashes(kernel) == expected


@pytest.mark.parametrize(("kernel", "expected"), [("flash", (4, 2)), ("math", (0, 0))])
def test_what_is_computed_again_is_computed_by_the_same_kernel(kernel, expected):
    assert flashes(kernel, recompute=True) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(80, torch.float32), (1024, torch.bfloat16)])
def test_small_attention_in_bf16_on_the_cpu_is_computed_in_fp32(tokens, expected):
    seen = set()

    class Types(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention" in str(func):
                seen.update(value.dtype for value in args if isinstance(value, torch.Tensor))
            return func(*args, **(kwargs or {}))

    model = SelfAttention()
    choose_attention(model, "auto", "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16), Types():
        answer = model(torch.randn(1, 1, tokens, 32), mask=torch.zeros(tokens, tokens, dtype=torch.bfloat16))
    assert (seen, answer.dtype) == ({expected}, torch.bfloat16)


def test_small_attention_that_is_computed_again_has_the_same_gradients():
    """Of another type, what is computed again would be refused by torch."""
    gradients = []
    for recompute in (False, True):
        model, tokens = SelfAttention(), torch.linspace(-1, 1, 80 * 32).view(1, 1, 80, 32).requires_grad_()
        choose_attention(model, "auto", "cpu")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer = checkpoint(model, tokens, use_reentrant=False) if recompute else model(tokens)
        answer.float().sum().backward()
        gradients.append(tokens.grad)
    assert torch.equal(*gradients)


def test_after_a_pass_others_have_torchs_own_choice_again():
    flashes("math")
    with Flashes() as counted:
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3)
    assert counted.forward == 1


def test_a_kernel_that_cannot_compute_a_model_is_named():
    model = SelfAttention()
    choose_attention(model, "cudnn", "cpu")
    with pytest.raises(UserError, match="the kernel 'cudnn' cannot compute the attention of this model here"):
        model(torch.ones(1, 1, 4, 8))


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
def test_a_kernel_that_the_cpu_has_not_is_refused_before_launch(configure, plugins, kernel):
    with pytest.raises(ConfigError, match=f"the attention kernel '{kernel}' does not run on the CPU"):
        check(configure("--use_cpu", f"--sdpa_backend={kernel}"), plugins)
    with pytest.raises(PreflightError, match="needs CUDA devices"):
        check_accelerators(configure(f"--sdpa_backend={kernel}"), "cpu")
