"""Adapters on a tiny Flux: the same in one process, in replicas and in shards; small checkpoints; exact resume; export."""

import json
import shutil
from math import prod

import pytest
import tiny
import torch
from adapters import FAMILIES
from click.testing import CliRunner
from diffusers import DiffusionPipeline
from pictured import difference
from safetensors import safe_open

from smalti import UserError
from smalti.checkpoint.conversion.formats import OwnCheckpoint
from smalti.config.resolution import resolve
from smalti.models.weights import materialise, without_weights
from smalti.plugins.discovery import load_plugins
from smalti.plugins.lookup import find_family
from smalti.plugins.schema import schema_of
from smalti_diffusers.lora.adapter import adapter_shapes
from smalti_diffusers.sources.components import Components
from smalti_export.command import export as export_command
from smalti_export.folder import TrainedWeights
from smalti_testing import check_family
from smalti_testing.family_subject import CAPTIONS, FamilySubject
from support.whole import some

LORA = {
    "model_family": "flux",
    "model_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "learning_rate": 5e-2,
    "checkpoint_step_interval": 1,
    "use_ema": True,
    "validation_base_model": True,
}
SEVERAL = {"num_processes": 2, "train_batch_size": 2, "validation_step_interval": 0, "allow_dataset_oversubscription": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.flux(tmp_path_factory.mktemp("lora") / "base")


@pytest.fixture(scope="module")
def data(base, pictures):
    """Half of the pictures are regularisation data, for which the model is called another time without its adapter."""
    entries = base.parent / "datasets.json"
    folder = {"instance_data_dir": str(pictures)}
    entries.write_text(json.dumps([{"id": "a", **folder}, {"id": "b", "is_regularisation_data": True, **folder}]))
    return {"instance_data_dir": None, "data_backend_config": entries}


@pytest.fixture(scope="module")
def runs(base, train, data):
    """Two steps of the same batches: by one process, by two with replicas, with shards, and with the tokens of each picture."""
    tokens = {"context_parallel_size": 2, "train_batch_size": 4}
    kinds = {"one": {}, "replicas": SEVERAL, "shards": SEVERAL | {"fsdp_enable": True}, "tokens": SEVERAL | tokens}
    for kind, options in kinds.items():
        code, output = train(base.parent / kind, **LORA, **data, pretrained_model_name_or_path=base, **options)
        assert code == 0, output
    return base.parent


@pytest.mark.parametrize("kind", ["one", "replicas", "shards", "tokens"])
def test_the_image_of_the_base_model_is_that_of_its_pipeline(runs, base, kind):
    assert difference(DiffusionPipeline.from_pretrained(base), runs / kind, step=0) <= 1


@pytest.fixture(scope="module")
def exported(runs):
    target = runs / "adapter"
    done = CliRunner().invoke(export_command, [str(runs / "one"), "--to", str(target)])
    assert done.exit_code == 0, done.output
    return target / "pytorch_lora_weights.safetensors"


def tensors(run, step, *, averaged=False) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint."""
    trained = TrainedWeights(OwnCheckpoint(run / "checkpoints" / f"step-{step:08d}"), use_ema=averaged, precision="fp32")
    return {
        name: torch.frombuffer(trained.read(name), dtype=torch.float32).view(stored.shape)
        for name, stored in trained.tensors.items()
    }


def family(base, *flags, name="flux"):
    plugins = load_plugins()
    words = [f"--model_family={name}", f"--pretrained_model_name_or_path={base}", "--mixed_precision=no", *flags]
    return find_family(resolve(schema_of(plugins), words, environment={}), plugins)


def test_the_family_with_an_adapter_keeps_the_contract(base):
    check_family(family(base, "--model_type=lora", "--lora_rank=2", "--lora_targets=to_q,proj_out"))


@pytest.mark.parametrize("name", some(FAMILIES, "flux", "sdxl", "qwen_image"))
def test_an_adapter_of_any_family_changes_nothing_before_it_is_trained(tmp_path, name):
    folder = getattr(tiny, name)(tmp_path)
    predictions = []
    for kind in ("full", "lora"):
        subject = FamilySubject(family(folder, f"--model_type={kind}", name=name))
        model = materialise(subject.bare(), subject.family.weights(0), "cpu").eval()
        noisy = torch.randn(subject.latents.shape, generator=torch.Generator().manual_seed(0))
        predictions.append(subject.predict(model, noisy, [100.0, 500.0, 900.0], CAPTIONS).detach())
    assert len(model.peft_config) == 1
    assert float((predictions[0] - predictions[1]).abs().max()) < 1e-5
    blocks = [f"{name}." for name, module in model.named_modules() if type(module).__name__ in subject.family.block_classes()]
    outside = [name for name in adapter_shapes(model) if not name.startswith(tuple(blocks))]
    assert outside == []


def test_the_adapter_of_flux_is_in_attention_and_feed_forward_of_every_block(base):
    with without_weights():
        model = family(base, "--model_type=lora").build_model()
    adapted = {name.partition(".lora_")[0].partition("transformer_blocks.")[2][2:] for name in adapter_shapes(model)}
    attention = {"to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    feed_forward = {f"{part}.net.{layer}" for part in ("ff", "ff_context") for layer in ("0.proj", "2")}
    assert adapted == {f"attn.{layer}" for layer in attention} | feed_forward | {"proj_mlp", "proj_out"}


def test_a_checkpoint_holds_the_adapter_alone(runs, base):
    names = tensors(runs / "one", 2)
    assert {name.rpartition(".lora_")[2] for name in names} == {"A.default.weight", "B.default.weight"}
    whole = sum(prod(tensor.shape) for tensor in Components(base).build("transformer").state_dict().values())
    assert sum(tensor.numel() for tensor in names.values()) < whole / 4


@pytest.mark.parametrize("kind", ["replicas", "shards", "tokens"])
@pytest.mark.parametrize("averaged", [False, True])
def test_several_ranks_train_the_adapter_of_one(runs, kind, averaged):
    one, other = (tensors(runs / run, 2, averaged=averaged) for run in ("one", kind))
    assert one.keys() == other.keys()
    assert apart(one, other) < 2e-3


def apart(one, other) -> float:
    """The norm of the difference over the norm. A single weight tells little: Adam makes whole steps of tiny gradients."""
    ends, others = (torch.cat([found[name].flatten() for name in one]) for found in (one, other))
    return float((ends - others).norm() / ends.norm())


def test_a_sharded_run_goes_on_in_one_process(runs, base, train, data, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copytree(runs / "shards" / "checkpoints" / "step-00000001", tmp_path / "run" / "checkpoints" / "step-00000001")
    options = LORA | data | {"pretrained_model_name_or_path": base, "validation_step_interval": 0}
    code, output = train(tmp_path / "run", **options)
    assert (code, "at step 1" in output) == (0, True), output
    one, other = tensors(runs / "one", 2), tensors(tmp_path / "run", 2)
    assert apart(one, other) < 2e-3


def test_a_pipeline_with_the_exported_adapter_draws_what_the_run_drew(runs, base, exported):
    pipeline = DiffusionPipeline.from_pretrained(base)
    assert difference(pipeline, runs / "one") > 2
    pipeline.load_lora_weights(exported.parent)
    assert difference(pipeline, runs / "one") <= 1


def test_in_the_exported_file_alpha_is_the_rank_and_the_alpha_of_the_run_is_kept_beside(exported):
    with safe_open(exported, framework="pt") as file:
        metadata = file.metadata()
        assert all(name.startswith("transformer.") and "default" not in name for name in file.keys())  # noqa: SIM118
    described = json.loads(metadata["lora_adapter_metadata"])
    assert (described["transformer.r"], described["transformer.lora_alpha"], float(metadata["smalti_lora_alpha"])) == (4, 4, 8)


REFUSALS = {"lora_alpha": "16", "pretrained_model_name_or_path": "{other}"}


@pytest.mark.parametrize("changed", REFUSALS)
def test_an_adapter_that_would_mean_something_else_does_not_go_on(runs, base, train, data, tmp_path, changed):
    shutil.copytree(runs / "one", tmp_path / "run")
    other = shutil.copytree(base, tmp_path / "other")
    (weights,) = (other / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    options = LORA | {
        **data,
        "pretrained_model_name_or_path": base,
        "max_train_steps": 3,
        changed: REFUSALS[changed].format(other=other),
    }
    code, output = train(tmp_path / "run", **options)
    assert (code, "holds another adapter than this run trains" in output) == (8, True), output


FORMER_TARGETS = "to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out,proj_mlp,proj_out"
"""Those of Flux before its feed-forward layers were among them, and its last layer no longer."""


def test_an_adapter_of_other_layers_goes_on_only_where_they_are_named(base, train, tmp_path):
    options = LORA | {"pretrained_model_name_or_path": base, "validation_step_interval": 0}
    code, output = train(tmp_path / "run", **options, lora_targets=FORMER_TARGETS, max_train_steps=1)
    assert code == 0, output
    code, output = train(tmp_path / "run", **options, lora_targets="", max_train_steps=2)
    assert (code, "fix: set the options of the adapter (smalti train --help lora) as in the run that saved it" in output) == (
        8,
        True,
    ), output
    code, output = train(tmp_path / "run", **options, lora_targets=FORMER_TARGETS, max_train_steps=2)
    assert (code, "at step 1" in output) == (0, True), output


def test_what_is_frozen_is_kept_in_the_type_in_which_the_run_computes(base):
    lora = family(base, "--model_type=lora", "--mixed_precision=bf16")
    with without_weights():
        model = lora.build_model()
    model = materialise(model, lora.weights(1), "cpu")
    kinds = {(".lora_" in name, parameter.requires_grad, parameter.dtype) for name, parameter in model.named_parameters()}
    assert kinds == {(True, True, torch.float32), (False, False, torch.bfloat16)}


def test_the_first_adapters_differ_by_layer_and_by_seed_and_change_nothing(base):
    lora = family(base, "--model_type=lora", "--lora_init=gaussian")
    first, other = lora.weights(1), lora.weights(2)
    name = "transformer_blocks.{}.attn.to_q.lora_A.default.weight"
    drawn = [first.get(name.format(0)), first.get(name.format(1)), other.get(name.format(0))]
    assert not any(torch.equal(drawn[a], drawn[b]) for a, b in ((0, 1), (0, 2)))
    assert float(first.get(name.format(0).replace("lora_A", "lora_B")).abs().max()) == 0


@pytest.mark.parametrize(("targets", "reason"), [("to_nowhere", "no layer's name ends in"), ("norm_q", "does not fit")])
def test_targets_that_cannot_be_adapted_are_refused(base, targets, reason):
    with pytest.raises(UserError, match=reason):
        family(base, "--model_type=lora", f"--lora_targets={targets}").build_model()


def test_regularisation_data_needs_an_adapter(base, train, data, tmp_path):
    code, output = train(tmp_path / "run", **data, model_family="flux", pretrained_model_name_or_path=base)
    assert (code, "all weights are trained, so that model is not there any more" in output) == (2, True), output
    assert "dataset 'b'" in output
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_family_without_adapters_says_so():
    plugins = load_plugins()
    config = resolve(schema_of(plugins), ["--model_family=toy", "--model_type=lora"], environment={})
    with pytest.raises(UserError, match="the model family toy does not support LoRA"):
        find_family(config, plugins)
