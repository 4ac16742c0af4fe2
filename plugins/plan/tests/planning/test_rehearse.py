"""Rehearsals as the planner asks for them: in a process of their own, kept, with errors as the run would report them."""

import json
from dataclasses import replace

import pytest

from planning.conftest import COMMON, as_words
from planning.measured import rehearsed
from planning.pipelines import PIPELINES
from smalti import World
from smalti.cli.arguments import CommandLine
from smalti.parallel import device_models
from smalti_plan import counted
from smalti_plan.counted import facts_of
from smalti_plan.formulas.run_facts import RunFacts
from smalti_plan.limit.search import Search
from smalti_plan.records import Candidate
from smalti_plan.refine import rehearsed as rehearsed_way
from smalti_plan.rehearsal.rehearse import rehearse
from smalti_plan.rehearsal.request import values_for
from support.forked_ranks import forked_processes
from support.whole import only_whole

SHARDED = {**COMMON, "mixed_precision": "bf16", "num_processes": 16, "fsdp_enable": "true", "use_ema": "true"}


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """asked(**more) -> the rehearsal of a sharded run on two nodes of eight GPUs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = as_words({**SHARDED, "instance_data_dir": tmp_path, "output_dir": tmp_path / "run"})
    command_line = CommandLine.parse(words)

    def ask(**more):
        device = device_models()["h100-80g"]
        candidate = Candidate(strategy="fsdp2", micro_batch=2)
        return rehearse(command_line.config(), command_line.plugins, device, candidate, ranks=16, rank=9, **more)

    return ask


def test_a_rehearsal_on_gpus_that_are_not_there_is_kept(asked, tmp_path):
    first = asked()
    assert first.error is None
    assert first.guard == "extension"
    traffic = {(each.phase, each.collective, each.ranks, each.nodes): each.bytes for each in first.traffic}
    assert traffic["forward", "all_gather", 8, 1] >= 2 * first.parameters, "in bf16, within a node"
    assert traffic["backward", "reduce_scatter", 8, 1] >= 4 * first.parameters, "in fp32, within a node"
    assert traffic["backward", "all_reduce", 2, 2] == pytest.approx(4 * first.parameters / 8, rel=0.01), "between nodes"
    assert {each.kind for each in first.operations} == {"matmul", "attention"}, "by a kernel, without a matrix of scores"
    assert first.resident.optimizer > 2 * first.resident.parameters
    assert first.phases["validation"].device.total > first.resident.total, "the weights of training are kept beside the average"
    without = asked(extension=False, cached=False)
    assert without.guard == "python"
    assert without.error is not None
    assert without.error.message.endswith("fix: install g++")
    [kept] = (tmp_path / "cache").rglob("rehearsals.json")
    assert asked() == first, "without a second process, which would have taken other seconds"
    assert kept.stat().st_size < 64 * 1024


def test_zero_with_its_optimizer_offloaded_is_rehearsed_without_what_it_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    zero = json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}})
    words = as_words({**COMMON, "mixed_precision": "bf16", "instance_data_dir": tmp_path, "output_dir": tmp_path / "run"})
    command_line = CommandLine.parse(words)
    candidate = Candidate(strategy="deepspeed", options={"deepspeed_config": zero})
    device = device_models()["h100-80g"]
    rehearsal = rehearse(command_line.config(), command_line.plugins, device, candidate, ranks=8, rank=3)
    assert rehearsal.error is None
    assert rehearsal.resident.optimizer == 0
    assert rehearsal.resident_host >= (4 + 8) * rehearsal.trainable / 8, "fp32 weights and the state of AdamW"
    assert rehearsal.resident.parameters < 2 * rehearsal.parameters, "less than a whole copy in bf16"


def test_one_rank_with_its_weights_in_host_memory_is_rehearsed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = {"mixed_precision": "bf16", "instance_data_dir": tmp_path, "output_dir": tmp_path / "run", "num_processes": 1}
    command_line = CommandLine.parse(as_words({**COMMON, **given, "fsdp_enable": "true", "fsdp_cpu_offload": "true"}))
    candidate = Candidate(strategy="fsdp2-offload")
    device = device_models()["rtx4090"]
    rehearsal = rehearse(command_line.config(), command_line.plugins, device, candidate, ranks=1, rank=0)
    assert rehearsal.error is None
    assert (rehearsal.resident.parameters, rehearsal.resident.optimizer) == (0, 0)
    assert rehearsal.resident_host >= (4 + 8) * rehearsal.trainable, "fp32 weights and the state of AdamW"


@only_whole(
    "tests/accelerators/test_streamed.py::test_shards_take_no_memory_of_the_device_and_come_as_one_copy_for_each_gather"
)
def test_shards_of_a_frozen_base_in_host_memory_are_rehearsed(tmp_path, monkeypatch):
    import tiny

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny.flux(tmp_path / "pipeline")
    own = {name: value for name, value in COMMON.items() if not name.startswith("toy")}
    own |= {"model_family": "flux", "pretrained_model_name_or_path": tmp_path / "pipeline", "tokenizer_max_length": 32}
    own |= {"model_type": "lora", "lora_rank": 4, "mixed_precision": "bf16", "resolution": 64, "num_processes": 4}
    sharded = {"fsdp_enable": "true", "fsdp_shard_size": 4, "fsdp_activation_checkpointing": "true"}
    words = as_words({**own, **sharded, "instance_data_dir": tmp_path, "output_dir": tmp_path / "run"})
    command_line, device, found = CommandLine.parse(words), device_models()["rtx4090"], []
    for options in ({}, {"stream_base": True}):
        candidate = Candidate(strategy="fsdp2", options=options)
        found.append(rehearse(command_line.config(), command_line.plugins, device, candidate, ranks=4, rank=1))
    resident, streamed = found
    assert (resident.error, streamed.error) == (None, None)
    moved = resident.resident.parameters - streamed.resident.parameters
    assert moved == pytest.approx(streamed.resident_host - resident.resident_host, rel=0.25), "but for what is rounded up"
    assert streamed.resident.optimizer == resident.resident.optimizer > 0, "what trains is on the device"
    assert streamed.peak.total < resident.peak.total


def test_a_pipeline_without_weights_is_enough(tmp_path):
    import tiny

    folder = tmp_path / "pipeline"
    tiny.flux(folder)
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    flags = {"model_family": "flux", "pretrained_model_name_or_path": folder, "resolution": 64, "tokenizer_max_length": 32}
    own = {name: value for name, value in COMMON.items() if not name.startswith("toy")} | flags
    words = as_words(
        {**own, "instance_data_dir": tmp_path, "output_dir": tmp_path / "run"}, ["use_cpu", "gradient_checkpointing"]
    )
    with forked_processes(ranks=1, group=False, imports=PIPELINES[:1]) as process:
        [rehearsal] = process.run(rehearsed, words, micro_batch=2)
    assert rehearsal.error is None
    assert rehearsal.text_tokens == 32
    assert {"encode texts", "encode images", "validation"} <= rehearsal.phases.keys()
    assert rehearsal.phases["encode texts"].device.frozen > 0


@only_whole("plugins/plan/tests/planning/test_models.py::test_a_rehearsal_counts_the_bytes_of_real_ranks")
def test_the_passes_over_pairs_of_images_are_rehearsed(tmp_path):
    import tiny

    folder, datasets = tmp_path / "pipeline", tmp_path / "datasets.json"
    tiny.flux(folder)
    entry = {"id": "pairs", "instance_data_dir": str(tmp_path / "better"), "rejected_path": str(tmp_path / "worse")}
    datasets.write_text(json.dumps([entry]))
    flags = {"model_family": "flux", "pretrained_model_name_or_path": folder, "resolution": 64, "tokenizer_max_length": 32}
    own = {name: value for name, value in COMMON.items() if not name.startswith("toy")} | flags | {"model_type": "lora"}
    given = as_words({**own, "data_backend_config": datasets, "output_dir": tmp_path / "run"}, ["use_cpu", "vae_cache_disable"])
    found = []
    for more in ((), ("--dpo_beta=2000",)):
        with forked_processes(ranks=1, group=False, imports=PIPELINES[:1]) as process:
            [rehearsal] = process.run(rehearsed, [*given, *more], micro_batch=2)
        assert rehearsal.error is None
        found.append(sum(each.flops for each in rehearsal.operations if each.kind == "matmul"))
    assert 2 < found[1] / found[0] < 4, "four forward and two backward passes in place of one of each"


@pytest.mark.parametrize(("given", "taken"), [({}, "bf16"), ({"mixed_precision": "no"}, "no")])
def test_the_precision_is_that_of_the_devices_whatever_this_processor_computes(tmp_path, given, taken):
    words = as_words({**COMMON, "instance_data_dir": tmp_path, "output_dir": tmp_path / "run", **given})
    words = [word for word in words if given or not word.startswith("--mixed_precision")]
    assert values_for(CommandLine.parse(words).config(), "cuda")["mixed_precision"] == taken


def failing(words):
    """A rehearsal in which the model of the family fails."""
    import smalti_toy.family

    def forward(self, *inputs):
        return inputs[0] @ inputs[0].new_empty(3, 5)

    smalti_toy.family.ToyTransformer.forward = forward
    return rehearsed(words)


def test_an_error_of_the_run_is_told_with_its_line(tmp_path):
    words = as_words({**COMMON, "instance_data_dir": tmp_path, "output_dir": tmp_path / "run"}, ["use_cpu"])
    with forked_processes(ranks=1, group=False) as process:
        [rehearsal] = process.run(failing, words)
    assert rehearsal.error is not None
    assert rehearsal.error.phase == "step"
    assert "test_rehearse.py:" in rehearsal.error.where
    assert "in forward" in rehearsal.error.where


def test_the_peak_of_what_a_limit_has_chosen_is_below_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(counted, "_in_process", lambda request, config: counted.count(request))
    given = {"mixed_precision": "bf16", "instance_data_dir": tmp_path, "output_dir": tmp_path / "run", "resolution": 256}
    large = {"toy_width": 1024, "toy_depth": 4, "toy_heads": 16, "train_batch_size": 16}
    command_line = CommandLine.parse(as_words({**COMMON, **given, **large}))
    config, plugins = command_line.config(), command_line.plugins
    device = replace(device_models()["rtx4090"], memory=4 * 10**9)
    search = Search(
        config=config,
        plugins=plugins,
        model=facts_of(config, plugins, "cuda"),
        run=RunFacts.of(config, plugins, "cuda"),
        device=device,
        world=World(size=1, local_size=1, device="cuda"),
        host=64 * 2**30,
    )
    chosen = search.best()
    assert (chosen.fit.level, chosen.effective_batch) == ("fits", 16)
    ways = search.ways(())
    assert any(each.fit.level == "does not fit" and each.seconds < chosen.seconds for each in ways), "faster ones do not fit"
    found = rehearsed_way(chosen, config, plugins, device).counted
    assert found.counted == "rehearsed"
    assert max(each.device.total for each in found.phases.values()) <= device.memory
