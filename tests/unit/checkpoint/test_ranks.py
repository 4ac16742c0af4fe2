"""Two real processes, gloo between them, which do everything once; the tests look at what each of them found."""

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from smalti.checkpoint.format.manifest import read_manifest
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.planning import plan_on_all_ranks
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import SaveError, save
from smalti.errors import CheckpointError
from smalti.parallel.state import PortableState, capture, restore
from support.forked_ranks import Pair, SingleRank, forked_processes


def net():
    """Sizes that two ranks cannot share evenly, and one that only the first has something of."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for number in steps:
        random = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=random)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model):
    return {name: whole(parameter.detach()).tolist() for name, parameter in model.named_parameters()}


def resume(path, model, parallel, steps):
    optimizer = adamw(model)
    snapshot = Snapshot(step=0, state=capture(model, optimizer))
    load(path, snapshot, parallel)
    restore(model, optimizer, snapshot.state)
    train(model, optimizer, steps)
    return weights(model)


def zeroed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


ODD = {
    "rows": ((5, 3), Shard(0)),
    "columns": ((3, 5), Shard(1)),
    "one row": ((1, 4), Shard(0)),
    "whole": ((4, 4), Replicate()),
    "none": ((0, 3), Shard(0)),
}


def odd_tensors():
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, (shape, _) in ODD.items()}


# --- what the two processes do --------------------------------------------------------------------------------------


def results_of_this_rank(root):
    rank, results = dist.get_rank(), {}
    parallel, mesh = Pair(rank), init_device_mesh("cpu", (2,))
    store = CheckpointStore(root)

    model = DistributedDataParallel(net())
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    done = save(root, Snapshot(step=1, state=capture(model, optimizer)), parallel)
    results["replicated"] = str(done.path)
    results["replicated names"] = list(capture(model, optimizer).model)

    model = net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    ema = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    done = save(root, Snapshot(step=2, state=capture(model, optimizer), ema=ema, trainer={"position": 9}), parallel)
    results["sharded"] = str(done.path)

    for name, source in (("sharded on two", 2), ("replicated on two", 1)):
        fresh = zeroed(net())
        fully_shard(fresh)
        results[name] = resume(root / f"step-{source:08d}", fresh, parallel, range(3, 6))

    tensors = {name: distribute_tensor(t, mesh, [ODD[name][1]]) for name, t in odd_tensors().items()}
    done = save(root, Snapshot(step=3, state=PortableState(model=tensors)), parallel)
    results["odd"] = str(done.path)
    for name, placement in (("odd as rows", Shard(0)), ("odd as columns", Shard(1))):
        fresh = {key: distribute_tensor(torch.zeros_like(tensor), mesh, [placement]) for key, tensor in odd_tensors().items()}
        load(done.path, Snapshot(step=0, state=PortableState(model=fresh)), parallel)
        results[name] = {key: whole(tensor).tolist() for key, tensor in fresh.items()}

    results["full disk"] = disk_full_on_one(rank, root, parallel)
    results["after the full disk"] = sorted(path.name for path in root.iterdir())
    results["defect"] = refused(root, parallel, torch.ones(2, dtype=torch.complex128 if rank == 1 else torch.float32))
    results["disagreement"] = refused(root, parallel, torch.ones(4 - 2 * rank))
    results["divided"] = divided_after_one_was_alone(rank, parallel)
    results["not shared"] = directory_not_shared(rank, root, parallel)
    results["damaged"] = damaged_for_both(rank, store, parallel)
    return results


def divided_after_one_was_alone(rank, parallel):
    """What this rank writes of two tensors, before and after rank 1 has divided another one by itself."""
    tensors = {"model/a": torch.ones(4), "model/b": torch.ones(4)}
    before = plan_on_all_ranks(parallel, tensors)
    if rank == 1:
        plan_on_all_ranks(SingleRank(), {"model/c": torch.ones(1)})
    return [list(before.mine), list(plan_on_all_ranks(parallel, tensors).mine)]


def disk_full_on_one(rank, root, parallel):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        return str(save(root, Snapshot(step=4, state=PortableState(model=big())), parallel))
    except SaveError as error:
        return f"{error.errno} {error.message}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def big():
    return {"a": torch.ones(100_000), "b": torch.ones(100_000)}


def refused(root, parallel, tensor):
    try:
        return str(save(root, Snapshot(step=4, state=PortableState(model={"w": tensor})), parallel))
    except SaveError as error:
        return error.message


def directory_not_shared(rank, root, parallel):
    """A relative path means another directory on each rank."""
    mine = root.parent / f"node-{rank}"
    mine.mkdir()
    os.chdir(mine)
    try:
        return str(save(Path("checkpoints"), Snapshot(step=4, state=PortableState(model=big())), parallel))
    except SaveError as error:
        return f"{error.message} | {error.fix}"


def damaged_for_both(rank, store, parallel):
    """The damaged file is in the share of the second rank."""
    path = save(store.root, Snapshot(step=9, state=PortableState(model=big())), parallel).path
    if rank == 0:
        damaged = path / sorted(read_manifest(path).files)[1]
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    dist.barrier()
    try:
        load(path, Snapshot(step=0, state=PortableState(model=big())), parallel)
    except CheckpointError as error:
        return error.message
    return ""


# --- what is expected of them ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Each rank's results."""
    with forked_processes() as pair:
        return pair.run(results_of_this_rank, tmp_path_factory.mktemp("ranks") / "checkpoints")


@pytest.fixture(scope="module")
def uninterrupted():
    """Weights after six steps in one process."""
    model = net()
    train(model, adamw(model), range(6))
    return weights(model)


def rank_sizes(path, group):
    """Bytes of tensor files by rank."""
    sizes = {0: 0, 1: 0}
    for name, record in read_manifest(Path(path)).files.items():
        if name.startswith(f"{group}/rank-"):
            sizes[int(name.split("-")[1])] += record.size
    return sizes


def test_replicas_save_one_copy_and_share_the_writing(ran):
    path = Path(ran[0]["replicated"])
    tensors = sum(parameter.nbytes for parameter in net().parameters())
    sizes = rank_sizes(path, "model")
    assert 0 < sizes[0] < sizes[0] + sizes[1] < tensors + 3000
    assert sizes[1] > 0
    assert verify(path).ok


def test_every_rank_learns_the_same_path(ran):
    assert ran[0]["sharded"] == ran[1]["sharded"]


def test_names_under_ddp_are_those_of_the_plain_model(ran):
    assert ran[0]["replicated names"] == list(net().state_dict())


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_one_process_goes_on_bit_for_bit_from_what_two_saved(ran, uninterrupted, kind):
    assert resume(Path(ran[0][kind]), zeroed(net()), SingleRank(), range(3, 6)) == uninterrupted


@pytest.mark.parametrize("kind", ["replicated on two", "sharded on two"])
def test_two_sharded_processes_go_on_bit_for_bit_from_either(ran, uninterrupted, kind):
    assert ran[0][kind] == ran[1][kind] == uninterrupted


def test_averages_and_the_trainers_state_come_back_on_one_process(ran):
    model = net()
    ema = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    snapshot = Snapshot(step=0, state=capture(model, adamw(model)), ema=ema)
    loaded = load(Path(ran[0]["sharded"]), snapshot, SingleRank())
    assert (loaded.trainer, loaded.manifest.world_size) == ({"position": 9}, 2)
    assert all(torch.equal(ema[name], parameter * 2) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", ["odd as rows", "odd as columns"])
def test_shards_of_any_size_are_cut_anew_for_another_sharding(ran, kind):
    assert ran[0][kind] == {name: tensor.tolist() for name, tensor in odd_tensors().items()}


def test_shards_of_any_size_are_put_together_in_one_process(ran):
    fresh = {name: torch.zeros_like(tensor) for name, tensor in odd_tensors().items()}
    load(Path(ran[0]["odd"]), Snapshot(step=0, state=PortableState(model=fresh)), SingleRank())
    assert all(torch.equal(fresh[name], tensor) for name, tensor in odd_tensors().items())


def test_a_disk_that_is_full_for_one_rank_fails_the_save_on_both(ran):
    assert ran[0]["full disk"].startswith("27 cannot save step 4")
    assert "rank 1: [Errno 27] File too large" in ran[0]["full disk"]
    assert ran[1]["full disk"].startswith("27 cannot save step 4")


def test_after_a_failed_save_only_the_older_checkpoints_are_there(ran):
    assert ran[0]["after the full disk"] == [".lock", "step-00000001", "step-00000002", "step-00000003"]


def test_a_mistake_on_one_rank_is_told_on_both(ran):
    assert "rank 1: model/w is of type torch.complex128" in ran[0]["defect"]
    assert "model/w is of type torch.complex128" in ran[1]["defect"]


def test_ranks_divide_alike_also_after_one_of_them_has_saved_alone(ran):
    assert [one["divided"] for one in ran] == [[["model/a"]] * 2, [["model/b"]] * 2]


def test_replicas_that_differ_in_size_are_refused_on_both(ran):
    assert all("the ranks together do not hold all of model/w" in one["disagreement"] for one in ran)


def test_a_directory_that_is_not_shared_is_told_on_both(ran):
    assert all("is not visible on this node | put --output_dir on storage" in one["not shared"] for one in ran)


def test_damage_that_only_one_rank_reads_stops_both(ran):
    assert all("does not match its digest" in one["damaged"] for one in ran)
