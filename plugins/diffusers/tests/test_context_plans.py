"""Ranks that share the tokens of a picture find the predictions and gradients of one rank, for each family that has a plan."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from smalti.config.resolution import resolve
from smalti.models.family import context_plan
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_fsdp2.context import split_context
from smalti_testing.family_subject import FamilySubject
from support.forked_ranks import forked_processes
from support.whole import some

KINDS = {
    "flux": ("flux", {}),
    "flux lora": ("flux", {}, "--model_type=lora", "--lora_rank=4", "--mixed_precision=no"),
    "flux2": ("flux2", {}),
    "sd3": ("sd3", {}),
    "sd3.5": ("sd3", {"newer": True}),
    "pixart": ("pixart", {}),
    "auraflow": ("auraflow", {}),
    "bria": ("bria", {}),
    "longcat image": ("longcat_image", {}),
    "ovis image": ("ovis_image", {}),
    "qwen image": ("qwen_image", {}),
}
EVERY = [*product(KINDS, ("allgather", "alltoall"))]
AS_FLUX = ("bria", "longcat image", "ovis image")
KEPT = [("flux", "alltoall"), *((kind, "allgather") for kind in KINDS if kind not in ("flux", "sd3", *AS_FLUX))]


def disagreement(folder, name, strategy, *flags):
    """How far this rank's prediction and the mean gradients are from those of one rank, relatively."""
    plugins = load_plugins()
    given = (f"--model_family={name}", f"--pretrained_model_name_or_path={folder}", "--tokenizer_max_length=23", *flags)
    subject = FamilySubject(find_family(resolve(schema_of(plugins), given, environment={}), plugins))
    alone, shared = adapted(subject.model()), adapted(subject.model())
    split_context(shared, context_plan(subject.family, shared), dist.group.WORLD, strategy)
    noisy = torch.randn(subject.latents.shape, generator=torch.Generator().manual_seed(0))
    answers = [
        subject.predict(model, noisy, [100.0, 500.0, 900.0], ["a red fox", "two boats", ""]) for model in (alone, shared)
    ]
    for answer in answers:
        answer.square().mean().backward()
    errors = [far(answers[1], answers[0])]
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        if not one.requires_grad:
            continue
        gradient = torch.zeros_like(one) if other.grad is None else other.grad
        dist.all_reduce(gradient)
        errors.append(far(gradient / dist.get_world_size(), one.grad))
    return max(errors)


def adapted(model):
    """With adapters that do something, if there are any: their second matrices are zero at first."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    return model


def far(found, wanted):
    return float((found - wanted).detach().abs().max() / wanted.detach().abs().max().clamp(min=1e-3))


@pytest.fixture(scope="module")
def pair():
    with forked_processes() as processes:
        yield processes


@pytest.mark.parametrize(("kind", "strategy"), some(EVERY, *KEPT))
def test_two_ranks_predict_and_learn_what_one_does(pair, tmp_path, kind, strategy):
    import tiny  # here, because the other processes import this file and do not find it

    name, more, *flags = KINDS[kind]
    folder = getattr(tiny, name)(tmp_path, **more)
    assert max(pair.run(disagreement, folder, name, strategy, *flags)) < 1e-4
