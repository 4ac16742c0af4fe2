"""Families that are modular pipelines call their model as diffusers' own blocks do; exports are modular pipelines again."""

import json
from dataclasses import dataclass
from inspect import signature

import pytest
import tiny
import torch
from adapters import ALPHA, RANK, opened, tensors
from compared import compares
from kinds import GUIDANCE, PROMPTS, SIZE
from safetensors.torch import save_file
from single_files import single_file
from test_export import trained
from test_init_lora import started

from smalti import UserError
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.config.resolution import resolve
from smalti.models.family import SampleRequest
from smalti.parallel.state import PortableState
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_diffusers.lora.formats import kohya_name, original_layers
from smalti_export.folder import NewExport, TrainedWeights
from smalti_testing.family_subject import CAPTIONS, FamilySubject, native_objective
from smalti_testing.pytest import FamilyContract
from smalti_testing.strategies import SingleRank

LATENTS = (2, 4, SIZE[1] // 4, SIZE[0] // 4)


pytestmark = pytest.mark.usefixtures("torchvision")


@dataclass(frozen=True)
class Drawn:
    family: object
    pipeline: object
    noise: torch.Tensor

    def draw(self, output="images", captions=PROMPTS, guidance=GUIDANCE, rescale=0.0, **more):
        self.pipeline.update_components(guider=self.pipeline.guider.new(guidance_scale=guidance, guidance_rescale=rescale))
        sizes = {"width": SIZE[0], "height": SIZE[1], "num_inference_steps": 2}
        given = {"prompt": list(captions), "latents": self.noise.unsqueeze(2), "output_type": "pt"}
        return self.pipeline(output=output, **given, **sizes, **more)

    def sample(self, monkeypatch, **more):
        given = lambda request: {"latents": self.noise.unsqueeze(2)}
        monkeypatch.setattr(self.family, "sampling", given)
        settings = {"prompts": list(PROMPTS), "seeds": (1, 2), "steps": 2, "guidance": GUIDANCE} | more
        request = SampleRequest(width=SIZE[0], height=SIZE[1], objective=native_objective(self.family), **settings)
        with torch.no_grad():
            return self.family.sample(self.model, request)

    @property
    def model(self):
        """As a run builds it, with the weights of the pipeline."""
        model = self.family.build_base()
        model.load_state_dict(self.pipeline.transformer.state_dict())
        return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def drawn(family_of):
    family = family_of("anima")
    noise = torch.randn(LATENTS, generator=torch.Generator().manual_seed(1))
    pipeline = opened(family.components.folder)
    pipeline.set_progress_bar_config(disable=True)
    return Drawn(family, pipeline, noise)


@compares("inputs of the model", ["anima"])
def test_the_model_is_called_with_what_the_pipeline_calls_it_with(drawn):
    calls, model = [], drawn.pipeline.transformer
    bound = signature(type(model).forward).bind
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(bound(module, *args, **kwargs).arguments), with_kwargs=True
    )
    timesteps = drawn.draw("timesteps")
    hook.remove()
    assert len(calls) == 4  # two steps, each with the prompts and then without
    for call, captions in zip(calls[:2], (PROMPTS, [""] * 2), strict=True):
        theirs = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
        assert not theirs.pop("padding_mask").any()
        ours = drawn.family.inputs(drawn.noise, timesteps[:1].expand(2), drawn.family.encode_captions(captions))
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], atol=0, rtol=0, msg=name)
    later = drawn.family.inputs(drawn.noise, timesteps[1:].expand(2), drawn.family.encode_captions(PROMPTS))
    assert torch.equal(later["timestep"], calls[2]["timestep"])


def test_the_prediction_is_what_the_pipeline_gives_its_scheduler(drawn):
    given, scheduler = [], drawn.pipeline.scheduler
    with pytest.MonkeyPatch.context() as patch:
        step = scheduler.step
        patch.setattr(
            scheduler, "step", lambda answer, *others, **named: (given.append(answer), step(answer, *others, **named))[1]
        )
        timesteps = drawn.draw("timesteps", guidance=1.0)
    with torch.no_grad():
        conditioning = drawn.family.encode_captions(PROMPTS)
        found = drawn.family.forward(drawn.model, drawn.noise, timesteps[:1].expand(2), conditioning)
    assert torch.equal(found, given[0].squeeze(2))


@compares("validation images", ["anima"])
@pytest.mark.parametrize(("guidance", "rescale"), [(GUIDANCE, 0.0), (1.0, 0.0), (GUIDANCE, 0.7)])
def test_a_validation_image_is_the_pipelines_to_the_last_bit(drawn, monkeypatch, guidance, rescale):
    ours = drawn.sample(monkeypatch, guidance=guidance, guidance_rescale=rescale)
    assert torch.equal(ours, drawn.draw(guidance=guidance, rescale=rescale) * 2 - 1)


def test_images_are_guided_away_from_a_negative_prompt_as_by_the_pipeline(drawn, monkeypatch):
    ours = drawn.sample(monkeypatch, negative_prompts=("blurry", "dark"))
    assert not drawn.family.no_negative_prompt
    torch.testing.assert_close(ours, drawn.draw(negative_prompt=["blurry", "dark"]) * 2 - 1, atol=1e-6, rtol=0)
    assert not torch.equal(ours, drawn.sample(monkeypatch))


def test_guidance_and_its_rescaling_change_images(drawn):
    images = [drawn.draw(guidance=scale, rescale=rescale) for scale, rescale in ((GUIDANCE, 0.0), (1.0, 0.0), (GUIDANCE, 0.7))]
    assert not any(torch.equal(images[0], other) for other in images[1:])


def test_latents_are_decoded_as_the_pipeline_does(drawn):
    latents = drawn.draw("latents").squeeze(2)
    with torch.no_grad():
        pixels = drawn.family.decode_latents(latents)
    torch.testing.assert_close((pixels + 1) / 2, drawn.draw(), atol=1e-5, rtol=0)


def test_a_caption_is_encoded_the_same_whatever_is_beside_it(drawn):
    captions = [*PROMPTS, "", "a"]
    together = drawn.family.encode_captions(captions)["tokens"]
    alone = torch.cat([drawn.family.encode_captions([caption])["tokens"] for caption in captions])
    torch.testing.assert_close(together, alone)
    lengths = [int(row.any(dim=1).nonzero().max()) + 1 for row in together]
    assert lengths[1:] == [len("two boats") + 2, 1, 3]  # a first space and the end; of nothing the end


def test_captions_are_cut_at_the_length_that_was_chosen_and_padded_as_always(family_of):
    family = family_of("anima", "--tokenizer_max_length=12")
    tokens = family.encode_captions(PROMPTS)["tokens"]
    assert tokens.shape[1] == 64
    assert [int(row.any(dim=1).nonzero().max()) + 1 for row in tokens] == [12, 11]
    assert family.text_settings() != family_of("anima").text_settings()


def test_more_tokens_than_the_conditioner_gives_are_refused(family_of):
    with pytest.raises(UserError, match="gives 64 tokens") as caught:
        family_of("anima", "--tokenizer_max_length=65")
    assert "--tokenizer_max_length=64" in caught.value.fix


def test_the_encoders_are_those_of_the_texts(drawn):
    identity = drawn.family.encoder_identity("texts")
    assert {"text_encoder", "tokenizer", "t5_tokenizer", "text_conditioner"} < identity.keys()
    assert drawn.family.frozen.component_names == ["transformer", "scheduler", "guider", "vae", "image_processor"]


def family_over(folder, *flags):
    plugins = load_plugins()
    words = ["--model_family=anima", f"--pretrained_model_name_or_path={folder}", *flags]
    return find_family(resolve(schema_of(plugins), words, environment={}), plugins)


def test_it_learns_and_the_exported_modular_pipeline_draws_what_it_drew(tmp_path):
    family = family_over(tiny.anima(tmp_path / "base"))
    subject = FamilySubject(family)
    model, kept, losses = trained(family, subject)
    assert losses[-1] < losses[0]
    saved = save(tmp_path, Snapshot(step=1, state=PortableState(model=kept)), SingleRank())
    tensors = TrainedWeights(OwnCheckpoint(saved.path), use_ema=False, precision=None)
    made = tmp_path / "made"
    family.export(NewExport(made, tensors, None, lambda done, total: None))
    expected = subject.sample(model, CAPTIONS[:1], (5,))
    (tmp_path / "base").rename(tmp_path / "moved")  # what the index of the base says is not where it was
    pipeline = opened(made)
    assert torch.equal(pipeline.transformer.proj_out.weight, model.proj_out.weight)
    assert json.loads((made / "transformer" / "config.json").read_text())["concat_padding_mask"]
    again = family_over(made)
    drawn = FamilySubject(again).sample(Drawn(again, pipeline, None).model, CAPTIONS[:1], (5,))
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)


def test_an_export_never_names_weights_of_another_model(tmp_path):
    family = family_over(tiny.anima(tmp_path / "base"))
    changes = family.pipeline_changes()
    before = json.loads((tmp_path / "base" / "modular_model_index.json").read_text())
    assert changes.keys() == {name for name, entry in before.items() if isinstance(entry, list)}
    for name, (library, kind, place) in changes.items():
        assert [library, kind, place["subfolder"]] == [*before[name][:2], name]
        assert place["pretrained_model_name_or_path"] is None
        assert before[name][2]["pretrained_model_name_or_path"] == str(tmp_path / "base")


def test_an_adapter_of_ai_toolkit_starts_a_run(adapter, tmp_path):
    made = adapter("anima")
    end = {"lora_down": "lora_A", "lora_up": "lora_B"}
    names = {kohya_name(original): original for original in original_layers(made.subject.family.meta_model, {})}
    theirs = {}
    for name, tensor in tensors(made.export(tmp_path / "style", format="kohya")).items():
        layer, _, part = name.partition(".")
        if part != "alpha":
            matrix = part.removesuffix(".weight")
            theirs[f"diffusion_model.{names[layer]}.{end[matrix]}.weight"] = tensor * (
                ALPHA / RANK if matrix == "lora_up" else 1
            )
    save_file(theirs, tmp_path / "toolkit.safetensors")
    found = started(made, tmp_path / "toolkit.safetensors")
    assert found.deltas.keys() == made.deltas.keys()
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(found.deltas[layer], delta)


@pytest.mark.parametrize("prefix", ["net.", "model.diffusion_model.", ""])
def test_a_single_file_has_the_conditioner_too(family_of, tmp_path, prefix):
    base = family_of("anima").components
    conditioner = base.weights("text_conditioner")
    more = {f"{prefix}llm_adapter.{name}": conditioner.get(name) + 1 for name in conditioner.names()}
    file = single_file(base.folder, tmp_path / "anima.safetensors", "anima", prefix=prefix, more=more)
    family = family_over(file, f"--base_pipeline={base.folder}")
    model, expected = family.base_weights(0), base.weights("transformer")
    assert [name for name in expected.names() if not torch.equal(model.get(name), expected.get(name))] == []
    found = family.components.load("text_conditioner").state_dict()
    assert [name for name in found if not torch.equal(found[name], conditioner.get(name) + 1)] == []
    assert family.notices == ()
    assert family.components.replaced.keys() == {"transformer", "text_conditioner"}


class TestAnima(FamilyContract):
    @pytest.fixture(autouse=True)
    def _families(self, family_of):
        self.family_of = family_of

    def family(self):
        return self.family_of("anima", "--init_from_config", "--tokenizer_max_length=24")
