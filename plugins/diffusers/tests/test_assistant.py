"""A frozen adapter beside the trained one: active in training, off in samples, and in no checkpoint and no export."""

import shutil

import pytest
import torch
from adapters import family, make_adapter
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from pictured import difference
from safetensors.torch import load_file

from smalti import ConfigError, UserError
from smalti.config.resolution import resolve
from smalti.models.weights import materialise
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import check, schema_of
from smalti_diffusers.lora.adapter import adapter_shapes
from smalti_diffusers.lora.assistant import is_distilled, locate
from smalti_export.command import export as export_command
from smalti_testing.family_subject import CAPTIONS, FamilySubject


@pytest.fixture(scope="module")
def assistant(tmp_path_factory):
    """A random adapter of a tiny Flux with more layers than a run adapts, and its file in kohya's format."""
    root = tmp_path_factory.mktemp("assistant")
    made = make_adapter(root, "flux", "--lora_targets=to_q,to_v,proj_out,x_embedder")
    return made, made.export(root / "style", format="kohya")


def subject(base, *flags):
    return FamilySubject(family("flux", base, "--model_type=lora", "--lora_rank=2", *flags))


def started(made):
    return materialise(made.bare(), made.family.weights(3), "cpu").eval()


def test_training_has_the_assistant_and_samples_have_not(assistant):
    made, file = assistant
    ours = subject(made.base, f"--assistant_lora={file}")
    model = started(ours)
    torch.testing.assert_close(made.predict(model), made.predict(made.model), atol=1e-5, rtol=1e-5)
    assert (made.predict(model) - made.predict(started(subject(made.base)))).norm() > 1
    samples = [each.sample(started(each), CAPTIONS[:1], (5,)) for each in (ours, subject(made.base))]
    assert torch.equal(*samples)
    torch.testing.assert_close(made.predict(model), made.predict(made.model), atol=1e-5, rtol=1e-5)


def test_only_the_other_adapter_trains(assistant):
    made, file = assistant
    model = started(subject(made.base, f"--assistant_lora={file}"))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == adapter_shapes(model).keys() == adapter_shapes(started(subject(made.base))).keys()


def test_a_run_on_sharded_ranks_draws_saves_and_exports_without_the_assistant(assistant, tmp_path, train):
    made, kept = assistant
    file = shutil.copytree(kept, tmp_path / "assistant")
    options = {
        "model_family": "flux",
        "model_type": "lora",
        "pretrained_model_name_or_path": made.base,
        "lora_rank": 4,
        "learning_rate": 5e-2,
        "num_processes": 2,
        "train_batch_size": 2,
        "fsdp_enable": True,
        "allow_dataset_oversubscription": True,
        "checkpoint_step_interval": 2,
    }
    code, output = train(tmp_path / "run", **options, assistant_lora=file)
    assert code == 0, output
    shutil.rmtree(file)
    done = CliRunner().invoke(export_command, [str(tmp_path / "run"), "--to", str(tmp_path / "made")])
    assert done.exit_code == 0, done.output
    assert not any("assistant" in name for name in load_file(tmp_path / "made" / "pytorch_lora_weights.safetensors"))
    pipeline = DiffusionPipeline.from_pretrained(made.base)
    pipeline.load_lora_weights(tmp_path / "made")
    assert difference(pipeline, tmp_path / "run") <= 1
    code, output = train(
        tmp_path / "run", **options | {"num_processes": 1, "fsdp_enable": False, "train_batch_size": 4}, max_train_steps=3
    )
    assert (code, "'assistant'" in output) == (8, True), output


def test_a_distilled_model_without_an_assistant_is_noticed(assistant, tmp_path):
    made, file = assistant
    (tmp_path / "FLUX.1-schnell").symlink_to(made.base)
    distilled = tmp_path / "FLUX.1-schnell"
    (notice,) = subject(distilled).family.notices
    assert "--assistant_lora=ostris/FLUX.1-schnell-training-adapter" in notice
    assert subject(distilled, f"--assistant_lora={file}").family.notices == ()
    assert subject(made.base).family.notices == ()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tongyi-MAI/Z-Image-Turbo", True),
        ("black-forest-labs/FLUX.1-schnell", True),
        ("ostris/Z-Image-De-Turbo", False),
        ("models/sdxl_lightning_4step", True),
        ("black-forest-labs/FLUX.1-dev", False),
        ("turbo-team/plain", False),
    ],
)
def test_distilled_models_are_known_by_their_names(name, expected):
    assert is_distilled(name) is expected


def test_a_name_on_the_hub_is_read_from_its_cache(assistant, tmp_path, monkeypatch):
    _, folder = assistant
    snapshot = tmp_path / "hub" / "models--some--assistant" / "snapshots" / ("a" * 40)
    snapshot.parent.parent.joinpath("refs").mkdir(parents=True)
    snapshot.parent.parent.joinpath("refs", "main").write_text(snapshot.name)
    shutil.copytree(folder, snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert locate("some/assistant") == snapshot / "style.safetensors"
    assert locate("some/assistant/style.safetensors") == snapshot / "style.safetensors"
    shutil.copy(snapshot / "style.safetensors", snapshot / "other.safetensors")
    with pytest.raises(UserError, match="some/assistant holds other"):
        locate("some/assistant")
    with pytest.raises(UserError, match="the download from the Hugging Face Hub failed"):
        locate("some/other")


@pytest.mark.parametrize("option", ["init_lora", "assistant_lora"])
def test_full_training_refuses_files_of_adapters(assistant, option):
    made, file = assistant
    plugins = load_plugins()
    path = next(file.glob("*.safetensors"))
    words = ["--model_family=flux", f"--pretrained_model_name_or_path={made.base}", "--model_type=full", f"--{option}={path}"]
    with pytest.raises(ConfigError, match=f"--{option} is for adapters"):
        check(resolve(schema_of(plugins), words, environment={}), plugins)
