"""Models in one file: every family's layouts are read through diffusers' conversion, tensor by tensor, beside a base."""

import shlex
import shutil
import subprocess
import sys
from itertools import product

import pytest
import tiny
import torch
from click.testing import CliRunner
from compared import compares
from diffusers import AutoencoderKL, FluxPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from pictured import difference
from safetensors.torch import load_file, save_file
from single_files import UNET, single_file

from smalti import UserError
from smalti.config.resolution import resolve
from smalti.models.weights import FolderWeights, materialise, without_weights
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_diffusers.sources.components import Components
from smalti_export.command import export as export_command
from support.whole import some

MAKERS = {
    "sd1x": ("sd1x", tiny.sd1x, {}),
    "sd2x": ("sd2x", tiny.sd2x, {}),
    "sdxl": ("sdxl", tiny.sdxl, {}),
    "flux": ("flux", tiny.flux, {}),
    "flux schnell": ("flux", tiny.flux, {"guidance": False}),
    "chroma": ("chroma", tiny.chroma, {}),
    "ernie": ("ernie", tiny.ernie, {}),
    "flux2 klein": ("flux2", tiny.flux2, {}),
    "flux2 dev": ("flux2", tiny.flux2, {"dev": True}),
    "sd3": ("sd3", tiny.sd3, {}),
    "sd3.5": ("sd3", tiny.sd3, {"newer": True}),
    "auraflow": ("auraflow", tiny.auraflow, {}),
    "hidream": ("hidream", tiny.hidream, {}),
    "krea2": ("krea2", tiny.krea2, {}),
    "lumina2": ("lumina2", tiny.lumina2, {"heads": 3}),
    "qwen image": ("qwen_image", tiny.qwen_image, {}),
    "qwen image 2.1": ("qwen_image21", tiny.qwen_image21, {}),
    "z image": ("z_image", tiny.z_image, {}),
    "anima": ("anima", tiny.anima, {}),
    "cosmos": ("cosmos", tiny.cosmos, {}),
}
LAYOUTS = {"original": "", "comfyui": UNET, "auraflow": "model."}
EVERY = [*product(MAKERS, LAYOUTS)]
KEPT = [("flux", "original"), ("sdxl", "comfyui"), *((kind, "auraflow") for kind in MAKERS if kind != "sdxl")]


def part_of(family):
    return "unet" if family in ("sd1x", "sd2x", "sdxl") else "transformer"


@pytest.fixture(scope="module")
def base_of(tmp_path_factory):
    """base_of(kind) -> a tiny pipeline, which is made once."""
    root, made = tmp_path_factory.mktemp("bases"), {}

    def give(kind):
        if kind not in made:
            _, make, more = MAKERS[kind]
            made[kind] = make(root / kind.replace(" ", "-"), **more)
        return made[kind]

    return give


def family_from(family, start, *flags):
    plugins = load_plugins()
    words = [f"--model_family={family}", f"--pretrained_model_name_or_path={start}", *flags]
    return find_family(resolve(schema_of(plugins), words, environment={}), plugins)


def bare(base, tmp_path):
    """The pipeline without the weights of its trained part: they can only come from the file."""
    copy = shutil.copytree(base, tmp_path / "bare")
    for path in (copy / ("unet" if (copy / "unet").is_dir() else "transformer")).glob("*.safetensors"):
        path.unlink()
    return copy


def different(weights, expected):
    """The names of tensors that are not the same, to the bit."""
    names = set(expected.names())
    assert set(weights.names()) >= names
    return [name for name in names if not torch.equal(weights.get(name), expected.get(name))]


@compares("single files", MAKERS, "read")
@pytest.mark.parametrize(("kind", "layout"), some(EVERY, *KEPT))
def test_a_file_in_any_layout_has_the_weights_of_the_model(kind, layout, base_of, tmp_path):
    name = MAKERS[kind][0]
    part, base = part_of(name), base_of(kind)
    file = single_file(base, tmp_path / "model.safetensors", name, part=part, prefix=LAYOUTS[layout])
    family = family_from(name, file, f"--base_pipeline={bare(base, tmp_path)}")
    assert different(family.base_weights(0), Components(base).weights(part)) == []


@pytest.mark.parametrize(
    ("kind", "vae", "encoders"),
    [
        ("sd1x", "first_stage_model.", ("text_encoder",)),
        ("sdxl", "first_stage_model.", ("text_encoder", "text_encoder_2")),
        ("sd3", "first_stage_model.", ("text_encoder", "text_encoder_2", "text_encoder_3")),
        ("flux", "vae.", ("text_encoder", "text_encoder_2")),
    ],
)
def test_autoencoder_and_text_encoders_of_a_file_are_used(kind, vae, encoders, base_of, tmp_path):
    name = MAKERS[kind][0]
    part, base = part_of(name), base_of(kind)
    more = {"vae": vae, "encoders": encoders}
    file = single_file(base, tmp_path / "model.safetensors", name, part=part, prefix=UNET, **more)
    other = bare(base, tmp_path)
    for each in ("vae", *encoders):  # nothing but configurations
        for path in (other / each).glob("*.safetensors"):
            path.unlink()
    family = family_from(name, file, f"--base_pipeline={other}")
    expected = Components(base)
    for each in ("vae", *encoders):
        wanted, found = expected.load(each).state_dict(), family.components.load(each).state_dict()
        if (kind, each) == ("sd3", "text_encoder"):  # Stable Diffusion 3 does not project the first one
            wanted["text_projection.weight"] = torch.eye(32)
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_a_file_gives_what_diffusers_gives_of_it(base_of, tmp_path):
    base = base_of("sdxl")
    file = single_file(
        base,
        tmp_path / "model.safetensors",
        "sdxl",
        part="unet",
        prefix=UNET,
        vae="first_stage_model.",
        encoders=("text_encoder", "text_encoder_2"),
        dtype=torch.float16,
    )
    theirs = StableDiffusionXLPipeline.from_single_file(str(file), config=str(base), torch_dtype=torch.float32)
    family = family_from("sdxl", file, f"--base_pipeline={base}")
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        found, expected = family.components.load(part).state_dict(), theirs.components[part].state_dict()
        assert [key for key in expected if not torch.equal(found[key], expected[key].float())] == [], part


def test_a_unet_folder_beside_a_base_is_trained_with_its_own_configuration(base_of, tmp_path):
    model = UNet2DConditionModel.from_pretrained(base_of("sdxl") / "unet", sample_size=64)
    model.conv_in.weight.data += 1
    model.save_pretrained(tmp_path / "unet")
    family = family_from("sdxl", tmp_path / "unet", f"--base_pipeline={bare(base_of('sdxl'), tmp_path)}")
    assert torch.equal(family.base_weights(0).get("conv_in.weight"), model.conv_in.weight)
    assert family.components.config("unet")["sample_size"] == 64
    assert type(family.components.load("vae")) is AutoencoderKL


# --- refusals -------------------------------------------------------------------------------------------------------


def gguf(path, base):
    path.write_bytes(b"GGUF" + bytes(60))


def pickle(path, base):
    torch.save({"state_dict": {"a": torch.ones(2)}}, path)


def truncated(path, base):
    single_file(base, path, "flux")
    path.write_bytes(path.read_bytes()[:-100])


def web_page(path, base):
    path.write_text("<!DOCTYPE html><html>Please log in</html>" * 5)


def lfs_pointer(path, base):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")


def adapter(path, base):
    save_file({"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.ones(2, 2)}, path)


def other_family(path, base):
    save_file({f"{UNET}joint_blocks.{number}.x_block.mlp.fc1.weight": torch.ones(2, 2) for number in range(38)}, path)


def half(path, base):
    single_file(base, path, "flux", prefix=UNET)
    save_file({name: tensor for name, tensor in load_file(path).items() if "double_blocks.1" not in name}, path)


def quantised(path, base):
    single_file(base, path, "flux")
    save_file(load_file(path) | {"img_in.weight": torch.ones(32, 8, dtype=torch.uint8)}, path)


def block_scaled(path, base):
    single_file(base, path, "flux")
    note = torch.tensor(list(b'{"format": "mxfp8"}'), dtype=torch.uint8)
    scales = torch.ones(32, 2, dtype=torch.uint8)
    weight = torch.ones(32, 16).to(torch.float8_e4m3fn)
    save_file(load_file(path) | {"img_in.weight": weight, "img_in.weight_scale": scales, "img_in.comfy_quant": note}, path)


def wider(path, base):
    single_file(base, path, "flux")
    found = load_file(path)
    save_file(found | {"img_in.weight": torch.ones(48, 16)}, path)


@pytest.mark.parametrize(
    ("make", "name", "said", "fix"),
    [
        (gguf, "model.gguf", "is a GGUF file", "safetensors"),
        (pickle, "model.ckpt", "is a pickle", "weights_only=True"),
        (truncated, "model.safetensors", "is not a valid safetensors file: .* where the header says", "download it again"),
        (web_page, "model.safetensors", "is a web page", "logged in"),
        (lfs_pointer, "model.safetensors", "is a pointer of Git LFS", "git lfs pull"),
        (adapter, "model.safetensors", "is an adapter", "--init_lora"),
        (other_family, "model.safetensors", "is a model of sd3, not of flux", "--model_family=sd3"),
        (half, "model.safetensors", r"lacks \d+ tensors of the FluxTransformer2DModel", "--base_pipeline"),
        (quantised, "model.safetensors", "quantised weights .*U8", "fp8"),
        (block_scaled, "model.safetensors", "quantised weights .*mxfp8", "fp8"),
        (wider, "model.safetensors", r"does not fit the base pipeline.*x_embedder.weight \[48, 16\]", "--base_pipeline"),
    ],
)
def test_another_file_is_refused_by_name_with_what_to_do(make, name, said, fix, base_of, tmp_path):
    path = tmp_path / name
    make(path, base_of("flux"))
    with pytest.raises(UserError, match=said) as caught:
        family_from("flux", path, f"--base_pipeline={base_of('flux')}")
    assert str(path) in caught.value.message
    assert fix in caught.value.fix


def test_the_command_for_a_pickle_makes_a_file_that_is_read(base_of, tmp_path):
    base, path = base_of("flux"), tmp_path / "model.ckpt"
    tensors = load_file(single_file(base, tmp_path / "original.safetensors", "flux"))
    torch.save({"state_dict": tensors}, path)
    with pytest.raises(UserError) as caught:
        family_from("flux", path, f"--base_pipeline={base}")
    command = caught.value.fix.partition("\n")[2].strip()
    program, *words = shlex.split(command)
    assert program == "python"
    subprocess.run([sys.executable, *words], check=True)
    family = family_from("flux", tmp_path / "model.safetensors", f"--base_pipeline={base}")
    assert different(family.base_weights(0), Components(base).weights("transformer")) == []


def test_a_base_that_is_not_reachable_is_named_with_the_reason_for_it(base_of, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = single_file(base_of("flux"), tmp_path / "model.safetensors", "flux")
    with pytest.raises(UserError) as caught:
        family_from("flux", file)
    begin = (
        f"{file} is one part of a pipeline; the others come from black-forest-labs/FLUX.1-dev, which is not a local file or "
    )
    assert caught.value.message.startswith(f"{begin}folder, and the download")
    assert "--base_pipeline=FOLDER" in caught.value.fix


# --- types ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_types_are_widened_without_another_rounding(dtype, base_of, tmp_path):
    base = base_of("flux")
    file = single_file(base, tmp_path / "model.safetensors", "flux", dtype=dtype)
    family = family_from("flux", file, f"--base_pipeline={base}")
    with without_weights():
        model = family.build_model()
    found = materialise(model, family.weights(0), "cpu").state_dict()
    expected = Components(base).weights("transformer")
    assert [name for name in found if not torch.equal(found[name], expected.get(name).to(dtype).float())] == []


@pytest.mark.parametrize("names", [("scale_weight", "scale_input"), ("weight_scale", "input_scale")])
@pytest.mark.parametrize("rows", [False, True])
def test_scaled_fp8_is_multiplied_with_its_scale(names, rows, base_of, tmp_path):
    base, path = base_of("flux"), tmp_path / "model.safetensors"
    tensors = load_file(single_file(base, path, "flux"))
    name, expected = "double_blocks.0.img_attn.qkv", tensors["double_blocks.0.img_attn.qkv.weight"]
    scale = (expected.abs().amax(1, keepdim=True) if rows else expected.abs().max()) / 448
    stored = (expected / scale).to(torch.float8_e4m3fn)
    more = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn), f"{name}.{names[1]}": torch.ones(())}
    save_file(tensors | more | {f"{name}.weight": stored, f"{name}.{names[0]}": scale}, path)
    weights = family_from("flux", path, f"--base_pipeline={base}").base_weights(0)
    key = expected[32:64]  # of queries, keys and values
    assert torch.equal(
        weights.get("transformer_blocks.0.attn.to_k.weight"), stored.float()[32:64] * (scale[32:64] if rows else scale)
    )
    torch.testing.assert_close(weights.get("transformer_blocks.0.attn.to_k.weight"), key, atol=0.01, rtol=0.07)


def test_a_v_prediction_model_is_trained_as_one(base_of, tmp_path):
    more = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    file = single_file(base_of("sdxl"), tmp_path / "model.safetensors", "sdxl", part="unet", prefix=UNET, more=more)
    family = family_from("sdxl", file, f"--base_pipeline={base_of('sdxl')}", "--rescale_betas_zero_snr")
    assert family.prediction == "v_prediction"


@pytest.mark.parametrize(
    ("extra", "said"),
    [(("text_encoders.gemma2_2b.norm.weight", "model_ema.decay"), "model_ema, text_encoders.gemma2_2b"), ((), None)],
)
def test_parts_of_a_file_that_are_not_used_are_named(extra, said, base_of, tmp_path):
    more = {name: torch.ones(2) for name in extra}
    file = single_file(base_of("flux"), tmp_path / "model.safetensors", "flux", prefix=UNET, vae="vae.", more=more)
    notices = family_from("flux", file, f"--base_pipeline={base_of('flux')}").notices
    assert any(f"{file} also has {said}" in notice for notice in notices) == (said is not None)


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_from_a_file_resumes_and_exports_the_parts_of_the_file(base_of, tmp_path, train):
    base, encoders = base_of("flux"), ("text_encoder", "text_encoder_2")
    more = {"prefix": UNET, "vae": "vae.", "encoders": encoders, "dtype": torch.float16}
    file = single_file(base, tmp_path / "model.safetensors", "flux", **more)
    options = {"model_family": "flux", "pretrained_model_name_or_path": file, "base_pipeline": bare(base, tmp_path)}
    for steps in (1, 2):
        code, output = train(tmp_path / "run", **options, max_train_steps=steps, checkpoint_step_interval=1)
        assert code == 0, output
    assert "step-00000001 at step 1" in output, output
    moved = (tmp_path / "bare").rename(tmp_path / "moved")
    command = [str(tmp_path / "run"), "--to", str(tmp_path / "made"), f"--base_pipeline={moved}"]
    done = CliRunner().invoke(export_command, command)
    assert done.exit_code == 0, done.output
    exported, expected = Components(tmp_path / "made"), Components(base)
    for part in ("vae", *encoders):
        wanted, found = expected.weights(part), exported.weights(part)
        assert [name for name in wanted.names() if not torch.equal(found.get(name), wanted.get(name).half())] == [], part
    assert difference(FluxPipeline.from_pretrained(tmp_path / "made"), tmp_path / "run") <= 1


def test_every_byte_of_the_model_is_read_once_and_one_tensor_at_a_time(base_of, tmp_path, monkeypatch):
    base = base_of("flux")
    file = single_file(base, tmp_path / "model.safetensors", "flux", vae="vae.")
    weights = family_from("flux", file, f"--base_pipeline={base}").base_weights(0)
    read, rows = [], FolderWeights.rows

    def counted(self, name, start, stop):
        tensor = rows(self, name, start, stop)
        read.append((name, tensor.nbytes))
        return tensor

    monkeypatch.setattr(FolderWeights, "rows", counted)
    for name in weights.names():
        before = len(read)
        weights.get(name)
        assert len({source for source, _ in read[before:]}) == 1, name
    assert sum(size for _, size in read) == sum(tensor.nbytes for name, tensor in load_file(file).items() if "vae." not in name)
