"""`smalti plugin new --from-pipeline`: the family of a pipeline in a package, whose tests compare it with the pipeline."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
from hub_server import hub
from kinds import EVERY

from smalti_diffusers.options import DiffusersOptions
from smalti_diffusers.scaffold.comparison import compare, small_pipeline
from smalti_diffusers.scaffold.package import package_of
from smalti_diffusers.sources import location
from smalti_diffusers.sources.components import Components
from support.commands import commands
from support.whole import only_whole

LONGEST = "n" * 24
AS_WRITTEN = ("flux", "flux schnell", "sd1x", "sd3.5", "sdxl", "auraflow")
"""Kinds with nothing to fill in: the other families have code of their own."""


@dataclass(frozen=True)
class Written:
    """A package, and what the command that wrote it says in JSON."""

    folder: Path
    said: dict

    @property
    def name(self) -> str:
        return self.said["name"]

    def text(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")

    def module(self):
        """The module with the family, imported as `smalti_NAME.family`."""
        sys.path.insert(0, str(self.folder / "src"))
        try:
            return importlib.import_module(f"{self.said['package']}.family")
        finally:
            sys.path.remove(str(self.folder / "src"))


@pytest.fixture(scope="module")
def pipeline_of(tmp_path_factory):
    """pipeline_of(kind) -> the folder of a tiny pipeline, which is made once."""
    root = tmp_path_factory.mktemp("pipelines")

    def give(kind):
        _, make, more = EVERY[kind]
        folder = root / kind.replace(" ", "-")
        return folder if folder.exists() else make(folder, **more)

    return give


@pytest.fixture
def written(pipeline_of, capsys, tmp_path):
    """written(kind, name) -> the package for that pipeline."""

    def give(kind, name=None):
        name = name or f"my-{re.sub('[^a-z0-9]', '-', kind)}"
        words = (name, "--kind=family", f"--from-pipeline={pipeline_of(kind)}", f"--to={tmp_path / name}", "--json")
        capsys.readouterr()  # how far the files of the pipeline are written
        code, output, errors = commands(capsys, "plugin")("new", *words)
        assert (code, errors) == (0, "")
        return Written(tmp_path / name, json.loads(output))

    return give


def installed(package: Written) -> dict[str, str]:
    """An environment in which the package is on the path, with the metadata that pip would make of its pyproject.toml."""
    project = tomllib.loads(package.text("pyproject.toml"))["project"]
    metadata = package.folder / "src" / f"{package.said['package']}-{project['version']}.dist-info"
    metadata.mkdir()
    needs = "".join(f"Requires-Dist: {each}\n" for each in project["dependencies"])
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}"
    (metadata / "METADATA").write_text(text, encoding="utf-8")
    entries = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["smalti.plugins"].items())
    (metadata / "entry_points.txt").write_text(f"[smalti.plugins]\n{entries}", encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(package.folder / "src"), "OMP_NUM_THREADS": "1"}


@only_whole("tests/e2e/test_plugin_new.py::test_their_own_tests_pass")
@pytest.mark.parametrize(("kind", "chosen"), [("flux", "not TestFamily"), *((kind, "") for kind in AS_WRITTEN)])
def test_the_tests_of_the_package_pass_as_written(written, kind, chosen):
    package = written(kind)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", chosen, "tests"]
    done = subprocess.run(command, cwd=package.folder, env=installed(package), capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
    assert package.said["unread"] == {}


@pytest.fixture(scope="module")
def small(pipeline_of, tmp_path_factory):
    """small(kind) -> what the tests of a package compare with, which is made once."""
    root = tmp_path_factory.mktemp("small")

    def give(kind):
        folder = root / kind.replace(" ", "-")
        return folder if folder.exists() else small_pipeline(str(pipeline_of(kind)), folder)

    return give


def compared(package, folder, **fields):
    """With other values of these fields than the package has."""
    family = type("Family", (package.module().Family,), fields)
    return compare(family(Components(folder), DiffusersOptions(flux_guidance_value=3.5)))


def test_a_family_of_sdxl_does_what_its_pipeline_does(written, small):
    found = compared(written("sdxl"), small("sdxl"))
    for ours, theirs in zip(found.ours, found.theirs, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False)
    assert found.theirs[0].keys() >= {"encoder_hidden_states", "added_cond_kwargs.time_ids", "added_cond_kwargs.text_embeds"}
    torch.testing.assert_close(found.prediction, found.expected)
    torch.testing.assert_close(found.sampled, found.images, atol=1e-4, rtol=0)


def test_what_is_wrong_in_a_family_is_seen_beside_the_pipeline(written, small):
    package = written("flux")
    found = compared(package, small("flux"), time="1-t", sign=-1, max_length=64)
    different = {name for name, each in found.theirs[1].items() if not matches(found.ours[1].get(name), each)}
    assert different == {"timestep", "encoder_hidden_states", "txt_ids"}
    assert not matches(found.prediction, found.expected)
    assert not matches(found.sampled, found.images)
    assert matches(found.decoded, found.images)


def matches(one, other):
    return one is not None and one.shape == other.shape and torch.allclose(one.float(), other.float(), atol=1e-4)


def test_what_could_not_be_read_is_said_with_the_expression_of_the_pipeline(written):
    package = written("flux2 klein")
    assert package.said["unread"].keys() == {"txt_ids", "img_ids"}
    code = package.text("src/smalti_my_flux2_klein/family.py")
    assert (
        "    # - img_ids: the model's argument img_ids, `latent_image_ids` in the pipeline: return it from `more_inputs`\n"
        in code
    )
    assert "autoencoder = PatchAutoencoder\n" in code
    assert "TODO" not in code


def test_the_fields_are_those_of_the_pipeline(written):
    package = written("lumina2")
    code = package.text("src/smalti_my_lumina2/family.py")
    fields = ('time = "1-t"', "sign = -1", "max_length = 256", '"tokens": TokenRows(width="cap_feat_dim")', '"mask": Mask()')
    assert [each for each in fields if each not in code] == []
    assert "- scheduler: FlowMatchEulerDiscreteScheduler, rectified flow, shift 6.0\n" in code
    assert "Lumina2RotaryPosEmbed reads values, `attention_mask.sum(dim=1).tolist()`" in package.said["unread"]["build_base"]
    assert "- vae: AutoencoderKL, scaling_factor 0.4, shift_factor 0.1, latent_channels 4\n" in code


@pytest.mark.parametrize("name", ["q", LONGEST])
def test_the_code_is_formatted_and_sound_whatever_the_name(written, name):
    package = written("flux", name)
    ruff = [sys.executable, "-m", "ruff"]
    for words in (["format", "--isolated", "--diff"], ["check", "--isolated", "--select", "E4,E7,E9,F,I,UP,B,W"]):
        done = subprocess.run([*ruff, *words, "."], cwd=package.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_small_pipeline_has_two_layers_of_each_kind_and_the_published_widths(tmp_path):
    published = location.find_folder(str(tiny.flux(tmp_path / "flux")), None)
    path = published / "transformer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 19, "num_single_layers": 38}))
    found = Components(small_pipeline(str(published), tmp_path / "small")).config("transformer")
    assert (found["num_layers"], found["num_single_layers"], found["joint_attention_dim"]) == (2, 2, 32)


def test_of_a_hub_id_only_configurations_and_tokenizers_are_fetched(pipeline_of, monkeypatch, tmp_path):
    location._small.cache_clear()
    with hub({"user/model": pipeline_of("flux")}, monkeypatch, tmp_path / "cache") as sent:
        found = package_of("user/model", {"name": "pebble", "package": "smalti_pebble"})
    location._small.cache_clear()
    assert '    "default": "user/model",\n' in found.files["src/smalti_pebble/__init__.py"]
    assert "user/model/transformer/config.json" in sent
    assert [name for name in sent if name.endswith(".safetensors")] == []


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """refused("--flag=1", ...) -> what is said. Nothing may have been written."""
    monkeypatch.chdir(tmp_path)

    def give(source, kind="family"):
        before = sorted(tmp_path.iterdir())
        capsys.readouterr()
        code, output, errors = commands(capsys, "plugin")("new", "pebble", f"--kind={kind}", f"--from-pipeline={source}")
        assert (code, output) == (2, "")
        assert "fix: " in errors
        assert sorted(tmp_path.iterdir()) == before
        return errors

    return give


def index(folder: Path, **classes) -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **classes}))
    return folder


def test_a_pipeline_without_a_transformer_or_u_net_is_refused(refused, tmp_path):
    folder = index(tmp_path / "prior", _class_name="KandinskyPriorPipeline", prior=["diffusers", "PriorTransformer"])
    assert "is a KandinskyPriorPipeline without a transformer or U-Net" in refused(folder)


def test_a_class_that_is_not_installed_is_refused(refused, tmp_path):
    folder = index(tmp_path / "new", _class_name="NextYearPipeline", transformer=["diffusers", "FluxTransformer2DModel"])
    assert "the installed diffusers has no class NextYearPipeline" in refused(folder)


def test_a_u_net_that_no_base_is_for_is_refused(refused, pipeline_of, tmp_path):
    components = Components(pipeline_of("sdxl"))
    folder = index(
        tmp_path / "kolors", unet=["diffusers", "UNet2DConditionModel"], text_encoder=["transformers", "T5EncoderModel"]
    )
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text(json.dumps(components.config("unet")))
    assert "conditioned otherwise than that of Stable Diffusion 1 or XL: addition_embed_type text_time" in refused(folder)


def test_a_folder_that_is_no_pipeline_is_refused(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "it has no model_index.json" in refused(tmp_path / "empty")


def test_a_part_without_its_configuration_is_refused(refused, tmp_path):
    folder = index(tmp_path / "part", transformer=["diffusers", "FluxTransformer2DModel"])
    assert "transformer/config.json" in refused(folder)


def test_another_kind_is_refused(refused, pipeline_of):
    assert "fix: --kind=family" in refused(pipeline_of("flux"), kind="observer")


def test_a_hub_id_without_a_network_is_refused_with_what_to_do(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    errors = refused("somebody/new-model")
    assert "the download from the Hugging Face Hub failed" in errors
    assert "or name a local folder" in errors


def test_without_smalti_diffusers_the_command_names_it(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "smalti_diffusers", None)
    assert "fix: pip install " in refused("somebody/new-model")
