"""Runs of LoKr, LoHa and DoRA, which has two rates: resumed in replicas, in shards, under ZeRO 3, and over a streamed base."""

import json
import shutil

import pytest
import tiny
from test_lora import SEVERAL, apart, tensors

from support.whole import some

OPTIONS = {
    "model_family": "flux",
    "model_type": "lora",
    "lora_rank": 4,
    "lora_alpha": 8,
    "learning_rate": 5e-2,
    "checkpoint_step_interval": 1,
    "validation_step_interval": 0,
}
KINDS = {"dora": {"loraplus_lr_ratio": 4}, "lokr": {"lokr_factor": 4, "lora_rank_pattern": "to_k=2"}, "loha": {}}
TIMED = {"lora_kind": "lora", "tlora_min_rank": 1, "lora_init": "orthogonal", "gradient_checkpointing": True}
ZERO3 = json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
STRATEGIES = {
    "replicas": {},
    "shards": {"fsdp_enable": True},
    "zero 3": {"deepspeed_config": ZERO3},
    "streamed": {"stream_base": True, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.flux(tmp_path_factory.mktemp("kinds") / "base")


@pytest.fixture(scope="module")
def first(base, train, pictures, request):
    """Two steps of one process; the second half of the pictures is regularisation data."""
    entries, run = base.parent / "datasets.json", base.parent / request.param
    folder = {"instance_data_dir": str(pictures)}
    entries.write_text(json.dumps([{"id": "a", **folder}, {"id": "b", "is_regularisation_data": True, **folder}]))
    options = {**OPTIONS, "lora_kind": request.param, "pretrained_model_name_or_path": base} | RUNS[request.param]
    options |= {"instance_data_dir": None, "data_backend_config": entries}
    code, output = train(run, **options)
    assert code == 0, output
    return run, options


RUNS = {**KINDS, "tlora": TIMED}
CASES = [*((kind, each) for kind in KINDS for each in STRATEGIES), ("tlora", "shards"), ("tlora", "zero 3")]
KEPT = (("dora", "shards"),)


@pytest.mark.parametrize(("first", "strategy"), some(CASES, *KEPT), indirect=["first"])
def test_the_second_step_of_one_process_is_that_of_two(first, train, strategy, tmp_path):
    run, options = first
    shutil.copytree(run / "checkpoints" / "step-00000001", tmp_path / "run" / "checkpoints" / "step-00000001")
    code, output = train(tmp_path / "run", **options | SEVERAL | STRATEGIES[strategy])
    assert (code, "at step 1" in output) == (0, True), output
    before, one, other = tensors(run, 1), tensors(run, 2), tensors(tmp_path / "run", 2)
    ratio = options.get("loraplus_lr_ratio", 1)
    steps = {name: float(each.abs().max()) for name, each in before.items() if ".lora_B." in name}  # from zero, in one step
    assert all(step == pytest.approx(ratio * 5e-2, rel=1e-3) for step in steps.values())
    assert apart(one, before) > 20 * apart(one, other)
