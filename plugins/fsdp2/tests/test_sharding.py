"""What ranks hold: shards and nothing else, frozen parameters too; and in which precision they compute."""

import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from smalti import World
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.models.blocks import find_blocks
from smalti.models.weights import FolderWeights, SeededWeights, Weights, materialise, without_weights
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import capture, restore
from smalti_diffusers.lora import eight_bits
from smalti_diffusers.lora.eight_bits import EightBitLinear, eight_bit_weights, quantised
from smalti_fsdp2.activation_checkpointing import recompute
from smalti_fsdp2.load_weights import fill
from smalti_fsdp2.options import FsdpOptions
from smalti_fsdp2.sharding import shard, shard_mesh
from smalti_fsdp2.wrapping import units
from smalti_testing import two_processes

WIDTH, LAYERS = 1448, 16
WEIGHTS_MB = LAYERS * WIDTH * WIDTH * 4 / 2**20  # 128


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.weight.dtype)
        return torch.tanh(tokens @ self.weight)


class Net(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.last = nn.Linear(width, 3)
        self.last.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return self.last(tokens * self.scale)


@pytest.fixture(scope="module")
def two():
    """Two ranks that give memory back when it is freed, so that what they hold can be measured."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        with two_processes() as ranks:
            yield ranks


def this_rank() -> GlooCommunicator:
    rank, size = dist.get_rank(), dist.get_world_size()
    return GlooCommunicator(world=World(rank=rank, size=size, local_rank=rank, local_size=size), group=dist.group.WORLD)


def sharded(width: int, depth: int, weights, *, from_first: bool = False, bf16: bool = False, **options) -> Net:
    with without_weights():
        model = Net(width, depth)
    options = FsdpOptions(**options)
    blocks = find_blocks(model, ["Layer"])
    if options.fsdp_activation_checkpointing:
        recompute(model, blocks, mode=options.fsdp_activation_checkpointing_mode, every=1)
    mesh = shard_mesh(this_rank().world, None)
    shard(model, units(model, blocks, options), mesh, options, bf16=bf16)
    fill(model, weights, this_rank(), on_host=True, from_first=from_first)
    return model


# --- memory ---------------------------------------------------------------------------------------------------------


def growth(folder: Path, from_first: bool) -> float:
    """The most memory that building takes on this rank, in MiB, sampled after every tensor."""
    process, most = psutil.Process(), 0

    class Watched(FolderWeights):
        def get(self, name):
            nonlocal most
            tensor = super().get(name)
            most = max(most, process.memory_full_info().uss)
            return tensor

    sharded(6, 3, SeededWeights(lambda: Net(6, 3), 0), from_first=from_first)  # what torch loads the first time
    before = process.memory_full_info().uss
    model = sharded(WIDTH, LAYERS, Watched(folder), from_first=from_first)
    most = max(most, process.memory_full_info().uss)
    del model
    return (most - before) / 2**20


@pytest.mark.parametrize("from_first", [False, True])
def test_no_rank_ever_holds_much_more_than_its_half_of_the_weights(two, tmp_path, from_first):
    save_file({name: tensor.clone() for name, tensor in Net(WIDTH, LAYERS).state_dict().items()}, tmp_path / "w.safetensors")
    peaks = two.run(growth, tmp_path, from_first)
    # Half of 128 MiB, and a few tensors of 8 MiB.
    assert max(peaks) < 0.5 * WEIGHTS_MB + 32


def growth_on_resume(folder: Path) -> float:
    """The most memory, in MiB, that this rank takes beside its shares while it reads them from a checkpoint; sampled."""
    done, seen = threading.Event(), []

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(own_memory())

    model = sharded(WIDTH, LAYERS, SeededWeights(lambda: Net(WIDTH, LAYERS), 0))
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = capture(model, optimizer)
    path = save(folder, Snapshot(step=1, state=state, trainer={}), this_rank()).path
    load(path, Snapshot(step=1, state=state), this_rank())  # what is loaded the first time
    before = own_memory()
    watcher = threading.Thread(target=watch)
    watcher.start()
    load(path, Snapshot(step=1, state=state), this_rank())
    restore(model, optimizer, state)
    done.set()
    watcher.join()
    return (max(seen) - before) / 2**10


def own_memory() -> int:
    """KiB that are in no file; pages of a file that is read are the system's to take back."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1])


def test_no_rank_holds_more_than_its_shares_and_some_tensors_when_it_resumes(two, tmp_path):
    # Weights and two moments are 384 MiB, of which each rank has half already.
    assert max(two.run(growth_on_resume, tmp_path)) < 32


# --- frozen parameters ----------------------------------------------------------------------------------------------


def train_partly(folder: Path) -> list[str]:
    """One step with a frozen matrix, saved and read into another model; what is wrong."""
    weights = SeededWeights(lambda: Net(7, 2), 3)
    model = sharded(7, 2, weights)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    state = capture(model, optimizer)
    path = save(folder, Snapshot(step=1, state=state, trainer={}), this_rank()).path
    wrong = [] if "last.weight" not in state.optimizer_state else ["a frozen matrix has moments"]
    wrong += ["a frozen matrix is saved"] if "last.weight" in state.model else []
    frozen = dict(model.named_parameters())["last.weight"]
    if not isinstance(frozen, DTensor) or not torch.equal(frozen.full_tensor(), weights.get("last.weight")):
        wrong.append("the frozen matrix is not what it was, or not sharded")
    if torch.equal(state.model["layers.0.weight"].full_tensor(), weights.get("layers.0.weight")):
        wrong.append("what trains has not moved")
    other = sharded(7, 2, SeededWeights(lambda: Net(7, 2), 4))
    into = capture(other, torch.optim.AdamW([each for each in other.parameters() if each.requires_grad], lr=0.1))
    load(path, Snapshot(step=0, state=into), this_rank())
    wrong += [name for name, tensor in into.model.items() if not same(tensor, state.model[name])]
    return wrong


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    both = [each.full_tensor() if isinstance(each, DTensor) else each for each in (one, other)]
    return torch.equal(*both)


def test_frozen_parameters_are_sharded_and_left_out_of_checkpoints_and_stay_as_they_are(two, tmp_path):
    assert two.run(train_partly, tmp_path) == [[], []]


class Adapted(nn.Module):
    """A frozen layer, in 8 bits or not yet, and one that trains beside it."""

    def __init__(self, width: int, kept_as: torch.dtype | None) -> None:
        super().__init__()
        base = nn.Linear(width, 2 * width, dtype=torch.bfloat16).requires_grad_(False)
        self.base = base if kept_as is None else EightBitLinear(base, kept_as)
        self.adapter, self.seen = nn.Linear(width, 2 * width, bias=False), set()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen |= {(name, each.dtype, each.shape) for name, each in self.base.named_parameters()}
        return (self.base(tokens) + self.adapter(tokens)).tanh().unflatten(-1, (2, -1)).sum(-2)


def beside_8_bits(kept_as: torch.dtype) -> list[str]:
    """Loss and gradients of a sharded model against those of the whole one, in a run in bf16; what is wrong."""

    def build(kept_as: torch.dtype | None = None) -> nn.Module:
        return nn.Sequential(*(Adapted(48, kept_as) for _ in range(3)))

    def weights() -> Weights:
        return eight_bit_weights(SeededWeights(build, 5), whole)

    with without_weights():
        whole, parts = build(kept_as), build(kept_as)
    materialise(whole, weights(), "cpu")
    options = FsdpOptions()
    shard(
        parts, units(parts, find_blocks(parts, ["Adapted"]), options), shard_mesh(this_rank().world, None), options, bf16=True
    )
    with pytest.MonkeyPatch.context() as patch:
        rows: list[int] = []
        patch.setattr(eight_bits, "quantised", lambda given, kind: (rows.append(len(given)), quantised(given, kind))[1])
        fill(parts, weights(), this_rank(), on_host=True, from_first=False)
    tokens = torch.randn(4, 32, 48, generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (whole, parts):
        for half in tokens.chunk(2) if model is whole else [tokens.chunk(2)[dist.get_rank()]]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(half).float().square().mean()
            (loss / (2 if model is whole else 1)).backward()
            losses.append(loss.detach())
    wrong = [] if losses[dist.get_rank()] == losses[2] else [f"losses {losses}"]
    wrong += [] if rows == [48] * 3 else [f"of 96 rows of each layer, {rows} were quantised on this rank"]
    alone = dict(whole.named_parameters())
    for name, each in parts.named_parameters():
        if each.requires_grad:
            wrong += [] if torch.equal(each.grad.full_tensor(), alone[name].grad) else [f"the gradient of {name}"]
        elif (each.dtype, 2 * each.to_local().nbytes) != (alone[name].dtype, alone[name].nbytes):
            wrong.append(f"{name} is not sharded as it is kept")
    return wrong + [f"{n} was gathered otherwise" for n, module in enumerate(parts) if module.seen != whole[n].seen]


@pytest.mark.parametrize("kept_as", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_base_in_8_bits_is_gathered_as_it_is_kept_and_gives_the_numbers_of_the_whole_one(two, kept_as):
    assert two.run(beside_8_bits, kept_as) == [[], []]


# --- precision ------------------------------------------------------------------------------------------------------


def dtypes(bf16: bool, options: dict[str, str]) -> tuple[set[torch.dtype], torch.dtype, torch.dtype, torch.dtype]:
    """In which types a layer's weight is gathered, kept, its gradient reduced, and the output given."""
    model = sharded(6, 3, SeededWeights(lambda: Net(6, 3), 0), bf16=bf16, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        output = model(torch.ones(2, 6))
    output.float().sum().backward()
    weight = model.layers[0].weight
    return set(model.layers[0].seen), weight.dtype, weight.grad.dtype, output.dtype


@pytest.mark.parametrize(
    ("bf16", "options", "expected"),
    [
        (False, {}, (torch.float32, torch.float32, torch.float32)),
        (True, {}, (torch.bfloat16, torch.float32, torch.bfloat16)),
        (True, {"fsdp_param_dtype": "fp32"}, (torch.float32, torch.float32, torch.bfloat16)),
        (True, {"fsdp_output_dtype": "fp32"}, (torch.bfloat16, torch.float32, torch.float32)),
    ],
)
def test_parameters_are_gathered_in_the_type_of_the_run_and_kept_in_fp32(two, bf16, options, expected):
    gathered, kept, gradient, output = two.run(dtypes, bf16, options)[0]
    assert (gathered, kept, gradient, output) == ({expected[0]}, torch.float32, expected[1], expected[2])


# --- recomputation --------------------------------------------------------------------------------------------------


def gradients(options: dict[str, object]) -> tuple[list[list[float]], int]:
    """Gradients of all that trains, and how often the first layer was computed."""
    model = sharded(6, 3, SeededWeights(lambda: Net(6, 3), 0), **options)
    model(torch.linspace(0, 1, 12).view(2, 6)).square().sum().backward()
    found = [each.grad.full_tensor().flatten().tolist() for each in model.parameters() if each.requires_grad]
    return found, len(model.layers[0].seen)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputing_computes_a_block_twice_and_changes_no_gradient(two, mode):
    plain, once = two.run(gradients, {})[0]
    again, twice = two.run(gradients, {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_mode": mode})[0]
    assert (once, twice) == (1, 2)
    assert plain == again


# --- meshes ---------------------------------------------------------------------------------------------------------


def mesh_of(shard_size: int | None, local_size: int) -> dict[str, int]:
    rank = dist.get_rank()
    mesh = shard_mesh(World(rank=rank, size=dist.get_world_size(), local_size=local_size), shard_size)
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


@pytest.mark.parametrize(
    ("shard_size", "local_size", "expected"),
    [
        (None, 2, {"shard": 2}),
        (None, 1, {"shard": 2}),
        (2, 1, {"shard": 2}),
        (1, 2, {"replicate": 2, "shard": 1}),
    ],
)
def test_a_copy_is_shared_by_one_machine_unless_told_otherwise(two, shard_size, local_size, expected):
    assert two.run(mesh_of, shard_size, local_size)[0] == expected


def wait_alone() -> str:
    """What becomes of a collective call between nodes that the other rank does not join."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    mesh = shard_mesh(World(rank=rank, size=2, local_size=2), 1, timeout=timedelta(seconds=1))
    told = ""
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("replicate"))
        except RuntimeError as error:
            told = str(error)
        store.set("waited", "1")
    store.wait(["waited"])
    return told


def test_groups_of_a_mesh_have_the_time_out_that_is_given():
    from support.forked_ranks import forked_processes  # which the ranks of other tests do not find

    with forked_processes() as pair:
        assert "imed out" in pair.run(wait_alone)[0]
