"""Ranks that share the tokens of a picture find the predictions and gradients of one rank, for each family that has a plan."""

import pytest
import torch
import torch.distributed as dist

from smalti.config import resolve, schema_of
from smalti.families import find_family
from smalti.models.context import context_plan
from smalti.plugins import load_plugins
from smalti.testing import two_processes
from smalti.testing.families import FamilySubject
from smalti_fsdp2.context import split_context

KINDS = {
    "flux": ("flux", {}),
    "sd3": ("sd3", {}),
    "sd3.5": ("sd3", {"newer": True}),
    "pixart": ("pixart", {}),
    "auraflow": ("auraflow", {}),
    "qwen image": ("qwen_image", {}),
}


def disagreement(folder, name, strategy):
    """How far this rank's prediction and the mean gradients are from those of one rank, relatively."""
    plugins = load_plugins()
    given = (f"--model_family={name}", f"--pretrained_model_name_or_path={folder}", "--tokenizer_max_length=23")
    subject = FamilySubject(find_family(resolve(schema_of(plugins), given, environment={}), plugins))
    alone, shared = subject.model(), subject.model()
    split_context(shared, context_plan(subject.family, shared), dist.group.WORLD, strategy)
    noisy = torch.randn(subject.latents.shape, generator=torch.Generator().manual_seed(0))
    answers = [
        subject.predict(model, noisy, [100.0, 500.0, 900.0], ["a red fox", "two boats", ""]) for model in (alone, shared)
    ]
    for answer in answers:
        answer.square().mean().backward()
    errors = [far(answers[1], answers[0])]
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        gradient = torch.zeros_like(one) if other.grad is None else other.grad
        dist.all_reduce(gradient)
        errors.append(far(gradient / dist.get_world_size(), one.grad))
    return max(errors)


def far(found, wanted):
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max().clamp(min=1e-3))


@pytest.fixture(scope="module")
def pair():
    with two_processes() as processes:
        yield processes


@pytest.mark.parametrize("strategy", ["allgather", "alltoall"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_predict_and_learn_what_one_does(pair, tmp_path, kind, strategy):
    import tiny  # here, because the other processes import this file and do not find it

    name, more = KINDS[kind]
    folder = getattr(tiny, name)(tmp_path, **more)
    assert max(pair.run(disagreement, folder, name, strategy)) < 1e-4
