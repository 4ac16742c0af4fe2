"""HiDream-I1: experts that train as they are used in inference, layers of Llama, and images of a distilled model."""

import shutil

import pytest
import torch
from diffusers import HiDreamImageTransformer2DModel
from kinds import PROMPTS

from smalti import UserError
from smalti.models.family import SampleRequest
from smalti_diffusers.families.hidream import HiDream
from smalti_diffusers.lora.assistant import is_distilled
from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.sources.components import Components
from smalti_testing.family_subject import native_objective

SIZES = [(6, 4), (4, 4)]
"""Of latents; what is not square is padded."""


def built(family):
    """The model as a run builds it, and as diffusers loads it for inference, with the same weights."""
    theirs = HiDreamImageTransformer2DModel.from_pretrained(family.components.folder / "transformer").eval()
    ours = family.build_base()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def predicted(family, model, size):
    noisy = torch.randn(2, 4, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        conditioning = family.encode_captions(PROMPTS)
    return family.forward(model, noisy, torch.tensor([900.0, 300.0]), conditioning)


@pytest.mark.parametrize("size", SIZES)
def test_the_prediction_in_training_is_that_of_inference_with_gradients_in_experts_and_attention(family_of, size):
    family = family_of("hidream")
    ours, theirs = built(family)
    found = predicted(family, ours.train(), size)
    with torch.no_grad():
        torch.testing.assert_close(found, predicted(family, theirs, size))
    found.square().mean().backward()
    for block in ("double_stream_blocks.0", "single_stream_blocks.0"):
        for name in ("attn1.to_q", "ff_i.shared_experts.w2", *(f"ff_i.experts.{number}.w1" for number in range(4))):
            assert ours.get_submodule(f"{block}.block.{name}").weight.grad.any(), name
        assert ours.get_submodule(f"{block}.block.ff_i.gate").weight.grad.any()


def test_the_gradient_is_that_of_diffusers_in_training(family_of):
    """Whose experts have one there. Its prediction is in another order: (B, C, N, 4)."""
    family = family_of("hidream")
    ours, theirs = built(family)
    predicted(family, ours.train(), (4, 4)).square().mean().backward()
    patches = theirs.train()(
        **family.inputs(
            torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0)),
            torch.tensor([900.0, 300.0]),
            family.encode_captions(PROMPTS),
        ),
        return_dict=False,
    )[0]
    assert patches.shape == (2, 4, 4, 4)
    patches.square().mean().backward()
    wanted = {name: each.grad for name, each in theirs.named_parameters()}
    for name, each in ours.named_parameters():
        torch.testing.assert_close(each.grad, wanted[name], msg=name, atol=1e-6, rtol=1e-4)


def test_an_expert_of_no_token_has_a_gradient_of_zeros(family_of):
    family = family_of("hidream")
    ours, _ = built(family)
    gate = ours.double_stream_blocks[0].block.ff_i.gate
    with torch.no_grad():
        gate.weight.zero_()  # the first of equals are chosen
    predicted(family, ours.train(), (4, 4)).square().mean().backward()
    grads = [expert.w1.weight.grad for expert in ours.double_stream_blocks[0].block.ff_i.experts]
    assert all(grad is not None for grad in grads)
    assert sorted(bool(grad.any()) for grad in grads) == [False, False, True, True]


def test_only_the_layers_of_llama_that_the_model_takes_are_kept(family_of):
    family = family_of("hidream some layers")
    kept = family.encode_captions(PROMPTS)["llama"]
    assert kept.shape[1] == family.example_conditioning(64, 64)["llama"].shape[1] == 2
    encoded = family.encoder.encode_prompt(PROMPTS, do_classifier_free_guidance=False)[2]
    assert len(encoded) == 3
    given = family.more_inputs(torch.empty(2), {"llama": kept})["encoder_hidden_states_llama3"]
    assert torch.equal(given[[0, 2]], encoded[[0, 2]])


def test_an_image_of_a_distilled_model_depends_on_its_seed_alone(family_of):
    """Its scheduler adds noise in every step."""
    family = family_of("hidream dev")
    ours, _ = built(family)

    def sampled(prompts, seeds):
        request = SampleRequest(
            prompts=prompts, seeds=seeds, width=32, height=32, steps=2, guidance=1.0, objective=native_objective(family)
        )
        with torch.no_grad():
            return family.sample(ours.eval(), request)

    both = sampled(PROMPTS, (1, 2))
    torch.testing.assert_close(both[1:], sampled(PROMPTS[1:], (2,)), atol=1e-4, rtol=0)
    assert not torch.allclose(both[:1], sampled(PROMPTS[:1], (2,)), atol=1e-2)
    assert family.flow_shift.at(1) == 6.0
    assert family_of("hidream").flow_shift.at(1) == 3.0


def test_the_published_pipeline_needs_llama_beside_it(family_of, tmp_path):
    folder = shutil.copytree(family_of("hidream").components.folder, tmp_path / "published")
    shutil.rmtree(folder / "text_encoder_4")
    with pytest.raises(UserError, match="come without Llama") as refused:
        HiDream(Components(folder), DiffusersOptions())
    assert "name that folder" in refused.value.fix


def test_the_distilled_models_are_known_by_their_names():
    known = [is_distilled(f"HiDream-ai/HiDream-I1-{name}") for name in ("Full", "Dev", "Fast")]
    assert known == [False, True, True]
