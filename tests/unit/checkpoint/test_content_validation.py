"""Checkpoints that were edited and signed anew, or hold numbers that are not finite: named before anything is loaded."""

import json
import re

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import save_file

from smalti.checkpoint.format.content_validation import find_non_finite
from smalti.checkpoint.format.manifest import FileRecord, Manifest, read_manifest
from smalti.checkpoint.format.safetensors_layout import Chunk, join
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.reader import load
from smalti.checkpoint.search import find_on_all_ranks
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import save
from smalti.errors import CheckpointError
from smalti.parallel.collective import RankError
from smalti.parallel.gloo import GlooCommunicator
from smalti.parallel.state import PortableState
from smalti.types import World

ALONE = GlooCommunicator(world=World(), group=None)
SHAPES = {"w": (3, 2), "v": (2, 3), "b": (3,)}


def snapshot(step=2):
    """After some steps of AdamW."""
    model = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    moments = {
        name: {"step": torch.tensor(float(step)), "exp_avg": torch.rand(shape), "exp_avg_sq": torch.rand(shape)}
        for name, shape in SHAPES.items()
    }
    state = PortableState(
        model=model, optimizer_state=moments, param_groups=[{"lr": 0.1, "betas": [0.9, 0.99]}], optimizer="AdamW"
    )
    place = {"step": step, "position": step, "epoch": 0, "samples": 4 * step, "effective_batch": 4, "seed": 1}
    return Snapshot(step=step, state=state, ema={name: torch.rand(shape) for name, shape in SHAPES.items()}, trainer=place)


@pytest.fixture
def root(tmp_path):
    """A run with checkpoints of steps 1 and 2."""
    save(tmp_path / "checkpoints", snapshot(1), ALONE)
    save(tmp_path / "checkpoints", snapshot(2), ALONE)
    return tmp_path / "checkpoints"


def sign(path):
    """What someone does who edits a file and knows about digests."""
    files = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"}
    records = {name: FileRecord(size=len(data), digest=blake3(data).hexdigest()) for name, data in files.items()}
    manifest = Manifest(step=read_manifest(path).step, world_size=1, files=records)
    (path / "manifest.json").write_bytes(manifest.encode())


def edit_state(path, place, value):
    """Set, or with ... remove, what stands at a dotted place."""
    state = json.loads((path / "state.json").read_text())
    *outer, last = place.split(".")
    table = state
    for name in outer:
        table = table[int(name) if name.isdigit() else name]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    (path / "state.json").write_text(json.dumps(state))
    sign(path)


def edit_tensors(path, group, change):
    """Give the tensors of a group's file to `change`, as a dict to be changed in place."""
    [file] = (path / group).glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    change(tensors)
    save_file(tensors, file)
    sign(path)


STATES = [
    ("trainer.step", ..., "has no training position: trainer.step is missing"),
    ("trainer.step", "2", 'trainer.step cannot be "2"'),
    ("trainer.step", 2.0, "trainer.step cannot be 2.0"),
    ("trainer.step", None, "trainer.step cannot be null"),
    ("trainer.step", 3, "trainer.step is 3 in a checkpoint of step 2"),
    ("trainer.step", -5, "trainer.step cannot be -5"),
    ("trainer.step", 10**30, "trainer.step cannot be 1000000000000000000000000000000"),
    ("step", 99, "trainer.step is 2 in a checkpoint of step 99"),
    ("step", True, "step cannot be true"),
    ("trainer.position", -1, "trainer.position cannot be -1"),
    ("trainer.position", True, "trainer.position cannot be true"),
    ("trainer.position", 1.5, "trainer.position cannot be 1.5"),
    ("trainer.position", 10**30, "trainer.position cannot be 1000000000000000000000000000000"),
    ("trainer.samples", ..., "trainer.samples is missing"),
    ("trainer.samples", "8", 'trainer.samples cannot be "8"'),
    ("trainer.epoch", -1, "trainer.epoch cannot be -1"),
    ("trainer.effective_batch", 0, "trainer.effective_batch cannot be 0"),
    ("trainer.order_beginning", {"position": 3}, "trainer.order_beginning has other fields than position and epoch"),
    ("trainer.order_beginning", {"position": -1, "epoch": 0}, "trainer.order_beginning.position cannot be -1"),
    ("trainer.data_changes", 1, "trainer.data_changes cannot be 1"),
    ("trainer.made_with", "sdxl", 'trainer.made_with cannot be "sdxl"'),
    ("trainer", {}, "trainer.step is missing"),
    ("trainer", [], "trainer cannot be []"),
    ("optimizer.settings", {}, "optimizer.settings cannot be {}"),
    ("optimizer.settings", ["lr"], 'optimizer.settings[0] cannot be "lr"'),
    ("optimizer.settings", [{"params": []}], "optimizer.settings[0] has the key params"),
    ("optimizer.name", 1, "optimizer.name cannot be 1"),
]


@pytest.mark.parametrize(("place", "value", "told"), STATES, ids=[f"{place}={value!r:.12}" for place, value, _ in STATES])
def test_a_state_that_cannot_be_is_named_and_the_checkpoint_before_is_taken(root, place, value, told):
    edit_state(root / "step-00000002", place, value)
    [problem] = verify(root / "step-00000002", to_resume=True).problems
    assert problem.startswith("state.json ")
    assert told in problem
    assert find_on_all_ranks(ALONE, CheckpointStore(root), "latest") == root / "step-00000001"
    with pytest.raises(RankError, match=re.escape(told)):
        find_on_all_ranks(ALONE, CheckpointStore(root), "2")


def without(name):
    return lambda tensors: tensors.pop(name)


def renamed(name, other):
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def spoiled(name, value):
    return lambda tensors: tensors[name].view(-1)[-1:].fill_(value)


TENSORS = [
    ("optimizer", without("w.step"), "optimizer has step for only one of v and w"),
    ("optimizer", renamed("w.exp_avg", "w.exp_average"), "optimizer has exp_average, exp_avg"),
    ("optimizer", renamed("w.exp_avg", "u.exp_avg"), "optimizer has u.exp_avg, but the model has no u"),
    ("model", spoiled("w", float("nan")), "numbers that are not finite, in w (1 of 6 numbers)"),
    ("model", spoiled("w", float("inf")), "numbers that are not finite, in w (1 of 6 numbers)"),
    ("optimizer", spoiled("b.exp_avg", -float("inf")), "numbers that are not finite, in b.exp_avg (1 of 3 numbers)"),
    ("ema", spoiled("v", float("nan")), "numbers that are not finite, in v (1 of 6 numbers)"),
]


@pytest.mark.parametrize(("group", "change", "told"), TENSORS, ids=[told for _, _, told in TENSORS])
def test_tensors_that_cannot_be_are_named_and_the_checkpoint_before_is_taken(root, group, change, told):
    edit_tensors(root / "step-00000002", group, change)
    [problem] = verify(root / "step-00000002", to_resume=True).problems
    assert told in problem
    assert find_on_all_ranks(ALONE, CheckpointStore(root), "latest") == root / "step-00000001"


def test_weights_that_are_not_finite_are_no_damage_to_who_only_looks(root):
    edit_tensors(root / "step-00000002", "model", spoiled("w", float("nan")))
    assert verify(root / "step-00000002").ok


def test_a_mask_of_minus_infinity_among_the_weights_is_let_pass(root):
    edit_tensors(root / "step-00000002", "model", spoiled("b", -float("inf")))
    assert verify(root / "step-00000002", to_resume=True).ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("place", [0, 2**20, 2**20 + 4])
def test_one_number_among_a_million_is_found_in_every_type(tmp_path, dtype, place):
    many = torch.ones(2**20 + 5, dtype=dtype)
    save_file({"w": many}, tmp_path / "sound.safetensors")
    many[place] = float("nan")
    save_file({"w": many}, tmp_path / "spoiled.safetensors")
    assert find_non_finite(tmp_path / "sound.safetensors") == ""
    assert find_non_finite(tmp_path / "spoiled.safetensors") == f"w (1 of {2**20 + 5} numbers)"


def test_large_numbers_are_finite_though_their_sum_is_not(tmp_path):
    save_file({"w": torch.full((100,), 3e38), "i": torch.arange(3)}, tmp_path / "large.safetensors")
    assert find_non_finite(tmp_path / "large.safetensors") == ""


def test_a_setting_of_another_kind_is_refused_before_anything_is_loaded(root):
    path = root / "step-00000002"
    edit_state(path, "optimizer.settings", [{"lr": "fast", "betas": [0.9, 0.99]}])
    target = snapshot(0)
    before = target.state.model["w"].clone()
    with pytest.raises(CheckpointError, match=r"optimizer\.settings\[0\]\.lr is 'fast', where the optimizer has 0\.1"):
        load(path, target, ALONE)
    assert torch.equal(target.state.model["w"], before)


def test_moments_that_are_gone_altogether_are_told(root):
    path = root / "step-00000002"
    for file in (path / "optimizer").iterdir():
        file.unlink()
    (path / "optimizer").rmdir()
    sign(path)
    assert "the checkpoint has no optimizer state of AdamW: it starts empty" in load(path, snapshot(0), ALONE).notices


def box(offsets, shape):
    return Chunk(dtype="F32", offsets=offsets, shape=shape)


@pytest.mark.parametrize(
    "chunks",
    [
        [box((0,), (2,)), box((1,), (2,)), box((3,), (0,)), box((3,), (1,)), box((4,), (0,))],
        [box((0, 0), (2, 2)), box((1, 1), (1, 1)), box((0, 2), (1, 1)), box((1, 2), (1, 1)), box((2, 0), (1, 2))],
        [box((0, 0), (1, 4)), box((0, 0), (1, 4)), box((2, 0), (1, 4))],
    ],
)
def test_chunks_that_overlap_and_leave_a_gap_of_the_same_size_are_refused(chunks):
    with pytest.raises(CheckpointError, match=r"overlap|do not fill"):
        join("w", chunks)


def test_chunks_of_any_cut_are_put_together():
    chunks = [box((row, column), (1, 2)) for row in range(3) for column in (0, 2)]
    assert join("w", chunks).shape == (3, 4)
    assert join("b", [box((), ())]).shape == ()
