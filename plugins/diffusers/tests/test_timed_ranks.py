"""T-LoRA: which ranks are active at which noise level, in every family, in training, in samples, and in files."""

import pytest
import torch
from adapters import make_adapter
from kinds import EVERY
from test_adapter_kinds import CHOSEN, predicted, trained
from torch.utils.checkpoint import checkpoint

from smalti import UserError
from smalti.config import resolve
from smalti.models import SampleRequest
from smalti.models.weights import materialise
from smalti.plugins import load_plugins, schema_of
from smalti_diffusers.checks import problems
from smalti_diffusers.lora.adapter import Lora, attach
from smalti_diffusers.lora.header import AdapterHeader
from smalti_diffusers.lora.timed import RankMasks, noise_level
from smalti_diffusers.lora.workshop import held, opened, write
from smalti_diffusers.options import LoraOptions
from smalti_testing.family_subject import FamilySubject
from support.whole import some

TIMED = ("--tlora_min_rank=1", "--lora_rank=5", "--lora_alpha=5")
LEVELS = (100.0, 500.0, 900.0)
ACTIVE = {100.0: 4, 500.0: 3, 900.0: 1}
"""1 + floor(4 (1 - t))."""


def test_the_active_ranks_fall_with_the_noise_level():
    for exponent, expected in {1.0: (64, 48, 32, 16, 1), 2.0: (64, 36, 16, 4, 1), 0.5: (64, 55, 45, 32, 2)}.items():
        masks = RankMasks(1, exponent, lambda timestep: timestep / 1000)
        layer = torch.nn.Linear(3, 64)
        masks.begin(_Model(), (torch.tensor([0.0, 250.0, 500.0, 750.0, 999.0]),), {})
        output = masks.mask(layer, (), torch.ones(5, 7, 64))
        assert output.sum(-1)[:, 0].tolist() == list(expected)


class _Model(torch.nn.Module):
    def forward(self, timestep):
        return timestep


KINDS = [kind for kind in EVERY if kind != "sdxl encoded"]
KEPT = ("flux", "sdxl", "flux2 klein", "sd3.5", "pixart sigma", "sana", "auraflow", "lumina2", "qwen image", "z image")


@pytest.mark.parametrize("kind", some(KINDS, *KEPT))
def test_each_sample_of_a_batch_has_the_ranks_of_its_own_noise_level(family_of, kind):
    """As an adapter that has no others, for each sample. The noise level is found in what the family's model is called with."""
    conv = ("--lora_targets=to_q,conv1",) if kind == "sdxl" else ()
    subject = FamilySubject(family_of(kind, "--mixed_precision=no", *CHOSEN, *TIMED, *conv))
    model = materialise(subject.bare(), subject.family.weights(0), "cpu").eval()
    trained(model)
    found = predicted(subject, model)
    plain = FamilySubject(family_of(kind, "--mixed_precision=no", *CHOSEN, *TIMED[1:], *conv))
    other = materialise(plain.bare(), plain.family.weights(0), "cpu").eval()
    for row, level in enumerate(LEVELS):
        other.load_state_dict(model.state_dict())
        for name, parameter in other.named_parameters():
            if ".lora_A." in name:
                parameter.data[ACTIVE[level] :] = 0
        expected = predicted(plain, other)[row]
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)
    other.load_state_dict(model.state_dict())
    assert float((predicted(plain, other) - found).norm()) > 1e-3 * float(found.norm())


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, values, timestep):
        return self.second(torch.tanh(self.first(values)))


def small():
    """With a random adapter of rank 4 in both layers, whose ranks follow the second argument."""
    lora = Lora(rank=4, alpha=4.0, targets=("first", "second"), least=1)
    model, random = attach(Small(), lora, torch.float32), torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parent, _, own = name.rpartition(".")
            values = torch.randn(parameter.shape, generator=random) * 0.3
            setattr(model.get_submodule(parent), own, torch.nn.Parameter(values))
    masks = RankMasks(1, 1.0, lambda timestep: timestep)
    model.register_forward_pre_hook(masks.begin, with_kwargs=True)
    for layer in (model.first, model.second):
        layer.lora_A["default"].register_forward_hook(masks.mask)
    return model


def test_fifty_steps_are_those_of_a_loop_in_fp64():
    """Written out: y = W x + B (m * (A x)), with a mask of each sample's own."""
    model, base = small(), Small().double()
    start = {name: each.detach().double() for name, each in model.named_parameters() if ".lora_" in name}
    mine = {name: each.clone().requires_grad_() for name, each in start.items()}
    optimizers = [
        torch.optim.AdamW([each for name, each in model.named_parameters() if ".lora_" in name], lr=1e-2),
        torch.optim.AdamW(list(mine.values()), lr=1e-2),
    ]
    random, losses = torch.Generator().manual_seed(5), []

    def layer(name, values, mask):
        down, up = (mine[f"{name}.lora_{matrix}.default.weight"] for matrix in "AB")
        return base.get_submodule(name)(values) + (values @ down.T * mask) @ up.T

    for _ in range(50):
        values, goal = torch.randn(3, 5, 6, generator=random), torch.randn(3, 5, 4, generator=random)
        noise = torch.rand(3, generator=random)
        active = 1 + torch.floor(3 * (1 - noise))
        mask = (torch.arange(4) < active[:, None]).double()[:, None]
        expected = layer("second", torch.tanh(layer("first", values.double(), mask)), mask)
        both = [(model(values, noise) - goal).square().mean(), (expected - goal).square().mean()]
        for loss, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append([float(each.detach()) for each in both])
    torch.testing.assert_close(*torch.tensor(losses, dtype=torch.float64).unbind(1), rtol=1e-5, atol=0)
    for name, each in model.named_parameters():
        if ".lora_" in name:
            torch.testing.assert_close(each.double(), mine[name], rtol=1e-4, atol=1e-5)
            assert not torch.allclose(mine[name], start[name], atol=1e-2)


@pytest.mark.parametrize("recomputed", [False, True])
def test_at_pure_noise_the_least_ranks_alone_have_a_gradient(recomputed):
    """Also where layers are computed again, after a pass without a gradient over the same samples."""
    model, values = small(), torch.randn(2, 5, 6)
    noise = torch.tensor([1.0, 1.0])
    with torch.no_grad():
        model(values, noise)
    if recomputed:
        for layer in (model.first, model.second):
            inner = layer.forward
            layer.forward = lambda given, inner=inner: checkpoint(inner, given, use_reentrant=False)
    model(values, noise).square().sum().backward()
    for layer in (model.first, model.second):
        for matrix, rows in ((layer.lora_A["default"].weight.grad, True), (layer.lora_B["default"].weight.grad.T, False)):
            assert matrix[:1].any(), rows
            assert not matrix[1:].any(), rows


@pytest.mark.parametrize("kind", some(["flux", "sdxl", "lumina2", "z image"], "sdxl", "lumina2"))
def test_in_samples_the_ranks_follow_the_noise_levels_of_the_pipeline(family_of, kind):
    """With guidance, which the pipelines compute as a batch of two."""
    subject = FamilySubject(family_of(kind, "--mixed_precision=no", *CHOSEN, *TIMED))
    model = materialise(subject.bare(), subject.family.weights(0), "cpu").eval()
    seen, begin = [], RankMasks.begin
    masks = next(hook.__self__ for hook in model._forward_pre_hooks.values() if hasattr(hook, "__self__"))

    def record(*arguments):
        begin(masks, *arguments)
        seen.append(masks._share.clone())

    for key in model._forward_pre_hooks:
        model._forward_pre_hooks[key] = record
    width, height = 4 * subject.family.alignment, 4 * subject.family.alignment
    request = SampleRequest(prompts=["a fox"], seeds=[3], width=width, height=height, steps=3, guidance=3.0, objective=None)
    with torch.no_grad():
        subject.family.sample(model, request)
    shares = torch.stack([each.max() for each in seen])
    assert torch.equal(shares, torch.stack([each.min() for each in seen]))
    assert torch.equal(shares, shares.sort().values)
    assert float(shares[0]) < 0.35
    assert float(shares[-1] - shares[0]) > 0.2


def test_the_noise_level_of_a_family_is_found_from_both_ends(family_of):
    level = noise_level(family_of("lumina2", "--mixed_precision=no"))
    assert level(torch.tensor([1.0, 0.25, 0.0])).tolist() == [0.0, 0.75, 1.0]


def test_the_first_matrix_can_begin_with_rows_at_right_angles(family_of):
    subject = FamilySubject(family_of("flux", "--mixed_precision=no", *CHOSEN, "--lora_init=orthogonal"))
    weights = subject.family.weights(0)
    names = [name for name in weights.names() if ".lora_A." in name]
    for name in names:
        matrix = weights.get(name)
        torch.testing.assert_close(matrix @ matrix.T * 3, torch.eye(len(matrix)), atol=1e-5, rtol=0)
    assert not torch.equal(weights.get(names[0]), weights.get(names[1]))


def test_files_and_exports_say_that_other_tools_use_all_ranks_always(tmp_path):
    adapter = make_adapter(tmp_path, "flux", "--tlora_min_rank=2", "--tlora_alpha=0.5")
    for format in ("diffusers", "peft", "comfyui", "kohya"):
        file = adapter.export(tmp_path / format, format=format)
        assert AdapterHeader(file).timed == (2, 0.5)
        assert all("all its ranks at every noise level" in text for text in adapter.usages.values())
    with pytest.raises(UserError, match="cannot switch ranks of a T-LoRA off"):
        adapter.export(tmp_path / "merged", merge=True)
    found, place = opened(file, str(adapter.base))
    write(held(found), place, tmp_path / "converted", "diffusers")
    assert AdapterHeader(tmp_path / "converted").timed == (2, 0.5)
    words = ["--model_family=flux", "--model_type=lora", f"--init_lora={file}"]
    options = resolve(schema_of(load_plugins()), words, environment={})[LoraOptions]
    assert (options.tlora_min_rank, options.tlora_alpha) == (2, 0.5)


@pytest.mark.parametrize("kind", ["dora", "lokr", "loha"])
def test_other_kinds_are_refused_before_launch(kind):
    words = ["--model_family=flux", "--model_type=lora", f"--lora_kind={kind}", "--tlora_min_rank=1"]
    config = resolve(schema_of(load_plugins()), words, environment={})
    assert any("cannot be active at some noise levels alone" in problem.message for problem in problems(config))
