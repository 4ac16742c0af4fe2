import errno
import json

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

from smalti.checkpoint.dtypes import NAMES
from smalti.checkpoint.format.manifest import read_manifest
from smalti.checkpoint.format.safetensors_layout import Chunk
from smalti.checkpoint.format.store import CheckpointStore
from smalti.checkpoint.format.verification import verify
from smalti.checkpoint.planning import check_complete, divide, plan_on_all_ranks
from smalti.checkpoint.reader import load
from smalti.checkpoint.snapshot import Snapshot
from smalti.checkpoint.writer import SaveError, save
from smalti.errors import CheckpointError, ExitCode
from smalti.parallel.state import PortableState
from support.forked_ranks import SingleRank
from support.limits import files_limited_to

ALONE = SingleRank()


def snapshot(step=1, *, optimizer="", moments=None, ema=None, trainer=None, **tensors):
    state = PortableState(model=tensors, optimizer_state=moments or {}, optimizer=optimizer, param_groups=[{"lr": 0.1}])
    return Snapshot(step=step, state=state, ema=ema, trainer=trainer or {}, plugins=("a 1.0",), config_digest="cd")


# --- saving ---------------------------------------------------------------------------------------------------------


class Counting(SingleRank):
    """Counts the bytes that a rank tells the others."""

    told = 0

    def all_gather_text(self, value: str) -> list[str]:
        self.told += len(value)
        return [value]


def test_what_ranks_hold_is_exchanged_once_and_not_at_every_save():
    many = {f"model/blocks.{number}.attention.weight": torch.ones(2, 2) for number in range(1000)}
    told = []
    for tensors in (many, many, many | {"model/blocks.0.attention.weight": torch.ones(3, 2)}):
        ranks = Counting()
        division = plan_on_all_ranks(ranks, tensors)
        told.append(ranks.told)
        assert {name: chunk.shape for name, chunk in division.mine.items()} == {n: tuple(t.shape) for n, t in tensors.items()}
        assert division.sizes["model/blocks.0.attention.weight"] == tensors["model/blocks.0.attention.weight"].nbytes
    assert told[1] < 200 < told[0] < 20_000
    assert told[2] > 200


def test_every_type_and_shape_comes_back_bit_for_bit(tmp_path):
    random = torch.Generator().manual_seed(0)
    tensors = {
        str(dtype): torch.randint(0, 2, (3, 5), generator=random).to(dtype) if dtype != torch.bool else torch.eye(3) > 0
        for dtype in NAMES
    }
    base = torch.randn(4, 6, generator=random)
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.T,
        "view": base[1:3, ::2],
        "channels last": torch.randn(2, 3, 4, 4, generator=random).to(memory_format=torch.channels_last),
        "alias": base,
        "odd/name with spaces.ü": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    path = save(tmp_path, snapshot(**tensors), ALONE).path
    fresh = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    load(path, snapshot(**fresh), ALONE)
    wrong = [name for name, tensor in tensors.items() if not torch.equal(raw(tensor), raw(fresh[name]))]
    assert wrong == []


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_the_tensor_files_are_plain_safetensors(tmp_path):
    weight = torch.randn(3, 4)
    path = save(tmp_path, snapshot(weight=weight), ALONE).path
    (file,) = (path / "model").iterdir()
    assert torch.equal(load_file(file)["weight"], weight)


def test_a_checkpoint_consists_of_what_its_manifest_lists(tmp_path):
    moments = {"w": {"exp_avg": torch.ones(2), "step": torch.tensor(1.0)}}
    done = save(tmp_path, snapshot(moments=moments, ema={"w": torch.ones(2)}, w=torch.ones(2)), ALONE)
    manifest = read_manifest(done.path)
    assert sorted(manifest.files) == [
        "ema/rank-00000-part-00000.safetensors",
        "model/rank-00000-part-00000.safetensors",
        "optimizer/rank-00000-part-00000.safetensors",
        "state.json",
    ]
    assert (manifest.plugins, manifest.config_digest, manifest.size) == (("a 1.0",), "cd", done.size)


def test_the_same_state_gives_the_same_bytes(tmp_path):
    state = snapshot(**{str(number): torch.full((3,), float(number)) for number in range(9)})
    first, second = (save(tmp_path / name, state, ALONE) for name in "ab")
    assert read_manifest(first.path).files == read_manifest(second.path).files


def test_a_large_state_is_split_into_files_that_are_written_side_by_side(tmp_path):
    big = {str(number): torch.full((6 * 2**20,), float(number)) for number in range(4)}
    path = save(tmp_path, snapshot(**big), ALONE).path
    fresh = {name: torch.zeros_like(tensor) for name, tensor in big.items()}
    load(path, snapshot(**fresh), ALONE)
    assert len(list((path / "model").iterdir())) == 2
    assert all(torch.equal(big[name], fresh[name]) for name in big)


def test_saving_again_what_is_there_returns_it(tmp_path):
    first = save(tmp_path, snapshot(w=torch.ones(2)), ALONE)
    assert save(tmp_path, snapshot(w=torch.ones(2)), ALONE).path == first.path


def test_saving_a_step_again_in_another_state_keeps_both_and_the_new_one_counts(tmp_path):
    save(tmp_path, snapshot(w=torch.ones(2)), ALONE)
    second = save(tmp_path, snapshot(w=torch.zeros(2)), ALONE)
    assert (second.path.name, CheckpointStore(tmp_path).latest()) == ("step-00000001.2", second.path)


# --- saves that fail ------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_older_checkpoints_and_nothing_else(tmp_path):
    old = save(tmp_path, snapshot(1, w=torch.ones(2)), ALONE)
    with files_limited_to(100_000), pytest.raises(SaveError, match="cannot save step 2") as caught:
        save(tmp_path, snapshot(2, small=torch.ones(5), w=torch.ones(100_000)), ALONE)
    assert (caught.value.errno, caught.value.exit_code) == (errno.EFBIG, ExitCode.FAILED)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", old.path.name}
    assert verify(old.path).ok


def test_a_file_that_fails_among_others_fails_the_save(tmp_path):
    big = {str(number): torch.zeros(5 * 2**20) for number in range(8)} | {"a": torch.zeros(30 * 2**20, dtype=torch.uint8)}
    with files_limited_to(50 * 2**20), pytest.raises(SaveError, match="File too large"):
        save(tmp_path, snapshot(**big), ALONE)


def test_a_trainer_state_that_is_no_json_fails_the_save_as_the_defect_it_is(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        save(tmp_path, snapshot(trainer={"loss": float("nan")}, w=torch.ones(2)), ALONE)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_tensor_without_contents_fails_the_save(tmp_path):
    with pytest.raises(NotImplementedError):
        save(tmp_path, snapshot(w=torch.ones(2, device="meta")), ALONE)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_type_that_the_format_lacks_is_named(tmp_path):
    with pytest.raises(SaveError, match=r"model/w is of type torch.complex128"):
        save(tmp_path, snapshot(w=torch.ones(2, dtype=torch.complex128)), ALONE)


# --- loading --------------------------------------------------------------------------------------------------------


def test_what_the_trainer_gave_comes_back(tmp_path):
    path = save(tmp_path, snapshot(trainer={"position": 12, "rate": 0.1}, w=torch.ones(2)), ALONE).path
    assert load(path, snapshot(w=torch.zeros(2)), ALONE).trainer == {"position": 12, "rate": 0.1}


def test_damage_is_found_before_any_tensor_is_touched(tmp_path):
    path = save(tmp_path, snapshot(w=torch.ones(2)), ALONE).path
    (file,) = (path / "model").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    target = torch.zeros(2)
    with pytest.raises(CheckpointError, match="does not match its digest"):
        load(path, snapshot(w=target), ALONE)
    assert target.tolist() == [0, 0]


def test_a_checkpoint_of_another_model_says_what_differs_and_how_much(tmp_path):
    path = save(
        tmp_path,
        snapshot(a=torch.ones(2), b=torch.ones(3), c=torch.ones(1), **{f"old{n}": torch.ones(1) for n in range(5)}),
        ALONE,
    ).path
    with pytest.raises(CheckpointError) as caught:
        load(path, snapshot(a=torch.ones(2), b=torch.ones(4), c=torch.ones(1).half(), new=torch.ones(1)), ALONE)
    assert "1 missing from the checkpoint (new)" in caught.value.message
    assert "5 unknown to this run (old0, old1, old2, ...)" in caught.value.message
    assert "1 of another shape (b [3] for [4])" in caught.value.message
    assert "1 of a type that would lose precision (c F32 for torch.float16)" in caught.value.message


def test_half_precision_may_be_loaded_into_full_precision(tmp_path):
    weight = torch.randn(5).bfloat16()
    path = save(tmp_path, snapshot(w=weight), ALONE).path
    target = torch.zeros(5)
    load(path, snapshot(w=target), ALONE)
    assert torch.equal(target, weight.float())


def adam(**tensors):
    return {"w": {"exp_avg": torch.full((2,), 5.0), "step": torch.tensor(3.0), **tensors}}


def test_a_fresh_optimizer_gets_the_moments_that_were_saved(tmp_path):
    path = save(tmp_path, snapshot(optimizer="AdamW", moments=adam(), w=torch.ones(2)), ALONE).path
    target = snapshot(optimizer="AdamW", w=torch.zeros(2))
    assert load(path, target, ALONE).optimizer_state
    assert {name: value.tolist() for name, value in target.state.optimizer_state["w"].items()} == {"exp_avg": [5, 5], "step": 3}


def test_what_was_saved_before_the_first_step_has_no_moments_when_loaded(tmp_path):
    path = save(tmp_path, snapshot(optimizer="AdamW", w=torch.ones(2)), ALONE).path
    target = snapshot(optimizer="AdamW", moments=adam(), w=torch.zeros(2))
    load(path, target, ALONE)
    assert target.state.optimizer_state == {}


def test_another_optimizer_starts_afresh_and_says_so(tmp_path):
    path = save(tmp_path, snapshot(optimizer="AdamW", moments=adam(), w=torch.ones(2)), ALONE).path
    target = snapshot(optimizer="Muon", w=torch.zeros(2))
    target.state.param_groups = [{"lr": 0.9}]
    loaded = load(path, target, ALONE)
    assert (loaded.optimizer_state, target.state.optimizer_state, target.state.param_groups) == (False, {}, [{"lr": 0.9}])
    assert loaded.notices == (
        "the optimizer starts with an empty state: the checkpoint has the state of AdamW, this run uses Muon",
    )


def test_a_moment_that_is_missing_among_others_is_an_error(tmp_path):
    path = save(tmp_path, snapshot(optimizer="AdamW", moments=adam(), w=torch.ones(2)), ALONE).path
    target = snapshot(optimizer="AdamW", moments=adam(exp_avg_sq=torch.ones(2)), w=torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"of the optimizer tensors, 1 missing from the checkpoint \(w.exp_avg_sq\)"):
        load(path, target, ALONE)


@pytest.mark.parametrize("key", ["step", "exp_avg_sq"])
def test_a_count_or_a_mean_of_squares_that_is_negative_is_refused(tmp_path, key):
    moments = {"exp_avg_sq": torch.ones(3), "step": torch.tensor(5.0)}
    moments[key] = moments[key] - 100
    path = save(tmp_path, snapshot(optimizer="AdamW", moments={"w": moments}, w=torch.ones(3)), ALONE).path
    with pytest.raises(CheckpointError, match=rf"{key} of w in the optimizer state is negative"):
        load(path, snapshot(optimizer="AdamW", w=torch.zeros(3)), ALONE)


def test_a_parameter_group_without_settings_is_refused(tmp_path):
    state = snapshot(optimizer="AdamW", moments=adam(), w=torch.ones(2))
    state.state.param_groups = [{}]
    path = save(tmp_path, state, ALONE).path
    with pytest.raises(CheckpointError, match="the optimizer state has no settings"):
        load(path, snapshot(optimizer="AdamW", w=torch.zeros(2)), ALONE)


def test_a_moment_of_an_unknown_parameter_is_an_error(tmp_path):
    moments = adam() | {"gone": {"exp_avg": torch.ones(2)}}
    path = save(tmp_path, snapshot(optimizer="AdamW", moments=moments, w=torch.ones(2)), ALONE).path
    with pytest.raises(CheckpointError, match=r"optimizer has gone\.exp_avg, but the model has no gone"):
        load(path, snapshot(optimizer="AdamW", w=torch.zeros(2)), ALONE)


def test_averages_are_loaded_where_both_have_them_and_told_of_where_not(tmp_path):
    path = save(tmp_path, snapshot(ema={"w": torch.full((2,), 7.0)}, w=torch.ones(2)), ALONE).path
    bare = save(tmp_path, snapshot(2, w=torch.ones(2)), ALONE).path
    target = snapshot(ema={"w": torch.zeros(2)}, w=torch.zeros(2))
    assert load(path, target, ALONE).ema
    assert target.ema["w"].tolist() == [7, 7]
    assert "does not use" in load(path, snapshot(w=torch.zeros(2)), ALONE).notices[0]
    assert "has no EMA weights" in load(bare, target, ALONE).notices[0]


def test_a_state_of_another_form_is_refused(tmp_path):
    path = save(tmp_path, snapshot(w=torch.ones(2)), ALONE).path
    (path / "state.json").write_text(json.dumps({"trainer": []}))
    with pytest.raises(CheckpointError, match=r"state\.json is malformed"):
        load(path, snapshot(w=torch.zeros(2)), ALONE, verified=True)


# --- who writes what ------------------------------------------------------------------------------------------------


def chunk(elements, offset=0):
    return Chunk(dtype="F32", shape=(elements,), offsets=(offset,))


@given(
    replicated=st.lists(st.integers(0, 50), max_size=20),
    shards=st.integers(1, 5).flatmap(
        lambda ranks: st.lists(st.lists(st.integers(1, 50), min_size=ranks, max_size=ranks), min_size=1, max_size=4)
    ),
)
def test_every_piece_is_written_once_and_replicas_even_out_the_load(replicated, shards):
    held = [
        {f"replica {number}": chunk(size) for number, size in enumerate(replicated)}
        | {f"shard {number}": chunk(sizes[rank], sum(sizes[:rank])) for number, sizes in enumerate(shards)}
        for rank in range(len(shards[0]))
    ]
    writes = divide(held)
    written = sorted((name, held[rank][name].offsets) for rank, names in enumerate(writes) for name in names)
    assert written == sorted({(name, p.offsets) for chunks in held for name, p in chunks.items()})
    loads = [sum(held[rank][name].size for name in names) for rank, names in enumerate(writes)]
    for rank, names in enumerate(writes):
        replicas = [held[rank][name].size for name in names if name.startswith("replica")]
        assert not replicas or loads[rank] - min(replicas) <= min(loads)


def test_a_tensor_that_the_ranks_do_not_hold_whole_is_refused():
    held = [{"w": chunk(4)}, {"w": chunk(2, offset=6)}]
    with pytest.raises(CheckpointError, match="chunks of w do not fill it"):
        check_complete(held, {"w": torch.ones(8)})


def test_a_tensor_whose_end_nobody_holds_is_refused():
    with pytest.raises(CheckpointError, match="do not hold all of w"):
        check_complete([{"w": chunk(4)}], {"w": torch.ones(8)})
