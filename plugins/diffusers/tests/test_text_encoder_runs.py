"""Runs that train adapters of SDXL's text encoders: alike over ranks and resumes, and at rates of their own."""

import json
import shutil
from itertools import pairwise

import pytest
import tiny
import torch
from diffusers import DiffusionPipeline
from pictured import difference
from test_lora import SEVERAL, apart, tensors

from smalti.config.resolution import resolve
from smalti.launch.preflight import Preparation
from smalti.plugins.discovery import load_plugins
from smalti.plugins.schema import schema_of
from smalti.rundir import RunDirectory
from smalti_diffusers.lora import kept_texts
from smalti_diffusers.lora.kept_texts import KeptTexts
from support.commands import commands
from support.whole import some

OPTIONS = {
    "model_family": "sdxl",
    "model_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "train_text_encoder": True,
    "text_encoder_lr": 2e-2,
    "learning_rate": 5e-2,
    "caption_dropout_probability": 0.3,
    "use_ema": True,
    "checkpoint_step_interval": 1,
    "validation_base_model": True,
}
ZERO = {stage: json.dumps({"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}) for stage in (2, 3)}
STRATEGIES = {
    "replicas": SEVERAL,
    "shards": SEVERAL | {"fsdp_enable": True, "validation_step_interval": 2},
    "zero 2": SEVERAL | {"deepspeed_config": ZERO[2], "use_ema": False},
    "zero 3": SEVERAL | {"deepspeed_config": ZERO[3], "validation_step_interval": 2},
    "recomputed": {"gradient_checkpointing": True, "validation_step_interval": 0},
    "not cached": {"text_cache_disable": True, "validation_step_interval": 0},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.sdxl(tmp_path_factory.mktemp("encoders") / "base")


@pytest.fixture(scope="module")
def options(base, pictures):
    """The second half of the pictures is regularisation data, for which the model is called without its adapter, too."""
    entries = base.parent / "datasets.json"
    folder = {"instance_data_dir": str(pictures)}
    entries.write_text(json.dumps([{"id": "a", **folder}, {"id": "b", "is_regularisation_data": True, **folder}]))
    return OPTIONS | {
        "pretrained_model_name_or_path": base,
        "instance_data_dir": None,
        "data_backend_config": entries,
    }


@pytest.fixture(scope="module")
def first(base, train, options):
    """Two steps of one process."""
    code, output = train(base.parent / "one", **options)
    assert code == 0, output
    return base.parent / "one"


def encoders(found):
    return {name: tensor for name, tensor in found.items() if name.startswith("text_encoder")}


@pytest.mark.parametrize("strategy", some(STRATEGIES, "shards"))
def test_the_second_step_of_one_process_is_that_of_others(first, train, options, strategy, tmp_path):
    shutil.copytree(first / "checkpoints" / "step-00000001", tmp_path / "run" / "checkpoints" / "step-00000001")
    code, output = train(tmp_path / "run", **options | STRATEGIES[strategy])
    assert (code, "at step 1" in output) == (0, True), output
    averaged = strategy != "zero 2"
    for choose in (dict, encoders):
        before, one, other = (choose(tensors(run, step)) for run, step in ((first, 1), (first, 2), (tmp_path / "run", 2)))
        assert apart(one, before) > 20 * apart(one, other)
        if averaged:
            one, other = (choose(tensors(run, 2, averaged=True)) for run in (first, tmp_path / "run"))
            assert apart(one, other) < 2e-3


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(first, train, options, tmp_path):
    shutil.copytree(first / "checkpoints" / "step-00000001", tmp_path / "run" / "checkpoints" / "step-00000001")
    code, output = train(tmp_path / "run", **options)
    assert code == 0, output
    one, other = tensors(first, 2), tensors(tmp_path / "run", 2)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_the_rate_of_the_encoders_is_theirs_alone(first, train, options, tmp_path):
    shutil.copytree(first / "checkpoints" / "step-00000001", tmp_path / "run" / "checkpoints" / "step-00000001")
    code, output = train(tmp_path / "run", **options | {"text_encoder_2_lr": 0, "validation_step_interval": 0})
    assert code == 0, output
    before, one, other = tensors(first, 1), tensors(first, 2), tensors(tmp_path / "run", 2)
    still = {name for name in other if name.startswith("text_encoder_2.")}
    assert {name for name, tensor in other.items() if torch.equal(before[name], tensor)} == still
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items() if name not in still)
    moved = {name: float((one[name] - before[name]).abs().max()) for name in one}
    assert max(moved[name] for name in encoders(one)) < 1.2 * 2e-2 * 2
    assert max(moved.values()) > 2e-2


@pytest.fixture(scope="module")
def stopped(base, train, options):
    """The options of a run of four steps, whose text encoders learn in two of them, and its folder."""
    last = {"train_text_encoder_frac": 0.5, "max_train_steps": 4, "validation_step_interval": 0}
    code, output = train(base.parent / "stopped", **options | last)
    assert code == 0, output
    return options | last, base.parent / "stopped"


def test_text_encoders_stop_learning_and_the_model_goes_on(stopped, first):
    found = [tensors(stopped[1], step) for step in (2, 3, 4)]
    for before, after in pairwise(found):
        assert {name for name, tensor in after.items() if torch.equal(before[name], tensor)} == set(encoders(after))
    one = tensors(first, 2)
    assert [name for name in one if not torch.equal(one[name], found[0][name])] == [], "before, nothing is different"


@pytest.mark.parametrize("step", some([1, 2, 3], 1, 2))
def test_a_run_resumed_before_or_after_they_stopped_has_the_same_bits(stopped, train, step, tmp_path):
    options, run = stopped
    kept = f"checkpoints/step-{step:08}"
    shutil.copytree(run / kept, tmp_path / "run" / kept)
    code, output = train(tmp_path / "run", **options)
    assert (code, f"at step {step}" in output) == (0, True), output
    one, other = tensors(run, 4), tensors(tmp_path / "run", 4)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_run_has_the_same_bits_if_it_keeps_no_texts_after_they_stopped(stopped, monkeypatch, tmp_path):
    """Both in this process, whose threads may be others than those of a launched one."""
    _, run = stopped
    encoded, encode, found = [], KeptTexts.encoded, {}
    monkeypatch.setattr(KeptTexts, "encoded", lambda self, *given: encoded.append(self) or encode(self, *given))
    plugins, file = load_plugins(), RunDirectory(run).config_file
    for limit in (kept_texts.LIMIT, 0):
        monkeypatch.setattr(kept_texts, "LIMIT", limit)
        resumed = tmp_path / str(limit)
        shutil.copytree(run / "checkpoints/step-00000002", resumed / "checkpoints/step-00000002")
        config = resolve(schema_of(plugins), [f"--output_dir={resumed}"], file=file, environment={})
        assert Preparation.of(config, plugins, write=True).launch() == 0
        found[limit] = tensors(resumed, 4)
    assert len(encoded) >= 4
    one, other = found.values()
    differing = {name: float((tensor - other[name]).abs().max()) for name, tensor in one.items()}
    assert {name: most for name, most in differing.items() if most} == {}


@pytest.mark.parametrize("strategy", some(STRATEGIES, "zero 2"))
def test_they_stop_on_several_ranks_too(stopped, train, strategy, tmp_path):
    options, run = stopped
    shutil.copytree(run / "checkpoints/step-00000001", tmp_path / "run" / "checkpoints/step-00000001")
    code, output = train(tmp_path / "run", **options | STRATEGIES[strategy] | {"validation_step_interval": 0})
    assert code == 0, output
    before, one, other = tensors(run, 1), tensors(run, 4), tensors(tmp_path / "run", 4)
    assert apart(one, before) > 20 * apart(one, other)
    still = [(found[name], other[name]) for found in [tensors(tmp_path / "run", 2)] for name in encoders(other)]
    assert all(torch.equal(*pair) for pair in still)


def plain(layer):
    """The name of a layer without the part that some versions of transformers leave out."""
    return layer.replace("text_model.", "")


@pytest.mark.parametrize("format", some(["diffusers", "kohya"], "kohya"))
def test_an_export_of_encoders_that_stopped_has_them_as_they_stopped(stopped, base, capsys, tmp_path, format):
    _, run = stopped
    code, _, error = commands(capsys, "checkpoint", "export")(run, "--raw", "--to", tmp_path / "style", f"--format={format}")
    assert code == 0, error
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.load_lora_weights(tmp_path / "style", adapter_name="style")
    read = {}
    for part in ("unet", "text_encoder", "text_encoder_2"):
        for name, module in getattr(pipeline, part).named_modules():
            if hasattr(module, "lora_A"):
                layer = name if part == "unet" else plain(f"{part}.{name}")
                read[layer] = module.get_delta_weight("style").detach()
    expected = {}
    for step, chosen in ((2, True), (4, False)):  # the encoders learned in two steps, the model in four
        found = tensors(run, step)
        for name, down in found.items():
            layer, _, matrix = name.partition(".lora_")
            if matrix[0] == "A" and name.startswith("text_encoder") == chosen:
                up = found[name.replace(".lora_A.", ".lora_B.")]
                expected[plain(layer)] = 2 * (up.flatten(1) @ down.flatten(1)).view(len(up), *down.shape[1:])
    assert read.keys() == expected.keys()
    assert len(encoders(expected)) == 4 * 3
    for layer, change in expected.items():
        torch.testing.assert_close(read[layer], change, msg=lambda text, layer=layer: f"{layer}: {text}")
        assert float(change.abs().max()) > 1e-3


@pytest.mark.parametrize("format", ["diffusers", "kohya"])
def test_a_pipeline_with_the_exported_adapter_draws_what_the_run_drew(first, base, capsys, tmp_path, format):
    code, _, error = commands(capsys, "checkpoint", "export")(first, "--to", tmp_path / "style", f"--format={format}")
    assert code == 0, error
    pipeline = DiffusionPipeline.from_pretrained(base)
    assert difference(pipeline, first, step=0, edge=32) <= 1
    assert difference(pipeline, first, edge=32) > 2
    pipeline.load_lora_weights(tmp_path / "style")
    assert difference(pipeline, first, edge=32) <= 1
    pipeline.text_encoder.disable_adapters()
    pipeline.text_encoder_2.disable_adapters()
    assert difference(pipeline, first, edge=32) > 2
