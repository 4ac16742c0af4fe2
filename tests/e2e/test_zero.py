"""A run under ZeRO is the run that one process would have made: losses, weights, average, pictures; any other can end it."""

import json

import psutil
import pytest
import torch

from smalti.checkpoint.assembly import TensorFiles

OPTIONS = {"use_ema": True, "allow_dataset_oversubscription": True, "max_grad_norm": 0.05, "checkpoint_step_interval": 4}
TWO = {"num_processes": 2, "use_cpu": True}
PROMPTS = [f"circle number {number}" for number in range(3)]
ADAM = {"type": "AdamW", "params": {"torch_adam": True}}


def zero(stage: int, *offloaded: str) -> dict[str, str]:
    """All parameters cut; what is offloaded is stepped by torch's Adam, which DeepSpeed need not compile."""
    offload = {f"offload_{each}": {"device": "cpu"} for each in offloaded}
    settings = {"stage": stage, "stage3_param_persistence_threshold": 0, **offload}
    return {"deepspeed_config": json.dumps({"zero_optimization": settings, "optimizer": ADAM})}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, train, start_for_module):
    """Twenty steps by one process; by ZeRO 3; and begun by ZeRO 2, killed, continued by FSDP, ended by one process."""
    root = tmp_path_factory.mktemp("zero")
    endless = {"train_batch_size": 6, "max_train_steps": 100_000, "checkpoint_async": False}
    begun = start_for_module(root / "chain", **OPTIONS, **TWO, **zero(2, "optimizer"), **endless)
    begun.wait_for_step(5)
    parent = psutil.Process(begun.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        process.kill()
    drawn = {"validation_prompt": PROMPTS, "max_train_steps": 20}
    sharded = {"fsdp_enable": True, "train_batch_size": 6, "max_train_steps": 16}
    return {
        "one": train(root / "one", **OPTIONS, **drawn, train_batch_size=12),
        "zero 3": train(
            root / "three", **OPTIONS, **TWO, **drawn, **zero(3), train_batch_size=3, gradient_accumulation_steps=2
        ),
        "fsdp": train(root / "chain", **OPTIONS, **TWO, **sharded),
        "chain": train(root / "chain", **OPTIONS, **drawn, train_batch_size=12),
    }


def whole(run, group: str) -> dict:
    folder = run.directory / "checkpoints" / "step-00000020" / group
    files = TensorFiles(sorted(folder.glob("*.safetensors")))
    return {name: torch.frombuffer(bytearray(files.read(name)), dtype=torch.float32) for name in files.tensors}


@pytest.mark.parametrize("kind", ["zero 3", "fsdp", "chain"])
def test_a_run_ends_well(runs, kind):
    assert runs[kind].code == 0, runs[kind].output


@pytest.mark.parametrize("kind", ["zero 3", "chain"])
def test_losses_are_those_of_one_process(runs, kind):
    assert runs[kind].losses[-4:] == pytest.approx(runs["one"].losses[-4:], rel=1e-5)


@pytest.mark.parametrize("kind", ["zero 3", "chain"])
@pytest.mark.parametrize("group", ["model", "ema"])
def test_weights_and_average_are_those_of_one_process(runs, kind, group):
    expected, found = whole(runs["one"], group), whole(runs[kind], group)
    assert expected.keys() == found.keys()
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) < 2e-5


def test_what_zero_began_was_gone_on_with(runs):
    assert "resuming from" in runs["fsdp"].output, runs["fsdp"].output
    assert "at step 16" in runs["chain"].output


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_pictures_are_those_of_one_process(runs, number):
    from PIL import Image, ImageChops

    expected, found = (
        Image.open(sorted((runs[kind].directory / "samples").glob(f"*20/{number:02d}-*.png"))[0]) for kind in ("one", "zero 3")
    )
    assert max(high for _, high in ImageChops.difference(expected, found).getextrema()) <= 1
