"""What a run has trained becomes a pipeline of diffusers, which draws what the run drew."""

import json
from contextlib import nullcontext

import pytest
import tiny
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from kinds import opened
from pictured import difference
from safetensors.torch import load_file
from tiny import flux

from smalti import UserError
from smalti.checkpoint.conversion.export_request import ExportRequest
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.config.resolution import resolve
from smalti.data.buckets import Bucket
from smalti.data.loader import MicroBatch
from smalti.parallel.state import PortableState, model_tensors
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti.training.loss import denoising_loss
from smalti_diffusers.sources.components import Components
from smalti_export.command import export as export_command
from smalti_export.folder import NewExport, TrainedWeights
from smalti_testing.family_subject import CAPTIONS, SIZE, FamilySubject
from smalti_testing.strategies import SingleRank
from smalti_validation.png import image_settings

IN_PROCESS = (
    "auraflow",
    "bria",
    "chroma",
    "cosmos",
    "ernie",
    "flux2",
    "hidream",
    "ideogram",
    "krea2",
    "longcat_image",
    "lumina2",
    "ovis_image",
    "qwen_image",
    "qwen_image21",
    "z_image",
)
"""Families that are trained and exported here in this process; Flux is, too, but as a user does it."""


@pytest.fixture(scope="module")
def run(tmp_path_factory, train):
    root = tmp_path_factory.mktemp("export")
    flux(root / "base")
    code, output = train(
        root / "run", model_family="flux", pretrained_model_name_or_path=root / "base", use_ema=True, checkpoint_step_interval=1
    )
    assert code == 0, output
    return root / "run"


def export(*words):
    return CliRunner().invoke(export_command, list(map(str, words)))


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The averaged weights, with which a run draws."""
    target = tmp_path_factory.mktemp("exported") / "pipeline"
    done = export(run, "--to", target, "--ema", "--json")
    assert done.exit_code == 0, done.output
    return target, json.loads(done.stdout)


def test_the_pipeline_draws_what_the_run_drew(run, exported):
    assert difference(DiffusionPipeline.from_pretrained(exported[0]), run) <= 1


def test_a_picture_of_the_run_says_what_it_was_guided_with(run):
    (picture,) = (run / "samples").glob("*/00-*.png")
    told = image_settings(picture)
    assert (told["guidance"], told["true_cfg_scale"], told["inference_steps"]) == ("3.0", "1.0", "2")


def test_the_pipeline_that_the_run_started_from_draws_something_else(run):
    assert difference(DiffusionPipeline.from_pretrained(run.parent / "base"), run) > 10


def test_the_frozen_parts_are_those_of_the_pipeline_that_the_run_started_from(run, exported):
    target, told = exported
    base = run.parent / "base"
    frozen = [path for path in base.rglob("*") if path.is_file() and path.parent.name != "transformer"]
    assert [path for path in frozen if (target / path.relative_to(base)).read_bytes() != path.read_bytes()] == []
    assert {str(path.relative_to(base)) for path in frozen} < set(told["files"])


def test_weights_are_those_of_the_step_and_of_the_type_that_was_asked_for(run, tmp_path):
    assert export(run, "--to", tmp_path / "made", "--step", 1, "--raw", "--dtype", "bf16").exit_code == 0
    (saved,) = (run / "checkpoints" / "step-00000001" / "model").iterdir()
    expected = load_file(saved)
    found = load_file(tmp_path / "made" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name].bfloat16())] == []


def test_large_models_are_cut_into_files_with_an_index(run, tmp_path):
    trained = TrainedWeights(OwnCheckpoint(run / "checkpoints" / "step-00000002"), use_ema=False, precision=None)
    config = Components(run.parent / "base").config("transformer")
    request = ExportRequest(largest_file=100_000)
    NewExport(tmp_path, trained, None, lambda done, total: None, request=request).write_model("part", config)
    assert len(list((tmp_path / "part").glob("*-of-*.safetensors"))) > 2
    assert FluxTransformer2DModel.from_pretrained(tmp_path / "part").state_dict().keys() == trained.tensors.keys()


def test_a_pipeline_that_has_moved_is_named_anew(run, tmp_path):
    base = run.parent / "base"
    moved = base.rename(tmp_path / "moved")
    try:
        lost = export(run, "--to", tmp_path / "made")
        found = export(run, "--to", tmp_path / "made", "--pretrained_model_name_or_path", moved)
    finally:
        moved.rename(base)
    assert [lost.exit_code, found.exit_code] == [1, 0]
    assert lost.exception.exit_code == 2


def test_pickled_weights_of_other_parts_are_refused(tmp_path):
    folder = flux(tmp_path / "base")
    (weights,) = (folder / "vae").glob("*.safetensors")
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(UserError, match="is a pickle, and there are no safetensors beside it"):
        list(Components(folder).files("vae"))


def test_other_precisions_pickles_and_hidden_files_are_left_out(tmp_path):
    folder = flux(tmp_path / "base") / "vae"
    for name in ("x.fp16.safetensors", "x.safetensors.index.fp16.json", "x.bin", ".hidden", "x.safetensors.index.json"):
        (folder / name).touch()
    names = [path.name for path in Components(folder.parent).files("vae")]
    assert names == ["config.json", "diffusion_pytorch_model.safetensors", "x.safetensors.index.json"]


def test_scheduler_and_pipeline_say_what_the_run_has_trained(tmp_path):
    plugins = load_plugins()
    words = ["--model_family=sdxl", f"--pretrained_model_name_or_path={tiny.sdxl(tmp_path / 'base')}"]
    words += ["--prediction_type=v_prediction", "--rescale_betas_zero_snr", "--sdxl_empty_prompt=encoded"]
    family = find_family(resolve(schema_of(plugins), words, environment={}), plugins)
    saved = save(tmp_path, Snapshot(step=1, state=PortableState(model={"bias": torch.ones(2)})), SingleRank())
    trained = TrainedWeights(OwnCheckpoint(saved.path), use_ema=False, precision=None)
    family.export(NewExport(tmp_path / "made", trained, None, lambda done, total: None))
    written = type(family.frozen.scheduler).from_pretrained(tmp_path / "made" / "scheduler")
    assert torch.equal(written.alphas_cumprod, family.frozen.scheduler.alphas_cumprod)
    assert (written.config.prediction_type, written.config.timestep_spacing) == ("v_prediction", "trailing")
    before, index = (json.loads((tmp_path / place / "model_index.json").read_text()) for place in ("base", "made"))
    assert index == before | {"force_zeros_for_empty_prompt": False} != before


class FullPrecision:
    autocast = nullcontext


def trained(family, subject):
    """The model after a few steps on one batch, what a checkpoint has of it, and the losses before each step."""
    plugins = load_plugins()
    loss = denoising_loss(resolve(schema_of(plugins), [f"--model_family={family.name}"], environment={}), family, "cpu")
    height, width = subject.pixels.shape[-2:]
    batch = MicroBatch(
        bucket=Bucket(width, height),
        pixels=subject.pixels,
        latents=None,
        captions=CAPTIONS,
        conditioning=None,
        numbers=(1, 2, 3),
        keys=CAPTIONS,
        size_conditioning=(SIZE,) * 3,
    )
    model, losses = subject.model(), []
    for parameter, name in ((each, name) for name, each in model.named_parameters() if not each.requires_grad):
        parameter.copy_(family.weights(0).get(name))  # what is frozen is that of the base
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        found = loss(model, batch, FullPrecision()).parts
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    kept = model_tensors(model)
    return model.requires_grad_(False), kept, losses


@pytest.mark.usefixtures("torchvision")
@pytest.mark.parametrize("name", IN_PROCESS)
def test_any_family_learns_and_its_exported_pipeline_draws_what_it_drew(tmp_path, name):
    def family_over(folder):
        plugins = load_plugins()
        words = [f"--model_family={name}", f"--pretrained_model_name_or_path={folder}"]
        return find_family(resolve(schema_of(plugins), words, environment={}), plugins)

    family = family_over(getattr(tiny, name)(tmp_path / "base"))
    subject = FamilySubject(family)
    model, kept, losses = trained(family, subject)
    assert losses[-1] < losses[0]
    saved = save(tmp_path, Snapshot(step=1, state=PortableState(model=kept)), SingleRank())
    tensors = TrainedWeights(OwnCheckpoint(saved.path), use_ema=False, precision=None)
    family.export(NewExport(tmp_path / "made", tensors, None, lambda done, total: None))
    exported = opened(tmp_path / "made")
    drawn = FamilySubject(family_over(tmp_path / "made")).sample(exported.components[family.part], CAPTIONS[:1], (5,))
    torch.testing.assert_close(drawn, subject.sample(model, CAPTIONS[:1], (5,)), atol=1e-5, rtol=0)
