"""The optimizers with state of their own, in runs: sharded, stopped, and continued on another number of ranks."""

import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from smalti_export.command import export
from support.whole import some

OPTIONS = {"toy_width": 64, "train_batch_size": 2, "learning_rate": 1e-4, "max_train_steps": 6, "adam_epsilon": 1e-3}
HALF = {"max_train_steps": 3}
SHARDED = {"num_processes": 2, "fsdp_enable": True}
WHOLE = {"gradient_accumulation_steps": 2}


OPTIMIZERS = ["adamw8bit", "stableadamw", "came", "adamw_schedulefree"]


@pytest.mark.parametrize("optimizer", some(OPTIMIZERS, "adamw8bit", "adamw_schedulefree"))
def test_a_run_on_two_ranks_continues_on_one_with_its_state(optimizer, tmp_path, train):
    options = {**OPTIONS, "optimizer": optimizer}
    straight = train(tmp_path / "straight", **options, **WHOLE)
    for more in ({**HALF, **SHARDED}, WHOLE):
        resumed = train(tmp_path / "resumed", **{**options, **more})
        assert resumed.code == 0, resumed.output
    assert resumed.losses == pytest.approx(straight.losses, rel=1e-4)
    state = resumed.tensors(6, "optimizer")
    large = next(name for name in state if name.endswith((".exp_avg", ".exp_avg_sq")) and state[name].numel() >= 64 * 64)
    if optimizer == "adamw_schedulefree":
        weights, average = resumed.tensors(6, "model"), resumed.tensors(6, "ema")
        name = next(name for name, weight in weights.items() if weight.numel() >= 64 * 64)
        assert torch.equal(average[name], weights[name].lerp(state[f"{name}.z"], 1 - 1 / 0.9))
        words = [str(resumed.directory), "--to", str(tmp_path / "made")]
        assert CliRunner(env={"SMALTI_PLUGINS": "toy,export"}).invoke(export, words).exit_code == 0
        assert torch.equal(load_file(tmp_path / "made" / "diffusion_pytorch_model.safetensors")[name], average[name])
        return
    assert state[large].dtype == (torch.uint8 if optimizer == "adamw8bit" else torch.float32)


def test_a_name_of_another_trainer_is_reported_and_its_settings_are_those_of_the_run(tmp_path, train):
    run = train(tmp_path / "run", **{**OPTIONS, **HALF, "optimizer": "optimi-lion", "adam_epsilon": 1e-8})
    assert run.code == 0, run.output
    assert "optimi-lion in optimizer is lion here with adam_beta2=0.99, adam_weight_decay=0" in run.output
    values = json.loads((run.directory / "launch.json").read_text())["values"]
    assert (values["optimizer"], values["adam_beta2"], values["adam_weight_decay"]) == ("lion", 0.99, 0.0)
