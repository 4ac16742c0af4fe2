"""The copy of the weights for other tools: what is in it, who loads it, what it costs; that it is part of the checkpoint."""

import errno
import json
import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from smalti.checkpoint.format.full_weights import write_weights
from smalti.checkpoint.format.manifest import read_manifest
from smalti.checkpoint.format.safetensors_reader import TensorFiles
from smalti.checkpoint.format.state_file import read_state
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import SaveError, save
from smalti.errors import CheckpointError
from smalti.models.setup import config_of
from smalti.parallel.collective import RankError, run_on_main_rank
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import PortableState
from smalti.types import World
from support.forked_ranks import forked_processes
from support.limits import files_limited_to

COPY = "weights/diffusion_pytorch_model.safetensors"
ALONE = GlooCommunicator(world=World(), group=None)
MEGABYTE = 2**20


def snapshot(tensors, step=1, config=""):
    return Snapshot(step=step, state=PortableState(model=tensors), model_config=config)


# --- two processes --------------------------------------------------------------------------------------------------

SPREAD = {
    "rows": ((5, 3), [Shard(0)]),
    "columns": ((3, 5), [Shard(1)]),
    "depth": ((2, 3, 5), [Shard(2)]),
    "one row": ((1, 4), [Shard(0)]),
    "nothing": ((0, 4), [Shard(0)]),
    "whole": ((4, 4), [Replicate()]),
    "scalar": ((), None),
}


def numbers():
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, (shape, _) in SPREAD.items()} | {
        "half": torch.randn(3, 3, generator=random).bfloat16()
    }


def pair():
    return GlooCommunicator(world=World(rank=dist.get_rank(), size=2), group=dist.group.WORLD), init_device_mesh("cpu", (2,))


def save_spread(root):
    communicator, mesh = pair()
    tensors = {
        name: distribute_tensor(tensor, mesh, placements) if (placements := SPREAD.get(name, ((), None))[1]) else tensor
        for name, tensor in numbers().items()
    }
    return str(save(root, snapshot(tensors), communicator, full_weights=True).path)


def save_large(root):
    """16 tensors of 8 MB. By how many bytes this process grew at most while it saved, with the copy and without."""
    communicator, mesh = pair()
    tensors = {f"{n:02d}": distribute_tensor(torch.full((1024, 2048), float(n)), mesh, [Shard(n % 2)]) for n in range(16)}
    save(
        root / "first", snapshot({"00": tensors["00"]}), communicator, full_weights=True
    )  # what is loaded and set up once does not count
    return [
        peak(lambda full=full: save(root / str(full), snapshot(tensors), communicator, full_weights=full))
        for full in (False, True)
    ]


def wait_for_main():
    """The main rank works for longer than ranks wait for each other."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    communicator = GlooCommunicator(world=World(rank=dist.get_rank(), size=2), group=group)
    answers = [run_on_main_rank(communicator, lambda: time.sleep(2.5) or "done", interval=0.2)]
    try:
        run_on_main_rank(communicator, lambda: Path("nowhere/at all").read_text(), interval=0.2)
    except RankError as error:
        answers.append(error.errno)
    return answers


def peak(action):
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    action()
    return _status("VmHWM") - before


def _status(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.fixture(scope="module")
def processes():
    with forked_processes() as started:
        yield started


@pytest.fixture(scope="module")
def spread(processes, tmp_path_factory):
    """A checkpoint of tensors that two ranks have shared out in every way."""
    return Path(processes.run(save_spread, tmp_path_factory.mktemp("spread"))[0])


def test_the_copy_holds_every_tensor_whole_however_it_was_shared_out(spread):
    found, expected = load_file(spread / COPY), numbers()
    assert [name for name in expected.keys() | found.keys() if not torch.equal(found[name], expected[name])] == []


def test_the_copy_says_that_it_is_of_torch_and_nothing_of_shards(spread):
    with safe_open(spread / COPY, "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_copy_is_part_of_what_is_verified(spread):
    assert COPY in read_manifest(spread).files
    assert verify(spread).ok


def test_the_copy_takes_the_main_rank_less_memory_than_two_tensors(processes, tmp_path):
    main, other = processes.run(save_large, tmp_path)
    assert main[1] - main[0] < 2 * 8 * MEGABYTE
    assert other[1] - other[0] < 8 * MEGABYTE


def test_ranks_wait_for_the_main_one_for_as_long_as_it_works_and_learn_when_it_fails(processes):
    assert processes.run(wait_for_main) == [["done", errno.ENOENT]] * 2


# --- who loads it ---------------------------------------------------------------------------------------------------


def test_diffusers_loads_the_folder_in_one_file_or_in_several(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        layers_per_block=1,
    )
    path = save(tmp_path, snapshot(dict(model.state_dict()), config=config_of(model)), ALONE, full_weights=True).path
    several = tmp_path / "several"
    several.mkdir()
    stored = TensorFiles([path / COPY])
    config = read_state(path / "state.json").model_config
    write_weights(several, stored.tensors, lambda name: [stored.read(name)], config, largest_file=10_000)
    assert len(list(several.glob("*.safetensors"))) > 2
    for folder in (path / "weights", several):
        loaded = diffusers.UNet2DModel.from_pretrained(folder)
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
        assert loaded.config.block_out_channels == [8, 8]


def test_transformers_loads_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    model = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes))
    path = save(tmp_path, snapshot(dict(model.state_dict()), config=config_of(model)), ALONE, full_weights=True).path
    loaded = transformers.CLIPTextModel.from_pretrained(path / "weights")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_model_without_a_config_has_a_copy_without_one(tmp_path):
    assert config_of(torch.nn.Linear(2, 2)) == ""
    path = save(tmp_path, snapshot({"w": torch.ones(2)}), ALONE, full_weights=True).path
    assert [file.name for file in (path / "weights").iterdir()] == ["diffusion_pytorch_model.safetensors"]


def test_the_config_of_a_model_is_in_every_checkpoint_of_it(tmp_path):
    path = save(tmp_path, snapshot({"w": torch.ones(2)}, config='{"_class_name": "Model", "width": 3}'), ALONE).path
    assert read_state(path / "state.json").model_config == {"_class_name": "Model", "width": 3}
    assert not (path / "weights").exists()


# --- part of the checkpoint -----------------------------------------------------------------------------------------


def test_a_checkpoint_with_a_copy_is_loaded_like_any_other(tmp_path):
    path = save(tmp_path, snapshot({"w": torch.arange(3.0)}), ALONE, full_weights=True).path
    target = {"w": torch.zeros(3)}
    load(path, snapshot(target), ALONE)
    assert target["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("file", [COPY, "weights/config.json"])
def test_damage_to_the_copy_is_damage_to_the_checkpoint(tmp_path, file):
    path = save(tmp_path, snapshot({"w": torch.ones(3)}, config="{}"), ALONE, full_weights=True).path
    (path / file).write_bytes(b"x" + (path / file).read_bytes()[1:])
    assert verify(path).problems == (f"{file} does not match its digest: damaged or edited",)


def test_a_copy_that_the_system_refuses_fails_the_save_and_leaves_nothing(tmp_path):
    # Shards are in files of up to 64 MiB here, the copy is in one.
    tensors = {name: torch.ones(12 * MEGABYTE) for name in "ab"}
    with files_limited_to(70 * MEGABYTE), pytest.raises(SaveError) as caught:
        save(tmp_path, snapshot(tensors), ALONE, full_weights=True)
    assert (caught.value.errno, [path.name for path in tmp_path.iterdir()]) == (errno.EFBIG, [".lock"])


def test_saving_the_same_again_with_its_copy_returns_what_is_there(tmp_path):
    first, second = (save(tmp_path, snapshot({"w": torch.ones(2)}), ALONE, full_weights=True) for _ in range(2))
    assert first.path == second.path


def test_files_that_end_too_early_are_told(tmp_path):
    file = save(tmp_path, snapshot({"w": torch.ones(2)}), ALONE, full_weights=True).path / COPY
    stored = TensorFiles([file])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="ends within w"):
        stored.read("w")


def test_the_index_of_several_files_names_the_file_of_each_tensor(tmp_path):
    path = save(tmp_path / "c", snapshot({name: torch.ones(10) for name in "abc"}), ALONE).path
    stored = TensorFiles(sorted((path / "model").iterdir()))
    write_weights(tmp_path, stored.tensors, lambda name: [stored.read(name)], None, largest_file=90)
    assert json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 120},
        "weight_map": {
            "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
            "b": "diffusion_pytorch_model-00001-of-00002.safetensors",
            "c": "diffusion_pytorch_model-00002-of-00002.safetensors",
        },
    }
