"""What Accelerate's `save_state` writes under DeepSpeed becomes a checkpoint of smalti's, bit for bit."""

import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from smalti import CheckpointError, World
from smalti.checkpoint.format.verification import verify
from smalti.parallel.gloo import GlooCommunicator
from smalti_deepspeed.conversion import open_deepspeed
from smalti_deepspeed.formats import FORMATS
from smalti_deepspeed.startup import start_deepspeed, stop_deepspeed
from smalti_migrate.checkpoints.convert import convert
from smalti_testing import TinyFamily, check_checkpoint_format
from smalti_testing.strategy_subject import whole_state
from support.forked_ranks import forked_processes
from support.whole import some

KINDS = {(stage, ranks) for stage in (1, 2, 3) for ranks in (1, 2, 3)} - {(1, 1), (1, 3), (2, 2)}
"""Stage and number of ranks. Hardly a size of the model divides by two or three."""
CHECKED = some(KINDS, (1, 2), (2, 1), (2, 3), (3, 2), (3, 3))
STEPS = 3


def save_state(stage: int, ranks: int, port: int, folder: Path) -> bool:
    """Train a little with Accelerate on the first `ranks` processes, and save; beside it, what was saved.

    Whether DeepSpeed's own tool reads the same weights.
    """
    place = int(os.environ["RANK"])
    if place >= ranks:
        return True
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=place, world_size=ranks)
    start_deepspeed(World(rank=place, size=ranks, local_rank=place, local_size=ranks))
    try:
        return _train_and_save(stage, folder)
    finally:
        stop_deepspeed()
        dist.destroy_process_group()


def _train_and_save(stage: int, folder: Path) -> bool:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from smalti_deepspeed.portable import ZeroState
    from smalti_deepspeed.zero import zero_of

    accelerator = _accelerator(stage)
    family = TinyFamily()
    torch.manual_seed(1)
    bare = family.build_model()
    groups = [
        {"params": [each for each in bare.parameters() if each.dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in bare.parameters() if each.dim() == 1], "weight_decay": 0.0},
    ]
    model, optimizer = accelerator.prepare(bare, torch.optim.AdamW(groups, lr=0.01))
    for step in range(STEPS):
        random = torch.Generator().manual_seed(10 * step + accelerator.process_index)
        pixels = torch.randn(2, 3, 4, 6, generator=random)
        words = family.encode_captions([f"picture {step}", "another"])
        loss = (family.forward(model, pixels, torch.tensor([100.0, 900.0]), words) - pixels).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder / "theirs"))
    world = World(rank=accelerator.process_index, size=accelerator.num_processes)
    communicator = GlooCommunicator(world=world, group=dist.group.WORLD)
    state = ZeroState(model.module, model.basic_optimizer, zero_of(model), communicator).portable()
    expected = whole_state(state)
    dist.barrier()
    if accelerator.process_index:
        return True
    save_file(expected, folder / "expected.safetensors")
    read = get_fp32_state_dict_from_zero_checkpoint(str(folder / "theirs"), tag="pytorch_model")
    return read.keys() < expected.keys() and all(torch.equal(tensor, expected[name]) for name, tensor in read.items())


def _accelerator(stage: int):
    """Accelerate with DeepSpeed on processors, which it does not offer: it takes DeepSpeed for a thing of accelerators."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(cpu=True)
    state.distributed_type, state._cpu = DistributedType.DEEPSPEED, False
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10_000}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "steps_per_print": None}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 1.0}
    return Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder for each kind; and those of which DeepSpeed's own tool reads what the ranks had."""
    root, agreed = tmp_path_factory.mktemp("made"), set()
    with forked_processes(ranks=3, group=False, imports=["support.zero_ranks"]) as processes:
        for stage, ranks in sorted(CHECKED, key=lambda kind: -kind[1]):  # whoever trains together needs the same history
            folder = root / f"{stage} on {ranks}"
            folder.mkdir()
            if all(processes.run(save_state, stage, ranks, free_port(), folder)):
                agreed.add((stage, ranks))
    return root, agreed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("stage", "ranks"), sorted(CHECKED))
def test_weights_and_moments_are_those_that_the_ranks_had(made, stage, ranks):
    root, agreed = made
    source = open_deepspeed(root / f"{stage} on {ranks}" / "theirs")
    expected = {
        ("optimizer/" if name.endswith((".exp_avg", ".exp_avg_sq", ".step")) else "model/") + name: tensor.numpy().tobytes()
        for name, tensor in load_file(root / f"{stage} on {ranks}" / "expected.safetensors").items()
    }
    found = {name: b"".join(source.read(name)) for name in source.contents.tensors}
    assert found == expected
    assert found["optimizer/enter.weight.step"] == torch.tensor(float(STEPS)).numpy().tobytes()
    assert (stage, ranks) in agreed


def test_the_format_keeps_the_contract(made, tmp_path):
    stage, ranks = min(CHECKED)
    check_checkpoint_format(open_deepspeed, made[0] / f"{stage} on {ranks}" / "theirs", tmp_path)


@pytest.mark.parametrize(("stage", "ranks"), sorted(CHECKED))
def test_step_optimizer_and_its_settings_are_told(made, stage, ranks):
    contents = open_deepspeed(made[0] / f"{stage} on {ranks}" / "theirs").contents
    groups = [(group["lr"], group["weight_decay"]) for group in contents.param_groups]
    assert (contents.step, contents.optimizer, groups) == (STEPS, "AdamW", [(0.01, 0.1), (0.01, 0.0)])


def test_what_accelerate_wrote_is_known_by_its_files_and_becomes_a_whole_checkpoint(made, tmp_path):
    done = convert(made[0] / "3 on 3" / "theirs", tmp_path / "ours", FORMATS)
    assert (done.source_format, done.step, verify(done.path).ok) == ("deepspeed", STEPS, True)


def test_what_latest_names_must_be_there(made, tmp_path):
    folder = shutil.copytree(made[0] / "2 on 1" / "theirs", tmp_path / "theirs")
    (folder / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match="names global_step9, which is incomplete or missing; there is pytorch_model"):
        open_deepspeed(folder)
    assert open_deepspeed(folder / "pytorch_model").contents.step == STEPS


def test_wrong_notes_of_places_are_not_read(made, tmp_path):
    folder = shutil.copytree(made[0] / "2 on 1" / "theirs", tmp_path / "theirs")
    file = folder / "pytorch_model" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="round_robin_gradients"):
        open_deepspeed(folder)


def test_bytes_that_were_overwritten_are_found_and_the_file_named(made, tmp_path):
    folder = shutil.copytree(made[0] / "3 on 3" / "theirs", tmp_path / "theirs")
    file = sorted(folder.glob("*/*optim_states.pt"))[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"{file.name} is damaged: .* does not match its checksum"):
        open_deepspeed(folder)


def test_a_file_that_is_cut_off_is_named(made, tmp_path):
    folder = shutil.copytree(made[0] / "3 on 3" / "theirs", tmp_path / "theirs")
    file = sorted(folder.glob("*/*optim_states.pt"))[-1]
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged"):
        open_deepspeed(folder)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_ranks_of_different_steps_are_refused(made, tmp_path, what):
    folder = shutil.copytree(made[0] / "3 on 3" / "theirs", tmp_path / "theirs")
    file = sorted(folder.glob("*/*model_states.pt" if what == "model" else "*/*optim_states.pt"))[-1]
    content = torch.load(file, weights_only=False)
    if what == "model":
        content["global_steps"] += 5
    else:
        for state in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state["step"] += 5
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="is inconsistent"):
        open_deepspeed(folder)


@pytest.mark.parametrize("how", [shutil.copy, os.rename])
@pytest.mark.parametrize(("stage", "what"), [(1, "optim"), (3, "optim"), (3, "model")])
def test_the_file_of_another_rank_is_refused(made, tmp_path, stage, what, how):
    folder = shutil.copytree(made[0] / f"{stage} on {2 if stage == 1 else 3}" / "theirs", tmp_path / "theirs")
    first, second, *_ = sorted(folder.glob(f"*/*zero_pp_rank_*_{what}_states.pt"))
    kept = shutil.copy(first, tmp_path)
    how(second, first)
    if how is os.rename:
        shutil.copy(kept, second)
    with pytest.raises(CheckpointError, match=rf"{first.name} is the file of another rank: it was saved as .*{second.name}"):
        open_deepspeed(folder)


def test_moments_in_the_form_of_elastic_checkpoints_are_told_of(made, tmp_path):
    folder = shutil.copytree(made[0] / "1 on 2" / "theirs", tmp_path / "theirs")
    for file in folder.glob("*/*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"]["base_optimizer_state"] = [{"exp_avg": torch.zeros(3)}]
        torch.save(content, file)
    assert any("elastic_checkpoint, which is not read" in notice for notice in open_deepspeed(folder).contents.notices)
