"""Checkpoints that torch and Accelerate write are read whole, and what was hidden in them is not run.

All of them are made by torch's and Accelerate's own code, on two processes, of one model in one state; smalti's own checkpoint
of that state is what they are compared with.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from PIL import Image
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from smalti import CheckpointError
from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.format.state_file import read_state
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.hookspecs import HookSpecs
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import capture
from smalti.plugins.discovery import load_plugins
from smalti.training.optim.optimizers import matrices, parameter_groups
from smalti.types import World
from smalti_fsdp2.conversion import open_accelerate, open_dcp
from smalti_fsdp2.dcp_metadata import read_metadata
from smalti_migrate.checkpoints.convert import convert
from smalti_toy.family import ToyShape, ToyTransformer
from support.forked_ranks import forked_processes

STEPS = 3
TOY = {"toy_width": 32, "toy_depth": 1, "toy_heads": 2}
PLACE = {"step": STEPS, "position": STEPS, "epoch": 0, "samples": 12}


# --- what the two processes make ------------------------------------------------------------------------------------


def make_all(root: Path) -> None:
    model, optimizer = trained(fully_shard, decay=0.02)
    communicator = GlooCommunicator(world=World(rank=dist.get_rank(), size=2), group=dist.group.WORLD)
    save(root / "own", Snapshot(step=STEPS, state=capture(model, optimizer), trainer=PLACE), communicator)

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "train": {"step": STEPS}}, checkpoint_id=root / "nested")
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"app": {"model": weights, "optim": state, "loss": torch.ones(1)}}, checkpoint_id=root / "flat")
    dcp.save({**weights, **state}, checkpoint_id=root / "top")
    dcp.save(weights, checkpoint_id=root / "weights")
    accelerate_saves(root, 2, model, optimizer, "SHARDED_STATE_DICT")
    accelerate_saves(root, 2, model, optimizer, "FULL_STATE_DICT")

    # Version 1 has vectors of everything, so what decays cannot be chosen there by shape.
    save(root / "own without decay", Snapshot(step=STEPS, state=capture(*trained(fully_shard, decay=0.0))), communicator)
    model, optimizer = trained(version_1, decay=0.0)
    accelerate_saves(root, 1, model, optimizer, "SHARDED_STATE_DICT")


def version_1(model):
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


def trained(sharded, decay):
    torch.manual_seed(1)
    shape = ToyShape(width=TOY["toy_width"], depth=TOY["toy_depth"], heads=TOY["toy_heads"])
    model = ToyTransformer(shape)
    decayed = matrices(model)
    model = sharded(model) or model
    groups = parameter_groups(model, decay, decayed)
    optimizer = torch.optim.AdamW([{**group, "params": [each for _, each in group["params"]]} for group in groups], lr=0.01)
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        noisy, words = torch.randn(2, 3, 8, 8, generator=random), torch.randint(0, 4096, (2, 16), generator=random)
        (model(noisy, torch.tensor([100.0, 900.0]), words) - noisy).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def accelerate_saves(root, version, model, optimizer, kind):
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    folder = root / f"accelerate {version} {kind.partition('_')[0].lower()}"
    save_fsdp_model(plugin, PartialState(cpu=True), model, folder)
    save_fsdp_optimizer(plugin, PartialState(cpu=True), optimizer, model, folder)
    dist.barrier()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder with all of them."""
    root = tmp_path_factory.mktemp("made")
    with forked_processes(seconds=180) as processes:
        processes.run(make_all, root)
    return root


@pytest.fixture(scope="module")
def own(made):
    return made / "own" / f"step-{STEPS:08d}"


@pytest.fixture(scope="module")
def formats():
    return load_plugins().gather(HookSpecs.register_checkpoint_formats)


def tensors(path):
    """All tensors of a checkpoint as bytes, by group and name."""
    found = {}
    for group in ("model", "optimizer"):
        files = TensorFiles(sorted((path / group).glob("*.safetensors")))
        found |= {(group, name): (each.dtype, each.shape, bytes(files.read(name))) for name, each in files.tensors.items()}
    return found


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nested", "flat", "top", "accelerate 2 sharded", "accelerate 2 full"])
def test_weights_and_moments_are_what_smalti_would_have_saved_bit_for_bit(made, own, kind):
    source = (open_accelerate if kind.startswith("accelerate") else open_dcp)(made / kind)
    found = {
        tuple(name.split("/")): (t.dtype, t.shape, b"".join(source.read(name))) for name, t in source.contents.tensors.items()
    }
    assert found == tensors(own)
    assert (source.contents.step, source.contents.optimizer) == (STEPS, "AdamW")
    assert sorted((group["lr"], group["weight_decay"]) for group in source.contents.param_groups) == [(0.01, 0.0), (0.01, 0.02)]


def test_fsdp_of_version_1_as_accelerate_saves_it_is_read_under_the_names_of_the_plain_model(made, own, formats, tmp_path):
    found = tensors(convert(made / "accelerate 1 sharded", tmp_path / "converted", formats).path)
    expected = tensors(made / "own without decay" / own.name)
    assert found.keys() == expected.keys()
    for name, (dtype, shape, data) in expected.items():
        assert found[name][:2] == (dtype, shape)
        numbers = (torch.frombuffer(bytearray(each), dtype=torch.float32) for each in (found[name][2], data))
        torch.testing.assert_close(*numbers, rtol=1e-4, atol=1e-5)


def test_weights_alone_are_read_without_moments_and_say_so(made, own):
    contents = open_dcp(made / "weights").contents
    assert contents.tensors.keys() == {f"model/{name}" for group, name in tensors(own) if group == "model"}
    assert contents.notices == (
        "it has no optimizer state: a run that resumes starts with a new one",
        "its step is not known: step 0",
    )


def test_what_has_no_place_in_a_checkpoint_is_told(made):
    assert open_dcp(made / "flat").contents.notices[-1] == "left out: app"


def test_plain_safetensors_come_out_as_well(made, own, formats, tmp_path):
    done = convert(made / "nested", tmp_path / "plain", formats, to="safetensors")
    found = load_file(done.path / "diffusion_pytorch_model.safetensors")
    expected = {name: data for (group, name), (_, _, data) in tensors(own).items() if group == "model"}
    assert {name: tensor.numpy().tobytes() for name, tensor in found.items()} == expected


def test_a_folder_without_weights_is_refused(made):
    with pytest.raises(CheckpointError, match="has no weights"):
        open_dcp(made / "accelerate 2 sharded" / "optimizer_0")


# --- what is not run ------------------------------------------------------------------------------------------------


class Payload:
    """Whoever unpickles this makes the canary."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mknod, (str(self.canary),)


@pytest.mark.parametrize(("protocol", "wrapped"), [(0, False), (2, False), (2, True), (4, True), (5, True)])
def test_a_pickle_in_place_of_the_metadata_is_refused_by_name_and_not_run(tmp_path, protocol, wrapped):
    payload = Payload(tmp_path / "canary")
    body = Metadata(state_dict_metadata={}, planner_data={"x": payload}, storage_data={}) if wrapped else payload
    (tmp_path / ".metadata").write_bytes(pickle.dumps(body, protocol=protocol))
    with pytest.raises(CheckpointError, match=r"it asks for posix\.mknod, which has no place there; nothing of it was run"):
        read_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "canary").exists()


def test_reading_metadata_imports_no_torch(made):
    code = "import sys, pathlib; from smalti_fsdp2.dcp_metadata import read_metadata; read_metadata(pathlib.Path(sys.argv[1]))"
    code += "\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, made / "nested" / ".metadata"]).returncode == 0


@pytest.fixture
def copied(made, tmp_path):
    """copied(kind) -> a copy of that checkpoint, to be damaged."""
    return lambda kind: Path(shutil.copytree(made / kind, tmp_path / "copy"))


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "optimizer.bin"])
def test_a_pickle_in_place_of_tensors_is_refused_by_name_and_not_run(copied, tmp_path, name):
    folder = copied("accelerate 2 full")
    torch.save({"w": Payload(tmp_path / "canary")}, folder / name)
    with pytest.raises(CheckpointError, match=rf"{name} is damaged, or has more .* posix\.mknod"):
        open_accelerate(folder)
    assert not (tmp_path / "canary").exists()


def test_a_pickle_in_the_place_of_a_shard_is_refused_by_name_and_not_run(copied, formats, tmp_path):
    # In the older form of torch's files, which may be followed by anything.
    torch.save(Payload(tmp_path / "canary"), tmp_path / "payload", _use_new_zipfile_serialization=False)
    payload = (tmp_path / "payload").read_bytes()
    folder, name = copied("nested"), ("model", "words.weight")
    for chunk in read_metadata(folder / ".metadata")[name].chunks:
        with (folder / chunk.span.file).open("r+b") as file:
            file.seek(chunk.span.offset)
            file.write(payload.ljust(chunk.span.length, b"\0"))
    with pytest.raises(CheckpointError, match=r"posix\.mknod"):
        convert(folder, tmp_path / "converted", formats)
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "converted").exists()


def changed(folder, old, new):
    metadata = folder / ".metadata"
    data = metadata.read_bytes()
    assert old in data
    metadata.write_bytes(data.replace(old, new))
    return folder


def test_shards_outside_the_folder_are_refused(copied):
    with pytest.raises(CheckpointError, match="is not the name of a file beside it"):
        open_dcp(changed(copied("nested"), b"__0_0.distcp", b"../../.distc"))


def test_a_shard_that_is_lost_is_named(copied):
    folder = copied("weights")
    (folder / "__1_0.distcp").unlink()
    source = open_dcp(folder)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp cannot be read: No such file"):
        source.read("model/words.weight")


def test_metadata_that_were_cut_off_are_refused(copied):
    metadata = copied("nested") / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not valid metadata"):
        open_dcp(metadata.parent)


def test_chunks_that_do_not_fill_their_tensor_are_refused_before_any_memory_is_taken(copied):
    folder = copied("nested")
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    name = next(name for name in metadata.state_dict_metadata if name.endswith("words.weight"))
    metadata.state_dict_metadata[name].size = torch.Size([2**40, 2**10])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    source = open_dcp(folder)
    with pytest.raises(CheckpointError, match="do not fill it"):
        source.read("model/words.weight")


# --- from one end to the other --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """A run to its end, on four pictures a step."""
    from support.warm_processes import warm_processes  # not there in the processes that run the functions of this file

    pictures = tmp_path_factory.mktemp("pictures")
    for number in range(8):
        Image.new("RGB", (16, 16), (number * 30, 255 - number * 30, 128)).save(pictures / f"{number}.png")
        (pictures / f"{number}.txt").write_text(f"colour {number}")

    def start(directory: Path, **options) -> str:
        given = {
            **TOY,
            "model_family": "toy",
            "resolution": 16,
            "resolution_type": "pixel",
            "mixed_precision": "no",
            "use_cpu": True,
            "train_batch_size": 4,
            "learning_rate": 0.01,
            "max_train_steps": 6,
            "checkpoint_step_interval": 0,
            "instance_data_dir": pictures,
            "output_dir": directory,
            **options,
        }
        words = [f"--{name}={value}" for name, value in given.items()]
        code, output = warm_processes().train(words, {"HF_HOME": str(directory.parent / "hf")})
        assert code == 0, output
        return output

    return start


def test_a_run_goes_on_from_what_torch_saved_as_from_smaltis_own_checkpoint(made, own, formats, tmp_path, train):
    converted = convert(made / "nested", tmp_path / "converted", formats).path
    said = train(tmp_path / "a", resume_from_checkpoint=converted)
    train(tmp_path / "b", resume_from_checkpoint=own)
    assert "the checkpoint tells no place in the data; as each step takes one batch, 3 are left out" in said
    ends = [tmp_path / run / "checkpoints" / "step-00000006" for run in "ab"]
    assert tensors(ends[0]) == tensors(ends[1])
    trainers = [dict(read_state(end / "state.json").trainer) for end in ends]
    assert trainers[0] == trainers[1]


def test_hook_save_checkpoint_adds_the_copy_to_what_a_run_with_full_state_dict_saves(tmp_path, train, formats):
    train(
        tmp_path / "run",
        num_processes=2,
        train_batch_size=2,
        max_train_steps=2,
        fsdp_enable=True,
        fsdp_state_dict_type="full",
    )
    path = tmp_path / "run" / "checkpoints" / "step-00000002"
    copy = load_file(path / "weights" / "diffusion_pytorch_model.safetensors")
    expected = {name: data for (group, name), (_, _, data) in tensors(path).items() if group == "model"}
    assert {name: tensor.numpy().tobytes() for name, tensor in copy.items()} == expected
    assert verify(path).ok
    assert json.loads((path / "manifest.json").read_text())["world_size"] == 2
