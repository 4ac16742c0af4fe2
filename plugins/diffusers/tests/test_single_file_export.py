"""Complete models are exported as one file, which diffusers and smalti load, with the names that the models' tools have."""

import diffusers
import pytest
import tiny
import torch
from adapters import make_adapter
from compared import compares
from safetensors.torch import load_file
from test_single_file import MAKERS, bare, base_of, family_from  # noqa: F401  # a fixture

from smalti import UserError
from smalti.checkpoint.conversion.export_request import ExportRequest
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.parallel.state import PortableState
from smalti_diffusers.sources.components import Components
from smalti_diffusers.sources.conversion import convert_model
from smalti_diffusers.sources.layouts import LAYOUTS
from smalti_diffusers.sources.pending import PendingTensor, Rows, evaluate
from smalti_diffusers.sources.single_file import FILE_LAYOUTS, file_tensors
from smalti_export.folder import NewExport, TrainedWeights
from smalti_testing.strategies import SingleRank

KNOWN = {
    "sd1x": (
        "model.diffusion_model.output_blocks.2.0.skip_connection.weight",
        "cond_stage_model.transformer.text_model.final_layer_norm.bias",
    ),
    "sdxl": ("model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.1.model.text_projection"),
    "flux": ("double_blocks.0.img_attn.norm.key_norm.scale", "single_blocks.1.linear1.weight"),
    "chroma": ("distilled_guidance_layer.norms.0.scale", "double_blocks.0.img_attn.qkv.weight"),
    "ernie": ("layers.0.self_attention.to_q.weight", "text_proj.weight"),
    "flux2": ("single_stream_modulation.lin.weight", "double_blocks.0.txt_attn.qkv.weight"),
    "sd3": (
        "model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.bias",
        "first_stage_model.decoder.conv_in.bias",
    ),
    "auraflow": ("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight"),
    "hidream": ("double_stream_blocks.0.block.adaLN_modulation.1.bias", "caption_projection.0.linear.weight"),
    "krea2": ("txtfusion.projector.weight", "blocks.0.mod.lin"),
    "lumina2": ("cap_embedder.0.weight", "layers.0.attention.qkv.weight"),
    "qwen_image": ("transformer_blocks.0.attn.add_q_proj.weight", "img_in.weight"),
    "qwen_image21": ("transformer_blocks.0.img_mlp.gate_up.weight", "txt_in.text_norm.weight"),
    "z_image": ("layers.0.adaLN_modulation.0.weight", "final_layer.linear.weight"),
    "cosmos": ("net.blocks.0.self_attn.q_proj.weight", "net.x_embedder.proj.1.weight"),
    "anima": ("net.blocks.0.self_attn.q_proj.weight", "net.llm_adapter.blocks.0.cross_attn.k_proj.weight"),
}
"""Names by which ComfyUI and diffusers recognise a family, and another one."""


def export(family, trained, folder, adapter=None, precision=None, **request):
    """The one file of an export of these tensors, as `smalti checkpoint export --single_file` makes it."""
    saved = save(folder.parent, Snapshot(step=1, state=PortableState(model=trained)), SingleRank())
    asked = ExportRequest(single_file=True, **request)
    family.check_export(asked)
    weights = TrainedWeights(OwnCheckpoint(saved.path), use_ema=False, precision=precision)
    made = NewExport(folder, weights, adapter, lambda done, total: None, name=folder.name, request=asked)
    family.export(made)
    made.finish()
    (file,) = folder.iterdir()
    return file


KINDS = [kind for kind, (name, *_) in MAKERS.items() if name in FILE_LAYOUTS]


@pytest.fixture(scope="module", params=KINDS)
def exported(request, base_of, tmp_path_factory):  # noqa: F811
    """A family over a tiny pipeline, its trained tensors (fp32), and the file of their export."""
    name, base = MAKERS[request.param][0], base_of(request.param)
    family = family_from(name, base)
    weights = family.base_weights(0)
    trained = {key: weights.get(key) + 1 / 16 for key in weights.names()}
    return family, base, trained, export(family, trained, tmp_path_factory.mktemp("exported") / "model")


def test_the_file_is_read_as_the_model_that_was_trained(exported, tmp_path):
    family, base, trained, file = exported
    found = family_from(family.name, file, f"--base_pipeline={bare(base, tmp_path)}").base_weights(0)
    assert [name for name in trained if not torch.equal(found.get(name), trained[name])] == []
    assert set(KNOWN[family.name]) <= load_file(file).keys()


@compares("single files", KINDS, "written")
def test_diffusers_reads_the_file_as_the_model_that_was_trained(exported):
    family, base, trained, file = exported
    if family.name in ("chroma", "flux", "lumina2"):
        pytest.skip("diffusers' conversion contains the widths of the published model; the test below has these")
    kind = getattr(diffusers, family.components.kind(family.part))
    found = kind.from_single_file(str(file), config=str(base), subfolder=family.part).state_dict()
    assert [name for name in trained if not torch.equal(found[name], trained[name])] == []


def test_the_other_parts_of_a_file_are_those_of_the_pipeline(exported, tmp_path):
    family, base, _, file = exported
    if family.name not in ("sd1x", "sdxl", "sd3"):
        assert not any(name.startswith(("vae.", "first_stage_model.", "conditioner.")) for name in load_file(file))
        return
    other = family_from(family.name, file, f"--base_pipeline={bare(base, tmp_path)}").components
    parts = {"vae", *{"sd1x": ("text_encoder",), "sdxl": ("text_encoder", "text_encoder_2")}.get(family.name, ())}
    assert other.replaced.keys() == parts | {family.part}
    for part in parts:
        found, expected = (each.load(part).state_dict() for each in (other, Components(base)))
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_type_of_the_export_is_that_of_all_but_the_autoencoder(base_of, tmp_path):  # noqa: F811
    family = family_from("sdxl", base_of("sdxl"))
    weights = family.base_weights(0)
    trained = {key: weights.get(key) for key in weights.names()}
    found = load_file(export(family, trained, tmp_path / "model", precision="bf16"))
    kinds = {name.split(".")[0]: set() for name in found}
    for name, tensor in found.items():
        kinds[name.split(".")[0]].add(tensor.dtype)
    assert kinds == {"model": {torch.bfloat16}, "conditioner": {torch.bfloat16}, "first_stage_model": {torch.float32}}


def test_a_model_of_v_prediction_says_so_and_is_read_as_one(base_of, tmp_path):  # noqa: F811
    base = base_of("sdxl")
    family = family_from("sdxl", base, "--prediction_type=v_prediction", "--rescale_betas_zero_snr")
    weights = family.base_weights(0)
    file = export(family, {key: weights.get(key) for key in weights.names()}, tmp_path / "model")
    assert {"v_pred", "ztsnr"} <= load_file(file).keys()
    again = family_from("sdxl", file, f"--base_pipeline={base}", "--rescale_betas_zero_snr")
    assert again.prediction == "v_prediction"
    with pytest.raises(UserError, match="ends in pure noise"):
        family_from("sdxl", file, f"--base_pipeline={base}")


def test_a_merged_adapter_is_exported_as_one_file(tmp_path):
    made = make_adapter(tmp_path, "flux")
    file = export(made.subject.family, {key: each for key, each in made.model.state_dict().items() if ".lora_" in key},
                  tmp_path / "merged", {"kind": "lora", "rank": 4, "alpha": 6.0}, merge=True)  # fmt: skip
    weights = family_from("flux", file, f"--base_pipeline={made.base}").base_weights(0)
    base = Components(made.base).weights("transformer")
    for layer, delta in made.deltas.items():
        torch.testing.assert_close(weights.get(f"{layer}.weight"), base.get(f"{layer}.weight") + delta)


@pytest.mark.parametrize(("make", "flags", "said"), [
    (tiny.pixart, ("pixart",), "models of pixart are not exported as one file"),
    (tiny.flux, ("flux", "--model_type=lora"), "this run trained an adapter"),
])  # fmt: skip
def test_what_cannot_be_one_file_is_refused(make, flags, said, tmp_path):
    name, *more = flags
    with pytest.raises(UserError, match=said):
        family_from(name, make(tmp_path / "base"), *more).check_export(ExportRequest(single_file=True))


PUBLISHED = {
    "FluxTransformer2DModel": {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True},
    "Lumina2Transformer2DModel": {"num_layers": 2},
    "SD3Transformer2DModel": {"num_layers": 3, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
    "AuraFlowTransformer2DModel": {"num_mmdit_layers": 1, "num_single_dit_layers": 1},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 1},
    "ZImageTransformer2DModel": {"n_layers": 2},
    "CosmosTransformer3DModel": {"num_layers": 2, "extra_pos_embed_type": None},
}
"""Models of the published widths, which are diffusers' defaults, of few layers."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_rows_of_models_of_the_published_widths_are_where_diffusers_conversion_takes_them_from(kind):
    """Every tensor stands for the numbers of its rows in the file, so that nothing large is computed."""
    with torch.device("meta"):
        model = getattr(diffusers, kind)(**PUBLISHED[kind])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    made = file_tensors(shapes, LAYOUTS[kind](dict(model.config)))

    class File:
        tensors = {each.name: PendingTensor(each.shape(shapes), torch.float32, Rows(each.name)) for each in made}  # noqa: RUF012

    weights = convert_model(File(), model, dict(model.config))
    assert set(weights.names()) == set(shapes)
    for each in made:
        rows = torch.arange(each.shape(shapes)[0]) if each.shape(shapes) else torch.zeros(1)
        start = 0
        for part in each.parts:
            found = evaluate(weights.pending(part), lambda name, first, last: torch.arange(10**6)[first:last])
            length = shapes[part][0]
            expected = rows[start : start + length]
            if each.mark == "~":
                expected = torch.cat(expected.chunk(2)[::-1])
            assert torch.equal(found[:length], expected), part
            start += length
